# SPDX-License-Identifier: GPL-3.0-or-later
"""Render the launch lines of inventory/ with the project's own templates, as JSON: ``python launch.py > launch.json``.

Needs ansible-core, which the machine with the GPU may lack; the JSON is what run.py reads there.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "templates"))

from rendering import render  # noqa: E402  # after the import path


def launch_line(script: str) -> list[str]:
    """The words behind ``sglang`` in a launch script, without the shell's own ``"$@"``."""
    words = shlex.split(script[script.index("\nexec ") :].replace("\\\n", " "))
    return words[2:-1]


def main() -> None:
    """Print host -> ``{"argv": [...], "environment": {...}}``."""
    with tempfile.TemporaryDirectory() as directory:
        hosts = render(HERE / "inventory", {}, Path(directory))
    lines = {
        host: {
            "argv": launch_line(texts["texts"]["launch-unified.sh"]),
            "environment": texts["servers"][0]["environment"],
        }
        for host, texts in sorted(hosts.items())
    }
    json.dump(lines, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
