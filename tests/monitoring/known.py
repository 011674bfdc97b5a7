# SPDX-License-Identifier: GPL-3.0-or-later
"""Every metric that exists, from whoever exports it: the engine as recorded, and our own producers as they are."""

from __future__ import annotations

import ast
import csv
import functools
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import generate
import promql
import yaml
from ops import memory_plan_report

ROOT = Path(__file__).parents[2]
METRICS = Path(__file__).parent / "metrics"
# Labels that Prometheus adds to what it scrapes.
TARGET = {"job", "instance", "role", "elsewhere"}
# Prometheus makes these itself.
BUILT_IN = {"up": set(), "ALERTS": {"alertname", "alertstate", "severity"}}


@dataclass(frozen=True)
class Metric:
    """A family as exported; kind is Prometheus's type."""

    kind: str
    labels: frozenset[str]


def recorded(name: str) -> dict[str, Metric]:
    """Return the families of a recorded page: name, type, labels."""
    with (METRICS / name).open() as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    return {row["name"]: Metric(row["type"], frozenset(row["labels"].split(","))) for row in rows}


def kernel_metrics() -> dict[str, Metric]:
    """Return the families of the kernel package, from the constants of its source."""
    tree = ast.parse((ROOT / "kernels/src/dsv4_sm120/metrics.py").read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    labels = frozenset(values["LABELS"])
    return {values["ACTIVE"]: Metric("gauge", labels), values["CALLS"] + "_total": Metric("counter", labels)}


def state_metrics() -> dict[str, Metric]:
    """Return the families of the host's state page."""
    families = runpy.run_path(str(ROOT / "roles/node_exporter/files/state_metrics.py"))["FAMILIES"]
    return {
        name: Metric("gauge", frozenset({"unit", "role", "device", "model", "report", "result", "path", "release"}))
        for name in families
    }


def gpu_metrics() -> dict[str, Metric]:
    """Return the families of the GPU exporter, from its source: NVML is not needed to read it."""
    text = (ROOT / "roles/gpu_exporter/files/gpu_exporter.py").read_text()
    names = set(re.findall(r'"(gpu_[a-z_]+)"', text))
    labels = frozenset({"gpu", "pci", "reason", "xid"})
    return {
        (name + "_total" if name == "gpu_xid_errors" else name): Metric(
            "counter" if name == "gpu_xid_errors" else "gauge", labels
        )
        for name in names
    }


def plan_metrics() -> dict[str, Metric]:
    """Return the families of the memory plan, from its source."""
    text = Path(memory_plan_report.__file__).read_text()
    labels = frozenset({"role", "pool", "quantity", "session_tokens"})
    return {name: Metric("gauge", labels) for name in set(re.findall(r'"(ops_memory_plan_[a-z_]+)"', text))}


@functools.cache
def rules() -> list[dict]:
    """Return our own rules of all groups, recording and alerting."""
    return [rule for group in yaml.safe_load(generate.RULES.read_text())["groups"] for rule in group["rules"]]


def recording_rules() -> dict[str, Metric]:
    """Return the series that our own rules record."""
    names = {rule["record"] for rule in rules() if "record" in rule}
    return {name: Metric("gauge", frozenset({"pool", "stage"})) for name in names}


def everything() -> dict[str, Metric]:
    """Return name -> metric, for whatever a rule or panel may use."""
    found = recorded("sglang-0.5.23.tsv") | recorded("node-exporter-1.5.0.tsv")
    found |= recorded("alertmanager-0.25.0.tsv") | recorded("sglang-router-0.3.2.tsv")
    found |= kernel_metrics() | state_metrics() | gpu_metrics() | plan_metrics() | recording_rules()
    return found | {name: Metric("gauge", frozenset(labels)) for name, labels in BUILT_IN.items()}


def family(name: str, known: dict[str, Metric]) -> str | None:
    """Return the family that a series belongs to: a histogram's are _bucket, _sum and _count."""
    if name in known:
        return name
    for suffix in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if base != name and base in known and known[base].kind == "histogram":
            return base
    return None


@functools.cache
def matching(pattern: str) -> list[str]:
    """Return the metrics that a selector's pattern matches."""
    return [name for name in everything() if re.fullmatch(pattern, name)]


def raw(expr: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the exported metrics that an expression comes from, through the recording rules."""
    found = set()
    for selector in promql.selectors(expr):
        for name in matching(selector.name) if "|" in selector.name else [selector.name]:
            sources = [rule["expr"] for rule in rules() if rule.get("record") == name] if name not in seen else []
            found |= {one for source in sources for one in raw(source, seen | {name})} if sources else {name}
    return found
