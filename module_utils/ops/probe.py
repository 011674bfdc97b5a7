# SPDX-License-Identifier: GPL-3.0-or-later
"""Does the engine answer? One real generation decides, not an open port.

Used in two places: by the sglang_ready module, and as the ExecStartPost= of a unit, so that `active` means answering:

    python3 -m ops.probe --url http://127.0.0.1:30001 --timeout 2700 --main-pid $MAINPID --api-key-file FILE [--side]

The command prints progress (it lands in the unit's journal) and ends with status 0 only after a generation that
answered, 1 when the time is over or the main process is gone, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import typing as t
from dataclasses import dataclass, replace

from .http import Client, HttpError, read_token
from .listeners import foreign_listener
from .openai import chat

# A health check of the engine waits for its own one-token generation, 20 s at most by default.
HEALTH_TIMEOUT_S = 25.0
GENERATION_TIMEOUT_S = 60.0
INFO_TIMEOUT_S = 10.0
POLL_S = 1.0
MAX_COUNT = 2**31
PROGRESS_S = 15.0

# What SGLang's own health check sends to one side of a disaggregated pair: a request that needs no other side.
WITHOUT_OTHER_SIDE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}

STARTING = "starting"
REFUSED = "refused"
ANSWERING = "answering"


@dataclass(frozen=True)
class Answer:
    """One look at the server. detail says in words what was seen; status is the HTTP status, None without one."""

    state: str
    detail: str
    status: int | None = None

    @property
    def ok(self) -> bool:
        return self.state == ANSWERING


def ask(client: Client, timeout: float = GENERATION_TIMEOUT_S, side: bool = False) -> Answer:
    """Look once: the health endpoint first (cheap while starting), then a generation of one token.

    side: the server is one side of a disaggregated pair, and is asked without the other one.
    """
    try:
        client.get("/health", min(timeout, HEALTH_TIMEOUT_S))
    except HttpError as error:
        return Answer(STARTING, _health_words(error), error.status)
    payload = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    payload |= WITHOUT_OTHER_SIDE if side else {}
    try:
        answer = chat(client, payload, timeout=timeout)
    except HttpError as error:
        return Answer(STARTING, str(error), error.status)
    tokens = (answer.usage or {}).get("completion_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        return Answer(STARTING, f"the generation reports completion_tokens={tokens!r}, wanted at least 1", 200)
    return Answer(ANSWERING, f"one token generated in {answer.total_s:.2f} s", 200)


def _health_words(error: HttpError) -> str:
    if error.kind == "connect":
        return "nothing listens on the port yet"
    if error.status == 503:
        return "the port is open, the engine says it is not ready (503)"
    return str(error)


@dataclass(frozen=True)
class Capacity:
    """What the server says it can hold. Tokens, and GiB for the weights of a GPU; None where it did not say."""

    model: str | None = None
    max_total_num_tokens: int | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    version: str | None = None
    max_total_num_tokens_swa: int | None = None
    weight_memory_usage_gb: float | None = None

    def words(self) -> str:
        """The capacity as requests that run at one time: as many as the KV pool holds, and the scheduler admits."""
        total, context = self.max_total_num_tokens, self.context_length
        if not total:
            return "the server does not report its KV capacity"
        parts = []
        if context and total >= context:
            parts.append(self._requests(total // context, context))
        elif context:
            parts.append(
                f"no request of the full context ({tokens_words(context)} tokens), the longest is {total} tokens"
            )
        short = 512 if total < 65536 else 8192
        if not context or short < context:
            parts.append(self._requests(total // short, short))
        return f"{total} tokens of KV: " + ", or ".join(parts)

    def _requests(self, held: int, tokens: int) -> str:
        admitted = min(held, self.max_running_requests or held)
        limit = f" (max_running_requests; the pool holds {held})" if admitted < held else ""
        return f"{admitted} request{'' if admitted == 1 else 's'} of {tokens_words(tokens)} tokens{limit}"


def tokens_words(tokens: int) -> str:
    """8192 as 8k, 1000 as 1000."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def capacity(client: Client, timeout: float = INFO_TIMEOUT_S) -> Capacity:
    """Ask /server_info and /v1/models. Both are optional: what is not answered stays None.

    Only the fields named here are read: /server_info also returns the whole command line, with keys in it. The window's
    pool and the weights are what the gauges of those names hold; /server_info has them as memory_usage of each rank.
    """
    info = _optional_json(client, "/server_info", timeout) or _optional_json(client, "/get_server_info", timeout) or {}
    listed = _optional_json(client, "/v1/models", timeout) or {}
    models = listed.get("data") or [{}]
    first = models[0] if isinstance(models, list) and isinstance(models[0], dict) else {}
    context = _int(first.get("max_model_len")) or _int(info.get("context_length"))
    memory = _memory_usage(info)
    return Capacity(
        model=first.get("id") or info.get("served_model_name"),
        max_total_num_tokens=_int(info.get("max_total_num_tokens")),
        context_length=context,
        max_running_requests=_int(info.get("max_running_requests")),
        version=info.get("version"),
        max_total_num_tokens_swa=_int(memory.get("token_capacity_swa")),
        weight_memory_usage_gb=_gib(memory.get("weight")),
    )


