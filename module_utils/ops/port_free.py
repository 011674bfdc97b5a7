# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until nobody listens on a server's ports: the ExecStartPre= of its unit, so that no start runs into a taken one.

    python3 -m ops.port_free --port sglang_serve_port=30001 [--port sglang_serve_nccl_port=29501]

An engine finds out minutes later, with its model loaded, and three such starts would be the last ones. This waits as
long as the unit's TimeoutStartSec lets it and says every 30 s who holds the port; a start that ends so is followed by
the next one, so the server comes back by itself whenever the port is free. Ends with status 0 then, 2 for wrong
arguments.
"""

from __future__ import annotations

import argparse
import time
import typing as t

from .findings import Finding
from .host import Host
from .preflight import check_port
from .probe import say_line

POLL_S = 1.0
SAY_S = 30.0


def taken(host: Host, ports: t.Mapping[str, int]) -> list[Finding]:
    """Who listens on which of these ports; no process of the unit is there before its start."""
    return [finding for variable, port in ports.items() for finding in check_port(host, port, variable, ())]


def wait_until_free(
    host: Host,
    ports: t.Mapping[str, int],
    say: t.Callable[[str], None] = say_line,
    clock: t.Callable[[], float] = time.monotonic,
    sleep: t.Callable[[float], None] = time.sleep,
) -> None:
    """Return when all of them are free; ports: variable that sets it -> port."""
    start = clock()
    said_at: float | None = None
    while findings := taken(host, ports):
        if said_at is None or clock() - said_at >= SAY_S:
            said_at = clock()
            for finding in findings:
                say(f"the start waits: {finding.seen}, wanted: {finding.wanted}; {finding.fix}")
        sleep(POLL_S)
    if said_at is not None:
        say(f"port {', '.join(map(str, ports.values()))}: free after {clock() - start:.0f} s, the start goes on")


def named_port(text: str) -> tuple[str, int]:
    """Return (variable, port) of variable=port. Raises ValueError."""
    variable, _equals, port = text.partition("=")
    return variable, int(port)


def main(argv: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops.port_free", description="Wait until ports are free.")
    wanted = "a port and the variable that sets it, such as sglang_serve_port=30001"
    parser.add_argument("--port", action="append", type=named_port, required=True, help=wanted)
    wait_until_free(Host(), dict(parser.parse_args(argv).port))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
