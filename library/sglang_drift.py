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
  intent:
    description:
      - What must run. Only C(unit), the name of the systemd unit, is needed; what is not named is not compared.
      - C(arguments) are the engine's options by their name on the command line, such as C(tp-size), with V(false) for
        "not given". They are compared with what the server resolved them to.
      - C(environment) are the variables that the unit sets for the engine. Another variable that steers the engine,
        such as one of C(NCCL_*), C(TRITON_*) or C(DSV4_SM120_*), is a difference; the caches of compiled code, which
        the unit sets for every server, are not.
      - C(server_info) are further fields of C(/server_info) with their values, such as C(attention_backend), and
        C(version) is SGLang's.
      - C(config_sha256) is the hash (C(OPS_CONFIG_SHA256)) that the main process must have been started with; the
        default is the one in the unit file. C(unit_source) is the file on the host that the unit file was made from;
        the two differ in that hash only, and the launch script that it names must have the sha256 that it names.
        C(release) is the virtual environment that must be in use, a link or not; beside the directory that it leads to
        stands its lock file, C(requirements.txt), and it must hold these packages and no others.
      - C(min_total_tokens) is the smallest size of the KV pool. C(kernels) are those of the plugin C(dsv4_sm120) that
        must be active on every rank, of which C(tp-size) and C(pp-size) say how many there are.
      - C(drop_ins) are the unit's drop-in files that are part of the configuration.
      - With C(gpus), every process on a GPU must belong to the unit or to C(neighbours), the units of the host's other
        engines.
    type: dict
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
    base_url: http://127.0.0.1:30001
    intent:
      unit: sglang-unified.service
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
    - The ids are C(drift.unit), C(drift.launch), C(drift.packages), C(drift.config), C(drift.port), C(drift.release),
      C(drift.environment), C(drift.arguments), C(drift.server_info), C(drift.version), C(drift.capacity),
      C(drift.kernels) and C(drift.gpus);
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
next_command:
  description: What to run next.
  returned: when nothing was compared
  type: str
  sample: ansible-doc -t module sglang_drift
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.drift import Reality, drift_report, intent_of
from ansible.module_utils.ops.http import Client, read_token, refusal
from ansible.module_utils.ops.report import failure_text, summary_text, unwritten, write_report


def run(module: AnsibleModule) -> None:
    params = module.params
    try:
        intent = intent_of(params["intent"])
        client = Client(params["base_url"], read_token(params["api_key"], params["api_key_file"]))
        report = drift_report(intent, Reality(client, key_file=params["api_key_file"]))
    except PermissionError as error:
        command = f"ls -l {error.filename}"
        said = f"cannot read {error.filename}: {error.strerror}; run with become: true"
        module.fail_json(msg=f"{said}\nnext command: {command}", next_command=command)
    except ValueError as error:
        module.fail_json(**refusal("sglang_drift", "nothing was compared", error))
    if module.check_mode:
        module.exit_json(changed=False, report=report, summary=summary_text(report))
    if params["report_path"]:
        try:
            write_report(params["report_path"], report)
        except OSError as error:
            module.fail_json(**unwritten(params["report_path"], error), report=report)
    if not report["ok"]:
        module.fail_json(msg=failure_text(report), report=report, summary=summary_text(report))
    module.exit_json(changed=False, report=report, summary=summary_text(report))


def main() -> None:
    run(
        AnsibleModule(
            argument_spec={
                "intent": {"type": "dict", "required": True, "no_log": False},
                "base_url": {"type": "str", "required": True},
                "api_key": {"type": "str", "no_log": True},
                "api_key_file": {"type": "path", "no_log": False},
                "report_path": {"type": "path"},
            },
            mutually_exclusive=[("api_key", "api_key_file")],
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
