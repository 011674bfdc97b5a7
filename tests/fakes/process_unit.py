# SPDX-License-Identifier: GPL-3.0-or-later
"""A unit whose main process is a real one: systemctl and journalctl as a runner gets them, from the process itself.

What the process prints is the journal; its exit status is the unit's state, and is said as systemd says it.
"""

from __future__ import annotations

import json
import subprocess
import threading
import typing as t

from ops.systemd import CommandResult
from scripted_systemd import DEFAULTS, STARTING

RUN = "run1"


class ProcessUnit:
    """The unit of a command, while it starts and after it has ended; a context manager that ends the process."""

    def __init__(self, name: str, argv: t.Sequence[str]) -> None:
        self.name = name
        self._printed: list[str] = []
        self._process = subprocess.Popen(list(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ProcessUnit:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as printed:
            self._printed += (line.rstrip("\n") for line in printed)

    def run(self, argv: t.Sequence[str]) -> CommandResult:
        status = self._process.poll()
        if status is not None:
            self._reader.join()  # what a process has printed is in the journal before systemd says that it ended
        if argv[0] == "journalctl":
            return CommandResult(0, self._journal(status), "")
        assert tuple(argv[:2]) == ("systemctl", "show")
        unit = {**DEFAULTS, **STARTING, "InvocationID": RUN, "MainPID": str(self._process.pid)}
        if status is not None:
            ended = {"ExecMainCode": "1", "ExecMainStatus": str(status), "MainPID": "0"}
            unit |= {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", **ended}
        return CommandResult(0, "".join(f"{key}={value}\n" for key, value in unit.items()), "")

    def _journal(self, status: int | None) -> str:
        lines = [(line, 6) for line in list(self._printed)]
        if status:
            words = f"{self.name}: Main process exited, code=exited, status={status}/FAILURE"
            lines += [(words, 4), (f"{self.name}: Failed with result 'exit-code'.", 4)]
        entries = [{"MESSAGE": line, "PRIORITY": str(level), "_SYSTEMD_INVOCATION_ID": RUN} for line, level in lines]
        return "\n".join(map(json.dumps, entries))
