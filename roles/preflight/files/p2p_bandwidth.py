# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure transfers between GPUs, one at a time and all at once, and check that the data arrives.

    python p2p_bandwidth.py --mib 64 --repeats 16 --seconds 120 --min-gb-s 10

A single flow says little: a switch that moves 50 GB/s for one pair can fall to a few when several write at once. Prints
one JSON object: {"skipped": reason}, or rates in GB/s (1e9 bytes) of every pair alone ("alone") and of every flow in
rounds of simultaneous flows ("rounds"), and "findings". Runs in the engine's environment (PyTorch with CUDA); uses
--mib of memory for every pair, ends by itself after --seconds, changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterable

GB = 1e9
MIB = 1 << 20
SEVERITY = {"gpu.p2p_hang": "error", "gpu.p2p_data": "error", "gpu.p2p_bandwidth": "warning"}
PLACES = "lspci -tv shows switches and root ports; nvidia-smi topo -m; docs/preflight.md#transfers-between-gpus"
Flow = tuple[int, int]


def found(id: str, seen: str, wanted: str, fix: str) -> dict[str, str]:
    """Return a finding in preflight's form."""
    return {"id": id, "severity": SEVERITY[id], "seen": seen, "wanted": wanted, "fix": fix, "variable": ""}


def rounds_of(count: int) -> dict[str, list[Flow]]:
    """Return the rounds of simultaneous flows: every shift (each GPU sends to the k-th after it), and all pairs."""
    rounds = {f"shift {k}": [(one, (one + k) % count) for one in range(count)] for k in range(1, count)}
    return {**rounds, "all pairs": [(one, two) for one in range(count) for two in range(count) if one != two]}


def gb_per_s(size: int, seconds: float) -> float:
    """Return a rate in GB/s for `size` bytes; 0 for a time that no clock can have measured."""
    return size / seconds / GB if seconds > 0 else 0.0


def judge(
    alone: dict[Flow, float], rounds: dict[str, dict[Flow, float]], wrong: Iterable[Flow], min_gb_s: float
) -> list[dict[str, str]]:
    """Return findings about rates in GB/s.

    alone, rounds: flow -> rate. wrong: flows that delivered other data. A round has collapsed when all its flows
    together move less than the slowest of them moves alone: sharing a link divides a rate, and never does that.
    """
    findings = []
    bad = sorted(set(wrong))
    if bad:
        pairs = ", ".join(f"{source}-{target}" for source, target in bad)
        fix = "IOMMU and ACS off (host.iommu, host.acs), else NCCL_P2P_DISABLE=1; " + PLACES
        findings.append(found("gpu.p2p_data", f"other data arrived than was sent: {pairs}", "the same data", fix))
    slow = {pair: rate for pair, rate in alone.items() if rate < min_gb_s}
    if slow:
        (source, target), rate = min(slow.items(), key=lambda item: item[1])
        seen = f"{len(slow)} of {len(alone)} pairs alone are slower, the slowest {source}-{target} with {rate:.1f} GB/s"
        fix = "gpu.link_width, gpu.p2p, host.iommu; " + PLACES
        findings.append(found("gpu.p2p_bandwidth", seen, f"{min_gb_s:g} GB/s", fix))
    for name, flows in rounds.items():
        together, one = sum(flows.values()), min(alone[flow] for flow in flows)
        if together < one:
            seen = f"{name}: {len(flows)} flows at once move {together:.1f} GB/s together, one of them alone {one:.1f}"
            fix = "choose islands whose flows stay behind one switch (sglang_serve_islands); " + PLACES
            findings.append(found("gpu.p2p_bandwidth", seen, f"more than {one:.1f} GB/s", fix))
    return findings


