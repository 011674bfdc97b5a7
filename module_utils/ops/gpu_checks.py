# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of a host's GPUs against what is wanted. Nothing is changed, no process is ended.

Wanted: a dict with any of count, name, memory_mib, memory_free_mib, driver_min, power_limit_w, island_size, cuda_min;
what is not in it is not compared. Each check is a function of facts and returns findings.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import typing as t
from collections.abc import Iterable, Mapping, Sequence

from .findings import Finding, Unchecked, found
from .gpu_facts import (
    SMI,
    Gpu,
    Island,
    Node,
    PciDevice,
    Smi,
    Xid,
    ask_smi,
    bus_gpus,
    gpu_node,
    loaded_driver,
    numa_nodes,
    parse_lspci,
    parse_p2p,
    parse_xids,
    propose_islands,
    version,
)
from .host import NOT_THERE, TIMED_OUT, Host

Wanted = dict[str, t.Any]
VARIABLE = "preflight_gpus"
# The highest power limit of each edition of the card, in W, where the inventory names none.
EDITION_POWER_W = {
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 300,
    "RTX PRO 6000 Blackwell Workstation Edition": 600,
    "RTX PRO 6000 Blackwell Server Edition": 600,
}
PLANNED_FREE = "memory_plan_memory_free_mib"
FREE_SLACK_MIB = 256  # at TP4 and 0.80 the plan's pools are 0.6 % smaller with so much less
HELD_MIB = 1024  # less is what a display server or a monitoring agent holds
EFI_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
KERNEL_LOG = "journalctl -k -b | grep Xid"
# What the driver's own documentation says of the numbers that operators meet.
XID_MEANINGS = {
    8: "the GPU stopped processing",
    13: "a kernel of an application failed",
    31: "an application touched memory that is not its own",
    43: "an application's channel was stopped",
    45: "an application was ended",
    48: "memory error that could not be corrected",
    62: "the GPU's own controller halted",
    63: "a memory row was taken out of use",
    64: "a memory row could not be taken out of use",
    74: "link error",
    79: "the GPU has fallen off the bus",
    94: "memory error, contained",
    95: "memory error, not contained",
    109: "context switch timed out",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor halted",
}
NEEDS_RESET = {8, 48, 62, 64, 74, 79, 95, 109, 119, 120}


@dataclasses.dataclass(frozen=True)
class Places:
    """Where GPUs are: GPU -> NUMA node (None when nobody knows), and GPU -> device path in /sys."""

    nodes: dict[int, int | None]
    order: dict[int, str]


def name_gpus(gpus: Iterable[Gpu]) -> str:
    """Return GPU 0 (0000:01:00.0), GPU 3 (0000:c1:00.0)."""
    return ", ".join(f"GPU {gpu.index} ({gpu.bus_id})" for gpu in gpus)


def check_answer(smi: Smi, driver: str) -> list[Finding]:
    """Whether nvidia-smi has answered at all, and if not, why. driver: version of the loaded module, "" for none."""
    if smi.problem == "missing":
        seen = f"{SMI} is not installed" + (f", though module {driver} is loaded" if driver else "")
        return [found("gpu.driver", seen, "the driver with its tools", "ansible-playbook playbooks/gpu_host.yml")]
    if smi.problem == "no_driver":
        fix = "modprobe nvidia; journalctl -k -b | grep -iE 'nvidia|NVRM' says why it is not loaded"
        return [found("gpu.driver", smi.said, "the driver loaded", fix)]
    if smi.problem == "hangs":
        fix = (
            "journalctl -k -b | grep -E 'Xid|NVRM|blocked for more'; a GPU that the driver waits for needs a reboot, "
            "and a cold one if it comes back the same"
        )
        return [found("gpu.hang", smi.said, f"{SMI} -q answers", fix)]
    if smi.problem == "mismatch":
        seen = f"{smi.said}; the loaded module is {driver or 'unknown'}"
        fix = "reboot; or stop what uses the GPUs, rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia, modprobe nvidia"
        return [found("gpu.driver_library", seen, "module and libraries of one version", fix)]
    if smi.problem == "failed" and not smi.lost:
        fix = f"{SMI} -q; journalctl -k -b | grep -iE 'nvidia|NVRM'"
        return [found("gpu.output", f"{SMI} failed: {smi.said}", "an answer for every GPU", fix)]
    if smi.problem == "damaged" and not smi.lost:
        seen = f"{SMI} -q -x ends with: {smi.said[-120:]!r}; its CSV names {len(smi.gpus)} GPUs"
        return [found("gpu.output", seen, "complete XML", f"{SMI} -q -x | tail; {SMI} -L")]
    return []


