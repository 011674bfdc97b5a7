#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_smoke
short_description: Prove that a served model answers, and answers right
description:
  - A server can be healthy and answer empty, in a loop, wrong, or not at all. This module asks questions whose answers
    are known and compares them as answers, lets the model call tools, hides facts in long prompts, asks many questions
    at once, refuses to believe a server that accepts an over-long prompt, and sees that KV slots are given back.
  - Every answer is also checked for content, repetition, leaked control tokens, a sane end, token counts, and for being
    the same streamed and whole.
  - The module fails when a check fails. A check that can't be judged now, such as one that needs an idle server, is
    reported as skipped. The report is returned in all cases; one of a run that could not begin has failed.
  - Nothing is changed on the host, except that a report is written when O(report_path) is given.
options:
  base_url:
    description: Base URL of the service as its clients reach it, such as C(http://127.0.0.1:30001).
    type: str
    required: true
  engine_url:
    description:
      - Base URL of an engine, when a router stands in front of it.
      - Its limits, C(/metrics) and C(/v1/loads) are read there.
    type: str
  model:
    description: Name under which the model must be served.
    type: str
    required: true
  api_key:
    description: API key of the server. Prefer O(api_key_file).
    type: str
  api_key_file:
    description: File on the host that holds the API key.
    type: path
  profile:
    description:
      - V(quick) asks the questions and looks at limits and counters, within a minute.
      - V(full) adds tools, concurrent clients, long prompts and a client that leaves.
      - V(capacity) adds the prompts that take minutes, such as one near the limit.
    type: str
    choices: [quick, full, capacity]
    default: quick
  checks:
    description:
      - The checks of the model, as in C(checks) of a file in C(models/). Keys and types are checked before anything is
        asked, and all problems are named at once.
      - C(prompts), a list of questions. C(id); C(prompt) with or without C(system), or C(messages); C(expect) with
        C(kind) and C(value), where the kind is C(exact), C(word), C(integer), C(sequence), C(json), C(regex),
        C(tool_call) or C(non_empty); C(max_tokens), C(temperature), C(stream) (both, only, never),
        C(same_when_streamed), C(timeout), C(tries), C(min_pass_rate), C(allow_length), C(reasoning) (any, required,
        forbidden), C(finish_reason) (the only accepted one), C(max_ttft_s) and C(max_gap_s) (longest time to the first
        token, longest silence after it).
      - C(tools), a list of conversations with a tool. C(id), C(prompt), C(tools), the expected C(call), its C(result),
        the C(expect)ed answer, C(max_calls), C(tool_choice) for the first request.
      - C(concurrent), a list of sets of questions asked at one moment. C(id), C(cases) with C(prompt) and C(expect),
        C(rounds).
      - C(needles), a list of long prompts with hidden facts. C(id), C(tokens) or C(share_of_limit), C(needles) (their
        number), C(seed).
      - C(over_long), C(cancelled_client), C(resting_level), C(counters) and C(endpoints) need no data; V(false) leaves
        one out. Checks without a single question are refused, unless each of these is named.
      - Each check may name its C(profile), and C(response_format), C(chat_template_kwargs) or C(extra_body) for the
        request.
    type: dict
    required: true
  report_path:
    description:
      - File on the host for the report (JSON). It is replaced as a whole when the run begins, by one that says that the
        run has not ended, and again at its end.
    type: path
  stopped:
    description:
      - Why nothing may be asked, in the words of a check before this one, such as readiness or drift.
      - When it is not empty, nothing is asked. The report says so, and the module fails with it.
    type: str
    default: ""
  before:
    description:
      - Reports of what was judged before this run, such as those of C(sglang_drift), one a server. Their rows
        stand in this module's report, so that they are part of its verdict.
      - Of several servers' rows of one id the worst counts; C(unit) in its evidence says whose it is.
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    description: In check mode nothing is sent and nothing is written; the checks themselves are examined.
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
- name: Prove that the model answers
  sglang_smoke:
    base_url: http://127.0.0.1:30001
    model: smollm2-135m-instruct
    profile: full
    report_path: /var/lib/sglang/reports/smoke.json
    checks:
      prompts:
        - id: capital
          prompt: What is the capital of France? Answer in one word.
          expect:
            kind: word
            value: Paris
          max_tokens: 32
      needles:
        - id: 2k
          tokens: 2500
"""

RETURN = r"""
report:
  description:
    - The report. C(ok), C(base_url), C(model), C(profile), C(started), C(elapsed_s), C(passed) (a count), C(failed) and
      C(skipped) (lists of ids), C(tries) and C(failed_tries) (counts, tolerated ones included) and C(checks).
    - A row of C(checks) has C(id), C(ok), C(skipped), C(wanted), C(seen), C(elapsed_s), C(ttft_s), C(cause),
      C(next_command), C(passed), C(tried), C(tries) with every answer and its faults, and C(evidence).
    - The ids are C(server.model), C(server.endpoints), C(prompt.ID), C(tool.ID), C(concurrent.ID), C(needle.ID),
      C(limits.over_long), C(kv.cancelled_client), C(kv.resting_level), C(metrics.counters), C(speculation.accepted) and
      C(answer.FAULT), and those of O(before);
      of these only those of O(before), and C(run.begin), when the run could not begin.
  returned: always
  type: dict
  sample:
    ok: true
    passed: 23
    failed: []
summary:
  description: One line.
  returned: always
  type: str
  sample: 23 of 23 checks passed in 22.8 s
next_command:
  description: What to run next.
  returned: when nothing was asked
  type: str
  sample: ansible-doc -t module sglang_smoke
"""

import contextlib
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.http import Client, read_token, refusal
from ansible.module_utils.ops.report import (
    failure_text,
    judged_before,
    summary_text,
    unwritten,
    write_problem,
    write_report,
)
from ansible.module_utils.ops.smoke import begun_report, stopped_report, suite_of, unbegun_report
from ansible.module_utils.ops.smoke import run as run_suite


def end_unasked(module: AnsibleModule, report: dict, msg: str, next_command: str) -> None:
    """Fail with the report of a run that did not begin, which replaces an older one."""
    path = module.params["report_path"]
    if path and not module.check_mode:
        with contextlib.suppress(OSError, ValueError):  # the error may be that it can't be written
            write_report(path, report)
    module.fail_json(msg=msg, next_command=next_command, report=report, summary=summary_text(report))


def end_refused(module: AnsibleModule, error: ValueError, head: tuple, before: list) -> None:
    """Fail because of an argument."""
    said = refusal("sglang_smoke", "nothing was asked", error)
    end_unasked(module, unbegun_report(str(error), *head, said["next_command"], before), **said)


def run(module: AnsibleModule) -> None:
    params = module.params
    head = (params["base_url"], params["model"], params["profile"], time.time())
    try:
        before = judged_before(params["before"])
    except ValueError as error:
        end_refused(module, error, head, [])
    if params["stopped"]:
        if module.check_mode:
            module.exit_json(changed=False, report={}, summary="check mode: nothing was asked")
        report = stopped_report(params["stopped"], *head, before)
        command = report["checks"][0]["next_command"]
        end_unasked(module, report, f"nothing was asked: {params['stopped']}", command)
    try:
        suite = suite_of(params["checks"])
        problem = suite.problem(params["profile"])
        if problem:
            raise ValueError(problem)
        if module.check_mode:
            module.exit_json(changed=False, report={}, summary="check mode: nothing was asked")
        token = read_token(params["api_key"], params["api_key_file"])
        client = Client(params["base_url"], token)
        engine = Client(params["engine_url"], token) if params["engine_url"] else None
        problem = write_problem(params["report_path"]) if params["report_path"] else ""
        if problem:
            raise ValueError(problem)
    except ValueError as error:
        end_refused(module, error, head, before)
    if params["report_path"]:
        with contextlib.suppress(OSError):  # what can't be written now can't be at the end, and is told then
            write_report(params["report_path"], begun_report(params["report_path"], *head))
    report = run_suite(client, params["model"], suite, params["profile"], params["api_key_file"], engine, before=before)
    summary = summary_text(report)
    if params["report_path"]:
        try:
            write_report(params["report_path"], report)
        except OSError as error:
            module.fail_json(**unwritten(params["report_path"], error), report=report)
    if not report["ok"]:
        module.fail_json(msg=failure_text(report), report=report, summary=summary)
    module.exit_json(changed=False, report=report, summary=summary)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "base_url": {"type": "str", "required": True},
                "engine_url": {"type": "str"},
                "model": {"type": "str", "required": True},
                "api_key": {"type": "str", "no_log": True},
                "api_key_file": {"type": "path", "no_log": False},
                "profile": {"type": "str", "choices": ["quick", "full", "capacity"], "default": "quick"},
                "checks": {"type": "dict", "required": True},
                "report_path": {"type": "path"},
                "stopped": {"type": "str", "default": ""},
                "before": {"type": "list", "elements": "dict", "default": []},
            },
            mutually_exclusive=[("api_key", "api_key_file")],
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
