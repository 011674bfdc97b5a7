#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_preflight
short_description: Check a host before anything is changed on it
description:
  - Looks at system, interpreter, ports, disk, memory, files, settings, GPUs and the engine, and returns everything that
    is wrong at once.
  - Each finding says what was seen, what is wanted, which variable to change and what to do. Its id never changes;
    C(docs/preflight.md) explains each.
  - Nothing is changed on the host, and no process is ended.
options:
  python:
    description: Interpreter for the engine's environment.
    type: dict
    suboptions:
      interpreter:
        description: Path on the host.
        type: path
        required: true
      variable:
        description: Variable that sets it.
        type: str
        required: true
  ports:
    description: Ports that must be free, or held by one of our own units.
    type: list
    elements: dict
    default: []
    suboptions:
      port:
        description: TCP port.
        type: int
        required: true
      variable:
        description: Variable that sets it.
        type: str
        required: true
      units:
        description: Units that may hold the port.
        type: list
        elements: str
        default: []
  disks:
    description: Directories that need free space; they need not exist yet.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Directory on the host.
        type: path
        required: true
      need_gib:
        description: Free space in GiB.
        type: float
        required: true
      holds:
        description: Directory on the host whose files are a part of the need that is there already; empty for none.
        type: path
        default: ""
      variable:
        description: Variable that sets the directory.
        type: str
        required: true
  memory:
    description: Memory that the engine needs while it is not running yet.
    type: dict
    suboptions:
      need_gib:
        description: Available memory in GiB.
        type: float
        required: true
      variable:
        description: Variable that decides the need.
        type: str
        required: true
      units:
        description: Units that hold the memory already when they run.
        type: list
        elements: str
        default: []
  files:
    description: Files that must be there.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: File on the host.
        type: path
        required: true
      variable:
        description: Variable that sets it.
        type: str
        required: true
  gpus:
    description:
      - What is wanted of the GPUs; what is not given is not compared. Without it no GPU is looked at.
    type: dict
    suboptions:
      count:
        description: Number of GPUs.
        type: int
      name:
        description: Text that is in every GPU's name.
        type: str
      memory_mib:
        description: Least memory of each GPU in MiB.
        type: int
      memory_free_mib:
        description: Memory that the memory plan takes for free on each GPU before the server starts, in MiB.
        type: float
      driver_min:
        description: Oldest driver that the engine's CUDA can use.
        type: str
      cuda_min:
        description: Oldest release of nvcc.
        type: str
      power_limit_w:
        description: Power limit of each GPU in W; without it the most that the card's edition allows.
        type: int
      island_size:
        description: GPUs of one engine, which should share a NUMA node; without it one island for each node.
        type: int
  islands:
    description: Groups of GPUs as the inventory has them, to be compared with where the GPUs are.
    type: list
    elements: dict
    default: []
    suboptions:
      gpus:
        description: Numbers as C(nvidia-smi) counts.
        type: list
        elements: int
        default: []
      numa:
        description: The NUMA node that they are said to be on.
        type: int
  gpus_reason:
    description: Why no GPU is looked at.
    type: str
    default: no GPUs are wanted
  units:
    description: Patterns of units whose processes may hold GPU memory.
    type: list
    elements: str
    default: []
  venv:
    description: Virtual environment with the engine; need not exist yet.
    type: path
  cache:
    description: Directory of compiled kernels; need not exist yet.
    type: path
  engines:
    description: Arguments and environment of each engine.
    type: list
    elements: dict
    default: []
    suboptions:
      arguments:
        description: Arguments of the engine without their leading dashes.
        type: dict
        default: {}
      environment:
        description: Environment of the engine.
        type: dict
        default: {}
  shm_gib:
    description: Least size of C(/dev/shm) in GiB; 0 for any.
    type: float
    default: 0.0
  timeout:
    description: Seconds for each program that asks the GPUs; one that takes longer is a finding.
    type: float
    default: 60.0
  accept:
    description: Warnings that the operator lives with, each with the reason. An error can't be accepted.
    type: dict
    default: {}
  defer:
    description: Patterns of ids that the same run repairs later.
    type: list
    elements: str
    default: []
  defer_reason:
    description: What repairs them.
    type: str
    default: ""
