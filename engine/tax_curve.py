#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what a long configured context costs short prompts, and put the configuration back, however it ends.

    engine/tax_curve.py LENGTH... [-- OPTIONS OF ansible-playbook]
    engine/tax_curve.py 8192 131072 524288 -- -i inventory/mine

For each length: site.yml and playbooks/bench.yml with it, without a long context among the levels. At the end, after a
failure, and after SIGINT, SIGTERM or SIGHUP (a lost connection): site.yml without a length, which brings back what the
inventory says. The play that runs then is ended first; after SIGHUP all words go to .cache/tax_curve.log. Only SIGKILL
and a loss of power leave a length in service; smoke.yml reports it as drift, and site.yml puts it right.

Ends with 0 when all was measured and put back, 1 when a play failed, 2 when the configuration could not be put back,
128 and the signal's number after a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A play that is asked to end gets so many seconds for it.
END_S = 60
LOG = REPOSITORY / ".cache" / "tax_curve.log"


class Ended(Exception):
    """A signal came. The argument is its number."""


def plays(lengths: list[int], options: list[str]) -> list[list[str]]:
    """Return the command lines of the measurement, in their order."""
    lines = []
    for length in lengths:
        extra = ["-e", f"sglang_serve_context_length={length}"]
        lines.append(["ansible-playbook", "site.yml", *options, *extra])
        lines.append(["ansible-playbook", "playbooks/bench.yml", *options, *extra, "-e", "sglang_bench_contexts=0"])
    return lines


def play(words: list[str]) -> int:
    """Run a play and return its exit status; a signal that ends us ends it first."""
    print(f"tax_curve: {' '.join(words)}", flush=True)
    # A session of its own: Ctrl-C is for us to pass on.
    with subprocess.Popen(words, cwd=REPOSITORY, start_new_session=True) as process:
        try:
            return process.wait()
        except Ended:
            for number in (signal.SIGINT, signal.SIGKILL):
                os.killpg(process.pid, number)
                try:
                    process.wait(END_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
            raise


def heed(number: int, _frame: object) -> None:
    """End what runs; from now on nothing stops the way back, a terminal that is gone does not either."""
    for one in ENDING:
        signal.signal(one, signal.SIG_IGN)
    if number == signal.SIGHUP:
        leave_the_terminal()
    raise Ended(number)


def leave_the_terminal() -> None:
    """Write to a file from now on: what is written to a terminal that has hung up fails, in every play too."""
    LOG.parent.mkdir(exist_ok=True)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)


def measure(lengths: list[int], options: list[str]) -> int:
    """Run the plays until one fails, put the configuration back, and return the exit status."""
    status = 0
    try:
        for number in ENDING:
            signal.signal(number, heed)
        for words in plays(lengths, options):
            if play(words) != 0:
                print(f"tax_curve: it failed: {' '.join(words)}", file=sys.stderr, flush=True)
                status = 1
                break
    except Ended as ended:
        status = 128 + ended.args[0]
    finally:
        with contextlib.suppress(Ended):  # of a signal at this very moment; heed has had all ignored
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
        back = ["ansible-playbook", "site.yml", *options]
        if play(back) != 0:
            said = "the configuration was not put back; a length of this measurement is in service"
            print(f"tax_curve: {said}\nnext command: {' '.join(back)}", file=sys.stderr, flush=True)
            status = 2
    return status


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", metavar="LENGTH", nargs="+", type=int, help="context length in tokens")
    lengths = parser.parse_args(words[:split]).lengths
    if min(lengths) < 1:
        parser.error(f"LENGTH is {min(lengths)}, wanted 1 or more; next command: engine/tax_curve.py 8192 131072")
    raise SystemExit(measure(lengths, words[split + 1 :]))


if __name__ == "__main__":
    main()