def check_driver(smi: Smi, driver: str, is_open: bool, wanted: Wanted) -> list[Finding]:
    """Version of the module against that of the libraries, and against the least one for the engine's CUDA."""
    findings = []
    if driver and smi.driver and driver != smi.driver:
        fix = "reboot into one version; apt-mark hold keeps it"
        seen = f"module {driver}, libraries {smi.driver}"
        findings.append(found("gpu.driver_library", seen, "module and libraries of one version", fix))
    least, seen_version = str(wanted.get("driver_min") or ""), smi.driver or driver
    if least and seen_version and version(seen_version) < version(least):
        seen = f"driver {seen_version}{'' if is_open else ' (closed module)' if driver else ''}"
        fix = "gpu_host_packages, then ansible-playbook playbooks/gpu_host.yml -e gpu_host_upgrade=true"
        findings.append(found("gpu.driver_version", seen, f"{least} or newer", fix, VARIABLE + ".driver_min"))
    return findings


def check_count(smi: Smi, on_bus: list[str], is_open: bool, wanted: Wanted) -> list[Finding]:
    """GPUs that the driver shows, against those on the bus and those wanted."""
    findings = [
        found(
            "gpu.lost",
            f"{address}: {reason}",
            "the GPU answers",
            "stop the engine, then reboot; a GPU that is lost again has a bad slot, cable or power supply "
            "(journalctl -k -b -1 | grep -E 'Xid|AER|link')",
        )
        for address, reason in smi.lost
    ]
    count = wanted.get("count")
    # Half an answer does not say how many there are.
    unknown = smi.problem in ("missing", "no_driver", "hangs", "mismatch") or (
        smi.problem == "damaged" and not smi.lost
    )
    if not count or len(smi.gpus) == int(count) or unknown:
        return findings
    missing = sorted(set(on_bus) - {gpu.bus_id for gpu in smi.gpus})
    where = f"{len(on_bus)} on the PCI bus" + (f", without a driver: {', '.join(missing)}" if missing else "")
    if len(smi.gpus) > int(count):
        fix = f"set {VARIABLE}.count to what this host has"
    elif missing:
        fix = f"journalctl -k -b | grep -iE 'NVRM|Xid' for {missing[0]}" + (
            "" if is_open else "; Blackwell needs the open kernel module"
        )
    else:
        fix = "lspci -d 10de:; look for the card in the BIOS, at its power plugs and in its slot, then power-cycle"
    seen = f"{len(smi.gpus)} GPUs; {where}"
    return [*findings, found("gpu.count", seen, f"{count} GPUs", fix, VARIABLE + ".count")]


def check_kind(gpus: Iterable[Gpu], wanted: Wanted) -> list[Finding]:
    """Model and memory."""
    findings = []
    name, memory = str(wanted.get("name") or ""), float(wanted.get("memory_mib") or 0)
    others = [gpu for gpu in gpus if name.lower() not in gpu.name.lower()]
    if others:
        seen = f"{name_gpus(others)}: {', '.join(sorted({gpu.name or 'no name' for gpu in others}))}"
        fix = f"leave them out with CUDA_VISIBLE_DEVICES and {VARIABLE}.count, or set {VARIABLE}.name"
        findings.append(found("gpu.name", seen, f"a name with '{name}'", fix, VARIABLE + ".name"))
    small = [gpu for gpu in gpus if gpu.memory_mib is not None and gpu.memory_mib < memory]
    if small:
        seen = "; ".join(f"{name_gpus([gpu])} has {gpu.memory_mib:.0f} MiB" for gpu in small)
        fix = f"use the GPUs that the memory plan was made for, or set {VARIABLE}.memory_mib and plan again"
        findings.append(found("gpu.memory", seen, f"at least {memory:.0f} MiB", fix, VARIABLE + ".memory_mib"))
    return findings


