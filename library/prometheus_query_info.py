#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: prometheus_query_info
short_description: Ask Prometheus and check the answer
description:
  - A metric page that looks right does not mean that Prometheus stores it. This module runs an instant query and
    waits, within O(window), until the result is what is expected.
options:
  url:
    description: Base URL of Prometheus, such as C(http://127.0.0.1:9090).
    type: str
    required: true
  query:
    description: The PromQL expression.
    type: str
    required: true
  non_empty:
    description: Whether the result must hold a series.
    type: bool
    default: true
  min_value:
    description: Least value of every series.
    type: float
  max_value:
    description: Largest value of every series.
    type: float
  increased_over:
    description:
      - RV(value) of an earlier call with the same query. The value now must be larger.
      - The sum over all series counts.
    type: float
  window:
    description: Seconds to try again until the result is as expected. A scrape interval or two.
    type: float
    default: 0
  timeout:
    description: Limit in seconds of one request.
    type: float
    default: 10
attributes:
  check_mode:
    description: In check mode nothing is asked.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
  platform:
    description: Any host that reaches Prometheus.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Read the counter before the smoke run
  prometheus_query_info:
    url: http://127.0.0.1:9090
    query: sum(sglang:generation_tokens_total)
    window: 30
  register: smoke_tokens_before

- name: Check that the engine's counter moved
  prometheus_query_info:
    url: http://127.0.0.1:9090
    query: sum(sglang:generation_tokens_total)
    increased_over: "{{ smoke_tokens_before.value }}"
    window: 30
"""

RETURN = r"""
value:
  description: The value, or the sum over all series. None when there is no series.
  returned: always
  type: float
  sample: 1204
result:
  description: The series, each with C(labels) and C(value).
  returned: always
  type: list
  elements: dict
  sample: [{"labels": {"job": "sglang"}, "value": 1204}]
attempts:
  description: How often Prometheus was asked.
  returned: always
  type: int
  sample: 1
elapsed_s:
  description: Seconds until the result.
  returned: always
  type: float
  sample: 0.02
next_command:
  description: What to run next.
  returned: on failure
  type: str
  sample: curl -sS http://127.0.0.1:9090/api/v1/targets
"""

import shlex

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.http import Client, HttpError, refusal
from ansible.module_utils.ops.prometheus import Expectation, query_until


def run(module: AnsibleModule) -> None:
    params = module.params
    url, query = params["url"].rstrip("/"), params["query"]
    if module.check_mode:
        module.exit_json(changed=False, value=None, result=[], attempts=0, elapsed_s=0.0)
    expectation = Expectation(params["non_empty"], params["min_value"], params["max_value"], params["increased_over"])
    by_hand = f"curl -sS -G {url}/api/v1/query --data-urlencode {shlex.quote('query=' + query)}"
    try:
        client = Client(url, timeout=params["timeout"])
        outcome = query_until(client, query, expectation, params["window"])
    except ValueError as error:
        module.fail_json(**refusal("prometheus_query_info", "nothing was asked, url", error))
    except HttpError as error:
        said = f"Prometheus refuses the query {query}: {error}"
        module.fail_json(msg=f"{said}\nnext command: {by_hand}", next_command=by_hand)
    result = {
        "changed": False,
        "value": outcome.value,
        "result": [{"labels": sample.labels, "value": sample.value} for sample in outcome.samples],
        "attempts": outcome.attempts,
        "elapsed_s": round(outcome.elapsed_s, 2),
    }
    if not outcome.ok:
        targets = f"curl -sS {url}/api/v1/targets"
        result["next_command"] = by_hand if outcome.samples else targets
        seen = ", ".join(f"{sample.value:g} {sample.labels}" for sample in outcome.samples[:5]) or "no series"
        module.fail_json(
            msg=f"query {query} at {url}: {outcome.reason}; seen: {seen}; {outcome.attempts} tries in "
            f"{outcome.elapsed_s:.1f} s\nnext command: {result['next_command']}",
            **result,
        )
    module.exit_json(**result)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "url": {"type": "str", "required": True},
                "query": {"type": "str", "required": True},
                "non_empty": {"type": "bool", "default": True},
                "min_value": {"type": "float"},
                "max_value": {"type": "float"},
                "increased_over": {"type": "float"},
                "window": {"type": "float", "default": 0},
                "timeout": {"type": "float", "default": 10},
            },
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
