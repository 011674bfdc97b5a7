# SPDX-License-Identifier: GPL-3.0-or-later
"""What this machine must have, checked before anything is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from . import cgroups
from .errors import LabError

PACKAGE_OF = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "apt-ftparchive": "apt-utils",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "ps": "procps",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}


def check_root() -> None:
    if os.geteuid() != 0:
        raise LabError(
            "the lab needs root (namespaces, mounts, cgroups)",
            seen=f"uid {os.geteuid()}",
            wanted="uid 0",
            next="sudo -E lab/lab ...",
        )


def check_tools() -> None:
    missing = sorted({package for tool, package in PACKAGE_OF.items() if not shutil.which(tool)})
    if missing:
        tools = " ".join(tool for tool in PACKAGE_OF if not shutil.which(tool))
        raise LabError(
            "programs are missing on this machine",
            seen=f"no {tools}",
            wanted="all of them on PATH",
            next=f"apt-get install -y --no-install-recommends {' '.join(missing)}",
        )


def check_namespaces() -> None:
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        raise LabError(
            "this machine does not let root make namespaces and mounts",
            seen=probe.stderr.strip(),
            wanted="CAP_SYS_ADMIN without a restricting profile",
            next="run on a machine or VM; in a container, start it privileged",
        )


def check_state_root(path: Path) -> None:
    path = next(existing for existing in (path, *path.parents) if existing.exists())
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    if kind in ("overlayfs", "nfs", "fuseblk", "v9fs"):
        raise LabError(
            "the hosts' disks cannot lie on this file system",
            seen=f"{path} is on {kind}",
            wanted="ext4, xfs, btrfs or tmpfs with several GB free",
            next="set LAB_STATE to a directory on such a file system",
        )


def check() -> None:
    check_root()
    check_tools()
    check_namespaces()
    cgroups.check()
