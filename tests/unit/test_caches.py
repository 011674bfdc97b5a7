# SPDX-License-Identifier: GPL-3.0-or-later
"""Damaged entries of a cache of compiled kernels are thrown away, whole ones stay; with Triton's own cache, too."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ops.caches import damaged, main

MODULE_UTILS = Path(__file__).parents[2] / "module_utils"
# Compiles for a GPU without one, from the cache when it can; prints the size of the machine code.
PROGRAM = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
@triton.jit
def kernel(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, tl.load(x + i) + 1)
source = ASTSource(fn=kernel, signature={"x": "*fp32", "n": "constexpr"}, constexprs={"n": 128})
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""


def elf(end: int) -> bytes:
    """An ELF file of 200 bytes whose section headers end at a byte."""
    head = bytearray(b"\x7fELF\x02" + bytes(195))
    struct.pack_into("<Q", head, 40, end - 2 * 30)
    struct.pack_into("<HH", head, 58, 30, 2)
    return bytes(head)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("k.json", b'{"a": 1}', False),
        ("k.json", b'{"a"', True),
        ("k.json", b"\xff", True),
        ("k.cubin", elf(200), False),
        ("k.so", elf(201), True),
        ("k.so", elf(200)[:30], True),
        ("k.ptx", b"//", False),
        ("k.cubin", b"", True),
        ("k.ptx", b"", False),
    ],
)
def test_what_is_damaged(tmp_path: Path, name: str, content: bytes, wanted: bool) -> None:
    (tmp_path / name).write_bytes(content)
    assert damaged(str(tmp_path / name)) is wanted


def test_the_entry_goes_and_the_others_stay(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for entry in ("whole", "cut"):
        (tmp_path / entry).mkdir()
        (tmp_path / entry / "k.json").write_text("{}")
    (tmp_path / "cut" / "k.cubin").write_bytes(b"")
    (tmp_path / "loose.json").write_text("{")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert main([str(tmp_path), str(tmp_path / "none")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "whole"]
    assert f"{tmp_path}/cut/k.cubin is damaged" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_triton_compiles_again_what_it_could_not_read(tmp_path: Path, engine_python: str) -> None:
    program, cache = tmp_path / "program.py", tmp_path / "cache"
    program.write_text(PROGRAM)

    def compiled() -> subprocess.CompletedProcess:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
        return subprocess.run([engine_python, program], env=environment, capture_output=True, text=True, check=False)

    def clean() -> str:
        command = [sys.executable, "-m", "ops.caches", str(cache)]
        return subprocess.run(command, cwd=MODULE_UTILS, capture_output=True, text=True, check=True).stdout

    size = compiled().stdout
    assert int(size) > 0
    assert clean() == ""
    metadata, code = next(cache.glob("*/kernel.json")), next(cache.glob("*/kernel.cubin"))
    metadata.write_text(json.dumps(json.loads(metadata.read_text()))[:-9])
    assert compiled().returncode != 0
    assert "kernel.json is damaged" in clean()
    assert compiled().stdout == size
    code.write_bytes(code.read_bytes()[:-1])
    assert compiled().stdout not in ("", size)  # taken as it is; a GPU would refuse it
    assert "kernel.cubin is damaged" in clean()
    assert compiled().stdout == size
