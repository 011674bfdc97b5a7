# SPDX-License-Identifier: GPL-3.0-or-later
"""What an engine says about its own load: /v1/loads (now) and /metrics (counters since its start).

The gauges on /metrics are not used for "now": they keep the value of the last scheduler step, so an idle engine goes on
reporting the tokens of its last request. /v1/loads is up to date.
"""

from __future__ import annotations

import math
import re
import time
import typing as t
from dataclasses import dataclass

from .http import Client, HttpError

LOADS_PATH = "/v1/loads"
METRICS_PATH = "/metrics"
# Counters that any answered question moves.
COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "num_requests_total")
# Steps in which drafts of speculative decoding were verified; a request's are added at its end.
VERIFY_STEPS = "spec_verify_calls_total"
# A timestamp and an exemplar may follow the value.
_SAMPLE = re.compile(
    r'(?P<name>[\w:]+)(?:\{(?P<labels>(?:[^"}]|"(?:\\.|[^"\\])*")*)\})?[ \t]+(?P<value>\S+)'
    r"(?:[ \t]+[-\d.eE+]+)?(?:[ \t]+#.*)?\s*"
)
_LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')


@dataclass(frozen=True)
class Load:
    """Sums over the data-parallel ranks. used_tokens are KV slots that requests hold; cached prefixes are not in it."""

    used_tokens: int
    running: int
    waiting: int

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def words(self) -> str:
        return f"{self.used_tokens} tokens in use, {self.running} requests running, {self.waiting} waiting"


def read_load(client: Client, timeout: float = 10.0) -> Load:
    """Ask /v1/loads. Raises HttpError, also for an answer of another shape."""
    start = time.monotonic()
    answer = client.get_json(LOADS_PATH, timeout)
    try:
        ranks = answer["loads"]
        if not ranks:
            raise ValueError("it has no ranks")
        return Load(
            used_tokens=sum(_count(rank, "num_used_tokens") for rank in ranks),
            running=sum(_count(rank, "num_running_reqs") for rank in ranks),
            waiting=sum(_count(rank, "num_waiting_reqs") for rank in ranks),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        why = f": {error}" if isinstance(error, ValueError) else ""
        detail, elapsed = f"the answer reports no load{why}", time.monotonic() - start
        raise HttpError("body", "GET", client.base_url + LOADS_PATH, detail, elapsed, 200, str(answer)[:200]) from None


def _count(rank: t.Mapping[str, t.Any], name: str) -> int:
    value = rank[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {str(value)[:80]!r}, wanted a count")
    return int(value)


def read_counters(client: Client, timeout: float = 10.0) -> dict[str, float]:
    """COUNTERS and VERIFY_STEPS, summed over their labels; one that does not exist yet is 0. Raises HttpError."""
    text = client.get(METRICS_PATH, timeout).body.decode("utf-8", errors="replace")
    return parse_counters(text, (*COUNTERS, VERIFY_STEPS))


def parse_counters(text: str, names: t.Sequence[str] = COUNTERS) -> dict[str, float]:
    """Counters of a /metrics page, summed over their labels; one that does not exist yet is 0.

    Raises HttpError for one that is no number, or none to count with.
    """
    sums = dict.fromkeys(names, 0.0)
    # A scrape through OpenMetrics turns the colon into an underscore.
    exported = {f"sglang{mark}{name}": name for mark in ":_" for name in names}
    for full_name, _labels, value in samples(text, exported):
        sums[exported[full_name]] += _number(exported[full_name], value)
    for name, value in sums.items():
        _number(name, value)
    return sums


def samples(text: str, names: t.Container[str]) -> t.Iterator[tuple[str, dict[str, str], str]]:
    """Name, labels and value (as it is written) of each sample of these names on a /metrics page."""
    for line in text.split("\n"):
        match = _SAMPLE.fullmatch(line)
        if match and match["name"] in names:
            yield match["name"], dict(_LABEL.findall(match["labels"] or "")), match["value"]


def _number(name: str, given: str | float) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise HttpError("body", "GET", METRICS_PATH, f"{name} is {str(given)[:80]!r}, wanted a finite count", 0.0, 200)
    return value


@dataclass(frozen=True)
class Watched:
    """Loads seen until a condition held (or not), with the seconds since the first look."""

    held: bool
    samples: tuple[tuple[float, Load], ...]

    @property
    def last(self) -> Load:
        return self.samples[-1][1]

    def as_list(self) -> list[dict[str, t.Any]]:
        return [
            {"s": round(at, 2), "used_tokens": load.used_tokens, "running": load.running, "waiting": load.waiting}
            for at, load in self.samples
        ]


def watch(client: Client, until: t.Callable[[Load], bool], window: float, pause: float = 0.02) -> Watched:
    """Read the load until a condition holds or the window (seconds) is over; equal readings are kept once."""
    start = time.monotonic()
    samples: list[tuple[float, Load]] = []
    while True:
        load = read_load(client, max(1.0, min(10.0, window - (time.monotonic() - start))))
        elapsed = time.monotonic() - start
        if not samples or samples[-1][1] != load:
            samples.append((elapsed, load))
        if until(load):
            return Watched(True, tuple(samples))
        if elapsed + pause > window:
            return Watched(False, tuple(samples))
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


# A request that the router had handed over just before it was told to stop may still be on its way.
SETTLE_S = 1.0


def watch_idle(client: Client, budget: float, settle: float = SETTLE_S) -> Watched:
    """Watch until nothing has run or waited for `settle` seconds, or the budget (seconds) is over."""
    idle_since: float | None = None

    def settled(load: Load) -> bool:
        nonlocal idle_since
        now = time.monotonic()
        idle_since = None if load.busy else now if idle_since is None else idle_since
        return idle_since is not None and now - idle_since >= settle

    return watch(client, settled, budget, pause=0.1)
