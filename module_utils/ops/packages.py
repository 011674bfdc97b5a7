# SPDX-License-Identifier: GPL-3.0-or-later
"""The packages of a virtual environment: those that its lock file asks for, and those that are there.

Read from files alone; no program of the environment runs, so a damaged one can be read too. Names are in one spelling.
"""

from __future__ import annotations

import json
import os
import re
import typing as t

INFO = ".dist-info"
# What a virtual environment begins with, whatever its lock file says.
OF_THE_VENV = ("pip", "setuptools")
# In a lock file for one platform, no other kind of marker decides whether a Python gets a package.
_LOCKED = re.compile(r"^([\w.-]+)==(\S+)(?: ; python_full_version (<|>=) '(\d+)\.(\d+)')?", re.MULTILINE)


def normal(name: str) -> str:
    """A package's name in one spelling."""
    return re.sub(r"[-_.]+", "_", name).lower()


def python_of(venv: str) -> str:
    """The name of the Python of a virtual environment, such as python3.11; "" where it has none."""
    return next((name for name in names(os.path.join(venv, "lib")) if re.fullmatch(r"python3\.\d+", name)), "")


def locked(lock: str, python: str) -> dict[str, str]:
    """Name -> version of the packages that a Python, such as python3.11, gets from the text of a lock file."""
    own = tuple(int(part) for part in python.removeprefix("python").split("."))
    found = {}
    for name, version, comparison, major, minor in _LOCKED.findall(lock):
        older = comparison != "" and own < (int(major), int(minor))
        if older == (comparison == "<"):
            found[normal(name)] = version
    return found


def built(directory: str) -> dict[str, str]:
    """Name -> version of the wheels that were installed after those of the lock file, by the records beside the venv.

    Raises OSError, and ValueError, KeyError or TypeError for what is no record.
    """
    found = {}
    for record in (name for name in names(directory) if name.endswith(".json")):
        with open(os.path.join(directory, record), encoding="utf-8") as text:
            for one in json.load(text):
                name, version = one["wheel"].split("-")[:2]
                found[normal(name)] = version
    return found


def installed(packages: str) -> dict[str, str]:
    """Name -> version of what is in a directory site-packages."""
    found = {}
    for entry in (name for name in names(packages) if name.endswith(INFO)):
        name, _dash, version = entry[: -len(INFO)].partition("-")
        found[normal(name)] = version
    return found


def same_version(one: str, other: str) -> bool:
    """Whether two versions are one: 1.0-1 and 1.0_1, 2026.01 and 2026.1."""
    parts: list[list[t.Any]] = [
        [int(part) if part.isdigit() else part for part in re.split(r"[-_.+]", text)] for text in (one, other)
    ]
    return parts[0] == parts[1]


def names(directory: str) -> list[str]:
    """What is in a directory, nothing where there is none."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