def check_modes(gpus: Iterable[Gpu]) -> list[Finding]:
    """Settings of the driver that are off where they should be on, or the other way round."""
    gpus = list(gpus)
    findings = []

    def add(id: str, which: list[Gpu], seen: str, wanted: str, fix: str) -> None:
        if which:
            findings.append(found(id, f"{seen} on {name_gpus(which)}", wanted, fix))

    add(
        "gpu.persistence",
        [gpu for gpu in gpus if gpu.persistence is False],
        "persistence mode is off",
        "on: else each start waits for the driver, and limits are forgotten",
        "systemctl enable --now nvidia-persistenced",
    )
    add(
        "gpu.ecc",
        [gpu for gpu in gpus if gpu.ecc is False],
        "ECC is off",
        "on: a flipped bit in the weights is a wrong answer that nothing else notices",
        "nvidia-smi -e 1, then reboot",
    )
    add(
        "gpu.mig",
        [gpu for gpu in gpus if gpu.mig],
        "MIG is on",
        "whole GPUs: the ranks of one engine cannot talk to each other over MIG instances",
        "nvidia-smi -mig 0, then reboot",
    )
    add(
        "gpu.compute_mode",
        [gpu for gpu in gpus if gpu.compute_mode in ("Prohibited", "Exclusive_Process", "Exclusive Process")],
        "compute mode is not the default",
        "Default",
        "nvidia-smi -c DEFAULT",
    )
    return findings


def check_health(gpus: Iterable[Gpu]) -> list[Finding]:
    """Memory errors, and what slows a GPU down at rest."""
    findings = []
    for gpu in gpus:
        errors = [
            *([f"{gpu.ecc_uncorrected} uncorrected memory errors since the boot"] if gpu.ecc_uncorrected else []),
            *(["a memory row waits to be taken out of use"] if gpu.remap_pending else []),
            *(["a memory row could not be taken out of use"] if gpu.remap_failed else []),
        ]
        if errors:
            fix = "replace the card" if gpu.remap_failed else f"stop the engine, then {SMI} -r -i {gpu.index} or reboot"
            findings.append(found("gpu.ecc_errors", f"{name_gpus([gpu])}: {', '.join(errors)}", "none", fix))
        if gpu.slowed_by:
            seen = f"{name_gpus([gpu])} is slowed down by {', '.join(gpu.slowed_by)}"
            fix = f"{SMI} -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index}; air flow, dust, power cables"
            findings.append(found("gpu.throttle", seen, "full clocks", fix))
    return findings


def wanted_power(gpu: Gpu, wanted: Wanted) -> float | None:
    """The power limit in W that a GPU should have: the inventory's, else its edition's, else the card's own default."""
    if wanted.get("power_limit_w"):
        return float(wanted["power_limit_w"])
    edition = next((watts for name, watts in EDITION_POWER_W.items() if name in gpu.name), None)
    return edition if edition is not None else gpu.power_default_w


def check_power(gpus: Iterable[Gpu], wanted: Wanted) -> list[Finding]:
    """Power limits. A difference below 1 W is rounding."""
    findings = []
    for gpu in gpus:
        limit = wanted_power(gpu, wanted)
        if limit is not None and gpu.power_limit_w is not None and abs(gpu.power_limit_w - limit) >= 1:
            seen = f"{name_gpus([gpu])} ({gpu.name}) has a power limit of {gpu.power_limit_w:.0f} W"
            fix = f"{SMI} -i {gpu.index} -pl {limit:.0f}, or set {VARIABLE}.power_limit_w to {gpu.power_limit_w:.0f}"
            findings.append(found("gpu.power_limit", seen, f"{limit:.0f} W", fix, VARIABLE + ".power_limit_w"))
    return findings


