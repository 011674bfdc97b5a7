# SPDX-License-Identifier: GPL-3.0-or-later
"""The host's own Prometheus while the real engine works: every panel has data, every rule is evaluated.

What a host without a GPU, a sliding window, a router or disaggregation can't have is listed with the reason, and must
really be missing there: an entry that is not needed any more fails as well.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from site_host import CHECKOUT, ENGINE, SiteHost, eventually

pytestmark = pytest.mark.integration
PANELS = json.loads((CHECKOUT / "grafana/dashboards/kv-cache.json").read_text())["panels"]
API_KEY_FILE = CHECKOUT / ".cache" / "lab-api-key"
URL, MODEL = "http://10.77.0.11:30001", "smollm2-135m-instruct"
CLIENTS = 4
# Grafana's variables as it fills them in, at the lab's scrapes of 2 s.
VARIABLES = {"$__rate_interval": "20s", "$__range": "15m", "$job": ".+", "$instance": ".+", "$role": ".+"}
# Queries without data there, by a part that no other query has, and why.
MISSING = {
    "dsv4_sm120_kernel_active": "the kernels compute on GPUs only",
    "sglang:swa_used_tokens": "the model has no sliding window",
    "sglang:swa_evictable_tokens": "the model has no sliding window",
    "sglang:swa_available_tokens": "the model has no sliding window",
    "sglang:num_prefill_bootstrap_queue_reqs": "no server is a prefill server",
    "sglang:num_prefill_inflight_queue_reqs": "no server is a prefill server",
    "sglang:num_decode_prealloc_queue_reqs": "no server is a decode server",
    "sglang:num_decode_transfer_queue_reqs": "no server is a decode server",
    "instance:sglang_pd_failures:increase5m": "nothing is transferred",
    "sglang:kv_transfer_latency_ms_bucket": "nothing is transferred",
    "gpu_memory_used_bytes": "there is no GPU",
    "gpu_temperature_celsius": "there is no GPU",
    "gpu_power_watts": "there is no GPU",
    "gpu_power_limit_watts": "there is no GPU",
    "gpu_throttled": "there is no GPU",
    "min by (gpu) (gpu_up)": "there is no GPU",
    "gpu_xid_errors_total": "there is no GPU",
}
# Recorded series that may have no value there, and why.
NOT_RECORDED = {
    "instance:sglang_evicted_tokens:increase1h": "perhaps nothing has been evicted yet",
    "instance:sglang_retracted_requests:increase": "perhaps nothing has been retracted yet",
    "instance:sglang_pd_failures:increase5m": "nothing is transferred",
    "instance:gpu_up:count": "there is no GPU",
}
# Series of a histogram or summary.
PARTS = ("bucket", "sum", "count")
LOADED_SECONDS = 40
PENDING_SECONDS = 60


@pytest.fixture(scope="module")
def host(site_host: SiteHost) -> SiteHost:
    return site_host


@pytest.fixture(scope="module")
def busy(host: SiteHost, converged: None) -> Iterator[SiteHost]:
    """A host whose engine has answered clients for a while and still does."""
    words = [sys.executable, CHECKOUT / "lab/lab", "exec", "--", sys.executable, CHECKOUT / "tests/integration/load.py"]
    words += [URL, API_KEY_FILE, MODEL, str(CLIENTS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=host.environment, text=True, **pipes) as load:
        works = (
            "sum(rate(sglang:generation_tokens_total[20s])) > 0 and sum(rate(sglang:realtime_tokens_total[20s])) > 0"
        )
        eventually(lambda: ask(host, works), 120, "an engine that works, in Prometheus")
        time.sleep(LOADED_SECONDS)
        yield host
        printed, _ = load.communicate(timeout=200)
    requests = json.loads(printed.splitlines()[-1])
    assert requests
    assert [request["error"] for request in requests if request["error"]] == []


def fetch(host: SiteHost, path: str, **query: str) -> dict:
    """Return what the host's Prometheus answers."""
    url = f"http://127.0.0.1:9090/api/v1/{path}?{urllib.parse.urlencode(query)}"
    answer = json.loads(host.shell(f"curl -s '{url}'"))
    assert answer["status"] == "success", answer
    return answer["data"]


def ask(host: SiteHost, expr: str) -> list[dict]:
    """Return the series of a query that have a number."""
    return [one for one in fetch(host, "query", query=expr)["result"] if one["value"][1] != "NaN"]


