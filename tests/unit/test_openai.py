# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import typing as t

import pytest
from openai_server import ANSWERS, REASONING, FakeServer
from ops.http import Client, HttpError, Response
from ops.openai import MAX_TEXT, chat, served_models

TOWER = {"messages": [{"role": "user", "content": "Which tower?"}], "max_tokens": 64}
TOOL = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bytewise", [False, True])
def test_text_survives_any_cut(stream: bool, bytewise: bool) -> None:
    with FakeServer() as fake:
        fake.bytewise = bytewise
        answer = chat(Client(fake.base_url), TOWER, stream)
    assert answer.text == ANSWERS["tower"]
    assert answer.finish_reason == "stop"
    assert answer.usage and answer.usage["prompt_tokens"] == 12
    assert (answer.ttft_s is not None) == stream
    assert answer.total_s >= (answer.ttft_s or 0)
    assert answer.chunks > 5 if stream else answer.chunks == 1


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_kept_apart(stream: bool) -> None:
    with FakeServer() as fake:
        answer = chat(Client(fake.base_url), {**TOWER, "chat_template_kwargs": {"thinking": True}}, stream)
    assert (answer.text, answer.reasoning) == (ANSWERS["tower"], REASONING)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_put_together(stream: bool) -> None:
    with FakeServer() as fake:
        answer = chat(Client(fake.base_url), TOOL, stream)
    assert answer.tool_calls == ({"name": "weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},)
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fault", "stream", "kind", "words"),
    [
        ("truncated_stream", True, "truncated", "ended inside the answer"),
        ("no_end_marker", True, "truncated", r"without \[DONE\]"),
        ("error_in_stream", True, "body", "status 200 with an error object"),
        ("error_object", False, "body", "status 200 with an error object"),
        ("error_object", True, "truncated", "without"),
        ("not_json", False, "body", "not JSON"),
        ("not_json", True, "truncated", "without"),
        ("refused", False, "status", "status 401"),
        ("overloaded", True, "status", "status 503"),
        ("hang", False, "timeout", "no complete answer"),
        ("hang", True, "timeout", "no complete answer"),
        ("slow_trickle", True, "timeout", "no complete answer"),
    ],
)
def test_faults_of_the_transport(fault: str, stream: bool, kind: str, words: str) -> None:
    payload: dict[str, t.Any] = {"messages": [{"role": "user", "content": "capital of France"}]}
    with FakeServer(fault) as fake, pytest.raises(HttpError, match=words) as caught:
        chat(Client(fake.base_url), payload, stream, timeout=0.6)
    assert caught.value.kind == kind
    assert "/v1/chat/completions" in caught.value.url


@pytest.mark.parametrize(
    "answer", [[], "text", {"choices": []}, {"choices": [{}]}, {"choices": [{"message": None}]}, {"choices": None}]
)
def test_an_answer_of_another_shape(monkeypatch: pytest.MonkeyPatch, answer: t.Any) -> None:
    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "post_json", lambda *_args: answer)
    with pytest.raises(HttpError) as caught:
        chat(client, TOWER)
    assert caught.value.kind == "body"


@pytest.mark.parametrize("event", ["[1]", "{", '{"choices": [1]}', '{"choices": [{"delta": {"tool_calls": [7]}}]}'])
def test_an_event_of_another_shape(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "post_sse", lambda *_args: iter([event, "[DONE]"]))
    with pytest.raises(HttpError) as caught:
        chat(client, TOWER, stream=True)
    assert caught.value.kind == "body"


HALF = "\ud83d"
STRANGE: list[tuple[dict[str, t.Any], str]] = [
    ({"content": [{"type": "text", "text": "Paris"}]}, "content of type list, wanted text"),
    ({"content": 391}, "content of type int, wanted text"),
    ({"reasoning_content": {"a": 1}}, "reasoning of type dict, wanted text"),
    ({"tool_calls": "abc"}, "tool_calls of type str, wanted a list"),
    ({"tool_calls": [{"function": {"name": "a", "arguments": {"b": 1}}}]}, "arguments of type dict, wanted text"),
    ({"tool_calls": [{"function": {"name": 5}}]}, "a tool's name of type int, wanted text"),
    ({"content": "a" * (MAX_TEXT + 1)}, f"longer than {MAX_TEXT} characters"),
    ({"content": f"Paris {HALF}"}, "half a character"),
    ({"content": "x", "deep": [[]]}, "nested too deeply"),
    ({"content": "x", "count": float("nan")}, "NaN is no JSON number"),
]


