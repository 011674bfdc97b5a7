# SPDX-License-Identifier: GPL-3.0-or-later
"""Render the launch lines of inventory/ with the project's own templates, as JSON: ``python launch.py > launch.json``.

Needs ansible-core, which the machine with the GPU may lack; the JSON is what run.py reads there.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "templates"))

from rendering import render  # noqa: E402  # after the import path


def launch_line(script: str) -> list[str]:
    """The words behind the program in a launch script, without the shell's own ``"$@"``."""
    words = shlex.split(script[script.index("\nexec ") :].replace("\\\n", " "))
    return words[2:-1]


def launch_lines(host: str, rendered: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name -> launch line of every server and router of a host; the host's name alone for a unified server."""
    texts = rendered["texts"]
    for server in rendered["servers"]:
        name = host if server["name"] == "unified" else f"{host} {server['name']}"
        script = texts[f"launch-{server['name']}.sh"]
        yield name, {"argv": launch_line(script), "environment": server["environment"]}
    if "launch-router.sh" in texts:
        yield f"{host} router", {"argv": launch_line(texts["launch-router.sh"]), "environment": {}}


def main() -> None:
    """Print name -> ``{"argv": [...], "environment": {...}}``."""
    lines: dict[str, dict[str, Any]] = {}
    for inventory in sorted((HERE / "inventory").glob("*.yml")):
        with tempfile.TemporaryDirectory() as directory:
            hosts = render(inventory, {}, Path(directory))
        for host, rendered in sorted(hosts.items()):
            lines |= launch_lines(host, rendered)
    json.dump(lines, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
