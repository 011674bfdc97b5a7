#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_router_worker
short_description: Take an SGLang server out of the router, or put it back
description:
  - A server that is taken out gets no new request; those that it is answering, streamed ones too, go on to their end.
    Follow with C(sglang_drain) on the server's host.
  - Returns when the router has done it. A router that does not run is no failure, since it starts with all servers.
  - Written for C(sglang-router) 0.3.2.
options:
  url:
    description: The server as the router has it, such as C(http://127.0.0.1:30011).
    type: str
    required: true
  state:
    description: Whether the router is to have it. With V(present) the router must call it healthy as well.
    type: str
    choices: [absent, present]
    default: present
  router_url:
    description: Base URL of the router.
    type: str
    required: true
  api_key_file:
    description:
      - File on the host with the API key of router and servers, such as the credential that its unit was started with.
      - One that is not there is no key, as that of a router that does not run.
    type: path
  others:
    description:
      - Servers that are to stand in for this one.
      - When there are some, and the router calls none of them healthy, a healthy server is not taken out.
    type: list
    elements: str
    default: []
  timeout:
    description: Longest time in seconds until the router has done it.
    type: float
    default: 30
attributes:
  check_mode:
    description: In check mode the router is asked for its list, and nothing is changed.
    support: full
  diff_mode:
    description: The message says what was changed.
    support: none
  platform:
    description: Any host that reaches the router.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Take the server out of the router
  sglang_router_worker:
    url: http://10.0.0.12:30011
    state: absent
    router_url: http://127.0.0.1:30001
    api_key_file: /run/credentials/sglang-router.service/api-key
    others: [http://10.0.0.11:30011]

- name: Put it back
  sglang_router_worker:
    url: http://10.0.0.12:30011
    router_url: http://127.0.0.1:30001
    api_key_file: /run/credentials/sglang-router.service/api-key
"""

RETURN = r"""
reason:
  description: The state in words.
  returned: success
  type: str
  sample: http://10.0.0.12:30011 is out of the router
next_command:
  description: What to run next.
  returned: on failure
  type: str
  sample: curl -sS -m 60 http://127.0.0.1:30001/readiness
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.http import Client, HttpError, curl_command, read_token, refusal
from ansible.module_utils.ops.router import PATH, RouterError, set_worker


def run(module: AnsibleModule) -> None:
    params = module.params
    key_file = params["api_key_file"] if os.path.exists(params["api_key_file"] or "") else None
    command = curl_command(params["router_url"].rstrip("/") + PATH, key_file)
    try:
        key = read_token(token_file=key_file)
        outcome = set_worker(
            Client(params["router_url"], key),
            params["url"],
            params["state"],
            params["others"],
            key,
            module.check_mode,
            params["timeout"],
        )
    except ValueError as error:
        module.fail_json(**refusal("sglang_router_worker", "the router was not asked", error))
    except (HttpError, RouterError) as error:
        module.fail_json(
            msg=f"router {params['router_url']}, server {params['url']} wanted {params['state']}: {error}\n"
            f"next command: {command}",
            next_command=command,
        )
    module.exit_json(changed=outcome.changed, reason=outcome.reason)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "url": {"type": "str", "required": True},
                "state": {"type": "str", "choices": ["absent", "present"], "default": "present"},
                "router_url": {"type": "str", "required": True},
                "api_key_file": {"type": "path", "no_log": False},
                "others": {"type": "list", "elements": "str", "default": []},
                "timeout": {"type": "float", "default": 30},
            },
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
