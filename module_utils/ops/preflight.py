# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of a host before anything is changed on it: can what the inventory asks for work here?

Every check is a function of a `Host` (a file system root and a way to run a program, so that tests can stand in for
both) and returns findings. A finding names what was seen, what is wanted and what to do; its id never changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import typing as t
from collections.abc import Iterable, Mapping

from .engine_checks import check_engine, host_cache_gib
from .findings import Finding, Unchecked, found
from .gpu_checks import check_gpus
from .gpu_facts import cpu_list
from .host import SECONDS, Host, number, whole_lines
from .system_checks import check_limits, check_settings

SUPPORTED_SYSTEMS = {("debian", "12"), ("debian", "13"), ("ubuntu", "24.04")}
SUPPORTED_PYTHONS = {(3, 11), (3, 12), (3, 13)}
# As the services' units run theirs: not as root, and with no home directory to be seen.
AS_SERVICE = ("systemd-run", "--quiet", "--pipe", "--wait", "--collect", "--uid=65534", "--property=ProtectHome=yes")
GIB = 1 << 30
LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


def check_system(host: Host) -> list[Finding]:
    """Distribution, machine type and init system."""
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', host.read("/etc/os-release"), re.MULTILINE))
    system = (fields.get("ID", "unknown"), fields.get("VERSION_ID", "unknown"))
    findings = []
    if system not in SUPPORTED_SYSTEMS:
        wanted = "Debian 12, Debian 13 or Ubuntu 24.04"
        findings.append(found("host.system", " ".join(system), wanted, "use a host with one of these systems"))
    if os.uname().machine != "x86_64":
        fix = "use an x86_64 host; the lock files are for it alone"
        findings.append(found("host.machine", os.uname().machine, "x86_64", fix))
    if host.read("/proc/1/comm").strip() != "systemd":
        seen = "init system is '{}'".format(host.read("/proc/1/comm").strip() or "unknown")
        fix = "use a host or virtual machine that boots with systemd"
        findings.append(found("host.init", seen, "systemd as process 1", fix))
    return findings


