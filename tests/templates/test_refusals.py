# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks that every play begins with refuse topologies that contradict themselves and values that do harm."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from rendering import ANSIBLE_PLAYBOOK, ROOT, play

KEY = "0123456789abcdef-of-a-client"
COMMON = {"site_model": "deepseek-v4-flash-nvfp4", "sglang_serve_api_key": KEY}
LATER = {"id": "a", "prompt": "b", "expect": {"kind": "non_empty"}, "profile": "full"}
OWN_CHECKS = ("over_long", "cancelled_client", "resting_level", "counters", "endpoints", "speculation")
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
    "router_arguments": (
        {
            "site_topology": "replicas",
            "sglang_router_arguments_custom": {"prometheus-p": 1, "control-plane-api-keys": KEY},
        },
        [
            "sglang_router_arguments_custom sets prometheus-p; wanted: sglang_router_metrics_port instead",
            "sglang_router_arguments_custom sets control-plane-api-keys; wanted: no secrets",
        ],
    ),
    "gpu": ({"sglang_serve_islands": [{"gpus": ["0", "1e0"]}]}, ["sglang_serve_islands has '1e0'; wanted: a whole"]),
    "router_elsewhere": ({"site_topology": "replicas", "router": ["far"]}, ["The group router has far; wanted: hosts"]),
}
# Variables of one host, with what must be said about it.
VALUES = {
    "key_of_a_block": ({"sglang_serve_api_key": KEY + "\n"}, "sglang_serve_api_key has a space, a line's end"),
    "key_of_digits": ({"sglang_serve_api_key": 12345678901234567890}, "sglang_serve_api_key is a number or nothing"),
    "key_of_nothing": ({"sglang_serve_api_key": None}, "sglang_serve_api_key is a number or nothing"),
    "argument": ({"sglang_serve_arguments_custom": {"a; reboot": 1}}, "has the name 'a; reboot'; wanted: lower-case"),
    "shortened": ({"sglang_serve_arguments_custom": {"por": 1}}, "sets por; wanted: sglang_serve_port instead"),
    "valueless": ({"sglang_serve_arguments_custom": {"log-level": None}}, "has log-level without a value"),
    "listless": ({"sglang_serve_arguments_custom": {"log-level": []}}, "has log-level without a value"),
    "variable": ({"sglang_serve_environment_custom": {"HF_TOKEN_X": "y"}}, "has HF_TOKEN_X; wanted: no secrets"),
    "exponent": (
        {"sglang_serve_context_length": "1e5"},
        "sglang_serve_context_length is '1e5'; wanted: a whole number, digits only. Change it in the inventory",
    ),
    "point": (
        {"sglang_serve_context_length": "262144.0"},
        "sglang_serve_context_length is '262144.0'; wanted: a whole",
    ),
    "line": ({"sglang_serve_port": "30001\n"}, "sglang_serve_port is '30001\\n'; wanted: a whole number"),
    "wide": ({"sglang_serve_inner_port": "\uff13\uff10\uff10\uff11\uff11"}, "'; wanted: a whole number"),
    "underscore": ({"sglang_serve_max_running_requests": "6_4"}, "sglang_serve_max_running_requests is '6_4'; wanted"),
    "spaces": ({"sglang_serve_keep_releases": " 3 "}, "sglang_serve_keep_releases is ' 3 '; wanted: a whole number"),
    "boolean": ({"sglang_serve_speculative_steps": True}, "sglang_serve_speculative_steps is True; wanted: a whole"),
    "nested": ({"sglang_serve_environment_custom": {"A": {"b": 1}}}, "has a mapping or a list in A; wanted: a text"),
    "clients": ({"sglang_firewall_clients": "all"}, "sglang_firewall_clients has 'all' for a list; wanted: a list of"),
    "open": (
        {"sglang_firewall_open": [{"port": 80}, {"port": 81, "from": "10.0.0.0/8"}]},
        "sglang_firewall_open has '10.0.0.0/8' for a list; wanted: a list of",
    ),
    "none": ({"sglang_serve_environment_custom": {"NCCL_DEBUG": None}}, "has NCCL_DEBUG without a value"),
    "hash": ({"sglang_serve_environment_custom": {"A": "@CONFIG_SHA256@"}}, "has @CONFIG_SHA256@ in A; wanted"),
    "address": (
        {"sglang_serve_host": "127.evil.example; x"},
        "sglang_serve_host is '127.evil.example; x'; wanted: one",
    ),
    "keyless_name": (
        {"sglang_serve_host": "127.evil.example", "sglang_serve_api_key": ""},
        "sglang_serve_host is '127.evil.example', which others can reach",
    ),
    "user": ({"sglang_host_user": "root"}, "sglang_host_user is 'root'; wanted: a name that the system does not use"),
    "group": (
        {"sglang_host_group": "sudo"},
        "sglang_host_group is 'sudo'; wanted: a name that the system does not use",
    ),
    "mirror": (
        {"sglang_host_debian_mirror": "mirror/debian"},
        "sglang_host_debian_mirror is 'mirror/debian'; wanted: an",
    ),
    "lock": (
        {"sglang_host_debian_lock": "/none.sha256"},
        "sglang_host_debian_lock is '/none.sha256'; wanted: a file on",
    ),
    "releases": ({"sglang_venv_root": "/usr/lib"}, "sglang_venv_root is '/usr/lib'; wanted: a directory that is not"),
    "models": ({"model_store_root": "/var/lib"}, "model_store_root is '/var/lib'; wanted: a directory that is not"),
    "undescribed": (
        {"model_store_url": "http://mirror.example/m"},
        "model_store_url is 'http://mirror.example/m' and model_store_manifest is empty; wanted: the manifest",
    ),
    "password": (
        {"model_store_url": "http://me:1234567890@mirror.example", "model_store_manifest": "/dev/null"},
        "model_store_url is no http://HOST/PATH, or has a password",
    ),
    "manifest": (
        {"model_store_manifest": "/none.json"},
        "model_store_manifest is '/none.json'; wanted: a file on the control node",
    ),
    "name": ({"sglang_serve_served_model_name": "a\n"}, "sglang_serve_served_model_name is 'a"),
    "quoted_name": ({"sglang_serve_served_model_name": 'a "b"'}, "wanted: letters, digits and . _ / @ + -"),
    "adapter": ({"sglang_serve_served_model_name": "model:adapter"}, "is 'model:adapter'; wanted: letters, digits"),
    "schedule": ({"sglang_canary_schedule": "hourly\n"}, "sglang_canary_schedule is 'hourly"),
    "metrics": ({"sglang_canary_metrics_directory": "/srv/metrics\n"}, "sglang_canary_metrics_directory is '/srv"),
    "gpus_port": ({"gpu_exporter_port": 30001}, "port 30001 is wanted by sglang_serve_port and gpu_exporter_port"),
    "prometheus": ({"prometheus_port": 30001}, "port 30001 is wanted by sglang_serve_port and prometheus_port"),
    "nobody": (
        {"alertmanager_enabled": True},
        "alertmanager_webhooks is empty and alertmanager_enabled is true",
    ),
    "webhook": (
        {"alertmanager_enabled": True, "alertmanager_webhooks": [{"url": "https://me:1234567890@pager.example/"}]},
        "alertmanager_webhooks has 1 of 1 urls that are not http://HOST/PATH",
    ),
    "token": (
        {
            "alertmanager_enabled": True,
            "alertmanager_webhooks": [{"url": "https://pager.example", "bearer_token": "1234567890\nX: y"}],
        },
        "alertmanager_webhooks has 1 bearer_tokens with a space, a line's end",
    ),
    "everybody": (
        {"alertmanager_host": "0.0.0.0"},
        "alertmanager_host is '0.0.0.0'; wanted: a loopback address",
    ),
    "grafana": (
        {"grafana_enabled": True, "grafana_admin_password": "a 1234567890 with spaces"},
        "grafana_admin_password has 24 characters; wanted: at least 16, from the vault, without a space",
    ),
    "question": (
        {"sglang_smoke_checks": {"prompts": [{"id": "a", "prompt": "{{ inventory_hostname }}", "expct": {}}]}},
        "sglang_smoke_checks can't be used: prompts[0]: expct is unknown, expect is missing.",
    ),
    "unasked": (
        {"sglang_smoke_checks": {"prompts": [{"id": "a"}]}},
        "sglang_smoke_checks can't be used: prompts[0]: wanted prompt (with or without system), or messages.",
    ),
    "profile": (
        {"sglang_smoke_checks": {"prompts": [LATER], **dict.fromkeys(OWN_CHECKS, False)}},
        "sglang_smoke_checks can't be used: no check belongs to the profile quick",
    ),
    "alertmanager": (
        {"alertmanager_enabled": True, "alertmanager_port": 9090, "alertmanager_webhooks": [{"url": "http://a"}]},
        "port 9090 is wanted by prometheus_port and alertmanager_port",
    ),
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


def test_values_that_are_refused(tmp_path):
    said = refused(tmp_path, {name: settings for name, (settings, _) in VALUES.items()}, {})
    assert {name: text for name, (_, text) in VALUES.items() if text not in said.get(name, "")} == {}, said
    assert "1234567890" not in str(said)


@pytest.mark.parametrize("case", ALONE)
def test_host_that_is_refused(tmp_path, case):
    settings, wanted = ALONE[case]
    said = refused(tmp_path, {"alone": {}}, settings)
    assert [text for text in wanted if text not in " ".join(said.values())] == [], said


# An inventory, options, what must be said, or nothing when the run may go on.
RUNS = {
    "some": ("[sglang]\na\n[other]\nb\n", [], ""),
    "one_of_them": ("[sglang]\na\n[other]\nb\n", ["--limit=a"], ""),
    "another": (
        "[sglang]\na\n[other]\nb\n",
        ["--limit=b"],
        "The group sglang has a in {}, and the limit is b; wanted: at least",
    ),
    "tag": ("[other]\nb\n", ["--tags=sglang_serve"], "The group sglang has no host in {}; wanted: at least one host"),
    "none": ("", [], "The group sglang has no host in {}; wanted: at least one host of the group in this run."),
}


@pytest.mark.parametrize("case", RUNS)
def test_run_without_a_host_is_refused(tmp_path, case):
    text, options, wanted = RUNS[case]
    inventory = tmp_path / "hosts"
    inventory.write_text(text)
    command = [ANSIBLE_PLAYBOOK, f"--inventory={inventory}", "playbooks/hosts.yml", *options]
    environment = os.environ | {"ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(wanted), done.stdout
    assert wanted.format(inventory) in " ".join(done.stdout.split())
