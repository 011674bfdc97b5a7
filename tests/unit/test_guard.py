# SPDX-License-Identifier: GPL-3.0-or-later
"""The guard of a switch: what it keeps, when it acts, and what it puts back. With a real lock and a made-up systemd."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ops import guard
from ops.systemd import CommandResult

ENGINE, OTHER = "sglang-unified.service", "sglang-replica-0.service"
PATTERNS = ("sglang-unified.service", "sglang-replica-*.service", "api-key")


class Systemd:
    """Units by name, each with the invocation that runs; what is asked to be done is done and written down."""

    def __init__(self) -> None:
        self.units: dict[str, dict[str, str]] = {}
        self.done: list[str] = []
        self.broken: set[str] = set()

    def add(self, unit: str, invocation: str = "1") -> None:
        active = "active" if invocation else "inactive"
        self.units[unit] = {"LoadState": "loaded", "ActiveState": active, "InvocationID": invocation}
        self.units[unit]["UnitFileState"] = "enabled"

    def __call__(self, argv: list[str]) -> CommandResult:
        verb, *rest = argv[1:]
        if verb == "show":
            return CommandResult(0, "\n".join(f"{k}={v}" for k, v in self.units.get(rest[0], {}).items()), "")
        self.done.append(" ".join(argv[1:]))
        if verb in ("restart", "start") and self.broken & set(rest):
            for unit in self.broken & set(rest):
                self.units[unit]["ActiveState"] = "failed"
            return CommandResult(1, "", "Job failed")
        return CommandResult(0, "", "")


class Site:
    """The files and the link of a host, and its systemd."""

    def __init__(self, root: Path) -> None:
        self.root, self.systemd, self.said = root, Systemd(), []
        self.link = root / "current"
        self.patterns = [str(root / pattern) for pattern in PATTERNS]
        (root / ENGINE).write_text("old unit")
        (root / "api-key").write_text("old key")
        (root / "api-key").chmod(0o400)
        (root / "else.service").write_text("somebody's")
        self.link.symlink_to("releases/old")
        self.systemd.add(ENGINE)
        self.systemd.add("sglang-canary.service", "")

    def keep(self) -> guard.Kept:
        return guard.keep(self.patterns, str(self.link), self.systemd)

    def switch(self) -> None:
        """What a play does: other files, a unit more, another link, another process."""
        (self.root / ENGINE).write_text("new unit")
        (self.root / "api-key").unlink()
        (self.root / "api-key").write_text("new key")
        (self.root / OTHER).write_text("a unit of another topology")
        self.link.unlink()
        self.link.symlink_to("releases/new")
        self.systemd.add(ENGINE, "2")

    def go_back(self, kept: guard.Kept) -> bool:
        return guard.go_back(kept, self.systemd, self.systemd, self.said.append)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_everything_is_put_back_and_started(site: Site) -> None:
    kept = site.keep()
    site.switch()
    assert site.go_back(kept)
    assert (site.root / ENGINE).read_text() == "old unit"
    assert (site.root / "api-key").read_text() == "old key"
    assert (site.root / "api-key").stat().st_mode & 0o7777 == 0o400
    assert os.readlink(site.link) == "releases/old"
    assert not (site.root / OTHER).exists()
    assert sorted(path.name for path in site.root.iterdir()) == ["api-key", "current", "else.service", ENGINE]
    assert site.systemd.done == [
        f"disable --now {OTHER}",
        "daemon-reload",
        f"enable {ENGINE}",
        f"reset-failed {ENGINE}",
        f"restart {ENGINE}",
        "start sglang-canary.service",
    ]
    assert "old key" not in " ".join(site.said)


def test_what_was_proven_meanwhile_stays_and_what_was_proven_before_does_not(site: Site) -> None:
    for release, age in (("new", 0.0), ("older", 3600.0)):
        (site.root / "releases" / release).mkdir(parents=True)
        file = site.root / "releases" / release / "proven"
        file.write_text("{}")
        os.utime(file, (time.time() - age + 5,) * 2)
    kept = site.keep()
    site.switch()
    assert site.go_back(kept)
    assert (os.readlink(site.link), site.systemd.done) == ("releases/new", [])
    site.link.unlink()
    site.link.symlink_to("releases/older")
    assert site.go_back(kept)
    assert os.readlink(site.link) == "releases/old"


def test_what_runs_as_before_is_not_restarted(site: Site) -> None:
    """Killed between the link and the restart."""
    kept = site.keep()
    site.link.unlink()
    site.link.symlink_to("releases/new")
    assert site.go_back(kept)
    assert os.readlink(site.link) == "releases/old"
    assert site.systemd.done == ["daemon-reload", f"enable {ENGINE}", "start sglang-canary.service"]


def test_two_sides_of_a_pair_start_together(site: Site) -> None:
    """Each of them may wait for the other one."""
    (site.root / OTHER).write_text("the other side")
    site.systemd.add(OTHER)
    kept = site.keep()
    for unit in (ENGINE, OTHER):
        site.systemd.add(unit, "2")
    assert site.go_back(kept)
    assert f"restart {OTHER} {ENGINE}" in site.systemd.done
    assert [line for line in site.said if "serves again after" in line] != []


def test_what_did_not_run_before_is_not_started(site: Site) -> None:
    site.systemd.add(ENGINE, "")
    kept = site.keep()
    site.switch()
    assert site.go_back(kept)
    assert f"restart {ENGINE}" not in site.systemd.done


@pytest.mark.parametrize("broken", [ENGINE, "sglang-canary.service"])
def test_what_does_not_serve_is_told(site: Site, broken: str) -> None:
    kept = site.keep()
    site.switch()
    site.systemd.broken = {broken}
    assert not site.go_back(kept)
    assert site.said[-1] == "gone back, not healthy"


def test_a_unit_that_does_not_start_names_its_journal(site: Site) -> None:
    kept = site.keep()
    site.switch()
    site.systemd.broken = {ENGINE}
    site.go_back(kept)
    assert any(f"Next: journalctl -u {ENGINE} -n 50" in line for line in site.said)


class Guard:
    """The program itself, beside a lock that a play would have."""

    def __init__(self, root: Path) -> None:
        self.lock, self.root = root / "lock", root
        bin_directory = root / "bin"
        bin_directory.mkdir()
        systemctl = bin_directory / "systemctl"
        systemctl.write_text(f'#!/bin/sh\necho "$@" >> {root}/asked\n')
        systemctl.chmod(0o755)
        (root / "current").symlink_to("old")
        self.ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ready.bind(str(root / "notify"))
        self.ready.settimeout(20)
        self.environment = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}"}
        self.environment |= {"NOTIFY_SOCKET": str(root / "notify"), "PYTHONPATH": str(Path(guard.__file__).parents[1])}

    def start(self) -> subprocess.Popen:
        program = "from ops import guard; guard.POLL_S, guard.APART_S = 0.05, 0.5; raise SystemExit(guard.main())"
        words = ["--lock", str(self.lock), "--link", str(self.root / "current"), "--keep", str(self.root / "*.service")]
        process = subprocess.Popen([sys.executable, "-c", program, *words], env=self.environment)
        assert self.ready.recv(100) == b"READY=1"
        return process

    def switched(self) -> None:
        (self.root / "current").unlink()
        (self.root / "current").symlink_to("new")


@pytest.fixture
def guarded(tmp_path: Path) -> Guard:
    return Guard(tmp_path)


def test_it_waits_for_the_lock_and_goes_back_when_nobody_has_it(guarded: Guard) -> None:
    with guarded.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = guarded.start()
        guarded.switched()
        time.sleep(1)
        assert process.poll() is None
        assert os.readlink(guarded.root / "current") == "new"
    assert process.wait(20) == 0
    assert os.readlink(guarded.root / "current") == "old"
    assert json.loads(guarded.lock.read_text())["id"] == guard.UNIT
    assert "daemon-reload" in (guarded.root / "asked").read_text()


def test_a_lock_that_is_taken_again_is_not_the_end(guarded: Guard) -> None:
    """A play whose connection was lost comes back."""
    with guarded.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = guarded.start()
        guarded.switched()
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(0.2)
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(1)
        assert process.poll() is None
        assert os.readlink(guarded.root / "current") == "new"
        process.kill()
        process.wait(20)


def test_one_that_is_stopped_changes_nothing(guarded: Guard) -> None:
    with guarded.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = guarded.start()
        guarded.switched()
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert os.readlink(guarded.root / "current") == "new"
    assert not (guarded.root / "asked").exists() or "daemon-reload" not in (guarded.root / "asked").read_text()


def test_a_link_that_is_not_there_is_an_error_before_anything_is_switched(guarded: Guard) -> None:
    (guarded.root / "current").unlink()
    words = ["--lock", str(guarded.lock), "--link", str(guarded.root / "current"), "--keep", "/nowhere/*"]
    done = subprocess.run(
        [sys.executable, "-m", "ops.guard", *words],
        env=guarded.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr
