# SPDX-License-Identifier: GPL-3.0-or-later
"""A filter that says how far a benchmark is, and how long the rest of it will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 24


def bench_progress(rows: Sequence[Mapping[str, Any]], total: int) -> str:
    """Return a bar with the time left, by the mean time of the levels so far.

    rows: those of the levels that are over, each with elapsed_s (seconds). total: how many levels there are. Later
    levels have more clients and longer prompts and mostly take longer.
    """
    done = len(rows)
    filled = WIDTH * done // max(total, 1)
    bar = f"[{'#' * filled}{'-' * (WIDTH - filled)}] {done} of {total} levels"
    if not 0 < done < total:
        return bar
    left = (total - done) * sum(float(row["elapsed_s"]) for row in rows) / done
    words = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"{bar}, about {words} left"


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {"bench_progress": bench_progress}
