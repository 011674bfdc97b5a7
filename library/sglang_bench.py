#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_bench
short_description: Benchmark a running SGLang service, level by level
description:
  - A level is one number of clients at one prompt length. The load comes from SGLang's own client; its figures count
    only when the engine's counters agree with them and nobody else was served meanwhile.
  - A module can't print while it runs, so a benchmark is many calls. O(step=plan) says which levels the service can
    hold, O(step=measure) measures one, O(step=report) writes the result and compares it with the one before.
  - A level that could not be believed does not make this module fail; it is a row with the status V(failed), so that
    the others are still measured and written.
options:
  step:
    description: Which part is done.
    type: str
    choices: [plan, measure, report]
    required: true
  directory:
    description: Existing directory on the host for the results. Needed by V(plan) and V(report).
    type: path
  engine_url:
    description: Base URL of the engine's C(/metrics), C(/v1/loads) and C(/server_info).
    type: str
  base_url:
    description: Base URL that the load is sent to; the default is O(engine_url).
    type: str
  api_key_file:
    description: File on the host that holds the API key.
    type: path
  unit:
    description: The engine's unit. Its process says which configuration is measured.
    type: str
  model:
    description: Name under which the model is served.
    type: str
  model_path:
    description: Directory of the model on the host, for its tokenizer.
    type: path
  python:
    description: Python of the engine's environment, which has the load generator.
    type: path
  user:
    description: System user that the load generator runs as; the default is the user of this module.
    type: str
  topology:
    description: How the service is laid out, such as C(tp). It is written into the result.
    type: dict
    default: {}
  concurrency:
    description: Numbers of clients.
    type: list
    elements: int
  contexts:
    description: Prompt lengths in tokens; 0 is a short prompt of 32 tokens.
    type: list
    elements: int
  output_tokens:
    description: Tokens of each answer.
    type: int
    default: 256
  waves:
    description: Requests of each client.
    type: int
    default: 4
  least_requests:
    description: Least number of requests of a level.
    type: int
    default: 16
  level_tokens:
    description: Most tokens of a level, prompts and answers; it lowers the number of requests down to one a client.
    type: int
    default: 2000000
  level:
    description: The level to measure, an element of RV(levels).
    type: dict
  deadline:
    description: When the benchmark must be over, in seconds since the epoch. A level that it ends is left out.
    type: float
  level_limit:
    description: Longest time of a level in seconds. A level that needs more has failed.
    type: float
    default: 1200
  run_id:
    description: RV(run_id) of the plan.
    type: str
  head:
    description: RV(head) of the plan.
    type: dict
  rows:
    description: The rows to report, those that were left out included.
    type: list
    elements: dict
attributes:
  check_mode:
    description: In check mode V(plan) looks at what is there, and V(measure) and V(report) do nothing.
    support: full
  diff_mode:
    description: Nothing but the result is written, so there is no difference to show.
    support: none
  platform:
    description: Hosts with systemd.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Plan the levels
  sglang_bench:
    step: plan
    engine_url: http://127.0.0.1:30001
    unit: sglang-unified.service
    model: DeepSeek-V4-Flash-NVFP4
    python: /opt/sglang/current/venv/bin/python
    directory: /var/lib/sglang/bench
    concurrency: [1, 16]
    contexts: [0, 8192]
  register: plan

- name: Measure each level
  sglang_bench:
    step: measure
    engine_url: http://127.0.0.1:30001
    model: DeepSeek-V4-Flash-NVFP4
    model_path: /var/lib/sglang/models/DeepSeek-V4-Flash-NVFP4
    python: /opt/sglang/current/venv/bin/python
    user: sglang
    level: "{{ item }}"
    run_id: "{{ plan.run_id }}"
    deadline: "{{ plan.started + 3600 }}"
  loop: "{{ plan.levels }}"
  register: measured

- name: Write the result
  sglang_bench:
    step: report
    directory: /var/lib/sglang/bench
    head: "{{ plan.head }}"
    run_id: "{{ plan.run_id }}"
    rows: "{{ measured.results | map(attribute='row') + plan.left_out }}"
