# SPDX-License-Identifier: GPL-3.0-or-later
"""Does anybody hold memory of these GPUs? The ExecStartPre= of a server's unit: no start runs into what was left.

    python3 -m ops.gpu_free --gpus 0,1,2,3 --timeout 60 [--neighbours sglang-replica-1.service]

Memory that the server's last process held is free some moments after the process is gone. Ends with status 0 when less
than 1 GiB of each GPU is held, the neighbours' aside, and 1 with who holds it when the time is over. Memory is free
when nvidia-smi says so: where it does not answer, or leaves a GPU out, it waits as long, and the status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import typing as t

from .findings import Finding, found
from .gpu_checks import check_answer, check_memory_held
from .gpu_facts import SMI, Smi, ask_smi, loaded_driver
from .host import Host
from .probe import say_line

POLL_S = 1.0
SMI_TIMEOUT_S = 20.0


def unknown(host: Host, answer: Smi, silent: t.Iterable[int]) -> list[Finding]:
    """Why it is not known how much memory of these GPUs is held."""
    names = ", ".join(map(str, silent))
    lost = "".join(f"; {address}: {reason}" for address, reason in answer.lost)
    otherwise = found(
        "gpu.lost",
        f"{SMI} tells no memory of GPU {names}{lost}",
        "the memory of each GPU",
        f"{SMI} -q; journalctl -k -b | grep -iE 'nvidia|NVRM'; a GPU that is lost needs a reboot",
    )
    return [
        dataclasses.replace(one, seen=f"not known whether the memory of GPU {names} is free: {one.seen}")
        for one in check_answer(answer, loaded_driver(host)[0]) or [otherwise]
    ]


def held(
    host: Host, gpus: t.Collection[int], neighbours: t.Iterable[str], timeout: float = SMI_TIMEOUT_S
) -> list[Finding]:
    """Who holds memory of these GPUs, or why that is not known; [] when they are free."""
    answer = ask_smi(host, timeout)
    told = [gpu for gpu in answer.gpus if gpu.index in gpus and gpu.used_mib is not None]
    silent = sorted(set(gpus) - {gpu.index for gpu in told})
    return unknown(host, answer, silent) if silent else check_memory_held(host, told, neighbours)


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
        left = timeout - (clock() - start)
        findings = held(host, gpus, neighbours, max(POLL_S, min(SMI_TIMEOUT_S, left)))
        elapsed = clock() - start
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
