# SPDX-License-Identifier: GPL-3.0-or-later
"""The dashboard: generated, 17 panels, the rules of Grafana's dashboard-linter, lines that are the alerts' limits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import generate
import known
import kv_cache
import promql
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads(kv_cache.OUTPUT.read_text())
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
RULES = [rule for group in yaml.safe_load(generate.RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}
LIMITS = generate.load_thresholds()
KNOWN = known.everything()
# Alerts, smoke and GPUs belong to the host, not to one engine, and one Prometheus serves one host: nothing to choose.
OF_THE_HOST = re.compile(r"^(ALERTS|ops_smoke_\w+|gpu_\w+)$")
# What the host says of an engine has the engine's role, and the job and instance of the exporter that says it.
OF_A_ROLE = {"ops_engine_ready", "ops_restart_pending", "ops_memory_plan_pool_tokens"}

each_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def test_dashboard_is_what_the_generator_writes():
    assert kv_cache.OUTPUT.read_text() == kv_cache.generate(), "Next: grafana/kv_cache.py"


def test_there_are_17_panels():
    assert len(PANELS) == 17
    assert [panel["id"] for panel in PANELS] == list(range(1, 18))
    assert len({panel["title"] for panel in PANELS}) == 17
    assert not any(panel["type"] == "row" for panel in PANELS)


def test_schema_is_the_one_that_grafana_11_and_later_import():
    assert DASHBOARD["schemaVersion"] == 41
    assert DASHBOARD["uid"] == "sglang-kv-cache"
    assert DASHBOARD.get("id") is None


def test_panels_do_not_overlap():
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]
    assert len(taken) == 24 * (1 + max(y for _, y in taken)), "there is a hole"


def test_the_kv_cache_comes_first():
    """What was promised, what is held and by whom; then what is wrong."""
    places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in PANELS]
    assert places == sorted(places), "the numbers do not follow the picture"
    cache = ["KV capacity, planned and measured", "KV pool usage", "Full-attention pool", "Sliding-window pool"]
    assert [panel["title"] for panel in PANELS[:5]] == [*cache, "Alerts firing"]


def test_read_only():
    assert DASHBOARD["editable"] is False


def test_variables_are_those_of_the_linter():
    assert list(VARIABLES) == ["datasource", "job", "instance", "role"]
    assert VARIABLES["datasource"]["label"] == "Data source"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for name in ("job", "instance", "role"):
        variable = VARIABLES[name]
        assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".+"
        assert variable["refresh"] == 2, "must be renewed with the time range"
        assert variable["datasource"]["uid"] == "${datasource}"


@each_panel
def test_panel_is_described(panel):
    assert panel["title"]
    assert panel["description"].count("?") >= 1, "which question does it answer?"
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["noValue"]


# What only says whether an engine is there, or has such a pool, is not what a panel shows.
HELPERS = {"up", "sglang:max_total_num_tokens", "sglang:max_total_num_tokens_swa"}


@each_panel
def test_description_ends_in_the_names_of_the_metrics(panel):
    """As they are exported: that is what one looks for on an exporter's page, and recorded names come from them."""
    told = re.search(r" Metric: ([\w:]+(?:, [\w:]+)*)$", panel["description"])
    assert told, panel["description"]
    names = set(told[1].split(", "))
    shown = set().union(*(known.raw(query["expr"]) for query in panel["targets"]))
    shown = {known.family(name, KNOWN) for name in shown}
    assert names - shown == set()
    assert shown - names - HELPERS == set()
    assert names & set(known.recording_rules()) == set()


@each_panel
def test_every_query_uses_the_variables(panel):
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for query in panel["targets"]:
        assert query["datasource"]["uid"] == "${datasource}"
        for selector in promql.selectors(query["expr"]):
            if selector.name in OF_A_ROLE:
                assert selector.labels == {"role"}, selector
            elif not OF_THE_HOST.match(selector.name):
                assert {"job", "instance", "role"} <= selector.labels, selector
        matchers = re.findall(r'(job|instance|role)=~"([^"]+)"', query["expr"])
        assert all(value == f"${label}" for label, value in matchers)


@each_panel
def test_rates_follow_the_resolution(panel):
    for query in panel["targets"]:
        ranges = re.findall(r"\b(?:rate|irate)\([^\[]*\[([^\]]+)\]", query["expr"])
        assert set(ranges) <= {"$__rate_interval"}, query["expr"]


