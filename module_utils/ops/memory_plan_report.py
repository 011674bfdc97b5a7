# SPDX-License-Identifier: GPL-3.0-or-later
"""What a memory plan says: sentences, tables, the comparison with a running server, Prometheus samples.

Pure functions over ``memory_plan``'s dataclasses, standard library only. Text lines carry no trailing blanks, so that
Ansible's YAML result format prints them as they are.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .memory_plan import (
    GIB,
    INDEXER_BACKENDS,
    MemoryPlan,
    PlanInputs,
    Tensor,
    format_bytes,
    indexer_tensors,
    levers,
    plan_memory,
    swa_of_planned_session,
)
from .memory_plan_models import DeepSeekV4Facts, PlanInputError, estimate_weights_gib


def format_context(tokens: int) -> str:
    """A length as operators say it: 524,288 -> '512k', 1,048,576 -> '1M', 5,000 -> '5,000'."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def format_count(tokens: int) -> str:
    """A pool size, decimal and short: 5,840,128 -> '5.84M', 584,012 -> '584k', 8,192 -> '8,192'."""
    if tokens >= 1_000_000:
        return f"{tokens / 1e6:.2f}M"
    return f"{tokens / 1e3:.0f}k" if tokens >= 100_000 else f"{tokens:,}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def capacity_in_words(plan: MemoryPlan, short_tokens: int = 512) -> str:
    """KV capacity as an operator says it: 'one 8k request, or 8 of 512 tokens (max_running_requests; 16 would fit)'."""
    inputs = plan.inputs

    def held(tokens: int) -> int:
        return plan.max_total_num_tokens // (-(-tokens // inputs.page) * inputs.page)

    most = plan.max_running_requests
    full = min(held(inputs.context_length), most) if plan.fits else 0
    number = {0: "no", 1: "one"}.get(full, f"{full:,}")
    context, short = format_context(inputs.context_length), held(short_tokens)
    limit = f" (max_running_requests; {short:,} would fit)" if short > most else ""
    requests = f"{number} {context} request{'s' if full > 1 else ''}"
    return f"{requests}, or {min(short, most):,} of {short_tokens:,} tokens{limit}"


def verdict(plan: MemoryPlan) -> tuple:
    """The plan in sentences: refused or not, full-context requests at once, sessions that stay warm, memory left."""
    inputs = plan.inputs
    if not plan.fits:
        return tuple(f"Refused ({finding.id}): {finding.reason}." for finding in plan.refusals)
    context = format_context(inputs.context_length)
    lines = [
        f"{_plural(plan.full_context_requests, 'full-context request')} of {context} tokens at once "
        f"(limit: {plan.full_context_limit}); the pool holds {plan.max_total_num_tokens:,} tokens "
        f"at {plan.bytes_per_token:,.0f} bytes each."
    ]
    if isinstance(inputs.model, DeepSeekV4Facts):
        lines.append(
            f"{_plural(plan.warm_sessions, 'returning session')} of {format_context(inputs.session_tokens)} tokens "
            f"{'stays' if plan.warm_sessions == 1 else 'stay'} warm while all {inputs.max_running_requests} "
            f"request slots are "
            f"busy (limit: {plan.warm_sessions_limit}: {plan.swa_tokens:,} SWA tokens, "
            f"{swa_of_planned_session(inputs):,} per session); the next one starts cold."
        )
    lines.append(
        f"{plan.free_left_gib:.1f} GiB{' per GPU' if inputs.tp_size > 1 else ''} stay free at the end of a prompt of "
        f"{context} tokens: "
        f"{plan.free_after_pools_gib:.1f} after "
        f"the pools, less {plan.graph_gib:.1f} for decode graphs and {plan.near_limit_prefill_gib:.1f} for the "
        f"prefill chunk."
    )
    lines += [f"Warning ({finding.id}): {finding.reason}." for finding in plan.warnings]
    return tuple(lines)


def lever_lines(plan: MemoryPlan) -> tuple:
    """The levers as an aligned table with a heading; empty when there is none."""
    found = levers(plan)
    if not found:
        return ()
    v4 = isinstance(plan.inputs.model, DeepSeekV4Facts)
    changes = [f"{lever.setting} {_value(lever.old)} -> {_value(lever.new)}" for lever in found]
    width = max(len(change) for change in changes) + 2
    warm = f"{'warm':>6}" if v4 else ""
    lines = [f"{'to get more':<{width}}{'tokens':>12}{warm}{'free GiB':>10}  cost"]
    for change, lever in zip(changes, found):
        # Adding 0.0 turns a rounded -0.0 into 0.0.
        free = round(lever.free_gain_gib, 1) + 0.0
        warm = f"{lever.sessions_gain:>+6,}" if v4 else ""
        lines.append(f"{change:<{width}}{lever.tokens_gain:>+12,}{warm}{free:>+10.1f}  {lever.cost}")
    return tuple(lines)


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value}"


