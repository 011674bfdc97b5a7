# SPDX-License-Identifier: GPL-3.0-or-later
"""engine/tax_curve.py leaves what the inventory says, however it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "engine" / "tax_curve.py"
LENGTHS = ["8192", "131072"]
SITE, BENCH = (
    "site.yml -i x -e sglang_serve_context_length={}",
    "playbooks/bench.yml -i x -e sglang_serve_context_length={}",
)
CONTEXTS = " -e sglang_bench_contexts=0"
BACK = "site.yml -i x"


class Plays(t.NamedTuple):
    """A directory with an ansible-playbook that runs `script` with the play's words as $*, after it has noted them."""

    directory: Path

    def write(self, script: str) -> None:
        program = self.directory / "ansible-playbook"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self.directory}/plays\ncase "$*" in {script} esac\n')
        program.chmod(0o755)

    def start(self, script: str, *words: str) -> subprocess.Popen[str]:
        self.write(script)
        environment = {**os.environ, "PATH": f"{self.directory}:{os.environ['PATH']}"}
        argv = [sys.executable, str(PROGRAM), *(words or LENGTHS), "--", "-i", "x"]
        return subprocess.Popen(argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def noted(self) -> list[str]:
        file = self.directory / "plays"
        return file.read_text().splitlines() if file.exists() else []


def test_each_length_is_converged_and_measured_and_the_inventorys_put_back(tmp_path: Path) -> None:
    plays = Plays(tmp_path)
    with plays.start("") as process:
        process.communicate(timeout=60)
    measured = [line.format(length) for length in LENGTHS for line in (SITE, BENCH + CONTEXTS)]
    assert (process.returncode, plays.noted()) == (0, [*measured, BACK])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_play_that_fails_ends_it_and_the_inventorys_length_is_put_back(tmp_path: Path, number: int) -> None:
    plays, line = Plays(tmp_path), [SITE, BENCH, SITE][number].format(LENGTHS[number // 2])
    with plays.start(f'*"{line}"*) exit 2;;') as process:
        _out, said = process.communicate(timeout=60)
    assert (process.returncode, plays.noted()[-1], len(plays.noted())) == (1, BACK, number + 2)
    assert f"it failed: ansible-playbook {line}" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_play_and_the_inventorys_length_is_put_back(tmp_path: Path, number: signal.Signals) -> None:
    plays = Plays(tmp_path)
    slow = (
        f"*bench*) trap 'echo ended >> {tmp_path}/plays; exit 1' INT; sleep 60 > /dev/null 2>&1 & wait;; *) sleep 0.3;;"
    )
    with plays.start(slow) as process:
        end = time.monotonic() + 30
        while len(plays.noted()) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(number)
        while len(plays.noted()) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(number)  # a second one does not stop the way back
        process.communicate(timeout=60)
    assert plays.noted() == [SITE.format(8192), BENCH.format(8192) + CONTEXTS, "ended", BACK]
    assert process.returncode == 128 + number


def test_a_terminal_that_hangs_up_does_not_keep_the_inventorys_length_from_coming_back(tmp_path: Path) -> None:
    """A lost connection: nobody reads any more, and whoever writes to the terminal gets an error."""
    plays = Plays(tmp_path)
    plays.write("*bench*) exec sleep 60;; *) echo words;;")
    controller, terminal = pty.openpty()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = [sys.executable, str(PROGRAM), "8192", "--", "-i", "x"]
    hung = subprocess.Popen(
        argv, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    end = time.monotonic() + 30
    while len(plays.noted()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.close(controller)
    hung.send_signal(signal.SIGHUP)
    assert hung.wait(60) == 128 + signal.SIGHUP
    assert plays.noted()[-1] == BACK


def test_a_length_that_stays_in_service_is_told_with_the_next_command(tmp_path: Path) -> None:
    with Plays(tmp_path).start(f'"{BACK}") exit 2;;') as process:
        _out, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "was not put back" in said
    assert said.endswith("next command: ansible-playbook site.yml -i x\n")


def test_a_length_that_is_none_runs_nothing(tmp_path: Path) -> None:
    for words in (["many"], ["0"]):
        with Plays(tmp_path).start("", *words) as process:
            process.communicate(timeout=60)
        assert (process.returncode, Plays(tmp_path).noted()) == (2, [])
