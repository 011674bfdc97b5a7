"""Counters and gauges in SGLang's own ``/metrics``.

SGLang serves ``/metrics`` from prometheus_client's multiprocess directory, so a sample written in a scheduler process
shows up there once the directory exists (``--enable-metrics``). Without it nothing is exported and counting stays
in-process.
"""

import functools
import os

ACTIVE = "dsv4_sm120_kernel_active"
CALLS = "dsv4_sm120_kernel_calls"
LABELS = ("kernel", "tp_rank", "pp_rank")


@functools.cache
def _collectors() -> tuple:
    """(gauge, counter), or () when SGLang exports nothing. prometheus_client must see the directory when imported."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return ()
    from prometheus_client import Counter, Gauge

    active = "1 while this kernel replaces SGLang's, 0 when it was disabled (the log says why)"
    calls = "Calls into this kernel from Python: eager ones and those being captured; graph replays make none"
    return (
        Gauge(ACTIVE, active, LABELS, multiprocess_mode="mostrecent"),
        Counter(CALLS, calls, LABELS),
    )


class KernelMetrics:
    """The two samples of one kernel on one rank; ``calls`` counts even when nothing is exported."""

    def __init__(self, kernel: str, tp_rank: int, pp_rank: int) -> None:
        self.calls = 0
        self._samples = [c.labels(kernel, str(tp_rank), str(pp_rank)) for c in _collectors()]

    def set_active(self, active: bool) -> None:
        if self._samples:
            self._samples[0].set(int(active))

    def count(self) -> None:
        self.calls += 1
        if self._samples:
            self._samples[1].inc()
