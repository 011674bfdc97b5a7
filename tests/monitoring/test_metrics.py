# SPDX-License-Identifier: GPL-3.0-or-later
"""The contract between rules, panels and exporters: every name exists, every label exists, no value counts twice."""

from __future__ import annotations

import json
import re
import subprocess

import generate
import known
import kv_cache
import promql
import pytest
import yaml

KNOWN = known.everything()
RULES = [rule for group in yaml.safe_load(generate.RULES.read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads(kv_cache.OUTPUT.read_text())["panels"]
QUERIES = {f"{panel['title']} {query['refId']}": query["expr"] for panel in PANELS for query in panel["targets"]}
EXPRESSIONS = {f"{rule.get('alert') or rule['record']} {number}": rule["expr"] for number, rule in enumerate(RULES)}
EXPRESSIONS |= QUERIES
RANKS = {"tp_rank", "pp_rank", "moe_ep_rank"}
each = pytest.mark.parametrize("where", EXPRESSIONS)


def names_of(selector: promql.Selector) -> list[str]:
    """Return the metrics that a selector names; a pattern names every metric that it matches."""
    if selector.name in dict(selector.matchers).values():
        pattern = re.compile(selector.name)
        return [name for name in KNOWN if pattern.fullmatch(name)]
    return [selector.name]


def alternatives(pattern: str) -> int:
    """Return how many names a pattern of the form a(b|c)d means."""
    return max(1, pattern.count("|") + 1)


@each
def test_every_metric_exists(where):
    for selector in promql.selectors(EXPRESSIONS[where]):
        names = names_of(selector)
        assert all(known.family(name, KNOWN) for name in names), names
        if selector.name in dict(selector.matchers).values():
            assert len(names) == alternatives(selector.name), f"{selector.name} matches only {names}"


def test_the_contract_notices_a_wrong_name():
    assert known.family("sglang:num_running_requests", KNOWN) is None
    assert known.family("sglang_num_running_reqs", KNOWN) is None
    assert known.family("sglang:num_running_reqs_bucket", KNOWN) is None
    assert known.family("sglang:time_to_first_token_seconds_bucket", KNOWN)


@each
def test_every_label_exists(where):
    for selector in promql.selectors(EXPRESSIONS[where]):
        for name in names_of(selector):
            metric = KNOWN[known.family(name, KNOWN)]
            more = {"le", "__name__"} if metric.kind == "histogram" else {"__name__"}
            assert selector.labels <= metric.labels | known.TARGET | more, name


@each
def test_ranks_never_add_up(where):
    """Every rank exports the same value: the nearest aggregation is max or min, and takes the ranks away."""
    for selector in promql.selectors(EXPRESSIONS[where]):
        for name in names_of(selector):
            ranks = KNOWN[known.family(name, KNOWN)].labels & RANKS
            if not ranks or (name == "dsv4_sm120_kernel_active" and not selector.inside):
                continue  # only asked for whether it is there
            assert selector.inside, f"{name} is not aggregated"
            operator, kind, labels = selector.inside[0]
            assert operator in ("max", "min"), f"{operator} over {name} counts every rank"
            assert (ranks <= set(labels)) if kind == "without" else not (ranks & set(labels))


def test_a_sum_over_ranks_would_be_noticed():
    (selector,) = promql.selectors("sum by (job) (sglang:num_running_reqs)")
    assert selector.inside[0][0] == "sum"
    assert KNOWN["sglang:num_running_reqs"].labels & RANKS


# Counters that SGLang creates at their first event; those that exist from the start are left out.
BORN_LATE = {
    "sglang:evicted_tokens_total",
    "sglang:num_retracted_requests_total",
    "sglang:num_transfer_failed_reqs_total",
    "sglang:num_bootstrap_failed_reqs_total",
    "gpu_xid_errors_total",
}


@pytest.mark.parametrize("name", sorted(BORN_LATE))
def test_the_first_event_counts(name):
    """A rule that only had increase() would miss it: before it there is no series to have increased."""
    rules = [rule for rule in RULES if name in rule["expr"]]
    assert rules
    for rule in rules:
        expr = " ".join(rule["expr"].split())
        assert re.search(rf"increase\({name}\[(\w+)\]\) > 0\) or \( ?\(?{name} unless {name} offset \1", expr), expr


LATE = [where for where, expr in QUERIES.items() if known.raw(expr) & BORN_LATE]
ZEROS = [where for where, expr in QUERIES.items() if re.search(r" or (label_replace[(])?0 [*] ", expr)]


def test_panels_say_what_to_show_before_the_first_event():
    """Of a counter that is born late, itself or as recorded."""
    assert len(LATE) == 4
    assert set(LATE) - set(ZEROS) == set()


SPLIT_HOST = """\
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'up{{job="sglang",instance="a",role="decode"}}', values: '1x90'}}
      - {{series: 'up{{job="router",instance="b",role="router"}}', values: '1x90'}}
      - {{series: 'gpu_up{{job="gpu",instance="c",gpu="0",pci="0"}}', values: '1x90'}}
      - {{series: 'sglang:max_total_num_tokens{{job="sglang",instance="a",role="decode",tp_rank="0"}}', values: '9x90'}}
      - {{series: 'sglang:max_total_num_tokens{{job="sglang",instance="a",role="decode",tp_rank="1"}}', values: '9x90'}}
{counters}
    promql_expr_test:
      - {{expr: '{expr}', eval_time: 80m, exp_samples: {samples}}}
"""


@pytest.mark.parametrize("at_rest", [False, True], ids=["unborn", "at-rest"])
@pytest.mark.parametrize("where", ZEROS)
def test_panels_show_zero_of_a_counter_that_does_not_move(promtool, tmp_path, where, at_rest):
    """One for each engine, and stage or GPU; a router, which is a target as well, has none of these counters."""
    expr = promql.fill(QUERIES[where])
    engine = 'job="sglang",instance="a",role="decode"'
    labels = [f"{{{engine}}}"]
    if "stage" in expr:
        labels = [f'{{{engine},stage="{stage}"}}' for stage in kv_cache.PD_STAGES]
    elif "gpu_" in expr:
        engine, labels = 'job="gpu",instance="c",gpu="0"', ['{gpu="0"}']
    counters = [f"{name}{{{engine}}}" for name in sorted(known.raw(expr) & BORN_LATE) if at_rest]
    text = SPLIT_HOST.format(
        rules=generate.RULES,
        counters="\n".join(f"      - {{series: '{series}', values: '0x90'}}" for series in counters),
        expr=expr,
        samples=json.dumps([{"labels": one, "value": 0} for one in labels]),
    )
    (tmp_path / "zero.yml").write_text(text)
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "zero.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
