# SPDX-License-Identifier: GPL-3.0-or-later
"""Lab hosts and the playbooks on them, used as an operator uses them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-lab"
ANSIBLE_PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
ENGINE, PROMETHEUS = "sglang-unified.service", "prometheus.service"
# Databases of the package tools and of systemd; what is installed is compared by name instead.
VOLATILE = [
    "/var/lib/apt",
    "/var/cache/apt",
    "/var/lib/dpkg",
    "/var/cache/debconf",
    "/var/cache/ldconfig",
    "/var/lib/systemd",
    "/etc/ssl/certs",
]
# Everything a host has that a converge could leave behind. Scopes and run-time units come and go by themselves.
SNAPSHOT = {
    "units": "systemctl list-unit-files --no-legend --no-pager | awk '{print $1, $2}' | grep -v '\\.scope'",
    "failed units": "systemctl list-units --failed --no-legend --plain",
    "users": "cat /etc/passwd",
    "groups": "cat /etc/group",
    "ports": "ss -ltnH | awk '{print $4}'",
    "packages": "dpkg-query --show --showformat='${db:Status-Abbrev}${Package}\\n'",
    "files": "find /etc /opt /srv /usr/local /var/lib /var/cache -xdev "
    + " ".join(f"-not -path '{it}/*'" for it in VOLATILE),
}
# Kept up to date by dpkg's tools with every package, and rewritten in another order or with a backup beside it.
REWRITTEN = {"/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/ld.so.cache", "/etc/mailcap"}


class Run:
    """What a playbook run printed, and what it counted."""

    def __init__(self, status: int, output: str) -> None:
        self.status, self.output = status, output
        recap = re.findall(r"^lab\d +: ok=(\d+) +changed=(\d+) ", output, re.MULTILINE)
        self.ok, self.changed = (sum(int(host[place]) for host in recap) for place in (0, 1)) if recap else (0, -1)

    def changed_tasks(self) -> list[str]:
        """Return the names of the tasks that reported a change."""
        tasks = re.split(r"^TASK \[", self.output, flags=re.MULTILINE)[1:]
        return [task.split("]")[0] for task in tasks if re.search(r"^changed: \[", task, re.MULTILINE)]


class SiteHost:
    """A lab with the hosts of an inventory; what is done to one host is done to lab1 unless it is named."""

    def __init__(self, name: str, inventory: str = "inventory/lab", hosts: tuple[str, ...] = ()) -> None:
        self.inventory, self.hosts = inventory, hosts
        self.fresh: dict[str, list[str]] = {}
        self.environment = {**os.environ, "LAB_NAME": name, "ANSIBLE_NOCOLOR": "1", "PYTHONUNBUFFERED": "1"}

    def lab(self, *words: str, timeout: int = 200) -> str:
        """Run lab/lab and return its output."""
        command = [sys.executable, CHECKOUT / "lab" / "lab", *words]
        done = subprocess.run(
            command, env=self.environment, text=True, capture_output=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self) -> None:
        """Boot the hosts with the wheelhouse, and note what is on the first of them."""
        self.lab("up", *self.hosts, "--bind-ro", f"{CACHE / 'wheelhouse'}:/srv/wheelhouse")
        self.fresh = self.snapshot()

    def down(self) -> None:
        """Remove the lab."""
        self.lab("down")

    def shell(self, command: str, status: int | None = 0, host: str = "lab1", timeout: float = 120) -> str:
        """Run a command on a host past ssh; status None accepts any exit status."""
        words = [sys.executable, CHECKOUT / "lab" / "lab", "shell", host, "--", "sh", "-c", command]
        done = subprocess.run(words, env=self.environment, text=True, capture_output=True, timeout=timeout, check=False)
        assert status is None or done.returncode == status, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def command(self, playbook: str, *arguments: str) -> list[str]:
        """Return the command line of a playbook run."""
        return [str(ANSIBLE_PLAYBOOK), "--inventory", self.inventory, playbook, *arguments]

    def play(self, playbook: str, *arguments: str, status: int | None = 0) -> Run:
        """Run a playbook to its end."""
        command = self.command(playbook, *arguments)
        done = subprocess.run(
            command,
            cwd=CHECKOUT,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=1800,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout[-6000:]
        return Run(done.returncode, done.stdout)

    def play_until(self, text: str, playbook: str, *arguments: str, by: signal.Signals = signal.SIGKILL) -> None:
        """Run a playbook and end it by a signal, with everything it started, as soon as it prints `text`."""
        # A test runner in the background has handed down that Ctrl-C is ignored.
        command = ["env", "--default-signal=INT", *self.command(playbook, *arguments)]
        # Without this, Ansible prints a task's title only when it knows that the task is not skipped.
        environment = {**self.environment, "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "true"}
        with subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            assert process.stdout
            printed = ""
            for line in process.stdout:
                printed += line
                if text in line:
                    os.killpg(process.pid, by)
                    try:
                        process.communicate(timeout=30)
                    except subprocess.TimeoutExpired:
                        # Ansible waits for ever when a worker dies while it hands over a result; people press again.
                        os.killpg(process.pid, by)
                        process.communicate(timeout=30)
                    return
        raise AssertionError(f"never printed {text!r}:\n{printed[-3000:]}")

    def main_pid(self, unit: str, host: str = "lab1") -> int:
        """Return the main process of a unit, 0 when there is none."""
        return int(self.shell(f"systemctl show --property MainPID --value {unit}", host=host))

    def snapshot(self) -> dict[str, list[str]]:
        """Return what is on the host, in a stable order."""
        return {
            name: sorted(set(self.shell(f"{command} || true").splitlines()) - REWRITTEN)
            for name, command in SNAPSHOT.items()
        }

    def ask_engine(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the engine's JSON answer, asked on the host with its key: GET, or POST with a body."""
        key = "sed 's/^/Authorization: Bearer /' /etc/sglang/credentials/api-key"
        given = f"--json '{json.dumps(body)}'" if body else ""
        return json.loads(self.shell(f"{key} | curl -sS -H @- {given} http://127.0.0.1:30001{path}"))

    def at_rest(self) -> bool:
        """Whether the engine holds no request, and no token for one."""
        (rank,) = self.ask_engine("/v1/loads")["loads"]
        return [rank[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")] == [0, 0, 0]

    def answers(self) -> bool:
        """Whether the engine's probe gets an answer, asked on the host."""
        probe = "/opt/sglang/current/venv/bin/python -m ops.probe --url http://127.0.0.1:30001 --timeout 8"
        probe += " --api-key-file /etc/sglang/credentials/api-key"
        return self.shell(f"{probe} >/dev/null 2>&1; echo $?", status=None).endswith("0")


class Load:
    """Clients of a service on the control node, until the end of the block; then `requests` has what load.py says."""

    def __init__(self, lab: SiteHost, url: str, key_file: Path, model: str, clients: int) -> None:
        words = [sys.executable, CHECKOUT / "lab" / "lab", "exec", "--", sys.executable]
        words += [CHECKOUT / "tests" / "integration" / "load.py", url, key_file, model, str(clients)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, env=lab.environment, text=True, **pipes)
        self.requests: list[dict] = []

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        printed, _ = self.process.communicate(timeout=200)
        self.requests = json.loads(printed.splitlines()[-1])


def eventually(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Wait until `condition` holds and return how long that took."""
    started = time.monotonic()
    while True:
        if condition():
            return time.monotonic() - started
        assert time.monotonic() - started < seconds, f"{what}: not within {seconds} s"
        time.sleep(1)


def difference(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what came (+) and went (-) between two snapshots."""
    changes = {}
    for name in before:
        came, went = set(after[name]) - set(before[name]), set(before[name]) - set(after[name])
        if came or went:
            changes[name] = [f"+{item}" for item in sorted(came)] + [f"-{item}" for item in sorted(went)]
    return changes
