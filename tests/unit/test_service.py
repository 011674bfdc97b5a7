# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest
from ops.service import DEFER, STOPPED, Service, ServiceError, Wanted, decide
from ops.systemd import CommandResult, UnitState, parse_show
from scripted_systemd import RUNNING, STARTING, ScriptedSystemd

UNIT = "engine.service"
NEW, OLD = "n" * 64, "o" * 64


def state(**properties: str) -> UnitState:
    fake = ScriptedSystemd(properties)
    return parse_show(UNIT, fake.run(["systemctl", "show", UNIT]).stdout)


def wanted(**changes: t.Any) -> Wanted:
    return Wanted(**{"name": UNIT, "config_sha256": NEW, **changes})


@pytest.mark.parametrize(
    ("seen", "running", "want", "actions", "reason"),
    [
        pytest.param(state(**RUNNING), NEW, wanted(), (), "running with the wanted configuration", id="nothing to do"),
        pytest.param(state(), None, wanted(), ("start",), "it was inactive (dead)", id="stopped"),
        pytest.param(
            state(UnitFileState="disabled"), None, wanted(), ("enable", "start"), "not enabled; it was", id="new unit"
        ),
        pytest.param(state(**RUNNING), OLD, wanted(), ("restart",), "has configuration oooooooooooo, wanted", id="old"),
        pytest.param(state(**RUNNING), None, wanted(), ("restart",), "has no configuration hash", id="no hash"),
        pytest.param(state(**STARTING), OLD, wanted(), ("restart",), "wanted is", id="old one is starting"),
        pytest.param(state(**STARTING), NEW, wanted(), (), "running with", id="right one is starting"),
        pytest.param(
            state(**RUNNING, NeedDaemonReload="yes"), NEW, wanted(), ("daemon-reload",), "on disk", id="unit changed"
        ),
        pytest.param(
            state(**RUNNING, NeedDaemonReload="yes"),
            OLD,
            wanted(),
            ("daemon-reload", "restart"),
            "on disk; the running process",
            id="unit and configuration changed",
        ),
        pytest.param(state(**RUNNING), OLD, wanted(config_sha256=None), (), "running", id="no hash wanted"),
        pytest.param(
            state(ActiveState="active", SubState="elapsed", LoadState="bad-setting", NeedDaemonReload="yes"),
            None,
            wanted(config_sha256=None),
            ("daemon-reload", "restart"),
            "refused its file",
            id="up with a file that systemd refused",
        ),
        pytest.param(
            state(ActiveState="failed", SubState="failed", Result="exit-code", ExecMainCode="1", ExecMainStatus="3"),
            None,
            wanted(),
            ("reset-failed", "start"),
            "exited with status 3",
            id="failed",
        ),
        pytest.param(
            state(ActiveState="activating", SubState="auto-restart", NRestarts="2"),
            None,
            wanted(),
            ("start",),
            "auto-restart",
            id="waiting to be restarted",
        ),
        pytest.param(state(**RUNNING), NEW, wanted(enabled=False), ("disable",), "it was enabled", id="disable"),
        pytest.param(state(**RUNNING, UnitFileState="static"), NEW, wanted(), (), "running", id="static"),
        pytest.param(
            state(**RUNNING, UnitFileState="disabled"), NEW, wanted(enabled=None), (), "running", id="as it is"
        ),
        pytest.param(state(**RUNNING), NEW, wanted(state=STOPPED, enabled=None), ("stop",), "it was active", id="stop"),
        pytest.param(state(), None, wanted(state=STOPPED, enabled=None), (), "stopped as wanted", id="is stopped"),
        pytest.param(
            state(ActiveState="deactivating"), None, wanted(state=STOPPED, enabled=None), ("stop",), "", id="stopping"
        ),
    ],
)
def test_decide(seen: UnitState, running: str | None, want: Wanted, actions: tuple[str, ...], reason: str) -> None:
    plan = decide(seen, running, want)
    assert plan.actions == actions
    assert reason in plan.reason
    assert plan.changed == bool(actions)
    assert not plan.restart_pending


def test_a_deferred_restart_is_told_and_changes_nothing() -> None:
    plan = decide(state(**RUNNING), OLD, wanted(restart_policy=DEFER))
    assert plan.actions == ()
    assert plan.restart_pending
    assert "deferred" in plan.reason


def test_a_deferred_restart_does_not_keep_a_stopped_unit_down() -> None:
    assert decide(state(), None, wanted(restart_policy=DEFER)).actions == ("start",)


@pytest.mark.parametrize(("service", "actions"), [("yes", ("daemon-reload",)), ("no", ())])
def test_a_timer_is_as_old_as_its_service(service: str, actions: tuple[str, ...]) -> None:
    units = {"canary.timer": ScriptedSystemd(RUNNING)}
    units["canary.service"] = ScriptedSystemd({"UnitFileState": "static", "NeedDaemonReload": service})
    one = Service(Wanted("canary.timer"), lambda argv: units[argv[2]].run(argv))
    assert one.plan(one.look()).actions == actions


def service(systemd: ScriptedSystemd, want: Wanted, running: str | None = None) -> Service:
    return Service(want, systemd.run, lambda _pid: running, systemd.clock, systemd.sleep)


def converge(one: Service, wait: bool = True) -> UnitState:
    before = one.look()
    return one.apply(one.plan(before), before, wait)


