# SPDX-License-Identifier: GPL-3.0-or-later
"""The page draws all 17 panels in a browser, from a real Prometheus with our rules; on the lab, see test_site.py."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import generate
import gpu_host
import known
import kv_cache
import pytest
import yaml

ROOT = Path(__file__).parents[2]
KNOWN = known.everything()
QUERIES = [query["expr"] for panel in json.loads(kv_cache.OUTPUT.read_text())["panels"] for query in panel["targets"]]
READY_S = 120
pytestmark = pytest.mark.integration


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(url: str, query: str) -> list[dict]:
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def configuration(address: str) -> dict:
    """Return a Prometheus configuration with the jobs and roles of a disaggregated host."""
    jobs = {"prefill": "sglang", "decode": "sglang", "node": "node", "gpu": "gpu"}
    scrapes = []
    for path, job in jobs.items():
        labels = {"role": path} if job == "sglang" else {}
        # The address is one; the instances are told apart by their path.
        target = {"targets": [address], "labels": {**labels, "instance": f"host:{path}"}}
        relabel = [{"target_label": "job", "replacement": job}]
        one = {"job_name": path, "metrics_path": f"/{path}", "static_configs": [target], "relabel_configs": relabel}
        scrapes.append(one)
    times = {"scrape_interval": "2s", "evaluation_interval": "2s"}
    return {"global": times, "rule_files": [str(generate.RULES)], "scrape_configs": scrapes}


@pytest.fixture(scope="module")
def prometheus(promtool, tmp_path_factory):
    """The URL of a Prometheus that has looked at the host long enough for every rate."""
    directory = tmp_path_factory.mktemp("prometheus")
    host = gpu_host.Host()
    threading.Thread(target=host.serve_forever, daemon=True).start()
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration(host.address)))
    port = free_port()
    command = [Path(promtool).with_name("prometheus"), f"--config.file={directory}/prometheus.yml"]
    command += [f"--storage.tsdb.path={directory}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (directory / "log").open("w") as log:
        program = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                if ask(
                    url, "ALERTS{alertname='SGLangSmokeFailing'} and on () instance:sglang_prefix_hit:ratio_rate30m"
                ):
                    break
            except OSError:
                pass
            if time.monotonic() > deadline or program.poll() is not None:
                pytest.fail((directory / "log").read_text()[-2000:])
            time.sleep(1)
        time.sleep(10)  # two samples in every rate, one in every recorded series
        yield url
    finally:
        program.terminate()
        program.wait()
        host.shutdown()


def test_made_up_host_exports_what_exists():
    for name, labels, _ in [entry for page in gpu_host.PAGES.values() for entry in page]:
        metric = KNOWN[known.family(name, KNOWN)]
        used = {part.split("=")[0] for part in labels.split(",") if part}
        assert used <= metric.labels | {"le"} | known.TARGET, name


def of_the_lab(name: str) -> object:
    """Return a constant of the live test, which can't be imported without a lab's host."""
    tree = ast.parse((ROOT / "tests/integration/test_dashboard_live.py").read_text())
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(constants[name])


@pytest.mark.parametrize("part", of_the_lab("MISSING"))
def test_a_query_without_data_in_the_lab_has_data_here(prometheus, part):
    """What the live test can't see, a lab having no GPU, window or transfer, is asked of a host that has them."""
    (expr,) = (expr for expr in QUERIES if part in expr)
    for name, value in of_the_lab("VARIABLES").items():
        expr = expr.replace(name, value)
    found = [one for one in ask(prometheus, expr) if one["value"][1] != "NaN"]
    assert found, expr


def test_every_panel_is_drawn(prometheus, tmp_path):
    environment = {**os.environ, "PROMETHEUS_URL": prometheus, "PORT": str(free_port())}
    command = [ROOT / "dashboard/run", tmp_path / "shot.png", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    panels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [panel["id"] for panel in panels] == [str(number) for number in range(1, 18)]
    assert {panel["title"]: panel["state"] for panel in panels if panel["state"] != "ok"} == {}
    texts = {panel["title"]: panel["text"] for panel in panels}
    assert "SGLangSmokeFailing" in texts["Alerts firing"]
    assert "FAILED" in texts["Smoke test"]
    assert "-20" in texts["KV capacity, planned and measured"]
    assert "off" in texts["Kernels and graphs"]
    assert "temperature" in texts["GPUs"]
    assert (tmp_path / "shot.png").stat().st_size > 50_000


def test_a_panel_in_error_fails_the_shot(tmp_path):
    """A Prometheus that refuses every query: the page must say so, not draw an empty picture."""

    class Refusal(gpu_host.Pages):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.startswith("/-/ready") else 422)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"status": "error", "errorType": "execution", "error": "no memory left"}')

    server = gpu_host.ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "PROMETHEUS_URL": f"http://127.0.0.1:{server.server_address[1]}"}
    environment["PORT"] = str(free_port())
    command = [ROOT / "dashboard/run", tmp_path / "shot.png"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    server.shutdown()
    assert done.returncode == 1
    assert done.stderr.count("no memory left") >= 17
