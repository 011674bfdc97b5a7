# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for firewall rules: networks by family, whom they admit, and which services they would shut off."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

FAMILIES = {4: "ip", 6: "ip6"}


def network_faults(variables: Mapping[str, Iterable[str]]) -> list[str]:
    """Return one sentence for each value that is no network. variables: name -> values."""
    faults = []
    for name, values in variables.items():
        for value in values:
            try:
                ipaddress.ip_network(value, strict=False)
            except ValueError:
                faults.append(f"{name} has {value!r}")
    return faults


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


def closed_listeners(listing: str, open_ports: Iterable[int]) -> list[str]:
    """Return the services that listen for other hosts on a port that would be closed, but for the service's own.

    listing: output of ``ss -Hltne``. An own one is in the control group of a unit sglang-*.service.
    """
    closed = []
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) < 5:
            continue
        address, _, port = fields[3].rpartition(":")
        address = address.strip("[]").split("%")[0]
        unit = re.search(r"cgroup:\S*/([^/\s]+)", line)
        owner = unit[1] if unit else "unknown"
        loopback = address not in ("*", "0.0.0.0", "::") and ipaddress.ip_address(address).is_loopback
        if loopback or int(port) in set(open_ports) or owner.startswith("sglang-"):
            continue
        closed.append(f"tcp/{port} ({owner})")
    return sorted(set(closed))


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {
            "by_family": by_family,
            "admits": admits,
            "closed_listeners": closed_listeners,
            "network_faults": network_faults,
        }