def check_python(host: Host, interpreter: str, variable: str) -> list[Finding]:
    """The interpreter that the engine's environment is made with; `variable` names where the inventory sets it."""
    status, output = host.run([interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    match = re.match(r"(\d+)\.(\d+)\s*$", output) if status == 0 else None
    if match and (int(match[1]), int(match[2])) in SUPPORTED_PYTHONS:
        return _check_python_as_service(host, interpreter, variable)
    seen = f"{interpreter} is Python {output.strip()}" if match else f"{interpreter} does not run: {output.strip()}"
    wanted = "Python 3.11, 3.12 or 3.13"
    return [found("host.python", seen, wanted, f"set {variable} to such an interpreter", variable)]


def _check_python_as_service(host: Host, interpreter: str, variable: str) -> list[Finding]:
    """A Python below /root or /home, where pyenv and uv put theirs, is none for a service."""
    status, output = host.run([*AS_SERVICE, interpreter, "-I", "-c", ""])
    if status == 0:
        return []
    seen = f"{interpreter} does not run as a service: {output.strip() or f'systemd-run ended with {status}'}"
    wanted = "a Python that every user can run, and not below /root or /home, which services don't see"
    return [found("host.python", seen, wanted, f"set {variable} to such an interpreter", variable)]


def listening_inodes(table: str, port: int) -> set[str]:
    """Return the inodes of sockets that listen on `port`, from the text of /proc/net/tcp or tcp6."""
    rows = (line.split() for line in whole_lines(table)[1:])
    return {row[9] for row in rows if len(row) > 9 and row[3] == LISTEN and int(row[1].rsplit(":", 1)[1], 16) == port}


def socket_owners(host: Host, inodes: set[str]) -> list[tuple[int, str, str]]:
    """Return (pid, command name, systemd unit) of the processes that hold one of these sockets."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [
        (pid, host.read(f"/proc/{pid}/comm").strip(), host.unit_of(pid))
        for pid in host.pids()
        if any(target in wanted for target in host.open_files(pid))
    ]


def check_port(host: Host, port: int, variable: str, units: Iterable[str]) -> list[Finding]:
    """A port must be free, or held by one of our own `units`."""
    inodes = listening_inodes(host.read("/proc/net/tcp"), port) | listening_inodes(host.read("/proc/net/tcp6"), port)
    if not inodes:
        return []
    owners = socket_owners(host, inodes)
    if owners and all(unit in set(units) for _pid, _name, unit in owners):
        return []
    who = (
        ", ".join("process {} ({}{})".format(pid, name, ", " + unit if unit else "") for pid, name, unit in owners)
        or "an unknown process"
    )
    fix = f"stop it, or set {variable} to another port; ss -ltnp 'sport = :{port}' shows the owner"
    return [found("host.port", f"port {port} is held by {who}", f"port {port} free", fix, variable)]


def existing_parent(path: str) -> str:
    """Return the closest directory above `path` (or itself) that exists."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def check_port_range(host: Host, ports: Iterable[int]) -> list[Finding]:
    """No port of ours may be one that the kernel gives to outgoing connections: it would be taken now and then."""
    bounds = [number(text) for text in host.read("/proc/sys/net/ipv4/ip_local_port_range").split()]
    if len(bounds) != 2 or None in bounds:
        return []
    reserved = cpu_list(host.read("/proc/sys/net/ipv4/ip_local_reserved_ports"))
    inside = sorted({port for port in ports if bounds[0] <= port <= bounds[1]} - set(reserved))
    if not inside:
        return []
    seen = (
        f"ports {', '.join(map(str, inside))} are among those of outgoing connections, {bounds[0]:g} to {bounds[1]:g}"
    )
    keep = ",".join(map(str, sorted({*reserved, *inside})))
    fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={keep} (gpu_host_sysctl keeps it)"
    return [found("host.port_range", seen, "ports outside of it, or reserved", fix)]


def size_gib(directory: str) -> float:
    """Return what the files of a directory take; 0 for one that is not there."""
    sizes = []
    for parent, _directories, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
    return sum(sizes) / GIB


def check_disk(host: Host, path: str, need_gib: float, variable: str, holds: str = "") -> list[Finding]:
    """Free space where `path` is or will be. The files of `holds`, a directory, are a part of it that is there."""
    need_gib = max(need_gib - size_gib(host.path(holds)), 0.0) if holds else need_gib
    free = shutil.disk_usage(existing_parent(host.path(path))).free / GIB
    if free >= need_gib:
        return []
    fix = f"free disk space, or set {variable} to a directory on a larger file system (df -h {existing_parent(path)})"
    return [
        found(
            "host.disk",
            f"{free:.1f} GiB free for {path}",
            f"{need_gib:.1f} GiB" if holds else f"{need_gib} GiB",
            fix,
            variable,
        )
    ]


def available_memory_gib(host: Host) -> float:
    """Memory that a new process can get: what the kernel calls available, within the control group's limit."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    for limit, used in (
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ("memory.max", "memory.current"),
    ):
        most, now = host.read("/sys/fs/cgroup/" + limit).strip(), host.read("/sys/fs/cgroup/" + used).strip()
        if most.isdigit() and now.isdigit():
            available = min(available, int(most) - int(now))
    return available / GIB


def check_memory(host: Host, need_gib: float, variable: str, units: Iterable[str]) -> list[Finding]:
    """Free memory for the engine; not asked while one of its `units` runs and holds that memory."""
    if any(host.run(["systemctl", "is-active", "--quiet", unit])[0] == 0 for unit in units):
        return []
    available = available_memory_gib(host)
    if available >= need_gib:
        return []
    fix = f"end what uses memory (ps --sort=-rss -eo rss,pid,comm | head), or lower {variable} for a smaller model"
    return [found("host.memory", f"{available:.1f} GiB available", f"{need_gib} GiB", fix, variable)]


def check_file(host: Host, path: str, variable: str) -> list[Finding]:
    """A file that must be there before the run, such as a checkpoint's config.json."""
    if os.path.isfile(host.path(path)):
        return []
    fix = f"put it there, or set {variable} to where it is"
    return [found("host.file", f"no file {path}", "that file on the host", fix, variable)]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Everything that was seen: what is wrong, what was not looked at and why, and facts for the inventory."""

    findings: list[Finding]
    unchecked: list[Unchecked]
    facts: dict[str, t.Any]


def gpu_part(
    host: Host,
    gpus: Mapping[str, t.Any] | None,
    reason: str,
    units: Iterable[str],
    timeout: float,
    islands: Iterable[Mapping[str, t.Any]],
    engines: Iterable[Mapping[str, t.Any]],
) -> Inspection:
    """The GPUs, and the limits that only an engine with GPUs needs; nothing but the reason where none are wanted."""
    if not gpus:
        names = ("gpu.*", "host.numactl", "host.iommu", "host.acs", "host.aspm")
        return Inspection([], [Unchecked(name, reason) for name in names], {})
    view = check_gpus(host, dict(gpus), units, timeout, islands, engines)
    facts = {
        "driver": view.driver,
        "cuda": view.cuda,
        "gpus": [dataclasses.asdict(gpu) for gpu in view.gpus],
        "islands": view.islands,
        "numa": [dataclasses.asdict(node) for node in view.nodes],
    }
    return Inspection(view.findings + check_limits(host), view.unchecked, facts)


def check_host(
    host: Host,
    python: dict | None = None,
    ports: Iterable[dict] = (),
    disks: Iterable[dict] = (),
    memory: dict | None = None,
    files: Iterable[dict] = (),
    gpus: Mapping[str, t.Any] | None = None,
    gpus_reason: str = "no GPUs are wanted",
    islands: Iterable[Mapping[str, t.Any]] = (),
    units: Iterable[str] = (),
    venv: str = "",
    cache: str = "",
    engines: Iterable[Mapping[str, t.Any]] = (),
    shm_gib: float = 0,
    timeout: float = SECONDS,
) -> Inspection:
    """Run every check that has something to look at; each dict holds the arguments of its check function.

    gpus: what is wanted of the GPUs (see gpu_checks), nothing for none. islands: those of the inventory. units:
    patterns of our own units. engines: the arguments and the environment of each. timeout: seconds for each program
    that asks the GPUs.
    """
    engines = list(engines)
    findings = check_system(host)
    if python:
        findings += check_python(host, **python)
    ports = list(ports)
    for port in ports:
        findings += check_port(host, **port)
    findings += check_port_range(host, [int(port["port"]) for port in ports])
    for disk in disks:
        findings += check_disk(host, **disk)
    if memory:
        pinned = host_cache_gib(engines)
        findings += check_memory(host, **{**memory, "need_gib": memory["need_gib"] + pinned})
    for file in files:
        findings += check_file(host, **file)
    settings, unchecked = check_settings(host, shm_gib)
    part = gpu_part(host, gpus, gpus_reason, units, timeout, islands, engines)
    findings += settings + part.findings + check_engine(host, venv, cache, engines)
    return Inspection(findings, unchecked + part.unchecked, part.facts)
