# SPDX-License-Identifier: GPL-3.0-or-later
"""The contract between rules, panels and exporters: every name exists, every label exists, no value counts twice."""

from __future__ import annotations

import json
import re

import generate
import known
import kv_cache
import promql
import pytest
import yaml

KNOWN = known.everything()
RULES = [rule for group in yaml.safe_load(generate.RULES.read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads(kv_cache.OUTPUT.read_text())["panels"]
EXPRESSIONS = {
    **{f"{rule.get('alert') or rule['record']} {number}": rule["expr"] for number, rule in enumerate(RULES)},
    **{f"{panel['title']} {query['refId']}": query["expr"] for panel in PANELS for query in panel["targets"]},
}
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


def test_panels_show_zero_before_the_first_event():
    panels = [query["expr"] for panel in PANELS for query in panel["targets"]]
    late = [expr for expr in panels if any(name in expr for name in BORN_LATE)]
    assert late
    assert [expr for expr in late if " or 0 * " not in expr] == []
