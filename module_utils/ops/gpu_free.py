# SPDX-License-Identifier: GPL-3.0-or-later
"""Does anybody hold memory of these GPUs? The ExecStartPre= of a server's unit: no start runs into what was left.

    python3 -m ops.gpu_free --gpus 0,1,2,3 --timeout 60 [--neighbours sglang-replica-1.service]

Memory that the server's last process held is free some moments after the process is gone. Ends with status 0 when less
than 1 GiB of each GPU is held, the neighbours' aside, and 1 with who holds it when the time is over. Where nvidia-smi
does not answer nothing is known, and the start goes on.
"""

from __future__ import annotations

import argparse
import time
import typing as t

from .findings import Finding
from .gpu_checks import check_memory_held
from .gpu_facts import ask_smi
from .host import Host
from .probe import say_line

POLL_S = 1.0
SMI_TIMEOUT_S = 20.0


def held(host: Host, gpus: t.Collection[int], neighbours: t.Iterable[str]) -> tuple[list[Finding], str]:
    """Who holds memory of these GPUs, and why that is not known ("" when it is)."""
    answer = ask_smi(host, SMI_TIMEOUT_S)
    return check_memory_held(host, [gpu for gpu in answer.gpus if gpu.index in gpus], neighbours), answer.problem


def wait_until_free(
    host: Host,
    gpus: t.Collection[int],
    neighbours: t.Collection[str],
    timeout: float,
    say: t.Callable[[str], None] = say_line,
    clock: t.Callable[[], float] = time.monotonic,
    sleep: t.Callable[[float], None] = time.sleep,
) -> int:
    """Poll until the GPUs are free (0) or the time is over (1)."""
    start = clock()
    names = ", ".join(map(str, gpus))
    while True:
        findings, problem = held(host, gpus, neighbours)
        elapsed = clock() - start
        if problem:
            say(f"not known whether the memory of GPU {names} is free: nvidia-smi: {problem}")
            return 0
        if not findings:
            say(f"the memory of GPU {names} is free after {elapsed:.0f} s")
            return 0
        if elapsed + POLL_S >= timeout:
            for finding in findings:
                say(f"not started: {finding.seen}, wanted: {finding.wanted}; {finding.fix}")
            return 1
        sleep(POLL_S)


def main(argv: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops.gpu_free", description="Wait until the memory of GPUs is free.")
    parser.add_argument("--gpus", required=True, help="their numbers as nvidia-smi counts, such as 0,1,2,3")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait at most (default 60)")
    parser.add_argument("--neighbours", default="", help="units whose memory is their own, such as a.service,b.service")
    arguments = parser.parse_args(argv)
    gpus = [int(word) for word in arguments.gpus.split(",")]
    return wait_until_free(Host(), gpus, [word for word in arguments.neighbours.split(",") if word], arguments.timeout)


if __name__ == "__main__":
    raise SystemExit(main())
