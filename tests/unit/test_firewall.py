# SPDX-License-Identifier: GPL-3.0-or-later
"""What the firewall lets in, and whom it would shut off."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "roles/sglang_firewall/filter_plugins/firewall.py"
spec = importlib.util.spec_from_file_location("firewall", PLUGIN)
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)

# ss -Hltune of a Debian 12 host (iproute2 6.1); the last line is how an older iproute2 prints.
LISTING = """\
tcp LISTEN 0      128    0.0.0.0:22 0.0.0.0:* ino:2325729 sk:2c cgroup:/system.slice/ssh.service <->
tcp LISTEN 0      128       [::]:22    [::]:* ino:2325731 sk:2d cgroup:/system.slice/ssh.service v6only:1 <->
tcp LISTEN 0      4096   127.0.0.1:9090 0.0.0.0:* uid:110 ino:31 sk:3 cgroup:/system.slice/prometheus.service <->
tcp LISTEN 0      4096   127.0.0.53%lo:53 0.0.0.0:* ino:32 sk:4 cgroup:/system.slice/systemd-resolved.service <->
tcp LISTEN 0      2048         *:29501          *:* uid:998 ino:33 sk:5 cgroup:/system.slice/sglang-unified.service <->
tcp LISTEN 0      5      0.0.0.0:8080 0.0.0.0:* ino:34 sk:6 cgroup:/system.slice/docker.service <->
tcp LISTEN 0      5         [::1]:631    [::]:* ino:35 sk:7
tcp LISTEN 0      5      10.0.0.4:3306 0.0.0.0:* ino:36 sk:8
udp UNCONN 0      0      0.0.0.0:68 0.0.0.0:* ino:37 sk:9 cgroup:/system.slice/ifup@eth0.service <->
udp UNCONN 0      0      0.0.0.0:51820 0.0.0.0:* ino:38 sk:a
udp UNCONN 0      0      0.0.0.0:41017 0.0.0.0:* ino:41 sk:d cgroup:/system.slice/systemd-timesyncd.service <->
udp UNCONN 0      0      0.0.0.0:123 0.0.0.0:* ino:39 sk:b cgroup:/system.slice/ntpsec.service <->
udp UNCONN 0      0      127.0.0.1:323 0.0.0.0:* ino:40 sk:c cgroup:/system.slice/chrony.service <->
"""


def test_only_foreign_services_that_others_can_reach_count():
    closed = ["tcp/3306 (unknown)", "tcp/8080 (docker.service)", "udp/123 (ntpsec.service)", "udp/51820 (unknown)"]
    assert plugin.closed_listeners(LISTING, ["tcp/22"]) == closed
    assert plugin.closed_listeners(LISTING, ["tcp/22", "tcp/123"]) == closed
    assert plugin.closed_listeners(LISTING, ["tcp/22", "tcp/8080", "tcp/3306", "udp/123", "udp/51820"]) == []
    assert "tcp/22 (ssh.service)" in plugin.closed_listeners(LISTING, ["tcp/2222"])
    assert plugin.closed_listeners("", ["tcp/22"]) == []


def test_services_that_stay_open():
    others = [{"port": 8080}, {"port": "123", "protocol": "udp"}]
    assert plugin.open_services([22, "30001"], others) == ["tcp/22", "tcp/30001", "tcp/8080", "udp/123"]


def test_networks_by_family():
    assert plugin.by_family(["10.0.0.7", "2001:db8::/32", "10.1.2.3/8"]) == {
        "ip": ["10.0.0.7/32", "10.0.0.0/8"],
        "ip6": ["2001:db8::/32"],
    }


@pytest.mark.parametrize(
    ("networks", "address", "admitted"),
    [
        (["10.0.0.0/8"], "10.77.0.1", True),
        (["10.0.0.0/8"], "192.0.2.1", False),
        (["0.0.0.0/0"], "2001:db8::1", False),
        (["fe80::/10"], "fe80::1%eth0", True),
        ([], "10.77.0.1", False),
    ],
)
def test_whom_networks_admit(networks, address, admitted):
    assert plugin.admits(networks, address) == admitted


def test_what_is_no_network_is_named():
    faults = plugin.network_faults(
        {"sglang_firewall_clients": [["10.0.0.0/33", "::/0"]], "sglang_firewall_open": [["::/0"], ["gpu2"]]}
    )
    assert faults == ["sglang_firewall_clients has '10.0.0.0/33'", "sglang_firewall_open has 'gpu2'"]


@pytest.mark.parametrize("value", ["all", "10.0.0.0/8", {"10.0.0.7": 1}, 7, None])
def test_what_is_no_list_of_networks_is_named_once(value):
    assert plugin.network_faults({"sglang_firewall_open": [["::/0"], value]}) == [
        f"sglang_firewall_open has {value!r} for a list"
    ]
