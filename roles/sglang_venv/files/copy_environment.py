#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Begin an environment with what another one of the same lock file has, in seconds and without disk space.

    copy_environment.py DIRECTORY PREFIX

DIRECTORY/venv becomes a tree of hard links to the venv of a complete environment beside it whose name begins with
PREFIX, without the packages that were installed there after the lock file's (named in its *.json). pip and compileall
replace files and never write into them, so neither environment changes the other. Does nothing when there is no other.
Prints the name of the other environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def other(directory: Path, prefix: str) -> Path | None:
    """Return the complete environment beside `directory` that was made last."""
    found = [marker for marker in directory.parent.glob(f"{prefix}*/complete") if marker.parent != directory]
    return max(found, key=lambda marker: marker.stat().st_mtime).parent if found else None


def rename_inside(venv: Path, old: Path, new: Path) -> None:
    """Write the new directory where a program, or the environment's own settings, name the old one."""
    for file in [venv / "pyvenv.cfg", *(venv / "bin").iterdir()]:
        if file.is_file() and not file.is_symlink() and bytes(old) + b"/" in (text := file.read_bytes()):
            changed = file.with_name(f"{file.name}.new")
            changed.write_bytes(text.replace(bytes(old) + b"/", bytes(new) + b"/"))
            shutil.copymode(file, changed)
            changed.replace(file)


def added(environment: Path) -> list[str]:
    """Return the names of the packages that were installed after those of the lock file."""
    records = [json.loads(record.read_text()) for record in environment.glob("*.json")]
    return sorted(one["wheel"].split("-")[0] for record in records for one in record)


def copy(source: Path, target: Path) -> None:
    """Make target/venv; an interrupted run leaves none."""
    part = target / "venv.part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source / "venv", part, symlinks=True, copy_function=os.link)
    rename_inside(part, source, target)
    if names := added(source):
        pip = [part / "bin/python", "-m", "pip", "--disable-pip-version-check", "uninstall", "--quiet", "--yes"]
        subprocess.run([*pip, *names], check=True)
    part.rename(target / "venv")


if __name__ == "__main__":
    environment = Path(sys.argv[1])
    if donor := other(environment, sys.argv[2]):
        copy(donor, environment)
        print(donor.name)
