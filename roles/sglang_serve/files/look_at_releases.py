#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Say which releases a host has, which of them may serve, and what nobody needs any more.

    look_at_releases.py ROOT KEEP

A release is a directory ROOT/releases/ID that was staged to the end (it has a release.json), ROOT/current is a link to
the one that serves or is to serve, and the file `proven` in it says that it has once answered right. All state is on
disk, so a run that was killed leaves to the next one where it was. Prints a JSON object:

    current      ID, or null
    previous     ID of the proven release to go back to, the last one proven beside the current; or null
    environment  the directory that the link ROOT/environment leads to
    releases     ID -> its release.json with `id`, `staged` (when, in seconds since the epoch), `proven` (null, or the
                 content of that file), `in_use` and, in each of its servers, `unit_text` and `launch_text`
    removable    directories without which KEEP releases are left: the current one and those proven last. Nothing of a
                 release in use, and no environment that a kept release or the link needs
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def read_release(directory: Path) -> dict[str, Any]:
    """Return what a staged release has. Raises OSError and ValueError for one that is not whole."""
    release = {"id": directory.name, **json.loads((directory / "release.json").read_text())}
    for server in release["servers"]:
        server["unit_text"] = (directory / server["unit"]).read_text()
        server["launch_text"] = (directory / f"launch-{server['name']}.sh").read_text()
    release["staged"] = (directory / "venv").lstat().st_mtime
    proven = directory / "proven"
    release["proven"] = json.loads(proven.read_text()) if proven.exists() else None
    return release


def staged(root: Path) -> dict[str, dict[str, Any]]:
    """Return ID -> release for each that was staged to the end."""
    releases = {}
    for directory in sorted((root / "releases").glob("*")):
        try:
            releases[directory.name] = read_release(directory)
        except (OSError, ValueError, KeyError):
            continue
    return releases


def in_use(root: Path, proc: Path) -> set[str]:
    """Return the IDs of the releases that a process was started from."""
    prefix = os.fsencode(root / "releases") + b"/"
    found = set()
    for process in proc.glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        found |= {os.fsdecode(word[len(prefix) :].split(b"/")[0]) for word in words if word.startswith(prefix)}
    return found


def target(link: Path) -> str | None:
    """Return the name of the directory that a link leads to, None when there is no such directory."""
    return link.resolve().name if link.is_dir() else None


def removable(root: Path, keep: set[str]) -> list[Path]:
    """Return the directories of releases and environments that no release in `keep` needs."""
    needed = {target(root / "environment")}
    needed |= {(root / "releases" / name / "venv").resolve().parent.name for name in keep}
    old = [path for path in sorted((root / "releases").glob("*")) if path.name not in keep]
    return old + [path for path in sorted((root / "environments").glob("*")) if path.name not in needed]


def look(root: Path, keep: int, proc: Path = Path("/proc")) -> dict[str, Any]:
    """Return what there is to say about the releases below a directory."""
    releases, used, current = staged(root), in_use(root, proc), target(root / "current")
    for name, release in releases.items():
        release["in_use"] = name in used
    others = [name for name, release in releases.items() if release["proven"] and name != current]
    others.sort(key=lambda name: releases[name]["proven"]["at"], reverse=True)
    kept = {*others[: keep - 1], *used, current}
    return {
        "current": current,
        "previous": others[0] if others else None,
        "environment": str((root / "environment").resolve()),
        "releases": releases,
        "removable": [str(path) for path in removable(root, kept - {None})] if current else [],
    }


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]), int(sys.argv[2]))))
