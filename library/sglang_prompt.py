#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_prompt
short_description: Ask a served model questions with checkable answers
description:
  - A server can be healthy and answer empty, in a loop, or wrong. This module asks questions whose answers are known
    and compares them as answers; C(3910) is not C(391).
  - Every answer is also checked for content, repetition, leaked control tokens, a sane end, token counts, and for
    being the same streamed and whole.
  - The module fails when a check fails. The report is returned in both cases.
  - Nothing is changed on the host, except that a report is written when O(report_path) is given.
options:
  base_url:
    description: Base URL of the server, such as C(http://127.0.0.1:30001).
    type: str
    required: true
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
  timeout:
    description: Limit in seconds of one request, where a check sets none.
    type: float
    default: 60
  report_path:
    description: File on the host for the report (JSON). It is replaced as a whole.
    type: path
  checks:
    description: The questions.
    type: list
    elements: dict
    required: true
    suboptions:
      id:
        description: Stable name of the check; its row in the report is C(prompt.ID).
        type: str
        required: true
      prompt:
        description: The question, as one user message.
        type: str
      system:
        description: System message in front of O(checks[].prompt).
        type: str
      messages:
        description: The whole conversation, instead of O(checks[].prompt).
        type: list
        elements: dict
      expect:
        description:
          - What the answer must be, C(kind) and C(value).
          - C(exact), the whole answer but for case, quotes and a final full stop; C(word), the value stands in the
            answer as a word and is not denied; C(integer), every number that is not in the question is the value;
            C(json), the answer is JSON and holds the value; C(regex), the pattern matches the whole answer;
            C(tool_call), exactly one call of C(value.name) with C(value.arguments); C(non_empty), any content.
          - A list as C(value) of C(exact) or C(word) means any of these. C(reject) lists words that make it wrong.
        type: dict
        required: true
      max_tokens:
        description: Longest answer in tokens.
        type: int
        default: 64
      temperature:
        description: Sampling temperature.
        type: float
        default: 0
      stream:
        description: Ask streamed and whole, streamed only, or never streamed.
        type: str
        choices: [both, only, never]
        default: both
      same_when_streamed:
        description: Whether the streamed and the whole answer must be the same.
        type: bool
        default: true
      timeout:
        description: Limit in seconds of one request of this check.
        type: float
      tries:
        description: How often the question may be asked.
        type: int
        default: 1
      min_pass_rate:
        description: Share of O(checks[].tries) that must pass. Asking ends when the outcome is certain.
        type: float
        default: 1
      allow_length:
        description: Whether an answer may be cut at O(checks[].max_tokens).
        type: bool
        default: false
      reasoning:
        description: Whether the answer must, or must not, come with separated reasoning.
        type: str
        choices: [any, required, forbidden]
        default: any
      max_ttft_s:
        description: Longest time to the first token in seconds (streamed).
        type: float
      response_format:
        description: The C(response_format) of the request.
        type: dict
      tools:
        description: The C(tools) of the request.
        type: list
        elements: dict
      chat_template_kwargs:
        description: The C(chat_template_kwargs) of the request, such as C(thinking).
        type: dict
      extra_body:
        description: Further fields of the request.
        type: dict
attributes:
  check_mode:
    description: In check mode nothing is sent and nothing is written.
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
- name: Ask the model
  sglang_prompt:
    base_url: http://127.0.0.1:30001
    model: smollm2-135m-instruct
    report_path: /var/lib/sglang/reports/smoke.json
    checks:
      - id: capital
        prompt: What is the capital of France? Answer in one word.
        expect:
          kind: word
          value: Paris
        max_tokens: 32
      - id: product
        prompt: What is 17*23? Answer with the number only.
        expect:
          kind: integer
          value: 391
        tries: 3
        min_pass_rate: 0.66
"""

RETURN = r"""
report:
  description:
    - The report. C(ok), C(base_url), C(model), C(started), C(elapsed_s), C(passed) (a count), C(failed) (a list of
      ids) and C(checks).
    - A row of C(checks) has C(id), C(ok), C(wanted), C(seen), C(elapsed_s), C(ttft_s), C(cause), C(next_command),
      C(passed), C(tried) and C(tries) with every answer and its faults.
    - The ids are C(server.model), C(prompt.ID) for each check, and C(answer.FAULT) with FAULT one of C(request),
      C(expected), C(non_empty), C(finish_reason), C(usage), C(loop), C(markers), C(reasoning),
      C(same_when_streamed), C(first_token), C(tool_loop), C(prompt_size), C(crossed).
  returned: always
  type: dict
  sample:
    ok: true
    passed: 12
    failed: []
summary:
  description: One line.
  returned: always
  type: str
  sample: 12 of 12 checks passed in 4.2 s
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.http import Client, read_token
from ansible.module_utils.ops.prompt_checks import PromptCheck, check_problem
from ansible.module_utils.ops.report import failure_text, summary_text, write_report
from ansible.module_utils.ops.smoke import Suite
from ansible.module_utils.ops.smoke import run as run_suite

REQUEST_FIELDS = ("response_format", "tools", "chat_template_kwargs")

CHECK_SPEC = {
    "id": {"type": "str", "required": True},
    "prompt": {"type": "str"},
    "system": {"type": "str"},
    "messages": {"type": "list", "elements": "dict"},
    "expect": {"type": "dict", "required": True},
    "max_tokens": {"type": "int", "default": 64, "no_log": False},
    "temperature": {"type": "float", "default": 0},
    "stream": {"type": "str", "choices": ["both", "only", "never"], "default": "both"},
    "same_when_streamed": {"type": "bool", "default": True},
    "timeout": {"type": "float"},
    "tries": {"type": "int", "default": 1},
    "min_pass_rate": {"type": "float", "default": 1, "no_log": False},
    "allow_length": {"type": "bool", "default": False},
    "reasoning": {"type": "str", "choices": ["any", "required", "forbidden"], "default": "any"},
    "max_ttft_s": {"type": "float"},
    "response_format": {"type": "dict"},
    "tools": {"type": "list", "elements": "dict"},
    "chat_template_kwargs": {"type": "dict"},
    "extra_body": {"type": "dict"},
}


def messages_of(given: dict) -> tuple:
    """The conversation of a check, from messages or from system and prompt."""
    if given["messages"]:
        return tuple(given["messages"])
    named = (("system", given["system"]), ("user", given["prompt"]))
    return tuple({"role": role, "content": content} for role, content in named if content)


def prompt_check(given: dict, timeout: float) -> PromptCheck:
    extra = {name: given[name] for name in REQUEST_FIELDS if given[name] is not None}
    extra.update(given["extra_body"] or {})
    return PromptCheck(
        id=given["id"],
        messages=messages_of(given),
        expect=given["expect"],
        max_tokens=given["max_tokens"],
        temperature=given["temperature"],
        stream=given["stream"],
        timeout=given["timeout"] or timeout,
        tries=given["tries"],
        min_pass_rate=given["min_pass_rate"],
        allow_length=given["allow_length"],
        reasoning=given["reasoning"],
        same_when_streamed=given["same_when_streamed"],
        max_ttft_s=given["max_ttft_s"],
        extra=extra,
    )


def run(module: AnsibleModule) -> None:
    params = module.params
    checks = [prompt_check(given, params["timeout"]) for given in params["checks"]]
    problems = [problem for problem in map(check_problem, checks) if problem]
    ids = [check.id for check in checks]
    problems += [f"check id {id!r} is used twice" for id in sorted({id for id in ids if ids.count(id) > 1})]
    if problems:
        module.fail_json(msg="nothing was asked: " + "; ".join(problems))
    if module.check_mode:
        module.exit_json(changed=False, report={}, summary=f"check mode: {len(checks)} questions were not asked")
    try:
        client = Client(params["base_url"], read_token(params["api_key"], params["api_key_file"]))
    except ValueError as error:
        module.fail_json(msg=f"nothing was asked: {error}")
    report = run_suite(client, params["model"], Suite(prompts=tuple(checks)), key_file=params["api_key_file"])
    if params["report_path"]:
        try:
            write_report(params["report_path"], report)
        except OSError as error:
            module.fail_json(msg=f"cannot write the report to {params['report_path']}: {error.strerror}", report=report)
    summary = summary_text(report)
    if not report["ok"]:
        module.fail_json(msg=failure_text(report), report=report, summary=summary)
    module.exit_json(changed=False, report=report, summary=summary)


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "base_url": {"type": "str", "required": True},
                "model": {"type": "str", "required": True},
                "api_key": {"type": "str", "no_log": True},
                "api_key_file": {"type": "path", "no_log": False},
                "timeout": {"type": "float", "default": 60},
                "report_path": {"type": "path"},
                "checks": {
                    "type": "list",
                    "elements": "dict",
                    "required": True,
                    "options": CHECK_SPEC,
                    "mutually_exclusive": [("prompt", "messages"), ("system", "messages")],
                    "required_one_of": [("prompt", "messages")],
                },
            },
            mutually_exclusive=[("api_key", "api_key_file")],
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
