# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a benchmark is, from the times of its levels."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "roles/sglang_bench/filter_plugins/progress.py"
spec = importlib.util.spec_from_file_location("bench_progress", FILE)
assert spec and spec.loader
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)


@pytest.mark.parametrize(
    ("times", "total", "line"),
    [
        ([], 4, "[------------------------] 0 of 4 levels"),
        ([10.0], 4, "[######------------------] 1 of 4 levels, about 30 s left"),
        ([10.0, 90.0], 4, "[############------------] 2 of 4 levels, about 2 min left"),
        ([1.0] * 4, 4, "[########################] 4 of 4 levels"),
    ],
)
def test_the_time_left_is_that_of_the_levels_so_far(times: list[float], total: int, line: str) -> None:
    assert plugin.bench_progress([{"elapsed_s": took} for took in times], total) == line