def _optional_json(client: Client, path: str, timeout: float) -> dict[str, t.Any] | None:
    try:
        answer = client.get_json(path, timeout)
    except HttpError:
        return None
    return answer if isinstance(answer, dict) else None


def _memory_usage(info: dict[str, t.Any]) -> dict[str, t.Any]:
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else None
    memory = state.get("memory_usage") if isinstance(state, dict) else None
    return memory if isinstance(memory, dict) else {}


def _gib(value: t.Any) -> float | None:
    """A size in GiB, which SGLang calls GB; 0 is as unknown as none."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def _int(value: t.Any) -> int | None:
    """A count of tokens or requests; one that no server can mean is as unknown as none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else None


def ask_unit(client: Client, main_pid: int | None, timeout: float = GENERATION_TIMEOUT_S, side: bool = False) -> Answer:
    """Like ask, but an answer counts only when the unit of the main process holds the port.

    A unit that refuses the API key was started with another one, and goes on refusing it.
    """
    answer = ask(client, timeout, side)
    refused = answer.status == 401
    if not main_pid or not (answer.ok or refused):
        return answer
    foreign = foreign_listener(client.port, main_pid)
    if foreign:
        return Answer(STARTING, foreign, answer.status)
    return replace(answer, state=REFUSED) if refused else answer


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def say_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def wait_until_answering(
    client: Client,
    timeout: float,
    main_pid: int | None = None,
    say: t.Callable[[str], None] = say_line,
    clock: t.Callable[[], float] = time.monotonic,
    sleep: t.Callable[[float], None] = time.sleep,
    side: bool = False,
) -> int:
    """Poll until a generation answers (0), the main process is gone or the time is over (1)."""
    start = clock()
    said_at, said = 0.0, ""
    while True:
        left = timeout - (clock() - start)
        answer = ask_unit(client, main_pid, max(1.0, min(left, GENERATION_TIMEOUT_S)), side)
        elapsed = clock() - start
        if answer.ok:
            say(f"ready after {elapsed:.0f} s: {answer.detail}; {capacity(client).words()}")
            return 0
        if answer.state == REFUSED:
            say(f"not ready: the server refuses the API key after {elapsed:.0f} s; last seen: {answer.detail}")
            return 1
        if main_pid and not process_exists(main_pid):
            say(f"not ready: the main process {main_pid} is gone after {elapsed:.0f} s; last seen: {answer.detail}")
            return 1
        if elapsed + POLL_S >= timeout:
            say(
                f"not ready: no answer from {client.base_url} within {timeout:.0f} s; last seen: {answer.detail}; "
                "raise the unit's start timeout if the engine was still loading"
            )
            return 1
        if answer.detail != said or elapsed - said_at >= PROGRESS_S:
            say(f"waiting for {client.base_url}, {elapsed:.0f} s: {answer.detail}")
            said_at, said = elapsed, answer.detail
        sleep(POLL_S)


def main(argv: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops.probe", description="Wait until the engine generates a token.")
    parser.add_argument("--url", required=True, help="base URL, such as http://127.0.0.1:30001")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait at most (default 600)")
    parser.add_argument("--api-key-file", help="file that holds the API key")
    parser.add_argument("--main-pid", type=int, help="end at once when this process is gone ($MAINPID of the unit)")
    parser.add_argument("--side", action="store_true", help="the engine is one side of a disaggregated pair")
    arguments = parser.parse_args(argv)
    try:
        client = Client(arguments.url, read_token(token_file=arguments.api_key_file))
    except ValueError as error:
        parser.error(str(error))
    return wait_until_answering(client, arguments.timeout, arguments.main_pid, side=arguments.side)


if __name__ == "__main__":
    raise SystemExit(main())
