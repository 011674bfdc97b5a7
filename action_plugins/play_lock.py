# SPDX-License-Identifier: GPL-3.0-or-later
"""Hold a host for one run of ansible-playbook: a second run against it is refused and told by whom.

The lock is the kernel's, on a file in the host's /run, and its holder there lives at the far end of a connection that
only this run keeps open. Whatever ends the run (its last task, a failure, kill -9, a control node without power) ends
the connection, its far end and the lock: there is nothing to clean up, and no age or number of a process to judge.

A task without arguments takes it (`path` is for tests); the second task of one run finds it taken and is content.
Check mode takes none: it changes nothing.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import multiprocessing
import os
import re
import select
import shlex
import signal
import socket
import threading
import time
from pathlib import Path

from ansible import constants as C
from ansible import context
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

HELD_BY_ANOTHER = 75
WAIT_SECONDS = 30
# Goes back when a play has died (module_utils/ops/guard.py); this run takes over from it.
GUARD = "sglang-guard.service"
# Runs on the host as python3 -c HOLDER PATH RECORD until nobody reads what it prints. It prints at all because a
# control node that is gone without a word shows only when something is sent.
HOLDER = f"""
import fcntl, os, select, subprocess, sys, time
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
def take():
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
held = take()
if not held:
    # A guard goes back now, or has only tried whether its play still lives.
    if b'"{GUARD}"' in os.pread(lock, 4096, 0):
        subprocess.run(["systemctl", "stop", "{GUARD}"])
    time.sleep(0.3)
    held = take()
if not held:
    print(os.pread(lock, 4096, 0).decode())
    sys.exit({HELD_BY_ANOTHER})
os.ftruncate(lock, 0)
os.pwrite(lock, sys.argv[2].encode(), 0)
connection = select.poll()
connection.register(1, 0)
while not connection.poll(10000):
    print(flush=True)
"""


def user() -> str:
    """Return who runs this; a number where it has no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def record_of_this_run() -> dict:
    """Return who runs which playbook since when, with a name for the run that no other one has."""
    # Every task runs in a child of ansible-playbook.
    pid = multiprocessing.parent_process().pid
    return {
        "id": Path(C.DEFAULT_LOCAL_TMP).name,  # Ansible makes this directory, with a random name, for each run
        "user": f"{user()}@{socket.gethostname()}",
        "pid": pid,
        # The names alone: what else is on the command line may be a secret.
        "playbook": " ".join(context.CLIARGS.get("args") or ()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def refusal(host: str, holder: str) -> str:
    """Return what to tell the second run, from the first one's record."""
    try:
        other = json.loads(holder)
        who = f"{other['user']} with {other['playbook']}, process {other['pid']}, since {other['since']}"
        end = f"or end it: kill {other['pid']}, there"
    except (ValueError, KeyError, TypeError, AttributeError):
        who, end = "a play that has only just begun", "which takes a moment"
    return (
        f"{host} is held by another play: {who}. Wanted: one play at a time. This one has changed nothing. "
        f"Wait until the other one ends, {end}; its lock ends with it. Next: run this play again."
    )


def end_with(pid: int) -> None:
    """Kill this process and those it started as soon as ansible-playbook is gone."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "pidfd_open"):
            select.select([os.pidfd_open(pid)], [], [])  # when it has ended, whether or not its parent knows
        else:
            while True:
                os.kill(pid, 0)
                time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


class ActionModule(ActionBase):
    """Ansible's entry point."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(["path"])

    def run(self, tmp: None = None, task_vars: dict | None = None) -> dict:
        """Take the lock, or fail with its holder."""
        result = super().run(tmp, task_vars)
        if self._task.check_mode:
            return {**result, "skipped": True, "msg": "check mode changes nothing and takes no lock"}
        path, mine = self._task.args.get("path", "/run/sglang-play.lock"), record_of_this_run()
        if not self._holds(path, mine):
            command = shlex.join([self._python(task_vars), "-c", HOLDER, path, json.dumps(mine)])
            self._take(path, mine, command, task_vars["inventory_hostname"])
        return {**result, "changed": False, "holder": mine}

    def _python(self, task_vars: dict) -> str:
        """Return the host's Python; the system's own, which every host here has, where Ansible would look for one."""
        python = str(self._templar.template(task_vars.get("ansible_python_interpreter")) or "auto")
        return "/usr/bin/python3" if re.fullmatch("auto(_legacy)?(_silent)?", python) else python

    def _holds(self, path: str, mine: dict) -> bool:
        """Whether the record in the lock is this run's."""
        return mine["id"] in self._low_level_execute_command(shlex.join(["cat", path]))["stdout"]

    def _take(self, path: str, mine: dict, command: str, host: str) -> None:
        """Start the process that keeps the connection, and wait until the lock is taken."""
        answers, answer = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            os.close(answers)
            self._keep(command, mine["pid"], answer)
        os.close(answer)
        try:
            for _wait in range(4 * WAIT_SECONDS):
                if select.select([answers], [], [], 0.25)[0]:
                    self._fail(host, json.loads(os.read(answers, 1 << 16) or "{}"))
                if self._holds(path, mine):
                    return
            self._fail(host, {"stderr": f"no answer in {WAIT_SECONDS} s"})
        except BaseException:
            os.killpg(keeper, signal.SIGKILL)
            raise
        finally:
            os.close(answers)

    def _fail(self, host: str, answer: dict) -> None:
        """Fail with what the holder on the host said."""
        if answer.get("rc") == HELD_BY_ANOTHER:
            raise AnsibleActionFail(refusal(host, answer["stdout"]))
        raise AnsibleActionFail(
            f"{host} can't be held for this play: {answer.get('stderr') or answer}. Wanted: a process of root's on the "
            "host. Nothing was changed. Next: ansible -m ansible.builtin.ping with the same inventory."
        )

    def _keep(self, command: str, playbook: int, answer: int) -> None:
        """Hold the lock while ansible-playbook lives, again after a reboot of the host or a lost connection."""
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=end_with, args=[playbook], daemon=True).start()
        while True:
            try:
                said = self._low_level_execute_command(command)
                said = {name: said[name] for name in ("rc", "stdout", "stderr")}
            except Exception as error:  # whatever it is, the task tells it
                said = {"stderr": str(error)}
            try:
                os.write(answer, json.dumps(said).encode())
                os._exit(0)
            except BrokenPipeError:  # the task has seen the lock taken and does not wait any more
                time.sleep(2)