def check_bus(gpus: Iterable[Gpu]) -> list[Finding]:
    """Lanes and visible memory. The link's speed says nothing: an idle card lowers it, and raises it under load."""
    findings = []
    for gpu in gpus:
        if gpu.link_width is not None and gpu.link_width_max is not None and gpu.link_width < gpu.link_width_max:
            seen = f"{name_gpus([gpu])} has x{gpu.link_width}"
            fix = f"lspci -vv -s {gpu.bus_id} | grep LnkSta; reseat card and riser, look at bifurcation in the BIOS"
            findings.append(found("gpu.link_width", seen, f"x{gpu.link_width_max}", fix))
        if gpu.bar1_mib is not None and gpu.memory_mib is not None and gpu.bar1_mib < gpu.memory_mib:
            seen = f"{name_gpus([gpu])} shows {gpu.bar1_mib:.0f} of {gpu.memory_mib:.0f} MiB on the bus (BAR1)"
            fix = "switch on Above 4G Decoding and Resizable BAR in the BIOS"
            findings.append(found("gpu.bar1", seen, "all of it, for direct transfers between GPUs", fix))
    return findings


def check_memory_held(host: Host, gpus: Iterable[Gpu], our_units: Iterable[str]) -> list[Finding]:
    """Memory held by processes of none of our units (patterns), or by none that can be seen; more than 1 GiB a GPU."""
    patterns = list(our_units)
    findings = []
    for gpu in gpus:
        units = {process.pid: host.unit_of(process.pid) for process in gpu.processes}
        strangers = [
            process
            for process in gpu.processes
            if not any(fnmatch.fnmatchcase(units[process.pid], pattern) for pattern in patterns)
        ]
        ours = len(strangers) < len(gpu.processes)
        held = sum(process.used_mib or 0 for process in strangers)
        used = gpu.used_mib or 0
        if strangers and (held >= HELD_MIB or (not ours and used >= HELD_MIB)):
            who = ", ".join(describe(host, process.pid, process.name, units[process.pid]) for process in strangers)
            fix = f"end them if they are left over: kill {' '.join(str(process.pid) for process in strangers)}"
            seen = f"{name_gpus([gpu])}: {held or used:.0f} MiB held by {who}"
            findings.append(found("gpu.memory_held", seen, "no memory held by others", fix))
        elif not gpu.processes and used >= HELD_MIB:
            seen = f"{name_gpus([gpu])}: {used:.0f} MiB held by no process that can be seen from here"
            fix = f"fuser -v /dev/nvidia{gpu.index} (containers, other PID namespaces); else {SMI} -r -i {gpu.index}"
            findings.append(found("gpu.memory_held", seen, "no memory held by others", fix))
    return findings


def check_memory_free(host: Host, gpus: Iterable[Gpu], our_units: Iterable[str], wanted: Wanted) -> list[Finding]:
    """GPUs at rest with less free than the plan counts on; memory that others hold (`check_memory_held`) left aside."""
    planned, patterns = float(wanted.get("memory_free_mib") or 0), list(our_units)

    def at_rest(gpu: Gpu) -> bool:
        units = [host.unit_of(process.pid) for process in gpu.processes]
        ours = any(fnmatch.fnmatchcase(unit, pattern) for unit in units for pattern in patterns)
        return not ours and (gpu.used_mib or 0) < HELD_MIB

    free = {gpu: gpu.free_mib for gpu in gpus if gpu.free_mib is not None and at_rest(gpu)}
    short = [gpu for gpu, mib in free.items() if mib < planned - FREE_SLACK_MIB]
    if not short:
        return []
    least = min(free[gpu] for gpu in short)
    seen = f"{name_gpus(short)}: {least:.0f} MiB free at rest{' at the least' if len(short) > 1 else ''}"
    fix = f"{SMI} shows who holds the rest; if it stays, set {PLANNED_FREE}: {least:.0f} and read playbooks/plan.yml"
    return [found("gpu.memory_free", seen, f"the plan's {planned:.0f} MiB", fix, PLANNED_FREE)]


