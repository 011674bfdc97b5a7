# SPDX-License-Identifier: GPL-3.0-or-later
"""Inside the lab's namespaces: its network, the hosts' disks and power, and forwarded ports.

`lab` starts this under `unshare --mount --net --pid`, so that it is process 1 of the lab: when it ends,
the kernel ends every process of every host, and mounts and interfaces go with the namespaces.
It answers requests (JSON, one for each connection) on the socket <state>/control.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path

from . import cgroups
from .errors import LabError
from .settings import HostSpec, control_address

BRIDGE = "lab0"
NSPAWN_REBOOT = 133  # nspawn's exit code for a reboot, with --keep-unit

# Process 1 of a host. nspawn mounts v1 controllers read-only; the host sees only its own subtree of them,
# and its systemd needs to write there. systemd 256 and newer refuses them unless told to go on.
HOST_INIT = """\
#!/bin/sh
for directory in {controllers}; do mount -o remount,bind,rw "$directory"; done
exec /lib/systemd/systemd SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1 "$@"
"""
HOST_NETWORK = """\
[Match]
Name=host0
[Network]
Address={ip}/24
Gateway={control}
LinkLocalAddressing=no
IPv6AcceptRA=no
"""


def main(state: Path) -> None:
    """Process 1: set the namespaces up, start the supervisor, then only reap."""
    # /proc is still the machine's, so this is the number by which it knows this process.
    (state / "lab.pid").write_text(os.readlink("/proc/self") + "\n")
    settings = json.loads((state / "lab.json").read_text())
    _set_up(state, settings["control"])
    Path(settings["mark"]).touch()
    child = os.fork()
    if child == 0:
        asyncio.run(Supervisor(state, settings).serve())
        sys.exit(0)
    while os.wait()[0] != child:
        pass


def _set_up(state: Path, control: str) -> None:
    def run(*command: object) -> None:
        subprocess.run([str(word) for word in command], check=True)

    run("mount", "-t", "proc", "proc", "/proc")
    Path("/run/systemd").mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run/systemd")  # nspawn's locks and sockets
    run("mount", "--bind", state / "hosts", "/etc/hosts")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{control}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    # No way out: whoever tries learns it at once instead of after a timeout.
    run("ip", "route", "add", "unreachable", "default")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def children(parent: int) -> list[int]:
    """Process ids whose parent is this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return found


