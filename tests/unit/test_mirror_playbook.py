# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/mirror.yml: what it refuses, and what it says of a file that is another one than its lock's."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("ansible-playbook")


@pytest.fixture
def mirror(tmp_path):
    """Run the playbook for the example of a production inventory, which has no key yet; return status and output."""

    def run(*arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "ansible")}
        command = [PROGRAM, "-i", "inventory/production.example", "playbooks/mirror.yml", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, " ".join(done.stdout.split())

    return run


def test_a_mirror_needs_a_directory(mirror):
    status, printed = mirror()
    assert status == 2
    assert "mirror_directory is ''''; wanted: an absolute path without spaces" in printed
    assert "Nothing was fetched." in printed


@pytest.mark.parametrize(("locks", "seen"), [('{"mirror_locks": []}', "[]"), ("mirror_locks=router", '"router"')])
def test_a_mirror_needs_a_lock_file(mirror, tmp_path, locks, seen):
    status, printed = mirror("-e", f"mirror_directory={tmp_path}/mirror", "-e", locks)
    assert status == 2
    assert f"mirror_locks is {seen}; wanted: a list of one lock file or more, as in -e" in printed
    assert not (tmp_path / "mirror").exists()


@pytest.mark.parametrize("name", ["mirror_debian_sources", "mirror_driver_sources"])
def test_sources_are_lines(mirror, tmp_path, name):
    line = "deb http://archive.example trixie main"
    status, printed = mirror("-e", f"mirror_directory={tmp_path}/mirror", "-e", f"{name}='{line}'")
    assert status == 2
    assert f'{name} is "{line}"; wanted: a list of lines' in printed
    assert not (tmp_path / "mirror").exists()


def test_check_mode_fetches_nothing(mirror, tmp_path):
    status, printed = mirror("--check", "-e", f"mirror_directory={tmp_path}/mirror")
    assert status == 0, printed
    assert not (tmp_path / "mirror").exists()


def test_a_wheel_that_is_another_one_than_the_locks_is_refused(mirror, tmp_path):
    wheel = tmp_path / "mirror/wheels/sglang-0.5.23-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"not this engine")
    status, printed = mirror("-e", f"mirror_directory={tmp_path}/mirror")
    assert status == 2
    assert f"{wheel}: sha256 is {hashlib.sha256(b'not this engine').hexdigest()}, wanted " in printed
    assert f"Next: rm {wheel}, then the same command again." in printed
    assert wheel.read_bytes() == b"not this engine"
