# SPDX-License-Identifier: GPL-3.0-or-later
"""Where checks look: files below a root, and programs that end in time, whatever they do."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
from typing import Callable

TIMED_OUT = 124
NOT_THERE = 127
SECONDS = 20.0
# Output in the language and number format that the parsers know.
LANGUAGE = {"LC_ALL": "C", "LANGUAGE": "C"}


def run_program(command: list[str], timeout: float = SECONDS) -> tuple[int, str]:
    """Run a program and return its exit status and its output, complaints included.

    127 when it is not there, 124 when it is still running after `timeout` seconds. It is killed then, with everything
    it started, and not waited for: a program that hangs in a driver does not die before the driver lets go of it.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **LANGUAGE},
            start_new_session=True,
        )
    except OSError as error:
        return NOT_THERE, str(error)
    try:
        output, _nothing = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return TIMED_OUT, f"{command[0]} did not end within {timeout:g} s"
    return process.returncode, output.decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Host:
    """Where the checks look: files below `root`, programs through `run`."""

    root: str = "/"
    run: Callable[..., tuple[int, str]] = run_program

    def path(self, name: str) -> str:
        """Return the real path of `name` on this host."""
        return os.path.join(self.root, name.lstrip("/"))

    def read(self, name: str) -> str:
        """Return a file's text, "" when it can't be read."""
        try:
            with open(self.path(name), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def names(self, name: str) -> list[str]:
        """Return the sorted names in a directory, [] when it can't be read."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def pids(self) -> list[int]:
        """Return the processes of the host."""
        return sorted(int(name) for name in self.names("/proc") if name.isdigit())

    def unit_of(self, pid: int) -> str:
        """Return the systemd service that a process belongs to, "" for none."""
        unit = re.search(r"/([^/\n]+\.service)", self.read(f"/proc/{pid}/cgroup"))
        return unit[1] if unit else ""

    def open_files(self, pid: int) -> list[str]:
        """Return what the process's descriptors point to. One that vanishes meanwhile is left out."""
        targets = []
        for name in self.names(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(self.path(f"/proc/{pid}/fd/{name}")))
        return targets


def whole_lines(text: str) -> list[str]:
    """Return the lines of a text but for a last one that was cut off: half a word or number is another one."""
    return [line.rstrip("\r\n") for line in text.splitlines(keepends=True) if line.endswith("\n")]


def number(text: str | None) -> float | None:
    """Return the number that a field begins with ("300.00 W", "16x"), None for N/A and every other word."""
    match = re.match(r"\s*\[?\s*(-?\d+(?:\.\d+)?)", text or "")
    return float(match[1]) if match else None
