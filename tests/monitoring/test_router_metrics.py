# SPDX-License-Identifier: GPL-3.0-or-later
"""The real router's own metrics: their names and labels as recorded, and no series that a client can make."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import known
import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "fakes"))
from openai_server import MODEL, FakeServer  # noqa: E402

GOLDEN = ROOT / "tests/templates/golden/replicas-lab1"
KEY = "0123456789abcdef-of-the-router"
START_S = 30
SAMPLE = re.compile(r"^(\w+?)(?:\{(.*)\})? \S+$", re.M)
# With two servers, every endpoint that clients of ours use, and a page that nothing was dropped from.
MOST_SERIES = 250


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(url: str, method: str = "POST", key: str = KEY, **body: object) -> int:
    """Return the status of a request."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def chat(url: str, model: str = MODEL, **more: object) -> int:
    return ask(f"{url}/v1/chat/completions", model=model, messages=[{"role": "user", "content": "Hello"}], **more)


class Router:
    """The router as its launch script starts it, in front of two servers that are not engines."""

    def __init__(self, python: str, directory: Path) -> None:
        self.servers = [FakeServer(), FakeServer()]
        for server in self.servers:
            server.api_key = KEY
        port, self.metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        (directory / "api-key").write_text(KEY)
        script = (GOLDEN / "launch-router.sh").read_text()
        options = dict(re.findall(r"^  --([\w-]+) (.+?) \\$", script, re.M))
        options |= {"host": "127.0.0.1", "port": port, "prometheus-port": self.metrics_port}
        options |= {"worker-urls": " ".join(server.base_url for server in self.servers)}
        options |= {"health-check-endpoint": "/health", "health-check-interval-secs": 1}
        words = [word for name, value in options.items() for word in (f"--{name}", *str(value).split())]
        command = [python, ROOT / "roles/sglang_router/files/start_router.py", *words]
        self.log = directory / "log"
        with self.log.open("w") as log:
            environment = {**os.environ, "CREDENTIALS_DIRECTORY": str(directory)}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def page(self) -> str:
        """Return the metrics, "" before they are there."""
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).read().decode()
        return ""

    def until(self, text: str) -> str:
        """Wait for a line of the metrics and return the page."""
        deadline = time.monotonic() + START_S
        while text not in (page := self.page()):
            assert time.monotonic() < deadline, f"no {text} within {START_S} s: {page}{self.log.read_text()[-2000:]}"
            time.sleep(0.2)
        return page


def samples(page: str) -> list[tuple[str, dict[str, str]]]:
    """Return name and labels of every sample."""
    return [(name, dict(re.findall(r'(\w+)="([^"]*)"', labels))) for name, labels in SAMPLE.findall(page)]


@pytest.fixture(scope="module")
def router(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router with two servers that answer, and what clients have asked it."""
    one = Router(engine_python, tmp_path_factory.mktemp("router"))
    try:
        with contextlib.ExitStack() as stack:
            for server in one.servers:
                stack.enter_context(server)
            for server in one.servers:
                one.until(f'smg_worker_health{{worker="{server.base_url}"}} 1')
            assert [chat(one.url), chat(one.url, stream=True), chat(one.url, model="of/nobody")] == [200, 200, 200]
            assert ask(f"{one.url}/v1/models", method="GET") == 200
            yield one
    finally:
        one.process.terminate()
        one.process.wait()


def test_families_are_the_recorded_ones(router: Router) -> None:
    router.until("smg_router_request_duration_seconds_count")
    page = router.until("smg_worker_health_checks_total")
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.M))
    wanted = known.recorded("sglang-router-0.3.2.tsv")
    assert kinds == {name: metric.kind for name, metric in wanted.items()}
    for name, labels in samples(page):
        assert set(labels) - {"le"} == wanted[known.family(name, wanted)].labels - {""}, name


def test_paths_and_wrong_keys_make_no_series(router: Router) -> None:
    def names() -> set[str]:
        return {value for _, labels in samples(router.page()) for value in labels.values()}

    before = names()
    assert [ask(f"{router.url}/wp-login-{number}.php") for number in range(3)] == [404, 404, 404]
    assert ask(f"{router.url}/v1/chat/completions", key="wrong", model="of-a-stranger", messages=[]) == 401
    assert chat(router.url) == 200
    new = names() - before
    assert not any("wp-login" in name or "stranger" in name for name in new)
    assert new <= {"401", "404"} | {name for name in new if re.fullmatch(r"[a-z_]+", name)}


def test_a_model_that_a_client_makes_up_is_dropped(router: Router) -> None:
    (job,) = (
        one
        for one in yaml.safe_load((GOLDEN / "prometheus.yml").read_text())["scrape_configs"]
        if one["job_name"] == "router"
    )
    (rule,) = job["metric_relabel_configs"]
    assert (rule["action"], rule["source_labels"]) == ("keep", ["model"])
    served = re.search(r"--served-model-name (\S+)", (GOLDEN / "launch-replica-0.sh").read_text())[1]
    keep = re.compile(rule["regex"])
    for name, kept in (("of/nobody", False), (f"{served}-x", False), (served, True), ("unknown", True), ("", True)):
        assert bool(keep.fullmatch(name)) is kept, name
    found = [labels.get("model", "") for _, labels in samples(router.page())]
    assert "of/nobody" in found
    assert sum(1 for name in found if name in ("", "unknown", MODEL)) < MOST_SERIES


def test_a_server_that_is_not_ready_is_told(router: Router) -> None:
    out, other = router.servers
    out.fault, out.started, out.start_seconds = "not_ready", time.monotonic(), 2 * START_S
    page = router.until(f'smg_worker_health{{worker="{out.base_url}"}} 0')
    assert f'smg_worker_health{{worker="{other.base_url}"}} 1' in page
    assert chat(router.url) == 200
