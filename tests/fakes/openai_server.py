# SPDX-License-Identifier: GPL-3.0-or-later
"""An OpenAI-compatible server with the shapes of SGLang 0.5.23 that misbehaves on request.

    python3 tests/fakes/openai_server.py --port 30001 --fault loop

Without a fault it is healthy and answers the questions in ANSWERS. Every fault is one way in which real servers were
seen to be wrong while /health said 200.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import typing as t
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "fake-model"

# Question (a part of the last user message) to answer.
ANSWERS = {
    "capital of France": "The capital of France is Paris.",
    "17*23": "391",
    "tower": "Das höchste Bauwerk in 東京 heißt 東京スカイツリー 🗼.",
    "as JSON": '{"capital": "Paris", "population_millions": 2.1}',
    "Hello": "Hello!",
}
TOOL_QUESTION = "weather"
REASONING = "The user asks for a fact. I know it."

FAULTS = {
    "none": "healthy",
    "empty": "the content is empty, everything else looks right",
    "only_reasoning": "the content is empty, the answer went into the reasoning",
    "loop": "a phrase repeats until max_tokens",
    "loop_then_stop": "the right answer, then a phrase repeats, then a regular end",
    "more_digits": "the wrong sum 3910 instead of 391",
    "digits_inside": "the wrong sum 1391 instead of 391",
    "denied": "the right word in a wrong sentence",
    "inside_word": "the right letters inside another word",
    "reasoning_leak": "the reasoning stands in the content, with its control token",
    "template_leak": "a control token of the chat template stands in the content",
    "truncated_stream": "a streamed answer breaks off in the middle",
    "no_end_marker": "a streamed answer ends without [DONE]",
    "stream_drops": "a streamed answer misses a piece that the whole one has",
    "error_text": "status 200 with an error message as content",
    "error_object": "status 200 with an error object instead of an answer",
    "error_in_stream": "an error object in the middle of a stream",
    "not_json": "status 200 with an HTML page",
    "refused": "status 401",
    "overloaded": "status 503 for every question",
    "hang": "no answer after the first --after questions",
    "slow_trickle": "a stream sends one byte now and then and never ends",
    "wrong_model": "another model is served",
    "no_usage": "the token counts are missing",
    "zero_usage": "the token counts are zero",
    "cut": "finish_reason is length although nothing asked for it",
    "aborted": "finish_reason is abort",
    "no_finish_reason": "finish_reason is missing",
    "tool_as_text": "a tool call comes as text in the content",
    "tool_wrong_arguments": "a tool call has other arguments than asked",
    "tool_broken_arguments": "a tool call has arguments that are no JSON",
    "not_ready": "the health endpoint says 503 for --start-seconds",
    "shallow_health": "health says 200, questions are answered 503",
    "metrics_frozen": "the counters on /metrics stand still",
}


class FakeServer:
    """The server on a free loopback port, as a context manager. base_url is its address."""

    def __init__(self, fault: str = "none", port: int = 0, after: int = 0, start_seconds: float = 0.0) -> None:
        if fault not in FAULTS:
            raise ValueError(f"fault is {fault!r}, known are {', '.join(FAULTS)}")
        self.fault = fault
        self.after = after
        self.start_seconds = start_seconds
        self.api_key: str | None = None
        self.started = time.monotonic()
        self.questions = 0
        self.tokens = 0
        self.seen_keys: list[str | None] = []
        self.bytewise = False
        self.released = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        self._http.daemon_threads = True
        self._http.fake = self  # type: ignore[attr-defined]
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()

    def serve(self) -> None:
        self._http.serve_forever()

    @property
    def starting(self) -> bool:
        return self.fault == "not_ready" and time.monotonic() - self.started < self.start_seconds


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: t.Any

    @property
    def fake(self) -> FakeServer:
        return self.server.fake

    def log_message(self, format: str, *args: t.Any) -> None:
        if self.fake.start_seconds < 0:
            sys.stderr.write(format % args)

    def do_GET(self) -> None:
        fake = self.fake
        if self.path in ("/health", "/health_generate"):
            self._text(503 if fake.starting else 200, "")
        elif self.path == "/v1/models":
            name = "other-model" if fake.fault == "wrong_model" else MODEL
            self._json(200, {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": 8192}]})
        elif self.path == "/model_info":
            self._json(200, {"served_model_name": MODEL, "is_generation": True, "reasoning_parser": None})
        elif self.path == "/server_info":
            info = {"max_total_num_tokens": 16384, "max_running_requests": 8, "version": "0.5.23"}
            self._json(200, {**info, "context_length": None, "api_key": fake.api_key, "launch_command": "--api-key X"})
        elif self.path == "/metrics":
            self._text(200, self._metrics())
        else:
            self._json(404, {"detail": "Not Found"})

    def _metrics(self) -> str:
        tokens = 0 if self.fake.fault == "metrics_frozen" else self.fake.tokens
        name = "sglang:generation_tokens_total"
        return f'# TYPE {name} counter\n{name}{{model_name="{MODEL}"}} {tokens}\n'

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fake = self.fake
        fake.seen_keys.append(self.headers.get("Authorization"))
        if self.path != "/v1/chat/completions":
            self._json(404, {"detail": "Not Found"})
        elif fake.fault == "refused" or (
            fake.api_key and self.headers.get("Authorization") != f"Bearer {fake.api_key}"
        ):
            self._json(401, {"error": "Unauthorized"})
        elif fake.fault in ("overloaded", "shallow_health") or fake.starting:
            self._json(503, _error("The server is overloaded", 503))
        else:
            self._chat(json.loads(body))

    def _chat(self, request: dict[str, t.Any]) -> None:
        fake = self.fake
        fake.questions += 1
        if fake.fault == "hang" and fake.questions > fake.after:
            fake.released.wait(60)
            self.close_connection = True
            return
        if fake.fault == "not_json":
            self._text(200, "<html><body>It works!</body></html>")
            return
        if fake.fault == "error_object":
            self._json(200, _error("Internal error: the scheduler is gone", 500))
            return
        answer = _answer(fake.fault, request)
        fake.tokens += answer["usage"]["completion_tokens"] if answer["usage"] else 0
        if request.get("stream"):
            self._stream(request, answer)
        else:
            self._whole(request, answer)

    def _whole(self, request: dict[str, t.Any], answer: dict[str, t.Any]) -> None:
        message = {
            "role": "assistant",
            "content": answer["content"],
            "reasoning_content": answer["reasoning"],
            "tool_calls": answer["tool_calls"],
        }
        choice = {"index": 0, "message": message, "finish_reason": answer["finish_reason"]}
        # Like SGLang, the answer repeats the model name of the request, whatever it is.
        whole = {"id": "1", "object": "chat.completion", "model": request.get("model"), "choices": [choice]}
        if answer["usage"]:
            whole["usage"] = answer["usage"]
        self._json(200, whole)

    def _stream(self, request: dict[str, t.Any], answer: dict[str, t.Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        deltas = _deltas(answer)
        fault = self.fake.fault
        if fault == "stream_drops":
            del deltas[len(deltas) // 2]
        for index, delta in enumerate(deltas):
            middle = index == len(deltas) // 2
            if fault == "truncated_stream" and middle:
                self.wfile.flush()
                self.connection.close()
                return
            if fault == "error_in_stream" and middle:
                self._event(json.dumps({"error": _error("KV transfer failed", 500)}))
                break
            if fault == "slow_trickle" and middle:
                while not self.fake.released.wait(0.05):
                    self._chunk(b":")
                return
            self._event(_chunk_json(request, {"index": 0, "delta": delta, "finish_reason": None}))
        self._event(_chunk_json(request, {"index": 0, "delta": {}, "finish_reason": answer["finish_reason"]}))
        if answer["usage"] and (request.get("stream_options") or {}).get("include_usage"):
            self._event(_chunk_json(request, None, answer["usage"]))
        if fault != "no_end_marker":
            self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        raw = f"data: {data}\n\n".encode()
        pieces = [raw[i : i + 1] for i in range(len(raw))] if self.fake.bytewise else [raw]
        for piece in pieces:
            self._chunk(piece)

    def _chunk(self, piece: bytes) -> None:
        try:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()
        except OSError:
            self.fake.released.set()  # the client has gone

    def _json(self, status: int, value: t.Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _text(self, status: int, text: str) -> None:
        self._send(status, text.encode(), "text/plain")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _error(message: str, code: int) -> dict[str, t.Any]:
    return {"object": "error", "message": message, "type": "InternalServerError", "param": None, "code": code}


def _chunk_json(
    request: dict[str, t.Any], choice: dict[str, t.Any] | None, usage: dict[str, t.Any] | None = None
) -> str:
    event = {
        "id": "1",
        "object": "chat.completion.chunk",
        "model": request.get("model"),
        "choices": [choice] if choice else [],
    }
    if usage:
        event["usage"] = usage
    return json.dumps(event, ensure_ascii=False)


def _deltas(answer: dict[str, t.Any]) -> list[dict[str, t.Any]]:
    deltas: list[dict[str, t.Any]] = [{"role": "assistant", "content": ""}]
    reasoning, content = answer["reasoning"] or "", answer["content"] or ""
    deltas += [{"reasoning_content": reasoning[i : i + 8]} for i in range(0, len(reasoning), 8)]
    deltas += [{"content": content[i : i + 2]} for i in range(0, len(content), 2)]
    for index, call in enumerate(answer["tool_calls"] or ()):
        arguments = call["function"]["arguments"]
        first = {"index": index, "id": "call_1", "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [first]})
        for i in range(0, len(arguments), 6):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[i : i + 6]}}]})
    return deltas


def _answer(fault: str, request: dict[str, t.Any]) -> dict[str, t.Any]:
    """The content, reasoning, tool calls, finish reason and usage of an answer."""
    question = str(request["messages"][-1].get("content", ""))
    content = next((answer for part, answer in ANSWERS.items() if part in question), "I do not know.")
    thinking = bool((request.get("chat_template_kwargs") or {}).get("thinking"))
    reasoning = REASONING if thinking else None
    finish_reason: str | None = "stop"
    tool_calls = None
    if request.get("tools") and TOOL_QUESTION in question:
        arguments = '{"city": "Paris", "unit": "celsius"}'
        if fault == "tool_wrong_arguments":
            arguments = '{"city": "London"}'
        if fault == "tool_broken_arguments":
            arguments = '{"city": "Paris'
        tool_calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
        content, finish_reason = "", "tool_calls"
        if fault == "tool_as_text":
            content = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
            tool_calls, finish_reason = None, "stop"
    if fault == "empty":
        content, tool_calls = "", None
    elif fault == "only_reasoning":
        content, reasoning = "", f"{REASONING} {content}"
    elif fault == "loop":
        content, finish_reason = "4*4=16 and so " * 30, "length"
    elif fault == "loop_then_stop":
        content += " That is all I can say." * 12
    elif fault == "more_digits":
        content = content.replace("391", "3910")
    elif fault == "digits_inside":
        content = content.replace("391", "1391")
    elif fault == "denied":
        content = content.replace("is Paris", "is not Paris")
    elif fault == "inside_word":
        content = content.replace("Paris", "Parisian")
    elif fault == "reasoning_leak":
        content = f"{REASONING}</think>{content}"
    elif fault == "template_leak":
        content += "<|im_end|>"
    elif fault == "error_text":
        content = "KVTransferError: Failed to send kv chunk, the request was aborted."
    elif fault == "cut":
        finish_reason = "length"
    elif fault == "aborted":
        finish_reason = "abort"
    elif fault == "no_finish_reason":
        finish_reason = None
    limit = int(request.get("max_tokens") or 10**6)
    completion = min(limit, max(1, len(content) // 4 + len(reasoning or "") // 4))
    usage = {"prompt_tokens": 12, "completion_tokens": completion, "total_tokens": 12 + completion}
    if fault == "no_usage":
        usage = {}
    if fault == "zero_usage":
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "content": content,
        "reasoning": reasoning,
        "tool_calls": tool_calls,
        "finish_reason": finish_reason,
        "usage": usage,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that misbehaves on request.")
    parser.add_argument("--port", type=int, default=30001)
    parser.add_argument("--fault", choices=sorted(FAULTS), default="none")
    parser.add_argument("--after", type=int, default=0, help="questions before fault 'hang' begins")
    parser.add_argument("--start-seconds", type=float, default=0.0, help="length of fault 'not_ready'")
    arguments = parser.parse_args()
    FakeServer(arguments.fault, arguments.port, arguments.after, arguments.start_seconds).serve()


if __name__ == "__main__":
    main()