@each_panel
def test_ratios_do_not_divide_by_zero(panel):
    for query in panel["targets"]:
        for denominator in re.findall(r" / \((.*)\)$", query["expr"]):
            assert denominator.endswith("> 0")


@each_panel
def test_panel_says_why_it_may_be_empty(panel):
    """Only what every engine exports from its start may go without a word."""
    always = {"KV pool usage", "Queue and running", "Full-attention pool", "Eviction and retraction", "Throughput"}
    assert (panel["fieldConfig"]["defaults"]["noValue"] == "No data") == (panel["title"] in always)


# Panel -> series (None: all) -> limits that are drawn or colour the value, each with the alert that has it.
LINES = {
    "KV pool usage": {
        None: [("swa_pool_full_ratio", "SGLangSWAPoolFull"), ("kv_pool_near_full_ratio", "SGLangPoolNearFull")]
    },
    "Prefix cache hit rate": {None: [("prefix_hit_low_ratio", "SGLangCacheThrashing")]},
    "Time to first token": {None: [("ttft_target_seconds", None)]},
    "Inter-token latency": {None: [("itl_target_seconds", None)]},
    "Eviction and retraction": {"/^.* retracted .*$/": [("retracted_requests_count", "SGLangRetractions")]},
    "Smoke test": {"/^age$/": [("smoke_stale_seconds", "SGLangSmokeStale")]},
    "KV capacity, planned and measured": {
        "/^.* drift$/": [("-memory_plan_drift_ratio", None), ("memory_plan_drift_ratio", "SGLangMemoryPlanDrift")]
    },
    "GPUs": {"/^temperature$/": [("gpu_temperature_celsius", "GpuHot")], "/^Xid errors$/": [("1", None)]},
}


def lines_of(panel: dict) -> dict[str | None, list[float]]:
    """Return series -> the limits of its thresholds without the base; None for the panel's own."""
    found = {None: panel["fieldConfig"]["defaults"]["thresholds"]["steps"]}
    for override in panel["fieldConfig"]["overrides"]:
        for setting in override["properties"]:
            if setting["id"] == "thresholds":
                found[override["matcher"]["options"]] = setting["value"]["steps"]
    limits = {series: [step["value"] for step in steps if step["value"] is not None] for series, steps in found.items()}
    return {series: values for series, values in limits.items() if values}


def limit(name: str) -> float:
    """Return a threshold by its name, the negative of one, or the number that stands in its place: any Xid is one."""
    if name.isdigit():
        return int(name)
    return -LIMITS[name[1:]] if name.startswith("-") else LIMITS[name]


@each_panel
def test_limits_are_those_of_the_alerts(panel):
    wanted = LINES.get(panel["title"], {})
    found = lines_of(panel)
    assert set(found) == set(wanted)
    for series, limits in wanted.items():
        assert found[series] == [limit(name) for name, _ in limits]
        for name, alert in limits:
            if alert:
                assert re.search(rf"(?<![\w.]){re.escape(str(LIMITS[name]))}(?![\w.])", ALERTS[alert]), alert


def test_latency_lines_are_the_buckets_that_the_rules_count():
    for latency in generate.LATENCIES:
        target = LIMITS[f"{latency.key}_target_seconds"]
        counted = [
            rule["expr"] for rule in RULES if rule.get("record", "").startswith(f"instance:sglang_{latency.key}_slow")
        ]
        assert len(counted) == len(generate.WINDOWS)
        assert all(f'{latency.metric}_bucket{{le=~"{target}([.]0)?"}}' in expr for expr in counted)


def test_lines_are_drawn_where_time_runs():
    for panel in PANELS:
        if panel["type"] == "timeseries" and None in lines_of(panel):
            assert panel["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"]["mode"] == "line"


def test_actions_name_alerts_that_exist():
    named = {word for panel in PANELS for word in re.findall(r"\b(?:SGLang|Gpu)[A-Z]\w+", json.dumps(panel))}
    assert named
    assert named - set(ALERTS) == set()


def test_every_panel_is_explained_in_the_documentation():
    text = (ROOT / "docs/monitoring.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+?) \|([^|]*)\|([^|]*)\|$", text, re.M)
    assert [(int(number), title) for number, title, *_ in rows] == [(panel["id"], panel["title"]) for panel in PANELS]
    for _, title, question, action in rows:
        assert re.fullmatch(r" [A-Z].{15,}\? ", question), title
        assert re.fullmatch(r" (?!.*\?).{15,} ", action), title
