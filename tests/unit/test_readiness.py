# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest
from ops.host import Host
from ops.http import Client
from ops.journal_causes import CAUSES, Cause, quotable
from ops.probe import ANSWERING, REFUSED, Answer, Capacity
from ops.probe import STARTING as NOT_ANSWERING
from ops.readiness import FAILED, READY, Readiness, Watch, phase_of, stuck_processes
from ops.readiness import STARTING as STILL_STARTING
from process_unit import ProcessUnit
from scripted_systemd import RUNNING, STARTING, ScriptedSystemd

UNIT = "engine.service"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.06 GiB."
FAILED_STATE = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "MainPID": "0"}
CAPACITY = Capacity("m", 16384, 8192, 8, "0.5.23")


def watch(systemd: ScriptedSystemd, answers_from: float = 1e9, **options: t.Any) -> Watch:
    def ask(_client: Client, _pid: int) -> Answer:
        return Answer(ANSWERING, "one token") if systemd.now >= answers_from else Answer(NOT_ANSWERING, "nothing yet")

    return Watch(
        UNIT,
        Client("http://127.0.0.1:1"),
        runner=systemd.run,
        clock=systemd.clock,
        sleep=systemd.sleep,
        ask_once=ask,
        ask_capacity=lambda _client: CAPACITY,
        **options,
    )


def see(systemd: ScriptedSystemd, wait: float = 600, answers_from: float = 1e9, **options: t.Any) -> Readiness:
    return watch(systemd, answers_from, **options).wait(wait)


def test_ready_ends_the_wait_early() -> None:
    systemd = ScriptedSystemd(STARTING, script={40: RUNNING})
    seen = see(systemd, answers_from=38, restarts_before=0)
    assert (seen.status, systemd.now) == (READY, 40)
    assert seen.capacity == CAPACITY


def test_an_answer_does_not_count_before_the_unit_is_active() -> None:
    seen = see(ScriptedSystemd(STARTING), wait=5, answers_from=0)
    assert (seen.status, seen.phase) == (STILL_STARTING, "answering, waiting for the unit's own probe")


SERVING = {**RUNNING, "ActiveEnterTimestampMonotonic": "100000000"}


def silent(
    status: int | None = None, script: dict[float, t.Any] | None = None, wait: float = 0, **options: t.Any
) -> Readiness:
    """What is said of a unit that was active for 7,100 s when it was looked at, each question taking 20 s."""
    systemd = ScriptedSystemd(SERVING, script=script or {}, now=7200.0)

    def ask(_client: Client, _pid: int) -> Answer:
        systemd.sleep(20)
        return Answer(NOT_ANSWERING, "timed out", status)

    looks = Watch(
        UNIT,
        Client("http://127.0.0.1:1"),
        runner=systemd.run,
        clock=systemd.clock,
        sleep=systemd.sleep,
        ask_once=ask,
        **{"stuck": lambda _unit: "", **options},
    )
    seen = looks.wait(wait)
    assert systemd.now - 7200 <= wait + 60
    return seen


@pytest.mark.parametrize("status", [None, 503])
def test_an_active_unit_that_falls_silent_hangs(status: int | None) -> None:
    seen = silent(status, stuck=lambda unit: f"process 7 of {unit} is stopped")
    assert (seen.status, seen.detail) == (FAILED, "served before (active for 2 h), no answer for 41 s: timed out")
    assert seen.cause and seen.cause.id == "engine_hangs"
    assert seen.cause.cause == "it served before and is silent now: it hangs; process 7 of engine.service is stopped"
    assert seen.cause.next_command == f"systemctl restart {UNIT}"


@pytest.mark.parametrize(
    ("tokens", "times", "id"),
    [
        (8192, (7190, 7210, 7230), "engine_busy"),
        (8192, (7190,), "engine_hangs"),
        (6, (7190, 7210, 7230), "engine_hangs"),
    ],
    ids=["a long prompt", "its last batch is long ago", "the questions of health checks"],
)
def test_a_busy_engine_is_not_to_be_restarted(tokens: int, times: tuple[int, ...], id: str) -> None:
    batch = "[2026-11-30 09:00:{:02} TP0] Prefill batch, #new-seq: 1, #new-token: {}, #cached-token: 0"
    seen = silent(503, {at: [batch.format(at - 7185, tokens)] for at in times})
    assert (seen.status, seen.cause and seen.cause.id) == (FAILED, id)
    assert (seen.cause and seen.cause.next_command == "ansible-playbook smoke.yml") == (id == "engine_busy")