def _tensor_words(tensor: Tensor) -> str:
    """A tensor with its true size in both units, since a figure in the wrong one was believed for long."""
    shape = " x ".join(f"{size:,}" for size in tensor.shape)
    return f"{tensor.name} [{shape}] {tensor.dtype} = {format_bytes(tensor.bytes)} ({tensor.bytes / 1_000_000:,.2f} MB)"


def tensor_lines(inputs: PlanInputs) -> tuple:
    """Every tensor of the indexer per backend with its true size, for decode and near-limit prefill."""
    if not isinstance(inputs.model, DeepSeekV4Facts):
        return ()
    lines = []
    for phase, rows in (("decode", inputs.cuda_graph_max_bs), ("prefill", inputs.chunked_prefill_size)):
        if not rows:
            continue
        for backend in reversed(INDEXER_BACKENDS):
            tensors = indexer_tensors(inputs, rows, phase, backend)
            total = format_bytes(sum(tensor.bytes for tensor in tensors))
            lines.append(f"{phase:<8}{rows:>6} rows  {backend:<11}{total:>10}")
            lines += [f"    {_tensor_words(tensor)}" for tensor in tensors]
    return tuple(lines)


def largest_tensor_lines(plan: MemoryPlan, count: int = 3) -> tuple:
    """The largest tensors that the plan counts outside the budget, of any phase."""
    found = sorted(plan.tensors, key=lambda tensor: tensor.bytes, reverse=True)[:count]
    return tuple(f"{tensor.phase:<10}{_tensor_words(tensor)}" for tensor in found)


@dataclass(frozen=True)
class PlanTable:
    """Plans over fractions (rows) and contexts (columns); ``recommended`` is for the inputs' own context."""

    inputs: PlanInputs
    fractions: tuple
    contexts: tuple
    plans: Mapping[tuple, MemoryPlan]
    recommended: float | None


def plan_table(inputs: PlanInputs, fractions: Sequence[float], contexts: Sequence[int]) -> PlanTable:
    """Plans every cell. Contexts above the model's maximum are left out; the inputs' own context is always a column."""
    limit = inputs.model.max_position_embeddings
    columns = tuple(sorted({c for c in contexts if c <= limit} | {inputs.context_length}))
    rows = tuple(sorted(set(fractions)))
    plans = {
        (fraction, context): plan_memory(replace(inputs, mem_fraction_static=fraction, context_length=context))
        for fraction in rows
        for context in columns
    }
    return PlanTable(inputs, rows, columns, plans, _recommended(plans, rows, inputs.context_length))


def _recommended(plans: Mapping[tuple, MemoryPlan], rows: Sequence[float], context: int) -> float | None:
    keeping = [fraction for fraction in rows if plans[(fraction, context)].keeps_headroom]
    return max(keeping) if keeping else None


def table_lines(table: PlanTable) -> tuple:
    """The table as terminal text without trailing blanks: per cell full-context requests and GiB left free."""
    inputs = table.inputs
    v4 = isinstance(inputs.model, DeepSeekV4Facts)
    head = f"  {'fraction':<8}{'tokens':>9}" + (f"{'SWA':>8}{'warm':>7}" if v4 else "")
    head += "".join(f"{_column(context, inputs):>12}" for context in table.contexts)
    lines = [head, "-" * len(head)]
    for fraction in table.fractions:
        plan = table.plans[(fraction, inputs.context_length)]
        mark = ">" if fraction == table.recommended else " "
        line = f"{mark} {fraction:<8.3g}{format_count(plan.max_total_num_tokens):>9}"
        if v4:
            line += f"{format_count(plan.swa_tokens):>8}{plan.warm_sessions:>7,}"
        line += "".join(f"{_cell(table.plans[(fraction, context)]):>12}" for context in table.contexts)
        lines.append(line)
    return tuple(lines + list(_legend(table)))


def _column(context: int, inputs: PlanInputs) -> str:
    return f"[{format_context(context)}]" if context == inputs.context_length else format_context(context)


def _cell(plan: MemoryPlan) -> str:
    if not plan.fits:
        return "no"
    mark = "" if plan.keeps_headroom else "!"
    return f"{plan.full_context_requests:,} / {plan.free_left_gib:.1f}{mark}"


