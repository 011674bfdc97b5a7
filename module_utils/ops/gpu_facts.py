# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host says about its GPUs: parsers of nvidia-smi, lspci and the kernel, and nothing but facts.

A field that a card or driver does not have (N/A, [N/A], [Not Supported], another language, nothing) is None; no verdict
is built on it. Memory is in MiB, power in W.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import typing as t
from collections.abc import Iterator
from xml.etree import ElementTree

from .host import NOT_THERE, TIMED_OUT, Host, number, whole_lines

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
SMI = "nvidia-smi"
CSV_FIELDS = (
    "index", "pci.bus_id", "name", "uuid", "memory.total", "memory.used", "driver_version", "persistence_mode",
    "ecc.mode.current", "power.limit", "power.default_limit", "pcie.link.width.current", "pcie.link.width.max",
    "compute_mode",
)  # fmt: skip
LOST = re.compile(
    r"device handle for (?:gpu\s*)?(?:\d+:\s*)?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]):\s*(.+)", re.IGNORECASE
)
VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")
# What slows a card down against the operator's will; idle and application clocks are left out.
SLOWDOWNS = {
    "hw_thermal_slowdown": "heat (hardware)",
    "sw_thermal_slowdown": "heat (driver)",
    "hw_power_brake_slowdown": "the power supply",
}


@dataclasses.dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU; used_mib is None where the driver does not tell."""

    pid: int
    name: str
    used_mib: float | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as the driver sees it. bus_id as in /sys, such as 0000:c1:00.0."""

    index: int
    bus_id: str
    name: str
    uuid: str = ""
    memory_mib: float | None = None
    used_mib: float | None = None
    free_mib: float | None = None
    bar1_mib: float | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    ecc_uncorrected: int = 0
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    mig: bool | None = None
    compute_mode: str = ""
    slowed_by: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] = ()


