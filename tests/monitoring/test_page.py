# SPDX-License-Identifier: GPL-3.0-or-later
"""A page arrives: Debian's Prometheus and Alertmanager, the roles' configurations, our rules with shorter times.

An engine that is stopped by SIGSTOP is what a hung one is to those who look at it.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import generate
import jinja2
import pytest
import yaml

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).with_name("engine_in_two.py")
WIRING = yaml.safe_load((ROOT / "playbooks/group_vars/all/wiring.yml").read_text())
TOKEN = "of-a-vault"
# In place of minutes; scrapes and evaluations are 1 s apart.
TIMES = {"restart_duration": "4s", "settle_duration": "3s", "stall_duration": "4s", "delivery_window": "1m"}
PATIENCE_S = 40
# One of three webhooks is not there.
FAILING = ("AlertmanagerNotDelivering", "firing")


def render(role: str, template: str, **variables: object) -> str:
    """Return a role's template as Ansible fills it."""
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["to_json"] = json.dumps
    return environment.from_string((ROOT / "roles" / role / "templates" / template).read_text()).render(variables)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted to it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Post)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.alerts: list[tuple[str, str, dict]] = []
        """(path, status, labels)"""
        self.authorizations: set[tuple[str, str | None]] = set()

    def told(self, path: str) -> list[tuple[str, str]]:
        """Return (name, status) of the alerts told at a path, repetitions left out."""
        return list(dict.fromkeys((labels["alertname"], status) for at, status, labels in self.alerts if at == path))


class Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.alerts += [(self.path, alert["status"], alert["labels"]) for alert in message["alerts"]]
        self.server.authorizations.add((self.path, self.headers["Authorization"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the test's output for the test."""


class Site:
    """Everything between an engine and who is called."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.programs = directory, {}
        self.receiver = Receiver()
        threading.Thread(target=self.receiver.serve_forever, daemon=True).start()

    def run(self, promtool: str, alertmanager: list[str | Path]) -> None:
        """Start the engine first, and who calls last."""
        directory, tokens = self.directory, self.directory / "tokens"
        self.start("scheduler", [sys.executable, ENGINE, "compute", tokens])
        self.until(tokens.exists, "the scheduler")
        self.start("engine", [sys.executable, ENGINE, "serve", tokens])
        self.until(lambda: self.log("engine"), "the engine's page")
        (directory / "rules.yml").write_text(generate.generate(**TIMES))
        port, pager = free_port(), free_port()
        self.alertmanager_url = f"http://127.0.0.1:{pager}"
        webhooks = [
            {"url": f"{self.receiver.url}/pager", "severities": ["critical"], "bearer_token": TOKEN},
            {"url": f"{self.receiver.url}/chat", "severities": ["warning", "info"]},
            {"url": f"http://127.0.0.1:{free_port()}", "severities": ["critical"], "bearer_token": TOKEN},
        ]
        text = render(
            "alertmanager",
            "alertmanager.yml.j2",
            alertmanager_webhooks=webhooks,
            alertmanager_group_wait_seconds=1,
            alertmanager_group_interval_seconds=1,
            alertmanager_repeat_interval_seconds=300,
        )
        (directory / "alertmanager.yml").write_text(text)
        options = [f"--config.file={directory}/alertmanager.yml", f"--storage.path={directory}/alertmanager"]
        options += [f"--web.listen-address=127.0.0.1:{pager}", "--cluster.listen-address="]
        self.start("alertmanager", [*alertmanager, *options])
        text = render(
            "prometheus",
            "prometheus.yml.j2",
            prometheus_scrape_interval_seconds=1,
            prometheus_metric_relabel_configs=WIRING["prometheus_metric_relabel_configs"],
            prometheus_rule_files=["rules.yml"],
            prometheus_alertmanagers=[f"127.0.0.1:{pager}"],
            prometheus_external_labels={"host": "gpu1"},
            prometheus_targets=[
                {"job": "sglang", "address": self.log("engine").strip(), "labels": {"role": "unified"}},
                {"job": "alertmanager", "address": f"127.0.0.1:{pager}"},
            ],
        )
        (directory / "prometheus.yml").write_text(text.replace("/etc/prometheus/rules/*.yml", "rules.yml"))
        options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        # Prometheus knows its Alertmanager 5 s after its start; what fired before is told again.
        options += ["--rules.alert.resend-delay=5s"]
        self.start(
            "prometheus", [Path(promtool).with_name("prometheus"), *options, f"--web.listen-address=127.0.0.1:{port}"]
        )

    def start(self, name: str, command: list[str | Path]) -> None:
        with (self.directory / f"{name}.log").open("w") as log:
            self.programs[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def signal(self, name: str, number: signal.Signals) -> None:
        self.programs[name].send_signal(number)

    def until(self, condition, what: str) -> None:
        """Wait for something, or fail with what everybody said."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"== {name}\n{self.log(name)[-2000:]}" for name in self.programs)
                pytest.fail(f"{what}: not within {PATIENCE_S} s; told: {self.receiver.alerts}\n{logs}")
            time.sleep(0.2)

    def stop(self) -> None:
        for program in self.programs.values():
            program.send_signal(signal.SIGCONT)
            program.kill()
            program.wait()
        self.receiver.shutdown()


@pytest.fixture(scope="module")
def site(promtool, alertmanager, tmp_path_factory) -> Iterator[Site]:
    """A healthy engine, and nobody called although all times have passed twice."""
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        site.run(promtool, alertmanager)
        site.until(lambda: site.receiver.told("/chat"), "the first message")  # smoke has never run here
        time.sleep(2 * int(TIMES["stall_duration"].removesuffix("s")))
        yield site
    finally:
        site.stop()


def test_a_healthy_engine_calls_nobody(site):
    """Although a request is open at each look and none is counted as running."""
    assert site.receiver.told("/pager") == []
    assert ("SGLangSmokeAbsent", "firing") in site.receiver.told("/chat")


@pytest.mark.parametrize(
    ("part", "name"), [("engine", "SGLangTargetDown"), ("scheduler", "SGLangRequestsNotScheduled")]
)
def test_a_hang_is_told_by_its_name_and_so_is_its_end(site, part, name):
    before = set(site.receiver.told("/pager"))
    site.signal(part, signal.SIGSTOP)
    site.until(lambda: (name, "firing") in site.receiver.told("/pager"), f"a page for the {part}")
    site.signal(part, signal.SIGCONT)
    site.until(lambda: (name, "resolved") in site.receiver.told("/pager"), f"the end of the page for the {part}")
    assert set(site.receiver.told("/pager")) - before - {FAILING} == {(name, "firing"), (name, "resolved")}
    labels = next(labels for path, _status, labels in site.receiver.alerts if path == "/pager")
    assert (labels["host"], labels["role"], labels["severity"]) == ("gpu1", "unified", "critical")


def test_a_token_reaches_its_receiver_and_nobody_else(site):
    assert site.receiver.authorizations == {("/pager", f"Bearer {TOKEN}"), ("/chat", None)}
    site.until(lambda: FAILING in site.receiver.told("/pager"), "the failure of the other webhook")
    with urllib.request.urlopen(f"{site.alertmanager_url}/api/v2/status", timeout=10) as answer:
        shown = answer.read().decode()
    assert "webhook-3" in shown
    assert TOKEN not in shown + site.log("alertmanager") + site.log("prometheus")
