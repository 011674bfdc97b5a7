# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest
from openai_server import ANSWERS, REASONING, FakeServer
from ops.http import Client, HttpError
from ops.openai import chat, served_models

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


def test_served_models() -> None:
    with FakeServer("wrong_model") as fake:
        assert served_models(Client(fake.base_url)) == ["other-model"]


def test_served_models_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "get_json", lambda *_args: {"data": [1]})
    with pytest.raises(HttpError, match="lists no models"):
        served_models(client)