@dataclasses.dataclass(frozen=True)
class Smi:
    """What nvidia-smi said. problem: "" or one of missing, hangs, mismatch, no_driver, failed, damaged."""

    gpus: tuple[Gpu, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    driver: str = ""
    cuda: str = ""
    problem: str = ""
    said: str = ""


def bus_id(text: str) -> str:
    """Return a bus address as /sys writes it: 00000000:C1:00.0 and C1:00.0 are 0000:c1:00.0."""
    parts = text.strip().lower().split(":")
    domain = parts[-3][-4:] if len(parts) > 2 else ""
    return ":".join([domain or "0000", *parts[-2:]])


def switch(text: str | None) -> bool | None:
    """Return Enabled or Yes as True, Disabled or No as False, every other word as None."""
    return {"enabled": True, "yes": True, "disabled": False, "no": False}.get((text or "").strip("[] \n").lower())


def whole(text: str | None) -> int | None:
    """Return the whole number that a field begins with, None when there is none."""
    value = number(text)
    return None if value is None else int(value)


def _first(gpu: ElementTree.Element, *paths: str) -> str | None:
    """Return the text at the first path that has a number or a word; drivers have renamed elements."""
    return next((text for path in paths if (text := gpu.findtext(path)) and number(text) is not None), None)


def _processes(gpu: ElementTree.Element) -> Iterator[GpuProcess]:
    for process in gpu.findall("processes/process_info"):
        pid = whole(process.findtext("pid"))
        if pid is not None:
            name = (process.findtext("process_name") or "").strip()
            yield GpuProcess(pid, name, number(process.findtext("used_memory")))


def _slowed_by(gpu: ElementTree.Element) -> tuple[str, ...]:
    """Reasons that are active now; the elements were called clocks_throttle_reason_* before driver 535."""
    active = {element.tag for element in gpu.iter() if (element.text or "").strip() == "Active"}
    return tuple(
        cause
        for reason, cause in SLOWDOWNS.items()
        if {f"clocks_event_reason_{reason}", f"clocks_throttle_reason_{reason}"} & active
    )


def _gpu(index: int, gpu: ElementTree.Element) -> Gpu:
    volatile = gpu.find("ecc_errors/volatile")
    errors = [] if volatile is None else [whole(one.text) or 0 for one in volatile if "uncorrectable" in one.tag]
    return Gpu(
        index=index,
        bus_id=bus_id(gpu.findtext("pci/pci_bus_id") or gpu.get("id") or ""),
        name=(gpu.findtext("product_name") or "").strip(),
        uuid=(gpu.findtext("uuid") or "").strip(),
        memory_mib=number(gpu.findtext("fb_memory_usage/total")),
        used_mib=number(gpu.findtext("fb_memory_usage/used")),
        free_mib=number(gpu.findtext("fb_memory_usage/free")),
        bar1_mib=number(gpu.findtext("bar1_memory_usage/total")),
        persistence=switch(gpu.findtext("persistence_mode")),
        ecc=switch(gpu.findtext("ecc_mode/current_ecc")),
        ecc_uncorrected=sum(errors),
        remap_pending=switch(gpu.findtext("remapped_rows/remapped_row_pending")),
        remap_failed=switch(gpu.findtext("remapped_rows/remapped_row_failure")),
        power_limit_w=number(
            _first(
                gpu,
                "gpu_power_readings/current_power_limit",
                "gpu_power_readings/power_limit",
                "power_readings/enforced_power_limit",
                "power_readings/power_limit",
            )
        ),
        power_default_w=number(
            _first(gpu, "gpu_power_readings/default_power_limit", "power_readings/default_power_limit")
        ),
        link_width=whole(gpu.findtext("pci/pci_gpu_link_info/link_widths/current_link_width")),
        link_width_max=whole(gpu.findtext("pci/pci_gpu_link_info/link_widths/max_link_width")),
        mig=switch(gpu.findtext("mig_mode/current_mig")),
        compute_mode=(gpu.findtext("compute_mode") or "").strip(),
        slowed_by=_slowed_by(gpu),
        processes=tuple(_processes(gpu)),
    )


def lost_gpus(text: str) -> tuple[tuple[str, str], ...]:
    """Return (bus address, what the driver says) of GPUs that nvidia-smi can't ask any more."""
    return tuple((bus_id(address), reason.strip()) for address, reason in LOST.findall(text))


def parse_xml(text: str) -> Smi:
    """Parse `nvidia-smi -q -x`. Text that is cut off, or is no XML, gives problem "damaged" and no GPUs."""
    lost = lost_gpus(text)
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    try:
        root = ElementTree.fromstring(text[start : end + len("</nvidia_smi_log>")]) if 0 <= start < end else None
    except ElementTree.ParseError:
        root = None
    if root is None:
        return Smi(lost=lost, problem="damaged", said=" ".join(text.split())[-300:])
    gpus = tuple(_gpu(index, gpu) for index, gpu in enumerate(root.findall("gpu")))
    return Smi(
        gpus=gpus,
        lost=lost,
        driver=(root.findtext("driver_version") or "").strip(),
        cuda=(root.findtext("cuda_version") or "").strip(),
    )


def parse_csv(text: str) -> Smi:
    """Parse `nvidia-smi --query-gpu=CSV_FIELDS --format=csv,noheader`; a row with other fields is left out."""
    rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines())]
    gpus, driver = [], ""
    for row in rows:
        fields = dict(zip(CSV_FIELDS, row))
        if len(row) != len(CSV_FIELDS) or not fields["index"].isdigit():
            continue
        driver = fields["driver_version"]
        gpus.append(
            Gpu(
                index=int(fields["index"]),
                bus_id=bus_id(fields["pci.bus_id"]),
                name=fields["name"],
                uuid=fields["uuid"],
                memory_mib=number(fields["memory.total"]),
                used_mib=number(fields["memory.used"]),
                persistence=switch(fields["persistence_mode"]),
                ecc=switch(fields["ecc.mode.current"]),
                power_limit_w=number(fields["power.limit"]),
                power_default_w=number(fields["power.default_limit"]),
                link_width=whole(fields["pcie.link.width.current"]),
                link_width_max=whole(fields["pcie.link.width.max"]),
                compute_mode=fields["compute_mode"],
            )
        )
    return Smi(gpus=tuple(gpus), lost=lost_gpus(text), driver=driver)


def why_smi_failed(status: int, text: str) -> str:
    """Return the problem behind an answer of nvidia-smi that names no GPU, "" when there is none."""
    if status == NOT_THERE:
        return "missing"
    if status == TIMED_OUT:
        return "hangs"
    if "version mismatch" in text:
        return "mismatch"
    if "couldn't communicate with the NVIDIA driver" in text or "Driver Not Loaded" in text:
        return "no_driver"
    return "failed" if status else ""


def ask_smi(host: Host, timeout: float) -> Smi:
    """Ask nvidia-smi; where its XML is damaged, the shorter CSV answers what it can."""
    status, text = host.run([SMI, "-q", "-x"], timeout)
    answer = parse_xml(text)
    if not answer.problem:
        return answer
    problem = why_smi_failed(status, text)
    if problem and not (problem == "failed" and answer.lost):
        return dataclasses.replace(answer, problem=problem, said=" ".join(text.split())[-300:])
    command = [SMI, "--query-gpu=" + ",".join(CSV_FIELDS), "--format=csv,noheader"]
    shorter = parse_csv(host.run(command, timeout)[1])
    return dataclasses.replace(answer, gpus=shorter.gpus, driver=shorter.driver)


def bus_gpus(host: Host) -> list[str]:
    """Return the bus addresses of NVIDIA's GPUs, whether a driver knows them or not."""
    devices = "/sys/bus/pci/devices"
    return [
        name
        for name in host.names(devices)
        if host.read(f"{devices}/{name}/vendor").strip() == NVIDIA
        and host.read(f"{devices}/{name}/class").startswith(DISPLAY_CLASSES)
    ]


