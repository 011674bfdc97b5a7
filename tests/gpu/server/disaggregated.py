# SPDX-License-Identifier: GPL-3.0-or-later
"""Prefill and decode on a GPU each behind the router, beside two replicas on the same GPUs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import requests
from compare import Prompt
from load import Kind, Load, summary
from server import Program, Router, Server, random_ids, wait

CHAT = Kind("chat", 256, 128)
LONG = Kind("long", 30_000, 8)
CHATTING = (CHAT,) * 16
CLIENTS = (*CHATTING, *[LONG] * 2)
WARM_UP, WARM_UPS, CALM = 10, 6, 4
"""Seconds of a turn of the same load before, the most turns, and the seconds in which a warm server answers."""
SECONDS = 25
"""Time under load, twice for each topology, in turn."""
NEW_TOKENS = 24
LENGTHS = (16, 600, 3_000, 4_000, 8_000, 8_192, 8_448, 9_000, 12_000, 20_000, 100_000)
"""Prompts, in tokens: within one prefill chunk of 8,192, at its edges, and beyond."""
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
"""0 on a deployed prefill server: no chunk is sent while it is computed. 1 is SGLang's own default."""
ON_ONE_GPU = {"--base-gpu-id": "0"}
EARLY_PORTS = {"--port": "30031", "--nccl-port": "29521", "--disaggregation-bootstrap-port": "8999"}
"""Of a second prefill server beside the deployed one."""
EARLY_ROUTER = {
    "--port": "30003",
    "--prometheus-port": "29002",
    "--prefill": f"http://127.0.0.1:{EARLY_PORTS['--port']} {EARLY_PORTS['--disaggregation-bootstrap-port']}",
}
RECOVERED = 15
"""Seconds that clients go on asking after a killed server is ready again."""
TRANSFER_METRICS = re.compile(r"^sglang:\w*(?:transfer|bootstrap|prealloc)\w*\{[^\n]*\} [1-9][^\n]*$", re.MULTILINE)


def same_tokens(one: Program, other: Program) -> dict[int, int]:
    """Length of a prompt -> greedy tokens that are equal before the first that differs, of ``NEW_TOKENS``."""
    found = {}
    for length in LENGTHS:
        prompt = Prompt(f"{length}", (length,))
        answers = [program.generate(prompt.ids(), NEW_TOKENS)[0]["output_ids"] for program in (one, other)]
        pairs = enumerate(zip(*answers, strict=True))
        found[length] = next((index for index, (a, b) in pairs if a != b), NEW_TOKENS)
    return found


def same_tokens_under_load(loaded: Program, one: Program, other: Program) -> dict[str, Any]:
    """``same_tokens`` while clients ask ``loaded`` all the time; what became of the clients' own requests."""
    with Load(loaded.url, CLIENTS) as load:
        found = same_tokens(one, other)
    return {"equal": found, "clients": summary(load.samples)}


def warm_up(program: Program, clients: Sequence[Kind]) -> list[float]:
    """Load a program, in turns, until SGLang compiles no kernels for new shapes; seconds of each turn's slowest answer.

    A batch of a new shape waits for up to half a minute, and which batches come is chance: two turns at least.
    """
    slowest: list[float] = []
    while len(slowest) < 2 or (slowest[-1] > CALM and len(slowest) < WARM_UPS):
        with Load(program.url, clients) as load:
            time.sleep(WARM_UP)
        slowest.append(max(one.took for one in load.samples))
    return slowest


def refused(program: Program, length: int) -> dict[str, Any]:
    """Status, seconds and text of the answer to a prompt that is too long."""
    started = time.monotonic()
    body = {"input_ids": random_ids(length, "too long"), "sampling_params": {"max_new_tokens": 8}}
    answer = requests.post(f"{program.url}/generate", json=body, timeout=60)
    return {"status": answer.status_code, "seconds": time.monotonic() - started, "text": answer.text[:300]}


def compare_load(topologies: Mapping[str, Program]) -> dict[str, Any]:
    """The same clients for each topology, twice in turn: a drift of the machine meets both."""
    samples: dict[str, list] = {name: [] for name in topologies}
    for _ in range(2):
        for name, program in topologies.items():
            with Load(program.url, CLIENTS) as load:
                time.sleep(SECONDS)
            samples[name] += load.samples
    return {name: summary(those) for name, those in samples.items()}


def failures(clients: Mapping[str, Any]) -> list[str]:
    """Errors of clients' requests, in what ``summary`` says of them."""
    return [error for kind in clients.values() for error in kind["errors"]]


def transfer_metrics(server: Server) -> list[str]:
    """Lines of its /metrics on the transfer that are not 0."""
    return [line for line in TRANSFER_METRICS.findall(server.get("/metrics").text) if "_bucket" not in line]


def killed(
    router: Router, server: Server, start: Callable[[], Server], timeout: float
) -> tuple[Server, dict[str, Any]]:
    """Kill a server under load and start it again, as systemd would; the new one, and what clients saw."""
    with Load(router.url, CHATTING) as load:
        time.sleep(8)
        server.stop()
        at = time.monotonic()
        again = start()
        ready = bool(wait([again], timeout))
        back = time.monotonic()
        time.sleep(RECOVERED)
    lost = [one for one in load.samples if one.error]
    good = [one.started - at for one in load.samples if not one.error and one.started > at]
    late = [asdict(one) for one in lost if one.started > back + RECOVERED / 2]
    return again, {
        "ready_again": ready,
        "ready_s": back - at,
        "requests": len(load.samples),
        "lost": len(lost),
        "lost_running": sum(one.started < at for one in lost),
        "slowest_s": max(one.took for one in load.samples),
        "first_answer_s": min(good, default=None),
        "lost_long_after": late[:3],
        "errors": sorted({one.error for one in lost})[:5],
    }
