# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
import time
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
    quotable,
    root_cause,
    strip_prefix,
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


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (
            "/opt/sglang/current/launch-unified.sh: 10: exec: /opt/sglang/current/venv/bin/sglang: Permission denied",
            "permission_denied",
        ),
        (
            "sglang-unified.service: Unable to locate executable '/opt/sglang/releases/1/venv/bin/python': "
            "No such file or directory",
            "exec_failed",
        ),
    ],
)
def test_a_launch_script_that_finds_no_python(line: str, row: str) -> None:
    """As dash and systemd 257 say it, of a Python below /root."""
    finding = root_cause(classify(lines("Failed to start sglang-unified.service - SGLang unified.", line)))
    assert (finding.id, finding.severity) == (row, FATAL)


@pytest.mark.parametrize("row", CAUSES, ids=lambda row: row.id)
def test_each_row_knows_its_own_sample(row: Cause) -> None:
    finding = classify_line(row.sample, unit="sglang-unified.service")
    assert finding is not None
    assert finding.id == row.id
    assert finding.severity == row.severity
    assert "{unit}" not in finding.next_command
    assert finding.line


@pytest.mark.parametrize(
    "line",
    [
        "AssertionError: FP8 is only supported on SM100 (compute capability 10.x) for FA4 CuTe.",
        "RuntimeError: MSA-v1 compact NVFP4 dequant requires SM100/SM103, got sm120",
        "ValueError: dsa_paged_mqa_logits_backend='cutedsl' requires SM100 (Blackwell).",
        "RuntimeError: Sparse decode fwd is only supported on SM90a and SM100",
    ],
)
def test_a_kernel_of_another_gpu_generation_is_named_with_every_exception_that_sglang_raises(line: str) -> None:
    finding = classify_line(line)
    assert finding is not None
    assert (finding.id, finding.severity) == ("moe_backend_unsupported", FATAL)
    assert "--moe-runner-backend" in finding.variable
    assert "SGLANG_SM120_FLASHMLA_BACKEND in sglang_serve_environment_custom" in finding.variable


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
        ("it broke, says the kernel", 3),
        ("[2026-11-30 09:10:30.123 DP0 TP0 EP0] RuntimeError: with milliseconds", 6),
        ("[rank0]: RuntimeError: of a rank", 6),
        ("(EngineCore pid=33) ValueError: of a process", 6),
        ("| ValueError: in an exception group", 6),
        ("RuntimeError : with a space", 6),
        ("SystemExit: 3", 6),
        ("Killed", 6),
        ("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly", 6),
        ("subprocess.TimeoutExpired: Command 'nvidia-smi' timed out after 5 seconds", 6),
        ("zmq.error.Again: Resource temporarily unavailable", 6),
        ("[2026-11-30 09:10:30 TP0] torch._dynamo.exc.Unsupported: call_function", 6),
        ("E1130 09:10:30.123456 4711 engine.cpp:3] Check failed: ok", 6),
        ("2026-11-30T09:00:00.123Z ERROR smg::router: no worker", 6),
        ("error: could not load model", 6),
        ('{"time":"2026-11-30T09:00:00Z","level":"error","msg":"boom"}', 6),
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
        "INFO: 0 ERROR responses so far",
        "0 ERROR responses",
        "RuntimeWarning: a division",
        "[2026-11-30 09:00:00] Receive: obj=GenerateReqInput(text='CUDA out of memory? Permission denied?')",
        "[2026-11-30 09:00:00] Receive OpenAI: obj={'messages': 'Scheduler hit an exception: Traceback'}",
        "[2026-11-30 09:00:00] Finish: obj=GenerateReqInput(rid='1'), out={'text': 'NVRM: Xid (PCI:0000:41:00): 79'}",
        '[2026-11-30 09:00:00] {"timestamp": "2026-11-30T09:00:00", "event": "request.finished", "obj": "NCCL error"}',
        '[2026-11-30 09:00:00] INFO:     127.0.0.1:1234 - "GET /Errno%2013 ERROR Permission denied HTTP/1.1" 404',
        '[2026-11-30 09:00:00] INFO: "GET /ERROR HTTP/1.1" 404 Not Found',
        "[2026-11-30 09:00:00] a prompt says: Scheduler hit an exception: Traceback",
        "[2026-11-30 09:00:00] a prompt says: Main process exited, code=killed, status=9/KILL",
    ],
)
def test_ordinary_lines_say_nothing(line: str) -> None:
    assert classify_line(line) is None