class Said:
    """A client whose server sent this text, as far as it goes through Client's own parsing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, token: str | None = None) -> None:
        self.client = Client("http://127.0.0.1:1", token)
        response = Response(200, {}, text.encode(), 0.1)
        monkeypatch.setattr(self.client, "_whole", lambda *_args: response)
        monkeypatch.setattr(self.client, "post_sse", lambda *_args: iter([*text.split("\n"), "[DONE]"]))


@pytest.mark.parametrize(("message", "words"), STRANGE, ids=[words for _message, words in STRANGE])
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_protocol_does_not_know_is_named(
    monkeypatch: pytest.MonkeyPatch, message: dict[str, t.Any], words: str, stream: bool
) -> None:
    text = json.dumps({"choices": [{"delta" if stream else "message": message}]})
    said = Said(monkeypatch, text.replace("[[]]", "[" * 500 + "]" * 500))
    with pytest.raises(HttpError, match=words) as caught:
        chat(said.client, TOWER, stream)
    assert caught.value.kind == "body"
    assert len(caught.value.body) <= 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [[1, 2], "3", 5])
def test_usage_of_another_type(monkeypatch: pytest.MonkeyPatch, usage: t.Any, stream: bool) -> None:
    choice = {"delta" if stream else "message": {"content": "x"}}
    said = Said(monkeypatch, json.dumps({"choices": [choice], "usage": usage}))
    with pytest.raises(HttpError, match=f"usage of type {type(usage).__name__}"):
        chat(said.client, TOWER, stream)


@pytest.mark.parametrize("index", ['"abc"', "1e999", "-1", "true", "100000"])
def test_a_tool_call_of_no_number(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    said = Said(monkeypatch, '{"choices": [{"delta": {"tool_calls": [{"index": INDEX}]}}]}'.replace("INDEX", index))
    with pytest.raises(HttpError, match="a tool call of index"):
        chat(said.client, TOWER, True)


def test_a_whole_number_as_float_is_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, '{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 16.0}}')
    usage = chat(said.client, TOWER).usage
    assert usage and (usage["prompt_tokens"], type(usage["prompt_tokens"])) == (16, int)


@pytest.mark.parametrize("stream", [False, True])
def test_only_counts_are_kept_of_usage(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    choice = {"delta" if stream else "message": {"content": "x"}}
    usage = {"prompt_tokens": 12, "completion_tokens": "many", "total_tokens": True, "x": "y" * 10**6, "z": 5}
    said = Said(monkeypatch, json.dumps({"choices": [choice], "usage": usage}))
    assert chat(said.client, TOWER, stream).usage == {"prompt_tokens": 12}


PIECE = {"index": 0, "delta": {"content": "Par"}}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([[PIECE, PIECE]], "2 choices"),
        ([[PIECE], [{**PIECE, "index": 1}]], "a choice of index 1"),
        ([[{**PIECE, "finish_reason": "stop"}], [PIECE]], "goes on after its finish_reason 'stop'"),
        (
            [[{**PIECE, "finish_reason": "stop"}], [{"delta": {"tool_calls": [{"function": {"name": "a"}}]}}]],
            "goes on after its finish_reason 'stop'",
        ),
        ([[{**PIECE, "finish_reason": "length"}], [{"delta": {}, "finish_reason": "stop"}]], "'stop' after 'length'"),
    ],
)
def test_a_stream_of_another_shape(monkeypatch: pytest.MonkeyPatch, choices: list[t.Any], words: str) -> None:
    said = Said(monkeypatch, "\n".join(json.dumps({"choices": one}) for one in choices))
    with pytest.raises(HttpError, match=words) as caught:
        chat(said.client, TOWER, True)
    assert caught.value.kind == "body"


def test_nothing_may_follow_the_end_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [{"delta": {"content": ""}, "finish_reason": "stop"}, {"delta": {}, "finish_reason": "stop"}]
    said = Said(monkeypatch, "\n".join(json.dumps({"choices": [one]}) for one in [PIECE, *ends]))
    assert chat(said.client, TOWER, True).text == "Par"


def test_names_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, json.dumps({"choices": [{"message": {"content": "x"}, "finish_reason": "f" * 10**6}]}))
    assert chat(said.client, TOWER).finish_reason == "f" * 200


def test_space_is_no_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in (" ", "\n")]
    assert chat(Said(monkeypatch, "\n".join(events)).client, TOWER, True).ttft_s is None
    events.append('{"choices": [{"delta": {"content": "x"}}]}')
    assert chat(Said(monkeypatch, "\n".join(events)).client, TOWER, True).ttft_s is not None


def test_a_key_in_pieces_is_never_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in ("Key sk-", "secret-and-long", "!")]
    answer = chat(Said(monkeypatch, "\n".join(events), "sk-secret-and-long").client, TOWER, True)
    assert answer.text == "Key ***!"


@pytest.mark.parametrize("field", ["content", "reasoning_content", "arguments"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_key_in_numbers_of_its_characters_is_never_in_an_answer(
    monkeypatch: pytest.MonkeyPatch, field: str, stream: bool
) -> None:
    message: dict[str, t.Any] = {field: "Key KEY!"}
    if field == "arguments":
        message = {"tool_calls": [{"function": {"name": "a", **message}}]}
    text = json.dumps({"choices": [{"delta" if stream else "message": message}]})
    text = text.replace("KEY", "".join(f"\\u{ord(one):04x}" for one in "sk-secret-and-long"))
    answer = chat(Said(monkeypatch, text, "sk-secret-and-long").client, TOWER, stream)
    assert "Key ***!" in (answer.text, answer.reasoning, *(call["arguments"] for call in answer.tool_calls))


def test_a_stream_that_breaks_off_inside_the_key_is_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, '{"choices": [{"delta": {"content": "Key sk-secret-an"}}]}', "sk-secret-and-long")
    event = next(iter(said.client.post_sse("/", None)))
    monkeypatch.setattr(said.client, "post_sse", lambda *_args: iter([event]))
    with pytest.raises(HttpError, match="without") as caught:
        chat(said.client, TOWER, True)
    assert caught.value.body == "Key ***"


def test_served_models() -> None:
    with FakeServer("wrong_model") as fake:
        assert served_models(Client(fake.base_url)) == ["other-model"]


def test_served_models_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "get_json", lambda *_args: {"data": [1]})
    with pytest.raises(HttpError, match="lists no models"):
        served_models(client)
