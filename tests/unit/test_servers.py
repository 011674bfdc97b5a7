# SPDX-License-Identifier: GPL-3.0-or-later
"""What a topology makes of a host's islands of GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "roles/sglang_serve/filter_plugins/servers.py"
spec = importlib.util.spec_from_file_location("servers", PLUGIN)
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)

ISLANDS = [{"gpus": [0, 1, 2, 3], "numa": 0}, {"gpus": [4, 5, 6, 7], "numa": 1}]
SETTINGS = {
    "islands": ISLANDS,
    "tp": 0,
    "host": "0.0.0.0",
    "port": 30001,
    "inner_port": 30011,
    "nccl_port": 29501,
    "bootstrap_port": 8998,
    "transfer_backend": "nixl",
}
DEFAULTS = {f"sglang_serve_{name}": value for name, value in SETTINGS.items()}


def test_words_of_a_launch_line():
    arguments = {"a": True, "b": False, "c": 0.5, "d": [1, "two words"], "e": {"f": [1, None]}, "g": "", "h": 0}
    assert plugin.launch_words(arguments) == [
        ["--a"],
        ["--c", "0.5"],
        ["--d", "1", "two words"],
        ["--e", '{"f": [1, null]}'],
        ["--g", ""],
        ["--h", "0"],
    ]


def servers(topology: str, inner_host: str = "127.0.0.1", environment: dict | None = None, **settings) -> list[dict]:
    arguments = {"context-length": "524288"}
    return plugin.sglang_servers(topology, SETTINGS | settings, inner_host, arguments, environment or {})


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30001"),
        ("127.0.0.1", "http://127.0.0.1:30001"),
        ("::1", "http://[::1]:30001"),
        ("gpu1", "http://gpu1:30001"),
    ],
)
def test_url_of_an_address(host, url):
    assert servers("unified", host=host)[0]["url"] == url


@pytest.mark.parametrize(
    ("topology", "wanted"),
    [
        ("unified", [("unified", "0.0.0.0", 30001, 29501, [0, 1, 2, 3, 4, 5, 6, 7], "", 8, 0)]),
        (
            "replicas",
            [
                ("replica-0", "127.0.0.1", 30011, 29501, [0, 1, 2, 3], "0", 4, 0),
                ("replica-1", "127.0.0.1", 30012, 29502, [4, 5, 6, 7], "1", 4, 0),
            ],
        ),
        (
            "disaggregated",
            [
                ("prefill", "127.0.0.1", 30011, 29501, [0, 1, 2, 3], "0", 4, 8998),
                ("decode", "127.0.0.1", 30012, 29502, [4, 5, 6, 7], "1", 4, 0),
            ],
        ),
    ],
)
def test_servers_of_a_host(topology, wanted):
    keys = ("name", "host", "port", "nccl_port", "gpus", "numa")
    seen = [
        (*(server[key] for key in keys), server["arguments"]["tp-size"], server["bootstrap_port"])
        for server in servers(topology)
    ]
    assert seen == wanted
    for server in servers(topology):
        assert server["arguments"]["port"] == server["port"]
        assert server["arguments"]["base-gpu-id"] == server["gpus"][0]
        assert server["arguments"].get("disaggregation-mode", server["name"]) == server["name"]
    assert not plugin.double_ports(plugin.sglang_ports(servers(topology)))


def test_a_prefill_server_sends_no_chunk_that_is_still_computed_unless_somebody_wants_that():
    early = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
    assert [server["environment"].get(early) for server in servers("disaggregated")] == ["0", None]
    assert [server["environment"].get(early) for server in servers("replicas")] == [None, None]
    by_hand = servers("disaggregated", environment={early: "1"})
    assert by_hand[0]["environment"][early] == "1"


def test_one_island_stays_on_its_node_and_a_host_without_gpus_gets_no_number():
    (server,) = servers("unified", islands=ISLANDS[:1])
    assert (server["numa"], server["arguments"]["tp-size"]) == ("0", 4)
    (server,) = servers("unified", islands=[{"gpus": []}])
    assert (server["numa"], server["arguments"]["tp-size"]) == ("", 1)
    assert "base-gpu-id" not in server["arguments"]
    assert server["environment"] == {}


def test_a_server_is_reached_where_it_listens():
    assert [server["url"] for server in servers("unified")] == ["http://127.0.0.1:30001"]
    assert servers("unified", host="192.0.2.1")[0]["url"] == "http://192.0.2.1:30001"
    assert servers("replicas", "192.0.2.1")[1]["url"] == "http://192.0.2.1:30012"


@pytest.mark.parametrize(
    ("routers", "wanted"),
    [
        (["a"], ["127.0.0.1:30011", "10.0.0.2:31011", "10.0.0.2:31012"]),
        (["b"], ["10.0.0.1:30011", "127.0.0.1:31011", "127.0.0.1:31012"]),
        (["a", "b"], ["10.0.0.1:30011", "10.0.0.2:31011", "10.0.0.2:31012"]),
    ],
)
def test_servers_of_several_hosts(routers, wanted):
    variables = {
        "a": {"ansible_host": "10.0.0.1", "sglang_serve_islands": ISLANDS[:1]},
        "b": {"ansible_host": "192.0.2.2", "sglang_serve_address": "10.0.0.2", "sglang_serve_inner_port": 31011},
    }
    # A router on one host only: the servers of that host listen on loopback.
    fleet = plugin.sglang_fleet(["a", "b"], "replicas", routers, variables, DEFAULTS)
    assert [server["url"] for server in fleet] == [f"http://{address}" for address in wanted]


def turns(topology: str = "replicas", **up: dict[str, bool] | None) -> list[str]:
    """Return machine/name of each turn; up: host -> which of its units answer, None for a host that is not reached."""
    variables = {host: {} if seen is None else {"__sglang_serve_up": seen} for host, seen in up.items()}
    defaults = {**DEFAULTS, "sglang_serve_islands": ISLANDS}
    fleet = plugin.sglang_fleet(list(up), topology, list(up)[:1], variables, defaults)
    return [f"{turn['machine']}/{turn['name']}" for turn in plugin.sglang_turns(fleet, variables)]


def up(first: bool, second: bool) -> dict[str, bool]:
    return {"sglang-replica-0.service": first, "sglang-replica-1.service": second}


def test_replicas_restart_one_after_the_other_and_those_that_are_down_first():
    in_order = ["a/replica-0", "a/replica-1", "b/replica-0", "b/replica-1"]
    assert turns(a=up(True, True), b=up(True, True)) == in_order
    assert turns(a=up(True, True), b=up(True, False)) == ["b/replica-1", *in_order[:3]]
    # A host that this run does not reach may be the one that answers.
    assert turns(a=up(False, False), b=None) == in_order


def test_servers_start_together_when_there_is_nothing_to_keep():
    assert turns(a=up(False, False), b=up(False, False)) == []
    assert turns("unified", a={"sglang-unified.service": True}) == []
    assert turns("disaggregated", a={"sglang-prefill.service": True, "sglang-decode.service": True}) == []


def test_a_side_is_compared_but_not_asked():
    both = servers("disaggregated", environment={"DSV4_SM120_MHC": "0"})
    intents = plugin.sglang_intents(both, "/opt/sglang/current", "0.5.23", True, ["decode", "mhc"])
    assert [intent["neighbours"] for intent in intents] == [["sglang-decode.service"], ["sglang-prefill.service"]]
    assert [(one["min_total_tokens"], one["kernels"]) for one in intents] == 2 * [(524288, ["decode"])]
    subjects = plugin.sglang_subjects(both, intents, {"prompts": [1]}, "http://router", "http://one", {"prompts": [2]})
    assert [(one["suffix"], one["checks"].get("prompts")) for one in subjects] == [
        ("", [2]),
        ("-prefill", None),
        ("-decode", None),
    ]
    assert [bool(one["intent"]) for one in subjects] == [False, True, True]


def test_two_wishes_for_one_port():
    ports = plugin.sglang_ports(servers("replicas", nccl_port=30011))
    assert plugin.double_ports(ports) == [
        "port 30011 is wanted by sglang_serve_inner_port and sglang_serve_nccl_port",
        "port 30012 is wanted by sglang_serve_inner_port and sglang_serve_nccl_port",
    ]


@pytest.mark.parametrize(
    ("topology", "islands", "device", "tp", "wanted"),
    [
        ("disaggregated", ISLANDS[:1], "cuda", 0, "there are 1; wanted: two for disaggregated"),
        ("replicas", [], "cuda", 0, "there are none"),
        ("replicas", [{"gpus": [0, 1]}, {"gpus": [1, 2]}], "cuda", 0, "GPU 1 is in two of them"),
        ("replicas", ISLANDS, "cuda", 8, "a server would have 4 GPUs and sglang_serve_tp is 8"),
        ("replicas", [{"gpus": [0, 2]}], "cuda", 0, "the GPUs [0, 2]; wanted: consecutive numbers"),
        ("replicas", [{"gpus": [0, 1, 2]}], "cuda", 0, "3 GPUs ([0, 1, 2]); wanted: 1, 2, 4 or 8"),
        ("unified", [{"gpus": []}], "cuda", 0, "0 GPUs"),
        ("unified", ISLANDS, "cpu", 0, "sglang_serve_device is 'cpu' and they have GPUs"),
        ("unified", ISLANDS, "cuda", 8, ""),
        ("unified", ISLANDS, "cuda", 0, ""),
        ("replicas", ISLANDS, "cuda", 4, ""),
        ("disaggregated", [{"gpus": []}, {"gpus": []}], "cpu", 1, ""),
    ],
)
def test_islands_that_no_server_can_have_are_refused(topology, islands, device, tp, wanted):
    faults = plugin.island_faults(topology, islands, device, tp)
    assert len(faults) == bool(wanted)
    assert wanted in "".join(faults)


def test_a_target_of_another_host_says_whose_it_is():
    here = {"machine": "a", "name": "replica-0", "url": "http://10.0.0.1:1"}
    there = {"machine": "b", "name": "replica-1", "url": "http://10.0.0.2:1"}
    targets = plugin.sglang_targets([here, there], "a")
    assert [one["labels"] for one in targets] == [{"role": "replica-0"}, {"role": "replica-1", "elsewhere": "b"}]
    assert plugin.sglang_targets([{"name": "unified", "url": "http://x:1"}], "a")[0]["labels"] == {"role": "unified"}
