# SPDX-License-Identifier: GPL-3.0-or-later
"""Is a unit of the engine ready, still starting, or failed? Its unit state, its journal and a generation decide.

The order of trust: a unit that systemd calls failed is failed; a generation that answers is ready; a line that only a
dying engine prints ends the wait before any time limit does. A unit that is active has answered its own probe before:
when it gives no answer any more it does not start, it hangs.
"""

from __future__ import annotations

import re
import time
import typing as t
from dataclasses import dataclass, field

from . import systemd
from .host import Host
from .http import Client
from .journal_causes import FATAL, WARNING, Finding, classify, quotable, root_cause, strip_prefix
from .probe import REFUSED, Answer, Capacity, ask_unit, capacity

READY = "ready"
STARTING = "starting"
FAILED = "failed"

POLL_S = 1.0
# An engine that is going down gets this long to end by itself, so that its last lines are in the report.
GOING_DOWN_S = 6.0
LAST_LINES = 20
# An active unit that gives no answer for so long hangs. The engine's own health check takes 20 s to say no.
SILENT_S = 40.0
# The scheduler's line about a batch that is part of a long prompt; a question of a health check is shorter.
_LONG_BATCH = re.compile(r"^Prefill batch\b.*#new-token: \d{4,}")
# States of a process in which it does nothing, and their words.
_STUCK = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting in the kernel", "Z": "dead"}

# Phases of a start, in order. The newest line that matches names the phase.
_PHASES: tuple[tuple[t.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"server_args=", "reading the configuration"),
        (r"Init torch distributed begin|Init parallel begin", "connecting the ranks"),
        (r"Load weight begin|Loading safetensors|loading shards", "loading weights"),
        (r"Load weight end", "allocating the KV pool"),
        (r"Memory pool end", "preparing the scheduler"),
        (r"Capture .*[Gg]raph.* begin|Capturing batches", "capturing CUDA graphs"),
        (r"Capture .*[Gg]raph.* end|max_total_num_tokens=", "starting the HTTP server"),
        (r"Uvicorn running on", "warming up"),
        (r"The server is fired up and ready to roll", "answering its first requests"),
    )
)
_FIRST_PHASE = "importing libraries"
# Progress bars redraw with a carriage return and reach the journal as one line: the last number counts.
_PERCENT = re.compile(r"(\d{1,3})%(?:\||\s+Completed)")


def phase_of(messages: t.Sequence[str]) -> str:
    """The phase of a start from its journal, with the percentage of a progress bar where there is one."""
    for message in reversed(messages):
        text = strip_prefix(message)
        for pattern, phase in _PHASES:
            if pattern.search(text):
                percent = _PERCENT.findall(text)
                return f"{phase}, {int(percent[-1])} %" if percent else phase
    return _FIRST_PHASE


def stuck_processes(unit: str, host: Host | None = None) -> str:
    """The processes of a unit that do nothing, in words; empty when there is none."""
    host, found = host or Host(), []
    for pid in host.pids():
        # The name, in parentheses, may hold anything; the state follows it.
        name, _end, rest = host.read(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
        if rest[1:2] in _STUCK and host.unit_of(pid) == unit:
            found.append(f"process {pid} ({quotable(name)}) is {_STUCK[rest[1:2]]}")
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def duration(seconds: float) -> str:
    """Whole seconds, minutes or hours for people."""
    for size, word in ((3600, "h"), (60, "min")):
        if round(seconds / size) >= 2:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True)
class Readiness:
    """The state of a unit at one moment. cause is set when status is failed."""

    status: str
    phase: str
    detail: str
    unit: systemd.UnitState
    elapsed_s: float
    capacity: Capacity = field(default_factory=Capacity)
    cause: Finding | None = None
    last_lines: tuple[str, ...] = ()
    warnings: tuple[Finding, ...] = ()

    def line(self) -> str:
        """One line of progress."""
        return f"{self.unit.name}: {self.phase}, {self.elapsed_s:.0f} s since the start"


