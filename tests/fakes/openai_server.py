# SPDX-License-Identifier: GPL-3.0-or-later
"""An OpenAI-compatible server with the shapes of SGLang 0.5.23 that misbehaves on request.

    python3 tests/fakes/openai_server.py --port 30001 --fault loop
    python3 tests/fakes/openai_server.py --fault dies_at_start --line "RuntimeError: No CUDA GPUs are available"

Without a fault it is healthy and answers the questions in ANSWERS. Every fault is one way in which real servers were
seen to be wrong while /health said 200.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import select
import socket
import sys
import threading
import time
import typing as t
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "fake-model"

CAPITALS = {
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
}
# Question (a part of the last user message) to answer.
ANSWERS = {
    "capital of France": "The capital of France is Paris.",
    "17*23": "391",
    "tower": "Das höchste Bauwerk in 東京 heißt 東京スカイツリー 🗼.",
    "as JSON": '{"capital": "Paris", "population_millions": 2.1}',
    "Hello": "Hello!",
    "Count from 1 to 60": ", ".join(str(number) for number in range(1, 61)),
    "Count from 1 to 200": ",".join(str(number) for number in range(1, 201)),
    "Count from one": " ".join(f"step-{number}" for number in range(400)),
    **{f"capital of {country}": f"The capital of {country} is {city}." for country, city in CAPITALS.items()},
}
TOOL_QUESTION = "weather"
TOOL_ANSWER = "It is 23 degrees in Paris."
CONTEXT_LENGTH = 8192
KV_TOKENS = 16384
# Every so many answers are empty with the fault sometimes_empty.
EMPTY_EVERY = 20
FIRST_TOKEN_DELAY_S = 0.3
LINGER_S = 1.0
# How long a request waits for company with a fault that only shows when several run at once.
COMPANY_S = 0.03
REASONING = "The user asks for a fact. I know it."
# A token has so many characters, and an event of a stream holds one.
TOKEN_CHARACTERS = 2
# Where long answers go wrong with the fault garbled_when_long, in characters.
LONG_ANSWER = 100
SLOW_GET_S = 0.6

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
    "content_parts": "the content is a list of parts instead of text",
    "usage_as_list": "the token counts are a list",
    "usage_differs": "a streamed answer counts another prompt than the whole one",
    "denied_number": "the right number in a sentence that denies it",
    "control_characters": "the content holds NUL and other control characters",
    "loop_without_spaces": "a sentence without spaces repeats",
    "unasked_call": "a tool is called that nobody offered",
    "finish_without_call": "finish_reason is tool_calls without a call",
    "key_in_error": "status 401 that repeats the API key",
    "key_in_answer": "the content repeats the API key",
    "needles_all": "every hidden fact of a long prompt is named, the wanted one among them",
    "metrics_nan": "the counters on /metrics are NaN",
    "loads_negative": "/v1/loads reports less than nothing",
    "loads_empty": "/v1/loads reports no rank",
    "no_usage": "the token counts are missing",
    "zero_usage": "the token counts are zero",
    "cut": "finish_reason is length although nothing asked for it",
    "aborted": "finish_reason is abort",
    "no_finish_reason": "finish_reason is missing",
    "tool_as_text": "a tool call comes as text in the content",
    "tool_wrong_arguments": "a tool call has other arguments than asked",
    "tool_broken_arguments": "a tool call has arguments that are no JSON",
    "not_ready": "a slow start: health and questions are answered 503 for --start-seconds",
    "dies_at_start": "it dies at start, with each line of the log classifier's table that a dying engine prints",
    "shallow_health": "health says 200, questions are answered 503",
    "metrics_frozen": "the counters on /metrics stand still",
    "drafts_refused": "speculative decoding accepts none of its drafts",
    "drafts_missing": "speculative decoding is off",
    "metrics_missing": "there is no /metrics",
    "json_as_prose": "JSON mode is ignored: the JSON stands in a block of Markdown",
    "tool_arguments_loop": "the arguments of a tool call repeat a word until max_tokens",
    "tool_loop": "the tool is called again and again, whatever it returns",
    "tool_result_unseen": "the answer after a tool call does not use the tool's result",
    "thinking_always": "there is reasoning although thinking is off",
    "thinking_never": "there is no reasoning although thinking is on",
    "unicode_broken": "a stream cuts a character of several bytes and repairs both halves with U+FFFD",
    "unicode_split": "a stream is cut inside characters of several bytes, and no byte is lost (no fault: it must pass)",
    "needle_lost": "a prompt above 2,048 tokens is answered with a number that is not in it",
    "prompt_cut": "a long prompt is cut to 2,048 tokens in silence",
    "sometimes_empty": "one of twenty answers is empty",
    "slow_first_token": "the first token of a stream takes 0.3 s",
    "crossed": "a request that runs beside another one gets the other's answer",
    "garbled_when_busy": "answers are wrong only while several requests run",
    "over_long_cut": "an over-long prompt is cut and answered",
    "over_long_hangs": "an over-long prompt is never answered",
    "over_long_breaks": "an over-long prompt ends in status 500",
    "cancel_ignored": "a request goes on for a second after its client has left",
    "kv_leak": "every answer leaves KV slots in use for ever",
    "loads_missing": "there is no /v1/loads",
    "loads_frozen": "/v1/loads always reports an idle engine",
    "slow_get": "/metrics takes 0.6 s",
    "in_one_piece": "a streamed answer comes in one piece at its end",
    "slow_stream": "a stream stands still for 0.3 s in its middle",
    "history_lost": "a second question is answered as if there had been no first one",
    "system_lost": "the system message does not reach the model",
    "hot_empty": "the content is empty at a temperature above 0",
    "stop_when_cut": "finish_reason is stop although max_tokens cut the answer",
    "max_tokens_ignored": "an answer goes on beyond max_tokens",
    "stop_ignored": "an answer goes on beyond a stop sequence",
    "usage_halved": "half of the tokens are counted",
    "usage_doubled": "twice the tokens are counted",
    "talks_on": "after its answer the model goes on with the next question and answers that, too",
    "other_model_answers": "the answers name another model than the one that was asked",
    "json_ignored": "JSON mode does nothing, unless the question itself asks for JSON",
    "garbled_when_long": "an answer is right for 100 characters, then garbled",
    "tool_crossed": "a tool call that is made beside another one gets the other's arguments",
    "tool_finish_stop": "finish_reason is stop beside a tool call",
    "nan_stop": "an answer ends at a NaN, which SGLang reports as a stop",
    "tool_without_id": "a tool call has no id",
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
        self.answered = 0
        self.verified = 0
        self.tokens = 0
        # What /server_info reports about the configuration, such as {"tp_size": 4}.
        self.arguments: dict[str, t.Any] = {}
        self.kernels: dict[str, list[int]] = {}
        self.seen_keys: list[str | None] = []
        self.bytewise = False
        self.prompt_tokens = 0
        self.leaked = 0
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.running: dict[int, dict[str, t.Any]] = {}
        # KV slots of requests that go on without a client, with the time at which they are free.
        self.lingering: list[tuple[float, int]] = []
        self._http = _Server(("127.0.0.1", port), _Handler)
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

    def used_tokens(self) -> int:
        """KV slots in use, as /v1/loads reports them."""
        now = time.monotonic()
        with self.lock:
            running = sum(length for length in map(prompt_length, self.running.values()) if length < CONTEXT_LENGTH)
            return running + self.leaked + sum(tokens for end, tokens in self.lingering if end > now)

    def company(self, own: int, at_least: int) -> dict[str, t.Any] | None:
        """Another running request, when so many run at once; waits a moment for them."""
        end = time.monotonic() + COMPANY_S
        while time.monotonic() < end:
            with self.lock:
                others = [request for number, request in self.running.items() if number != own]
            if len(others) + 1 >= at_least:
                return others[0]
            time.sleep(0.005)
        return None

    @property
    def starting(self) -> bool:
        return self.fault == "not_ready" and time.monotonic() - self.started < self.start_seconds


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # clients that connect at the same moment


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
        if fake.fault == "slow_get" and self.path == "/metrics":
            time.sleep(SLOW_GET_S)
        if self.path in ("/health", "/health_generate"):
            self._text(503 if fake.starting else 200, "")
        elif self.path == "/v1/models":
            name = "other-model" if fake.fault == "wrong_model" else MODEL
            self._json(
                200, {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": CONTEXT_LENGTH}]}
            )
        elif self.path == "/model_info":
            self._json(200, {"served_model_name": MODEL, "is_generation": True, "reasoning_parser": None})
        elif self.path == "/server_info":
            info = {"max_total_num_tokens": KV_TOKENS, "max_running_requests": 8, "version": "0.5.23"}
            secret = {"context_length": None, "api_key": fake.api_key, "launch_command": "--api-key X"}
            self._json(200, {**info, **secret, **fake.arguments})
        elif self.path == "/metrics" and fake.fault != "metrics_missing":
            self._text(200, self._metrics())
        elif self.path == "/v1/loads" and fake.fault != "loads_missing":
            used = 0 if fake.fault == "loads_frozen" else fake.used_tokens()
            used = -7 if fake.fault == "loads_negative" else used
            # Like SGLang's, the number of running requests lags behind the KV slots.
            rank = {"num_used_tokens": used, "num_running_reqs": 0, "num_waiting_reqs": 0}
            self._json(200, {"loads": [] if fake.fault == "loads_empty" else [rank]})
        else:
            self._json(404, {"detail": "Not Found"})

    def _metrics(self) -> str:
        fake = self.fake
        values = {
            "prompt_tokens_total": fake.prompt_tokens,
            "generation_tokens_total": fake.tokens,
            "num_requests_total": fake.answered,
        }
        if fake.fault != "drafts_missing":
            values["spec_verify_calls_total"] = fake.verified
        lines = []
        for name, value in values.items():
            shown = {"metrics_frozen": "0.0", "metrics_nan": "NaN"}.get(fake.fault, f"{value}.0")
            lines += [f"# TYPE sglang:{name} counter", f'sglang:{name}{{model_name="{MODEL}"}} {shown}']
        for kernel, ranks in fake.kernels.items():
            lines += [
                f'dsv4_sm120_kernel_active{{kernel="{kernel}",pp_rank="0",tp_rank="{rank}"}} {active}.0'
                for rank, active in enumerate(ranks)
            ]
        return "\n".join(lines) + "\n"

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
        elif fake.fault == "key_in_error":
            self._json(401, _error(f"Incorrect API key provided: {self.headers.get('Authorization')}", 401))
        elif fake.fault in ("overloaded", "shallow_health") or fake.starting:
            self._json(503, _error("The server is overloaded", 503))
        else:
            self._chat(json.loads(body))

    def _chat(self, request: dict[str, t.Any]) -> None:
        fake = self.fake
        with fake.lock:
            fake.questions += 1
            number = fake.questions
            fake.running[number] = request
        try:
            self._answer(request, number)
        finally:
            with fake.lock:
                fake.running.pop(number)

    def _answer(self, request: dict[str, t.Any], number: int) -> None:
        fake = self.fake
        length = prompt_length(request)
        if length >= CONTEXT_LENGTH and fake.fault != "over_long_cut":
            self._refuse_over_long(length)
            return
        if fake.fault == "hang" and number > fake.after:
            fake.released.wait(60)
            self.close_connection = True
            return
        if fake.fault == "not_json":
            self._text(200, "<html><body>It works!</body></html>")
            return
        if fake.fault == "error_object":
            self._json(200, _error("Internal error: the scheduler is gone", 500))
            return
        answer = _answer(self._fault_of(number), self._request_of(request, number))
        if fake.fault == "key_in_answer" and answer["content"]:
            answer["content"] = f"The key is {fake.api_key}."
        with fake.lock:
            usage = answer["counted"]
            fake.tokens += usage["completion_tokens"]
            fake.answered += 1
            # The first token comes with the prompt. A step gives one more, with accepted drafts almost two.
            later = max(0, usage["completion_tokens"] - 1)
            fake.verified += later if fake.fault == "drafts_refused" else -(-later * 5 // 9)
            fake.prompt_tokens += usage["prompt_tokens"]
            fake.leaked += 8 if fake.fault == "kv_leak" and not request.get("ignore_eos") else 0
        if request.get("stream"):
            self._stream(request, answer)
        else:
            self._whole(request, answer)

    def _refuse_over_long(self, length: int) -> None:
        if self.fake.fault == "over_long_hangs":
            self.fake.released.wait(60)
            self.close_connection = True
        elif self.fake.fault == "over_long_breaks":
            self._json(500, _error("Internal Server Error", 500))
        else:
            text = f"The input ({length} tokens) is longer than the model's context length ({CONTEXT_LENGTH} tokens)."
            self._json(400, {**_error(text, 400), "type": "BadRequestError"})

    def _fault_of(self, number: int) -> str:
        """The fault of one answer, for faults that do not show in every one."""
        fault = self.fake.fault
        if fault == "sometimes_empty":
            return "empty" if number % EMPTY_EVERY == 0 else "none"
        if fault == "garbled_when_busy":
            return "garbled" if self.fake.company(number, at_least=4) else "none"
        return fault

    def _request_of(self, request: dict[str, t.Any], number: int) -> dict[str, t.Any]:
        """The request whose answer is given: another one's, when requests are mixed up."""
        mixed = self.fake.fault == "crossed" or (self.fake.fault == "tool_crossed" and request.get("tools"))
        other = self.fake.company(number, at_least=2) if mixed else None
        return {**request, "messages": other["messages"]} if other else request

    def _whole(self, request: dict[str, t.Any], answer: dict[str, t.Any]) -> None:
        message = {
            "role": "assistant",
            "content": answer["content"],
            "reasoning_content": answer["reasoning"],
            "tool_calls": answer["tool_calls"],
        }
        if self.fake.fault == "content_parts":
            message["content"] = [{"type": "text", "text": answer["content"]}]
        choice = {"index": 0, "message": message, **self._end(answer)}
        # Like SGLang, the answer repeats the model name of the request, whatever it is.
        whole = {"id": "1", "object": "chat.completion", "model": self._model(request), "choices": [choice]}
        if answer["usage"]:
            whole["usage"] = self._usage(answer)
        self._json(200, whole)

    def _end(self, answer: dict[str, t.Any]) -> dict[str, t.Any]:
        """How SGLang says that an answer has ended; the end token has a number."""
        matched = "NaN happened" if self.fake.fault == "nan_stop" else 2
        return {"finish_reason": answer["finish_reason"], "matched_stop": matched}

    def _model(self, request: dict[str, t.Any]) -> t.Any:
        return "other-model" if self.fake.fault == "other_model_answers" else request.get("model")

    def _usage(self, answer: dict[str, t.Any]) -> t.Any:
        return list(answer["usage"].values()) if self.fake.fault == "usage_as_list" else answer["usage"]

    def _stream(self, request: dict[str, t.Any], answer: dict[str, t.Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        deltas = _deltas(answer)
        fault, named = self.fake.fault, {"model": self._model(request)}
        if fault == "stream_drops":
            del deltas[len(deltas) // 2]
        if fault == "content_parts":
            deltas = [{"content": [{"type": "text", "text": answer["content"]}]}]
        if fault == "unicode_broken":
            deltas = [{key: _halved(value) for key, value in delta.items()} for delta in deltas]
        if fault == "in_one_piece":
            deltas = [delta for delta in deltas if "content" not in delta] + [{"content": answer["content"] or ""}]
        if fault == "slow_first_token":
            time.sleep(FIRST_TOKEN_DELAY_S)
        for index, delta in enumerate(deltas):
            if request.get("ignore_eos") and self._left():
                return
            middle = index == len(deltas) // 2
            if fault == "slow_stream" and middle:
                time.sleep(FIRST_TOKEN_DELAY_S)
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
            self._event(_chunk_json(named, {"index": 0, "delta": delta, "finish_reason": None}))
        self._event(_chunk_json(named, {"index": 0, "delta": {}, **self._end(answer)}))
        if answer["usage"] and (request.get("stream_options") or {}).get("include_usage"):
            self._event(_chunk_json(named, None, self._usage(answer)))
        if fault != "no_end_marker":
            self._event("[DONE]")
        with contextlib.suppress(OSError):  # the client has gone
            self.wfile.write(b"0\r\n\r\n")

    def _left(self) -> bool:
        """Whether the client has gone; an answer that is asked to be long takes its time."""
        time.sleep(0.005)
        with contextlib.suppress(ConnectionResetError):
            readable, _writable, _failed = select.select([self.connection], [], [], 0)
            if not readable or self.connection.recv(1, socket.MSG_PEEK):
                return False
        if self.fake.fault == "cancel_ignored":
            with self.fake.lock:
                self.fake.lingering.append((time.monotonic() + LINGER_S, 200))
        self.close_connection = True
        return True

    def _event(self, data: str) -> None:
        raw = f"data: {data}\n\n".encode()
        pieces = [raw[i : i + 1] for i in range(len(raw))] if self.fake.bytewise else [raw]
        if self.fake.fault == "unicode_split":
            pieces = _cut_inside_characters(raw)
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


def prompt_length(request: dict[str, t.Any]) -> int:
    """Tokens of a prompt, at one a word and a few for the template."""
    return 10 + sum(len(str(message.get("content", "")).split()) for message in request["messages"])


def _cut_inside_characters(raw: bytes) -> list[bytes]:
    """UTF-8 in pieces, each of which but the first begins in the middle of a character."""
    cuts = [index for index in range(1, len(raw)) if 0x80 <= raw[index] < 0xC0]
    return [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]


def _halved(value: t.Any) -> t.Any:
    """The text with two replacement characters for each character of several bytes."""
    return "".join(char if ord(char) < 128 else "\ufffd\ufffd" for char in value) if isinstance(value, str) else value


def _found_needle(question: str, fault: str) -> str | None:
    """The hidden fact that a long text is asked for, or None when nothing is hidden in it."""
    asked = re.search(r"What is the access code of the (\w+)\?", question)
    if not asked:
        return None
    text = question
    if fault == "needle_lost" and len(question.split()) > 2048:
        return "13579"
    if fault == "needles_all":
        return ", ".join(re.findall(r"The access code of the \w+ is (\d+)\.", text))
    fact = re.search(rf"The access code of the {asked[1]} is (\d+)\.", text)
    return fact[1] if fact else "There is no such place."


def _remembered(request: dict[str, t.Any], question: str, fault: str) -> str | None:
    """The answer to a question about what was said before, or None when it is another question."""
    said = [(message["role"], str(message.get("content", ""))) for message in request["messages"]]
    for role, asked, lost in (("user", "my name", "history_lost"), ("system", "code word", "system_lost")):
        if asked in question:
            text = " ".join(content for one, content in said if one == role) if fault != lost else ""
            found = re.search(rf"{asked} is (\w+)", text, re.IGNORECASE)
            return f"It is {found[1]}." if found else "You have not told me."
    return None


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
    step = TOKEN_CHARACTERS
    deltas += [{"reasoning_content": reasoning[i : i + step]} for i in range(0, len(reasoning), step)]
    deltas += [{"content": content[i : i + step]} for i in range(0, len(content), step)]
    for index, call in enumerate(answer["tool_calls"] or ()):
        arguments = call["function"]["arguments"]
        first = {"index": index, "id": call["id"], "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [first]})
        for i in range(0, len(arguments), 6):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[i : i + 6]}}]})
    return deltas


