# SPDX-License-Identifier: GPL-3.0-or-later
"""The GPU exporter with NVML's own module; only the calls into the driver's library answer from a table."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

PROGRAM = Path(__file__).parents[2] / "roles/gpu_exporter/files/gpu_exporter.py"
GIB = 2**30


@pytest.fixture
def exporter():
    spec = importlib.util.spec_from_file_location("gpu_exporter", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raises(number: int):
    """Return a function that answers every call with an NVML error."""

    def fail(*_):
        raise pynvml.NVMLError(number)

    return fail


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs; the second has no utilization counters."""
    answers = {
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:0{handle + 1}:00.0"),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=90 * GIB, total=96 * GIB),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 71 + handle,
        "nvmlDeviceGetPowerUsage": lambda handle: 498500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 500000,
        "nvmlDeviceGetClockInfo": lambda handle, clock: 2400,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4 | 0x40 * handle,
        "nvmlDeviceGetUtilizationRates": lambda handle: (
            raises(pynvml.NVML_ERROR_NOT_SUPPORTED)() if handle else SimpleNamespace(gpu=97)
        ),
    }
    for name, answer in answers.items():
        assert hasattr(pynvml, name), f"NVML has no {name}"
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


def samples(exporter, xids=None) -> dict[tuple, float]:
    """Return (name, gpu and further labels) -> value, of one scrape as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(exporter.GpuCollector(xids or exporter.XidWatch()))
    text = generate_latest(registry).decode()
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "pci")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_quantities_are_in_base_units(exporter, nvml):
    seen = samples(exporter)
    assert seen["gpu_memory_used_bytes", "0"] == 90 * GIB
    assert seen["gpu_memory_total_bytes", "1"] == 96 * GIB
    assert seen["gpu_power_watts", "0"] == 498.5
    assert seen["gpu_power_limit_watts", "0"] == 500
    assert seen["gpu_temperature_celsius", "1"] == 72
    assert seen["gpu_utilization_ratio", "0"] == 0.97
    assert seen["gpu_sm_clock_hertz", "0"] == 2.4e9


def test_what_a_card_does_not_have_is_left_out(exporter, nvml):
    seen = samples(exporter)
    assert seen["gpu_up", "1"] == 1
    assert ("gpu_utilization_ratio", "1") not in seen


def test_reasons_for_slow_clocks_are_told_apart(exporter, nvml):
    seen = samples(exporter)
    assert seen["gpu_throttled", "0", "sw_power_cap"] == 1
    assert seen["gpu_throttled", "0", "hw_thermal"] == 0
    assert seen["gpu_throttled", "1", "hw_thermal"] == 1


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"])
def test_a_lost_gpu_hides_no_other(exporter, nvml, call):
    before = getattr(pynvml, call)
    lost = raises(pynvml.NVML_ERROR_GPU_IS_LOST)
    nvml.setattr(pynvml, call, lambda index, *rest: lost() if index == 0 else before(index, *rest))
    seen = samples(exporter)
    assert seen["gpu_up", "0"] == 0
    assert seen["gpu_up", "1"] == 1
    assert ("gpu_memory_used_bytes", "0") not in seen


def test_xid_errors_are_counted_while_it_waits(exporter, nvml):
    events = iter([SimpleNamespace(device=1, eventData=79), None, SimpleNamespace(device=1, eventData=79)])
    drained = threading.Event()

    def wait(_events, _timeout):
        event = next(events, "end")
        if event == "end":
            drained.set()
            threading.Event().wait()
        return event or raises(pynvml.NVML_ERROR_TIMEOUT)()

    nvml.setattr(pynvml, "nvmlEventSetCreate", lambda: None)
    nvml.setattr(pynvml, "nvmlDeviceRegisterEvents", lambda handle, kinds, events: None)
    nvml.setattr(pynvml, "nvmlEventSetWait_v2", wait)
    watch = exporter.XidWatch()
    assert ("gpu_xid_errors_total", "1", "79") not in samples(exporter, watch)
    watch.start()
    assert drained.wait(5)
    seen = samples(exporter, watch)
    assert seen["gpu_xid_errors_total", "1", "79"] == 2
    assert seen[("gpu_xid_watched",)] == 2
