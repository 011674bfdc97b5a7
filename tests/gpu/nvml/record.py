#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Record what NVML answers the GPU exporter on this machine's cards, and the page that the exporter makes of it.

    python tests/gpu/nvml/record.py > tests/monitoring/nvml/CARD.json

Needs a GPU, nvidia-ml-py and prometheus-client. The exporter's own code asks; what it asks, and only that, is written
down, so nothing in it names this machine or this card beyond its model and its place on the bus.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
from prometheus_client import CollectorRegistry, generate_latest

PROGRAM = Path(__file__).resolve().parents[3] / "roles/gpu_exporter/files/gpu_exporter.py"
CALL = re.compile(r"pynvml\.(nvml[A-Z]\w+)")
WAIT_MS = 500
"""How long the one wait for an event lasts, in place of the exporter's."""


def load_exporter() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_exporter", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(value: Any) -> Any:
    """A value of NVML as JSON; a structure as its fields, an object of the library (a handle, a set) as null."""
    if isinstance(value, bytes):
        return value.decode()
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    return None


class Recorder:
    """Stands in for functions of NVML, calls them and keeps what they were asked and what they said.

    ``gpu`` of a call is the number of the card that it is about, null for one about none.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.handles: list[tuple[Any, int]] = []

    def number(self, value: Any) -> int | None:
        return next((index for handle, index in self.handles if handle is value), None)

    def watch(self, name: str) -> None:
        real: Callable[..., Any] = getattr(pynvml, name)

        def stand_in(*arguments: Any) -> Any:
            gpu = next((number for one in arguments if (number := self.number(one)) is not None), None)
            rest = [one for one in arguments if isinstance(one, int) and self.number(one) is None]
            call = {"call": name, "gpu": gpu, "arguments": rest}
            self.calls.append(call)
            try:
                value = real(*arguments)
            except pynvml.NVMLError as error:
                self.calls[-1] = call | {"error": error.value, "text": str(error)}
                raise
            if name == "nvmlDeviceGetHandleByIndex":
                self.handles.append((value, arguments[0]))
            self.calls[-1] = call | {"result": plain(value)}
            return value

        setattr(pynvml, name, stand_in)


class Seen(Exception):
    """The one wait for an event is over."""


def once(recorder: Recorder, exporter: Any) -> None:
    """One round of the exporter's watch for Xid errors: registering, and a wait that nothing ends but its time."""
    wait = pynvml.nvmlEventSetWait_v2

    def short(events: Any, _milliseconds: int) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            wait(events, WAIT_MS)
        raise Seen

    pynvml.nvmlEventSetWait_v2 = short
    try:
        exporter.XidWatch()._watch()
    except Seen:
        pynvml.nvmlEventSetWait_v2 = wait


def main() -> None:
    exporter = load_exporter()
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    found: dict[str, Any] = {
        "card": pynvml.nvmlDeviceGetName(card),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "nvml": pynvml.nvmlSystemGetNVMLVersion(),
    }
    recorder = Recorder()
    for name in sorted({*CALL.findall(PROGRAM.read_text(encoding="utf-8"))} - {"nvmlInit"}):
        if callable(getattr(pynvml, name, None)):
            recorder.watch(name)
    registry = CollectorRegistry()
    registry.register(exporter.GpuCollector(exporter.XidWatch()))
    found["page"] = generate_latest(registry).decode().splitlines()
    found["scrape"], recorder.calls = recorder.calls, []
    once(recorder, exporter)
    found["watch"] = recorder.calls
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
