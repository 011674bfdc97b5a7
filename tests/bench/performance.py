# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/performance.md and docs/reliability.md, whose tables the benchmarks write."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PERFORMANCE = REPOSITORY / "docs" / "performance.md"


def processor() -> str:
    """Return the processor, with the number of its cores."""
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} cores of {name[1] if name else platform.machine()}"


def commit() -> str:
    """Return the commit of the repository."""
    describe = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(describe, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, check=True).stdout.strip()


def circumstances() -> str:
    """Return the processor, the commit and the day."""
    return f"{processor()}; commit {commit()}; {time.strftime('%Y-%m-%d')}"


def put(name: str, lines: list[str], document: Path = PERFORMANCE) -> str:
    """Put lines between the markers of a benchmark and return them as one text."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = document.read_text().split(begin)
    text = "\n".join(lines)
    document.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
    return text