def describe(host: Host, pid: int, name: str, unit: str) -> str:
    """Return process 4711 (python3, of docker-1f.scope), with whatever of that is known."""
    scope = re.search(r"/([^/\n]+\.scope)", host.read(f"/proc/{pid}/cgroup"))
    owner = unit or (scope[1] if scope else "")
    command = os.path.basename(name) or host.read(f"/proc/{pid}/comm").strip() or "unknown"
    return f"process {pid} ({command}{', of ' + owner if owner else ''})"


def check_xids(xids: Iterable[Xid], gpus: Iterable[Gpu]) -> list[Finding]:
    """Errors in the kernel log since the boot."""
    indices = {gpu.bus_id: f"GPU {gpu.index} " for gpu in gpus}
    findings = []
    for xid in xids:
        meaning = XID_MEANINGS.get(xid.number, "see the driver's Xid table")
        seen = (
            f"{indices.get(xid.bus_id, '')}({xid.bus_id}): {xid.count} x Xid {xid.number}, {meaning}; last: {xid.last}"
        )
        fix = (
            f"take the load off, then {SMI} -r or reboot before trusting it; {KERNEL_LOG}"
            if xid.number in NEEDS_RESET
            else f"journalctl -u 'sglang-*' at that time; {KERNEL_LOG}"
        )
        findings.append(found("gpu.xid", seen, "none since the boot", fix))
    return findings


def check_p2p(states: dict[tuple[int, int], str]) -> list[Finding]:
    """What the driver thinks of direct transfers; whether they work is for the timed test to say."""
    bad = sorted(pair for pair, state in states.items() if state != "OK")
    if not bad:
        return []
    kinds = ", ".join(sorted({states[pair] for pair in bad}))
    pairs = ", ".join(f"{source}-{target}" for source, target in bad[:8]) + (" and more" if len(bad) > 8 else "")
    fix = f"{SMI} topo -p2p r explains the letters; if it stays, NCCL_P2P_DISABLE=1 in sglang_serve_environment_custom"
    return [found("gpu.p2p", f"{kinds} between {pairs}", "OK between every two GPUs", fix)]


def check_iommu(host: Host, gpus: Iterable[Gpu]) -> list[Finding]:
    """Whether the IOMMU translates the addresses that GPUs use on the bus."""
    types = {gpu: host.read(f"/sys/bus/pci/devices/{gpu.bus_id}/iommu_group/type").strip() for gpu in gpus}
    translated = [gpu for gpu, kind in types.items() if kind.startswith("DMA")]
    if not translated:
        return []
    seen = f"{name_gpus(translated)} in IOMMU groups of type {types[translated[0]]}"
    fix = "boot with iommu=pt (and amd_iommu=on or intel_iommu=on), or iommu=off; see gpu_host_kernel_arguments"
    return [found("host.iommu", seen, "identity, or no IOMMU: else NCCL can hang at its first transfer", fix)]


def device_path(host: Host, address: str) -> str:
    """Return the path of a device in /sys, which names every bridge above it."""
    return os.path.realpath(host.path(f"/sys/bus/pci/devices/{address}"))


def bridges_above(paths: Iterable[str]) -> set[str]:
    """Return the bus addresses of the bridges on the way to these devices."""
    return {
        part for path in paths for part in path.split("/")[:-1] if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f:]+\.[0-7]", part)
    }


def check_pci(devices: Iterable[PciDevice], gpus: Iterable[Gpu], bridges: set[str]) -> list[Finding]:
    """Redirection at the bridges above GPUs (ACS), and links that sleep (ASPM)."""
    devices = list(devices)
    redirecting = [device for device in devices if device.bus_id in bridges and "ReqRedir+" in device.acs]
    findings = []
    if redirecting:
        ids = [device.bus_id for device in redirecting]
        seen = f"ReqRedir+ at {len(ids)} bridges: {', '.join(ids[:6])}{' and more' if len(ids) > 6 else ''}"
        fix = f"switch ACS off in the BIOS, or: for b in {' '.join(ids[:6])}; do setpci -s $b ECAP_ACS+6.w=0000; done"
        findings.append(found("host.acs", seen, "no redirection between GPUs", fix))
    ours = {gpu.bus_id for gpu in gpus}
    asleep = [device for device in devices if device.bus_id in ours and device.aspm and "Disabled" not in device.aspm]
    if asleep:
        seen = f"ASPM {asleep[0].aspm} on {', '.join(device.bus_id for device in asleep)}"
        fix = "boot with pcie_aspm=off pcie_port_pm=off; see gpu_host_kernel_arguments"
        findings.append(found("host.aspm", seen, "ASPM off: waking links lose GPUs", fix))
    return findings


