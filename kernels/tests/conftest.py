"""Kernels run in Triton's interpreter unless a GPU is present; fresh memory is never zero."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Must precede the first import of a kernel: @triton.jit decides at decoration time.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SRC = Path(__file__).resolve().parents[1] / "src"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are deselected, and counted as such, where there is no GPU."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(float("nan")) if tensor.element_size() > 1 else tensor
    if tensor.dtype in (torch.int32, torch.int64):
        return tensor.fill_(-(2**30))
    return tensor


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` and friends return NaN (floats) or a huge negative (integers): unwritten output cannot pass."""
    for name in ("empty", "empty_like", "empty_strided"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _f=original, **k: _poison(_f(*a, **k)))
    original = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: _poison(original(self, *a, **k)))


@pytest.fixture(scope="session")
def aot_reports():
    """``aot_reports(op, arch)``: parsed output of ``python -m dsv4_sm120.aot`` in a process without the interpreter."""
    cache: dict[tuple[str, str], list[dict]] = {}

    def run(op: str, arch: str) -> list[dict]:
        if (op, arch) not in cache:
            env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SRC)}
            command = [sys.executable, "-m", "dsv4_sm120.aot", "--op", op, "--arch", arch]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            cache[op, arch] = [json.loads(line) for line in done.stdout.splitlines()]
        return cache[op, arch]

    return run
