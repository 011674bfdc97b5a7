# SPDX-License-Identifier: GPL-3.0-or-later
"""Throw away what is damaged in caches of compiled kernels, before an engine starts over it.

    python3 -m ops.caches DIRECTORY...

A host that loses its power, or a disk that was full, can leave files there that are empty or cut. Triton takes them as
they are: metadata that was cut ends the engine at its start, and so at every start. A file is damaged when it is JSON
and can't be read, or when it is ELF (machine code) and ends before its headers do. With it goes the directory that
it is in, an entry of the cache, whose files belong together; what is thrown away is compiled again.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import typing as t

ELF_MAGIC, ELF64, ELF64_HEADER = b"\x7fELF", 2, 64
# Names of files that hold JSON, and of those that hold nothing but ELF.
JSON, ELF = ".json", (".cubin", ".so")


def elf_end(head: bytes) -> int:
    """Where the later of the two tables of a 64-bit ELF file ends, in bytes: one of them is last in what is linked."""
    programs, sections = struct.unpack_from("<QQ", head, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", head, 54)
    return int(max(programs + program_size * program_count, sections + section_size * section_count))


def damaged(path: str) -> bool:
    """Whether a file is JSON that can't be read, or ELF that was cut. Raises OSError."""
    if path.endswith(JSON):
        try:
            with open(path, encoding="utf-8") as stream:
                json.load(stream)
        except ValueError:
            return True
        return False
    with open(path, "rb") as stream:
        head = stream.read(ELF64_HEADER)
    if len(head) < ELF64_HEADER:
        return path.endswith(ELF)
    return head.startswith(ELF_MAGIC) and head[4] == ELF64 and elf_end(head) > os.path.getsize(path)


def entries_with_damage(root: str) -> t.Iterator[tuple[str, str]]:
    """Yield (directory, damaged file in it) below a cache, one of each directory."""
    for directory, _directories, names in os.walk(root):
        for name in sorted(names):
            path = os.path.join(directory, name)
            try:
                if os.path.isfile(path) and damaged(path):
                    yield directory, path
                    break
            except OSError:
                continue


def main(argv: t.Sequence[str]) -> int:
    for root in argv:
        for directory, path in list(entries_with_damage(root)):
            sys.stdout.write(f"{path} is damaged; its directory is thrown away and will be compiled again\n")
            if os.path.samefile(directory, root):
                os.unlink(path)
            else:
                shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
