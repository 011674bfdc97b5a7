"""Compile every shipped kernel config for a GPU that is not here, and report what the compiler made of it.

``python -m dsv4_sm120.aot [--arch sm_120] [--op decode]`` prints one JSON object per config. It must run without
``TRITON_INTERPRET``: under the interpreter kernels are plain Python functions and cannot be compiled.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .config import ARCHS, SHARED_MEMORY_LIMIT

OPS = ("decode", "indexer", "mhc")


@dataclass(frozen=True)
class AotCase:
    """One kernel with one launch configuration.

    ``signature`` maps every non-constexpr argument to its Triton type (``"*bf16"``, ``"i32"``, ``"fp32"`` ...);
    ``constexprs`` holds the others. Pointers, but for those that the kernel takes as they come, and integers named in
    ``divisible`` are taken as multiples of 16, as Triton's launcher finds them at run time. ``tensor_cores=False`` is
    for kernels that do no matrix product.
    """

    name: str
    fn: object
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int | None = None
    divisible: tuple[str, ...] = ()
    tensor_cores: bool = True


@dataclass(frozen=True)
class AotReport:
    """What the compiler made of an ``AotCase``.

    ``shared`` is in bytes per block; ``registers`` and ``stack`` (bytes, where spilled registers live) per thread;
    ``mma`` counts tensor-core instructions in the PTX.
    """

    name: str
    arch: str
    shared: int
    shared_limit: int
    mma: int
    registers: int
    stack: int
    tensor_cores: bool
    options: dict = field(default_factory=dict)


def compile_case(case: AotCase, arch: str) -> AotReport:
    """Compile ``case`` for ``arch`` ("sm_120" or "sm_90"). Raises Triton's ``CompilationError`` when it cannot be."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.fn.arg_names
    signature = {n: "constexpr" if n in case.constexprs else case.signature[n] for n in names}
    sliced = {parameter.name for parameter in case.fn.params if parameter.do_not_specialize_on_alignment}
    pointers = {n for n in names if signature[n].startswith("*")} - sliced
    aligned = [n for n in names if n in pointers or n in case.divisible]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    major, minor = ARCHS[arch]
    compiled = triton.compile(
        ASTSource(case.fn, signature, case.constexprs, attrs),
        target=GPUTarget("cuda", major * 10 + minor, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg},
    )
    usage = _resource_usage(compiled.asm["cubin"])
    return AotReport(
        name=case.name,
        arch=arch,
        shared=compiled.metadata.shared,
        shared_limit=SHARED_MEMORY_LIMIT[arch],
        mma=len(re.findall(r"\b(?:wg)?mma[.\w]*\.(?:sync|mma_async)", compiled.asm["ptx"])),
        tensor_cores=case.tensor_cores,
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **case.constexprs},
        **usage,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and local-memory stack bytes per thread, read from the binary by the ``cuobjdump`` Triton carries."""
    import triton.backends.nvidia as nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(nvidia.__file__).parent / "bin" / "cuobjdump", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise ValueError(f"cuobjdump -res-usage printed no resource line: {text!r}")
    return {"registers": int(found.group(1)), "stack": int(found.group(2))}


def cases(op: str, arch: str) -> list[AotCase]:
    """All configs that ``op`` ships for ``arch``."""
    return list(importlib.import_module(f"dsv4_sm120.ops.{op}").aot_cases(arch))


def reports(ops: tuple[str, ...], archs: tuple[str, ...]) -> Iterator[AotReport]:
    for arch in archs:
        for op in ops:
            for case in cases(op, arch):
                yield compile_case(case, arch)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", choices=sorted(ARCHS))
    parser.add_argument("--op", action="append", choices=OPS)
    args = parser.parse_args(argv)
    for report in reports(tuple(args.op or OPS), tuple(args.arch or ARCHS)):
        print(json.dumps(asdict(report)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
