"""Verify, then time. A result that was not verified gets no time."""

import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

PEERS_ENV = "DSV4_BENCH_PEERS"
"""Folder put on ``sys.path`` in which peers (``sglang.kernels``, ``flash_mla``, ``deep_gemm``) can be imported."""


@dataclass(frozen=True)
class Contender:
    """Something that can be timed: ours or a peer.

    ``error()`` runs it on fresh, poisoned outputs and returns the relative error ``|out - truth| / |truth|``, or raises
    ``AssertionError`` when the output is wrong in kind. A contender whose error exceeds ``tolerance`` is not timed.
    """

    run: Callable[[], object]
    error: Callable[[], float]
    tolerance: float


@dataclass(frozen=True)
class Built:
    """A case with its tensors allocated. ``bytes`` and ``flops`` are the least that must be moved and done, once."""

    ours: Contender
    peers: dict[str, Contender] = field(default_factory=dict)
    bytes: int = 0
    flops: int = 0
    replay: Callable[[], None] | None = None
    """Captures at the maximum, replays with other lengths and contents, raises ``AssertionError`` on a difference."""


@dataclass(frozen=True)
class Case:
    """One line of a table. ``group`` names the table; ``build`` allocates, so that one case is alive at a time.

    Consecutive cases with the same ``together`` are alive at once and timed in turn: their differences are what counts.
    """

    op: str
    group: str
    params: dict[str, object]
    build: Callable[[], Built]
    together: str | None = None


class CaseModule(Protocol):
    """``benchmarks/cases_<op>.py``."""

    def cases(self, device: torch.device, quick: bool) -> Iterator[Case]: ...


def add_peers_path() -> None:
    """Make the folder named by ``DSV4_BENCH_PEERS`` importable; without the variable only installed peers are found."""
    path = os.environ.get(PEERS_ENV)
    if path and path not in sys.path:
        sys.path.append(path)


def rel_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative Frobenius error in fp64; NaN or infinity in ``out`` gives infinity."""
    out, truth = out.double(), truth.double()
    if not torch.isfinite(out).all():
        return float("inf")
    return ((out - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def graph_median_us(run: Callable[[], object], rep_ms: int = 40) -> float:
    """Median time of one ``run`` in microseconds, replayed from a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    run()
    torch.cuda.synchronize()
    return do_bench_cudagraph(run, rep=rep_ms, return_mode="median") * 1e3


def interleaved_us(runs: list[Callable[[], object]], rounds: int = 400, calls: int = 20) -> list[list[float]]:
    """Microseconds of one call of each of ``runs`` in each round.

    All are captured first, ``calls`` to a graph; a round replays every graph once, in an order of its own, so that
    clocks and neighbours treat all alike.
    """
    graphs = []
    for run in runs:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        graphs.append(graph)
    shuffle = random.Random(0).shuffle
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        order = list(range(len(runs)))
        shuffle(order)
        for index in order:
            start.record()
            graphs[index].replay()
            end.record()
            end.synchronize()
            times[index].append(start.elapsed_time(end) * 1e3 / calls)
    return times


def spread_percent(times: list[list[float]], draws: int = 1000) -> tuple[float, float, float]:
    """How far the medians of ``times`` are apart, in percent of the smallest, with the 95 % interval of a bootstrap.

    A draw takes as many rounds as there were, with replacement, the same ones of every contender.
    """

    def spread(samples: list[list[float]]) -> float:
        medians = [statistics.median(sample) for sample in samples]
        return (max(medians) / min(medians) - 1) * 100

    generator, rounds = random.Random(0), len(times[0])
    drawn = []
    for _ in range(draws):
        chosen = generator.choices(range(rounds), k=rounds)
        drawn.append(spread([[sample[i] for i in chosen] for sample in times]))
    drawn.sort()
    return spread(times), drawn[round(0.025 * (draws - 1))], drawn[round(0.975 * (draws - 1))]


def copy_bandwidth() -> float:
    """Device-to-device copy bandwidth in bytes per second, bytes read plus bytes written."""
    from triton.testing import do_bench

    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3)
