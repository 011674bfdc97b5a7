# SPDX-License-Identifier: GPL-3.0-or-later
"""What systemctl, journalctl and /proc say about a unit, as dataclasses.

Every call takes a Runner, so that tests can answer with recorded output. Nothing here decides anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import typing as t
from dataclasses import dataclass

CONFIG_HASH_VARIABLE = "OPS_CONFIG_SHA256"

UNIT_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "NeedDaemonReload",
    "FragmentPath",
    "Type",
    "Result",
    "MainPID",
    "NRestarts",
    "ExecMainCode",
    "ExecMainStatus",
    "InvocationID",
    "InactiveExitTimestampMonotonic",
    "ActiveEnterTimestampMonotonic",
    "Job",
)

# Without --all, journalctl answers null for a message above 4,096 bytes.
_JOURNALCTL = ("journalctl", "--quiet", "--no-pager", "--all", "--output=json")
# A question to systemd or to the journal is answered within this; what starts or stops a unit takes longer.
QUERY_S = 30.0
_EMPTY_ENVIRONMENT_TRIES = 10
_EMPTY_ENVIRONMENT_PAUSE_S = 0.02

# CLD_* codes that systemd reports as ExecMainCode (man 2 waitid).
_EXIT_CODES = {"1": "exited with status", "2": "was killed by signal", "3": "dumped core on signal"}


class CommandResult(t.NamedTuple):
    rc: int
    stdout: str
    stderr: str


Runner = t.Callable[[t.Sequence[str]], CommandResult]


class SystemdError(Exception):
    """systemctl or journalctl itself failed; the text holds the command and what it said."""


def run_command(argv: t.Sequence[str], timeout: float | None = None) -> CommandResult:
    """The real runner: C locale, no pager. Without a timeout (seconds) systemd's own limits end it."""
    env = {**os.environ, "LC_ALL": "C", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"}
    try:
        done = subprocess.run(list(argv), capture_output=True, env=env, check=False, timeout=timeout)
    except FileNotFoundError:
        raise SystemdError(f"{argv[0]} is not installed; this host has no systemd") from None
    except subprocess.TimeoutExpired:
        raise SystemdError(f"{' '.join(argv)} did not end within {timeout:g} s") from None
    return CommandResult(
        done.returncode,
        done.stdout.decode("utf-8", errors="replace"),
        done.stderr.decode("utf-8", errors="replace"),
    )


def ask_command(argv: t.Sequence[str]) -> CommandResult:
    """The runner for what only asks: a systemd that hangs is an error in time."""
    return run_command(argv, QUERY_S)


def checked(runner: Runner, argv: t.Sequence[str]) -> str:
    result = runner(argv)
    if result.rc != 0:
        said = (result.stderr or result.stdout).strip()
        words = " ".join(argv[:3]) + (" ..." if len(argv) > 3 else "")
        raise SystemdError(f"{words} ended with status {result.rc}: {said}")
    return result.stdout


@dataclass(frozen=True)
class UnitState:
    """One unit as `systemctl show` sees it."""

    name: str
    load_state: str = "not-found"
    active_state: str = "inactive"
    sub_state: str = "dead"
    unit_file_state: str = ""
    need_daemon_reload: bool = False
    fragment_path: str = ""
    type: str = ""
    result: str = "success"
    main_pid: int = 0
    n_restarts: int = 0
    exec_main_code: str = "0"
    exec_main_status: int = 0
    invocation_id: str = ""
    started_monotonic_s: float = 0.0
    active_monotonic_s: float = 0.0
    job_queued: bool = False

    @property
    def exists(self) -> bool:
        return self.load_state not in ("not-found", "")

    @property
    def up(self) -> bool:
        """Running, starting or reloading: a process of the unit exists or soon will."""
        return self.active_state in ("active", "activating", "reloading")

    def words(self) -> str:
        """The state in one line for an operator."""
        text = f"{self.active_state} ({self.sub_state})"
        if self.result not in ("success", ""):
            text += f", result {self.result}"
        if self.exec_main_code in _EXIT_CODES:
            text += f", main process {_EXIT_CODES[self.exec_main_code]} {self.exec_main_status}"
        if self.n_restarts:
            text += f", restarted {self.n_restarts} times"
        return text


def parse_show(name: str, text: str) -> UnitState:
    """Parse the KEY=VALUE lines of `systemctl show`."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def number(key: str) -> int:
        value = values.get(key, "")
        return int(value) if value.isdigit() else 0

    return UnitState(
        name=name,
        load_state=values.get("LoadState", "not-found"),
        active_state=values.get("ActiveState", "inactive"),
        sub_state=values.get("SubState", "dead"),
        unit_file_state=values.get("UnitFileState", ""),
        need_daemon_reload=values.get("NeedDaemonReload") == "yes",
        fragment_path=values.get("FragmentPath", ""),
        type=values.get("Type", ""),
        result=values.get("Result", "success"),
        main_pid=number("MainPID"),
        n_restarts=number("NRestarts"),
        exec_main_code=values.get("ExecMainCode", "0"),
        exec_main_status=number("ExecMainStatus"),
        invocation_id=values.get("InvocationID", ""),
        started_monotonic_s=number("InactiveExitTimestampMonotonic") / 1e6,
        active_monotonic_s=number("ActiveEnterTimestampMonotonic") / 1e6,
        job_queued=number("Job") > 0,
    )


def show(name: str, runner: Runner = ask_command) -> UnitState:
    argv = ["systemctl", "show", name, "--property=" + ",".join(UNIT_PROPERTIES)]
    return parse_show(name, checked(runner, argv))


@dataclass(frozen=True)
class JournalLine:
    """One journal entry of a unit. priority is syslog's: 3 and below are errors."""

    message: str
    time_s: float = 0.0
    priority: int = 6
    invocation_id: str = ""


def parse_journal(text: str) -> list[JournalLine]:
    """Parse `journalctl -o json`: one object a line; a message that is no UTF-8 text comes as a list of bytes.

    A field that an entry has more than once comes as a list of its values.
    """
    lines = []
    # Not splitlines(): it also divides at characters that stand in a message as they are, such as U+2028.
    for raw in text.split("\n"):
        try:
            entry = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        message = _message(entry.get("MESSAGE")) if isinstance(entry, dict) else None
        if message is None:
            continue
        run = entry.get("_SYSTEMD_INVOCATION_ID") or entry.get("INVOCATION_ID")
        lines.append(
            JournalLine(
                message=message,
                time_s=_number(entry.get("__REALTIME_TIMESTAMP"), 0) / 1e6,
                priority=_number(entry.get("PRIORITY"), 6),
                invocation_id=str(_first(run) or ""),
            )
        )
    return lines


def _first(value: t.Any) -> t.Any:
    return value[0] if isinstance(value, list) and value else value


def _message(value: t.Any) -> str | None:
    """The text of a MESSAGE field: a text, the bytes of one, or several of these."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    if value and all(isinstance(one, int) and 0 <= one < 256 for one in value):
        return bytes(value).decode("utf-8", errors="replace")
    texts = [text for text in map(_message, value) if text is not None]
    return "\n".join(texts) if texts else None


def _number(value: t.Any, default: int) -> int:
    try:
        return int(_first(value))
    except (TypeError, ValueError):
        return default


def journal_of_run(invocation_id: str, runner: Runner = ask_command, last: int = 4000) -> list[JournalLine]:
    """The lines of one run of a unit: its processes' own and systemd's about it."""
    if not invocation_id:
        return []
    argv = [*_JOURNALCTL, f"--lines={last}"]
    argv += [f"_SYSTEMD_INVOCATION_ID={invocation_id}", "+", f"INVOCATION_ID={invocation_id}"]
    return parse_journal(checked(runner, argv))


def journal_of_unit(name: str, runner: Runner = ask_command, last: int = 400) -> list[JournalLine]:
    """The newest lines of a unit, over all its runs."""
    argv = [*_JOURNALCTL, f"--lines={last}", f"--unit={name}"]
    return parse_journal(checked(runner, argv))


def process_environment(pid: int, proc: str = "/proc") -> dict[str, str] | None:
    """The environment that a process was started with; None when it is gone. Raises PermissionError.

    While a process is being replaced by another program, the kernel shows an empty environment for a moment.
    """
    raw = b""
    for _attempt in range(_EMPTY_ENVIRONMENT_TRIES):
        try:
            with open(f"{proc}/{pid}/environ", "rb") as handle:
                raw = handle.read()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if raw:
            break
        time.sleep(_EMPTY_ENVIRONMENT_PAUSE_S)
    text = raw.decode("utf-8", errors="replace")
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def running_config_sha256(pid: int, proc: str = "/proc") -> str | None:
    """The configuration hash that a process was started with; None when it has none or is gone."""
    environment = process_environment(pid, proc) if pid else None
    return environment.get(CONFIG_HASH_VARIABLE) if environment else None
