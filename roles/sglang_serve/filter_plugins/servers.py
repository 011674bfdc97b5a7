# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that turn a topology into the list of a host's SGLang servers.

unified: one server on all GPUs. replicas: one server for each island of GPUs, behind a router. disaggregated: the first
island computes prompts (prefill), the second one answers (decode), behind a router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::")
SIDES = ("prefill", "decode")
# SGLang hands a request's earlier chunk to the decode side while it may still be computed, and its NIXL backend doesn't
# wait for it: the answers to prompts of several chunks are wrong without a word (docs/topologies.md).
SIDES_ENVIRONMENT = {"prefill": {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}}
# Checks that are made unless they are set to false, see docs/smoke.md.
OWN_CHECKS = ("over_long", "cancelled_client", "resting_level", "counters", "endpoints", "speculation")
# Units that may hold a port or memory on a host before the topology is changed.
NAMES = ("unified", "router", *SIDES, *(f"replica-{number}" for number in range(8)))
UNITS = tuple(f"sglang-{name}.service" for name in NAMES)
# Variables of this role, without its prefix, that decide where the servers of a host are.
SETTINGS = ("islands", "tp", "host", "port", "inner_port", "nccl_port", "bootstrap_port", "transfer_backend")


def names(topology: str, islands: int) -> list[str]:
    """Return the names of a host's servers; a unit is sglang-NAME.service."""
    if topology == "replicas":
        return [f"replica-{number}" for number in range(islands)]
    return list(SIDES) if topology == "disaggregated" else ["unified"]


def sides_arguments(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a server one side of a disaggregated pair; nothing for the others."""
    if name not in SIDES:
        return {}
    arguments = {"disaggregation-mode": name, "disaggregation-transfer-backend": settings["transfer_backend"]}
    return arguments | ({"disaggregation-bootstrap-port": int(settings["bootstrap_port"])} if name == "prefill" else {})


def sglang_servers(
    topology: str,
    settings: Mapping[str, Any],
    inner_host: str,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the servers of one host, in the order of its islands.

    settings: name in SETTINGS -> value. inner_host: address that servers behind a router listen on. arguments,
    environment: what all servers have in common.
    Each server: name, unit, side (of a disaggregated pair), host and port that it listens on, its url for this host and
    for the routers, nccl_port, bootstrap_port (0: none), gpus, numa (the node that they are on, "" when there are
    several or it is not known), arguments of the launch line, environment of the unit.
    """
    islands = settings["islands"]
    shares = [islands] if topology == "unified" else [[island] for island in islands]
    servers = []
    for number, (name, share) in enumerate(zip(names(topology, len(islands)), shares, strict=False)):
        host = settings["host"] if topology == "unified" else inner_host
        port = int(settings["port"]) if topology == "unified" else int(settings["inner_port"]) + number
        gpus = [int(gpu) for island in share for gpu in island.get("gpus", [])]
        nodes = {str(island.get("numa", "")) for island in share}
        nccl_port = int(settings["nccl_port"]) + number
        own = {"host": host, "port": port, "nccl-port": nccl_port, "tp-size": int(settings["tp"]) or max(len(gpus), 1)}
        own |= {"base-gpu-id": gpus[0]} if gpus else {}
        # GPUs are counted as nvidia-smi does.
        counted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}
        servers.append(
            {
                "name": name,
                "unit": f"sglang-{name}.service",
                "side": name in SIDES,
                "host": host,
                "port": port,
                "nccl_port": nccl_port,
                "bootstrap_port": int(settings["bootstrap_port"]) if name == "prefill" else 0,
                "url": f"http://{url_host(LOOPBACK if host in WILDCARDS else host)}:{port}",
                "gpus": gpus,
                "numa": nodes.pop() if len(nodes) == 1 else "",
                "arguments": {**(arguments or {}), **own, **sides_arguments(name, settings)},
                "environment": {**counted, **SIDES_ENVIRONMENT.get(name, {}), **(environment or {})},
            }
        )
    return servers


