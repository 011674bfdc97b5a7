# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring a systemd unit to a wanted state: decide from what is seen, then act.

A restart follows from the state (the running process has another configuration hash than the wanted one), never from
an event such as a changed file. A play that was interrupted between the file and the restart is healed by the next.
"""

from __future__ import annotations

import time
import typing as t
from dataclasses import dataclass, replace

from . import systemd
from .journal_causes import Finding, classify, quotable, root_cause
from .systemd import UnitState

STARTED = "started"
STOPPED = "stopped"
AUTO = "auto"
DEFER = "defer"

POLL_S = 0.25
# systemd answers a queued job within this time on a sane host; the start itself is not waited for here.
JOB_PICKUP_S = 10.0
LAST_LINES = 20

# Unit file states in which `systemctl enable` has nothing to do or no meaning.
_NOT_ENABLABLE = ("static", "indirect", "generated", "transient", "alias", "linked", "linked-runtime")


@dataclass(frozen=True)
class Wanted:
    """What the operator wants of one unit. enabled None leaves that as it is."""

    name: str
    state: str = STARTED
    enabled: bool | None = True
    config_sha256: str | None = None
    restart_policy: str = AUTO


@dataclass(frozen=True)
class Plan:
    """Verbs in the order in which they run, why, and whether a wanted restart is left for later."""

    actions: tuple[str, ...]
    reason: str
    restart_pending: bool = False

    @property
    def changed(self) -> bool:
        return bool(self.actions)


def decide(seen: UnitState, running_sha256: str | None, wanted: Wanted) -> Plan:
    """What to do about a unit. running_sha256 is the hash that its main process was started with."""
    actions: list[str] = []
    reasons: list[str] = []
    pending = False
    if seen.need_daemon_reload:
        actions.append("daemon-reload")
        reasons.append("the unit file changed on disk")
    if wanted.enabled is True and seen.unit_file_state not in ("enabled", *_NOT_ENABLABLE):
        actions.append("enable")
        reasons.append("it was not enabled")
    if wanted.enabled is False and seen.unit_file_state in ("enabled", "enabled-runtime"):
        actions.append("disable")
        reasons.append("it was enabled")
    if wanted.state == STOPPED:
        if seen.up or seen.active_state == "deactivating":
            actions.append("stop")
            reasons.append(f"it was {seen.words()}")
        return Plan(tuple(actions), _sentence(reasons, "stopped as wanted"))
    if not seen.up or seen.sub_state == "auto-restart":
        if seen.active_state == "failed":
            actions.append("reset-failed")
        actions.append("start")
        reasons.append(f"it was {seen.words()}")
    elif seen.load_state == "bad-setting":
        # Up with what it was loaded with before; a timer in this state never elapses again.
        actions.append("restart")
        reasons.append("systemd had refused its file")
    elif _differs(seen, running_sha256, wanted):
        why = f"the running process has {_short(running_sha256)}, wanted is {_short(wanted.config_sha256)}"
        if wanted.restart_policy == DEFER:
            pending = True
            why += "; the restart is deferred"
        else:
            actions.append("restart")
        reasons.append(why)
    return Plan(tuple(actions), _sentence(reasons, "running with the wanted configuration"), pending)


def _differs(seen: UnitState, running_sha256: str | None, wanted: Wanted) -> bool:
    return wanted.config_sha256 is not None and seen.main_pid > 0 and running_sha256 != wanted.config_sha256


def _short(sha256: str | None) -> str:
    return f"configuration {sha256[:12]}" if sha256 else "no configuration hash"


def _sentence(reasons: t.Sequence[str], otherwise: str) -> str:
    return "; ".join(reasons) or otherwise


class ServiceError(Exception):
    """A unit that did not reach the wanted state, with what an operator needs to go on."""

    def __init__(self, message: str, state: UnitState, cause: Finding | None, last_lines: t.Sequence[str]) -> None:
        super().__init__(message)
        self.state = state
        self.cause = cause
        self.last_lines = tuple(last_lines)
        self.next_command = cause.next_command if cause else f"journalctl -u {state.name} -n 200 --no-pager"


class Service:
    """One unit of this host."""

    def __init__(
        self,
        wanted: Wanted,
        runner: systemd.Runner = systemd.run_command,
        running_hash: t.Callable[[int], str | None] = systemd.running_config_sha256,
        clock: t.Callable[[], float] = time.monotonic,
        sleep: t.Callable[[float], None] = time.sleep,
    ) -> None:
        self.wanted = wanted
        self._runner = runner
        self._running_hash = running_hash
        self._clock = clock
        self._sleep = sleep

    def look(self) -> UnitState:
        """The unit as systemd has it. A timer is as old as the service that it starts."""
        state = systemd.show(self.wanted.name, self._runner)
        if self.wanted.name.endswith(".timer") and not state.need_daemon_reload:
            service = systemd.show(self.wanted.name[: -len(".timer")] + ".service", self._runner)
            state = replace(state, need_daemon_reload=service.need_daemon_reload)
        return state

    def running_sha256(self, state: UnitState) -> str | None:
        return self._running_hash(state.main_pid) if state.main_pid else None

    def plan(self, state: UnitState) -> Plan:
        running = self.running_sha256(state) if self.wanted.config_sha256 else None
        return decide(state, running, self.wanted)

    def apply(self, plan: Plan, before: UnitState, wait: bool) -> UnitState:
        """Run the plan. With wait, systemctl returns when the unit has started, as the unit itself defines it.

        An empty plan does something only for a unit that is still starting: with wait, its start is waited for.
        """
        for action in plan.actions:
            self._run(action, wait)
        if not wait and ("start" in plan.actions or "restart" in plan.actions):
            self._await_pickup(before)
        state = self.look()
        if wait and self.wanted.state == STARTED and state.active_state == "activating":
            self._run("start", wait)  # joins the start that is under way
            state = self.look()
        if self.wanted.state == STARTED and not state.up:
            raise self._failure(state, f"{self.wanted.name} did not start: {state.words()}")
        return state

    def _run(self, action: str, wait: bool) -> None:
        argv = ["systemctl", action]
        if action in ("start", "restart") and not wait:
            argv.append("--no-block")
        if action != "daemon-reload":
            argv.append(self.wanted.name)
        result = self._runner(argv)
        if result.rc == 0 or action == "reset-failed":
            return
        said = (result.stderr or result.stdout).strip()
        state = self.look()
        what = f"systemctl {action} {self.wanted.name} ended with status {result.rc}: {state.words()}"
        # What systemctl says about a failed start is only where to look; the journal lines below are that.
        told = action in ("start", "restart") and state.exists
        raise self._failure(state, what if told else f"{what}; systemctl said: {said}")

    def _await_pickup(self, before: UnitState) -> None:
        """Wait until systemd runs another invocation than before, so that no caller meets the old process.

        A stop in between is bounded by the unit's own TimeoutStopSec, a job queued behind other units by theirs.
        """
        idle_since: float | None = None
        while True:
            now = self.look()
            if now.up and now.invocation_id != before.invocation_id:
                return
            busy = now.job_queued or now.active_state == "deactivating"
            idle_since = None if busy else (self._clock() if idle_since is None else idle_since)
            if now.active_state == "failed" or (idle_since is not None and self._clock() - idle_since > JOB_PICKUP_S):
                return
            self._sleep(POLL_S)

    def _failure(self, state: UnitState, message: str) -> ServiceError:
        lines = systemd.journal_of_run(state.invocation_id, self._runner)
        if not lines and state.exists:
            lines = systemd.journal_of_unit(self.wanted.name, self._runner, last=LAST_LINES)
        cause = root_cause(classify([(line.message, line.priority) for line in lines], self.wanted.name))
        last = [quotable(line.message) for line in lines[-LAST_LINES:]]
        parts = [message]
        if cause:
            parts += [f"cause: {cause.cause}", f"journal line: {cause.line}", f"change: {cause.variable}"]
        failure = ServiceError("", state, cause, last)
        parts.append(f"next command: {failure.next_command}")
        if last:
            parts.append(f"last {len(last)} journal lines:")
            parts += [f"  {line}" for line in last]
        failure.args = ("\n".join(parts),)
        return failure
