# SPDX-License-Identifier: GPL-3.0-or-later
"""Is an environment complete, and what of it is damaged: files of its packages that are gone or cut.

An environment is a directory with a virtual environment (venv), its lock file (requirements.txt), the mark of a
finished installation (complete) and the records of the wheels built from the repository (*.json). Names and sizes are
compared with the packages' own records (RECORD), contents are not.
"""

from __future__ import annotations

import os
import typing as t

from . import packages

NO_VENV = "the virtual environment: no Python, no pip or no packages"


class Look(t.NamedTuple):
    """damaged: one sentence for each package. remove: the paths without which an installation brings all back."""

    complete: bool
    damaged: list[str]
    remove: list[str]


def recorded(record: str) -> t.Iterator[tuple[str, int]]:
    """Yield the files of a package with their sizes, but for the record itself and compiled Python, which is remade."""
    for line in record.splitlines():
        path, _digest, size = line.rsplit(",", 2)
        if size and not path.endswith(".pyc"):
            yield path.strip('"'), int(size)


def size_of(path: str) -> int | None:
    """The size of a file, None when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def damages(directory: str) -> dict[str, list[str]]:
    """Name of a .dist-info directory in a site-packages -> what is wrong with the files of that package."""
    faults: dict[str, list[str]] = {}
    claims: dict[str, list[tuple[str, int]]] = {}
    for info in (name for name in packages.names(directory) if name.endswith(packages.INFO)):
        try:
            with open(os.path.join(directory, info, "RECORD"), encoding="utf-8") as record:
                for path, size in recorded(record.read()):
                    claims.setdefault(path, []).append((info, size))
        except (OSError, ValueError):
            faults[info] = ["its RECORD can't be read"]
    for path, owners in claims.items():
        seen = size_of(os.path.join(directory, path))
        # Several packages may bring one file, and the last one has it.
        if all(seen != size for _info, size in owners):
            state = "is missing" if seen is None else f"has {seen} bytes instead of {owners[0][1]}"
            for info, _size in owners:
                faults.setdefault(info, []).append(f"{path} {state}")
    return faults


def look(environment: str) -> Look:
    """Look at an environment. Raises OSError when the lock file of a finished one can't be read."""
    if not os.path.exists(os.path.join(environment, "complete")):
        return Look(False, [], [])
    venv = os.path.join(environment, "venv")
    python = packages.python_of(venv)
    directory = os.path.join(venv, "lib", python, "site-packages")
    programs = (os.path.join(venv, "bin", name) for name in ("python", "pip"))
    if not (python and os.path.isdir(directory) and all(os.access(program, os.X_OK) for program in programs)):
        return _with_records(environment, [NO_VENV], [venv])
    faults = damages(directory)
    with open(os.path.join(environment, "requirements.txt"), encoding="utf-8") as lock:
        missing = sorted(set(packages.locked(lock.read(), python)) - set(packages.installed(directory)))
    damaged = [
        f"{info[: -len(packages.INFO)]}: {said[0]}" + (f" and {len(said) - 1} more" if said[1:] else "")
        for info, said in sorted(faults.items())
    ]
    damaged += [f"{name}: not installed" for name in missing]
    if not damaged:
        return Look(True, [], [])
    # Without pip nothing is left to install the rest with.
    no_pip = any(info.startswith("pip-") for info in faults)
    return _with_records(
        environment, damaged, [venv] if no_pip else [os.path.join(directory, info) for info in sorted(faults)]
    )


def _with_records(environment: str, damaged: list[str], remove: list[str]) -> Look:
    """Without their records, the packages that are built from the repository are installed again too."""
    records = ["complete", *(name for name in packages.names(environment) if name.endswith(".json"))]
    return Look(False, damaged, [*remove, *(os.path.join(environment, name) for name in records)])
