# SPDX-License-Identifier: GPL-3.0-or-later
"""Prometheus's own programs for the tests, unpacked and never installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "prometheus"), str(ROOT / "grafana")]
LAB_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-lab"
# tools/test unpacks the packages into this directory too.
UNPACKED = ROOT / ".cache" / "prometheus"


def debian_package(name: str, directory: Path) -> Path:
    """Return a package of Debian: one that the lab's hosts install, or a fresh download into directory."""
    if kept := sorted(LAB_CACHE.glob(f"image-*/debs/{name}_*.deb"), key=lambda file: file.name):
        return kept[0]  # the oldest asks the least of the C library here
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", name], cwd=directory, check=True, capture_output=True)
    return next(directory.glob(f"{name}_*.deb"))


def unpacked(name: str, program: str) -> Path:
    """Return the directory with the files of a package of Debian, among them a program."""
    if not (UNPACKED / "usr/bin" / program).exists():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "--extract", debian_package(name, UNPACKED / "debs"), UNPACKED], check=True)
    return UNPACKED


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool: the installed one, or the one in Debian's package."""
    if installed := shutil.which("promtool"):
        return installed
    return str(unpacked("prometheus", "promtool") / "usr/bin/promtool")


@pytest.fixture(scope="session")
def alertmanager() -> list[str | Path]:
    """The command, without options, that runs Alertmanager from Debian's package; needs root.

    Debian's Alertmanager reads its templates from /usr/share: it sees the package's there, and nobody else does.
    """
    directory = unpacked("prometheus-alertmanager", "prometheus-alertmanager")
    run = 'mount --bind "$0/usr/share" /usr/share && exec "$0/usr/bin/prometheus-alertmanager" "$@"'
    return ["unshare", "--mount", "sh", "-c", run, directory]
