# SPDX-License-Identifier: GPL-3.0-or-later
"""The callback `progress` on a real playbook: signs of life, progress instead of failures in a loop, short failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAYBOOK = """
- name: Test
  hosts: localhost
  gather_facts: false
  tasks:
    - name: Sleep
      ansible.builtin.command: sleep 3.5
    - name: Count
      counting:
        file: "{{ counter }}"
      register: counted
      until: counted.count == 3
      retries: 5
      delay: 0
    - name: Fail at first
      ansible.builtin.command: sh -c 'test -e {{ counter }}.once || { touch {{ counter }}.once; exit 1; }'
      register: tried
      until: tried.rc == 0
      retries: 2
      delay: 0
    - name: Judge
      ansible.builtin.fail: {msg: "The message of {{ judged.name }}"}
      loop: [{name: one, report: a long report}]
      loop_control: {loop_var: judged, label: "{{ judged.name }}"}
      ignore_errors: true
"""
MODULE = """
from pathlib import Path
from ansible.module_utils.basic import AnsibleModule

module = AnsibleModule(argument_spec={"file": {"type": "path", "required": True}})
file = Path(module.params["file"])
count = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(count))
module.exit_json(changed=False, count=count, progress=f"counted to {count} of 3")
"""


def start(directory: Path) -> subprocess.Popen[str]:
    """Start ansible-playbook with this callback."""
    (directory / "library").mkdir()
    (directory / "library" / "counting.py").write_text(MODULE)
    (directory / "play.yml").write_text(PLAYBOOK)
    environment = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LIBRARY": str(directory / "library"),
        "ANSIBLE_LOCAL_TEMP": str(directory / "tmp"),
        "ANSIBLE_NOCOLOR": "1",
        "OPS_HEARTBEAT_SECONDS": "2",
    }
    command = [Path(sys.executable).with_name("ansible-playbook"), "--inventory", "localhost,", "--connection", "local"]
    command += [directory / "play.yml", "--extra-vars", f"counter={directory}/counter"]
    command += ["--extra-vars", f"ansible_python_interpreter={sys.executable}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | environment, cwd=ROOT, text=True, **pipes)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    """What it prints."""
    with start(tmp_path_factory.mktemp("play")) as play:
        printed, errors = play.communicate()
    assert play.returncode == 0, printed + errors
    return printed


def lines(output: str, name: str) -> list[str]:
    """Return the lines of progress that begin with a name."""
    return re.findall(rf"^  \.\.\. ({name}.*)$", output, re.M)


def test_a_long_task_gives_a_sign_of_life(output):
    beats = [re.fullmatch(r"Sleep: (\d+)m(\d\d)s", line) for line in lines(output, "Sleep")]
    assert beats
    assert all(beats)
    times = [60 * int(minutes) + int(seconds) for minutes, seconds in (beat.groups() for beat in beats)]
    assert times[0] >= 2, "before the silence was long enough"
    assert all(later > earlier for earlier, later in pairwise(times))


def test_output_that_nobody_reads_any_more_breaks_no_thread(tmp_path):
    with start(tmp_path) as play:
        play.stdout.readline()
        play.stdout.close()
        errors = play.stderr.read()
    assert "Exception in thread" not in errors


def test_a_waiting_loop_shows_its_progress(output):
    assert lines(output, "counted") == ["counted to 1 of 3", "counted to 2 of 3"]
    assert "RETRYING: [localhost]: Count" not in output


def test_another_loop_is_shown_as_ever(output):
    assert "FAILED - RETRYING: [localhost]: Fail at first (2 retries left)." in output


def test_a_failure_ends_with_its_message(output):
    failure = output[output.index("TASK [Judge]") :].partition("failed: [localhost] (item=one) => ")[2]
    assert failure.split("\n\n")[0].split("\n")[1:3] == ["    changed: false", "    msg: The message of one"]
    assert "a long report" not in output


def test_the_rest_is_the_default_output(output):
    assert re.findall(r"^TASK \[(.*)\]", output, re.M) == ["Sleep", "Count", "Fail at first", "Judge"]
    assert re.search(r"^localhost +: ok=4 +changed=2 ", output, re.M)