def test_an_active_unit_whose_generations_fail_is_not_called_silent() -> None:
    seen = silent(500)
    assert seen.cause and (seen.cause.id, seen.cause.line) == ("generation_fails", "timed out")


def test_silence_counts_for_one_run_of_the_unit() -> None:
    seen = silent(script={7215: {"ActiveState": "deactivating"}, 7222: {**SERVING, "InvocationID": "run2"}}, wait=60)
    assert seen.status == FAILED
    assert "no answer for 41 s" in seen.detail


def test_processes_that_do_nothing_are_named() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        unit = Host().unit_of(process.pid)
        assert f"process {process.pid} (sleep) is stopped by a signal" in stuck_processes(unit)
        process.kill()


def test_one_call_looks_for_max_wait_only() -> None:
    systemd = ScriptedSystemd(STARTING)
    assert see(systemd, wait=10).status == STILL_STARTING
    assert 9 <= systemd.now <= 10


def test_time_counts_from_the_start_of_the_unit() -> None:
    systemd = ScriptedSystemd({**STARTING, "InactiveExitTimestampMonotonic": "2000000"}, now=50.0)
    seen = see(systemd, wait=0)
    assert seen.elapsed_s == 48
    assert seen.line() == "engine.service: importing libraries, 48 s since the start"


def test_a_failed_unit_ends_the_wait_with_the_cause() -> None:
    systemd = ScriptedSystemd(STARTING, script={5: ["Load weight begin.", OOM], 7: FAILED_STATE})
    seen = see(systemd, restarts_before=0)
    assert (seen.status, systemd.now) == (FAILED, 7)
    assert seen.cause and seen.cause.id == "gpu_out_of_memory"
    assert seen.cause.line == OOM
    assert "result exit-code" in seen.detail
    assert seen.last_lines[-1] == OOM


@pytest.mark.parametrize("row", [row for row in CAUSES if row.severity == "fatal"], ids=lambda row: row.id)
def test_an_engine_that_dies_with_a_known_line_is_explained_by_it(row: Cause) -> None:
    refused = ["[2026-11-30 09:00:00] Error in request: x", "MemoryError", "[2026-11-30 09:00:01] Prefill batch"]
    systemd = ScriptedSystemd(STARTING, script={5: ["Load weight begin.", *refused, row.sample], 7: FAILED_STATE})
    seen = see(systemd, restarts_before=0)
    assert (seen.status, systemd.now) == (FAILED, 7)
    assert seen.cause and (seen.cause.id, seen.cause.severity) == (row.id, "fatal")
    assert seen.cause.next_command and seen.cause.variable


FAKE = str(Path(__file__).parents[1] / "fakes" / "openai_server.py")


def dying(line: str) -> Readiness:
    """What is said of a server, as a process of its own, that prints a line and ends."""
    argv = [sys.executable, FAKE, "--fault", "dies_at_start", "--line", line]
    with ProcessUnit(UNIT, argv) as unit:
        return Watch(UNIT, Client("http://127.0.0.1:1"), 0, runner=unit.run, sleep=lambda _s: time.sleep(0.02)).wait(60)


@pytest.mark.parametrize("row", [row for row in CAUSES if row.severity == "fatal"], ids=lambda row: row.id)
def test_a_process_that_dies_with_a_known_line_is_explained_by_it(row: Cause) -> None:
    seen = dying(row.sample)
    assert (seen.status, seen.unit.exec_main_status) == (FAILED, 1)
    assert seen.cause and (seen.cause.id, seen.cause.severity) == (row.id, "fatal")
    assert seen.cause.line == quotable(row.sample)
    assert seen.cause.next_command and seen.cause.variable


def test_a_process_that_dies_with_an_unknown_line_shows_it() -> None:
    seen = dying("KeyError: 'model.layers.0'")
    assert (seen.status, seen.cause and (seen.cause.id, seen.cause.line)) == (
        FAILED,
        ("unknown", "KeyError: 'model.layers.0'"),
    )