def sglang_fleet(
    hosts: Sequence[str],
    topology: str,
    routers: Sequence[str],
    variables: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the servers of all hosts.

    routers: hosts with a router. variables: host -> its variables. defaults: those of this role, for what a host does
    not set. Each server also has its machine, the host's name in the inventory.
    """
    fleet = []
    for machine in hosts:
        seen = variables[machine]
        settings = {name: seen.get(f"sglang_serve_{name}", defaults[f"sglang_serve_{name}"]) for name in SETTINGS}
        servers = sglang_servers(topology, settings, sglang_inner_host(machine, routers, variables))
        fleet += [{"machine": machine, **server} for server in servers]
    return fleet


def sglang_turns(
    fleet: Sequence[Mapping[str, Any]], variables: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the replicas of all hosts (machine, name, url) in the order in which they restart, one after the other.

    variables: host -> its variables, with the fact __sglang_serve_up (unit -> whether it answered when this run began
    to switch) of the hosts that this run reaches; those of others are taken for up. Replicas that were not up come
    first, so that they can stand in for the others. Nothing when none was up: there is nothing to keep then, and they
    start together. Nothing either for servers that can't stand in for each other.
    """
    turns = [server for server in fleet if server["name"] not in ("unified", *SIDES)]
    up = [variables[one["machine"]].get("__sglang_serve_up", {}).get(one["unit"], True) for one in turns]
    ordered = [turn for state in (False, True) for turn, it in zip(turns, up, strict=True) if it is state]
    return pick(ordered, "machine", "name", "url") if any(up) else []


def sglang_inner_host(machine: str, routers: Sequence[str], variables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the address that servers behind a router listen on: loopback, unless a router is on another host."""
    return LOOPBACK if list(routers) == [machine] else sglang_address(machine, variables)


def sglang_address(machine: str, variables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the address under which other hosts, and clients, reach a host."""
    seen = variables[machine]
    return seen.get("sglang_serve_address") or seen.get("ansible_host") or machine


def url_host(host: str) -> str:
    """Return a name or address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def sglang_ports(servers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the ports of servers, each with the variable that decides it and our units that may hold it already."""
    ports = []
    for server in servers:
        front = "sglang_serve_port" if server["name"] == "unified" else "sglang_serve_inner_port"
        ports.append((server["port"], front))
        ports.append((server["nccl_port"], "sglang_serve_nccl_port"))
        ports += [(server["bootstrap_port"], "sglang_serve_bootstrap_port")] if server["bootstrap_port"] else []
    return [{"port": port, "variable": variable, "units": list(UNITS)} for port, variable in ports]


def sglang_intents(
    servers: Sequence[Mapping[str, Any]], current: str, version: str, gpus: bool, kernels: Sequence[str]
) -> list[dict[str, Any]]:
    """Return what must run, as option intent of the module sglang_drift.

    current: the link to the release in use. kernels: those of ours that are meant to work on GPUs; one that a server's
    environment switches off is not. A KV pool holds at least one request of the full context.
    """
    units = [server["unit"] for server in servers]
    same = {"release": f"{current}/venv", "version": version or None, "gpus": gpus}
    return [
        one
        | same
        | {
            "unit_source": f"{current}/{one['unit']}",
            "neighbours": [unit for unit in units if unit != one["unit"]],
            "min_total_tokens": int(one["arguments"]["context-length"]),
            "kernels": [name for name in kernels if one["environment"].get(f"DSV4_SM120_{name.upper()}") != "0"],
        }
        for one in pick(servers, "unit", "arguments", "environment")
    ]


def sglang_recorded(servers: Sequence[Mapping[str, Any]], intents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is recorded of the servers of a release: how they are reached, what starts them and what must run."""
    keys = ("name", "unit", "url", "side", "arguments", "environment")
    return [one | {"intent": intent} for one, intent in zip(pick(servers, *keys), intents, strict=True)]


def sglang_texts(servers: Sequence[Mapping[str, Any]], texts: Mapping[str, Any], release: str) -> list[dict[str, Any]]:
    """Return servers with their texts, in which a release's name, made of these texts, is put where it belongs."""
    named = {
        name: {kind: text.replace("/releases/@RELEASE@/", f"/releases/{release}/") for kind, text in kinds.items()}
        for name, kinds in texts.items()
    }
    return [{**server, **named[server["name"]]} for server in servers]


def launch_words(arguments: Mapping[str, Any]) -> list[list[str]]:
    """Return the words of a launch line, those of each argument in a list of their own.

    True gives a bare flag, False drops the argument, a list gives several values, a mapping is given as JSON.
    """
    lines = []
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            values = [json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            values = [str(one) for one in value]
        else:
            values = [] if value is True else [str(value)]
        lines += [] if value is False else [[f"--{name}", *values]]
    return lines


def pick(items: Sequence[Mapping[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return each mapping with these keys only."""
    return [{key: item[key] for key in keys} for item in items]


def sglang_targets(servers: Sequence[Mapping[str, Any]], machine: str) -> list[dict[str, Any]]:
    """Return the scrape targets of servers, for the Prometheus of a host of the inventory.

    The label `role` is a server's name; `elsewhere` is the host that it runs on, where that is another one, whose own
    metrics are not here.
    """
    targets = []
    for server in servers:
        its = server.get("machine", machine)
        labels = {"role": server["name"]} | ({"elsewhere": its} if its != machine else {})
        targets.append({"job": "sglang", "address": server["url"].removeprefix("http://"), "labels": labels})
    return targets


def sglang_monitored(servers: Sequence[Mapping[str, Any]], router_url: str) -> list[dict[str, Any]]:
    """Return the units of a host whose readiness is a metric; router_url is "" where there is no router."""
    units = [{"unit": server["unit"], "role": server["name"], "url": server["url"]} for server in servers]
    router = {"unit": "sglang-router.service", "role": "router", "url": router_url, "ready_path": "/readiness"}
    return units + ([router] if router_url else [])


def sglang_subjects(
    servers: Sequence[Mapping[str, Any]],
    intents: Sequence[Mapping[str, Any]],
    checks: Mapping[str, Any],
    router_url: str,
    engine_url: str,
    router_checks: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return whom the canary of a host asks: what its clients ask, and each server behind a router by itself.

    router_url: "" where there is no router. engine_url: a server behind it, for what a router does not say.
    Of one side of a disaggregated pair it only sees whether it runs as configured: it gives no answer alone.
    """
    router = {"suffix": "", "unit": "sglang-router.service", "url": router_url, "engine_url": engine_url}
    subjects = [router | {"checks": router_checks, "intent": {}}] if router_url else []
    for server, intent in zip(servers, intents, strict=True):
        name = server["name"]
        seen = {"unit": server["unit"], "url": server["url"], "intent": intent}
        asked = dict.fromkeys(OWN_CHECKS, False) if server["side"] else checks
        subjects.append({"suffix": "" if name == "unified" else f"-{name}", "checks": asked} | seen)
    return subjects


def double_ports(ports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each port that two purposes want."""
    wanted: dict[int, list[str]] = {}
    for port in ports:
        wanted.setdefault(int(port["port"]), []).append(port["variable"])
    return [f"port {port} is wanted by {' and '.join(who)}" for port, who in wanted.items() if len(who) > 1]


def island_faults(topology: str, islands: Sequence[Mapping[str, Any]], device: str, tp: int) -> list[str]:
    """Return what is wrong with the islands of a host, one sentence each."""
    gpus = [int(gpu) for island in islands for gpu in island.get("gpus", [])]
    twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
    faults = []
    if topology == "disaggregated" and len(islands) != 2:
        faults.append(f"there are {len(islands)}; wanted: two for disaggregated, one for each side")
    if not islands:
        faults.append("there are none; wanted: at least one")
    if twice:
        faults.append(f"GPU {', '.join(map(str, twice))} is in two of them; wanted: each GPU in one")
    if device == "cpu" and gpus:
        faults.append("sglang_serve_device is 'cpu' and they have GPUs; wanted: none ({gpus: []})")
    if not faults and device != "cpu":
        shares = [gpus] if topology == "unified" else [list(map(int, island.get("gpus", []))) for island in islands]
        faults = [fault for share in shares if (fault := share_fault(share, tp))]
    return [f"sglang_serve_islands: {fault}" for fault in dict.fromkeys(faults)]


def share_fault(gpus: Sequence[int], tp: int) -> str:
    """Return why one server can't have these GPUs, or nothing. tp: its size, 0 for all of them."""
    if len(gpus) not in (1, 2, 4, 8):
        return f"a server would have {len(gpus)} GPUs ({list(gpus)}); wanted: 1, 2, 4 or 8"
    if list(gpus) != list(range(gpus[0], gpus[0] + len(gpus))):
        return (
            f"a server would have the GPUs {list(gpus)}; wanted: consecutive numbers, the engine takes the first only"
        )
    if tp not in (0, len(gpus)):
        return f"a server would have {len(gpus)} GPUs and sglang_serve_tp is {tp}; wanted: {len(gpus)}, or 0 for all"
    return ""


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {
            "sglang_servers": sglang_servers,
            "sglang_fleet": sglang_fleet,
            "sglang_turns": sglang_turns,
            "sglang_inner_host": sglang_inner_host,
            "sglang_address": sglang_address,
            "url_host": url_host,
            "sglang_ports": sglang_ports,
            "sglang_intents": sglang_intents,
            "sglang_recorded": sglang_recorded,
            "sglang_texts": sglang_texts,
            "launch_words": launch_words,
            "pick": pick,
            "sglang_targets": sglang_targets,
            "sglang_monitored": sglang_monitored,
            "sglang_subjects": sglang_subjects,
            "double_ports": double_ports,
            "island_faults": island_faults,
        }
