#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prometheus exporter of what NVML says about the GPUs, with Xid errors and the reasons for slow clocks.

    gpu_exporter.py --host 127.0.0.1 --port 9835

No DCGM: its profiling counters do not exist on RTX PRO 6000. Every scrape asks NVML. A GPU that answers with an error
has gpu_up 0 and nothing else; a quantity that this card does not have is left out.
"""

from __future__ import annotations

import argparse
import collections
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

XID_WAIT_MS = 5000
LABELS = ["gpu", "pci"]
# Bits of nvmlDeviceGetCurrentClocksEventReasons; idle and application clocks are no trouble and left out.
REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
# Family -> help, and how to read it from a handle.
GAUGES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "gpu_memory_used_bytes": ("Memory in use.", lambda h: pynvml.nvmlDeviceGetMemoryInfo(h).used),
    "gpu_memory_total_bytes": ("Memory of the card.", lambda h: pynvml.nvmlDeviceGetMemoryInfo(h).total),
    "gpu_utilization_ratio": (
        "Share of the last sample period in which a kernel ran.",
        lambda h: pynvml.nvmlDeviceGetUtilizationRates(h).gpu / 100,
    ),
    "gpu_temperature_celsius": (
        "Temperature of the die.",
        lambda h: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
    ),
    "gpu_power_watts": ("Power drawn.", lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1000),
    "gpu_power_limit_watts": ("Power limit in force.", lambda h: pynvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000),
    "gpu_sm_clock_hertz": (
        "Clock of the multiprocessors.",
        lambda h: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM) * 1e6,
    ),
}


class XidWatch(threading.Thread):
    """Counts Xid errors from the moment it starts; NVML tells of events only while somebody waits for them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.watched = 0

    def run(self) -> None:
        """Register every GPU that can report, and wait for ever; whatever ends that, nobody is watched any more."""
        try:
            self._watch()
        finally:
            self.watched = 0

    def _watch(self) -> None:
        events = pynvml.nvmlEventSetCreate()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                self.watched += 1
            except pynvml.NVMLError as error:
                print(f"GPU {index}: no Xid errors will be counted: {error}", flush=True)
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(events, XID_WAIT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError as error:
                print(f"waiting for Xid errors: {error}", flush=True)
                time.sleep(XID_WAIT_MS / 1000)
                continue
            gpu, xid = index_of(event.device), str(event.eventData)
            print(f"GPU {gpu}: Xid {xid}", flush=True)
            self.counts[gpu, xid] += 1


def index_of(handle: Any) -> str:
    """The GPU's number; "unknown" of one that does not even say that any more, as after Xid 79."""
    try:
        return str(pynvml.nvmlDeviceGetIndex(handle))
    except pynvml.NVMLError:
        return "unknown"


def pci_of(handle: Any) -> str:
    """The bus address, which stays when the numbering changes."""
    return pynvml.nvmlDeviceGetPciInfo(handle).busId


class GpuCollector:
    """One look at every GPU for each scrape."""

    def __init__(self, xids: XidWatch) -> None:
        self.xids = xids
        self.pci: dict[int, str] = {}

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask the GPUs."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families. A quantity that the card does not support has no sample."""
        up = GaugeMetricFamily("gpu_up", "1 when the GPU answers NVML, 0 when it answers with an error.", labels=LABELS)
        gauges = {name: GaugeMetricFamily(name, text, labels=LABELS) for name, (text, _) in GAUGES.items()}
        throttled = GaugeMetricFamily(
            "gpu_throttled", "1 while this reason holds the clocks down.", labels=[*LABELS, "reason"]
        )
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self.pci[index] = pci_of(handle)
                labels = [str(index), self.pci[index]]
                samples = {name: _supported(read, handle) for name, (_, read) in GAUGES.items()}
                reasons = _supported(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
            except pynvml.NVMLError:
                up.add_metric([str(index), self.pci.get(index, "")], 0)
                continue
            up.add_metric(labels, 1)
            for name, value in samples.items():
                if value is not None:
                    gauges[name].add_metric(labels, value)
            if reasons is not None:
                for reason, bit in REASONS.items():
                    throttled.add_metric([*labels, reason], float(bool(int(reasons) & bit)))
        # A counter without a sample would hide that nobody counts; the number of watched GPUs says it.
        xids = CounterMetricFamily("gpu_xid_errors", "Xid errors since the exporter started.", labels=["gpu", "xid"])
        for (gpu, xid), count in self.xids.counts.items():
            xids.add_metric([gpu, xid], count)
        watched = GaugeMetricFamily("gpu_xid_watched", "GPUs whose Xid errors are counted.", value=self.xids.watched)
        yield from (up, *gauges.values(), throttled, xids, watched)


def _supported(read: Callable[[Any], float], handle: Any) -> float | None:
    try:
        return float(read(handle))
    except pynvml.NVMLError_NotSupported:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", type=lambda text: str(ipaddress.ip_address(text)))
    parser.add_argument("--port", default=9835, type=int)
    arguments = parser.parse_args()
    pynvml.nvmlInit()
    xids = XidWatch()
    xids.start()
    registry = CollectorRegistry()
    registry.register(GpuCollector(xids))
    _, thread = start_http_server(arguments.port, arguments.host, registry)
    thread.join()


if __name__ == "__main__":
    main()