def test_start_waits_for_systemd() -> None:
    systemd = ScriptedSystemd({"UnitFileState": "disabled"}, on={"start": RUNNING})
    after = converge(service(systemd, wanted()))
    assert systemd.verbs == ["enable", "start"]
    assert after.main_pid == 100


def test_start_without_waiting_returns_when_the_new_process_is_there() -> None:
    systemd = ScriptedSystemd(script={3: {**STARTING, "Job": "7"}}, on={"start": {"Job": "7"}})
    after = converge(service(systemd, wanted()), wait=False)
    assert systemd.verbs == ["start --no-block"]
    assert after.words() == "activating (start-post)"
    assert systemd.now < 5


def test_restart_without_waiting_returns_only_after_the_old_process_is_gone() -> None:
    stopping = {"ActiveState": "deactivating", "SubState": "stop-sigterm"}
    new = {**STARTING, "MainPID": "200", "InvocationID": "run2"}
    systemd = ScriptedSystemd(RUNNING, script={90: new}, on={"restart": {**stopping, "Job": "8"}})
    after = converge(service(systemd, wanted(), OLD), wait=False)
    assert systemd.verbs == ["restart --no-block"]
    assert after.main_pid == 200
    assert 90 <= systemd.now < 92


def test_a_start_that_nobody_picks_up_ends_and_says_so() -> None:
    systemd = ScriptedSystemd()
    with pytest.raises(ServiceError, match=r"did not start: inactive \(dead\)"):
        converge(service(systemd, wanted()), wait=False)
    assert systemd.now < 15


def test_a_failed_start_names_cause_line_variable_and_command() -> None:
    failed = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "InvocationID": "run1"}
    systemd = ScriptedSystemd(on={"start": CommandResult(1, "", "Job for engine.service failed.\n")})
    systemd.unit.update({**failed, "ExecMainCode": "1", "ExecMainStatus": "3"})
    systemd.journal = [("run0", "torch.OutOfMemoryError: of another run")]
    systemd.journal += [("run1", f"line {number}") for number in range(40)]
    systemd.journal += [
        (
            "run1",
            "[2026-11-30 00:34:11] ERROR:    [Errno 98] error while attempting to bind on address "
            "('127.0.0.1', 30001): address already in use",
        )
    ]
    with pytest.raises(ServiceError) as caught:
        converge(service(systemd, wanted()))
    failure, text = caught.value, str(caught.value)
    assert failure.cause and failure.cause.id == "port_in_use"
    assert failure.next_command == "ss -ltnp"
    assert len(failure.last_lines) == 20
    assert "systemctl start engine.service ended with status 1: failed (failed), result exit-code" in text
    for part in (
        "another process listens",
        "Errno 98",
        "change: sglang_serve_port",
        "next command: ss -ltnp",
        "line 39",
    ):
        assert part in text
    assert "line 20\n" not in text


def test_a_failure_without_a_known_cause_points_to_the_journal() -> None:
    systemd = ScriptedSystemd(on={"start": CommandResult(1, "", "")}, unit={"InvocationID": "run1"})
    systemd.journal = [("run1", "good bye")]
    with pytest.raises(ServiceError) as caught:
        converge(service(systemd, wanted()))
    assert caught.value.cause is None
    assert caught.value.next_command == "journalctl -u engine.service -n 200 --no-pager"
    assert "good bye" in str(caught.value)


def test_a_service_that_dies_right_after_its_start_is_a_failure() -> None:
    systemd = ScriptedSystemd(on={"start": {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}})
    with pytest.raises(ServiceError, match="did not start: failed"):
        converge(service(systemd, wanted()))


def test_a_lost_reset_is_no_failure() -> None:
    systemd = ScriptedSystemd(
        {"ActiveState": "failed"}, on={"reset-failed": CommandResult(1, "", "not loaded"), "start": RUNNING}
    )
    converge(service(systemd, wanted()))
    assert systemd.verbs == ["reset-failed", "start"]


def test_a_start_that_is_under_way_is_waited_for() -> None:
    systemd = ScriptedSystemd(STARTING, on={"start": RUNNING})
    assert converge(service(systemd, wanted(), NEW)).active_state == "active"
    assert systemd.verbs == ["start"]


def test_a_start_that_is_under_way_is_left_alone_without_waiting() -> None:
    systemd = ScriptedSystemd(STARTING)
    assert converge(service(systemd, wanted(), NEW), wait=False).active_state == "activating"
    assert systemd.verbs == []


def test_a_refused_enable_says_what_systemctl_said() -> None:
    refused = CommandResult(1, "", "Failed to enable unit: Unit file /etc/systemd/system/engine.service is masked.\n")
    systemd = ScriptedSystemd({"UnitFileState": "masked"}, on={"enable": refused})
    with pytest.raises(ServiceError, match=r"systemctl said: Failed to enable unit: .* is masked"):
        converge(service(systemd, wanted()))


def test_stop() -> None:
    systemd = ScriptedSystemd(RUNNING, on={"stop": {"ActiveState": "inactive", "SubState": "dead", "MainPID": "0"}})
    after = converge(service(systemd, wanted(state=STOPPED, enabled=None), NEW))
    assert systemd.verbs == ["stop"]
    assert not after.up