def test_a_process_that_starts_slowly_is_neither_ready_nor_failed() -> None:
    argv = [sys.executable, "-c", "import time; print('Load weight begin.', flush=True); time.sleep(60)"]
    with ProcessUnit(UNIT, argv) as unit:
        watch = Watch(UNIT, Client("http://127.0.0.1:1"), 0, runner=unit.run, sleep=lambda _s: time.sleep(0.02))
        seen = watch.wait(2)
        while seen.phase == "importing libraries":
            seen = watch.wait(2)
    assert (seen.status, seen.phase, seen.detail) == (
        STILL_STARTING,
        "loading weights",
        "nothing listens on the port yet",
    )


def test_a_line_of_a_dying_engine_ends_the_wait_though_the_unit_lives_on() -> None:
    systemd = ScriptedSystemd(STARTING, script={5: ["Scheduler hit an exception: Traceback", OOM]})
    seen = see(systemd, restarts_before=0)
    assert seen.status == FAILED
    assert 10 <= systemd.now <= 13
    assert seen.cause and seen.cause.id == "gpu_out_of_memory"


def test_an_error_that_may_be_survived_is_shown_while_waiting() -> None:
    systemd = ScriptedSystemd(STARTING, script={5: ["ImportError: optional package"]})
    seen = see(systemd, wait=60, restarts_before=0)
    assert (seen.status, seen.detail) == (STILL_STARTING, "nothing yet; in the journal: ImportError: optional package")


def test_a_fatal_line_does_not_matter_when_the_engine_answers() -> None:
    systemd = ScriptedSystemd(STARTING, script={0: [OOM], 3: RUNNING})
    seen = see(systemd, answers_from=3, restarts_before=0)
    assert seen.status == READY
    assert [finding.id for finding in seen.warnings] == ["gpu_out_of_memory"]


@pytest.mark.parametrize("restarts_before", [0, None])
def test_a_restart_loop_is_a_failure_with_the_cause_of_the_first_run(restarts_before: int | None) -> None:
    waiting = {"ActiveState": "activating", "SubState": "auto-restart", "MainPID": "0", "Result": "exit-code"}
    systemd = ScriptedSystemd(STARTING, script={5: [OOM], 6: waiting})
    seen = see(systemd, restarts_before=restarts_before)
    assert (seen.status, systemd.now) == (FAILED, 6)
    assert seen.cause and seen.cause.id == "gpu_out_of_memory"


def test_a_restart_that_was_not_seen_is_found_by_the_counter() -> None:
    second = {**STARTING, "NRestarts": "1", "InvocationID": "run2"}
    systemd = ScriptedSystemd(STARTING, script={0.1: [OOM], 0.2: second, 0.3: ["Load weight begin."]})
    seen = see(systemd, restarts_before=0)
    assert (seen.status, systemd.now) == (FAILED, 1)
    assert "restarted 1 times" in seen.detail
    assert seen.cause and seen.cause.id == "gpu_out_of_memory"


def test_the_failed_run_is_found_without_having_watched_it() -> None:
    second = {**STARTING, "NRestarts": "1", "InvocationID": "run2"}
    systemd = ScriptedSystemd(STARTING, script={0.1: [OOM], 0.2: second, 0.3: ["Load weight begin."]}, now=1)
    seen = see(systemd, restarts_before=0)
    assert seen.status == FAILED
    assert seen.cause and seen.cause.id == "gpu_out_of_memory"


@pytest.mark.parametrize(
    "first",
    [RUNNING, {"ActiveState": "activating", "SubState": "auto-restart"}, {"ActiveState": "deactivating"}],
    ids=["crash not seen yet", "waiting", "dying"],
)
def test_the_recovery_after_a_crash_is_waited_for(first: dict[str, str]) -> None:
    waiting = {"ActiveState": "activating", "SubState": "auto-restart", "MainPID": "0"}
    second = {**STARTING, "NRestarts": "1", "InvocationID": "run2", "MainPID": "200"}
    systemd = ScriptedSystemd({**RUNNING, **first}, script={1: waiting, 6: second, 40: {"ActiveState": "active"}})
    seen = see(systemd, answers_from=39)
    assert (seen.status, systemd.now) == (READY, 40)


