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
TOOLS = ROOT / ".cache" / "tools"


def debian_package(directory: Path) -> Path:
    """Return Debian's prometheus package: the one that the lab's hosts install, or a fresh download into directory."""
    if kept := sorted(LAB_CACHE.glob("image-*/debs/prometheus_*.deb")):
        return kept[-1]
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "prometheus"], cwd=directory, check=True, capture_output=True)
    return next(directory.glob("prometheus_*.deb"))


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool: the installed one, or the one in Debian's package."""
    if installed := shutil.which("promtool"):
        return installed
    unpacked = TOOLS / "prometheus"
    if not (unpacked / "usr/bin/promtool").exists():
        package = debian_package(TOOLS / "debs")
        subprocess.run(["dpkg", "--extract", package, unpacked], check=True)
    return str(unpacked / "usr/bin/promtool")