"""

RETURN = r"""
run_id:
  description: Name of this benchmark, its time.
  returned: plan
  type: str
  sample: 20261130T035012Z
started:
  description: Time of the plan in seconds since the epoch.
  returned: plan
  type: float
  sample: 1796010612.4
levels:
  description: The levels that the service can hold. C(label) says what a level is and how long it took the last time.
  returned: plan
  type: list
  elements: dict
  sample:
    - concurrency: 4
      context: 0
      output_tokens: 256
      requests: 16
      label: C=4, context 0, 16 requests
left_out:
  description: Rows of the levels that it can't hold, with the reason in C(why).
  returned: plan
  type: list
  elements: dict
  sample: []
lines:
  description: The plan or the result for a person.
  returned: plan and report
  type: list
  elements: str
  sample: ["C=4, context 0, 16 requests, 14 s the last time"]
head:
  description: What is the same for all levels. Time, model, configuration hash, packages, topology, service and host.
  returned: plan
  type: dict
  sample: {model: DeepSeek-V4-Flash-NVFP4}
row:
  description: The level's row.
  returned: measure
  type: dict
  sample: {id: c4-ctx0, status: measured, output_tok_s: 297.1}
line:
  description: The row for a person.
  returned: measure
  type: str
  sample: "C=4, context 0: 297.1 tok/s, TTFT p50 210 ms, TPOT p50 13.1 ms, 16 requests in 13.8 s"
result:
  description: The result as it was written.
  returned: report
  type: dict
  sample: {ok: true, measured: [c4-ctx0]}
summary:
  description: One line.
  returned: report
  type: str
  sample: 5 of 15 levels measured, left out c64-ctx65536
next_command:
  description: What to run next.
  returned: on failure
  type: str
  sample: ansible-doc -t module sglang_bench
files:
  description: What was written, JSON and markdown.
  returned: report
  type: list
  elements: str
  sample: [/var/lib/sglang/bench/20261130T035012Z.json, /var/lib/sglang/bench/20261130T035012Z.md]
"""

import dataclasses
import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.bench import (
    LEFT_OUT,
    Level,
    Protocol,
    build_result,
    markdown,
    read_results,
    result_lines,
    row_of,
    row_words,
    summary_text,
    why_left_out,
)
from ansible.module_utils.ops.bench_run import Target, host_facts, measure, versions_command
from ansible.module_utils.ops.http import Client, read_token, refusal
from ansible.module_utils.ops.probe import Capacity, capacity
from ansible.module_utils.ops.report import write_report, write_text
from ansible.module_utils.ops.systemd import SystemdError, running_config_sha256, show


def plan(module: AnsibleModule) -> dict:
    params, started = module.params, time.time()
    names = ("concurrency", "contexts")
    protocol = Protocol(
        *(tuple(params[name]) for name in names),
        output_tokens=params["output_tokens"],
        waves=params["waves"],
        least_requests=params["least_requests"],
        level_tokens=params["level_tokens"],
    )
    holds = service_capacity(module)
    levels, left_out = [], []
    for level in protocol.levels():
        why = why_left_out(level, holds)
        if why:
            left_out.append(row_of(level, LEFT_OUT, [why]))
        else:
            levels.append(level)
    earlier = read_results(params["directory"])
    labels = [label(level, earlier[-1] if earlier else {}) for level in levels]
    return {
        "run_id": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started)),
        "started": started,
        "levels": [{**dataclasses.asdict(level), "label": text} for level, text in zip(levels, labels)],
        "left_out": left_out,
        "lines": [*labels, *(row_words(row) for row in left_out)],
        "head": head(module, holds, started),
    }


def label(level: Level, previous: dict) -> str:
    took = next((row.get("elapsed_s") for row in previous.get("rows", ()) if row["id"] == level.id), None)
    return f"{level.words()}, {level.requests} requests" + (f", {took:.0f} s the last time" if took else "")


def service_capacity(module: AnsibleModule) -> Capacity:
    """What the service says that it holds. In check mode there may be no service yet; it says nothing then."""
    try:
        return capacity(client_of(module))
    except ValueError:
        if module.check_mode:
            return Capacity()
        raise


def client_of(module: AnsibleModule) -> Client:
    return Client(module.params["engine_url"], read_token(token_file=module.params["api_key_file"]))


def head(module: AnsibleModule, holds: Capacity, started: float) -> dict:
    params = module.params
    code, said, _err = (
        module.run_command(versions_command(params["python"]), handle_exceptions=False)
        if os.path.exists(params["python"])
        else (1, "", "")
    )
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "model": params["model"],
        "config_sha256": config_sha256(params["unit"]),
        "packages": json.loads(said) if code == 0 else {},
        "topology": params["topology"],
        "service": dataclasses.asdict(holds),
        "host": host_facts(),
    }


def config_sha256(unit: str) -> str:
    """The configuration hash that the unit's process was started with; empty when none runs."""
    try:
        return running_config_sha256(show(unit).main_pid) or ""
    except (SystemdError, PermissionError):
        return ""


