# SPDX-License-Identifier: GPL-3.0-or-later
"""A systemd with one unit and a clock, for tests that must not wait: it answers the very commands that a runner gets.

Time passes only by sleep(). `script` maps seconds to what happens then: keyword changes of the unit's properties, or
lines for the journal of the current run.
"""

from __future__ import annotations

import json
import typing as t
from dataclasses import dataclass, field

from ops.systemd import CommandResult

DEFAULTS = {
    "LoadState": "loaded",
    "ActiveState": "inactive",
    "SubState": "dead",
    "UnitFileState": "enabled",
    "NeedDaemonReload": "no",
    "FragmentPath": "/etc/systemd/system/engine.service",
    "Type": "exec",
    "Result": "success",
    "MainPID": "0",
    "NRestarts": "0",
    "ExecMainCode": "0",
    "ExecMainStatus": "0",
    "InvocationID": "",
    "InactiveExitTimestampMonotonic": "0",
    "ActiveEnterTimestampMonotonic": "0",
    "Job": "",
}
RUNNING = {"ActiveState": "active", "SubState": "running", "MainPID": "100", "InvocationID": "run1"}
STARTING = {**RUNNING, "ActiveState": "activating", "SubState": "start-post"}


@dataclass
class ScriptedSystemd:
    """unit holds the properties now; on maps a systemctl verb to the properties after it, or to a CommandResult."""

    unit: dict[str, str] = field(default_factory=dict)
    script: dict[float, dict[str, str] | list[str]] = field(default_factory=dict)
    on: dict[str, dict[str, str] | CommandResult] = field(default_factory=dict)
    now: float = 0.0
    calls: list[list[str]] = field(default_factory=list)
    journal: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unit = {**DEFAULTS, **self.unit}
        self._play()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._play()

    def _play(self) -> None:
        for when in sorted(key for key in self.script if key <= self.now):
            event = self.script.pop(when)
            if isinstance(event, dict):
                self.unit.update(event)
            else:
                self.journal += [(self.unit["InvocationID"], line) for line in event]

    def run(self, argv: t.Sequence[str]) -> CommandResult:
        self.calls.append(list(argv))
        if argv[0] == "journalctl":
            return CommandResult(0, self._journal(argv), "")
        assert argv[0] == "systemctl"
        verb = argv[1]
        if verb == "show":
            return CommandResult(0, "".join(f"{key}={value}\n" for key, value in self.unit.items()), "")
        effect = self.on.get(verb, {})
        if isinstance(effect, CommandResult):
            return effect
        self.unit.update(effect)
        return CommandResult(0, "", "")

    def _journal(self, argv: t.Sequence[str]) -> str:
        runs = [word.split("=", 1)[1] for word in argv if word.startswith("_SYSTEMD_INVOCATION_ID=")]
        last = next(int(word.split("=", 1)[1]) for word in argv if word.startswith("--lines="))
        chosen = [(run, line) for run, line in self.journal if not runs or run in runs][-last:]
        entries = [{"MESSAGE": line, "PRIORITY": "6", "_SYSTEMD_INVOCATION_ID": run} for run, line in chosen]
        return "\n".join(json.dumps(entry) for entry in entries)

    @property
    def verbs(self) -> list[str]:
        """The systemctl commands that change something, without the unit's name."""
        changing = [call for call in self.calls if call[0] == "systemctl" and call[1] != "show"]
        return [" ".join(word for word in call[1:] if not word.endswith(".service")) for call in changing]