def _legend(table: PlanTable) -> tuple:
    inputs = table.inputs
    lines = ["", "cell: full-context requests at once / GiB left free at the end of a full-context prompt's prefill"]
    lines.append(f"  !  less than the headroom of {inputs.headroom:.1f} GiB      no  refused")
    if isinstance(inputs.model, DeepSeekV4Facts):
        session = format_context(inputs.session_tokens)
        lines.append(
            f"warm: returning sessions of {session} tokens that keep their prefix while every request slot is busy"
        )
    context = format_context(inputs.context_length)
    if table.recommended is None:
        lines.append(f"recommended: none of these fractions keeps {inputs.headroom:.1f} GiB free at context {context}")
    else:
        lines.append(
            f"  >  recommended, {table.recommended:g}: the largest fraction that keeps {inputs.headroom:.1f} GiB free "
            f"at context {context}"
        )
    return tuple(lines)


def summary_lines(plan: MemoryPlan) -> tuple:
    """Inputs and memory of one plan as terminal text."""
    inputs, model = plan.inputs, plan.inputs.model
    bounded = plan.max_total_num_tokens == inputs.max_total_tokens
    bound = (
        f"at most {inputs.max_total_tokens:,} tokens of KV" if bounded else f"fraction {inputs.mem_fraction_static:g}"
    )
    lines = [
        f"{model.name}, tp {inputs.tp_size}, context {inputs.context_length:,}, {bound}, "
        f"{inputs.max_running_requests} requests, chunk {inputs.chunked_prefill_size:,}"
        + (f", indexer {inputs.indexer_backend}" if isinstance(model, DeepSeekV4Facts) else ""),
        f"{'free before load':<22}{plan.free_before_load_gib:>8.2f} GiB",
        f"{'weights':<22}{plan.weights_gib:>8.2f} GiB"
        + ("" if inputs.weights_gib is not None else "  (estimated from the model facts)"),
        f"{'resident beyond them':<22}{inputs.load_overhead_gib:>8.2f} GiB",
    ]
    for pool in plan.pools:
        unit = "slot" if pool.name == "c128 state" else "token"
        lines.append(
            f"{'pool ' + pool.name:<22}{pool.bytes / GIB:>8.2f} GiB  {pool.tokens:>10,} {unit}s at "
            f"{pool.bytes_per_token:,.1f} B"
        )
        lines += [
            f"{'  ' + part.name:<22}{part.bytes / GIB:>8.2f} GiB  {part.tokens:>10,} entries, "
            f"{part.bytes_per_context_token:,.2f} B of each token of context"
            for part in pool.parts
        ]
    if any(pool.parts for pool in plan.pools):
        lines.append(
            f"{'a token of context':<22}{plan.bytes_per_token:>8,.2f} B in both pools; the c128 state is per request"
        )
    lines += [
        f"{'free after the pools':<22}{plan.free_after_pools_gib:>8.2f} GiB",
        f"{'decode graphs':<22}{plan.graph_gib:>8.2f} GiB",
        f"{'near-limit prefill':<22}{plan.near_limit_prefill_gib:>8.2f} GiB",
        f"{'left free':<22}{plan.free_left_gib:>8.2f} GiB",
    ]
    return tuple(lines)


def report(plan: MemoryPlan, table: PlanTable | None = None) -> str:
    """Everything about a plan as text for a terminal: memory, table, verdict, levers, tensors outside the budget."""
    sentences = [textwrap.fill(line, 112, subsequent_indent="  ") for line in verdict(plan)]
    tensors = tensor_lines(plan.inputs)
    if tensors:
        tensors = (f"indexer tensors at context {plan.inputs.context_length:,}", *tensors)
    largest = ("largest tensors outside the budget", *largest_tensor_lines(plan))
    blocks = [summary_lines(plan), table_lines(table) if table else (), sentences, lever_lines(plan), tensors, largest]
    return "\n\n".join("\n".join(block) for block in blocks if block)


@dataclass(frozen=True)
class Drift:
    """One quantity, planned and reported; ``ok`` when they differ by no more than the tolerance."""

    quantity: str
    planned: float
    actual: float
    ok: bool

    @property
    def ratio(self) -> float:
        if self.planned:
            return self.actual / self.planned
        return 1.0 if not self.actual else math.inf


def _weights_of_model(inputs: PlanInputs) -> float:
    """GiB without the MTP layer: the server measures the model that drafts apart, and does not report it."""
    if inputs.weights_gib is not None:
        return inputs.weights_gib
    return estimate_weights_gib(inputs.model, inputs.tp_size, mtp=False)


