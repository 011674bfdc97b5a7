"""Helpers shared by all kernels."""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b):
    """``a @ b`` accumulated in fp32 on tensor cores. Use it instead of ``tl.dot`` for bf16 operands.

    Triton's interpreter multiplies bf16 operands as integers, silently; there they are upcast, which is exact.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def dot_acc(a, b, acc):
    """``acc + a @ b``; see ``dot``."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)
