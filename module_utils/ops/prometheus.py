# SPDX-License-Identifier: GPL-3.0-or-later
"""Instant queries of a Prometheus server, with expectations."""

from __future__ import annotations

import math
import time
import typing as t
from dataclasses import dataclass
from urllib.parse import quote

from .http import Client, HttpError

RETRY_S = 2.0


@dataclass(frozen=True)
class Sample:
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Expectation:
    """What a result must be. Every series must be within min_value and max_value.

    The sum over all series must be larger than increased_over, an earlier sum of the same query; math.nan stands for
    "there was none".
    """

    non_empty: bool = True
    min_value: float | None = None
    max_value: float | None = None
    increased_over: float | None = None


@dataclass(frozen=True)
class Outcome:
    """samples of the last try, why they are not what was wanted (empty when they are), number of tries, time taken."""

    samples: tuple[Sample, ...]
    reason: str
    attempts: int
    elapsed_s: float

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def value(self) -> float | None:
        """The one value, or the sum over all series; None when there is none."""
        return math.fsum(sample.value for sample in self.samples) if self.samples else None


def instant(client: Client, query: str) -> tuple[Sample, ...]:
    """Run one instant query. Raises HttpError, also when the answer is no vector or scalar."""
    path = f"/api/v1/query?query={quote(query, safe='')}"
    start = time.monotonic()
    answer = client.get_json(path)
    try:
        data = answer["data"]
        if data["resultType"] == "scalar":
            return (Sample({}, float(data["result"][1])),)
        return tuple(Sample(dict(row["metric"]), float(row["value"][1])) for row in data["result"])
    except (KeyError, IndexError, TypeError, ValueError):
        elapsed = time.monotonic() - start
        detail = "the answer is no instant vector or scalar"
        raise HttpError("body", "GET", client.base_url + path, detail, elapsed, 200, str(answer)[:200]) from None


def judge(samples: t.Sequence[Sample], expectation: Expectation) -> str:
    """Why samples are not what is wanted, or an empty string."""
    if not samples:
        return "the result is empty" if expectation.non_empty else ""
    smallest, largest = min(s.value for s in samples), max(s.value for s in samples)
    if any(math.isnan(sample.value) for sample in samples):
        return "a value is NaN"
    if expectation.min_value is not None and smallest < expectation.min_value:
        return f"the value is {smallest:g}, wanted at least {expectation.min_value:g}"
    if expectation.max_value is not None and largest > expectation.max_value:
        return f"the value is {largest:g}, wanted at most {expectation.max_value:g}"
    before = expectation.increased_over
    total = math.fsum(sample.value for sample in samples)
    if before is not None and not math.isnan(before) and total <= before:
        return f"the value is {total:g} and has not increased over {before:g}"
    return ""


def query_until(
    client: Client,
    query: str,
    expectation: Expectation,
    window: float = 0.0,
    clock: t.Callable[[], float] = time.monotonic,
    sleep: t.Callable[[float], None] = time.sleep,
) -> Outcome:
    """Ask until the expectation holds or the window (seconds) is over. An unreachable server counts as a failed try."""
    start = clock()
    attempts = 0
    while True:
        attempts += 1
        samples: tuple[Sample, ...] = ()
        try:
            samples = instant(client, query)
            reason = judge(samples, expectation)
        except HttpError as error:
            if error.status is not None and 400 <= error.status <= 499:
                raise  # a query that is refused stays refused
            reason = str(error)
        elapsed = clock() - start
        if not reason or elapsed + RETRY_S > window:
            return Outcome(samples, reason, attempts, elapsed)
        sleep(RETRY_S)