# Reported name -> (where the plan has it, relative tolerance or None for the caller's).
_COMPARED = {
    "max_total_num_tokens": (lambda plan: plan.max_total_num_tokens, None),
    "max_total_num_tokens_swa": (lambda plan: plan.swa_tokens, None),
    "weight_memory_usage_gb": (lambda plan: _weights_of_model(plan.inputs), None),
    "max_running_requests": (lambda plan: plan.max_running_requests, 0.0),
    "context_len": (lambda plan: plan.inputs.context_length, 0.0),
}


def compare_with_server(plan: MemoryPlan, reported: Mapping[str, Any], tolerance: float = 0.03) -> tuple:
    """Plan against what the server reports (/server_info, /metrics): one Drift per quantity present in ``reported``.

    ``max_running_requests`` and ``context_len`` must be equal. Raises PlanInputError when nothing comparable was
    reported.
    """
    drifts = []
    for quantity, (planned_of, own_tolerance) in _COMPARED.items():
        if reported.get(quantity) is None:
            continue
        planned, actual = float(planned_of(plan)), float(reported[quantity])
        allowed = tolerance if own_tolerance is None else own_tolerance
        drifts.append(Drift(quantity, planned, actual, abs(actual - planned) <= allowed * abs(planned)))
    if not drifts:
        raise PlanInputError("reported", sorted(reported), "at least one of " + ", ".join(_COMPARED))
    return tuple(drifts)


def _quantity(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def drift_warnings(drifts: Sequence[Drift]) -> tuple:
    """One sentence with both numbers for each quantity off its plan."""
    return tuple(
        f"{drift.quantity}: planned {_quantity(drift.planned)}, the server reports {_quantity(drift.actual)} "
        f"({drift.ratio - 1:+.1%})"
        for drift in drifts
        if not drift.ok
    )


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics_text(plan: MemoryPlan, drifts: Sequence[Drift] = (), labels: Mapping[str, str] | None = None) -> str:
    """Prometheus text format (node exporter's textfile collector): the plan, and planned against actual where known."""
    base = dict(labels or {})

    def sample(name: str, value: float, **extra: str) -> str:
        pairs = ",".join(f'{key}="{_escape(str(text))}"' for key, text in {**base, **extra}.items())
        return f"{name}{{{pairs}}} {value:.10g}" if pairs else f"{name} {value:.10g}"

    families = [
        (
            "ops_memory_plan_pool_tokens",
            "Tokens per cache pool in the memory plan.",
            [
                sample("ops_memory_plan_pool_tokens", pool.tokens, pool=pool.name)
                for pool in plan.pools
                if pool.name != "c128 state"
            ],
        ),
        (
            "ops_memory_plan_full_context_requests",
            "Full-context requests that fit at once in the memory plan.",
            [sample("ops_memory_plan_full_context_requests", plan.full_context_requests)],
        ),
        (
            "ops_memory_plan_warm_sessions",
            "Returning sessions that stay warm in the memory plan.",
            [
                sample(
                    "ops_memory_plan_warm_sessions", plan.warm_sessions, session_tokens=str(plan.inputs.session_tokens)
                )
            ],
        ),
        (
            "ops_memory_plan_free_bytes",
            "Memory per GPU that the plan leaves free at the end of a full-context prefill.",
            [sample("ops_memory_plan_free_bytes", plan.free_left_gib * GIB)],
        ),
        (
            "ops_memory_plan_planned",
            "Planned value of a quantity that the server reports.",
            [sample("ops_memory_plan_planned", drift.planned, quantity=drift.quantity) for drift in drifts],
        ),
        (
            "ops_memory_plan_actual",
            "Value that the server reported after its start.",
            [sample("ops_memory_plan_actual", drift.actual, quantity=drift.quantity) for drift in drifts],
        ),
        (
            "ops_memory_plan_drift",
            "1 when the server's value is off its plan by more than the tolerance.",
            [sample("ops_memory_plan_drift", 0 if drift.ok else 1, quantity=drift.quantity) for drift in drifts],
        ),
    ]
    lines = []
    for name, text, samples in families:
        if samples:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", *samples]
    return "\n".join(lines) + "\n"


def plan_to_dict(plan: MemoryPlan) -> dict:
    """The plan as plain data for JSON and Ansible, with verdict, levers and capacity in words."""
    data = asdict(plan)
    data["fits"], data["keeps_headroom"] = plan.fits, plan.keeps_headroom
    data["verdict"] = list(verdict(plan))
    data["capacity"] = capacity_in_words(plan)
    data["levers"] = [asdict(lever) for lever in levers(plan)]
    return json.loads(json.dumps(data))