def loaded_driver(host: Host) -> tuple[str, bool]:
    """Return the version of the loaded kernel module ("" for none), and whether it is the open one."""
    text = host.read("/proc/driver/nvidia/version")
    line = text.splitlines()[0] if text else ""
    match = VERSION.search(line)
    return (match[1] if match else ""), "Open Kernel Module" in line


def version(text: str) -> tuple[int, ...]:
    """Return a version as numbers that compare; () for none."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


@dataclasses.dataclass(frozen=True)
class Xid:
    """A kind of error that the driver reported for one GPU. last: the last line of it in the kernel log."""

    bus_id: str
    number: int
    count: int
    last: str


def parse_xids(log: str) -> list[Xid]:
    """Return the Xid errors in a kernel log, for each GPU and number."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for line in whole_lines(log):
        match = re.search(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)", line)
        if match:
            address = match[1] if "." in match[1] else match[1] + ".0"
            kinds.setdefault((bus_id(address), int(match[2])), []).append(line.strip())
    return [Xid(bus, code, len(lines), lines[-1]) for (bus, code), lines in sorted(kinds.items())]


def parse_p2p(text: str) -> dict[tuple[int, int], str]:
    """Return (from, to) -> state of `nvidia-smi topo -p2p r`: OK, CNS, GNS, TNS, NS, DR and so on."""
    states = {}
    for line in whole_lines(text):
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        match = re.fullmatch(r"GPU(\d+)", words[0]) if words else None
        if match and len(words) > 1 and not words[1].startswith("GPU"):
            row = int(match[1])
            states.update({(row, column): word for column, word in enumerate(words[1:]) if column != row})
    return states


@dataclasses.dataclass(frozen=True)
class PciDevice:
    """What `lspci -vvv` tells of one device: its kind, and what of its link and routing matters here."""

    bus_id: str
    kind: str
    acs: str = ""
    aspm: str = ""


def parse_lspci(text: str) -> list[PciDevice]:
    """Parse `lspci -D -vvv`. Without root the capabilities are hidden, and acs and aspm are ""."""
    devices = []
    for block in re.split(r"\n(?=[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] )", text):
        head = re.match(r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([^:]+):", block)
        if head:
            acs = re.search(r"ACSCtl:\s*(.+)", block)
            aspm = re.search(r"LnkCtl:\s*ASPM ([^;]+);", block)
            devices.append(PciDevice(head[1], head[2], acs[1].strip() if acs else "", aspm[1].strip() if aspm else ""))
    return devices


def cpu_list(text: str) -> list[int]:
    """Return the numbers of a kernel list such as 0-3,8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _dash, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


@dataclasses.dataclass(frozen=True)
class Node:
    """A NUMA node: its processors in the kernel's form, its memory in MiB."""

    number: int
    cpus: str
    memory_mib: int


def numa_nodes(host: Host) -> list[Node]:
    """Return the NUMA nodes; what numactl -H shows, from /sys."""
    base = "/sys/devices/system/node"
    numbers = sorted(int(name[4:]) for name in host.names(base) if re.fullmatch(r"node\d+", name))
    nodes = []
    for one in numbers:
        memory = re.search(r"MemTotal:\s+(\d+) kB", host.read(f"{base}/node{one}/meminfo"))
        cpus = host.read(f"{base}/node{one}/cpulist").strip()
        nodes.append(Node(one, cpus, int(memory[1]) // 1024 if memory else 0))
    return nodes


def gpu_node(host: Host, address: str) -> int | None:
    """Return the NUMA node of a device, None when the firmware does not say."""
    value = number(host.read(f"/sys/bus/pci/devices/{address}/numa_node"))
    return None if value is None or value < 0 else int(value)


class Island(t.TypedDict):
    """GPUs that share a NUMA node; numa is None where they do not, or nobody knows."""

    gpus: list[int]
    numa: int | None


def propose_islands(nodes: dict[int, int | None], order: dict[int, str], size: int = 0) -> list[Island]:
    """Divide GPUs into islands, the form that the inventory takes.

    nodes: GPU -> NUMA node. order: GPU -> device path in /sys, which begins alike for GPUs behind the same switch.
    size: GPUs in an island; 0 makes one island of each node. GPUs that fill no island of that size within their node
    are put together over the nodes, with numa None.
    """
    groups: dict[int | None, list[int]] = {}
    for gpu in sorted(nodes, key=lambda gpu: (order.get(gpu, ""), gpu)):
        groups.setdefault(nodes[gpu], []).append(gpu)
    islands: list[Island] = []
    rest: list[int] = []
    for node in sorted(groups, key=lambda node: (node is None, node or 0)):
        members = groups[node]
        step = size or len(members)
        whole_ones = len(members) - len(members) % step
        islands += [
            {"gpus": sorted(members[start : start + step]), "numa": node} for start in range(0, whole_ones, step)
        ]
        rest += members[whole_ones:]
    islands += [{"gpus": sorted(rest[start : start + size]), "numa": None} for start in range(0, len(rest), size or 1)]
    return islands