def check_hold(host: Host) -> list[Finding]:
    """Driver packages that unattended upgrades may replace under a running engine."""
    if "1" not in re.findall(
        r'APT::Periodic::Unattended-Upgrade "(\d+)"', host.run(["apt-config", "dump", "APT::Periodic"])[1]
    ):
        return []
    status, listed = host.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}${Package}\n", "*nvidia*"])
    installed = [line[3:].strip() for line in listed.splitlines() if line.startswith("ii ")] if status == 0 else []
    installed = [name for name in installed if re.match(r"(lib)?nvidia-|linux-(modules|objects)-nvidia-", name)]
    held = set(host.run(["apt-mark", "showhold"])[1].split())
    free = [name for name in installed if name not in held]
    if not free:
        return []
    seen = f"unattended upgrades are on, and {len(free)} driver packages are not held: {', '.join(free[:4])}"
    fix = f"apt-mark hold {' '.join(free)}"
    return [found("gpu.driver_hold", seen, "held: an upgrade parts libraries and loaded module", fix)]


def check_next_kernel(host: Host) -> list[Finding]:
    """The newest installed kernel, which the next boot takes, must have the driver's module."""
    kernels = [name[8:] for name in host.names("/boot") if name.startswith("vmlinuz-")]
    newest = max(kernels, key=version, default="")
    modules = host.read(f"/lib/modules/{newest}/modules.dep")
    if not newest or re.search(r"^\S*/nvidia(-current)?(-open)?\.ko", modules, re.MULTILINE):
        return []
    seen = f"kernel {newest} is installed and has no nvidia module"
    fix = f"apt-get install linux-headers-{newest}; dkms autoinstall -k {newest}"
    return [found("gpu.driver_next_kernel", seen, "the module in the kernel of the next boot", fix)]


def check_no_rival(host: Host, driver: str) -> list[Finding]:
    """nouveau in the driver's place, or firmware that refuses to load it."""
    findings = []
    if re.search(r"^nouveau ", host.read("/proc/modules"), re.MULTILINE):
        fix = "ansible-playbook playbooks/gpu_host.yml writes the blacklist; then reboot"
        findings.append(found("gpu.nouveau", "module nouveau is loaded", "not loaded", fix))
    # Four bytes of attributes come before the value.
    if not driver and host.read(EFI_SECURE_BOOT)[4:5] == "\x01":
        fix = "mokutil --import the key that signed the module, then reboot; or switch Secure Boot off"
        findings.append(found("gpu.secure_boot", "Secure Boot is on and no driver is loaded", "a signed module", fix))
    return findings


def check_nvcc(host: Host, wanted: Wanted) -> list[Finding]:
    """The compiler that the engine calls for kernels it builds on this host."""
    least = str(wanted.get("cuda_min") or "")
    if not least:
        return []
    status, text = host.run(["/usr/local/cuda/bin/nvcc", "--version"])
    if status == NOT_THERE:
        status, text = host.run(["nvcc", "--version"])
    match = re.search(r"release (\d+\.\d+)", text)
    if status == 0 and match and version(match[1]) >= version(least):
        return []
    seen = f"nvcc {match[1]}" if match and status == 0 else "no nvcc in /usr/local/cuda/bin or the PATH"
    seen = text if status == TIMED_OUT else seen
    fix = "gpu_host_packages, then ansible-playbook playbooks/gpu_host.yml"
    return [found("gpu.nvcc", seen, f"release {least} or newer", fix, VARIABLE + ".cuda_min")]