def _answer(fault: str, request: dict[str, t.Any]) -> dict[str, t.Any]:
    """The content, reasoning, tool calls, finish reason and usage of an answer."""
    question = next(str(m.get("content", "")) for m in reversed(request["messages"]) if m["role"] == "user")
    content = _found_needle(question, fault) or next(
        (answer for part, answer in ANSWERS.items() if part in question), "I do not know."
    )
    content = _remembered(request, question, fault) or content
    if request.get("response_format") and not content.startswith("{") and fault != "json_ignored":
        content = json.dumps({"capital": content.rstrip(".").split()[-1]})
    thinking = bool((request.get("chat_template_kwargs") or {}).get("thinking"))
    thinking = (thinking or fault == "thinking_always") and fault != "thinking_never"
    reasoning = REASONING if thinking else None
    finish_reason: str | None = "stop"
    tool_calls = None
    tool_answered = request["messages"][-1]["role"] == "tool"
    if tool_answered and fault != "tool_loop":
        content = "I can not see the weather." if fault == "tool_result_unseen" else TOOL_ANSWER
    elif request.get("tools") and TOOL_QUESTION in question:
        arguments = json.dumps({"city": question.rstrip("?").split()[-1], "unit": "celsius"})
        if fault == "tool_wrong_arguments":
            arguments = '{"city": "London"}'
        if fault == "tool_broken_arguments":
            arguments = '{"city": "Paris'
        if fault == "tool_arguments_loop":
            arguments = '{"city": "' + "nooh_" * 20
        tool_calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
        content, finish_reason = "", "length" if fault == "tool_arguments_loop" else "tool_calls"
        finish_reason = "stop" if fault == "tool_finish_stop" else finish_reason
        tool_calls[0]["id"] = None if fault == "tool_without_id" else "call_1"
        if fault == "tool_as_text":
            content = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
            tool_calls, finish_reason = None, "stop"
    limit = int(request.get("max_tokens") or 10**6)
    stops = [one for one in request.get("stop") or () if one in content]
    if stops and fault != "stop_ignored":
        content = content[: min(map(content.index, stops))]
    if len(content) > TOKEN_CHARACTERS * limit and fault != "max_tokens_ignored":
        content = content[: TOKEN_CHARACTERS * limit]
        finish_reason = "stop" if fault == "stop_when_cut" else "length"
    if fault == "empty" or (fault == "hot_empty" and request.get("temperature")):
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
    elif fault == "garbled":
        content = "the the of of and and " + content[::-1]
    elif fault == "json_as_prose" and request.get("response_format"):
        content = f"Here it is:\n```json\n{content}\n```"
    elif fault == "talks_on" and content:
        content += "\nUser: What is the capital of Italy?\nAssistant: The capital of Italy is Rome."
    elif fault == "garbled_when_long":
        content = content[:LONG_ANSWER] + content[:LONG_ANSWER:-1]
    elif fault == "cut":
        finish_reason = "length"
    elif fault == "aborted":
        finish_reason = "abort"
    elif fault == "no_finish_reason":
        finish_reason = None
    elif fault == "denied_number":
        content = content.replace("391", "It is not 391")
    elif fault == "control_characters":
        content += "\x00\x07" if content else ""
    elif fault == "loop_without_spaces":
        content += "\u6211\u4e0d\u77e5\u9053\u8fd9\u4e2a\u95ee\u9898\u7684\u7b54\u6848\u3002" * 12 if content else ""
    elif fault == "unasked_call" and not request.get("tools"):
        tool_calls = [{"id": "call_1", "type": "function", "function": {"name": "remove", "arguments": "{}"}}]
    elif fault == "finish_without_call" and not tool_calls:
        finish_reason = "tool_calls"
    if fault != "max_tokens_ignored":
        reasoning = reasoning and reasoning[: TOKEN_CHARACTERS * limit]
        content = content[: TOKEN_CHARACTERS * limit - len(reasoning or "")]
    said = sum(-(-len(text or "") // TOKEN_CHARACTERS) for text in (content, reasoning))
    completion = max(1, said) if fault == "max_tokens_ignored" else min(limit, max(1, said))
    length = min(prompt_length(request), 2048 if fault == "prompt_cut" else 10**9)
    usage = {"prompt_tokens": length, "completion_tokens": completion, "total_tokens": length + completion}
    if fault == "usage_differs" and request.get("stream"):
        usage["prompt_tokens"] += 1000
    counted = usage
    if fault in ("usage_halved", "usage_doubled"):
        usage = {name: count // 2 if fault == "usage_halved" else count * 2 for name, count in usage.items()}
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
        "counted": counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that misbehaves on request.")
    parser.add_argument("--port", type=int, default=30001)
    parser.add_argument("--fault", choices=sorted(FAULTS), default="none")
    parser.add_argument("--after", type=int, default=0, help="questions before fault 'hang' begins")
    parser.add_argument("--start-seconds", type=float, default=0.0, help="length of fault 'not_ready'")
    parser.add_argument("--line", default="", help="what fault 'dies_at_start' prints before it ends with status 1")
    arguments = parser.parse_args()
    if arguments.fault == "dies_at_start":
        sys.stderr.write(f"Load weight begin.\n{arguments.line}\n")
        raise SystemExit(1)
    FakeServer(arguments.fault, arguments.port, arguments.after, arguments.start_seconds).serve()


if __name__ == "__main__":
    main()
