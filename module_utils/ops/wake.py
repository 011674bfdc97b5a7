# SPDX-License-Identifier: GPL-3.0-or-later
"""Wake what was stopped: SIGCONT to each process of these units that two looks in a row found stopped.

    python3 -m ops.wake --state /run/sglang-wake/stopped.json --unit sglang-unified.service [--unit ...]

A process that SIGSTOP has stopped (state T; a debugger's is t and is left alone) ends nothing, so no restart follows,
and the engine's own watchdog is silent when it is stopped too. Going on loses nothing: its requests are answered. A
timer runs this every 30 s. Between two looks the state file has the processes that were stopped, each with the moment
it was first seen so. Ends with status 1 when one can't be woken, or when the state can't be written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import typing as t

from .host import Host
from .probe import say_line

# From one look to the next one that may wake, in seconds.
APART_S = 30.0
# /proc/PID/stat after the name in brackets: the state, and the start in clock ticks since the boot.
STATE, START = 0, 19


class Stopped(t.NamedTuple):
    """A process in state T. key names it for as long as the host is up, its number alone does not."""

    key: str
    pid: int
    name: str
    unit: str


def stopped(host: Host, units: t.Collection[str]) -> list[Stopped]:
    """Return the stopped processes of these units."""
    found = []
    for pid in host.pids():
        head, _bracket, rest = host.read(f"/proc/{pid}/stat").rpartition(")")
        fields = rest.split()
        if len(fields) > START and fields[STATE] == "T" and (unit := host.unit_of(pid)) in units:
            found.append(Stopped(f"{pid}:{fields[START]}", pid, head.partition("(")[2], unit))
    return found


def read_state(path: str) -> dict[str, float]:
    """Return key -> when it was first seen stopped; a state that can't be read is as good as none."""
    try:
        with open(path, encoding="utf-8") as stream:
            return {str(key): float(since) for key, since in json.load(stream).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_state(path: str, state: t.Mapping[str, float]) -> None:
    """Write it as a whole or not at all. Raises OSError."""
    with open(f"{path}.new", "w", encoding="utf-8") as stream:
        json.dump(state, stream)
    os.replace(f"{path}.new", path)


def look(
    host: Host,
    units: t.Collection[str],
    before: t.Mapping[str, float],
    now: float,
    wake: t.Callable[[int, int], None] = os.kill,
    say: t.Callable[[str], None] = say_line,
) -> tuple[dict[str, float], bool]:
    """Wake what was stopped before and is still; return what is to be kept for the next look, and whether all woke."""
    kept, fine = {}, True
    for one in stopped(host, units):
        since = before.get(one.key, now)
        if now - since < APART_S:
            kept[one.key] = since
            continue
        what = f"process {one.pid} ({one.name}) of {one.unit} was stopped for {now - since:.0f} s or more"
        try:
            wake(one.pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
        except OSError as error:
            fine = False
            say(f"{what} and can't be woken: {error.strerror}. Next: kill -CONT {one.pid}, as root")
        else:
            say(f"{what}; woken (SIGCONT). To keep one stopped: systemctl stop sglang-wake.timer")
    return kept, fine


def main(argv: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops.wake", description="Wake processes of units that were stopped.")
    parser.add_argument("--unit", action="append", required=True, help="a unit whose processes are looked at")
    parser.add_argument("--state", required=True, help="file that one look leaves for the next")
    arguments = parser.parse_args(argv)
    # Not the clock on the wall, which may jump; the state is in /run, which no boot outlives.
    kept, fine = look(Host(), arguments.unit, read_state(arguments.state), time.monotonic())
    try:
        write_state(arguments.state, kept)
    except OSError as error:
        sys.stderr.write(f"cannot write {arguments.state}: {error.strerror}\n")
        return 1
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