# Where a client's words can stand in the engine's output: model and header names, paths, prompts, errors of requests.
OF_A_CLIENT = (
    "[2026-11-30 09:00:00] prompt: {}",
    "[2026-11-30 09:00:00 TP0] Using cached file /tmp/{}",
    "[2026-11-30 09:00:00] The model `{}` does not exist.",
    "[2026-11-30 09:00:00] WARNING: unknown header x-trace: {}",
    '[2026-11-30 09:00:00] ERROR: bad value in {{"prompt": "{}"}}',
    "[2026-11-30 09:00:00] Receive: obj=GenerateReqInput(text='{}')",
    "[2026-11-30 09:00:00] Error in request: {}",
    "[2026-11-30 09:00:00] Error in request: a bad role\n{}\nTraceback (most recent call last):\nValueError: {}\n{}",
    '[2026-11-30 09:00:00] INFO:     127.0.0.1:1234 - "GET /{} HTTP/1.1" 404 Not Found',
    "ValueError: The model '{}' does not exist",
    "KeyError: '{}'",
    "2026-11-30T09:00:00.123Z ERROR smg::router: no worker for the model {}",
)


@pytest.mark.parametrize("place", OF_A_CLIENT)
@pytest.mark.parametrize("row", [row for row in CAUSES if row.severity == FATAL], ids=lambda row: row.id)
def test_what_a_client_wrote_is_no_known_cause(row: Cause, place: str) -> None:
    text = strip_prefix(row.sample)
    assert classify_line(text).severity == FATAL
    # As one message with line ends in it, and as the lines that a journal makes of it.
    message = place.format(*[text] * 3)
    for messages in ([message], message.split("\n")):
        found = root_cause(classify(lines(*messages, "[2026-11-30 09:00:01] Decode batch, #running-req: 3")))
        assert found is None or (found.id, found.line) == (UNKNOWN, quotable(messages[0]))
        crashed = root_cause(classify(lines(*messages, "[2026-11-30 09:00:01] x", ABORTED, OOM)))
        assert crashed and (crashed.id, crashed.line) == ("gpu_out_of_memory", OOM)


def test_after_the_error_of_a_request_the_engine_is_heard_again() -> None:
    refused = "[2026-11-30 09:00:00] Error in request: a bad role"
    found = classify([*lines(refused, "MemoryError"), (EXITED, 4), *lines(CHILD, "KeyError: 1")])
    assert [(finding.id, finding.severity) for finding in found] == [
        ("request_failed", WARNING),
        ("host_out_of_memory", WARNING),
        ("main_process_exited", FATAL),
        ("child_failed", FATAL),
        (UNKNOWN, UNKNOWN),
    ]


def test_the_configuration_line_is_never_read_or_quoted() -> None:
    line = "[2026-11-30 00:08:32] server_args={'api_key': 'sk-secret', 'x': 'OutOfMemoryError'}"
    assert classify_line(line) is None
    assert quotable(line) == "(a line that may hold secrets is not shown)"


@pytest.mark.parametrize(
    ("line", "id", "shown"),
    [
        ("ERROR SGLANG_API_KEY=sk-s3cr3t", UNKNOWN, "ERROR SGLANG_API_KEY (hidden: it may hold a secret)"),
        ("ValueError: bad --api-key sk-s3cr3t", UNKNOWN, "ValueError: bad --api-key (hidden: it may hold a secret)"),
        ("x: error: argument --api-key: s3cr3t", "unknown_argument", "x: error: argument --api-key (hidden: it may"),
        (
            "CUDA out of memory in server_args=S('s3cr3t')",
            "gpu_out_of_memory",
            "CUDA out of memory in server_args (hid",
        ),
        ("AttributeError: 'A' has no 'api_key'", UNKNOWN, "AttributeError: 'A' has no 'api_key'"),
        ("KeyError: \x1b[31mred\x1b[0m \x07 a\tb", UNKNOWN, "KeyError: red \\x07 a\\tb"),
        ("ValueError: \u202egnp.exe", UNKNOWN, "ValueError: \\u202egnp.exe"),
    ],
)
def test_a_line_with_a_secret_is_judged_and_the_secret_is_hidden(line: str, id: str, shown: str) -> None:
    finding = classify_line(line)
    assert finding is not None
    assert finding.id == id
    assert finding.line.startswith(shown)
    assert "s3cr3t" not in finding.line


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("double free or corruption (!prev)", "native_crash"),
        ("free(): invalid pointer", "native_crash"),
        ("malloc(): corrupted top size", "native_crash"),
        ("terminate called without an active exception", "process_aborted"),
        ("Fatal Python error: Aborted", "process_aborted"),
        ("Exception: Capture cuda graph failed: out of resource: shared memory, Required: 131072", "kernel_too_large"),
        ("Segmentation fault (core dumped)", "native_crash"),
        ("!!!!!!! Segfault encountered !!!!!!!", "native_crash"),
        ("Bus error (core dumped)", "native_crash"),
        ("RuntimeError: CUDA error: device-side assert triggered", "device_assert"),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", "nccl_error"),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", "no_kernel_image"),
        ("\x1b[31mtorch.OutOfMemoryError\x1b[0m: CUDA out of memory.", "gpu_out_of_memory"),
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.", "gpu_out_of_memory"),
        ("sglang-unified.service: Main process exited, code=killed, status=9/KILL", "main_process_exited"),
    ],
)
def test_other_shapes_of_a_known_cause(line: str, id: str) -> None:
    finding = classify_line(line, priority=4 if ".service: " in line else 6)
    assert finding is not None
    assert (finding.id, finding.severity) == (id, FATAL)