class Host:
    """A host's disk and power."""

    def __init__(self, supervisor: Supervisor, spec: HostSpec) -> None:
        self.spec, self.state, self.lab = spec, supervisor.state, supervisor.settings["id"]
        self.image = Path(supervisor.settings["image"])
        self.disk = self.state / "fs" / spec.name
        self.root = self.disk / "root"
        self.console = self.state / f"console-{spec.name}.log"
        self.wanted, self.off = asyncio.Event(), asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.boots, self.last_exit = 0, None
        self.off.set()

    @property
    def leader(self) -> int | None:
        """The host's process 1, as the lab numbers it."""
        found = children(self.process.pid) if self.process else []
        return found[0] if found else None

    def status(self) -> dict:
        return {
            **self.spec.as_dict(),
            "on": not self.off.is_set(),
            "boots": self.boots,
            "last_exit": self.last_exit,
            "leader": self.leader,
            "memory_used": cgroups.memory_used(self.lab, self.spec.name),
        }

    def make_disk(self) -> None:
        """An overlay: the shared image below, this host's own directory above."""
        for name in ("upper", "work", "root"):
            (self.disk / name).mkdir(parents=True)
        options = f"lowerdir={self.image / 'rootfs'},upperdir={self.disk / 'upper'},workdir={self.disk / 'work'}"
        mounted = subprocess.run(
            ["mount", "-t", "overlay", "-o", options, "overlay", self.root], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            shutil.rmtree(self.disk)
            raise LabError(
                f"the disk of {self.spec.name} could not be made",
                seen=mounted.stderr.strip(),
                wanted="a file system that can hold an overlay's upper directory: ext4, xfs, btrfs, tmpfs",
                next="set LAB_STATE to a directory on such a file system",
            )
        try:
            self._provision()
        except OSError:
            subprocess.run(["umount", self.root], check=True)
            shutil.rmtree(self.disk)
            raise

    def _provision(self) -> None:
        """What a provider's installer would leave: name, address, the operator's key."""
        name, etc = self.spec.name, self.root / "etc"
        (etc / "hostname").write_text(f"{name}\n")
        (etc / "hosts").write_text(f"127.0.0.1 localhost {name}\n")
        network = HOST_NETWORK.format(ip=self.spec.ip, control=control_address(self.spec.ip))
        (etc / "systemd/network/10-lab.network").write_text(network)
        keys = self.root / "root/.ssh"
        keys.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(self.state / "id.pub", keys / "authorized_keys")
        for suffix in ("", ".pub"):
            shutil.copy(self.state / f"hostkey-{name}{suffix}", etc / f"ssh/ssh_host_ed25519_key{suffix}")
        controllers = [
            hierarchy.mount
            for hierarchy in cgroups.hierarchies()
            if hierarchy.version == 1 and "name=systemd" not in hierarchy.controllers
        ]
        init = self.root / "sbin/lab-init"
        init.write_text(HOST_INIT.format(controllers=" ".join(map(str, controllers))))
        init.chmod(0o755)

    def know(self, lines: str) -> None:
        with (self.root / "etc/hosts").open("a") as hosts:
            hosts.write(lines)

    async def run(self) -> None:
        """Boot again and again, as hardware would, while the power is on."""
        while True:
            await self.wanted.wait()
            self.off.clear()
            try:
                await self._boot()
            except (OSError, LabError) as error:
                log(f"{self.spec.name}: {error}")
                self.last_exit = -1
            if self.last_exit != NSPAWN_REBOOT:
                self.wanted.clear()
            if not self.wanted.is_set():
                self.off.set()

    async def _boot(self) -> None:
        joins = await asyncio.to_thread(cgroups.create, self.lab, self.spec.name, self.spec.memory)
        binds = [(self.image / "debs", "/srv/debs"), *self.spec.binds]
        # --register=no --keep-unit: no systemd, dbus or machined is needed outside. RTMIN+4 asks systemd to power off.
        options = ["--quiet", "--register=no", "--keep-unit", "--console=pipe", "--kill-signal=SIGRTMIN+4"]
        options += ["--resolv-conf=off", "--timezone=off", "--link-journal=no", f"--network-bridge={BRIDGE}"]
        options += [f"--bind-ro={source}:{target}" for source, target in binds]
        options += [f"--machine={self.spec.name}", f"--directory={self.root}"]
        command = ["systemd-nspawn", *options, "/sbin/lab-init"]
        join = "".join(f"echo $$ > {shlex.quote(str(path))}\n" for path in joins)
        # Debian 12 keeps /tmp on the disk; nspawn would mount a tmpfs.
        environment = {"PATH": os.environ["PATH"], "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}
        self.boots += 1
        log(f"{self.spec.name}: boot {self.boots}")
        script, quiet = f"{join}exec {shlex.join(command)}", subprocess.DEVNULL
        with self.console.open("ab") as console:
            self.process = await asyncio.create_subprocess_exec(
                "sh", "-ec", script, env=environment, stdin=quiet, stdout=console, stderr=console
            )
        self.last_exit = await self.process.wait()
        self.process = None
        log(f"{self.spec.name}: nspawn ended with {self.last_exit}")
        await self._close_connections()

    async def _close_connections(self) -> None:
        """End ssh's shared connections to this host: they lead nowhere now."""
        for control in (self.state / "cp").glob(f"{self.spec.ip}-*"):
            command, quiet = ["ssh", "-F", "none", "-O", "exit", "-S", str(control), self.spec.ip], subprocess.DEVNULL
            closer = await asyncio.create_subprocess_exec(*command, stdin=quiet, stdout=quiet, stderr=quiet)
            await closer.wait()

    async def power(self, to: str) -> None:
        if to == "on":
            self.wanted.set()
            return
        self.wanted.clear()
        if self.process:
            if to == "off":
                self.process.send_signal(signal.SIGTERM)  # nspawn passes --kill-signal on
            else:
                os.kill(self.leader or self.process.pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(self.off.wait(), 100)
        except TimeoutError:
            raise LabError(
                f"{self.spec.name} is still on after 100 s",
                seen=f"power {to}",
                wanted="off",
                next=f"lab/lab power {self.spec.name} cut",
            ) from None


class Supervisor:
    def __init__(self, state: Path, settings: dict) -> None:
        self.state, self.settings = state, settings
        self.hosts: dict[str, Host] = {}
        self.forwards: dict[str, str] = {}
        self.tasks: set[asyncio.Task] = set()

    async def serve(self) -> None:
        path = self.state / "control.new"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(16)
            listener.setblocking(False)
            path.rename(self.state / "control")  # there only when it answers
            log("ready")
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                self._spawn(self._answer(connection))

    def _spawn(self, coroutine) -> None:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)  # asyncio itself holds no strong reference
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        with connection:
            try:
                data, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 1 << 16, 1)
                request = json.loads(data)
                reply = {"result": await getattr(self, f"on_{request.pop('request')}")(*descriptors, **request)}
            except LabError as error:
                reply = {"error": error.as_dict()}
            except Exception as error:  # a bug: the client must learn of it, and the other hosts must go on
                log(traceback.format_exc())
                reply = {"error": LabError("the lab's supervisor failed", seen=repr(error)).as_dict()}
            try:
                await asyncio.to_thread(connection.send, json.dumps(reply).encode())
            except OSError:
                log("the client went away before the answer")

    def _host(self, name: str) -> Host:
        if name not in self.hosts:
            raise LabError(
                "the lab has no such host", seen=name, wanted=" ".join(self.hosts) or "a host", next="lab/lab status"
            )
        return self.hosts[name]

    async def on_status(self) -> dict:
        return {**self.settings, "hosts": [host.status() for host in self.hosts.values()], "forwards": self.forwards}

    async def on_add(self, spec: dict) -> None:
        """Make a host and switch it on. The caller has made its host key."""
        host = Host(self, HostSpec.from_dict(spec))
        await asyncio.to_thread(host.make_disk)
        host.know(f"{self.settings['control']} control\n{host.spec.ip} {host.spec.name}\n")
        for other in self.hosts.values():
            other.know(f"{host.spec.ip} {host.spec.name}\n")
            host.know(f"{other.spec.ip} {other.spec.name}\n")
        self.hosts[host.spec.name] = host
        self._spawn(host.run())
        await host.power("on")

    async def on_power(self, name: str, to: str) -> None:
        await self._host(name).power(to)

    async def on_forward(self, descriptor: int, name: str, port: int, loopback: bool = False) -> None:
        """Serve a listening socket that was made outside; a socket keeps the network namespace it was made in."""
        listener, host = socket.socket(fileno=descriptor), self._host(name)
        address, listen_port = listener.getsockname()
        connect = self._loopback if loopback else asyncio.open_connection
        server = await asyncio.start_server(
            lambda *streams: self._relay(connect(host.spec.ip, port), f"{name}:{port}", *streams), sock=listener
        )
        self._spawn(server.serve_forever())
        self.forwards[f"{address}:{listen_port}"] = f"{name}:127.0.0.1:{port}" if loopback else f"{name}:{port}"

    async def _loopback(self, ip: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a port that only the host itself reaches; ssh makes it there."""
        command = ["ssh", "-F", str(self.state / "ssh_config"), "-o", "ControlPath=none", "-W", f"127.0.0.1:{port}", ip]
        pipe = asyncio.subprocess.PIPE
        ssh = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
        return ssh.stdout, ssh.stdin

    async def _relay(
        self, far: Awaitable, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.wait_for(far, 10)
        except (OSError, TimeoutError) as error:
            log(f"forward to {name}: {error}")
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except OSError:
            pass  # one side is gone; the other is closed below
        finally:
            far_writer.close()
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
