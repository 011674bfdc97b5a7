# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
from pathlib import Path

import pytest
from ops.journal_causes import (
    BENIGN,
    CAUSES,
    FATAL,
    UNKNOWN,
    WARNING,
    Cause,
    classify,
    classify_line,
    root_cause,
)

ROLES = Path(__file__).parents[2] / "roles"

# A healthy start of the engine on a CPU host, as it stands in the journal.
HEALTHY = """\
UserWarning: 'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint.
[2026-11-30 00:08:28] The current platform does not support Intel AMX, will fallback to torch_native backend.
UserWarning: Triton is not supported on current platform, roll back to CPU.
[2026-11-30 00:08:32] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit
[2026-11-30 00:08:32] server_args={'model_path': '/m', 'api_key': 'sk-secret', 'crash_dump_folder': None}
[2026-11-30 00:08:46] Using default HuggingFace chat template with detected content format: string
[2026-11-30 00:09:19] Init parallel begin.
[2026-11-30 00:09:24] Cannot detect CUDA architecture.
[2026-11-30 00:09:25] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'
[2026-11-30 00:09:26] Load weight begin. avail mem=20.58 GB
Multi-thread loading shards: 100% Completed | 1/1 [00:04<00:00,  4.32s/it]
[2026-11-30 00:09:30] Load weight end. elapsed=4.43 s, type=LlamaForCausalLM, avail mem=20.10 GB, mem usage=0.47 GB.
[2026-11-30 00:09:33] KV Cache is allocated. dtype: torch.float32, #tokens: 8192, K size: 0.18 GB, V size: 0.18 GB
[2026-11-30 00:09:33] Memory pool end. avail mem=20.03 GB
[2026-11-30 00:09:33] max_total_num_tokens=8192, chunked_prefill_size=4096, max_running_requests=8, context_len=8192
[2026-11-30 00:09:33] INFO:     Uvicorn running on http://127.0.0.1:30001 (Press CTRL+C to quit)
[2026-11-30 00:09:34] Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, #running-req: 0
[2026-11-30 00:09:35] INFO:     127.0.0.1:54250 - "POST /generate HTTP/1.1" 200 OK
[2026-11-30 00:09:35] The server is fired up and ready to roll!
Started sglang-unified.service - SGLang engine.
""".splitlines()


def lines(*messages: str) -> list[tuple[str, int]]:
    return [(message, 6) for message in messages]


@pytest.mark.parametrize("row", CAUSES, ids=lambda row: row.id)
def test_each_row_knows_its_own_sample(row: Cause) -> None:
    finding = classify_line(row.sample, unit="sglang-unified.service")
    assert finding is not None
    assert finding.id == row.id
    assert finding.severity == row.severity
    assert "{unit}" not in finding.next_command
    assert finding.line


@pytest.mark.parametrize("row", CAUSES, ids=lambda row: row.id)
def test_each_row_is_complete(row: Cause) -> None:
    assert row.severity in (FATAL, WARNING, BENIGN)
    assert row.cause and row.variable and row.next_command and row.source
    assert not row.cause.endswith(".")
    assert len(row.cause) < 130
    assert row.consequence is False or row.severity == FATAL


@pytest.mark.parametrize("row", CAUSES, ids=lambda row: row.id)
def test_the_variables_named_are_variables_of_the_roles(row: Cause) -> None:
    for name in re.findall(r"\b(?:sglang|model_store)_[a-z_0-9]+", row.variable):
        role = next(path for path in sorted(ROLES.iterdir(), reverse=True) if name.startswith(path.name + "_"))
        defaults = (role / "defaults" / "main.yml").read_text(encoding="utf-8")
        assert re.search(rf"^{name}:", defaults, re.MULTILINE), f"{name} is no variable of role {role.name}"


def test_ids_are_unique() -> None:
    ids = [row.id for row in CAUSES]
    assert len(ids) == len(set(ids))


