# SPDX-License-Identifier: GPL-3.0-or-later
"""Topologies that contradict themselves or their hosts are refused by the checks that every play begins with."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from rendering import play

KEY = "0123456789abcdef-of-a-client"
COMMON = {"site_model": "deepseek-v4-flash-nvfp4", "sglang_serve_api_key": KEY}
# Variables of all hosts; of each host, with what must be said about it.
REPLICAS = {
    "clash": (
        {"sglang_serve_nccl_port": 30011},
        "port 30011 is wanted by sglang_serve_inner_port and sglang_serve_nccl_port",
    ),
    "metrics": (
        {"sglang_serve_inner_port": 9090},
        "port 9090 is wanted by sglang_serve_inner_port and prometheus_port; wanted: two ports",
    ),
    "twice": ({"sglang_serve_islands": [{"gpus": [0, 1]}, {"gpus": [1, 2]}]}, "GPU 1 is in two of them"),
    "size": ({"sglang_serve_tp": 8}, "a server would have 4 GPUs and sglang_serve_tp is 8; wanted: 4, or 0 for all"),
    "keyless": (
        {"sglang_serve_api_key": ""},
        "sglang_serve_inner_host is 'keyless', which others can reach, and sglang_serve_api_key has 0 characters",
    ),
    "everywhere": ({"sglang_serve_address": "0.0.0.0"}, "sglang_serve_inner_host is '0.0.0.0'; wanted: one name"),
}
ALONE = {
    "unknown": ({"site_topology": "replicated"}, ["site_topology is 'replicated'; wanted: one of unified, replicas"]),
    "disaggregated": (
        {
            "site_topology": "disaggregated",
            "sglang_serve_islands": [{"gpus": [0, 1, 2, 3]}],
            "sglang_serve_speculative_steps": 1,
        },
        [
            "sglang_serve_islands: there are 1; wanted: two for disaggregated",
            "sglang_serve_speculative_steps is 1 and the topology is disaggregated; wanted: 0",
        ],
    ),
    "router_without_a_key": (
        {"site_topology": "replicas", "sglang_serve_api_key": ""},
        ["sglang_router_host is '0.0.0.0', which others can reach, and sglang_router_api_key has 0 characters"],
    ),
    "router_elsewhere": ({"site_topology": "replicas", "router": ["far"]}, ["The group router has far; wanted: hosts"]),
}


def refused(directory: Path, hosts: dict[str, dict], settings: dict) -> dict[str, str]:
    """Return host -> what the play says when it refuses it, one line each."""
    groups = {"sglang": {"hosts": hosts, "vars": COMMON | settings}}
    if "router" in settings:
        groups["router"] = {"hosts": {name: {} for name in groups["sglang"]["vars"].pop("router")}}
    inventory = directory / "hosts.json"
    inventory.write_text(json.dumps(groups))
    # One host's refusal is not to end the play of the others.
    done = play(inventory, {}, directory, ANSIBLE_ANY_ERRORS_FATAL="false", ANSIBLE_NOCOLOR="1")
    assert done.returncode != 0
    assert os.listdir(directory / "out") == []
    found: dict[str, str] = {}
    for host, text in re.findall(r"^(?:failed|fatal): \[(\w+)\](.*?)(?=^\S|\Z)", done.stdout, re.M | re.S):
        found[host] = found.get(host, "") + " ".join(text.split()).replace("''", "'")
    return found


def test_hosts_of_replicas_that_are_refused(tmp_path):
    said = refused(
        tmp_path, {name: settings for name, (settings, _) in REPLICAS.items()}, {"site_topology": "replicas"}
    )
    assert {name: text for name, (_, text) in REPLICAS.items() if text not in said.get(name, "")} == {}, said


@pytest.mark.parametrize("case", ALONE)
def test_host_that_is_refused(tmp_path, case):
    settings, wanted = ALONE[case]
    said = refused(tmp_path, {"alone": {}}, settings)
    assert [text for text in wanted if text not in " ".join(said.values())] == [], said
