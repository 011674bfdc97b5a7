#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_memory_plan
short_description: Plan an SGLang server's memory before it starts
description:
  - Says what fits on a GPU, with the pool arithmetic of SGLang 0.5.23 - tokens per pool, memory left free,
    full-context requests at once, returning sessions that stay warm, and what each lever gains and costs.
  - Fails on a plan that cannot hold one full-context request and names the numbers that clash.
  - With O(server) the plan is compared with what a running server reports.
  - Reads nothing but its options and O(config_json). Nothing is changed on the host.
options:
  model:
    description: Built-in model facts.
    type: str
    choices: [DeepSeek-V4-Flash, DeepSeek-V4-Pro]
  config_json:
    description:
      - C(config.json) of the checkpoint, on the machine the module runs on, for the model facts instead of O(model).
      - DeepSeek-V4 and dense models with full attention are known.
    type: path
  config:
    description: Content of a C(config.json), for the model facts instead of O(model) and O(config_json).
    type: dict
  memory_free_mib:
    description: Memory that one GPU (on a CPU, the host) has free before the server starts, in MiB.
    type: float
    required: true
  tp_size:
    description: GPUs of one replica.
    type: int
    default: 1
  context_length:
    description: Longest request, prompt and answer together.
    type: int
    required: true
  mem_fraction_static:
    description: Part of the memory for weights and cache.
    type: float
    default: 0.80
  max_running_requests:
    description: Requests that decode at once.
    type: int
    default: 64
  cuda_graph_max_bs:
    description: Largest decode batch with a CUDA graph. V(0) for none.
    type: int
    default: 64
  chunked_prefill_size:
    description: Tokens of one prefill step.
    type: int
    default: 4096
  kv_cache_dtype:
    description: Data type of the cache. DeepSeek-V4 knows V(auto) and V(fp8_e4m3) only.
    type: str
    choices: [auto, fp8_e4m3, fp8_e5m2, bfloat16, float16, float32]
    default: auto
  swa_full_tokens_ratio:
    description: Tokens of DeepSeek-V4's sliding-window pool per token of the main pool.
    type: float
    default: 0.1
  compress_state_dtype:
    description: Data type of DeepSeek-V4's compressor state (E(SGLANG_DSV4_COMPRESS_STATE_DTYPE)).
    type: str
    choices: [float32, bfloat16]
    default: float32
  speculative_num_draft_tokens:
    description: Draft tokens of speculative decoding with the checkpoint's MTP layer. V(0) for none.
    type: int
    default: 0
  decode_side:
    description: Whether the server is the one of a disaggregated pair that answers.
    type: bool
    default: false
  decode_extra_slots:
    description:
      - Request slots of a decode side for prompts that are on their way to it.
      - The default is SGLang's choice, two for each of O(max_running_requests) up to 32 of them and none for more.
    type: int
  indexer_backend:
    description: Indexer of DeepSeek-V4 - this repository's kernels, SGLang's TileLang kernel, or its torch fallback.
    type: str
    choices: [dsv4_sm120, tilelang, torch]
    default: dsv4_sm120
  max_total_tokens:
    description: Upper bound of the main pool, when the server is started with one.
    type: int
  page_size:
    description: Page size of a dense model's cache. DeepSeek-V4's is always 256.
    type: int
    default: 1
  weights_gib:
    description: Weights per GPU as a server has reported them. The default is an estimate from the model facts.
    type: float
  graph_gib:
    description: Memory of the captured decode graphs as a server has reported it. The default is an estimate.
    type: float
  runtime_gib:
    description: Memory that CUDA and NCCL take before SGLang measures what is free.
    type: float
    default: 0.77
  load_overhead_gib:
    description: Memory beyond the weights that is taken when the cache is sized.
    type: float
    default: 0.4
  headroom_gib:
    description:
      - Memory to keep free while a full-context prompt ends its prefill, for everything the plan does not list.
      - The default is SGLang's own reserve for activations, 0.5 GiB, 1.5 MiB per token of O(chunked_prefill_size) and
        1/8 GiB per GPU of the replica.
    type: float
  session_tokens:
    description: Length of the returning sessions to count, prompt and answer together.
    type: int
    default: 65536
  session_answer_tokens:
    description: Tokens of O(session_tokens) that the server generated. Their end is one more boundary to keep.
    type: int
    default: 1024
  mem_fractions:
    description: Rows of RV(table). Empty for no table.
    type: list
    elements: float
    default: []
  context_lengths:
    description: Columns of RV(table) beside O(context_length). Those above the model's maximum are left out.
    type: list
    elements: int
    default: []
  server:
    description:
      - What a running server reports, by SGLang's names - C(max_total_num_tokens), C(max_total_num_tokens_swa),
        C(weight_memory_usage_gb), C(max_running_requests), C(context_len). Other keys are ignored.
    type: dict
  checkpoint:
    description:
      - Content of the C(config.json) of the checkpoint that is served.
      - Each fact in it that is not what the plan is made with is a warning.
    type: dict
  tolerance:
    description: Difference between plan and server that is not a warning, as a ratio.
    type: float
    default: 0.03
  metrics_labels:
    description: Labels of every sample in RV(metrics).
    type: dict
    default: {}
  fail_on_refusal:
    description: Fail when the plan is refused. Otherwise the refusals are only returned.
    type: bool
    default: true
