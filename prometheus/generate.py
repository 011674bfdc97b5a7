#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write prometheus/rules/sglang.yml from sglang.yml.in and thresholds.yml.

@name@ stands for a threshold, @name:percent@ for a ratio in percent. A name that is not there is an error, and so is a
threshold that no rule uses. @latency_rules@ and @latency_alerts@ are the same rules for two latencies and four windows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
SOURCE = HERE / "sglang.yml.in"
RULES = HERE / "rules" / "sglang.yml"
THRESHOLDS = HERE / "thresholds.yml"
PLACE = re.compile(r"@(\w+)(:percent)?@")
HEADER = "---\n# Written by prometheus/generate.py from sglang.yml.in and thresholds.yml; change these.\n"
WINDOWS = ("5m", "30m", "1h", "6h")


@dataclass(frozen=True)
class Latency:
    """A histogram of SGLang, and what a slow observation in it is."""

    key: str
    name: str
    metric: str
    noun: str


LATENCIES = (
    Latency("ttft", "TTFT", "sglang:time_to_first_token_seconds", "first tokens"),
    Latency("itl", "ITL", "sglang:inter_token_latency_seconds", "tokens"),
)
# Bucket bounds are 4.0 in one text format and 4 in another.
RULE = """\
      - record: instance:sglang_{key}_slow:ratio_rate{window}
        expr: |
          1 - sum by (job, instance, role) (rate({metric}_bucket{{le=~"@{key}_target_seconds@([.]0)?"}}[{window}]))
          / (sum by (job, instance, role) (rate({metric}_count[{window}])) > 0)
"""
# Targets are promises of GPU hosts; a host that says it computes on a CPU makes none.
ALERT = """\
      - alert: SGLang{name}BudgetBurn{speed}
        expr: |
          instance:sglang_{key}_slow:ratio_rate{long} > @latency_burn_{lower}_count@ * @latency_budget_ratio@
          and instance:sglang_{key}_slow:ratio_rate{short} > @latency_burn_{lower}_count@ * @latency_budget_ratio@
          unless on () ops_engine_device{{device="cpu"}}
        for: @settle_duration@
        labels: {{severity: {severity}}}
        annotations:
          summary: {summary}
          description: >-
            {{{{ $value | humanizePercentage }}}} of the {noun} of {{{{ $labels.role }}}} {{{{ $labels.instance }}}}
            within {long} took longer than @{key}_target_seconds@ s (budget: @latency_budget_ratio:percent@,
            alert at @latency_burn_{lower}_count@ times that).
          runbook_url: docs/runbook.md#sglang{key}budgetburn{lower}
"""
SPEEDS = (("Fast", "1h", "5m", "critical"), ("Slow", "6h", "30m", "warning"))
SUMMARIES = {
    "ttft": "Too many requests wait too long for their first token.",
    "itl": "Too many tokens come too long after the one before.",
}


def latency_rules() -> str:
    """Return the ratio of slow observations, for each latency and window."""
    rules = [RULE.format(**vars(latency), window=window) for latency in LATENCIES for window in WINDOWS]
    return "".join(rules).rstrip("\n")


def latency_alerts() -> str:
    """Return the alerts on budgets that burn, for each latency: fast in two short windows, slowly in two long ones."""
    alerts = [
        ALERT.format(
            **vars(latency),
            speed=speed,
            lower=speed.lower(),
            long=long,
            short=short,
            severity=severity,
            summary=SUMMARIES[latency.key],
        )
        for latency in LATENCIES
        for speed, long, short, severity in SPEEDS
    ]
    return "".join(alerts).rstrip("\n")


def load_thresholds(path: Path = THRESHOLDS) -> dict[str, float | int | str]:
    """Return name -> value."""
    return yaml.safe_load(path.read_text())


def fill(text: str, thresholds: dict[str, float | int | str]) -> str:
    """Put the thresholds into a text. Raises KeyError for an unknown name, ValueError for one that is not used."""

    def value(match: re.Match[str]) -> str:
        found = thresholds[match[1]]
        return f"{100 * float(found):g}%" if match[2] else f"{found}"

    unused = set(thresholds) - {name for name, _ in PLACE.findall(text)}
    if unused:
        raise ValueError(f"thresholds that no rule uses: {', '.join(sorted(unused))}")
    return PLACE.sub(value, text)


def generate(**thresholds: float | str) -> str:
    """Return the rule file's text, with some thresholds other than those of thresholds.yml."""
    text = SOURCE.read_text()
    text = text.replace("@latency_rules@", latency_rules()).replace("@latency_alerts@", latency_alerts())
    return HEADER + fill(text, load_thresholds() | thresholds)


def main() -> None:
    RULES.write_text(generate())


if __name__ == "__main__":
    main()
