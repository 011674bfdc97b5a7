# SPDX-License-Identifier: GPL-3.0-or-later
"""The texts that journal_causes and readiness look for stand in the installed engine's source.

An engine upgrade that rewords one of them fails here. The engine is found through ENGINE_PYTHON; it is not started.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from ops.journal_causes import CAUSES
from ops.readiness import phase_of

# The constant part of each message of SGLang's own, as its source has it.
FRAGMENTS = {
    "request_failed": "Error in request: {e}",
    "pcie_allreduce_off": "reductions stay on NCCL",
    "benign_optional_model": "Ignore import error when loading {name}",
    "graph_capture_failed": "Capture cuda graph failed: {e}",
    "weights_leave_no_kv": "Loaded weights leave no GPU memory for the KV cache under",
    "kv_pool_empty": "Not enough memory. Please try to increase --mem-fraction-static.",
    "host_pool_empty": "No host memory is left for HiCache after the",
    "prefill_out_of_kv": "Prefill out of memory. Try to lower your batch size.",
    "port_in_use": "Port is already in use. ",
    "context_too_long": "is greater than the derived context_length",
    "plugin_failed": "Failed to load plugin %s from group %s",
    "scheduler_died_at_start": "Rank {rank} scheduler died during initialization ",
    "scheduler_exception": "Scheduler hit an exception: {traceback}",
    "subprocess_crashed": "Triggering SIGQUIT for cleanup...",
    "child_failed": "Received sigquit from a child process. It usually means the child failed.",
    "warmup_failed": "Initialization failed. warmup error: {last_traceback}",
    "scheduler_stuck": "watchdog timeout ",
    "health_check_failed": "Health check failed. Server couldn't get a response from detokenizer for last ",
    "request_retracted": "KV cache pool is full. Retract requests. ",
    "compiled_while_serving": "s to compile after serving started. ",
    "benign_nofile": "Fail to set RLIMIT_NOFILE: {e}",
    "benign_launch_server": "is still supported, but",
    "benign_custom_allreduce": "is disabled because it's not supported on",
}
# Lines that name a phase of the start: source file, its constant part, a message, the phase.
PHASES = [
    ("srt/model_executor/model_runner.py", "Load weight begin. avail mem=", "Load weight begin. a", "loading weights"),
    ("srt/model_executor/model_runner.py", "Load weight end. ", "Load weight end. x", "allocating the KV pool"),
    ("srt/mem_cache/kv_cache_configurator.py", "Memory pool end. ", "Memory pool end. x", "preparing the scheduler"),
    (
        "srt/model_executor/model_runner_components/cuda_graph_setup.py",
        "Capture {capture_name} CUDA graph begin. ",
        "Capture target decode CUDA graph begin. x",
        "capturing CUDA graphs",
    ),
    ("srt/managers/scheduler.py", "max_total_num_tokens=", "max_total_num_tokens=8", "starting the HTTP server"),
    (
        "srt/entrypoints/http_server.py",
        "The server is fired up and ready to roll!",
        "The server is fired up and ready to roll!",
        "answering its first requests",
    ),
]


@pytest.fixture(scope="module")
def engine_source() -> Path:
    python = os.environ.get("ENGINE_PYTHON")
    if not python:
        pytest.fail("ENGINE_PYTHON is not set; it names the Python of a venv with the engine")
    code = "import importlib.util; print(importlib.util.find_spec('sglang').submodule_search_locations[0])"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def engine_files(source: str) -> list[str]:
    return [name for name in source.split(", ") if re.match(r"(srt/.*|launch_server)\.py$", name)]


def joined(path: Path) -> str:
    """Source text with its adjacent string literals joined, as the running program has them."""
    return re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))


def test_every_row_of_the_engines_own_is_looked_up() -> None:
    assert {row.id for row in CAUSES if engine_files(row.source)} == set(FRAGMENTS)


@pytest.mark.parametrize("row", [row for row in CAUSES if row.id in FRAGMENTS], ids=lambda row: row.id)
def test_the_text_stands_in_the_source_that_the_row_names(row, engine_source: Path) -> None:
    texts = [joined(engine_source / name) for name in engine_files(row.source)]
    assert any(FRAGMENTS[row.id] in text for text in texts)


@pytest.mark.parametrize(("file", "fragment", "message", "phase"), PHASES, ids=[phase for *_rest, phase in PHASES])
def test_the_lines_that_name_a_phase(engine_source: Path, file: str, fragment: str, message: str, phase: str) -> None:
    assert fragment in joined(engine_source / file)
    assert phase_of([message]) == phase