attributes:
  check_mode:
    description: Does the same in check mode.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
  platform:
    description: Any host with Python.
    platforms: posix
    support: full
author:
  - The maintainers of this repository (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Plan one replica of four GPUs
  sglang_memory_plan:
    model: DeepSeek-V4-Flash
    memory_free_mib: 97249
    tp_size: 4
    context_length: 524288
  register: plan

- name: Plan the model on the host's disk with what its GPUs have free
  sglang_memory_plan:
    config_json: /var/lib/sglang/models/model/config.json
    memory_free_mib: "{{ gpu_free_mib | min }}"
    tp_size: 4
    context_length: 524288
    mem_fractions: [0.8, 0.85, 0.9]
    fail_on_refusal: false

- name: Compare with the running server
  sglang_memory_plan:
    model: DeepSeek-V4-Flash
    memory_free_mib: 97249
    tp_size: 4
    context_length: 524288
    server:
      max_total_num_tokens: 5840128
      context_len: 524288
"""

RETURN = r"""
plan:
  description: >-
    The plan with its inputs, pools and their parts, tensors outside the budget, refusals, warnings and levers.
  returned: always
  type: dict
  sample: {max_total_num_tokens: 5937664, swa_tokens: 593664, full_context_requests: 11, free_left_gib: 12.2}
verdict:
  description: The plan in sentences.
  returned: always
  type: list
  elements: str
  sample: ["11 full-context requests of 512k tokens at once (limit: KV pool)"]
capacity:
  description: Capacity of the main pool in words.
  returned: always
  type: str
  sample: 11 512k requests, or 11597 of 512 tokens
refusals:
  description: Why the plan is refused, each with its id, reason and numbers. Empty for a plan that fits.
  returned: always
  type: list
  elements: dict
  sample: []
warnings_of_plan:
  description: What is thin about a plan that fits, each with its id, reason and numbers.
  returned: always
  type: list
  elements: dict
  sample: []
report:
  description: The whole plan as text for a terminal.
  returned: always
  type: str
  sample: "free before load         94.20 GiB"
table:
  description: Full-context requests and free memory over O(mem_fractions) and O(context_lengths), as text lines.
  returned: when O(mem_fractions) is not empty
  type: list
  elements: str
  sample: ["fraction     tokens     SWA   warm"]
recommended_mem_fraction:
  description: Largest of O(mem_fractions) that keeps the headroom at O(context_length). V(null) when none does.
  returned: when O(mem_fractions) is not empty
  type: float
  sample: 0.9
differing_facts:
  description: What O(checkpoint) says otherwise than the facts of the plan.
  returned: when O(checkpoint) is given
  type: list
  elements: dict
  sample: [{fact: n_routed_experts, planned: 256, checkpoint: 384}]
drift:
  description: Planned and actual value of each quantity in O(server) that the plan has.
  returned: when O(server) is given
  type: list
  elements: dict
  sample: [{quantity: max_total_num_tokens, planned: 5937664.0, actual: 5840128.0, ok: true}]
metrics:
  description: The plan, and plan against server, in Prometheus text format.
  returned: always
  type: str
  sample: "ops_memory_plan_full_context_requests 11"
"""

import dataclasses
import json

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ops.memory_plan import COMPRESS_STATE_DTYPES, INDEXER_BACKENDS, PlanInputs, plan_memory
from ansible.module_utils.ops.memory_plan_models import (
    BUILTIN_MODELS,
    PlanInputError,
    differing_facts,
    facts_from_config,
)
from ansible.module_utils.ops.memory_plan_report import (
    compare_with_server,
    drift_warnings,
    metrics_text,
    plan_table,
    plan_to_dict,
    report,
    table_lines,
)

NOT_INPUTS = {
    "model",
    "config",
    "config_json",
    "mem_fractions",
    "context_lengths",
    "server",
    "checkpoint",
    "tolerance",
    "metrics_labels",
    "fail_on_refusal",
}


def model_facts(params):
    """Facts of the built-in model or of the config.json; raises PlanInputError with the file's name for a bad file."""
    if params["model"]:
        return BUILTIN_MODELS[params["model"]]
    if params["config"]:
        return facts_from_config(params["config"], params["config"].get("_name_or_path") or "the model")
    path = params["config_json"]
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise PlanInputError("config_json", path, f"a readable config.json ({error})") from error
    return facts_from_config(config, config.get("_name_or_path") or path)


def plan_inputs(params):
    """PlanInputs of the module's options."""
    given = {name: value for name, value in params.items() if name not in NOT_INPUTS}
    return PlanInputs(model=model_facts(params), **given)


def run(params):
    """The module's result for its options; raises PlanInputError for a value no plan can be made of."""
    inputs = plan_inputs(params)
    plan = plan_memory(inputs)
    data = plan_to_dict(plan)
    drifts = compare_with_server(plan, params["server"], params["tolerance"]) if params["server"] else ()
    result = {
        "changed": False,
        "plan": data,
        "verdict": data["verdict"],
        "capacity": data["capacity"],
        "refusals": data["refusals"],
        "warnings_of_plan": data["warnings"],
        "metrics": metrics_text(plan, drifts, params["metrics_labels"]),
    }
    table = None
    if params["mem_fractions"]:
        table = plan_table(inputs, params["mem_fractions"], params["context_lengths"])
        result["table"] = list(table_lines(table))
        result["recommended_mem_fraction"] = table.recommended
    result["report"] = report(plan, table)
    if params["checkpoint"]:
        differing = differing_facts(inputs.model, params["checkpoint"])
        result["differing_facts"] = [dict(zip(("fact", "planned", "checkpoint"), one)) for one in differing]
    if params["server"]:
        result["drift"] = [dataclasses.asdict(drift) for drift in drifts]
        result["drift_warnings"] = list(drift_warnings(drifts))
    return result


def main():
    # no_log is false where Ansible would take a count of tokens for a secret.
    module = AnsibleModule(
        argument_spec={
            "model": {"type": "str", "choices": list(BUILTIN_MODELS)},
            "config_json": {"type": "path"},
            "config": {"type": "dict"},
            "memory_free_mib": {"type": "float", "required": True},
            "tp_size": {"type": "int", "default": 1},
            "context_length": {"type": "int", "required": True},
            "mem_fraction_static": {"type": "float", "default": 0.80},
            "max_running_requests": {"type": "int", "default": 64},
            "cuda_graph_max_bs": {"type": "int", "default": 64},
            "chunked_prefill_size": {"type": "int", "default": 4096},
            "kv_cache_dtype": {
                "type": "str",
                "choices": ["auto", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32"],
                "default": "auto",
            },
            "swa_full_tokens_ratio": {"type": "float", "default": 0.1, "no_log": False},
            "compress_state_dtype": {"type": "str", "choices": list(COMPRESS_STATE_DTYPES), "default": "float32"},
            "speculative_num_draft_tokens": {"type": "int", "default": 0, "no_log": False},
            "decode_side": {"type": "bool", "default": False},
            "decode_extra_slots": {"type": "int"},
            "indexer_backend": {"type": "str", "choices": list(INDEXER_BACKENDS), "default": "dsv4_sm120"},
            "max_total_tokens": {"type": "int", "no_log": False},
            "page_size": {"type": "int", "default": 1},
            "weights_gib": {"type": "float"},
            "graph_gib": {"type": "float"},
            "runtime_gib": {"type": "float", "default": 0.77},
            "load_overhead_gib": {"type": "float", "default": 0.4},
            "headroom_gib": {"type": "float"},
            "session_tokens": {"type": "int", "default": 65536, "no_log": False},
            "session_answer_tokens": {"type": "int", "default": 1024, "no_log": False},
            "mem_fractions": {"type": "list", "elements": "float", "default": []},
            "context_lengths": {"type": "list", "elements": "int", "default": []},
            "server": {"type": "dict"},
            "checkpoint": {"type": "dict"},
            "tolerance": {"type": "float", "default": 0.03},
            "metrics_labels": {"type": "dict", "default": {}},
            "fail_on_refusal": {"type": "bool", "default": True},
        },
        mutually_exclusive=[("model", "config_json", "config")],
        required_one_of=[("model", "config_json", "config")],
        supports_check_mode=True,
    )
    try:
        result = run(module.params)
    except PlanInputError as error:
        module.fail_json(msg=f"No memory plan: {error}")
    for sentence in result.pop("drift_warnings", []):
        module.warn(f"Off the memory plan: {sentence}")
    for one in result.get("differing_facts", []):
        module.warn(
            f"The memory plan is for another model: {one['fact']} is {one['checkpoint']} in the checkpoint's "
            f"config.json, the plan takes {one['planned']}. Next: set memory_plan_config_json to a copy of that file, "
            "or correct the plan in models/, then run playbooks/plan.yml"
        )
    if result["refusals"] and module.params["fail_on_refusal"]:
        module.fail_json(msg="\n".join(result["verdict"]), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
