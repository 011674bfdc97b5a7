# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts with GPUs, made of files and of what their programs say, in the shapes of the real ones."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ops.host import Host

SAMPLES = Path(__file__).with_name("samples")
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
MAX_Q = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
BUSES = ("03:00.0", "04:00.0", "43:00.0", "44:00.0", "83:00.0", "84:00.0", "C3:00.0", "C4:00.0")
WANTED = {
    "count": 8,
    "name": "RTX PRO 6000 Blackwell",
    "memory_mib": 97000,
    "driver_min": "580.65.06",
    "cuda_min": "13.0",
    "island_size": 4,
}
NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n"


def sample(name: str) -> str:
    """Return a file of samples/."""
    return (SAMPLES / name).read_text()


def gpu_xml(index: int, name: str = SERVER, **fields: str) -> str:
    """Return the element of one GPU; fields replace the text of an element everywhere in it."""
    text = sample("nvidia_smi_gpu.xml")
    bus = BUSES[index]
    for mark, value in (("BUS2", bus[:2]), ("BUS", f"00000000:{bus}"), ("NAME", name), ("INDEX2", f"{index:02}")):
        text = text.replace(f"@{mark}@", value)
    text = text.replace("@INDEX@", str(index))
    for field, value in fields.items():
        text, count = re.subn(rf"(<{field}>)[^<]*(</{field}>)", rf"\g<1>{value}\g<2>", text)
        assert count, field
    return text


def process_xml(pid: int, used: str = "90112 MiB", name: str = "/usr/bin/python3") -> str:
    """Return the list of processes of a GPU with one process."""
    return (
        f"<processes>\n\t\t\t<process_info>\n\t\t\t\t<gpu_instance_id>N/A</gpu_instance_id>\n\t\t\t\t<pid>{pid}</pid>\n"
        f"\t\t\t\t<type>C</type>\n\t\t\t\t<process_name>{name}</process_name>\n"
        f"\t\t\t\t<used_memory>{used}</used_memory>\n\t\t\t</process_info>\n\t\t</processes>"
    )


def smi_xml(gpus: Sequence[str], driver: str = "580.95.05") -> str:
    """Return a whole answer of nvidia-smi -q -x."""
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"\t<timestamp>Mon Nov 30 03:00:00 2026</timestamp>\n\t<driver_version>{driver}</driver_version>\n"
        f"\t<cuda_version>13.0</cuda_version>\n\t<attached_gpus>{len(gpus)}</attached_gpus>\n"
        + "".join(gpus)
        + "</nvidia_smi_log>\n"
    )


def matrix(count: int) -> str:
    """Return a matrix of nvidia-smi topo -p2p r in which everything works."""
    head = " \t" + "\t".join(f"GPU{one}" for one in range(count))
    rows = [f" GPU{row}\t" + "\t".join("X" if row == one else "OK" for one in range(count)) for row in range(count)]
    return "\n".join([head, *rows, "", "Legend:", "", "  X    = Self", "  OK   = Status Ok"])


class GpuHost:
    """A host with eight GPUs on two sockets that nothing is wrong with."""

    def __init__(self, root: Path, count: int = 8) -> None:
        self.root = root
        self.answers: dict[str, tuple[int, str]] = {
            "nvidia-smi -q -x": (0, smi_xml([gpu_xml(index) for index in range(count)])),
            "nvidia-smi topo -p2p r": (0, matrix(count)),
            "lspci -D -vvv": (0, sample("lspci.txt").replace("ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- D",
                                                             "ReqRedir- CmpltRedir- UpstreamFwd+ EgressCtrl- D")
                              .replace("ASPM L1 Enabled", "ASPM Disabled")),
            "journalctl --dmesg --boot --no-pager --quiet": (0, "Nov 30 02:11:09 gpu1 kernel: Linux version 6.1.0\n"),
            "/usr/local/cuda/bin/nvcc --version": (0, NVCC),
            "timedatectl show --property=NTPSynchronized --value": (0, "yes\n"),
            "apt-config dump APT::Periodic": (0, 'APT::Periodic "";\n'),
        }  # fmt: skip
        self.asked: list[str] = []
        self.write("/etc/os-release", 'ID=debian\nVERSION_ID="12"\n')
        self.write("/proc/1/comm", "systemd\n")
        self.write("/proc/1/status", "Name:\tsystemd\nCapEff:\t000001ffffffffff\n")
        self.write("/proc/driver/nvidia/version", sample("proc_driver_nvidia_version.txt"))
        self.write("/boot/vmlinuz-6.1.0-38-amd64", "")
        self.write("/boot/vmlinuz-6.1.0-9-amd64", "")
        self.write("/lib/modules/6.1.0-38-amd64/modules.dep", "updates/dkms/nvidia.ko: kernel/drivers/video/x.ko\n")
        for index, bus in enumerate(BUSES):
            # Two GPUs behind each switch, whose port has the number before the first of them; see samples/lspci.txt.
            port = f"0000:{int(BUSES[index // 2 * 2][:2], 16) - 1:02x}:00.0"
            device = f"/sys/devices/pci0000:00/0000:00:01.1/{port}/0000:{bus.lower()}"
            self.write(f"{device}/vendor", "0x10de\n")
            self.write(f"{device}/class", "0x030200\n")
            self.write(f"{device}/numa_node", f"{index // 4}\n")
            link = root / f"sys/bus/pci/devices/0000:{bus.lower()}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root / device.lstrip("/"))
        for node in (0, 1):
            self.write(f"/sys/devices/system/node/node{node}/cpulist", f"{node * 64}-{node * 64 + 63}\n")
            self.write(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       396000000 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def process(self, pid: int, group: str, name: str = "python3") -> None:
        """Add a process in a control group such as system.slice/sglang-unified.service."""
        self.write(f"/proc/{pid}/comm", f"{name}\n")
        self.write(f"/proc/{pid}/cgroup", f"0::/{group}\n")

    def open_file(self, pid: int, target: str) -> None:
        """Let a process hold a file open."""
        directory = self.root / f"proc/{pid}/fd"
        directory.mkdir(parents=True, exist_ok=True)
        os.symlink(target, directory / str(3 + len(list(directory.iterdir()))))

    def smi(self, *gpus: str, **arguments: str) -> None:
        """Let nvidia-smi answer with these GPUs."""
        self.answers["nvidia-smi -q -x"] = (0, smi_xml(gpus, **arguments))

    @property
    def host(self) -> Host:
        def run(command: list[str], _timeout: float = 0) -> tuple[int, str]:
            line = " ".join(command)
            self.asked.append(line)
            return self.answers.get(line, (127, f"[Errno 2] No such file or directory: '{command[0]}'"))

        return Host(root=str(self.root), run=run)
