# SPDX-License-Identifier: GPL-3.0-or-later
"""The GPU exporter with NVML's own module; the calls into the driver's library answer from a table or a recording.

The recordings in nvml/ are what real cards said (tests/gpu/nvml/record.py).
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

PROGRAM = Path(__file__).parents[2] / "roles/gpu_exporter/files/gpu_exporter.py"
RECORDINGS = sorted((Path(__file__).parent / "nvml").glob("*.json"))
RECORDING = Path(__file__).parent / "nvml/h200-busy.json"
RECORDER = Path(__file__).parents[1] / "gpu/nvml/record.py"
GIB = 2**30


def load(path: Path):
    """Return a program as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def exporter():
    return load(PROGRAM)


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


@pytest.fixture
def watch(exporter, nvml):
    """Return a function: events (the error that waiting for one raises in its place) -> a watch that has seen them."""
    drained = threading.Event()

    def look(*events):
        waiting = iter(events)

        def wait(_events, _timeout):
            event = next(waiting, None)
            if event is None:
                drained.set()
                threading.Event().wait()
            if isinstance(event, Exception):
                raise event
            return event

        nvml.setattr(pynvml, "nvmlEventSetCreate", lambda: None)
        nvml.setattr(pynvml, "nvmlDeviceRegisterEvents", lambda handle, kinds, events: None)
        nvml.setattr(pynvml, "nvmlEventSetWait_v2", wait)
        watch = exporter.XidWatch()
        assert not any(name == "gpu_xid_errors_total" for name, *_ in samples(exporter, watch))
        watch.start()
        assert drained.wait(5)
        return watch

    return look


def xid(number: int, device: int) -> SimpleNamespace:
    """Return an event as NVML gives it."""
    return SimpleNamespace(device=device, eventData=number)


def test_xid_errors_are_counted_while_it_waits(exporter, watch):
    seen = samples(exporter, watch(xid(79, 1), pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT), xid(79, 1)))
    assert seen["gpu_xid_errors_total", "1", "79"] == 2
    assert seen[("gpu_xid_watched",)] == 2


def test_an_xid_error_of_a_gpu_that_fell_off_the_bus_is_counted(exporter, nvml, watch):
    """It does not tell its number any more; the others are watched as before."""
    lost = raises(pynvml.NVML_ERROR_GPU_IS_LOST)
    nvml.setattr(pynvml, "nvmlDeviceGetIndex", lambda handle: lost() if handle == 0 else handle)
    seen = samples(exporter, watch(xid(79, 0), xid(31, 1)))
    assert seen["gpu_xid_errors_total", "unknown", "79"] == 1
    assert seen["gpu_xid_errors_total", "1", "31"] == 1
    assert seen[("gpu_xid_watched",)] == 2


def test_nobody_is_watched_when_the_watch_has_ended(exporter, nvml):
    watch = exporter.XidWatch()

    def wait(_events, _timeout):
        assert watch.watched == 2
        raise OSError("the library is gone")

    nvml.setattr(pynvml, "nvmlEventSetCreate", lambda: None)
    nvml.setattr(pynvml, "nvmlDeviceRegisterEvents", lambda handle, kinds, events: None)
    nvml.setattr(pynvml, "nvmlEventSetWait_v2", wait)
    with pytest.raises(OSError, match="the library is gone"):
        watch.run()
    assert samples(exporter, watch)[("gpu_xid_watched",)] == 0


class Card(int):
    """A handle: the number of the card that it stands for, told from other numbers."""


def replay(monkeypatch, calls: list[dict]) -> None:
    """Let NVML answer as it did when it was recorded, and only what it was asked then."""
    said = {(call["call"], call["gpu"], *call["arguments"]): call for call in calls}

    def answer(name: str):
        def call(*arguments):
            card = next((int(one) for one in arguments if isinstance(one, Card)), None)
            found = said[name, card, *(one for one in arguments if type(one) is int)]
            if "error" in found:
                raise pynvml.NVMLError(found["error"])
            if name == "nvmlDeviceGetHandleByIndex":
                return Card(*arguments)
            result = found["result"]
            return SimpleNamespace(**result) if isinstance(result, dict) else result

        return call

    for name in {call["call"] for call in calls}:
        assert hasattr(pynvml, name), f"NVML has no {name}"
        monkeypatch.setattr(pynvml, name, answer(name))


def read(text: str) -> dict[tuple, float]:
    """Return (name, labels) -> value of a page; versions of the client write numbers differently."""
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def page(exporter) -> dict[tuple, float]:
    registry = CollectorRegistry()
    registry.register(exporter.GpuCollector(exporter.XidWatch()))
    return read(generate_latest(registry).decode())


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_page_of_a_real_card_is_what_it_was(exporter, monkeypatch, path):
    recording = json.loads(path.read_text(encoding="utf-8"))
    replay(monkeypatch, recording["scrape"])
    assert page(exporter) == read("\n".join(recording["page"]) + "\n")


def test_the_program_itself_has_served_the_same_series():
    """Its page as it ran beside the recording, as a user who owns nothing, with the card's Xid errors watched."""
    recording = json.loads(RECORDING.read_text(encoding="utf-8"))
    served = read(RECORDING.with_suffix(".prom").read_text(encoding="utf-8"))
    assert served.keys() == read("\n".join(recording["page"]) + "\n").keys()
    assert served["gpu_xid_watched",] == 1


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_real_card_answers_all_that_the_panels_need(path):
    recording = json.loads(path.read_text(encoding="utf-8"))
    assert not [call for call in recording["scrape"] if "error" in call]
    asked = {call["call"]: call for call in recording["watch"]}
    assert "error" not in asked["nvmlDeviceRegisterEvents"]
    assert asked["nvmlEventSetWait_v2"]["error"] == pynvml.NVML_ERROR_TIMEOUT


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_names_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"GPU-[0-9a-f]{8}|[0-9a-f]{8}-[0-9a-f]{4}-|serial|uuid|hostname", text, re.IGNORECASE)


def test_a_recording_of_the_table_gives_the_same_page(exporter, nvml, monkeypatch):
    """What record.py writes down is enough for the page, also where a card does not have a quantity."""
    recorder = load(RECORDER)
    before = page(exporter)
    recording = recorder.Recorder()
    monkeypatch.setattr(recorder, "plain", lambda value: vars(value) if isinstance(value, SimpleNamespace) else value)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", Card)
    for name in sorted(set(recorder.CALL.findall(PROGRAM.read_text())) - {"nvmlInit"}):
        if callable(getattr(pynvml, name)):
            monkeypatch.setattr(pynvml, name, getattr(pynvml, name))  # taken back at the end
            recording.watch(name)
    assert page(exporter) == before
    replay(monkeypatch, recording.calls)
    assert page(exporter) == before
