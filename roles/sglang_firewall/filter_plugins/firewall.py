# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for firewall rules: networks by family, whom they admit, and which services they would shut off."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

FAMILIES = {4: "ip", 6: "ip6"}
# The rules let answers to these clients in.
DHCP_CLIENTS = {"udp/68", "udp/546"}
# Linux gives a program's own UDP socket a port from here on; it waits for answers, which the rules let in. Sockets of
# the kernel itself, such as WireGuard's, have no control group.
EPHEMERAL = 32768


def network_faults(variables: Mapping[str, Iterable[Any]]) -> list[str]:
    """Return one sentence for each value that is no network, or stands where a list of them should.

    variables: name -> the lists that it holds.
    """
    return [
        f"{name} has {fault}"
        for name, lists in variables.items()
        for networks in lists
        for fault in list_faults(networks)
    ]


def list_faults(networks: Any) -> list[str]:
    """Return what is wrong with a list of networks, by its values."""
    if isinstance(networks, (str, Mapping)) or not isinstance(networks, Iterable):
        return [f"{networks!r} for a list"]
    return [repr(network) for network in networks if not is_network(network)]


def is_network(value: Any) -> bool:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        return False
    return True


def by_family(networks: Iterable[str]) -> dict[str, list[str]]:
    """Return nftables' name of a family -> its networks, in the order given."""
    found: dict[str, list[str]] = {"ip": [], "ip6": []}
    for text in networks:
        network = ipaddress.ip_network(text, strict=False)
        found[FAMILIES[network.version]].append(str(network))
    return found


def admits(networks: Iterable[str], address: str) -> bool:
    """Return whether an address is in one of the networks."""
    seen = ipaddress.ip_address(address.split("%")[0])
    return any(seen in ipaddress.ip_network(text, strict=False) for text in networks)


def open_services(ports: Iterable[int], others: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return tcp/22, udp/51820, ... for TCP ports and for the other services that stay open."""
    return [f"tcp/{port}" for port in ports] + [f"{one.get('protocol', 'tcp')}/{one['port']}" for one in others]


def closed_listeners(listing: str, open_services: Iterable[str]) -> list[str]:
    """Return the services that listen for other hosts on a port that would be closed, but for the service's own.

    listing: output of ``ss -Hltune``. An own one is in the control group of a unit sglang-*.service.
    """
    let_in, closed = {*open_services, *DHCP_CLIENTS}, []
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) < 6:
            continue
        address, _, port = fields[4].rpartition(":")
        service = f"{fields[0]}/{port}"
        address = address.strip("[]").split("%")[0]
        unit = re.search(r"cgroup:\S*/([^/\s]+)", line)
        owner = unit[1] if unit else "unknown"
        loopback = address not in ("*", "0.0.0.0", "::") and ipaddress.ip_address(address).is_loopback
        own_socket = fields[0] == "udp" and int(port) >= EPHEMERAL and unit
        if loopback or own_socket or service in let_in or owner.startswith("sglang-"):
            continue
        closed.append(f"{service} ({owner})")
    return sorted(set(closed))


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {
            "by_family": by_family,
            "admits": admits,
            "open_services": open_services,
            "closed_listeners": closed_listeners,
            "network_faults": network_faults,
        }
