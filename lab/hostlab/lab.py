# SPDX-License-Identifier: GPL-3.0-or-later
"""A lab seen from outside: started, found, asked and removed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from . import cgroups
from .errors import LabError
from .settings import CHECKOUT, HostSpec, Settings, control_address

SSH_CONFIG = """\
Host *
  User root
  IdentityFile {state}/id
  IdentitiesOnly yes
  UserKnownHostsFile {state}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  UpdateHostKeys no
  ControlMaster auto
  ControlPersist 60s
  ServerAliveInterval 5
"""


class Lab:
    def __init__(self, settings: Settings, say) -> None:
        self.settings, self.state, self.say = settings, settings.state, say
        self.started = False  # by this process

    # ---- found

    @property
    def inside(self) -> bool:
        """Whether this very process runs in the lab's namespaces."""
        return self.settings.mark.exists()

    @property
    def pid(self) -> int | None:
        """The lab's first process, as this machine numbers it, while it lives. The mark tells it from a reused pid."""
        try:
            pid = int((self.state / "lab.pid").read_text())
        except (OSError, ValueError):
            return None
        return pid if Path(f"/proc/{pid}/root{self.settings.mark}").exists() else None

    @property
    def up(self) -> bool:
        return self.inside or self.pid is not None

    def require_up(self) -> None:
        if not self.up:
            raise LabError(
                f"the lab {self.settings.name!r} is not up",
                seen=f"no live process in {self.state}/lab.pid",
                wanted="a running lab",
                next=f"{self.settings.prefix}make site, or {self.settings.prefix}lab/lab up for empty hosts",
            )

    def require_outside(self, what: str) -> None:
        if self.inside:
            raise LabError(
                f"`{what}` works from outside the lab only",
                seen="this process runs in the lab's network",
                wanted="the machine's network",
                next="run it in another shell",
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One `up` or `down` of this checkout at a time."""
        descriptor = os.open(CHECKOUT / "lab", os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # ---- asked

    def ask(self, request: str, descriptors: tuple[int, ...] = (), **arguments: object):
        """Send one request to the supervisor and return its result; its LabError is raised here."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(130)
            try:
                connection.connect(str(self.state / "control"))
                socket.send_fds(connection, [json.dumps({"request": request, **arguments}).encode()], descriptors)
                reply = json.loads(connection.recv(1 << 16))
            except (OSError, ValueError) as error:
                raise LabError(
                    "the lab's supervisor does not answer",
                    seen=f"{self.state}/control: {error}",
                    wanted="an answer",
                    next=f"tail {self.state}/supervisor.log; lab/lab down",
                ) from error
        if "error" in reply:
            error = reply["error"]
            raise LabError(error["problem"], seen=error["seen"], wanted=error["wanted"], next=error["next"])
        return reply["result"]

    def hosts(self) -> dict[str, dict]:
        return {host["name"]: host for host in self.ask("status")["hosts"]}

    def host(self, name: str) -> dict:
        hosts = self.hosts()
        if name not in hosts:
            raise LabError("the lab has no such host", seen=name, wanted=" ".join(hosts), next="lab/lab status")
        return hosts[name]

    def enter(self, command: list[str]) -> list[str]:
        """The command as one that runs in the lab as its control node, in this directory, and dies with the caller."""
        if self.inside:
            return command
        nsenter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--"]
        tether = ["setpriv", "--pdeathsig=TERM", "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
        return [*nsenter, *tether, *command]

    def ssh(self, host: str, *command: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "LAB_NAME": self.settings.name, "LAB_STATE": str(self.settings.state_root)}
        return subprocess.run(
            [CHECKOUT / "lab/ssh", "-o", "ConnectTimeout=2", "-o", "BatchMode=yes", host, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )

    # ---- started

    def start(self, image: Path, control: str, with_parent: bool = False) -> None:
        """Start an empty lab. with_parent: the kernel ends it when this process ends."""
        self.remove()
        self.started = True
        self.state.mkdir(parents=True, mode=0o700)
        (self.state / "cp").mkdir(mode=0o700)
        about = {"id": self.settings.id, "image": str(image), "control": control, "mark": str(self.settings.mark)}
        files = {
            "checkout": f"{CHECKOUT}\n",
            "hosts": f"127.0.0.1 localhost {socket.gethostname()}\n{control} control\n",
            "known_hosts": "",
            "lab.json": json.dumps(about),
            "ssh_config": SSH_CONFIG.format(state=self.state),
        }
        for name, text in files.items():
            (self.state / name).write_text(text)
        _make_key(self.state / "id", f"lab {self.settings.id}")
        tether = ["setpriv", "--pdeathsig=KILL"] if with_parent else []
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL"]
        supervisor = [sys.executable, "-m", "hostlab.supervisor", str(self.state)]
        log = self.state / "supervisor.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*tether, *unshare, *supervisor],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(CHECKOUT / "lab")},
            )
        end = time.monotonic() + 30
        while not (self.state / "control").exists():
            if process.poll() is not None or time.monotonic() > end:
                text = log.read_text().strip()
                self.remove()
                raise LabError(
                    "the lab did not start",
                    seen=text or "no output",
                    wanted="its supervisor answering",
                    next="lab/lab up",
                )
            time.sleep(0.02)

    def add(self, spec: HostSpec) -> None:
        """Make a host and switch it on."""
        key = self.state / f"hostkey-{spec.name}"
        _make_key(key, spec.name)
        public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        for name, line in (
            ("known_hosts", f"{spec.ip},{spec.name} {public}\n"),
            ("hosts", f"{spec.ip} {spec.name}\n"),
            ("ssh_config", f"Host {spec.name}\n  HostName {spec.ip}\n"),
        ):
            with (self.state / name).open("a") as file:  # in place: `hosts` is bind-mounted
                file.write(line)
        self.ask("add", spec=spec.as_dict())

    def ensure(self, specs: list[HostSpec]) -> list[str]:
        """Bring these hosts up where they are not; returns those that were left alone."""
        running, untouched = self.hosts(), []
        for spec in specs:
            if spec.name not in running:
                self._check_fits(spec, running)
                self.say(f"{spec.name}: new, starting with {spec.ip} and {spec.memory >> 20} MiB")
                self.add(spec)
            elif HostSpec.from_dict(running[spec.name]) != spec:
                raise LabError(
                    f"{spec.name} is up with another specification",
                    seen=HostSpec.from_dict(running[spec.name]),
                    wanted=str(spec),
                    next="lab/lab down, then up again",
                )
            elif not running[spec.name]["on"]:
                self.say(f"{spec.name}: was off, switching on")
                self.ask("power", name=spec.name, to="on")
            else:
                untouched.append(spec.name)
        return untouched

    def _check_fits(self, spec: HostSpec, running: dict[str, dict]) -> None:
        control = self.ask("status")["control"]
        if control_address(spec.ip) != control:
            raise LabError(
                f"{spec.name} is not in the network of the running lab",
                seen=spec.ip,
                wanted=f"an address beside {control}",
                next="lab/lab down, then up again, or LAB_NAME=other lab/lab up ...",
            )
        for other in running.values():
            if other["ip"] == spec.ip:
                raise LabError(
                    f"the address of {spec.name} is taken",
                    seen=f"{other['name']}={spec.ip}",
                    wanted="a free address",
                    next="lab/lab status",
                )

    def wait_booted(self, name: str, seconds: float = 240) -> None:
        """Until the host's systemd has started everything. Raises LabError when it ended or took longer."""
        begin = told = time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            state = self.ssh(name, "systemctl", "is-system-running", "--wait").stdout.strip()
            if state == "running":
                return
            if state == "degraded":
                failed = self.ssh(name, "systemctl", "--failed", "--no-pager").stdout
                self.say(f"{name}: degraded, failed units:\n{failed}")
                return
            if not self.host(name)["on"]:
                break
            if now > told + 10:
                told = now
                self.say(f"{name}: booting ({now - begin:.0f} s)")
            time.sleep(0.1)
        log, console = (
            (self.state / file).read_text(errors="replace").splitlines()[-15:]
            for file in ("supervisor.log", f"console-{name}.log")
        )
        raise LabError(
            f"{name} did not boot",
            seen="\n".join(["", *log, *console]),
            wanted=f"systemd running within {seconds:.0f} s",
            next=f"less {self.state}/console-{name}.log",
        )

    # ---- removed

    def remove(self) -> bool:
        """End every process of the lab and remove all it left; returns whether there was anything."""
        pid, left = self.pid, self.state.exists() or bool(cgroups.subtrees(self.settings.id))
        if pid:
            os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + 20
            while self.pid == pid:
                if time.monotonic() > end:
                    raise LabError(
                        "the lab's first process does not end",
                        seen=f"pid {pid}",
                        wanted="gone",
                        next=f"ps -p {pid} -o stat,wchan",
                    )
                time.sleep(0.02)
        cgroups.remove(self.settings.id)
        if self.state.exists():
            inside = [
                line.split()[1]
                for line in Path("/proc/mounts").read_text().splitlines()
                if line.split()[1].startswith(f"{self.state}/")
            ]
            if inside:
                raise LabError(
                    "something is mounted below the lab's state",
                    seen=" ".join(inside),
                    wanted="no mount",
                    next=f"umount {inside[-1]}",
                )
            shutil.rmtree(self.state)
        with contextlib.suppress(OSError):  # another lab is there
            self.settings.state_root.rmdir()
        return left


def _make_key(path: Path, comment: str) -> None:
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path], check=True)
