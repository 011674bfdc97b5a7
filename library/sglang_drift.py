#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_drift
short_description: Compare a running SGLang server with what was meant to run
description:
  - A server can be healthy with yesterday's configuration. The unit was changed but not restarted, a drop-in overrides
    it, another server holds the port, or the engine chose another backend than it was told.
  - This module compares the intent with the unit, the environment and the libraries of its main process, the owner of
    the port, the server's own report (C(/server_info)), and the owners of the GPUs.
  - Only what the intent names is compared. Nothing secret is read from the server, and the value of a variable whose
    name looks like a secret's is never shown.
  - The module fails when something differs. The report is returned in both cases. Nothing is changed on the host.
options:
  unit:
    description: Name of the systemd unit, such as C(sglang-unified.service).
    type: str
    required: true
  base_url:
    description: Base URL of the engine on this host, such as C(http://127.0.0.1:30001).
    type: str
    required: true
  api_key:
    description: API key of the engine. Prefer O(api_key_file).
    type: str
  api_key_file:
    description: File on the host that holds the API key.
    type: path
  config_sha256:
    description:
      - The configuration hash (C(OPS_CONFIG_SHA256)) that the main process must have been started with.
      - The default is the one in the unit file.
    type: str
  arguments:
    description:
      - The engine's options by their name on the command line, such as C(tp-size). V(false) means not given.
      - They are compared with what the server resolved them to.
    type: dict
    default: {}
  environment:
    description:
      - The variables that the unit sets for the engine. Another variable that steers the engine, such as one of
        C(NCCL_*) or C(LD_PRELOAD), is a difference.
    type: dict
    default: {}
  server_info:
    description: Further fields of C(/server_info) with their values, such as C(attention_backend).
    type: dict
    default: {}
  release:
    description: Directory of the virtual environment that must be in use. A link is followed.
    type: path
  version:
    description: Version of SGLang that must run.
    type: str
  min_total_tokens:
    description: Smallest size of the KV pool in tokens.
    type: int
  kernels:
    description:
      - Kernels of the plugin C(dsv4_sm120) that must be active on every rank, such as C(decode).
      - The ranks are those of C(tp-size) and C(pp-size) in O(arguments).
    type: list
    elements: str
    default: []
  drop_ins:
    description: Drop-in files of the unit that are part of the configuration.
    type: list
    elements: path
    default: []
  gpus:
    description: Whether every process on a GPU must belong to the unit.
    type: bool
    default: false
  neighbours:
    description: Units of the host's other engines, which may have processes on GPUs too.
    type: list
    elements: str
    default: []
  report_path:
    description: File on the host for the report (JSON). It is replaced as a whole.
    type: path
attributes:
  check_mode:
    description: In check mode everything is compared, but a difference is no failure and no report is written.
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
- name: See that the wanted configuration is running
  sglang_drift:
    unit: sglang-unified.service
    base_url: http://127.0.0.1:30001
    config_sha256: "{{ config_sha256 }}"
    release: /opt/sglang/current/venv
    version: 0.5.23
    arguments:
      tp-size: 4
      context-length: 524288
    environment:
      SGLANG_ENABLE_PCIE_IPC_ALLREDUCE: "1"
    gpus: true
"""

RETURN = r"""
report:
  description:
    - The report. C(ok), C(unit), C(started), C(elapsed_s), C(passed) (a count), C(failed) and C(skipped) (lists of
      ids) and C(checks).
    - A row of C(checks) has C(id), C(ok), C(skipped), C(wanted), C(seen), C(cause), C(next_command) and C(evidence).
    - The ids are C(drift.unit), C(drift.config), C(drift.port), C(drift.release), C(drift.environment),
      C(drift.arguments), C(drift.server_info), C(drift.version), C(drift.capacity), C(drift.kernels) and C(drift.gpus);
      only those that the intent asks for are there.
  returned: always
  type: dict
  sample:
    ok: true
    passed: 8
    failed: []
summary:
  description: One line.
  returned: always
  type: str
  sample: 8 of 8 checks passed in 0.1 s
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.drift import Reality, drift_report, intent_of
from ansible.module_utils.ops.http import Client, read_token
from ansible.module_utils.ops.report import failure_text, summary_text, write_report
from ansible.module_utils.ops.systemd import SystemdError

NOT_INTENT = ("base_url", "api_key", "api_key_file", "report_path")


def run(module: AnsibleModule) -> None:
    params = module.params
    try:
        intent = intent_of({name: value for name, value in params.items() if name not in NOT_INTENT})
        client = Client(params["base_url"], read_token(params["api_key"], params["api_key_file"]))
        report = drift_report(intent, Reality(client, key_file=params["api_key_file"]))
    except PermissionError as error:
        module.fail_json(msg=f"cannot read {error.filename}: {error.strerror}; run with become: true")
    except (ValueError, SystemdError) as error:
        module.fail_json(msg=f"nothing was compared: {error}")
    if module.check_mode:
        module.exit_json(changed=False, report=report, summary=summary_text(report))
    if params["report_path"]:
        try:
            write_report(params["report_path"], report)
        except OSError as error:
            module.fail_json(msg=f"cannot write the report to {params['report_path']}: {error.strerror}", report=report)
    if not report["ok"]:
        module.fail_json(msg=failure_text(report), report=report, summary=summary_text(report))
    module.exit_json(changed=False, report=report, summary=summary_text(report))


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "unit": {"type": "str", "required": True},
                "base_url": {"type": "str", "required": True},
                "api_key": {"type": "str", "no_log": True},
                "api_key_file": {"type": "path", "no_log": False},
                "config_sha256": {"type": "str"},
                "arguments": {"type": "dict", "default": {}},
                "environment": {"type": "dict", "default": {}},
                "server_info": {"type": "dict", "default": {}},
                "release": {"type": "path"},
                "version": {"type": "str"},
                "min_total_tokens": {"type": "int", "no_log": False},
                "kernels": {"type": "list", "elements": "str", "default": []},
                "drop_ins": {"type": "list", "elements": "path", "default": []},
                "gpus": {"type": "bool", "default": False},
                "neighbours": {"type": "list", "elements": "str", "default": []},
                "report_path": {"type": "path"},
            },
            mutually_exclusive=[("api_key", "api_key_file")],
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
