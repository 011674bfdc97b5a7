# SPDX-License-Identifier: GPL-3.0-or-later
"""What one role gets from the variables of another: values that no text shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rendering import render

KERNELS_OFF = {"sglang_kernels_enabled": False}
TILELANG_OFF = {"SGLANG_OPT_USE_TILELANG_INDEXER": "0"}
# Environment of the servers, other variables, the indexer that then serves.
INDEXERS = {
    "ours": ({}, {}, "dsv4_sm120"),
    "ours_said": ({"DSV4_SM120_INDEXER": "1", "SGLANG_OPT_USE_TILELANG_INDEXER": "true"}, {}, "dsv4_sm120"),
    "our_indexer_off": ({"DSV4_SM120_INDEXER": "0"}, {}, "tilelang"),
    "our_package_off": ({}, KERNELS_OFF, "tilelang"),
    "another_kernel_off": ({"DSV4_SM120_DECODE": "0"}, {}, "dsv4_sm120"),
    "tilelang_off": (TILELANG_OFF, {}, "torch"),
    "tilelang_off_number": ({"SGLANG_OPT_USE_TILELANG_INDEXER": 0}, {}, "torch"),
    "tilelang_off_without_ours": ({**TILELANG_OFF, "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}, KERNELS_OFF, "torch"),
    "deepgemm": ({**TILELANG_OFF, "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "false"}, {}, "tilelang"),
}
HOSTS = {
    name: {"sglang_serve_environment_custom": environment, **variables}
    for name, (environment, variables, _wanted) in INDEXERS.items()
}


def values(directory: Path, hosts: dict[str, dict]) -> dict[str, dict]:
    """Return host -> what render.yml writes."""
    common = {"site_model": "deepseek-v4-flash-nvfp4", "sglang_serve_api_key": "0123456789abcdef-of-a-client"}
    # An address has no underscore.
    hosts = {name.replace("_", "-"): variables for name, variables in hosts.items()}
    inventory = directory / "hosts.json"
    inventory.write_text(json.dumps({"sglang": {"hosts": hosts, "vars": common}}))
    return {name.replace("-", "_"): texts for name, texts in render(inventory, {}, directory).items()}


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Return the values of the hosts of HOSTS and of one that fetches its model."""
    directory = tmp_path_factory.mktemp("wiring")
    manifest = directory / "manifest.json"
    sizes = {"config.json": 1, "a/model-1.safetensors": 2 << 30, "a/model-2.safetensors": 1 << 30}
    manifest.write_text(
        json.dumps({"files": {name: {"size": size, "sha256": "0" * 64} for name, size in sizes.items()}})
    )
    fetched = {"model_store_url": "http://mirror.example/m", "model_store_manifest": str(manifest)}
    return values(directory, {**HOSTS, "fetched": fetched})


@pytest.mark.parametrize("host", INDEXERS)
def test_plan_is_for_the_indexer_that_serves(wired, host):
    assert wired[host]["plan"]["indexer_backend"] == INDEXERS[host][2]


def test_preflight_wants_room_for_what_is_fetched(wired):
    path = "/var/lib/sglang/models/DeepSeek-V4-Flash-NVFP4"
    model = wired["fetched"]["disks"][1]
    # 3 GiB and a byte.
    assert {**model, "need_gib": float(model["need_gib"])} == {
        "path": path,
        "need_gib": 4.0,
        "holds": path,
        "variable": "model_store_path",
    }
    copied = wired["ours"]["disks"][1]
    assert (copied["path"], float(copied["need_gib"]), copied["holds"]) == ("/var/lib/sglang/models", 0, "")


@pytest.mark.parametrize(("arguments", "slots"), [({}, -1), ({"disaggregation-decode-extra-slots": 8}, 8)])
def test_plan_of_a_pair_is_for_the_side_that_holds_less(tmp_path, arguments, slots):
    islands = [{"gpus": [0, 1, 2, 3]}, {"gpus": [4, 5, 6, 7]}]
    pair = {"site_topology": "disaggregated", "sglang_serve_islands": islands}
    plan = values(tmp_path, {"pair": {**pair, "sglang_serve_arguments_custom": arguments}})["pair"]["plan"]
    assert (plan["decode_side"], int(plan["decode_extra_slots"]), plan["decode_servers"]) == (True, slots, ["decode"])


def test_plan_without_a_pair_knows_no_decode_side(wired):
    plan = wired["ours"]["plan"]
    assert (plan["decode_side"], int(plan["decode_extra_slots"]), plan["decode_servers"]) == (False, -1, [])