class Watchdog:
    """Ends the process with a finding when time is up: a transfer that hangs cannot be interrupted from Python."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.phase = seconds, "start"
        self.timer = threading.Timer(seconds, self.bark)
        self.timer.daemon = True
        self.timer.start()

    def bark(self) -> None:
        """Say what was being measured, and end without waiting for the GPUs."""
        seen = f"{self.phase} did not end; {self.seconds:g} s in all are over"
        fix = "journalctl -k -b | grep -E 'Xid|AMD-Vi|DMAR'; host.iommu, host.acs; else NCCL_P2P_DISABLE=1"
        print(json.dumps({"findings": [found("gpu.p2p_hang", seen, "every transfer ends", fix)]}), flush=True)
        os._exit(0)


def measure(torch, flows: list[Flow], buffers: dict, size: int, repeats: int) -> tuple[dict[Flow, float], list[Flow]]:
    """Run these flows at once; return their rates in GB/s and those that delivered other data.

    buffers: flow -> (source, target) of `size` bytes each, int32, on the two GPUs.
    """
    streams = {flow: torch.cuda.Stream(device=flow[0]) for flow in flows}
    events = {flow: [torch.cuda.Event(enable_timing=True) for _edge in range(2)] for flow in flows}
    for source, target in flows:
        buffers[source, target][1].zero_()
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
    for flow in flows:
        events[flow][0].record(streams[flow])
    for _repeat in range(repeats):
        for flow in flows:
            with torch.cuda.stream(streams[flow]):
                buffers[flow][1].copy_(buffers[flow][0], non_blocking=True)
    for flow in flows:
        events[flow][1].record(streams[flow])
    for flow in flows:
        events[flow][1].synchronize()
    rates = {flow: gb_per_s(size * repeats, events[flow][0].elapsed_time(events[flow][1]) / 1000) for flow in flows}
    wrong = [flow for flow in flows if not torch.equal(buffers[flow][0].cpu(), buffers[flow][1].cpu())]
    return rates, wrong


def run(torch, count: int, size: int, repeats: int, min_gb_s: float, watchdog: Watchdog) -> dict:
    """Measure every pair alone, then every round."""
    buffers = {}
    for source, target in rounds_of(count)["all pairs"]:
        pattern = torch.arange(size // 4, dtype=torch.int32, device=source) * (source * count + target + 1)
        buffers[source, target] = pattern, torch.empty_like(pattern, device=target)
    alone, rounds, wrong = {}, {}, []
    for flow in buffers:
        watchdog.phase = f"{flow[0]}-{flow[1]} alone"
        measure(torch, [flow], buffers, size, 1)  # the first transfer maps the peer's memory
        rates, bad = measure(torch, [flow], buffers, size, repeats)
        alone.update(rates)
        wrong += bad
    for name, flows in rounds_of(count).items():
        watchdog.phase = f"{name}, {len(flows)} flows at once"
        rounds[name], bad = measure(torch, flows, buffers, size, repeats)
        wrong += bad
    watchdog.timer.cancel()
    direct = [pair for pair in alone if torch.cuda.can_device_access_peer(*pair)]
    return {
        "gpus": [torch.cuda.get_device_name(one) for one in range(count)],
        "direct_pairs": len(direct),
        "alone": {f"{source}-{target}": round(rate, 2) for (source, target), rate in alone.items()},
        "rounds": {
            name: {f"{source}-{target}": round(rate, 2) for (source, target), rate in flows.items()}
            for name, flows in rounds.items()
        },
        "findings": judge(alone, rounds, wrong, min_gb_s),
    }


def why_not() -> str:
    """Return why nothing can be measured here, "" when it can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no PyTorch"
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    count = torch.cuda.device_count()
    return "" if count > 1 else f"PyTorch sees {count} GPU, and a transfer needs two"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of a transfer in MiB")
    parser.add_argument("--repeats", type=int, default=16, help="transfers of each flow")
    parser.add_argument("--seconds", type=float, default=120, help="time for everything")
    parser.add_argument("--min-gb-s", type=float, default=10, help="least rate of a pair alone")
    arguments = parser.parse_args()
    watchdog = Watchdog(arguments.seconds)
    watchdog.phase = "starting CUDA"
    reason = why_not()
    if reason:
        watchdog.timer.cancel()
        print(json.dumps({"skipped": reason, "findings": []}))
        return
    import torch

    size = arguments.mib * MIB
    result = run(torch, torch.cuda.device_count(), size, arguments.repeats, arguments.min_gb_s, watchdog)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
