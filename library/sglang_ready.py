#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_ready
short_description: Wait until an SGLang unit answers, with progress
description:
  - An engine needs minutes to load, and an open port or a C(200) from C(/health) does not mean that it answers.
    This module looks for a real generation and ends early when the start has failed.
  - It reads the state of the unit, the unit's own journal lines since its start, and asks the server for one token.
  - A unit that is C(active) has answered its own probe before. When it gives no answer for 40 seconds it has failed,
    whatever O(timeout) is; such a call may take a minute, longer than O(max_wait).
  - A module cannot print while it runs. So one call looks for O(max_wait) seconds only and then returns
    RV(status=starting) with a line in RV(progress); loop with C(until) to wait, as in the example.
  - Nothing is changed on the host.
options:
  unit:
    description: Name of the systemd unit, such as C(sglang-unified.service).
    type: str
    required: true
  base_url:
    description: Base URL of the engine, such as C(http://127.0.0.1:30001).
    type: str
    required: true
  api_key:
    description: API key of the engine. Prefer O(api_key_file).
    type: str
  api_key_file:
    description: File on the host that holds the API key.
    type: path
  timeout:
    description: Fail when the unit does not answer this many seconds after it began to start.
    type: float
    default: 1800
  max_wait:
    description: Longest time of one call in seconds. The call returns earlier when the unit is ready or has failed.
    type: float
    default: 10
  side:
    description: Whether the engine is one side of a disaggregated pair. It is asked without the other side.
    type: bool
    default: false
  restarts_before:
    description:
      - The unit's restart counter before the start. A higher value means that a start has failed.
      - The default is the value at the first look of this call.
    type: int
  config_sha256:
    description:
      - The configuration hash (C(OPS_CONFIG_SHA256) in the environment of the main process) that must be running.
        An answer of an older process does not count.
    type: str
attributes:
  check_mode:
    description: In check mode the module looks once, never waits and never fails.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
  platform:
    description: Hosts with systemd.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Start the engine
  service_state:
    name: sglang-unified.service
    config_sha256: "{{ sglang_serve_config_sha256 }}"
    wait: false
  register: sglang_serve_service

- name: Wait until the engine answers
  sglang_ready:
    unit: sglang-unified.service
    base_url: http://127.0.0.1:30001
    config_sha256: "{{ sglang_serve_config_sha256 }}"
    restarts_before: "{{ sglang_serve_service.n_restarts }}"
    timeout: 2700
  register: sglang_serve_ready
  until: sglang_serve_ready.status != 'starting'
  # The module ends the wait at its own time limit; the number of retries only has to be larger.
  retries: 2700
  delay: 0
"""

RETURN = r"""
status:
  description: V(ready), V(failed), or V(starting) when O(max_wait) ended first.
  returned: always
  type: str
  sample: ready
phase:
  description: What the engine is doing, from its journal.
  returned: always
  type: str
  sample: loading weights, 40 %
detail:
  description: What the last look saw.
  returned: always
  type: str
  sample: one token generated in 0.21 s
elapsed_s:
  description: Seconds since the unit began to start.
  returned: always
  type: float
  sample: 51.2
progress:
  description: One line of progress for a person.
  returned: always
  type: str
  sample: "sglang-unified.service: loading weights, 40 %, 38 s since the start"
unit_state:
  description: State of the unit in words.
  returned: always
  type: str
  sample: active (running)
main_pid:
  description: Main process of the unit, 0 when there is none.
  returned: always
  type: int
  sample: 4711
n_restarts:
  description: systemd's restart counter of the unit.
  returned: always
  type: int
  sample: 0
restarts_before:
  description: The counter value that this call compared with.
  returned: always
  type: int
  sample: 0
model:
  description: Name under which the model is served.
  returned: when ready
  type: str
  sample: smollm2-135m-instruct
max_total_num_tokens:
  description: Size of the KV pool in tokens, as the server reports it.
  returned: when ready
  type: int
  sample: 8192
context_length:
  description: Longest request in tokens.
  returned: when ready
  type: int
  sample: 8192
max_running_requests:
  description: Largest number of requests that run at one time.
  returned: when ready
  type: int
  sample: 8
max_total_num_tokens_swa:
  description: Size of the sliding window's KV pool in tokens. V(null) for a model without one.
  returned: when ready
  type: int
  sample: 593664
weight_memory_usage_gb:
  description:
    - Memory of the weights of one rank in GiB, as the server has measured it while it loaded them.
    - On a CPU it is a difference of the host's free memory, in which whatever else runs there has a part.
  returned: when ready
  type: float
  sample: 39.83
version:
  description: Version of SGLang.
  returned: when ready
  type: str
  sample: 0.5.23
capacity:
  description: The capacity in words.
  returned: when ready
  type: str
  sample: "8192 tokens of KV: 1 request of 8k tokens, or 16 requests of 512 tokens"
warnings_seen:
  description: Journal lines of this start that are worth reading though the engine answers.
  returned: when ready
  type: list
  elements: dict
  sample: []
cause:
  description: Why the start failed. Keys id, severity, cause, variable, next_command, line and count.
  returned: when failed and the journal names a cause
  type: dict
  sample:
    id: port_in_use
    severity: fatal
    cause: another process listens on a port of this unit
    variable: sglang_serve_port
    next_command: ss -ltnp
    line: "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30001): address already in use"
    count: 1
last_lines:
  description: Last journal lines of the run.
  returned: when failed
  type: list
  elements: str
  sample: ["[2026-11-30 09:26:03] Load weight begin. avail mem=20.58 GB"]
next_command:
  description: What to run next.
  returned: when failed
  type: str
  sample: ss -ltnp
"""

import dataclasses
import functools
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.http import Client, read_token, refusal
from ansible.module_utils.ops.probe import ask_unit
from ansible.module_utils.ops.readiness import FAILED, READY, STARTING, Readiness, Watch
from ansible.module_utils.ops.systemd import SystemdError

# Causes that no line of the journal tells.
SEEN = ("api_key_refused", "engine_busy", "engine_hangs", "generation_fails", "unit_stopped")


def result_of(seen: Readiness, restarts_before: int) -> dict:
    """The return values for one look."""
    result = {
        "changed": False,
        "status": seen.status,
        "phase": seen.phase,
        "detail": seen.detail,
        "elapsed_s": round(seen.elapsed_s, 1),
        "progress": seen.line(),
        "unit_state": seen.unit.words(),
        "main_pid": seen.unit.main_pid,
        "n_restarts": seen.unit.n_restarts,
        "restarts_before": restarts_before,
    }
    if seen.status == READY:
        result.update(dataclasses.asdict(seen.capacity))
        result["capacity"] = seen.capacity.words()
        result["warnings_seen"] = [finding.as_dict() for finding in seen.warnings]
    if seen.status == FAILED:
        result["last_lines"] = list(seen.last_lines)
        result["cause"] = seen.cause.as_dict() if seen.cause else None
        result["next_command"] = next_command(seen)
    return result


def next_command(seen: Readiness) -> str:
    if seen.cause:
        return seen.cause.next_command
    return f"journalctl -u {seen.unit.name} -n 200 --no-pager"


def failure_message(seen: Readiness, base_url: str, took_s: float) -> str:
    """What went wrong, after how many seconds of looking, the line that says so, what to change and to run next."""
    parts = [f"{seen.unit.name} is not ready at {base_url}: {seen.detail}; looked at for {took_s:.1f} s"]
    if seen.cause:
        parts.append(f"cause: {seen.cause.cause}")
        parts.append(f"{'seen' if seen.cause.id in SEEN else 'journal line'}: {seen.cause.line}")
        parts += [f"change: {seen.cause.variable}"] if seen.cause.variable else []
    elif seen.last_lines:
        parts.append(f"last journal line: {seen.last_lines[-1]}")
    parts.append(f"next command: {next_command(seen)}")
    return "\n".join(parts)


def run(module: AnsibleModule) -> None:
    params, start = module.params, time.monotonic()
    try:
        client = Client(params["base_url"], read_token(params["api_key"], params["api_key_file"]))
    except ValueError as error:
        if module.check_mode and params["api_key_file"]:
            module.exit_json(changed=False, status=STARTING, phase="not looked at", detail=str(error))
        module.fail_json(**refusal("sglang_ready", f"{params['unit']} was not looked at", error))
    ask_once = functools.partial(ask_unit, side=params["side"])
    watch = Watch(params["unit"], client, params["restarts_before"], params["config_sha256"], ask_once=ask_once)
    try:
        if module.check_mode:
            module.exit_json(**result_of(watch.look(), watch.restarts_before or 0))
        seen = watch.wait(params["max_wait"])
    except SystemdError as error:
        command = "systemctl is-system-running"
        module.fail_json(msg=f"cannot look at {params['unit']}: {error}; next command: {command}", next_command=command)
    if seen.status == STARTING and seen.elapsed_s >= params["timeout"]:
        why = f"still {seen.phase} after {seen.elapsed_s:.0f} s, limit {params['timeout']:.0f} s; seen: {seen.detail}"
        seen = dataclasses.replace(seen, status=FAILED, detail=why)
    result = result_of(seen, watch.restarts_before or 0)
    if seen.status == FAILED:
        module.fail_json(msg=failure_message(seen, params["base_url"], time.monotonic() - start), **result)
    module.exit_json(**result)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "unit": {"type": "str", "required": True},
                "base_url": {"type": "str", "required": True},
                "api_key": {"type": "str", "no_log": True},
                "api_key_file": {"type": "path", "no_log": False},
                "timeout": {"type": "float", "default": 1800},
                "max_wait": {"type": "float", "default": 10},
                "side": {"type": "bool", "default": False},
                "restarts_before": {"type": "int"},
                "config_sha256": {"type": "str"},
            },
            mutually_exclusive=[("api_key", "api_key_file")],
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
