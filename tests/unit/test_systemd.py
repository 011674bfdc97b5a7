# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from ops.systemd import (
    CommandResult,
    SystemdError,
    UnitState,
    journal_of_run,
    journal_of_unit,
    parse_journal,
    parse_show,
    process_environment,
    run_command,
    running_config_sha256,
    show,
)

# `systemctl show sglang-unified.service` while its ExecStartPost= probes, systemd 252.
STARTING = """\
Type=exec
NRestarts=1
Result=success
MainPID=4711
ExecMainCode=0
ExecMainStatus=0
InvocationID=8f2d5c7c1d1a4c5e9d0e5a7b3c1f0a11
LoadState=loaded
ActiveState=activating
SubState=start-post
FragmentPath=/etc/systemd/system/sglang-unified.service
UnitFileState=enabled
InactiveExitTimestampMonotonic=81234567
NeedDaemonReload=no
Job=1234
"""
MISSING = """\
NRestarts=0
MainPID=0
Result=success
InvocationID=
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=
InactiveExitTimestampMonotonic=0
NeedDaemonReload=no
"""


def answering(stdout: str, rc: int = 0, stderr: str = "") -> tuple[list[list[str]], t.Any]:
    calls: list[list[str]] = []

    def runner(argv: t.Sequence[str]) -> CommandResult:
        calls.append(list(argv))
        return CommandResult(rc, stdout, stderr)

    return calls, runner


def test_a_starting_unit() -> None:
    calls, runner = answering(STARTING)
    state = show("sglang-unified.service", runner)
    assert calls[0][:3] == ["systemctl", "show", "sglang-unified.service"]
    assert state == UnitState(
        name="sglang-unified.service",
        load_state="loaded",
        active_state="activating",
        sub_state="start-post",
        unit_file_state="enabled",
        fragment_path="/etc/systemd/system/sglang-unified.service",
        type="exec",
        main_pid=4711,
        n_restarts=1,
        invocation_id="8f2d5c7c1d1a4c5e9d0e5a7b3c1f0a11",
        started_monotonic_s=81.234567,
        job_queued=True,
    )
    assert state.exists and state.up
    assert state.words() == "activating (start-post), restarted 1 times"


def test_a_missing_unit() -> None:
    state = parse_show("no.service", MISSING)
    assert not state.exists
    assert not state.up


@pytest.mark.parametrize(
    ("code", "status", "result", "words"),
    [
        ("1", "1", "exit-code", "failed (failed), result exit-code, main process exited with status 1"),
        ("2", "9", "signal", "failed (failed), result signal, main process was killed by signal 9"),
        ("3", "11", "core-dump", "failed (failed), result core-dump, main process dumped core on signal 11"),
        ("0", "0", "timeout", "failed (failed), result timeout"),
    ],
)
def test_a_failed_unit_in_words(code: str, status: str, result: str, words: str) -> None:
    text = f"ActiveState=failed\nSubState=failed\nResult={result}\nExecMainCode={code}\nExecMainStatus={status}\n"
    assert parse_show("a.service", text).words() == words


def test_a_command_that_fails() -> None:
    _calls, runner = answering("", 1, "Failed to connect to bus: Host is down\n")
    with pytest.raises(SystemdError, match=r"systemctl show a\.service .* status 1: Failed to connect to bus"):
        show("a.service", runner)


def test_a_host_without_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SystemdError, match="systemctl is not installed"):
        run_command(["systemctl", "show"])


def entry(message: t.Any, **fields: t.Any) -> str:
    return json.dumps({"MESSAGE": message, "__REALTIME_TIMESTAMP": "1795997372000000", "PRIORITY": "6", **fields})


def test_journal_lines() -> None:
    text = "\n".join(
        [
            entry("a", _SYSTEMD_INVOCATION_ID="1", __CURSOR="s=1"),
            entry("Main process exited", INVOCATION_ID="1", PRIORITY="5"),
            entry([226, 150, 136, 13, 98]),
            entry(None),
            "not JSON",
            "",
        ]
    )
    found = parse_journal(text)
    assert [line.message for line in found] == ["a", "Main process exited", "\u2588\rb"]
    assert [line.invocation_id for line in found] == ["1", "1", ""]
    assert [line.priority for line in found] == [6, 5, 6]
    assert found[0].time_s == 1795997372.0


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (entry(["a", "b"]), ["a\nb"]),
        (entry([[226, 150, 136], "b"]), ["\u2588\nb"]),
        (entry("x", PRIORITY=["3", "4"]), ["x"]),
        (entry("x", PRIORITY="high"), ["x"]),
        (entry("x", PRIORITY=None), ["x"]),
        (entry("x", __REALTIME_TIMESTAMP=None), ["x"]),
        (entry("x", _SYSTEMD_INVOCATION_ID=["1", "2"]), ["x"]),
        ('{"MESSAGE": "a\u2028b"}', ["a\u2028b"]),
        (entry([300]), []),
        (entry([["a"]]), ["a"]),
        (entry([]), []),
        (entry({"a": 1}), []),
        ("[1]", []),
        ("5", []),
        ("null", []),
        ("[" * 100_000, []),
    ],
)
def test_an_odd_journal_entry_never_ends_the_look(raw: str, found: list[str]) -> None:
    after = parse_journal(f"{raw}\n{entry('after')}")
    assert [line.message for line in after] == [*found, "after"]


def test_an_odd_field_has_its_first_or_its_usual_value() -> None:
    line, usual = parse_journal(f"{entry('x', PRIORITY=['3', '4'])}\n{entry('x', PRIORITY=None)}")
    assert (line.priority, usual.priority) == (3, 6)


@pytest.mark.parametrize("look", [journal_of_run, journal_of_unit])
def test_long_messages_are_asked_for(look: t.Callable[..., t.Any]) -> None:
    calls, runner = answering(entry("a" * 5000))
    assert len(look("abc", runner)[0].message) == 5000
    assert "--all" in calls[0]


def test_journal_of_one_run_asks_for_the_processes_and_for_systemd_about_them() -> None:
    calls, runner = answering(entry("a"))
    assert len(journal_of_run("abc", runner, last=50)) == 1
    assert calls[0][-3:] == ["_SYSTEMD_INVOCATION_ID=abc", "+", "INVOCATION_ID=abc"]
    assert "--lines=50" in calls[0]


def test_journal_of_no_run_is_empty_and_asks_nothing() -> None:
    calls, runner = answering("")
    assert journal_of_run("", runner) == []
    assert calls == []


def test_journal_of_a_unit() -> None:
    calls, runner = answering(entry("a"))
    assert [line.message for line in journal_of_unit("a.service", runner)] == ["a"]
    assert "--unit=a.service" in calls[0]


@pytest.mark.parametrize(("environment", "found"), [({"OPS_CONFIG_SHA256": "ab=c"}, "ab=c"), ({}, None)])
def test_the_hash_of_a_real_process(environment: dict[str, str], found: str | None) -> None:
    env = {**os.environ, **environment}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as process:
        assert running_config_sha256(process.pid) == found
        process.communicate(b"\n")
    assert process_environment(process.pid) is None
    assert running_config_sha256(process.pid) is None
    assert running_config_sha256(0) is None


def test_a_process_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> t.NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError):
        running_config_sha256(1)