@pytest.mark.parametrize(
    ("line", "priority"),
    [
        ("[2026-11-30 09:00:00 TP0] WARNING: cannot read /sys/kernel/debug/x: Permission denied", 6),
        ("[2026-11-30 09:00:00 TP0] using the fallback, [Errno 13]", 6),
        ("cannot read /x: Permission denied", 4),
    ],
)
def test_a_fatal_text_that_was_survived_is_a_warning(line: str, priority: int) -> None:
    finding = classify_line(line, priority)
    assert finding is not None
    assert (finding.id, finding.severity, finding.consequence) == ("permission_denied", WARNING, False)


def test_the_lines_of_a_message_are_judged_one_by_one() -> None:
    found = classify([("[2026-11-30 09:10:30] WARNING: x\nTraceback (most recent call last):\nRuntimeError: y", 6)])
    assert [finding.line for finding in found] == ["RuntimeError: y"]
    found = classify([("x" * 100_000 + "\nMemoryError", 6)])
    assert [finding.id for finding in found] == ["host_out_of_memory"]
    assert classify([("[2026-11-30 09:00:00] Receive: obj=a\nMemoryError", 6)]) == []


@pytest.mark.parametrize(
    "word", ["killed process ", "ptxas ", "PCIe-IPC workspace ", "a.", "error.", "1 - ", "| ", "\x1b]"]
)
def test_a_long_line_takes_no_time(word: str) -> None:
    start = time.process_time()
    classify([((word * 100_000)[:100_000], 6)])
    assert time.process_time() - start < 5.0


def test_equal_lines_are_counted_and_unknown_ones_kept_apart() -> None:
    found = classify(lines("KeyError: 1", "torch.OutOfMemoryError: CUDA out of memory.", "KeyError: 2", "KeyError: 1"))
    assert [(finding.id, finding.count) for finding in found] == [(UNKNOWN, 2), ("gpu_out_of_memory", 1), (UNKNOWN, 1)]
    found = classify(lines("torch.OutOfMemoryError: CUDA out of memory. 1", "torch.OutOfMemoryError: 2"))
    assert [(finding.id, finding.count) for finding in found] == [("gpu_out_of_memory", 2)]


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.06 GiB."
SCHEDULER = "[2026-11-30 09:10:30 TP0] Scheduler hit an exception: Traceback (most recent call last):"
CHILD = "[2026-11-30 09:10:31] Received sigquit from a child process. It usually means the child failed."
ABORTED = "terminate called without an active exception"
SURVIVED = (
    "[2026-11-30 09:00:00 TP0] WARNING: no deep_ep, using fallback: ModuleNotFoundError: No module named 'deep_ep'"
)
TRITON = (
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376."
)
EXITED = "sglang-unified.service: Main process exited, code=killed, status=9/KILL"


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        pytest.param([SCHEDULER, OOM, CHILD, EXITED], "gpu_out_of_memory", id="a cause beats its consequences"),
        pytest.param([SCHEDULER, "KeyError: 'w'", CHILD, EXITED], UNKNOWN, id="an unknown error beats consequences"),
        pytest.param([CHILD, EXITED], "child_failed", id="a consequence beats nothing"),
        pytest.param([SURVIVED, SCHEDULER, TRITON, EXITED], "kernel_too_large", id="a warning is no cause"),
        pytest.param([SURVIVED, SCHEDULER, EXITED], "scheduler_exception", id="nor beside consequences"),
        pytest.param(["KeyError: 1", ABORTED, EXITED], UNKNOWN, id="an error beats what it led to"),
        pytest.param([ABORTED, EXITED], "process_aborted", id="an abort beats systemd's word"),
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
