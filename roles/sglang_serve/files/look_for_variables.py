#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Say which environment variables the SGLang of a virtual environment does not know.

    look_for_variables.py VENV [NAME ...]

SGLang reads the variables that it knows and says nothing of the others, so a misspelt one leaves everything as it was.
A name is known when it stands as a whole word in a Python file of SGLang, begins like one that SGLang puts together
there (such as SGLANG_S3_), or stands in a compiled file of SGLang's own packages. Prints a JSON object: unknown name ->
" (did you mean NAME?)" with the known one nearest to it, "" when none is near. Exits with a message when there is no
SGLang.
"""

from __future__ import annotations

import difflib
import json
import mmap
import re
import sys
from pathlib import Path

NAME = re.compile(rb"\b(?:SGLANG|SGL)_\w+")
# Where SGLang's compiled code is, its own package among them.
COMPILED = ("sgl*", "deep_gemm*", "deep_ep*", "flash_mla*")


def names_in_source(package: Path) -> set[str]:
    """Return the names of variables in the Python files of a package."""
    texts = (file.read_bytes() for file in package.rglob("*.py"))
    return {name.decode() for text in texts if b"SGL" in text for name in NAME.findall(text)}


def is_compiled_in(name: str, packages: Path) -> bool:
    """Whether a compiled file of SGLang's packages has the name; where it ends there, not every compiler shows."""
    files = (file for pattern in COMPILED for file in packages.glob(f"{pattern}/**/*.so*"))
    for file in (file for file in files if file.stat().st_size):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(name.encode()) >= 0:
                return True
    return False


def is_known(name: str, known: set[str], packages: Path) -> bool:
    """Whether SGLang reads a variable. known: the names in its source."""
    if name in known or name.startswith(tuple(one for one in known if one.endswith("_"))):
        return True
    cut_short = any(one.startswith(name) for one in known)
    return not cut_short and is_compiled_in(name, packages)


def unknown(names: list[str], packages: Path) -> dict[str, str]:
    """Return unknown name -> what it may stand for, in words. packages: the directory with the package sglang."""
    known = names_in_source(packages / "sglang")
    nearest = {
        name: difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        for name in names
        if not is_known(name, known, packages)
    }
    return {name: f" (did you mean {near[0]}?)" if near else "" for name, near in nearest.items()}


def main() -> None:
    """Look, and print what is unknown."""
    venv, *names = sys.argv[1:]
    found = sorted(Path(venv).glob("lib/python3*/site-packages/sglang/__init__.py"))
    if not found:
        raise SystemExit(f"no package sglang in {venv}; wanted: the engine's environment")
    print(json.dumps(unknown(names, found[0].parents[1])))


if __name__ == "__main__":
    main()
