"""Helpers shared by all kernels."""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


@triton.jit
def opaque(x):
    """``x`` (16-bit elements), with its origin hidden from layout analysis; costs no instruction.

    Triton widens the operand layout of a product whose operand was converted from fp8. A key tile that feeds two
    products would then be kept twice in shared memory, in two layouts.
    """
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def mul_bf16(a, b):
    """``a * b`` of bf16 operands, rounded to bf16; the interpreter multiplies those as integers too."""
    if INTERPRETED:
        return (a.to(tl.float32) * b.to(tl.float32)).to(tl.bfloat16)
    else:
        return a * b


@triton.jit
def launch_dependents():
    """Let the next kernel in the stream, if launched with ``launch_pdl``, occupy free multiprocessors already."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def wait_for_primary():
    """Wait until the previous kernel in the stream has finished and its writes are visible (``launch_pdl``)."""
    if not INTERPRETED:
        gdc_wait()
