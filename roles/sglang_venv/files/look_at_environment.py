#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Say whether an environment is complete, and what of it is damaged: files of its packages that are gone or cut.

    look_at_environment.py DIRECTORY

Runs under the interpreter that the environment was made with. Names and sizes are compared with the packages' own
records (RECORD), contents are not. Prints a JSON object: `complete`, `damaged` (one sentence for each package) and
`remove`, the paths without which the next installation brings back what is damaged, and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# In a lock file for one platform, no other kind of marker decides whether a package is installed.
REQUIREMENT = re.compile(r"^([\w.-]+)==\S+(?: ; python_full_version (<|>=) '(\d+)\.(\d+)')?", re.MULTILINE)


def normal(name: str) -> str:
    """Return a package's name in one spelling."""
    return re.sub(r"[-_.]+", "_", name).lower()


def wanted(lock: str) -> set[str]:
    """Return the names of the packages that this Python gets from a lock file."""
    names = set()
    for name, comparison, major, minor in REQUIREMENT.findall(lock):
        older = comparison != "" and sys.version_info[:2] < (int(major), int(minor))
        if older == (comparison == "<"):
            names.add(normal(name))
    return names


def recorded(record: str) -> Iterator[tuple[str, int]]:
    """Yield the files of a package with their sizes, but for the record itself and compiled Python, which is remade."""
    for line in record.splitlines():
        path, _digest, size = line.rsplit(",", 2)
        if size and not path.endswith(".pyc"):
            yield path.strip('"'), int(size)


def size_of(path: str) -> int | None:
    """Return the size of a file, None when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def damages(packages: Path) -> dict[Path, list[str]]:
    """Return .dist-info directory -> what is wrong with the files of that package."""
    faults: dict[Path, list[str]] = {}
    claims: dict[str, list[tuple[Path, int]]] = {}
    for information in packages.glob("*.dist-info"):
        try:
            for path, size in recorded((information / "RECORD").read_text()):
                claims.setdefault(path, []).append((information, size))
        except (OSError, ValueError):
            faults[information] = ["its RECORD can't be read"]
    os.chdir(packages)
    for path, owners in claims.items():
        seen = size_of(path)
        # Several packages may bring one file, and the last one has it.
        if all(seen != size for _information, size in owners):
            state = "is missing" if seen is None else f"has {seen} bytes instead of {owners[0][1]}"
            for information, _size in owners:
                faults.setdefault(information, []).append(f"{path} {state}")
    return faults


def look_at_packages(packages: Path, lock: str) -> tuple[list[str], list[Path]]:
    """Return what is damaged, one sentence for each package, and what to remove."""
    faults = damages(packages)
    installed = {normal(path.name.split("-")[0]) for path in packages.glob("*.dist-info")}
    damaged = [
        f"{path.stem}: {said[0]}" + (f" and {len(said) - 1} more" if said[1:] else "")
        for path, said in sorted(faults.items())
    ]
    return damaged + [f"{name}: not installed" for name in sorted(wanted(lock) - installed)], sorted(faults)


def look(environment: Path) -> dict[str, object]:
    """Return what there is to say about an environment."""
    if not (environment / "complete").exists():
        return {"complete": False, "damaged": [], "remove": []}
    venv = environment / "venv"
    packages = next(venv.glob("lib/python3*/site-packages"), None)
    if packages and os.access(venv / "bin/python", os.X_OK) and os.access(venv / "bin/pip", os.X_OK):
        damaged, remove = look_at_packages(packages, (environment / "requirements.txt").read_text())
        if any(path.name.startswith("pip-") for path in remove):
            remove = [venv]  # nothing is left to install the rest with
    else:
        damaged, remove = ["the virtual environment: no Python, no pip or no packages"], [venv]
    # Without their records, the packages that are built from the repository are installed again too.
    remove += [environment / "complete", *sorted(environment.glob("*.json"))]
    return {"complete": not damaged, "damaged": damaged, "remove": [str(path) for path in remove] if damaged else []}


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
