#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_preflight
short_description: Check a host before anything is changed on it
description:
  - Looks at system, interpreter, ports, disk, memory and files, and returns everything that is wrong at once.
  - Each finding says what was seen, what is wanted, which variable to change and what to do.
  - Nothing is changed on the host.
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
"""

import dataclasses

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.preflight import Host, check_host


def sentence(finding: dict) -> str:
    """Return a finding as one line for a person."""
    return "{id}: {seen}; wanted: {wanted}. Next: {fix}".format(**finding)


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
        },
        supports_check_mode=True,
    )
    findings = [dataclasses.asdict(finding) for finding in check_host(Host(), **module.params)]
    findings.sort(key=lambda finding: finding["severity"] != "error")
    errors = [sentence(finding) for finding in findings if finding["severity"] == "error"]
    if errors:
        message = "The host can't take this configuration; nothing was changed.\n" + "\n".join(errors)
        module.fail_json(msg=message, findings=findings)
    for finding in findings:
        module.warn(sentence(finding))
    module.exit_json(changed=False, findings=findings)


if __name__ == "__main__":
    main()
