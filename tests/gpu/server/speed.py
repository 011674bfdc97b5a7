# SPDX-License-Identifier: GPL-3.0-or-later
"""Time of a decode step and of a prefill, over several servers in turn: a drift of the machine meets all of them.

A step is timed on the stream of one batch: SGLang hands out tokens every ``BLOCK`` steps, so that neither the HTTP
server nor this client is busy with each one, and the time between two such events is that of ``BLOCK`` steps. Medians
over many blocks are compared, of servers that took turns within one round.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pynvml
import requests
from server import Server, greedy, random_ids

BATCHES = (1, 16, 64)
BLOCK = 32
BLOCKS = 5
"""Of one run; the first is not kept, in which the batch is still put together."""
REST = 1.5
"""Seconds without a request between two rounds, in which no server may keep the GPU at work."""
Rounds = Sequence[Sequence[float]]
"""Rounds of one server and batch: milliseconds of a step, one value a block."""


def prompts(batch: int, length: int, turn: int) -> list[list[int]]:
    """Another batch for each turn."""
    return [random_ids(length, f"{turn} {number}") for number in range(batch)]


def seconds(server: Server, ids: Sequence[Sequence[int]], new_tokens: int) -> float:
    start = time.perf_counter()
    server.generate(ids, new_tokens)
    return time.perf_counter() - start


def events(server: Server, ids: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
    """(seconds, tokens so far) of each event of the batch's first request; all requests of a batch advance together."""
    sampling = greedy(1 + BLOCK * BLOCKS) | {"stream_interval": BLOCK}
    body = {"input_ids": [list(one) for one in ids], "sampling_params": sampling, "stream": True}
    found = []
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                now, event = time.perf_counter(), json.loads(line[6:])
                if "error" in event:
                    raise requests.RequestException(str(event["error"])[:200])
                if event.get("index", 0) == 0:
                    found.append((now, event["meta_info"]["completion_tokens"]))
    return found


def blocks(found: Sequence[tuple[float, int]]) -> list[float]:
    """Milliseconds of a step in each whole block but the first."""
    pairs = [(one, other) for one, other in itertools.pairwise(found) if other[1] - one[1] == BLOCK]
    return [(other[0] - one[0]) / BLOCK * 1e3 for one, other in pairs][1:]


def rounds(
    servers: Sequence[Server], loads: Sequence[tuple[int, int]], turns: int, until: float
) -> Iterator[dict[tuple[str, int, int], list[float]]]:
    """Every server under every load (batch, prompt tokens) once a round, in another order each; none begins late.

    Yields (name, batch, prompt tokens) -> blocks, without a server that has failed. until: monotonic seconds.
    """
    for turn in range(turns):
        if time.monotonic() > until:
            return
        shift = turn % len(servers)
        order = [*servers[shift:], *servers[:shift]]
        found = {}
        for batch, length in loads:
            ids = prompts(batch, length, turn)
            for server in order if turn % 2 else order[::-1]:
                try:
                    found[server.variant.name, batch, length] = blocks(events(server, ids))
                except requests.RequestException as error:
                    print(f"{server.variant.name}, {batch} x {length}: {error}", flush=True)
        yield found


class Watch:
    """What the GPU says of itself while servers are timed: clocks of the multiprocessors, and why they are slow."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.card = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples: list[tuple[int, int]] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        while not self.stopped.wait(1):
            clock = pynvml.nvmlDeviceGetClockInfo(self.card, pynvml.NVML_CLOCK_SM)
            self.samples.append((clock, int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.card))))

    def turn(self) -> dict[str, Any]:
        """MHz and reasons since the last call."""
        samples, self.samples = self.samples, []
        clocks = [clock for clock, _ in samples] or [0]
        reasons = sorted({hex(reason) for _, reason in samples})
        return {"sm_mhz": [min(clocks), statistics.median(clocks), max(clocks)], "reasons": reasons}

    def busy(self) -> int:
        """Percent of the last sample period in which a kernel ran."""
        return int(pynvml.nvmlDeviceGetUtilizationRates(self.card).gpu)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        self.thread.join()


def rest(watch: Watch) -> int:
    """Leave all servers alone for a moment; percent of it in which the GPU was at work all the same."""
    time.sleep(REST)
    return watch.busy()


def middle(values: Rounds) -> float:
    """Median over all blocks of all rounds, in milliseconds."""
    return statistics.median([value for one in values for value in one])


def spread(medians: Iterable[float]) -> float:
    """By how much of the smallest they differ."""
    values = list(medians)
    return max(values) / min(values) - 1


def spread_interval(by_context: Mapping[str, Rounds], times: int = 1000) -> list[float]:
    """Within what the spread of the medians lies when rounds are drawn again with replacement, 95 of 100 times."""
    count, source = min(map(len, by_context.values())), random.Random(0)
    found = []
    for _ in range(times):
        drawn = [source.randrange(count) for _ in range(count)]
        found.append(spread(middle([values[turn] for turn in drawn]) for values in by_context.values()))
    cuts = statistics.quantiles(found, n=40)
    return [cuts[0], cuts[-1]]


def flatness(by_context: Mapping[str, Rounds]) -> dict[str, Any]:
    """Medians by configured context, with how far they are apart."""
    if not by_context:
        return {}
    medians = {name: middle(values) for name, values in by_context.items()}
    return {"median_ms": medians, "spread": spread(medians.values()), "interval": spread_interval(by_context)}


def against(one: Rounds, other: Rounds) -> dict[str, Any]:
    """Ratio of medians, and those of the rounds."""
    each = [statistics.median(a) / statistics.median(b) for a, b in zip(one, other, strict=False)]
    return {"ratio": middle(one) / middle(other), "each_round": each}


def prefill(server: Server, length: int, turns: int = 3) -> float:
    """Seconds to the first token of one prompt; the best of ``turns``, after one that warms up."""
    return min([seconds(server, prompts(1, length, turn), 1) for turn in range(turns + 1)][1:])