def check_islands(islands: list[Island], wanted: Wanted) -> list[Finding]:
    """Whether the proposal keeps every island within a NUMA node."""
    size = int(wanted.get("island_size") or 0)
    torn = [island["gpus"] for island in islands if island["numa"] is None or (size and len(island["gpus"]) < size)]
    if not torn:
        return []
    seen = f"GPUs {torn} share no NUMA node, or are too few"
    fix = "move cards between sockets or set NPS1 in the BIOS; else write sglang_serve_islands by hand and measure"
    return [found("gpu.islands", seen, f"islands of {size or 'one node'} GPUs", fix, VARIABLE + ".island_size")]


def island_fault(island: Mapping[str, t.Any], places: Places) -> str:
    """Return what is wrong with one island of the inventory (gpus, numa), "" for nothing.

    A GPU whose node nobody knows contradicts nothing. An island over several nodes is wrong where the GPUs could be
    divided into islands of its size that are not, and that an engine can have: it takes consecutive numbers.
    """
    gpus, said = list(island.get("gpus") or []), island.get("numa")
    missing = [gpu for gpu in gpus if gpu not in places.nodes]
    if missing:
        return f"GPUs {gpus}: this host has no GPU {', '.join(map(str, missing))}"
    nodes = {gpu: node for gpu in gpus if (node := places.nodes[gpu]) is not None}
    elsewhere = ", ".join(f"GPU {gpu} is on node {node}" for gpu, node in nodes.items() if node != said)
    if said is not None and elsewhere:
        return f"GPUs {gpus} are said to be on node {said}: {elsewhere}"
    better = propose_islands(places.nodes, places.order, len(gpus)) if len(set(nodes.values())) > 1 else []
    if better and all(one["numa"] is not None and consecutive(one["gpus"]) for one in better):
        return f"GPUs {gpus} are on nodes {sorted(set(nodes.values()))}, and {[one['gpus'] for one in better]} are not"
    return ""


def consecutive(gpus: Sequence[int]) -> bool:
    """Whether these are numbers in a row."""
    return list(gpus) == list(range(gpus[0], gpus[0] + len(gpus)))


def check_inventory_islands(
    islands: Iterable[Mapping[str, t.Any]], places: Places, proposed: list[Island]
) -> list[Finding]:
    """The inventory's islands against where the GPUs are: a server is bound to the node that its island names."""
    faults = [fault for island in islands if places.nodes and (fault := island_fault(island, places))]
    if not faults:
        return []
    fix = f"sglang_serve_islands: {json.dumps(proposed)}, or what {SMI} topo -m shows"
    return [found("gpu.islands", "; ".join(faults), "islands as the GPUs are placed", fix, "sglang_serve_islands")]


def check_numactl(host: Host, engines: Iterable[Mapping[str, t.Any]], places: Places) -> list[Finding]:
    """Ranks of an engine over several NUMA nodes are bound by SGLang, with numactl; without it none of them is."""
    torn = []
    for engine in engines:
        arguments = engine.get("arguments") or {}
        first, size = int(arguments.get("base-gpu-id") or 0), int(arguments.get("tp-size") or 1)
        gpus = list(range(first, first + size))
        if len({node for gpu in gpus if (node := places.nodes.get(gpu)) is not None}) > 1:
            torn.append(gpus)
    if not torn or host.run(["numactl", "--show"])[0] != NOT_THERE:
        return []
    seen = f"GPUs {torn[0]} of one server are on several NUMA nodes, and numactl is not installed"
    fix = "apt-get install numactl, or sglang_host_packages_custom: [numactl]"
    return [found("host.numactl", seen, "numactl: SGLang binds ranks with it", fix, "sglang_host_packages_custom")]


@dataclasses.dataclass(frozen=True)
class GpuView:
    """What preflight knows of the GPUs in the end."""

    findings: list[Finding]
    unchecked: list[Unchecked]
    gpus: list[Gpu]
    islands: list[Island]
    nodes: list[Node]
    driver: str = ""
    cuda: str = ""