class Watch:
    """Looks at one unit again and again.

    restarts_before is the restart counter before the start: a higher value means that a start has failed. None takes
    it from the first look. config_sha256 is the configuration that must be running; None accepts any.
    """

    def __init__(
        self,
        unit: str,
        client: Client,
        restarts_before: int | None = None,
        config_sha256: str | None = None,
        runner: systemd.Runner = systemd.ask_command,
        clock: t.Callable[[], float] = time.monotonic,
        sleep: t.Callable[[float], None] = time.sleep,
        running_hash: t.Callable[[int], str | None] = systemd.running_config_sha256,
        ask_once: t.Callable[[Client, int], Answer] = ask_unit,
        ask_capacity: t.Callable[[Client], Capacity] = capacity,
        stuck: t.Callable[[str], str] = stuck_processes,
    ) -> None:
        self.unit = unit
        self.client = client
        self.restarts_before = restarts_before
        self.config_sha256 = config_sha256
        self._runner = runner
        self._clock = clock
        self._sleep = sleep
        self._running_hash = running_hash
        self._ask = ask_once
        self._capacity = ask_capacity
        self._stuck = stuck
        self._silent_since: float | None = None
        self._last_batch = ""
        self._going_down_since: float | None = None
        self._previous_run = ""

    def wait(self, max_wait: float) -> Readiness:
        """Look until the unit is ready or failed, at most max_wait seconds; the last look is the result.

        Whether a unit that has served hangs is seen to the end, which takes SILENT_S and the last question's time.
        """
        end = self._clock() + max_wait
        while True:
            seen = self.look()
            if seen.status != STARTING or (self._clock() + POLL_S > end and self._silent_since is None):
                return seen
            self._sleep(POLL_S)

    def look(self) -> Readiness:
        state = systemd.show(self.unit, self._runner)
        if self.restarts_before is None:
            self.restarts_before = _baseline(state)
        failed = self._failed_by_state(state)
        if failed:
            return self._failure(state, failed)
        if state.sub_state == "auto-restart" or state.active_state in ("deactivating", "inactive"):
            self._silent_since = None
            return self._starting(state, "waiting for systemd to start it", state.words(), [])
        foreign = self._foreign_process(state)
        if foreign:
            self._silent_since = None
            return self._starting(state, "waiting for the wanted configuration", foreign, [])
        asked_at = self._clock()
        answer = self._ask(self.client, state.main_pid)
        if answer.ok and state.active_state == "active":
            return self._ready(state, answer)
        if answer.state == REFUSED:
            return self._refusal(state, answer)
        if state.n_restarts > self.restarts_before:
            return self._failure(state, f"its start failed and systemd restarted it: {state.words()}")
        lines = systemd.journal_of_run(state.invocation_id, self._runner)
        if state.active_state == "active":
            if self._silent_since is None or self._previous_run != state.invocation_id:
                self._silent_since, self._last_batch = asked_at, _last_batch(lines)
            self._previous_run = state.invocation_id
            return self._silence(state, answer, lines)
        self._silent_since = None
        self._previous_run = state.invocation_id
        if answer.ok:
            return self._starting(state, "answering, waiting for the unit's own probe", answer.detail, lines)
        findings = classify([(line.message, line.priority) for line in lines], self.unit)
        # A cause may be printed and survived, such as an optional package that is missing. A consequence is printed
        # only by an engine that is going down.
        if any(finding.consequence for finding in findings):
            now = self._clock()
            self._going_down_since = now if self._going_down_since is None else self._going_down_since
            if now - self._going_down_since >= GOING_DOWN_S:
                return self._failure(state, "its journal says that the engine is going down")
        phase = phase_of([line.message for line in lines])
        suspect = root_cause(findings)
        detail = f"{answer.detail}; in the journal: {suspect.line}" if suspect else answer.detail
        return self._starting(state, phase, detail, lines)

    def _failed_by_state(self, state: systemd.UnitState) -> str | None:
        """Why systemd's own view already means failure, in words."""
        if not state.exists:
            return f"the unit {self.unit} does not exist on this host"
        if state.active_state == "failed":
            return f"the unit failed: {state.words()}"
        if state.active_state == "inactive" and not state.job_queued:
            return f"the unit is not started: {state.words()}"
        if state.sub_state == "auto-restart" and state.n_restarts >= (self.restarts_before or 0):
            return f"its start failed and systemd is about to start it again: {state.words()}"
        return None

    def _foreign_process(self, state: systemd.UnitState) -> str | None:
        if self.config_sha256 is None or not state.main_pid:
            return None
        running = self._running_hash(state.main_pid)
        if running == self.config_sha256:
            return None
        return f"process {state.main_pid} runs configuration {running or 'without a hash'}, not {self.config_sha256}"

    def _ready(self, state: systemd.UnitState, answer: Answer) -> Readiness:
        lines = systemd.journal_of_run(state.invocation_id, self._runner)
        findings = classify([(line.message, line.priority) for line in lines], self.unit)
        return Readiness(
            status=READY,
            phase="ready",
            detail=answer.detail,
            unit=state,
            elapsed_s=self._elapsed(state),
            capacity=self._capacity(self.client),
            warnings=tuple(finding for finding in findings if finding.severity != "benign"),
        )

    def _starting(
        self, state: systemd.UnitState, phase: str, detail: str, lines: t.Sequence[systemd.JournalLine]
    ) -> Readiness:
        return Readiness(STARTING, phase, detail, state, self._elapsed(state), last_lines=_last(lines))

    def _silence(self, state: systemd.UnitState, answer: Answer, lines: t.Sequence[systemd.JournalLine]) -> Readiness:
        """An active unit that gives no answer: it served before, because active means that its probe was answered."""
        now = self._clock()
        silent_s = now - (now if self._silent_since is None else self._silent_since)
        served = f"served before (active for {duration(now - state.active_monotonic_s)})"
        if silent_s < SILENT_S:
            return self._starting(state, f"{served}, no answer for {silent_s:.0f} s", answer.detail, lines)
        severity, variable, command = FATAL, "", f"systemctl restart {self.unit}"
        if _last_batch(lines) != self._last_batch:
            id, cause, severity = "engine_busy", "its batches go on: it works on long prompts", WARNING
            variable, command = "chunked-prefill-size, sglang_serve_max_running_requests", "ansible-playbook smoke.yml"
        elif answer.status in (None, 503):
            id, cause = "engine_hangs", "it served before and is silent now: it hangs"
            stuck = self._stuck(self.unit)
            cause += f"; {stuck}" if stuck else ""
        else:
            id, cause = "generation_fails", "it served before, and what answers now is no generation of its own"
            command = f"journalctl -u {self.unit} -n 200 --no-pager; ss -ltnp 'sport = :{self.client.port}'"
        finding = Finding(id, severity, cause, variable, command, answer.detail)
        why = f"{served}, no answer for {silent_s:.0f} s: {answer.detail}"
        return Readiness(FAILED, "failed", why, state, self._elapsed(state), cause=finding, last_lines=_last(lines))

    def _refusal(self, state: systemd.UnitState, answer: Answer) -> Readiness:
        cause = Finding(
            id="api_key_refused",
            severity=FATAL,
            cause="the running process was started with another API key than the one on the host",
            variable="sglang_serve_api_key, or sglang_serve_restart_policy: auto",
            next_command=f"systemctl restart {self.unit}",
            line=answer.detail,
        )
        return Readiness(FAILED, "failed", "it refuses the API key", state, self._elapsed(state), cause=cause)

    def _failure(self, state: systemd.UnitState, why: str) -> Readiness:
        lines = self._lines_of_failed_run(state)
        findings = classify([(line.message, line.priority) for line in lines], self.unit)
        if state.exists and state.active_state == "inactive":
            # Restart= brings back whatever ends by itself: somebody stopped it.
            start, cause = f"systemctl start {self.unit}", "the unit was stopped, or was never started"
            findings = [Finding("unit_stopped", FATAL, cause, "", start, state.words())]
        return Readiness(
            status=FAILED,
            phase="failed",
            detail=why,
            unit=state,
            elapsed_s=self._elapsed(state),
            cause=root_cause(findings),
            last_lines=_last(lines),
        )

    def _lines_of_failed_run(self, state: systemd.UnitState) -> list[systemd.JournalLine]:
        """The journal of the run that failed: the current one, or the one before when a new one has begun."""
        if not state.exists:
            return []
        restarted = state.n_restarts > (self.restarts_before or 0) and state.sub_state != "auto-restart"
        if not restarted:
            return systemd.journal_of_run(state.invocation_id, self._runner)
        if self._previous_run and self._previous_run != state.invocation_id:
            return systemd.journal_of_run(self._previous_run, self._runner)
        older = [
            line
            for line in systemd.journal_of_unit(self.unit, self._runner)
            if line.invocation_id and line.invocation_id != state.invocation_id
        ]
        return systemd.journal_of_run(older[-1].invocation_id, self._runner) if older else []

    def _elapsed(self, state: systemd.UnitState) -> float:
        return max(0.0, self._clock() - state.started_monotonic_s) if state.started_monotonic_s else 0.0


def _baseline(first: systemd.UnitState) -> int:
    """The restart counter to compare with when the caller gave none.

    A unit that is starting must not be restarted. One that ran, or that systemd is about to start again after a crash,
    may be restarted once: that is the recovery that is waited for.
    """
    starting = first.active_state == "activating" and first.sub_state != "auto-restart"
    return first.n_restarts + (0 if starting else 1)


def _last(lines: t.Sequence[systemd.JournalLine], count: int = LAST_LINES) -> tuple[str, ...]:
    return tuple(quotable(line.message) for line in lines[-count:])


def _last_batch(lines: t.Sequence[systemd.JournalLine]) -> str:
    """The newest line of the scheduler about its work on a long prompt, empty without one."""
    return next((line.message for line in reversed(lines) if _LONG_BATCH.match(strip_prefix(line.message))), "")
