# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of the host's settings that decide how an engine runs on it: clock, memory, limits, processors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

from .findings import Finding, Unchecked, found
from .gpu_facts import cpu_list, numa_nodes
from .host import Host, number

GIB = 1 << 30
MIB = 1 << 20
CAP_SYS_RESOURCE = 24
SHM_FILE_BYTES = 64 * MIB  # what NCCL and Python leave behind is smaller and harmless


def check_clock(host: Host) -> list[Finding] | Unchecked:
    """Whether the kernel's clock follows a source; times in logs, certificates and alerts are wrong otherwise."""
    status, text = host.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    answer = text.partition("\n")[0].strip()
    if status != 0 or answer not in ("yes", "no"):
        return Unchecked("host.clock", f"timedatectl gave no answer: {answer[:120]}")
    if answer == "yes":
        return []
    fix = "timedatectl set-ntp true (systemd-timesyncd), or start chrony"
    return [found("host.clock", "the clock is not synchronised", "a synchronised clock", fix)]


def check_shm(host: Host, need_gib: float) -> list[Finding]:
    """Size of /dev/shm, where NCCL and the ranks keep what they share."""
    try:
        size = os.statvfs(host.path("/dev/shm"))
    except OSError:
        return [found("host.shm", "no /dev/shm", f"{need_gib:g} GiB", "mount -t tmpfs tmpfs /dev/shm")]
    gib = size.f_blocks * size.f_frsize / GIB
    if gib >= need_gib:
        return []
    fix = f"mount -o remount,size={need_gib:.0f}g /dev/shm, and the same in /etc/fstab"
    return [found("host.shm", f"{gib:.1f} GiB", f"{need_gib:g} GiB", fix)]


def check_shm_files(host: Host) -> list[Finding]:
    """Large files in /dev/shm that no process has open or mapped: left by a run that was killed."""
    large = {}
    for name in host.names("/dev/shm"):
        with contextlib.suppress(OSError):
            size = os.stat(host.path(f"/dev/shm/{name}")).st_blocks * 512
            if size >= SHM_FILE_BYTES:
                large[name] = size
    for pid in host.pids() if large else []:
        used = host.read(f"/proc/{pid}/maps") + "\n".join(host.open_files(pid))
        large = {name: size for name, size in large.items() if f"/dev/shm/{name}" not in used}
    if not large:
        return []
    names = sorted(large)
    seen = f"{sum(large.values()) / GIB:.1f} GiB in files that no process uses: {', '.join(names[:5])}"
    fix = f"rm {' '.join('/dev/shm/' + name for name in names)}"
    return [found("host.shm_files", seen, "none", fix)]


def check_swap(host: Host) -> list[Finding]:
    """Swap that the kernel turns to although memory is free."""
    areas = host.read("/proc/swaps").splitlines()[1:]
    swappiness = number(host.read("/proc/sys/vm/swappiness"))
    if not areas or swappiness is None or swappiness <= 10:
        return []
    seen = f"{len(areas)} swap areas, vm.swappiness {swappiness:.0f}"
    fix = "sysctl vm.swappiness=10 (gpu_host_sysctl keeps it), or swapoff -a"
    return [found("host.swap", seen, "no swap, or vm.swappiness at most 10", fix)]


def check_thp_defrag(host: Host) -> list[Finding]:
    """Transparent huge pages that a page fault has to wait for."""
    path = "/sys/kernel/mm/transparent_hugepage/defrag"
    chosen = re.search(r"\[(\S+)\]", host.read(path))
    if not chosen or chosen[1] != "always":
        return []
    return [found("host.thp_defrag", "defrag is always", "madvise", f"echo madvise > {path}")]


def check_limit(host: Host, id: str, line: str, need: float, fix: str) -> list[Finding]:
    """A limit of process 1, which a unit can exceed only where process 1 may raise its own (CAP_SYS_RESOURCE)."""
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)", host.read("/proc/1/status"), re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> CAP_SYS_RESOURCE & 1:
        return []
    limits = re.search(rf"^{line}\s+\S+\s+(\S+)", host.read("/proc/1/limits"), re.MULTILINE)
    hard = number(limits[1]) if limits else None
    if hard is None or hard >= need:  # "unlimited" is no number
        return []
    seen = f"hard limit of process 1: {hard:.0f}, and it may not raise it"
    return [found(id, seen, "unlimited" if need == float("inf") else f"{need:.0f}", fix)]


def check_limits(host: Host) -> list[Finding]:
    """Pinned memory and open files."""
    where = "raise it where this host is started (container, hypervisor, LimitMEMLOCK and LimitNOFILE of its manager)"
    return check_limit(host, "host.memlock", "Max locked memory", float("inf"), where) + check_limit(
        host, "host.nofile", "Max open files", 65536, where
    )


def check_processors(host: Host) -> list[Finding]:
    """Processors that are switched off, and NUMA nodes without memory."""
    findings = []
    offline = cpu_list(host.read("/sys/devices/system/cpu/offline"))
    if offline:
        first = offline[0]
        fix = f"echo 1 > /sys/devices/system/cpu/cpu{first}/online; else look for it in the BIOS"
        findings.append(found("host.cpus_offline", f"processors {offline} are offline", "all of them online", fix))
    nodes = numa_nodes(host)
    empty = [node.number for node in nodes if node.cpus and not node.memory_mib]
    if empty and len(nodes) > 1:
        fix = "put memory modules beside that socket; numactl -H shows the nodes"
        findings.append(found("host.numa_memory", f"node {empty} has no memory", "memory in every node", fix))
    return findings


def check_settings(host: Host, shm_gib: float) -> tuple[list[Finding], list[Unchecked]]:
    """Run the checks that apply to every host; shm_gib 0 leaves /dev/shm's size alone."""
    clock = check_clock(host)
    findings: Iterable[Finding] = [] if isinstance(clock, Unchecked) else clock
    unchecked = [clock] if isinstance(clock, Unchecked) else []
    parts = [check_swap(host), check_thp_defrag(host), check_processors(host), check_shm_files(host)]
    parts += [check_shm(host, shm_gib)] if shm_gib else []
    return [*findings, *(finding for part in parts for finding in part)], unchecked
