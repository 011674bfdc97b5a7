"""Stand-in for SGLang's compiled CPU kernels, of which no package index has a build.

With SGLANG_USE_CPU_ENGINE=1, SGLang imports `sgl_kernel` and a handful of its `*_cpu` functions at start. A Llama-type
model served with the torch_native backend calls none of them. Every `*_cpu` name therefore resolves here, and says so
if it is ever called.
"""

from __future__ import annotations

from collections.abc import Callable

__version__ = "0.0.0+none"


def __getattr__(name: str) -> Callable:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r} (stand-in without compiled kernels)")

    def missing(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but no compiled CPU kernels are installed; serve this model on a GPU host"
        )

    return missing
