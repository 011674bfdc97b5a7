"""Triton's interpreter multiplies bf16 operands wrongly, so kernels must go through ``triton_utils.dot``."""

import ast
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from dsv4_sm120.triton_utils import dot

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "dsv4_sm120"
FP8_DOT = "fp8 dot"
"""A direct ``tl.dot`` is allowed on a line whose comment says that its operands are fp8."""


@triton.jit
def product(a, b, out, n: tl.constexpr):
    i = tl.arange(0, n)
    grid = i[:, None] * n + i[None, :]
    tl.store(out + grid, dot(tl.load(a + grid), tl.load(b + grid)))


def direct_dots(source: str) -> list[int]:
    lines = source.splitlines()
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("dot", "dot_scaled")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("tl", "language")
        and FP8_DOT not in lines[node.lineno - 1]
    ]


SOURCES = sorted((PACKAGE / "ops").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_kernels_do_not_call_tl_dot(path: Path) -> None:
    assert direct_dots(path.read_text()) == [], "use dsv4_sm120.triton_utils.dot (or mark the line as an fp8 dot)"


def test_the_check_sees_a_direct_dot() -> None:
    assert direct_dots("acc = tl.dot(a, b)\n") == [1]
    assert direct_dots("acc = tl.dot(a, b)  # fp8 dot\n") == []


def test_dot_is_exact_for_bf16_operands(device: str) -> None:
    a, b = (torch.randn(16, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(16, 16, device=device)
    product[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