def test_a_healthy_start_holds_nothing_but_benign_lines() -> None:
    assert {finding.severity for finding in classify(lines(*HEALTHY))} == {BENIGN}


@pytest.mark.parametrize(
    ("line", "priority"),
    [
        ("[2026-11-30 09:00:00] AttributeError: 'NoneType' object has no attribute 'shape'", 6),
        ("KeyError: 'model.layers.0'", 6),
        ("sglang.srt.utils.common.SomeNewError: it broke", 6),
        ("AssertionError", 6),
        ("[rank2]:[E1130 09:31:22.1 Something.cpp:1] it broke", 6),
        ("2026-11-30 09:00:00 ERROR something nobody knows", 6),
        ("Segmentation fault (core dumped)", 6),
        ("it broke, says the kernel", 3),
    ],
)
def test_unknown_errors_are_shown(line: str, priority: int) -> None:
    finding = classify_line(line, priority, "u.service")
    assert finding is not None
    assert finding.id == UNKNOWN
    assert finding.line == line
    assert finding.next_command == "journalctl -u u.service -n 200 --no-pager"


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-30 09:00:00] Decode batch, #running-req: 3, token usage: 0.12",
        "[2026-11-30 09:00:00] disable_error_correction=True",
        "Traceback (most recent call last):",
        '  File "/opt/sglang/current/venv/lib/python3.11/site-packages/x.py", line 3, in error_path',
    ],
)
def test_ordinary_lines_say_nothing(line: str) -> None:
    assert classify_line(line) is None


def test_the_configuration_line_is_never_read_or_quoted() -> None:
    line = "[2026-11-30 00:08:32] server_args={'api_key': 'sk-secret', 'x': 'OutOfMemoryError'}"
    assert classify_line(line) is None
    assert classify_line("ValueError: bad --api-key sk-secret") is None


def test_equal_lines_are_counted_and_unknown_ones_kept_apart() -> None:
    found = classify(lines("KeyError: 1", "torch.OutOfMemoryError: CUDA out of memory.", "KeyError: 2", "KeyError: 1"))
    assert [(finding.id, finding.count) for finding in found] == [(UNKNOWN, 2), ("gpu_out_of_memory", 1), (UNKNOWN, 1)]
    found = classify(lines("torch.OutOfMemoryError: CUDA out of memory. 1", "torch.OutOfMemoryError: 2"))
    assert [(finding.id, finding.count) for finding in found] == [("gpu_out_of_memory", 2)]


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.06 GiB."
SCHEDULER = "[2026-11-30 09:10:30 TP0] Scheduler hit an exception: Traceback (most recent call last):"
CHILD = "[2026-11-30 09:10:31] Received sigquit from a child process. It usually means the child failed."
EXITED = "sglang-unified.service: Main process exited, code=killed, status=9/KILL"


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        pytest.param([SCHEDULER, OOM, CHILD, EXITED], "gpu_out_of_memory", id="a cause beats its consequences"),
        pytest.param([SCHEDULER, "KeyError: 'w'", CHILD, EXITED], UNKNOWN, id="an unknown error beats consequences"),
        pytest.param([CHILD, EXITED], "child_failed", id="a consequence beats nothing"),
        pytest.param([EXITED], "main_process_exited", id="only systemd's word"),
        pytest.param(["KeyError: 1", "KeyError: 2"], UNKNOWN, id="unknown errors only"),
        pytest.param(HEALTHY, None, id="healthy"),
    ],
)
def test_root_cause(messages: list[str], cause: str | None) -> None:
    found = root_cause(classify(lines(*messages)))
    assert (found.id if found else None) == cause


def test_the_last_unknown_error_is_the_cause() -> None:
    found = root_cause(classify(lines("KeyError: first", "RuntimeError: last")))
    assert found is not None
    assert found.line == "RuntimeError: last"


def test_a_long_line_is_bounded() -> None:
    finding = classify_line("KeyError: " + "x" * 5000)
    assert finding is not None
    assert len(finding.line) == 400
