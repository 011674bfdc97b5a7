#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_files
short_description: Have the files of a model on the host as a manifest describes them
description:
  - Compares the size of every file each time, and its SHA-256 once; a file whose size, time of change and inode are
    those of the last look is not read again.
  - With O(url), files that are missing or of another size are fetched. A fetch that was cut short goes on at the byte
    where it ended.
  - One call works for O(max_wait) seconds; call it in an C(until) loop, which shows RV(progress).
options:
  path:
    description: Directory of the model.
    type: path
    required: true
  manifest:
    description:
      - The manifest, a dictionary with the key C(files). It has the name of each file, and for each its C(size) in
        bytes and its C(sha256) in hexadecimal digits.
    type: dict
    required: true
  url:
    description: Where the files are fetched from, C(URL/NAME) for each. Without it they must be there.
    type: str
    default: ""
  state_path:
    description: File that says which files were right when they were last read.
    type: path
    default: /var/lib/sglang/model-files.json
  max_wait:
    description: How long one call works, in seconds; with V(0) it looks at sizes only and changes nothing.
    type: float
    default: 15
attributes:
  check_mode:
    description: In check mode only the sizes are looked at, and nothing is read or fetched.
    support: full
  diff_mode:
    description: There is no difference to show; RV(missing) has the names.
    support: none
  platform:
    description: Any host with Python 3.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Have the model's files
  model_files:
    path: /var/lib/sglang/models/DeepSeek-V4-Flash-NVFP4
    manifest: "{{ lookup('ansible.builtin.file', 'manifest.json') | from_json }}"
    url: http://mirror.example/models/DeepSeek-V4-Flash-NVFP4
  register: model_files_result
  until: model_files_result.status | default('failed') != 'under way'
  retries: 100000
  delay: 0
"""

RETURN = r"""
status:
  description: V(complete) when every file is there and right, V(under way) when there is more to read or to fetch.
  returned: success
  type: str
  sample: complete
progress:
  description: How far it is, in words.
  returned: success
  type: str
  sample: "41.20 of 165.31 GiB, 812 MB/s, 2m44s left: fetching model-00012-of-00046.safetensors"
missing:
  description: Files that are not there with the size that the manifest wants.
  returned: success
  type: list
  elements: str
  sample: []
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.http import refusal, url_problem
from ansible.module_utils.ops.model_files import COMPLETE, UNDER_WAY, ModelFilesError, Seen, Store, files_of
from ansible.module_utils.ops.redact import masked


def run(module: AnsibleModule) -> None:
    params, start = module.params, time.monotonic()
    problem = url_problem(params["url"]) if params["url"] else ""
    if problem:
        module.fail_json(**refusal("model_files", "nothing was read or fetched", problem))
    try:
        files = files_of(params["manifest"])
        store = Store(params["path"], files, Seen(params["state_path"]), params["url"])
        missing = [file.name for file in store.missing()]
        if module.check_mode or params["max_wait"] == 0:
            status = UNDER_WAY if missing or store.unread() else COMPLETE
            module.exit_json(changed=bool(missing), status=status, progress=status, missing=missing)
        os.makedirs(os.path.dirname(params["state_path"]), exist_ok=True)
        seen = store.work(params["max_wait"])
    except ModelFilesError as error:
        command, fetched = f"ls -l {params['path']}", ""
        if params["url"]:
            command += f"; curl -sI {masked(params['url'])}/"
            took = f"That was after {time.monotonic() - start:.1f} s."
            fetched = f" {took} What was fetched stays; the next run goes on there."
        module.fail_json(msg=f"{masked(str(error))}.{fetched} next command: {command}")
    except OSError as error:
        module.fail_json(msg=f"{error}; next command: df -h {params['path']}")
    left = [file.name for file in store.missing()]
    module.exit_json(changed=seen.fetched > 0, status=seen.status, progress=seen.line(), missing=left)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "path": {"type": "path", "required": True},
                "manifest": {"type": "dict", "required": True},
                "url": {"type": "str", "default": ""},
                "state_path": {"type": "path", "default": "/var/lib/sglang/model-files.json"},
                "max_wait": {"type": "float", "default": 15},
            },
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
