# SPDX-License-Identifier: GPL-3.0-or-later
"""PromQL as the tests look at it: selectors, and what aggregates them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser as parser

# What a dashboard's query has and PromQL has not.
VARIABLES = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h"}


@dataclass(frozen=True)
class Selector:
    """One vector selector. matchers: (label, value); inside: the aggregations around it, the nearest first."""

    name: str
    matchers: tuple[tuple[str, str], ...]
    inside: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(operator, "by" or "without", labels)"""

    @property
    def labels(self) -> set[str]:
        return {label for label, _ in self.matchers}


def fill(expr: str) -> str:
    """Put values for Grafana's variables into an expression."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return re.sub(r"\$\{?\w+\}?", ".+", expr)


def parse(expr: str) -> parser.Expr:
    """Return the tree of an expression, or fail with the parser's words."""
    return parser.parse(fill(expr))


def selectors(expr: str) -> list[Selector]:
    """Return every vector selector of an expression."""
    return list(_walk(parse(expr), ()))


def _walk(node: parser.Expr, inside: tuple) -> Iterator[Selector]:
    if isinstance(node, parser.AggregateExpr):
        modifier = node.modifier
        kind = "without" if modifier and modifier.type == parser.AggModifierType.Without else "by"
        around = (str(node.op), kind, tuple(modifier.labels) if modifier else ())
        yield from _walk(node.expr, (around, *inside))
    elif isinstance(node, parser.BinaryExpr):
        yield from _walk(node.lhs, inside)
        yield from _walk(node.rhs, inside)
    elif isinstance(node, parser.Call):
        for argument in node.args:
            yield from _walk(argument, inside)
    elif isinstance(node, (parser.ParenExpr, parser.UnaryExpr, parser.SubqueryExpr)):
        yield from _walk(node.expr, inside)
    elif isinstance(node, parser.MatrixSelector):
        yield from _walk(node.vector_selector, inside)
    elif isinstance(node, parser.VectorSelector):
        found = tuple((matcher.name, matcher.value) for matcher in node.matchers.matchers)
        yield Selector(node.name or dict(found).get("__name__", ""), found, inside)