def test_a_second_crash_in_a_recovery_is_a_failure() -> None:
    waiting = {"ActiveState": "activating", "SubState": "auto-restart", "MainPID": "0"}
    second = {**STARTING, "NRestarts": "1", "InvocationID": "run2"}
    systemd = ScriptedSystemd(RUNNING, script={1: waiting, 6: second, 20: ["KeyError: 'x'"], 21: waiting})
    seen = see(systemd)
    assert (seen.status, systemd.now) == (FAILED, 21)
    assert seen.cause and seen.cause.line == "KeyError: 'x'"


def test_a_unit_that_does_not_exist() -> None:
    seen = see(ScriptedSystemd({"LoadState": "not-found"}))
    assert seen.status == FAILED
    assert "does not exist" in seen.detail


def test_a_unit_that_is_not_started() -> None:
    seen = see(ScriptedSystemd())
    assert (seen.status, seen.detail) == (FAILED, "the unit is not started: inactive (dead)")
    assert seen.cause and (seen.cause.id, seen.cause.next_command) == ("unit_stopped", f"systemctl start {UNIT}")


def test_a_unit_that_waits_in_the_queue_of_systemd() -> None:
    systemd = ScriptedSystemd({"Job": "12"}, script={5: {**RUNNING, "Job": ""}})
    assert see(systemd, answers_from=0).status == READY


def test_an_answer_of_the_old_configuration_does_not_count() -> None:
    running = {100: "old", 200: "new"}
    systemd = ScriptedSystemd(RUNNING, script={8: {**RUNNING, "MainPID": "200", "InvocationID": "run2"}})
    seen = see(systemd, answers_from=0, config_sha256="new", running_hash=running.get)
    assert (seen.status, systemd.now) == (READY, 8)


def test_the_old_configuration_is_named() -> None:
    seen = see(ScriptedSystemd(RUNNING), wait=2, answers_from=0, config_sha256="new", running_hash={100: "old"}.get)
    assert (seen.status, seen.phase) == (STILL_STARTING, "waiting for the wanted configuration")
    assert seen.detail == "process 100 runs configuration old, not new"


def test_a_refused_key_is_no_start_that_takes_long() -> None:
    looks = Watch(
        UNIT,
        Client("http://127.0.0.1:1"),
        runner=ScriptedSystemd(RUNNING).run,
        ask_once=lambda _client, _pid: Answer(REFUSED, "status 401", 401),
    )
    seen = looks.wait(600)
    assert (seen.status, seen.detail) == (FAILED, "it refuses the API key")
    assert seen.cause and seen.cause.next_command == f"systemctl restart {UNIT}"
    assert "sglang_serve_restart_policy: auto" in seen.cause.variable


BAR = (
    "Multi-thread loading shards:   0% Completed | 0/4 [00:00<?, ?it/s]\r"
    "Multi-thread loading shards:  50% Completed | 2/4 [00:04<00:00,  4.32s/it]"
)


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        ([], "importing libraries"),
        (["UserWarning: x"], "importing libraries"),
        (["[2026-11-30 00:08:32] server_args={'a': 1}"], "reading the configuration"),
        (["[2026-11-30 00:09:19] Init parallel begin."], "connecting the ranks"),
        (["[2026-11-30 00:09:26 TP3] Load weight begin. avail mem=20.58 GB"], "loading weights"),
        (["Load weight begin.", BAR], "loading weights, 50 %"),
        (["Load weight begin.", BAR, "Load weight end. elapsed=4.43 s"], "allocating the KV pool"),
        (["Memory pool end. avail mem=20.03 GB"], "preparing the scheduler"),
        (["Capture target decode CUDA graph begin. avail mem=9.13 GB"], "capturing CUDA graphs"),
        (["Capturing batches (bs=32 avail_mem=9.05 GB):  25%|##5       | 9/36"], "capturing CUDA graphs, 25 %"),
        (["Capture target decode CUDA graph end. elapsed=31.2 s"], "starting the HTTP server"),
        (["max_total_num_tokens=8192, chunked_prefill_size=4096"], "starting the HTTP server"),
        (["INFO:     Uvicorn running on http://127.0.0.1:30001"], "warming up"),
        (["The server is fired up and ready to roll!", "Prefill batch"], "answering its first requests"),
    ],
)
def test_phases(lines: list[str], phase: str) -> None:
    assert phase_of(lines) == phase
