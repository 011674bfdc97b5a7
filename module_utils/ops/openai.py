# SPDX-License-Identifier: GPL-3.0-or-later
"""One call of an OpenAI-compatible /v1/chat/completions, streamed or not, as one dataclass.

What a server sends is checked here and nowhere else: a value of another type, a text without end or half a character
is an HttpError that names it, so that what compares answers meets only what ChatAnswer promises.
"""

from __future__ import annotations

import json
import time
import typing as t
from dataclasses import dataclass, field

from .http import STREAM_END, Client, HttpError, parse_json

CHAT_PATH = "/v1/chat/completions"
# Longer texts are not compared, in characters; names are cut.
MAX_TEXT = 200_000
MAX_NAME = 200
MAX_CALLS = 128
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass(frozen=True)
class ChatAnswer:
    """What the server answered.

    text is the content, reasoning what a reasoning parser separated from it. usage is the server's own token count,
    None when it sent none. ttft_s is the time to the first content or reasoning that is more than space, or tool call
    (streamed only), chunks the number of events that carried any, gap_s the longest silence from the first of them to
    the end. call_ids are the ids of the tool calls, empty for a call without one. matched_stop is the text that ended
    the answer, where the server names one.
    """

    text: str
    reasoning: str
    finish_reason: str | None
    usage: dict[str, int] | None
    model: str | None
    tool_calls: tuple[dict[str, t.Any], ...]
    ttft_s: float | None
    total_s: float
    chunks: int
    gap_s: float | None = None
    call_ids: tuple[str, ...] = ()
    matched_stop: str = ""


def chat(client: Client, payload: dict[str, t.Any], stream: bool = False, timeout: float | None = None) -> ChatAnswer:
    """Send one request. Raises HttpError, also for an error object in a 200 answer and for a stream that ends early."""
    return _streamed(client, payload, timeout) if stream else _whole(client, payload, timeout)


class _Unusable(ValueError):
    """A value that the protocol does not know. The text names it."""


def served_models(client: Client, timeout: float | None = None) -> list[str]:
    """The model names that the server lists."""
    start = time.monotonic()
    answer = client.get_json("/v1/models", timeout)
    try:
        return [_name(entry["id"], "an id") or "" for entry in _list(answer["data"], "data")]
    except (KeyError, TypeError, _Unusable):
        raise _body_error(client, "GET", "/v1/models", "the answer lists no models", start, answer) from None


def _whole(client: Client, payload: dict[str, t.Any], timeout: float | None) -> ChatAnswer:
    start = time.monotonic()
    answer = client.post_json(CHAT_PATH, {**payload, "stream": False}, timeout)
    _refuse_error_object(client, answer, start)
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text, reasoning = _text(message.get("content"), "content"), _text(message.get("reasoning_content"), "reasoning")
        listed = _list(message.get("tool_calls"), "tool_calls")
        calls = tuple(map(_function, listed))
        _bounded(len(text) + len(reasoning) + sum(len(call["arguments"]) for call in calls))
        return ChatAnswer(
            text=client.readable(text),
            reasoning=client.readable(reasoning),
            finish_reason=_name(choice.get("finish_reason"), "finish_reason"),
            usage=_usage(answer.get("usage")),
            model=_name(answer.get("model"), "model"),
            tool_calls=tuple({**call, "arguments": client.readable(call["arguments"])} for call in calls),
            ttft_s=None,
            total_s=time.monotonic() - start,
            chunks=1,
            call_ids=tuple(_name(call.get("id"), "a call's id") or "" for call in listed),
            matched_stop=_matched(choice),
        )
    except _Unusable as error:
        raise _body_error(client, "POST", CHAT_PATH, str(error), start, answer) from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _body_error(client, "POST", CHAT_PATH, "the answer has no choice with a message", start, answer) from None


def _streamed(client: Client, payload: dict[str, t.Any], timeout: float | None) -> ChatAnswer:
    start = time.monotonic()
    state = _Stream()
    request = {**payload, "stream": True, "stream_options": {"include_usage": True}}
    for data in client.post_sse(CHAT_PATH, request, timeout):
        if data.strip() == STREAM_END:
            return state.answer(client, time.monotonic() - start)
        try:
            event = parse_json(data)
        except ValueError as error:
            raise _body_error(client, "POST", CHAT_PATH, f"an event is not JSON: {error}", start, data) from None
        _refuse_error_object(client, event, start)
        try:
            state.add(event, time.monotonic() - start)
        except _Unusable as error:
            raise _body_error(client, "POST", CHAT_PATH, str(error), start, event) from None
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _body_error(client, "POST", CHAT_PATH, "an event has an unknown shape", start, event) from None
    raise HttpError(
        "truncated",
        "POST",
        client.base_url + CHAT_PATH,
        f"the stream ended without {STREAM_END} after {state.chunks} chunks",
        time.monotonic() - start,
        200,
        client.cut(state.text())[-100:],
    )


