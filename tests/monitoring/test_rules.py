# SPDX-License-Identifier: GPL-3.0-or-later
"""Alerts: generated from one set of thresholds, explained, and each proved silent just before and firing just after."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import generate
import known
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CASES = sorted((ROOT / "prometheus/tests").glob("*.yml"))
RULES = [rule for group in yaml.safe_load(generate.RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
each_alert = pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])


def minutes(duration: str) -> int:
    """Return Prometheus's 1h30m in minutes."""
    return sum(int(number) * {"h": 60, "m": 1}[unit] for number, unit in re.findall(r"(\d+)([hm])", duration))


def test_rules_are_what_the_generator_writes():
    assert generate.RULES.read_text() == generate.generate(), "Next: prometheus/generate.py"


def test_generator_refuses_thresholds_that_it_does_not_know():
    with pytest.raises(KeyError, match="no_such_limit"):
        generate.fill("x > @no_such_limit@", {})
    with pytest.raises(ValueError, match="thresholds that no rule uses: lonely"):
        generate.fill("x > 1", {"lonely": 1})


def test_promtool_takes_the_rules(promtool):
    done = subprocess.run([promtool, "check", "rules", generate.RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases_hold(promtool, path):
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def cases() -> list[dict]:
    return [case for path in CASES for case in yaml.safe_load(path.read_text())["tests"]]


@each_alert
def test_alert_is_silent_one_minute_and_fires_the_next(rule):
    own = [case["alert_rule_test"] for case in cases() if case["alert_rule_test"][0]["alertname"] == rule["alert"]]
    assert own, f"prometheus/tests has no case for {rule['alert']}"
    for before, after in own:
        assert before["exp_alerts"] == []
        assert len(after["exp_alerts"]) == 1
        assert minutes(after["eval_time"]) - minutes(before["eval_time"]) == 1


def test_no_case_is_for_an_alert_that_is_gone():
    named = {test["alertname"] for case in cases() for test in case["alert_rule_test"]}
    assert named == {rule["alert"] for rule in ALERTS}


def branches(template: str) -> list[str]:
    """Return what a description can become: one text for each branch of its if, without a text that has none."""
    found = re.fullmatch(r"(.*?){{ if .*? }}(.*){{ end }}(.*)", template, re.S)
    if not found:
        return [template]
    before, middle, after = found.groups()
    return [before + branch + after for branch in re.split(r"{{ else(?: if .*?)? }}", middle)]


# Metrics that are 0 or 1: such a value says something only with the metric's name, and has no unit.
STATES = (
    r"up|gpu_up|ops_engine_ready( of the router)?|ops_restart_pending|ops_smoke_ok|smg_worker_health"
    r"|dsv4_sm120_kernel_active|node_systemd_unit_state{state=\"failed\"}|absent\(.+?\)"
)
UNITS = "(HTTP |disaggregated )?(requests|tokens|times|degrees Celsius|GPUs|engines?|messages)"


def says_value_and_unit(text: str) -> bool:
    """Whether a text has the value and says what it is in, once and not more."""
    shapes = (
        r"{{ \$value \| humanize(Percentage|Duration) }}",
        rf"{{{{ \$value( \| humanize)? }}}} {UNITS}\b",
        rf"(?<!\w)({STATES}) (is|has been) {{{{ \$value }}}}",
    )
    return text.count("$value") == 1 and any(re.search(shape, text) for shape in shapes)


def test_a_value_without_a_unit_would_be_noticed():
    assert says_value_and_unit("{{ $value }} requests wait")
    assert not says_value_and_unit("{{ $value }} wait")
    assert not says_value_and_unit("GPU 3 is lost")
    assert says_value_and_unit("up is {{ $value }} for x")
    assert not says_value_and_unit("the temperature is {{ $value }} for x")
    assert branches("a {{ if $labels.x }}b{{ else if $labels.y }}c{{ else }}d{{ end }} e") == [
        "a b e",
        "a c e",
        "a d e",
    ]


@each_alert
def test_alert_tells_an_operator_what_to_do(rule):
    assert re.fullmatch(r"(SGLang|Gpu|Host|Node|Directory|Exporter|Alertmanager)[A-Za-z]+", rule["alert"])
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert "{{" not in annotations["summary"]
    for text in branches(annotations["description"]):
        assert says_value_and_unit(text), text
    assert annotations["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_runbook_has_one_heading_for_each_alert():
    headings = re.findall(r"^### (\S+)$", (ROOT / "docs/runbook.md").read_text(), re.M)
    assert sorted(headings) == sorted(rule["alert"] for rule in ALERTS)


def test_runbook_entries_are_complete():
    sections = re.split(r"^### (\S+)$", (ROOT / "docs/runbook.md").read_text(), flags=re.M)[1:]
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        text = text.split("\n## ")[0]
        assert "**Means**" in text, name
        assert "**Look**" in text, name
        assert "**Act**" in text, name


@pytest.mark.parametrize("job", ["sglang", "node", "gpu"])
def test_each_job_has_an_alert_for_its_absence(job):
    absent = re.compile(rf'absent\(up\{{job="{job}"\}}\)')
    assert [rule["alert"] for rule in ALERTS if absent.search(rule["expr"])]


# Which alert tells that what an alert looks at is not there. A pattern of the raw metrics: (the alert, what its
# expression must say), or why there is none.
GUARDS: dict[str, tuple[str, str] | str] = {
    r"up": ("SGLangTargetAbsent", 'absent(up{job="sglang"})'),
    r"sglang:num_(transfer|bootstrap)_failed.*": ("SGLangPDRoleAbsent", 'up{job="sglang",role="prefill"}'),
    r"sglang:.*": ("SGLangMetricsAbsent", "unless on (job, instance, role) instance:sglang_pool_tokens:sum"),
    r"dsv4_sm120_.*": ("SGLangKernelStateAbsent", "unless on (job, instance, role) dsv4_sm120_kernel_active"),
    r"smg_.*": ("SGLangRouterMetricsAbsent", "unless on () smg_worker_health"),
    r"gpu_up": ("GpuMetricsAbsent", 'up{job="gpu"} == 1 unless on (job, instance) gpu_up'),
    r"gpu_xid_.*": ("GpuXidUnwatched", "gpu_xid_watched or on (job, instance) 0 *"),
    r"gpu_temperature_celsius": ("GpuMetricsAbsent", "unless on (job, instance, gpu) gpu_temperature_celsius"),
    r"gpu_throttled": ("GpuMetricsAbsent", "unless on (job, instance, gpu) gpu_throttled"),
    r"node_systemd_unit_state": ("NodeUnitStateAbsent", "unless on (job, instance) ( node_systemd_unit_state"),
    r"node_systemd_service_restart_total": (
        "NodeUnitStateAbsent",
        "and on (job, instance) node_systemd_service_restart",
    ),
    r"ops_smoke_.*": ("SGLangSmokeAbsent", "absent(ops_smoke_ok)"),
    r"ops_memory_plan_.*": ("SGLangMemoryPlanAbsent", "unless on (role, pool) ops_memory_plan_pool_tokens"),
    r"ops_directory_.*": ("HostStateAbsent", "unless on (job, instance) ops_directory_avail_bytes"),
    r"ops_engine_ready": ("HostStateAbsent", "unless on (role) ops_engine_ready"),
    # Of the same page as the time; without a running unit there is no restart to be put off.
    r"ops_(state_timestamp_.*|engine_device|restart_pending)": (
        "HostStateAbsent",
        "absent(ops_state_timestamp_seconds)",
    ),
    r"alertmanager_.*": "without an Alertmanager nobody could be told, and a host without one is a choice",
}


@each_alert
def test_what_an_alert_looks_at_has_an_alert_for_its_absence(rule):
    """An alert whose metric is gone is silent for ever: each says by which other alert that is told."""
    expressions = {one["alert"]: " ".join(one["expr"].split()) for one in ALERTS}
    metrics = known.raw(rule["expr"])
    assert metrics
    for name in metrics:
        guard = next(guard for pattern, guard in GUARDS.items() if re.fullmatch(pattern, name))
        if not isinstance(guard, str):
            alert, says = guard
            assert says in expressions[alert], f"{rule['alert']}: {name}"


def test_every_guard_guards_something():
    metrics = {name for rule in ALERTS for name in known.raw(rule["expr"])}
    found = {next(pattern for pattern in GUARDS if re.fullmatch(pattern, name)) for name in metrics}
    assert found == set(GUARDS)


def test_a_restart_pages_nobody():
    """Alerts that a plain restart sets off wait for longer than one takes."""
    patience = minutes(generate.load_thresholds()["restart_duration"])
    causes = (
        "SGLangTargetDown",
        "SGLangRouterServerOut",
        "SGLangTargetAbsent",
        "SGLangMetricsAbsent",
        "SGLangNotReady",
    )
    assert {rule["alert"]: minutes(rule["for"]) for rule in ALERTS if rule["alert"] in causes} == dict.fromkeys(
        causes, patience
    )


def test_severity_has_two_speeds_for_each_latency():
    by_name = {rule["alert"]: rule for rule in ALERTS if "BudgetBurn" in rule["alert"]}
    severities = {name: rule["labels"]["severity"] for name, rule in by_name.items()}
    wanted = {f"SGLang{latency}BudgetBurn{speed}" for latency in ("TTFT", "ITL") for speed in ("Fast", "Slow")}
    assert set(severities) == wanted
    assert all((severity == "critical") == name.endswith("Fast") for name, severity in severities.items())
    assert set(severities.values()) == {"critical", "warning"}


def test_burn_rates_can_be_reached():
    limits = generate.load_thresholds()
    assert limits["latency_burn_fast_count"] * limits["latency_budget_ratio"] < 1


def test_latency_targets_are_bucket_bounds():
    """A target between two bounds would never match a bucket; the bounds are those of the recorded engine."""
    bounds = yaml.safe_load((Path(__file__).parent / "metrics/buckets.yml").read_text())
    limits = generate.load_thresholds()
    for latency in generate.LATENCIES:
        assert float(limits[f"{latency.key}_target_seconds"]) in bounds[latency.metric]


def test_what_the_rules_cost_was_measured_of_these_rules():
    """The table is a measurement, so only a lab can renew it."""
    text = (ROOT / "docs/performance.md").read_text()
    table = text.split("<!-- monitoring: begin -->")[1].split("<!-- monitoring: end -->")[0].split("| group |")[1]
    measured = {name: int(number) for name, number in re.findall(r"^\| ([\w-]+) \| (\d+) \|", table, re.M)}
    groups = {group["name"]: len(group["rules"]) for group in yaml.safe_load(generate.RULES.read_text())["groups"]}
    wanted = {**groups, "all": sum(groups.values())}
    assert measured == wanted, "docs/performance.md is of other rules. Next: tests/bench/monitoring on a converged lab"
