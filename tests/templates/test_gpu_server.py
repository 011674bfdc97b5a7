# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be said without a GPU of the test that runs the kernels in the real server (tests/gpu/server)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[1] / "gpu" / "server"
CONTEXTS = {
    "capacity": 131072,
    "context-8k": 8192,
    "context-128k": 131072,
    "context-512k": 524288,
    "context-1m": 1048576,
}


@pytest.fixture(scope="module")
def launch() -> dict[str, dict]:
    """What launch.py prints."""
    done = subprocess.run([sys.executable, SERVER / "launch.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_engine_understands_the_launch_lines(launch, sglang):
    assert launch.keys() == CONTEXTS.keys()
    for host, line in launch.items():
        command, *arguments = line["argv"]
        options = sglang.ask("parse", argv=arguments)["options"]
        assert command == "serve"
        assert options["--context-length"] == CONTEXTS[host]
        assert options["--load-format"] == "dummy"
        # The harness puts its own in their place.
        assert {"--model-path", "--port", "--nccl-port"} <= options.keys()
