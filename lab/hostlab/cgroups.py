# SPDX-License-Identifier: GPL-3.0-or-later
"""One cgroup subtree for each host, in whatever hierarchies this machine mounts (v1, hybrid or v2).

A subtree is <mount point>/sglang-lab-<lab id>/<host>. These empty directories are the only thing
that outlives the namespaces of a killed lab; `remove` clears them.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError

# What the systemd of a host uses; on v1 that is neither cpuset nor freezer.
V1_CONTROLLERS = frozenset({"memory", "pids", "cpu", "cpuacct", "blkio", "devices", "name=systemd"})
V2_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids")


@dataclass(frozen=True)
class Hierarchy:
    mount: Path
    version: int
    controllers: frozenset[str]


def hierarchies(mountinfo: str | None = None) -> list[Hierarchy]:
    """The hierarchies a host takes part in, from the text of /proc/self/mountinfo."""
    found = {}
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        before, _, after = line.partition(" - ")
        mount, (kind, _, options) = Path(before.split()[4]), after.split(maxsplit=2)
        if Path("/sys/fs/cgroup") not in (mount, *mount.parents):
            continue
        if kind == "cgroup" and (used := V1_CONTROLLERS & set(options.split(","))):
            found[mount] = Hierarchy(mount, 1, used)
        elif kind == "cgroup2":
            available = (mount / "cgroup.controllers").read_text().split() if mountinfo is None else V2_CONTROLLERS
            found[mount] = Hierarchy(mount, 2, frozenset(V2_CONTROLLERS) & frozenset(available))
    return list(found.values())


def check() -> None:
    if not any("memory" in hierarchy.controllers for hierarchy in hierarchies()):
        raise LabError(
            "no memory controller is mounted below /sys/fs/cgroup",
            seen=", ".join(str(hierarchy.mount) for hierarchy in hierarchies()) or "no cgroup mount",
            wanted="cgroup v2, or v1 with memory",
            next="grep cgroup /proc/self/mountinfo",
        )


def _enable(directory: Path, controllers: frozenset[str]) -> None:
    """Let the children of a v2 group use these controllers."""
    control = directory / "cgroup.subtree_control"
    missing = sorted(controllers - set(control.read_text().split()))
    try:
        if missing:
            control.write_text(" ".join(f"+{controller}" for controller in missing))
    except OSError as error:
        raise LabError(
            "this machine's cgroup v2 tree does not hand controllers down",
            seen=f"{control}: {error.strerror}",
            wanted=" ".join(missing),
            next="in a container: move its processes out of the root cgroup first",
        ) from error


def create(lab: str, host: str, memory: int) -> list[Path]:
    """Make the host's subtree in every hierarchy and limit its memory (bytes); returns the cgroup.procs to join."""
    remove(lab, host)  # v2 refuses processes in a group whose children an earlier boot has used
    joins = []
    for hierarchy in hierarchies():
        above = hierarchy.mount / f"sglang-lab-{lab}"
        directory = above / host
        directory.mkdir(parents=True, exist_ok=True)
        if hierarchy.version == 2:
            _enable(hierarchy.mount, hierarchy.controllers)
            _enable(above, hierarchy.controllers)
        if "memory" in hierarchy.controllers:
            (directory / ("memory.limit_in_bytes" if hierarchy.version == 1 else "memory.max")).write_text(str(memory))
        joins.append(directory / "cgroup.procs")
    return joins


def memory_used(lab: str, host: str) -> int | None:
    """Bytes charged to the host, page cache included; None when it is off."""
    for hierarchy in hierarchies():
        if "memory" in hierarchy.controllers:
            name = "memory.usage_in_bytes" if hierarchy.version == 1 else "memory.current"
            try:
                return int((hierarchy.mount / f"sglang-lab-{lab}" / host / name).read_text())
            except OSError:
                return None
    return None


def subtrees(lab: str, host: str = "") -> list[Path]:
    """The directories of a lab, or of one of its hosts, that exist."""
    paths = [hierarchy.mount / f"sglang-lab-{lab}" / host for hierarchy in hierarchies()]
    return [path for path in paths if path.is_dir()]


def remove(lab: str, host: str = "", seconds: float = 5) -> None:
    """Remove these directories; their processes may need a moment to go."""
    end = time.monotonic() + seconds
    while left := subtrees(lab, host):
        for top in left:
            for directory, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # busy: the next round tries again
                    os.rmdir(directory)
        if subtrees(lab, host):
            if time.monotonic() > end:
                raise LabError(
                    "a cgroup of the lab is still in use",
                    seen=left[0],
                    wanted="no process in it",
                    next=f"cat {left[0]}/cgroup.procs",
                )
            time.sleep(0.05)
