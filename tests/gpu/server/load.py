# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients that ask all the time and stream their answers, and what became of their requests."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import requests
from server import greedy, random_ids

TIMEOUT = 90
"""Seconds without a byte after which a client gives up: what hangs is found, not waited for."""
PAUSE = 0.25
"""Seconds a client waits after a request that failed."""


@dataclass(frozen=True)
class Kind:
    """A client's requests, in tokens."""

    name: str
    prompt: int
    answer: int


@dataclass
class Sample:
    """One request. ``started`` is a monotonic time; all in seconds; ``error`` is empty for one that was answered."""

    kind: str
    started: float
    first_token: float = 0.0
    per_token: float = 0.0
    took: float = 0.0
    error: str = ""


def ask(url: str, kind: Kind, seed: str) -> Sample:
    """Stream one answer; every token that was asked for must come."""
    sample = Sample(kind.name, time.monotonic())
    body = {"input_ids": random_ids(kind.prompt, seed), "sampling_params": greedy(kind.answer), "stream": True}
    first, tokens = 0.0, 0
    try:
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=TIMEOUT) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.monotonic()
                event = json.loads(line[6:])
                if "error" in event:
                    raise requests.RequestException(str(event["error"])[:200])
                tokens = event["meta_info"]["completion_tokens"]
        if tokens != kind.answer:
            raise requests.RequestException(f"{tokens} tokens instead of {kind.answer}")
    except (requests.RequestException, json.JSONDecodeError) as error:
        sample.error = f"{type(error).__name__}: {error}"[:300]
    sample.took = time.monotonic() - sample.started
    if not sample.error:
        sample.first_token = first - sample.started
        sample.per_token = (sample.started + sample.took - first) / max(1, tokens - 1)
    return sample


class Load:
    """Clients at work from the ``with`` on; ``samples`` is complete behind it."""

    def __init__(self, url: str, clients: Sequence[Kind]) -> None:
        self.url = url
        self.samples: list[Sample] = []
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(n, kind)) for n, kind in enumerate(clients)]

    def work(self, number: int, kind: Kind) -> None:
        for turn in itertools.count():
            if self.stopped.is_set():
                return
            sample = ask(self.url, kind, f"load {number} {turn}")
            self.samples.append(sample)
            if sample.error:
                time.sleep(PAUSE)

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds: median, the 99th percentile and the largest."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3, "max": max(values) * 1e3}


def summary(samples: Iterable[Sample]) -> dict[str, Any]:
    """Kind -> requests, failed ones with examples, TTFT and TPOT."""
    found: dict[str, Any] = {}
    for kind, group in itertools.groupby(sorted(samples, key=lambda one: one.kind), lambda one: one.kind):
        those = list(group)
        answered = [one for one in those if not one.error]
        entry: dict[str, Any] = {"requests": len(those), "failed": len(those) - len(answered)}
        entry["errors"] = sorted({one.error for one in those if one.error})[:4]
        if answered:
            entry["ttft_ms"] = percentiles([one.first_token for one in answered])
            entry["tpot_ms"] = percentiles([one.per_token for one in answered])
        found[kind] = entry
    return found
