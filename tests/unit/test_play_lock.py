# SPDX-License-Identifier: GPL-3.0-or-later
"""The action play_lock between real runs of ansible-playbook: a second one is refused, a dead one holds nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAYBOOK = """
- name: Hold the host
  hosts: localhost
  connection: local
  gather_facts: false
  vars: {ansible_python_interpreter: /usr/bin/python3}
  tasks:
    - name: Take the lock
      play_lock: {path: "{{ lock }}"}
    - name: Take it again
      play_lock: {path: "{{ lock }}"}
    - name: Work
      ansible.builtin.command: {argv: [sh, -c, "{{ work }}"]}
"""


class Plays:
    """Runs of one playbook with one lock."""

    def __init__(self, directory: Path) -> None:
        (directory / "play.yml").write_text(PLAYBOOK)
        self.directory, self.begun = directory, directory / "begun"
        self.path = os.environ["PATH"]

    def start(self, work: str = "true", *arguments: str) -> subprocess.Popen:
        command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", "play.yml", *arguments]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        environment["PATH"] = self.path
        return subprocess.Popen(
            [*command, "-e", f"lock={self.directory}/lock", "-e", f"work='{work}'"],
            cwd=self.directory,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, work: str = "true", *arguments: str) -> tuple[int, str]:
        """Return the exit status and what was printed, its lines joined."""
        with self.start(work, *arguments) as play:
            printed = play.communicate(timeout=60)[0]
        return play.returncode, " ".join(printed.split())

    def holding(self) -> subprocess.Popen:
        """Return a run that has the lock and goes on for 20 s."""
        play = self.start(f"touch {self.begun}; sleep 20")
        for _try in range(300):
            if self.begun.exists():
                return play
            time.sleep(0.1)
        play.kill()
        raise AssertionError(play.communicate()[0])


@pytest.fixture
def plays(tmp_path: Path) -> Plays:
    return Plays(tmp_path)


def test_one_run_takes_it_as_often_as_it_likes_and_changes_nothing(plays: Plays) -> None:
    status, printed = plays.run("true")
    assert status == 0, printed
    assert re.search(r"ok=3 +changed=1 ", printed)  # the command


def test_a_second_run_is_told_who_holds_the_host_and_a_killed_one_holds_nothing(plays: Plays) -> None:
    first = plays.holding()
    status, printed = plays.run("touch second")
    assert status == 2
    for text in (
        "localhost is held by another play: ",
        f"with play.yml, process {first.pid}, since 20",
        "This one has changed nothing.",
        f"or end it: kill {first.pid}, there",
        "Next: run this play again.",
    ):
        assert text in printed
    assert re.search(r"ok=0 +changed=0 ", printed)
    assert not (plays.directory / "second").exists()

    status, printed = plays.run("true", "--check")
    assert (status, "held by another play" in printed) == (0, False)

    first.kill()  # ansible-playbook alone; nobody has asked for its exit status yet
    time.sleep(1)
    assert plays.run()[0] == 0


def test_a_record_that_says_nothing() -> None:
    """In a process of its own: its imports would make modules that are tested here think they run on the controller."""
    records = ["", "[]", "7", '"text"', "null", "{}", '{"user']
    program = f"import play_lock; [print(play_lock.refusal('gpu1', record)) for record in {records!r}]"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "action_plugins")}
    told = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).splitlines()
    begin = "gpu1 is held by another play: a play that has only just begun. Wanted: one play at a time."
    assert [line.startswith(begin) for line in told] == [True] * len(records)


@pytest.mark.parametrize("python", ["auto", "auto_silent", "{{ '/usr/bin/' ~ 'python3' }}"])
def test_a_python_that_ansible_looks_for_or_works_out(plays: Plays, python: str) -> None:
    printed = plays.run("true", "-e", json.dumps({"ansible_python_interpreter": python}))[1]
    assert "TASK [Work]" in printed, printed  # which Python Ansible finds for this task is its own affair


def test_an_interrupted_and_a_failed_run_hold_nothing(plays: Plays) -> None:
    first = plays.holding()
    os.killpg(first.pid, signal.SIGINT)
    first.wait(20)
    time.sleep(1)
    status, printed = plays.run("exit 3")
    assert status == 2 and "held by another play" not in printed
    time.sleep(1)
    assert plays.run()[0] == 0


def test_a_run_takes_over_from_a_guard_that_goes_back(plays: Plays) -> None:
    record = json.dumps({"id": "sglang-guard.service", "user": "root@lab", "pid": 1, "playbook": "x", "since": "y"})
    program = (
        f"import fcntl, time; f = open('lock', 'w'); fcntl.flock(f, 2); f.write('{record}'); f.flush(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=plays.directory) as holder:
        systemctl = plays.directory / "systemctl"
        systemctl.write_text(f'#!/bin/sh\necho "$@" > {plays.directory}/asked; kill {holder.pid}; sleep 1\n')
        systemctl.chmod(0o755)
        plays.path = f"{plays.directory}:{plays.path}"
        while not (plays.directory / "lock").exists() or not (plays.directory / "lock").read_text():
            time.sleep(0.05)
        status, printed = plays.run()
        holder.kill()
    assert status == 0, printed
    assert (plays.directory / "asked").read_text() == "stop sglang-guard.service\n"


def test_a_lock_that_cannot_be_taken_says_why(plays: Plays) -> None:
    (plays.directory / "lock").mkdir()
    status, printed = plays.run()
    assert status == 2
    assert "IsADirectoryError" in printed and "Nothing was changed." in printed
