# SPDX-License-Identifier: GPL-3.0-or-later
"""Stopped processes of our units are woken at the second look, and nobody else is; with a real one, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ops import wake
from ops.host import Host

ENGINE, OTHER = "sglang-unified.service", "ssh.service"


class Look:
    """A made-up /proc, and what was done and said at each look at it."""

    def __init__(self, root: Path) -> None:
        self.host, self.root = Host(str(root)), root
        self.state: dict[str, float] = {}
        self.woken: list[tuple[int, int]] = []
        self.said: list[str] = []

    def process(
        self, pid: int, state: str, unit: str = ENGINE, start: int = 100, name: str = "sglang::schedul"
    ) -> None:
        """A process as /proc shows it; field 22 is its start."""
        directory = self.root / "proc" / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stat").write_text(f"{pid} ({name}) {state} 1 {'0 ' * 17}{start} 0 0\n")
        (directory / "cgroup").write_text(f"0::/system.slice/{unit}\n")

    def at(self, now: float, error: type[OSError] | None = None) -> bool:
        def kill(pid: int, number: int) -> None:
            if error:
                raise error(1, "Operation not permitted")
            self.woken.append((pid, number))

        self.state, fine = wake.look(self.host, [ENGINE], self.state, now, kill, self.said.append)
        return fine


@pytest.fixture
def seen(tmp_path: Path) -> Look:
    return Look(tmp_path)


def test_a_stopped_process_is_woken_at_the_second_look(seen: Look) -> None:
    seen.process(41, "T", name="sglang::a) T (b")
    seen.process(42, "S")
    assert seen.at(1000)
    assert (seen.woken, seen.said) == ([], [])
    assert seen.at(1030)
    assert seen.woken == [(41, signal.SIGCONT)]
    assert seen.said == [
        f"process 41 (sglang::a) T (b) of {ENGINE} was stopped for 30 s or more; woken (SIGCONT). "
        "To keep one stopped: systemctl stop sglang-wake.timer"
    ]
    seen.process(41, "S")
    seen.at(1060)
    assert (seen.woken, seen.state) == ([(41, signal.SIGCONT)], {})


def test_two_looks_are_at_least_30_seconds_apart(seen: Look) -> None:
    seen.process(41, "T")
    for now in (1000, 1010, 1029.9):
        seen.at(now)
    assert seen.woken == []
    seen.at(1031)
    assert seen.woken == [(41, signal.SIGCONT)]


def test_one_that_went_on_between_two_looks_begins_anew(seen: Look) -> None:
    for now, state in ((1000, "T"), (1030, "R"), (1060, "T")):
        seen.process(41, state)
        seen.at(now)
    assert seen.woken == []


def test_another_process_with_the_number_begins_anew(seen: Look) -> None:
    seen.process(41, "T", start=100)
    seen.at(1000)
    seen.process(41, "T", start=200)
    seen.at(1030)
    assert seen.woken == []
    seen.at(1060)
    assert seen.woken == [(41, signal.SIGCONT)]


@pytest.mark.parametrize(("state", "unit"), [("t", ENGINE), ("Z", ENGINE), ("D", ENGINE), ("T", OTHER)])
def test_others_are_left_alone(seen: Look, state: str, unit: str) -> None:
    seen.process(41, state, unit)
    for now in (1000, 1030, 1060):
        assert seen.at(now)
    assert (seen.woken, seen.state) == ([], {})


def test_one_that_can_t_be_woken_is_said_and_fails(seen: Look) -> None:
    seen.process(41, "T")
    seen.at(1000)
    assert not seen.at(1045, PermissionError)
    assert seen.said == [
        f"process 41 (sglang::schedul) of {ENGINE} was stopped for 45 s or more and can't be woken: "
        "Operation not permitted. Next: kill -CONT 41, as root"
    ]


def test_one_that_has_ended_meanwhile_is_no_failure(seen: Look) -> None:
    seen.process(41, "T")
    seen.at(1000)
    assert seen.at(1045, ProcessLookupError)
    assert (seen.said, seen.state) == ([], {})


@pytest.mark.parametrize("text", ["", "[]", '{"41:100": null}', "{"])
def test_a_state_that_can_t_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state").write_text(text)
    assert wake.read_state(str(tmp_path / "state")) == {}
    assert wake.read_state(str(tmp_path / "missing")) == {}


def test_a_real_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped and woken through the program's own way: its state file, /proc, a signal."""
    monkeypatch.setattr(Host, "unit_of", lambda _self, pid: ENGINE if pid == sleeper.pid else "")
    now = 1000.0
    monkeypatch.setattr(wake.time, "monotonic", lambda: now)
    command = ["--unit", ENGINE, "--state", str(tmp_path / "state")]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sleeper:
        try:
            os.kill(sleeper.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
            assert wake.main(command) == 0
            assert len(wake.read_state(str(tmp_path / "state"))) == 1
            now += 30
            assert wake.main(command) == 0
            assert os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED).si_code == os.CLD_CONTINUED
            assert wake.read_state(str(tmp_path / "state")) == {}
        finally:
            sleeper.kill()  # one that is stopped would be waited for, for ever
        sleeper.communicate(b"\n")


def test_a_state_that_can_t_be_written_fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert wake.main(["--unit", "none.service", "--state", str(tmp_path / "no" / "state")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
