# SPDX-License-Identifier: GPL-3.0-or-later
"""The firewall of two real hosts, looked at from their neighbours.

In place of the engine, which takes minutes, a program in a unit of its name holds its ports. The tests build on
each other.
"""

from __future__ import annotations

import time

import pytest
from site_host import SiteHost

pytestmark = pytest.mark.integration
INVENTORY, HOSTS = "inventory/lab-replicas", ("lab1=10.77.0.11", "lab2=10.77.0.12")
# By unit: the router's and the engine's ports with the rendezvous, and a service of somebody else's.
HELD = {"sglang-unified": (30001, 30011, 29501), "other": (8080,)}
LISTENING = tuple(port for ports in HELD.values() for port in ports)
LISTEN = "import signal, socket; held = [socket.create_server(('0.0.0.0', port)) for port in {}]; signal.pause()"
TAGS = ("--tags", "sglang_host,sglang_firewall")
ONE = ("--limit", "lab1")
CLOSE = ("-e", "sglang_firewall_close_others=true")
UNDO = ("-e", "sglang_firewall_undo_seconds=20")
CONNECT = "timeout 1 bash -c '</dev/tcp/{ip}/{port}' 2>/dev/null && echo {port}; "


@pytest.fixture(scope="module")
def host(host: SiteHost) -> SiteHost:
    """Two hosts, each listening on every port that matters."""
    for unit, ports in HELD.items():
        for name in ("lab1", "lab2"):
            host.shell(f'systemd-run --quiet --unit={unit} python3 -c "{LISTEN.format(ports)}"', host=name)
    return host


def reached(host: SiteHost, target: str, origin: str) -> set[int]:
    """Return the ports of a host that another one can connect to."""
    command = "".join(CONNECT.format(ip=target, port=port) for port in (22, *LISTENING))
    return {int(port) for port in host.shell(f"{command} true", host=origin).split()}


def rules(host: SiteHost, name: str = "lab1") -> str:
    return host.shell("nft --stateless list table inet sglang 2>/dev/null", status=None, host=name)


def test_before_everything_is_open(host):
    deadline = time.monotonic() + 20
    while reached(host, "10.77.0.11", "lab2") != {22, *LISTENING}:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_check_mode_changes_nothing(host):
    host.play("site.yml", "--check", *TAGS, *ONE, *CLOSE)
    assert rules(host) == ""


def test_somebody_elses_service_is_not_closed_without_a_question(host):
    run = host.play("site.yml", *TAGS, *ONE, status=2)
    assert "would close tcp/8080 (other.service)" in " ".join(run.output.split())
    assert "29501" not in run.output
    assert rules(host) == ""


def test_others_reach_exactly_what_they_need(host):
    host.play("site.yml", *TAGS, *CLOSE)
    assert reached(host, "10.77.0.11", "lab2") == {22, 30001}
    assert reached(host, "10.77.0.12", "lab1") == {22, 30011}
    assert reached(host, "10.77.0.11", "lab1") == {22, *LISTENING}


def test_second_run_changes_nothing(host):
    assert host.play("site.yml", *TAGS, *CLOSE).changed == 0


def test_a_service_that_is_listed_stays_open(host):
    opened = ("-e", '{"sglang_firewall_open": [{"port": 8080, "from": ["10.77.0.12"]}]}')
    host.play("site.yml", *TAGS, *ONE, *opened)
    assert reached(host, "10.77.0.11", "lab2") == {22, 30001, 8080}
    host.play("site.yml", *TAGS, *ONE, *CLOSE)
    assert reached(host, "10.77.0.11", "lab2") == {22, 30001}


@pytest.mark.parametrize("change", ["nft add rule inet sglang input tcp dport 8080 accept", "nft flush ruleset"])
def test_rules_changed_by_hand_are_put_back(host, change):
    before = rules(host)
    host.shell(change)
    assert rules(host) != before
    host.play("site.yml", *TAGS, *ONE, *CLOSE)
    assert rules(host) == before


@pytest.mark.parametrize(
    "setting", ['{"sglang_firewall_ssh_from": ["10.9.0.0/16"]}', '{"sglang_firewall_ssh_ports": [2222]}']
)
def test_rules_that_would_shut_the_play_out_are_refused(host, setting):
    before = rules(host)
    run = host.play("site.yml", *TAGS, *ONE, *CLOSE, "-e", setting, status=2)
    assert "This play comes from 10.77.0.1 to port 22" in " ".join(run.output.split())
    assert rules(host) == before


def test_rules_that_nobody_confirms_are_taken_back(host):
    before = rules(host)
    opened = ("-e", '{"sglang_firewall_open": [{"port": 8080}]}')
    host.play_until("TASK [sglang_firewall : Come in anew]", "site.yml", *TAGS, *ONE, *UNDO, *opened)
    deadline = time.monotonic() + 60
    while rules(host):
        assert time.monotonic() < deadline, "the rules are still there"
        time.sleep(1)
    host.play("site.yml", *TAGS, *ONE, *CLOSE)
    assert rules(host) == before


def test_rules_are_there_after_a_reboot(host):
    before = rules(host)
    host.lab("power", "lab1", "off")
    host.lab("power", "lab1", "on")
    deadline = time.monotonic() + 60
    while rules(host) != before:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert host.play("site.yml", *TAGS, *ONE, *CLOSE).changed == 0


def test_a_host_without_the_firewall_has_no_rules(host):
    host.play("site.yml", *TAGS, *ONE, "-e", "sglang_firewall_enabled=false")
    assert rules(host) == ""
    assert host.play("site.yml", *TAGS, *ONE, "-e", "sglang_firewall_enabled=false").changed == 0


def test_uninstall_takes_the_rules_away(host):
    host.play("site.yml", *TAGS, *ONE, *CLOSE)
    assert rules(host)
    host.play("playbooks/uninstall.yml", *ONE)
    assert rules(host) == ""
    assert reached(host, "10.77.0.11", "lab2") == {22}
