#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: service_state
short_description: Make a systemd unit enabled, running, and running with the wanted configuration
description:
  - A handler restarts a service when a file has changed in this play. If the play ends before the handler runs, the
    service keeps its old configuration for ever. This module compares the configuration hash in the environment of
    the running main process (C(OPS_CONFIG_SHA256)) with the wanted one, so the next run heals it.
  - C(systemctl daemon-reload), C(enable), C(start) and C(restart) run only when the state asks for them.
  - Limits of time are the unit's own (C(TimeoutStartSec), C(TimeoutStopSec)).
options:
  name:
    description: Name of the unit with its suffix, such as C(sglang-unified.service).
    type: str
    required: true
  state:
    description: The wanted state.
    type: str
    choices: [started, stopped]
    default: started
  enabled:
    description: Whether the unit starts at boot. Left as it is when not given.
    type: bool
  config_sha256:
    description:
      - Hash of the wanted configuration, the value that the unit sets as C(OPS_CONFIG_SHA256).
      - Only for units of type service. Without it the unit is never restarted.
    type: str
  restart_policy:
    description:
      - V(auto) restarts the unit when its configuration differs.
      - V(defer) leaves it running and returns RV(restart_pending=true).
    type: str
    choices: [auto, defer]
    default: auto
  wait:
    description:
      - Wait until systemd reports the unit as started, also when it was starting already.
      - With V(false) the module returns when systemd has begun to start the unit; follow with C(sglang_ready), which
        shows progress.
    type: bool
    default: true
attributes:
  check_mode:
    description: In check mode the module says what it would do and why, also when the unit does not exist yet.
    support: full
  diff_mode:
    description: The difference shows state, enablement and configuration hash of the unit.
    support: full
  platform:
    description: Hosts with systemd.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Run the engine with the rendered configuration
  service_state:
    name: sglang-unified.service
    enabled: true
    config_sha256: "{{ sglang_serve_config_sha256 }}"
    wait: false

- name: Stop the engine
  service_state:
    name: sglang-unified.service
    state: stopped
    enabled: false
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be done, in order.
  returned: always
  type: list
  elements: str
  sample: [daemon-reload, restart]
reason:
  description: Why, in words.
  returned: always
  type: str
  sample: the running process has configuration 3b1c0e9f2a41, wanted is configuration 9d02c7aa51b8
restarted:
  description: Whether a running unit was restarted.
  returned: always
  type: bool
  sample: true
restart_pending:
  description: Whether a restart is needed but was deferred.
  returned: always
  type: bool
  sample: false
main_pid_before:
  description: Main process before, 0 when there was none.
  returned: always
  type: int
  sample: 4711
main_pid_after:
  description: Main process afterwards, 0 when there is none.
  returned: always
  type: int
  sample: 5822
n_restarts:
  description: systemd's restart counter afterwards. Pass it to C(sglang_ready) as C(restarts_before).
  returned: always
  type: int
  sample: 0
config_sha256:
  description: O(config_sha256) as given. Pass it to C(sglang_ready).
  returned: always
  type: str
  sample: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
invocation_id:
  description: systemd's ID of this run of the unit.
  returned: always
  type: str
  sample: 8f2d5c7c1d1a4c5e9d0e5a7b3c1f0a11
unit_state:
  description: State of the unit in words.
  returned: always
  type: str
  sample: activating (start-post)
cause:
  description: Why the unit did not start. Keys id, severity, cause, variable, next_command, line and count.
  returned: on failure, when the journal names a cause
  type: dict
  sample: {}
last_lines:
  description: Last 20 journal lines of the unit.
  returned: on failure
  type: list
  elements: str
  sample: []
next_command:
  description: What to run next.
  returned: on failure
  type: str
  sample: journalctl -u sglang-unified.service -n 200 --no-pager
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.service import Plan, Service, ServiceError, Wanted
from ansible.module_utils.ops.systemd import SystemdError, UnitState


