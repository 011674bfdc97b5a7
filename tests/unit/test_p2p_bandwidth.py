# SPDX-License-Identifier: GPL-3.0-or-later
"""The arithmetic of the transfer test, its watchdog, and what it says where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "roles/preflight/files/p2p_bandwidth.py"


@pytest.fixture(scope="module")
def p2p() -> ModuleType:
    spec = importlib.util.spec_from_file_location("p2p_bandwidth", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("count", [2, 3, 8])
def test_rounds(p2p, count):
    rounds = p2p.rounds_of(count)
    assert set(rounds) == {f"shift {k}" for k in range(1, count)} | {"all pairs"}
    pairs = rounds.pop("all pairs")
    assert len(pairs) == len(set(pairs)) == count * (count - 1)
    for flows in rounds.values():
        # Every GPU sends once and receives once.
        assert {source for source, _target in flows} == {target for _source, target in flows} == set(range(count))
    assert sorted(flow for flows in rounds.values() for flow in flows) == sorted(pairs)


def test_rate(p2p):
    assert p2p.gb_per_s(64 << 20, 0.001) == pytest.approx(67.1, abs=0.01)
    assert p2p.gb_per_s(1, 0) == 0


ALONE = {(one, two): 50.0 for one in range(4) for two in range(4) if one != two}


def rounds(p2p, rate: float) -> dict:
    return {name: dict.fromkeys(flows, rate) for name, flows in p2p.rounds_of(4).items()}


def test_links_that_are_shared_fairly_have_no_findings(p2p):
    assert p2p.judge(ALONE, rounds(p2p, 12.5), [], 10) == []


def test_a_collapse(p2p):
    measured = {**rounds(p2p, 45.0), "shift 2": dict.fromkeys(p2p.rounds_of(4)["shift 2"], 0.7)}
    (finding,) = p2p.judge(ALONE, measured, [], 10)
    assert (finding["id"], finding["severity"]) == ("gpu.p2p_bandwidth", "warning")
    assert finding["seen"] == "shift 2: 4 flows at once move 2.8 GB/s together, one of them alone 50.0"


def test_slow_pairs(p2p):
    (finding,) = p2p.judge({**ALONE, (1, 3): 2.5, (3, 1): 6.0}, {}, [], 10)
    assert finding["seen"] == "2 of 12 pairs alone are slower, the slowest 1-3 with 2.5 GB/s"


def test_other_data(p2p):
    (finding,) = p2p.judge(ALONE, rounds(p2p, 45.0), [(1, 2), (1, 2), (0, 3)], 10)
    assert (finding["id"], finding["severity"]) == ("gpu.p2p_data", "error")
    assert finding["seen"].endswith("0-3, 1-2")


def test_a_hang_ends_in_time_with_a_finding():
    code = (
        f"import importlib.util as u, time; s = u.spec_from_file_location('p', {str(PROGRAM)!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); "
        "w = m.Watchdog(0.3); w.phase = '0-1 alone'; time.sleep(60)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 20
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["id"] == "gpu.p2p_hang"
    assert finding["seen"] == "0-1 alone did not end; 0.3 s in all are over"


def test_no_gpu_is_said(engine_python):
    done = subprocess.run([engine_python, PROGRAM], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["findings"] == []
    assert answer["skipped"].startswith("PyTorch ")
    assert answer["skipped"].endswith(" sees no GPU")


def test_no_pytorch_is_said():
    if importlib.util.find_spec("torch"):
        pytest.fail("the tests' own environment must stay without PyTorch")
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["skipped"] == f"{sys.executable} has no PyTorch"
