# SPDX-License-Identifier: GPL-3.0-or-later
"""How many series an engine can have: every label has an end, also where clients choose its values."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import generate
import known
import kv_cache
import promql
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MOST = yaml.safe_load((known.METRICS / "cardinality.yml").read_text())
OFF = re.compile("|".join(MOST["features"].values()))
FAMILIES = {name: it for name, it in known.recorded("sglang-0.5.23.tsv").items() if not OFF.match(name)}
GOLDEN = ROOT / "tests/templates/golden"
CONFIGURATIONS = sorted(GOLDEN.glob("*/prometheus.yml"))
each_configuration = pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.parent.name)


def series(metric: known.Metric) -> int:
    """Return the most series of a family."""
    values = math.prod(MOST["labels"][label] for label in metric.labels if label)
    return values * {"histogram": MOST["histogram"], "gaugehistogram": MOST["histogram"], "summary": 2}.get(
        metric.kind, 1
    )


def keep(path: Path) -> re.Pattern[str]:
    """Return what the endpoint and method of a sample of an engine must match, as Prometheus joins them."""
    (job,) = (one for one in yaml.safe_load(path.read_text())["scrape_configs"] if one["job_name"] == "sglang")
    (rule,) = job["metric_relabel_configs"]
    assert (rule["action"], rule["source_labels"]) == ("keep", ["endpoint", "method"])
    return re.compile(rule["regex"])


def test_every_label_has_an_end():
    used = {label for metric in FAMILIES.values() for label in metric.labels if label}
    assert used == set(MOST["labels"])


def test_the_bound_is_the_sum_of_all_families():
    kernels = len(known.kernel_metrics()) * MOST["kernels"] * MOST["ranks"]
    assert sum(map(series, FAMILIES.values())) + kernels == MOST["series_of_an_engine"]
    assert f"at most {MOST['series_of_an_engine']:,}" in (ROOT / "docs/monitoring.md").read_text()


def test_no_histogram_that_is_looked_at_has_more_buckets():
    bounds = yaml.safe_load((known.METRICS / "buckets.yml").read_text())
    assert max(map(len, bounds.values())) + 3 <= MOST["histogram"]


# Label -> what in SGLang's source makes one value of it: (file or directory, pattern).
SOURCES = {
    "cache_source": ("observability/metrics_collector.py", r'(?:report_cache_source\(|"cache_source": )"\w+"'),
    "category": ("observability/scheduler_stage_metrics.py", r"^SCHEDULER_STAGE_(?!CATEGORIES)\w+ = "),
    "component": (".", r'start_cpu_monitor_thread\("\w+"\)'),
    "context": (".", r"^\s*@time_startup_latency\b"),
    "forward_overlap": ("observability/scheduler_stage_metrics.py", r'^FORWARD_OVERLAP_\w+ = "'),
    "name": (".", r"^\s*@time_func_latency\b"),
    "source": ("managers/scheduler_components/weight_updater.py", r'_observe_weight_load\("\w+"\)'),
    "stage": ("observability/req_time_stats.py", r"metrics_is_observed=True"),
}


@pytest.fixture(scope="module")
def sources(engine_python) -> Path:
    """The directory of the installed engine's source."""
    (found,) = Path(engine_python).parents[1].glob("lib/python3*/site-packages/sglang/srt")
    return found


@pytest.mark.parametrize("label", SOURCES)
def test_the_installed_engine_has_no_more_values(sources, label):
    where, pattern = SOURCES[label]
    files = [sources / where] if where.endswith(".py") else sorted(sources.rglob("*.py"))
    # A decorator in the text of its own module is an example.
    texts = [path.read_text() for path in files if path.name not in ("startup_func_log_and_timer.py", "func_timer.py")]
    count = sum(len(re.findall(pattern, text, re.MULTILINE)) for text in texts)
    assert count <= MOST["labels"][label]
    assert count or label in ("name", "context"), "the source is written otherwise now"


def test_what_is_off_stays_off():
    scripts = [path.read_text() for path in GOLDEN.glob("*/launch-*.sh")]
    arguments = [*MOST["features"], "enable-metrics-for-all-schedulers"]
    assert scripts
    assert [argument for argument in arguments if any(f"--{argument}" in script for script in scripts)] == []


@each_configuration
def test_a_client_makes_no_series(path):
    pattern = keep(path)
    for endpoint, method in (("/wp-login.php", "GET"), ("/generate", "PROPFIND"), ("/v1/models/x", "GET"), ("", "GET")):
        assert not pattern.fullmatch(f"{endpoint};{method}")
    assert pattern.fullmatch(";"), "every other family has neither label"


@each_configuration
def test_what_rules_and_panels_ask_for_is_kept(path):
    rules = [rule["expr"] for group in yaml.safe_load(generate.RULES.read_text())["groups"] for rule in group["rules"]]
    panels = [
        query["expr"] for panel in json.loads(kv_cache.OUTPUT.read_text())["panels"] for query in panel["targets"]
    ]
    asked = {
        value
        for expr in (*rules, *panels)
        for selector in promql.selectors(expr)
        for label, value in selector.matchers
        if label == "endpoint"
    }
    assert asked
    kept = [f"/{one}" for one in ("generate", "v1/chat/completions", "v1/completions", "v1/responses", "v1/messages")]
    for pattern in asked:
        assert [one for one in kept if re.fullmatch(pattern, one)] == kept
    assert all(keep(path).fullmatch(f"{one};POST") for one in kept)


@each_configuration
def test_as_many_endpoints_are_kept_as_are_counted(path):
    paths, methods = keep(path).pattern.removeprefix(";|").rsplit(";", 1)
    assert methods.count("|") + 1 == MOST["labels"]["method"]
    assert paths.count("|") + 1 == MOST["labels"]["endpoint"]