def result_of(wanted: Wanted, plan: Plan, before: UnitState, after: UnitState) -> dict:
    return {
        "changed": plan.changed,
        "actions": list(plan.actions),
        "reason": plan.reason,
        "restarted": "restart" in plan.actions,
        "restart_pending": plan.restart_pending,
        "main_pid_before": before.main_pid,
        "main_pid_after": after.main_pid,
        "n_restarts": after.n_restarts,
        "config_sha256": wanted.config_sha256,
        "invocation_id": after.invocation_id,
        "unit_state": after.words(),
    }


def diff_of(plan: Plan, before: UnitState) -> dict:
    """The unit as it is and as the plan makes it; no environment, no command line."""
    seen = [f"state: {before.words()}", f"enabled: {before.unit_file_state or 'no unit file'}"]
    then = [f"{', '.join(plan.actions)}: {plan.reason}"] if plan.actions else []
    return {"before": "\n".join(seen) + "\n", "after": "\n".join(seen + then) + "\n"}


def missing_unit(module: AnsibleModule, wanted: Wanted, state: UnitState) -> None:
    """A unit that is not there: planned in check mode, nothing to stop when it shall be stopped, else an error."""
    if wanted.state == "stopped":
        plan = Plan((), f"{wanted.name} does not exist, so it does not run")
    elif module.check_mode:
        actions = ("enable", "start") if wanted.enabled else ("start",)
        plan = Plan(actions, f"{wanted.name} does not exist on this host yet")
    else:
        module.fail_json(
            msg=f"{wanted.name} does not exist on this host, so it cannot be started\n"
            f"next command: systemctl list-unit-files '{wanted.name}'",
            next_command=f"systemctl list-unit-files '{wanted.name}'",
        )
        return
    module.exit_json(**result_of(wanted, plan, state, state), diff=diff_of(plan, state))


def run(module: AnsibleModule) -> None:
    params = module.params
    wanted = Wanted(
        name=params["name"],
        state=params["state"],
        enabled=params["enabled"],
        config_sha256=params["config_sha256"],
        restart_policy=params["restart_policy"],
    )
    if "." not in wanted.name:
        module.fail_json(msg=f"name is {wanted.name!r}; give it with its suffix, such as {wanted.name}.service")
    if wanted.config_sha256 and not wanted.name.endswith(".service"):
        module.fail_json(msg=f"config_sha256 is for .service units; {wanted.name} has no main process to compare with")
    service = Service(wanted)
    try:
        before = service.look()
        if not before.exists:
            missing_unit(module, wanted, before)
        plan = service.plan(before)
        diff = diff_of(plan, before)
        starting = params["wait"] and before.active_state == "activating"
        if module.check_mode or not (plan.changed or starting):
            module.exit_json(**result_of(wanted, plan, before, before), diff=diff)
        after = service.apply(plan, before, params["wait"])
    except PermissionError as error:
        module.fail_json(msg=f"cannot read the running configuration of {wanted.name}: {error}; run with become: true")
    except SystemdError as error:
        module.fail_json(msg=str(error), next_command=f"systemctl status {wanted.name}")
    except ServiceError as failure:
        cause = failure.cause.as_dict() if failure.cause else None
        module.fail_json(
            msg=str(failure),
            cause=cause,
            last_lines=list(failure.last_lines),
            next_command=failure.next_command,
            unit_state=failure.state.words(),
        )
    module.exit_json(**result_of(wanted, plan, before, after), diff=diff)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "name": {"type": "str", "required": True},
                "state": {"type": "str", "choices": ["started", "stopped"], "default": "started"},
                "enabled": {"type": "bool"},
                "config_sha256": {"type": "str"},
                "restart_policy": {"type": "str", "choices": ["auto", "defer"], "default": "auto"},
                "wait": {"type": "bool", "default": True},
            },
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
