# SPDX-License-Identifier: GPL-3.0-or-later
"""One call of an OpenAI-compatible /v1/chat/completions, streamed or not, as one dataclass."""

from __future__ import annotations

import json
import time
import typing as t
from dataclasses import dataclass, field

from .http import Client, HttpError

CHAT_PATH = "/v1/chat/completions"
STREAM_END = "[DONE]"


@dataclass(frozen=True)
class ChatAnswer:
    """What the server answered.

    text is the content, reasoning what a reasoning parser separated from it. usage is the server's own token count,
    None when it sent none. ttft_s is the time to the first content, reasoning or tool call (streamed only), chunks the
    number of events that carried any.
    """

    text: str
    reasoning: str
    finish_reason: str | None
    usage: dict[str, t.Any] | None
    model: str | None
    tool_calls: tuple[dict[str, t.Any], ...]
    ttft_s: float | None
    total_s: float
    chunks: int


def chat(client: Client, payload: dict[str, t.Any], stream: bool = False, timeout: float | None = None) -> ChatAnswer:
    """Send one request. Raises HttpError, also for an error object in a 200 answer and for a stream that ends early."""
    return _streamed(client, payload, timeout) if stream else _whole(client, payload, timeout)


def served_models(client: Client, timeout: float | None = None) -> list[str]:
    """The model names that the server lists."""
    start = time.monotonic()
    answer = client.get_json("/v1/models", timeout)
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (KeyError, TypeError):
        raise _body_error(client, "GET", "/v1/models", "the answer lists no models", start, answer) from None


def _whole(client: Client, payload: dict[str, t.Any], timeout: float | None) -> ChatAnswer:
    start = time.monotonic()
    answer = client.post_json(CHAT_PATH, {**payload, "stream": False}, timeout)
    _refuse_error_object(client, answer, start)
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        return ChatAnswer(
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            finish_reason=choice.get("finish_reason"),
            usage=answer.get("usage"),
            model=answer.get("model"),
            tool_calls=tuple(_function(call) for call in message.get("tool_calls") or ()),
            ttft_s=None,
            total_s=time.monotonic() - start,
            chunks=1,
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _body_error(client, "POST", CHAT_PATH, "the answer has no choice with a message", start, answer) from None


def _streamed(client: Client, payload: dict[str, t.Any], timeout: float | None) -> ChatAnswer:
    start = time.monotonic()
    state = _Stream()
    request = {**payload, "stream": True, "stream_options": {"include_usage": True}}
    for data in client.post_sse(CHAT_PATH, request, timeout):
        if data == STREAM_END:
            return state.answer(time.monotonic() - start)
        try:
            event = json.loads(data)
        except ValueError:
            raise _body_error(client, "POST", CHAT_PATH, "an event is not JSON", start, data) from None
        _refuse_error_object(client, event, start)
        try:
            state.add(event, time.monotonic() - start)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _body_error(client, "POST", CHAT_PATH, "an event has an unknown shape", start, event) from None
    raise HttpError(
        "truncated",
        "POST",
        client.base_url + CHAT_PATH,
        f"the stream ended without {STREAM_END} after {state.chunks} chunks",
        time.monotonic() - start,
        200,
        state.text()[-100:],
    )


@dataclass
class _Stream:
    """A streamed answer while it arrives."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: dict[int, dict[str, t.Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: dict[str, t.Any] | None = None
    model: str | None = None
    ttft_s: float | None = None
    chunks: int = 0

    def add(self, event: dict[str, t.Any], elapsed_s: float) -> None:
        self.model = self.model or event.get("model")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
            calls = delta.get("tool_calls") or ()
            if content or reasoning or calls:
                self.chunks += 1
                self.ttft_s = elapsed_s if self.ttft_s is None else self.ttft_s
            self.content.append(content)
            self.reasoning.append(reasoning)
            for call in calls:
                self._add_call(call)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _add_call(self, call: dict[str, t.Any]) -> None:
        known = self.tools.setdefault(int(call.get("index") or 0), {"name": "", "arguments": ""})
        piece = _function(call)
        known["name"] = known["name"] or piece["name"]
        known["arguments"] += piece["arguments"]

    def text(self) -> str:
        return "".join(self.content)

    def answer(self, total_s: float) -> ChatAnswer:
        return ChatAnswer(
            text=self.text(),
            reasoning="".join(self.reasoning),
            finish_reason=self.finish_reason,
            usage=self.usage,
            model=self.model,
            tool_calls=tuple(self.tools[index] for index in sorted(self.tools)),
            ttft_s=self.ttft_s,
            total_s=total_s,
            chunks=self.chunks,
        )


def _function(call: dict[str, t.Any]) -> dict[str, t.Any]:
    """Name and arguments (JSON text) of a tool call."""
    function = call.get("function") or {}
    return {"name": function.get("name") or "", "arguments": function.get("arguments") or ""}


def _refuse_error_object(client: Client, answer: t.Any, start: float) -> None:
    if not isinstance(answer, dict):
        raise _body_error(client, "POST", CHAT_PATH, "the answer is no JSON object", start, answer)
    if answer.get("error") or answer.get("object") == "error":
        raise _body_error(client, "POST", CHAT_PATH, "status 200 with an error object", start, answer)


def _body_error(client: Client, method: str, path: str, detail: str, start: float, body: t.Any) -> HttpError:
    text = body if isinstance(body, str) else json.dumps(body)
    return HttpError("body", method, client.base_url + path, detail, time.monotonic() - start, 200, text[:200])
