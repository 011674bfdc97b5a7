# SPDX-License-Identifier: GPL-3.0-or-later
"""Time of a decode step and of a prefill, over several servers in turn: a drift of the GPU meets all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import requests
from server import Server, random_ids

STEPS = 192


def prompts(batch: int, length: int, turn: int) -> list[list[int]]:
    """Another batch for each turn."""
    return [random_ids(length, f"{turn} {number}") for number in range(batch)]


def seconds(server: Server, ids: Sequence[Sequence[int]], new_tokens: int) -> float:
    start = time.perf_counter()
    server.generate(ids, new_tokens)
    return time.perf_counter() - start


def decode_steps(servers: Sequence[Server], batch: int, length: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a decode step, name -> one value a round: (all tokens - first token) / steps.

    The first round warms up and is not in the result, and neither is a server that has failed.
    """
    found: dict[str, list[float]] = {server.variant.name: [] for server in servers}
    for turn in range(rounds + 1):
        for server in [server for server in servers if server.variant.name in found]:
            ids = prompts(batch, length, turn)
            try:
                first = min(seconds(server, ids, 1) for _ in range(1 if length > 4096 else 2))
                value = (seconds(server, ids, 1 + STEPS) - first) / STEPS * 1e3
            except requests.RequestException as error:
                print(f"{server.variant.name}, {batch} x {length}: {error}", flush=True)
                del found[server.variant.name]
                continue
            if turn:
                found[server.variant.name].append(value)
    return found


def prefill(server: Server, length: int, rounds: int = 3) -> float:
    """Seconds to the first token of one prompt; the best of ``rounds``, after one that warms up."""
    return min([seconds(server, prompts(1, length, turn), 1) for turn in range(rounds + 1)][1:])