attributes:
  check_mode:
    description: The module never changes anything, so it does the same in check mode.
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
- name: Check the host
  host_preflight:
    python:
      interpreter: /usr/bin/python3
      variable: sglang_venv_python
    ports:
      - port: 30001
        variable: sglang_serve_port
        units: [sglang-unified.service]
    disks:
      - path: /opt/sglang
        need_gib: 25
        variable: sglang_venv_root
"""

RETURN = r"""
findings:
  description: What is wrong, worst first. Empty when the host is fit.
  returned: always
  type: list
  elements: dict
  sample:
    - id: host.port
      severity: error
      seen: port 30001 is held by process 812 (nginx, nginx.service)
      wanted: port 30001 free
      fix: "stop it, or set sglang_serve_port to another port; ss -ltnp 'sport = :30001' shows the owner"
      variable: sglang_serve_port
accepted:
  description: Warnings that the operator lives with.
  returned: always
  type: list
  elements: dict
unchecked:
  description: What was not looked at, and why.
  returned: always
  type: list
  elements: dict
  sample:
    - id: gpu.*
      reason: sglang_serve_device is cpu
facts:
  description: GPUs, driver, NUMA nodes, and the proposed islands in the form that the inventory takes.
  returned: always
  type: dict
  sample:
    islands:
      - gpus: [0, 1, 2, 3]
        numa: 0
"""

import dataclasses

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.findings import KINDS, WARNING, judge, sentence
from ansible.module_utils.ops.preflight import Host, check_host


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {
                "type": "dict",
                "options": {
                    "interpreter": {"type": "path", "required": True},
                    "variable": {"type": "str", "required": True},
                },
            },
            "ports": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "port": {"type": "int", "required": True},
                    "variable": {"type": "str", "required": True},
                    "units": {"type": "list", "elements": "str", "default": []},
                },
            },
            "disks": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path", "required": True},
                    "need_gib": {"type": "float", "required": True},
                    "holds": {"type": "path", "default": ""},
                    "variable": {"type": "str", "required": True},
                },
            },
            "memory": {
                "type": "dict",
                "options": {
                    "need_gib": {"type": "float", "required": True},
                    "variable": {"type": "str", "required": True},
                    "units": {"type": "list", "elements": "str", "default": []},
                },
            },
            "files": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path", "required": True},
                    "variable": {"type": "str", "required": True},
                },
            },
            "gpus": {
                "type": "dict",
                "options": {
                    "count": {"type": "int"},
                    "name": {"type": "str"},
                    "memory_mib": {"type": "int"},
                    "memory_free_mib": {"type": "float"},
                    "driver_min": {"type": "str"},
                    "cuda_min": {"type": "str"},
                    "power_limit_w": {"type": "int"},
                    "island_size": {"type": "int"},
                },
            },
            "islands": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"gpus": {"type": "list", "elements": "int", "default": []}, "numa": {"type": "int"}},
            },
            "gpus_reason": {"type": "str", "default": "no GPUs are wanted"},
            "units": {"type": "list", "elements": "str", "default": []},
            "venv": {"type": "path"},
            "cache": {"type": "path"},
            "engines": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "arguments": {"type": "dict", "default": {}},
                    "environment": {"type": "dict", "default": {}},
                },
            },
            "shm_gib": {"type": "float", "default": 0.0},
            "timeout": {"type": "float", "default": 60.0},
            "accept": {"type": "dict", "default": {}},
            "defer": {"type": "list", "elements": "str", "default": []},
            "defer_reason": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    arguments = dict(module.params)
    word = {name: arguments.pop(name) for name in ("accept", "defer", "defer_reason")}
    arguments["venv"], arguments["cache"] = arguments["venv"] or "", arguments["cache"] or ""
    warnings = sorted(id for id, (severity, _meaning) in KINDS.items() if severity == WARNING)
    unknown = sorted(set(word["accept"]) - set(warnings))
    if unknown:
        module.fail_json(msg=f"accept has {', '.join(unknown)}; wanted: ids of warnings: {', '.join(warnings)}")
    inspection = check_host(Host(), **arguments)
    report = judge(inspection.findings, inspection.unchecked, **word)
    result = {"facts": inspection.facts, **dataclasses.asdict(report)}
    if report.errors:
        lines = [sentence(finding) for finding in report.errors]
        message = "The host can't take this configuration; nothing was changed.\n" + "\n".join(lines)
        module.fail_json(msg=message, **result)
    for finding in report.findings:
        module.warn(sentence(finding))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