def filled(expr: str) -> str:
    """Return a panel's query as Grafana sends it."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


def test_every_query_of_every_panel_has_data(busy: SiteHost) -> None:
    # Whether an alert fires is asked below; one from before may still.
    queries = [query["expr"] for panel in PANELS if panel["title"] != "Alerts firing" for query in panel["targets"]]
    empty = [expr for expr in queries if not ask(busy, filled(expr))]
    explained = [part for part in MISSING if len([expr for expr in empty if part in expr]) == 1]
    assert explained == list(MISSING)
    assert len(empty) == len(MISSING), [expr for expr in empty if not any(part in expr for part in MISSING)]


def test_every_rule_is_evaluated_without_an_error(busy: SiteHost) -> None:
    groups = fetch(busy, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 50
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    assert {name for name in recorded if not ask(busy, name)} <= set(NOT_RECORDED)


def test_labels_stay_within_their_bounds(busy: SiteHost) -> None:
    """What the engine really exports under load, against what the number of its series is computed from."""
    most = yaml.safe_load((CHECKOUT / "tests/monitoring/metrics/cardinality.yml").read_text())
    (kept,) = ask(busy, 'max(scrape_samples_post_metric_relabeling{job="sglang"})')
    assert int(kept["value"][1]) <= most["series_of_an_engine"]
    for label, values in most["labels"].items():
        families = f'count by (__name__) (count by (__name__, {label}) ({{job="sglang", {label}!=""}}))'
        assert {one["metric"]["__name__"]: one["value"][1] for one in ask(busy, f"{families} > {values}")} == {}, label
    # Of a histogram that no client's choice divides.
    buckets = 'max(count by (__name__, is_streaming, stage) ({job="sglang", __name__=~".+_bucket"}))'
    assert int(ask(busy, buckets)[0]["value"][1]) + 2 <= most["histogram"]  # and sum and count


def test_the_engine_exports_nothing_that_is_not_listed(busy: SiteHost) -> None:
    """Rules, panels and texts are held against the list, so the list is held against the engine that is installed."""
    with (CHECKOUT / "tests/monitoring/metrics/sglang-0.5.23.tsv").open() as stream:
        kinds = {row["name"]: row["type"] for row in csv.DictReader(stream, delimiter="\t")}
    parts = {f"{name}_{part}" for name, kind in kinds.items() if kind in ("histogram", "summary") for part in PARTS}
    seen = set(fetch(busy, "label/__name__/values", **{"match[]": '{job="sglang"}'}))
    engine = {name for name in seen if name.startswith("sglang:")}
    # The rest is what Prometheus itself says of the target, records and alerts.
    assert {name for name in seen - engine if not name.startswith(("scrape_", "instance:", "ALERTS"))} == {"up"}
    assert len(engine) > 50
    assert engine - set(kinds) - parts == set()


def test_load_sets_no_alert_off(busy: SiteHost) -> None:
    """Not even for a moment, the time that an alert waits left out."""
    began, alerts = time.strftime("%FT%T", time.gmtime(time.time() - LOADED_SECONDS)), fetch(busy, "alerts")["alerts"]
    assert [alert for alert in alerts if alert["activeAt"] > began] == []


def test_every_target_is_scraped(busy: SiteHost) -> None:
    targets = fetch(busy, "targets")["activeTargets"]
    assert {target["labels"]["job"] for target in targets} == {"sglang", "node"}
    assert [target["lastError"] for target in targets if target["health"] != "up"] == []


def test_the_page_draws_it(busy: SiteHost, tmp_path: Path) -> None:
    """In a browser, with Grafana's own components; a panel without data says why."""
    command = [CHECKOUT / "dashboard/run", tmp_path / "shot.png", "2"]
    environment = {**busy.environment, "PORT": "3117"}
    environment.pop("PROMETHEUS_URL", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    panels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(panels) == 17
    without = {panel["title"] for panel in panels if panel["state"] != "ok"} - {"Alerts firing"}
    assert without == {"Sliding-window pool", "Prefill to decode", "GPUs"}


@pytest.mark.thorough
def test_a_restart_that_is_put_off_is_shown(host: SiteHost, converged: None) -> None:
    """Another configuration is written, the engine is left alone; the next run with the old one takes it back."""
    length = re.search(r"--context-length (\d+)", host.shell("cat /opt/sglang/current/launch-unified.sh"))[1]
    pid = host.main_pid(ENGINE)
    pending = 'ops_restart_pending{role="unified"} == 1'
    settings = ("-e", f"sglang_serve_context_length={length}")
    assert not ask(host, pending)
    other = ("-e", "sglang_serve_restart_policy=defer", "-e", "sglang_serve_drain_seconds=21")
    host.play("site.yml", "--tags", "sglang_serve", *settings, *other)
    eventually(lambda: ask(host, pending), PENDING_SECONDS, "a pending restart in Prometheus")
    assert host.main_pid(ENGINE) == pid
    host.play("site.yml", "--tags", "sglang_serve", *settings)
    eventually(lambda: not ask(host, pending), PENDING_SECONDS, "no pending restart in Prometheus")
    assert host.main_pid(ENGINE) == pid