def kernel_log(host: Host, timeout: float) -> tuple[str, str]:
    """Return the kernel's log since the boot, and why there is none."""
    hanging = []
    for command in (["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"], ["dmesg"]):
        status, text = host.run(command, timeout)
        if status == 0 and text.strip():
            return text, ""
        hanging += [command[0]] if status == TIMED_OUT else []
    if hanging:
        return "", f"{' and '.join(hanging)} did not end within {timeout:g} s"
    return "", "the kernel log cannot be read (dmesg and journalctl need root)"


def why_no_acs(status: int, timeout: float) -> str:
    """Return why lspci, with this exit status, tells nothing of the bridges above the GPUs."""
    if status == TIMED_OUT:
        return f"lspci did not end within {timeout:g} s: a device does not answer"
    if status == NOT_THERE:
        return "lspci is not installed: apt-get install pciutils"
    return "lspci shows no ACS of the bridges above the GPUs (it needs root; a virtual machine has none)"


def places_of(host: Host, gpus: Iterable[Gpu], nodes: list[Node]) -> Places:
    """Where GPUs are, from /sys. On a host with one node, a GPU whose node the firmware does not name is in it."""
    only = nodes[0].number if len(nodes) == 1 else None
    known = {gpu.index: gpu_node(host, gpu.bus_id) for gpu in gpus}
    return Places(
        {index: only if node is None else node for index, node in known.items()},
        {gpu.index: device_path(host, gpu.bus_id) for gpu in gpus},
    )


def check_gpus(
    host: Host,
    wanted: Wanted,
    our_units: Iterable[str],
    timeout: float,
    islands: Iterable[Mapping[str, t.Any]] = (),
    engines: Iterable[Mapping[str, t.Any]] = (),
) -> GpuView:
    """Run every check of the GPUs; each program gets `timeout` seconds.

    islands: those of the inventory, each with gpus and numa. engines: the arguments of each.
    """
    driver, is_open = loaded_driver(host)
    smi = ask_smi(host, timeout)
    gpus, unchecked = list(smi.gpus), []
    findings = check_answer(smi, driver) + check_no_rival(host, driver) + check_driver(smi, driver, is_open, wanted)
    findings += check_count(smi, bus_gpus(host), is_open, wanted) + check_kind(gpus, wanted)
    findings += check_modes(gpus) + check_health(gpus) + check_power(gpus, wanted) + check_bus(gpus)
    findings += check_memory_held(host, gpus, our_units) + check_memory_free(host, gpus, our_units, wanted)
    findings += check_iommu(host, gpus)
    log, why = kernel_log(host, timeout)
    if why:
        unchecked.append(Unchecked("gpu.xid", why))
    findings += check_xids(parse_xids(log), gpus)
    status, text = host.run(["lspci", "-D", "-vvv"], timeout)
    devices = parse_lspci(text) if status == 0 else []
    bridges = bridges_above(device_path(host, gpu.bus_id) for gpu in gpus)
    if not any(device.acs for device in devices if device.bus_id in bridges):
        unchecked.append(Unchecked("host.acs", why_no_acs(status, timeout)))
    findings += check_pci(devices, gpus, bridges)
    if len(gpus) > 1:
        status, text = host.run([SMI, "topo", "-p2p", "r"], timeout)
        states = parse_p2p(text) if status == 0 else {}
        if not states:
            why = "did not end" if status == TIMED_OUT else "gave no matrix"
            unchecked.append(Unchecked("gpu.p2p", f"{SMI} topo -p2p r {why}"))
        findings += check_p2p(states)
    findings += check_hold(host) + check_nvcc(host, wanted)
    if driver:
        findings += check_next_kernel(host)
    nodes = numa_nodes(host)
    places = places_of(host, gpus, nodes)
    proposed = propose_islands(places.nodes, places.order, int(wanted.get("island_size") or 0))
    findings += check_islands(proposed, wanted) + check_inventory_islands(islands, places, proposed)
    findings += check_numactl(host, engines, places)
    unchecked.append(Unchecked("gpu.p2p_*", "only on request: -e preflight_p2p=true"))
    return GpuView(findings, unchecked, gpus, proposed, nodes, smi.driver or driver, smi.cuda)