@dataclass
class _Stream:
    """A streamed answer while it arrives."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: dict[int, dict[str, t.Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    model: str | None = None
    ttft_s: float | None = None
    last_s: float | None = None
    gap_s: float = 0.0
    matched_stop: str = ""
    chunks: int = 0
    size: int = 0

    def add(self, event: dict[str, t.Any], elapsed_s: float) -> None:
        self.model = self.model or _name(event.get("model"), "model")
        self.usage = _usage(event.get("usage")) or self.usage
        choices = _list(event.get("choices"), "choices")
        if len(choices) > 1:
            raise _Unusable(f"an event has {len(choices)} choices, asked was for one")
        for choice in choices:
            if choice.get("index") not in (None, 0):
                raise _Unusable(f"an event has a choice of index {str(choice['index'])[:MAX_NAME]}, asked was for one")
            delta = choice.get("delta") or {}
            content = _text(delta.get("content"), "content")
            reasoning = _text(delta.get("reasoning_content"), "reasoning")
            calls = _list(delta.get("tool_calls"), "tool_calls")
            if content or reasoning or calls:
                if self.finish_reason and (content.strip() or reasoning.strip() or calls):
                    raise _Unusable(f"the stream goes on after its finish_reason {self.finish_reason!r}")
                self.chunks += 1
                self._heard(elapsed_s)
            if self.ttft_s is None and (content.strip() or reasoning.strip() or calls):
                self.ttft_s = elapsed_s
            self._count(len(content) + len(reasoning))
            self.content.append(content)
            self.reasoning.append(reasoning)
            for call in calls:
                self._add_call(call)
            self._end(_name(choice.get("finish_reason"), "finish_reason"))
            self.matched_stop = _matched(choice) or self.matched_stop

    def _end(self, reason: str | None) -> None:
        if reason and self.finish_reason not in (None, reason):
            raise _Unusable(f"the stream has the finish_reason {reason!r} after {self.finish_reason!r}")
        self.finish_reason = reason or self.finish_reason

    def _heard(self, elapsed_s: float) -> None:
        if self.last_s is not None:
            self.gap_s = max(self.gap_s, elapsed_s - self.last_s)
        self.last_s = elapsed_s

    def _add_call(self, call: dict[str, t.Any]) -> None:
        index = call.get("index") or 0
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < MAX_CALLS:
            raise _Unusable(f"the answer has a tool call of index {str(index)[:MAX_NAME]!r}, wanted a number")
        known = self.tools.setdefault(index, {"name": "", "arguments": [], "id": ""})
        piece = _function(call)
        known["name"] = known["name"] or piece["name"]
        known["id"] = known["id"] or _name(call.get("id"), "a call's id") or ""
        known["arguments"].append(piece["arguments"])
        self._count(len(piece["arguments"]))

    def _count(self, characters: int) -> None:
        self.size += characters
        _bounded(self.size)

    def text(self) -> str:
        return "".join(self.content)

    def answer(self, client: Client, total_s: float) -> ChatAnswer:
        """The whole answer; a key that came in pieces is found only here."""
        calls = [self.tools[index] for index in sorted(self.tools)]
        if self.last_s is not None:
            self._heard(total_s)
        return ChatAnswer(
            text=client.readable(self.text()),
            reasoning=client.readable("".join(self.reasoning)),
            finish_reason=self.finish_reason,
            usage=self.usage,
            model=self.model,
            tool_calls=tuple(
                {"name": call["name"], "arguments": client.readable("".join(call["arguments"]))} for call in calls
            ),
            ttft_s=self.ttft_s,
            total_s=total_s,
            chunks=self.chunks,
            gap_s=self.gap_s if self.chunks else None,
            call_ids=tuple(call["id"] for call in calls),
            matched_stop=self.matched_stop,
        )


def _matched(choice: dict[str, t.Any]) -> str:
    """The stop text of an answer; the number of a stop token is none."""
    matched = choice.get("matched_stop")
    return matched[:MAX_NAME] if isinstance(matched, str) else ""


def _function(call: dict[str, t.Any]) -> dict[str, t.Any]:
    """Name and arguments (JSON text) of a tool call."""
    function = call.get("function") or {}
    return {
        "name": _name(function.get("name"), "a tool's name") or "",
        "arguments": _text(function.get("arguments"), "arguments"),
    }


def _text(value: t.Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _Unusable(f"the answer has {where} of type {type(value).__name__}, wanted text")
    return value


def _bounded(characters: int) -> None:
    if characters > MAX_TEXT:
        raise _Unusable(f"the answer is longer than {MAX_TEXT} characters")


def _name(value: t.Any, where: str) -> str | None:
    """A short text, cut; None stays None."""
    return None if value is None else _text(value, where)[:MAX_NAME]


def _list(value: t.Any, where: str) -> list[t.Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Unusable(f"the answer has {where} of type {type(value).__name__}, wanted a list")
    return value


def _usage(value: t.Any) -> dict[str, int] | None:
    """The token counts; 16.0 is 16. What is no count is left out, and so are names that nobody asks for."""
    if value is not None and not isinstance(value, dict):
        raise _Unusable(f"the answer has usage of type {type(value).__name__}, wanted an object")
    if value is None:
        return None
    counts = {name: value.get(name) for name in COUNTS}
    return {name: int(count) for name, count in counts.items() if _is_whole(count)}


def _is_whole(value: t.Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _refuse_error_object(client: Client, answer: t.Any, start: float) -> None:
    if not isinstance(answer, dict):
        raise _body_error(client, "POST", CHAT_PATH, "the answer is no JSON object", start, answer)
    if answer.get("error") or answer.get("object") == "error":
        raise _body_error(client, "POST", CHAT_PATH, "status 200 with an error object", start, answer)


def _body_error(client: Client, method: str, path: str, detail: str, start: float, body: t.Any) -> HttpError:
    text = client.redacted(body if isinstance(body, str) else json.dumps(body))
    return HttpError("body", method, client.base_url + path, detail, time.monotonic() - start, 200, text[:200])
