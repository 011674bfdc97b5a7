# SPDX-License-Identifier: GPL-3.0-or-later
"""What preflight can find: one id for each kind, with its severity and meaning. An id never changes.

docs/preflight.md has the same ids with what to do; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping

ERROR = "error"
WARNING = "warning"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong. severity: "error" refuses the run, "warning" is only shown."""

    id: str
    severity: str
    seen: str
    wanted: str
    fix: str
    variable: str = ""


@dataclasses.dataclass(frozen=True)
class Unchecked:
    """A check that could not be made, or does not apply here, and why. `id` may be a pattern such as gpu.*."""

    id: str
    reason: str


# id -> severity and meaning.
KINDS: dict[str, tuple[str, str]] = {
    "host.system": (ERROR, "distribution or release without packages for the engine"),
    "host.machine": (ERROR, "processor that the lock files are not for"),
    "host.init": (ERROR, "process 1 is not systemd"),
    "host.python": (ERROR, "no interpreter for the engine's environment"),
    "host.port": (ERROR, "somebody else holds a port"),
    "host.port_range": (WARNING, "a port is among those of outgoing connections"),
    "host.disk": (ERROR, "too little free disk space"),
    "host.memory": (ERROR, "too little available memory"),
    "host.file": (ERROR, "a file is missing"),
    "host.clock": (WARNING, "clock not synchronised"),
    "host.shm": (ERROR, "/dev/shm too small for NCCL and the engine's ranks"),
    "host.shm_files": (WARNING, "files of dead processes fill /dev/shm"),
    "host.swap": (WARNING, "swap is used eagerly"),
    "host.thp_defrag": (WARNING, "page faults wait for the kernel to make huge pages"),
    "host.memlock": (WARNING, "memory cannot be pinned without a limit"),
    "host.nofile": (WARNING, "too few open files"),
    "host.cpus_offline": (WARNING, "processors are switched off"),
    "host.numa_memory": (WARNING, "a NUMA node has processors and no memory"),
    "host.numactl": (WARNING, "nothing to bind the ranks of a server over several NUMA nodes with"),
    "host.iommu": (WARNING, "the IOMMU translates what GPUs send each other"),
    "host.acs": (WARNING, "PCIe bridges send traffic between GPUs over the root complex"),
    "host.aspm": (WARNING, "a GPU's PCIe link goes to sleep"),
    "gpu.driver": (ERROR, "the driver is not installed or not loaded"),
    "gpu.nouveau": (ERROR, "the nouveau module holds the GPUs"),
    "gpu.secure_boot": (ERROR, "Secure Boot refuses the driver"),
    "gpu.hang": (ERROR, "nvidia-smi does not return"),
    "gpu.output": (ERROR, "nvidia-smi's answer is incomplete"),
    "gpu.driver_library": (ERROR, "loaded module and installed libraries are of two versions"),
    "gpu.driver_version": (ERROR, "the driver is older than the engine's CUDA needs"),
    "gpu.driver_hold": (WARNING, "an unattended upgrade can replace the driver"),
    "gpu.driver_next_kernel": (WARNING, "the kernel of the next boot has no driver"),
    "gpu.nvcc": (WARNING, "no CUDA compiler for kernels that are built at the first start"),
    "gpu.count": (ERROR, "too few GPUs, or too many"),
    "gpu.lost": (ERROR, "a GPU does not answer any more"),
    "gpu.name": (ERROR, "other GPUs than wanted"),
    "gpu.memory": (ERROR, "GPUs with too little memory"),
    "gpu.memory_held": (ERROR, "processes that are not ours hold GPU memory"),
    "gpu.memory_free": (WARNING, "an idle GPU has less memory free than the memory plan counts on"),
    "gpu.mig": (ERROR, "a GPU is divided into MIG instances"),
    "gpu.compute_mode": (ERROR, "the driver limits who may use a GPU"),
    "gpu.persistence": (WARNING, "the driver unloads between uses"),
    "gpu.ecc": (WARNING, "memory errors are not corrected"),
    "gpu.ecc_errors": (ERROR, "memory errors that could not be corrected"),
    "gpu.power_limit": (WARNING, "a GPU's power limit is not what is wanted"),
    "gpu.throttle": (WARNING, "a GPU is slowed down by heat or its power supply"),
    "gpu.link_width": (WARNING, "a GPU has fewer PCIe lanes than it can use"),
    "gpu.bar1": (WARNING, "GPU memory is not wholly visible on the bus"),
    "gpu.p2p": (WARNING, "the driver refuses direct transfers between GPUs"),
    "gpu.p2p_hang": (ERROR, "a transfer between GPUs did not end"),
    "gpu.p2p_data": (ERROR, "a transfer between GPUs changed the data"),
    "gpu.p2p_bandwidth": (WARNING, "transfers between GPUs collapse when they run at once"),
    "gpu.xid": (WARNING, "the driver has reported GPU errors since the boot"),
    "gpu.islands": (WARNING, "islands of GPUs that do not fit the NUMA nodes"),
    "engine.flashinfer": (ERROR, "the parts of FlashInfer are of different versions"),
    "engine.ptxas": (ERROR, "Triton's assembler does not know the GPUs"),
    "engine.stale_lock": (ERROR, "an interrupted compilation left a lock; the next start would wait for it"),
    "engine.allocator": (ERROR, "expandable segments in PyTorch's allocator"),
    "engine.nccl": (ERROR, "NCCL variables that contradict each other"),
    "engine.moe_backend": (ERROR, "experts computed by kernels that the GPUs or the checkpoint do not have"),
    "engine.tokenizer_workers": (ERROR, "several tokenizer workers together with a queue limit"),
    "engine.chunk": (WARNING, "the prefill chunk is divided among data-parallel ranks"),
    "engine.host_cache": (WARNING, "a host cache whose size nobody knows before the start"),
    "engine.answer_cap": (WARNING, "a request without max_tokens may run to the end of the context"),
}


def found(id: str, seen: str, wanted: str, fix: str, variable: str = "") -> Finding:
    """Return a finding with the severity of its kind."""
    return Finding(id, KINDS[id][0], seen, wanted, fix, variable)


def sentence(finding: Finding) -> str:
    """Return a finding as one line for a person."""
    return f"{finding.id}: {finding.seen}; wanted: {finding.wanted}. Next: {finding.fix}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What is left after the operator's word on it: findings (errors first), and what was accepted or put off."""

    findings: list[Finding]
    accepted: list[Finding]
    unchecked: list[Unchecked]

    @property
    def errors(self) -> list[Finding]:
        """The findings that refuse the run."""
        return [finding for finding in self.findings if finding.severity == ERROR]


def judge(
    findings: Iterable[Finding],
    unchecked: Iterable[Unchecked],
    accept: Mapping[str, str],
    defer: Iterable[str] = (),
    defer_reason: str = "",
) -> Report:
    """Sort findings into those that count and those that do not.

    accept: id of a warning -> why the operator lives with it; an error cannot be accepted. defer: patterns of ids that
    the same run repairs later.
    """
    patterns, left, accepted, put_off = list(defer), [], [], list(unchecked)
    for finding in findings:
        if any(fnmatch.fnmatchcase(finding.id, pattern) for pattern in patterns):
            put_off.append(Unchecked(finding.id, f"{defer_reason} ({finding.seen})"))
        elif finding.severity == WARNING and finding.id in accept:
            accepted.append(finding)
        else:
            left.append(finding)
    return Report(sorted(left, key=lambda finding: finding.severity != ERROR), accepted, put_off)
