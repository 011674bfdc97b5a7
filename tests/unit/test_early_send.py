# SPDX-License-Identifier: GPL-3.0-or-later
"""Why prefill servers run with SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0: what the installed SGLang would do.

Fails when an upgrade mends it. Then the variable can go from roles/sglang_serve/filter_plugins/servers.py, once GPUs
have shown that prompts of several chunks are answered as by a unified server without it (step ``pair`` of
tests/gpu/server, its prefill server that sends early).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HELPER = Path(__file__).with_name("early_send_engine.py")


@pytest.fixture(scope="module")
def engine_says(engine_python: str) -> dict:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [engine_python, "-I", HELPER], env=environment, text=True, capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_chunk_that_is_still_computed_is_sent(engine_says: dict) -> None:
    assert engine_says["sent"]["default"] == [8192]


def test_nixl_does_not_wait_for_it(engine_says: dict) -> None:
    assert engine_says["kept"] == {"nixl": False, "mooncake": True}


def test_the_variable_stops_it(engine_says: dict) -> None:
    assert engine_says["sent"]["0"] == []