def measure_level(module: AnsibleModule) -> dict:
    params = module.params
    fields = [field.name for field in dataclasses.fields(Level)]
    level = Level(**{name: int(params["level"][name]) for name in fields})
    target = Target(
        url=params["base_url"] or params["engine_url"],
        engine=client_of(module),
        model=params["model"],
        model_path=params["model_path"],
        python=params["python"],
        token=read_token(token_file=params["api_key_file"]),
        user=params["user"],
    )
    row = measure(target, level, params["run_id"], params["deadline"], params["level_limit"])
    return {"row": row, "line": row_words(row)}


def report(module: AnsibleModule) -> dict:
    params = module.params
    result = build_result(params["head"], params["rows"], read_results(params["directory"]))
    files = [os.path.join(params["directory"], params["run_id"] + end) for end in (".json", ".md")]
    write_report(files[0], result)
    write_text(files[1], markdown(result))
    return {"result": result, "summary": summary_text(result), "lines": result_lines(result), "files": files}


STEPS = {"plan": plan, "measure": measure_level, "report": report}


def run(module: AnsibleModule) -> None:
    step = module.params["step"]
    if module.check_mode and step != "plan":
        module.exit_json(changed=False)
    try:
        module.exit_json(changed=False, **STEPS[step](module))
    except ValueError as error:
        module.fail_json(**refusal("sglang_bench", "nothing was measured", error))
    except OSError as error:
        command = f"df -h {module.params['directory'] or '/tmp'}"
        said = f"cannot write to {error.filename}: {error.strerror}"
        module.fail_json(msg=f"{said}\nnext command: {command}", next_command=command)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "step": {"type": "str", "choices": ["plan", "measure", "report"], "required": True},
                "directory": {"type": "path"},
                "engine_url": {"type": "str"},
                "base_url": {"type": "str"},
                "api_key_file": {"type": "path", "no_log": False},
                "unit": {"type": "str"},
                "model": {"type": "str"},
                "model_path": {"type": "path"},
                "python": {"type": "path"},
                "user": {"type": "str"},
                "topology": {"type": "dict", "default": {}},
                "concurrency": {"type": "list", "elements": "int"},
                "contexts": {"type": "list", "elements": "int"},
                "output_tokens": {"type": "int", "default": 256, "no_log": False},
                "waves": {"type": "int", "default": 4},
                "least_requests": {"type": "int", "default": 16},
                "level_tokens": {"type": "int", "default": 2000000, "no_log": False},
                "level": {"type": "dict"},
                "deadline": {"type": "float"},
                "level_limit": {"type": "float", "default": 1200},
                "run_id": {"type": "str"},
                "head": {"type": "dict"},
                "rows": {"type": "list", "elements": "dict"},
            },
            required_if=[
                ("step", "plan", ("engine_url", "unit", "model", "python", "directory", "concurrency", "contexts")),
                ("step", "measure", ("engine_url", "model", "model_path", "python", "level", "run_id", "deadline")),
                ("step", "report", ("directory", "head", "rows", "run_id")),
            ],
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
