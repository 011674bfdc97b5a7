#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_drain
short_description: Wait until an SGLang server has no request left, or the time for that is over
description:
  - For a server that gets no new request, see C(sglang_router_worker). The server is only asked (C(/v1/loads)).
  - Never fails. What is left when the time is over is in RV(running) and RV(waiting), and is lost at the server's stop.
options:
  base_url:
    description: Base URL of the server, such as C(http://127.0.0.1:30011).
    type: str
    required: true
  api_key_file:
    description: File on the host with the server's API key.
    type: path
  timeout:
    description: Longest time in seconds.
    type: float
    required: true
attributes:
  check_mode:
    description: In check mode nothing is asked.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
  platform:
    description: Any host that reaches the server.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Let it answer what it has
  sglang_drain:
    base_url: http://127.0.0.1:30011
    api_key_file: /etc/sglang/credentials/api-key
    timeout: 60
"""

RETURN = r"""
drained:
  description: Whether no request was left.
  returned: always
  type: bool
  sample: true
running:
  description: Requests that ran at the end, 0 when the server did not say.
  returned: always
  type: int
  sample: 0
waiting:
  description: Requests that waited at the end, 0 when the server did not say.
  returned: always
  type: int
  sample: 0
elapsed_s:
  description: Seconds until then.
  returned: always
  type: float
  sample: 2.4
msg:
  description: The same in words.
  returned: always
  type: str
  sample: nothing left after 2.4 s
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.engine_load import watch_idle
from ansible.module_utils.ops.http import Client, HttpError, read_token


def run(module: AnsibleModule) -> None:
    params = module.params
    if module.check_mode:
        module.exit_json(
            changed=False, drained=True, running=0, waiting=0, elapsed_s=0.0, msg="not asked in check mode"
        )
    start = time.monotonic()
    try:
        client = Client(params["base_url"], read_token(token_file=params["api_key_file"]))
        watched = watch_idle(client, params["timeout"])
    except (HttpError, ValueError) as error:
        elapsed = round(time.monotonic() - start, 1)
        command = (
            "systemctl status 'sglang-*'" if isinstance(error, HttpError) else "ansible-doc -t module sglang_drain"
        )
        said = f"the server does not say what it is answering: {error}\nnext command: {command}"
        module.exit_json(changed=False, drained=False, running=0, waiting=0, elapsed_s=elapsed, msg=said)
    elapsed, left = round(time.monotonic() - start, 1), watched.last
    said = f"nothing left after {elapsed} s" if watched.held else f"after {elapsed} s there are {left.words()}"
    result = {"drained": watched.held, "running": left.running, "waiting": left.waiting, "elapsed_s": elapsed}
    module.exit_json(changed=False, msg=said, **result)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "base_url": {"type": "str", "required": True},
                "api_key_file": {"type": "path", "no_log": False},
                "timeout": {"type": "float", "required": True},
            },
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
