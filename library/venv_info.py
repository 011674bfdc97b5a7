#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: venv_info
short_description: Look whether an environment is complete, and what of it is damaged
description:
  - An installation that was cut short, a disk that was full or a hand can leave packages with files that are gone or
    cut. This module compares names and sizes of all files with the packages' own records (C(RECORD)), and the packages
    with the lock file. Contents are not compared.
  - Nothing is changed on the host, and no program of the environment runs.
options:
  path:
    description:
      - Directory with the virtual environment (C(venv)), its lock file (C(requirements.txt)), the mark of a finished
        installation (C(complete)) and the records of other wheels (C(*.json)).
    type: path
    required: true
attributes:
  check_mode:
    description: Check mode makes no difference, since nothing is changed.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
  platform:
    description: Linux hosts.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Look for the environment, and for damage to it
  venv_info:
    path: /opt/sglang/environments/cuda-0123456789ab
  register: environment_look
"""

RETURN = r"""
complete:
  description: Whether the installation was finished and nothing of it is damaged.
  returned: success
  type: bool
  sample: false
damaged:
  description: What is damaged, one sentence for each package.
  returned: success
  type: list
  elements: str
  sample: ["torch-2.13.0: torch/lib/libtorch_cpu.so is missing"]
remove:
  description: The paths without which the next installation brings back what is damaged, and nothing else.
  returned: success
  type: list
  elements: str
  sample: [/opt/sglang/environments/cuda-0123456789ab/complete]
next_command:
  description: What to run next.
  returned: on failure
  type: str
  sample: ls -l /opt/sglang/environments/cuda-0123456789ab
"""

import shlex

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.venv_damage import look


def main() -> None:
    module = AnsibleModule(argument_spec={"path": {"type": "path", "required": True}}, supports_check_mode=True)
    path = module.params["path"]
    try:
        seen = look(path)
    except OSError as error:
        command = f"ls -l {shlex.quote(path)}"
        said = f"cannot read {error.filename}: {error.strerror}"
        module.fail_json(msg=f"{said}\nnext command: {command}", next_command=command)
    module.exit_json(changed=False, **seen._asdict())


if __name__ == "__main__":
    main()
