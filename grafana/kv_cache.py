#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write grafana/dashboards/kv-cache.json: 17 panels for whoever is woken at night, KV cache first.

Each panel answers one question and ends in an action, see docs/monitoring.md. Lines in a panel are the limits of the
alerts (prometheus/thresholds.yml). Engine panels follow the variables job, instance and role, what the host says of an
engine follows role; what belongs to the host (alerts, smoke, GPUs) follows none: each host has a Prometheus of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

HERE = Path(__file__).parent
OUTPUT = HERE / "dashboards" / "kv-cache.json"
LIMITS = yaml.safe_load((HERE.parent / "prometheus" / "thresholds.yml").read_text())
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

ENGINE = 'job=~"$job",instance=~"$instance",role=~"$role"'
# What the host says of an engine comes by another job and instance.
ROLE = 'role=~"$role"'
RANKS = "tp_rank, pp_rank, moe_ep_rank"
TOKENS, TOKEN_RATE = "count:tok", "count:tok/s"
GREEN, ORANGE, RED = "green", "orange", "red"


@dataclass(frozen=True)
class Query:
    """One query; legend None leaves the labels as columns of a table. now: only the newest value."""

    expr: str
    legend: str | None
    now: bool = False


@dataclass(frozen=True)
class Panel:
    """What the three kinds of panel have in common. limits: (value, color), the base color first with None."""

    title: str
    question: str
    action: str
    metrics: Sequence[str]
    queries: Sequence[Query]
    unit: str
    place: tuple[int, int, int, int]
    """x, y, width, height in Grafana's grid of 24 columns."""
    no_value: str = "No data"
    limits: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    overrides: Sequence[tuple[str, Sequence[models.DynamicConfigValue]]] = field(default=())
    """Legend or column (a regular expression) -> its own settings."""

    @property
    def description(self) -> str:
        """Question, action, and at the end the names of the metrics, as they are exported and not as recorded."""
        return f"{self.question} {self.action} Metric: {', '.join(self.metrics)}"


def once(metric: str, more: str = "") -> str:
    """Return a gauge per engine: the same value of every rank counts once, data-parallel ranks add up."""
    return f"sum by (job, instance, role) (max without ({RANKS}) ({metric}{{{ENGINE}{more}}}))"


def rate_once(metric: str, more: str = "", ranks: str = RANKS) -> str:
    """Return a counter's rate per engine, ranks as in once()."""
    return f"sum by (job, instance, role) (max without ({ranks}) (rate({metric}{{{ENGINE}{more}}}[$__rate_interval])))"


def zero(matchers: str = ENGINE) -> str:
    """Return 0 for each engine that is scraped, by a metric that only engines have: a router is up, too."""
    return f"0 * max by (job, instance, role) (sglang:max_total_num_tokens{{{matchers}}})"


def or_zero(expr: str) -> str:
    """Return 0 for an engine that has no such counter yet, which exists only after the first event."""
    return f"({expr}) or {zero()}"


def quantile(share: float, metric: str) -> str:
    """Return a quantile over all requests of a role, in the histogram's unit."""
    return f"histogram_quantile({share}, sum by (le, role) (rate({metric}_bucket{{{ENGINE}}}[$__rate_interval])))"


def quantiles(metric: str) -> list[Query]:
    """Return median, p95 and p99 of a latency."""
    return [Query(quantile(share, metric), f"{{{{role}}}} p{100 * share:g}") for share in (0.5, 0.95, 0.99)]


def value(id: str, value: object) -> models.DynamicConfigValue:
    """Return one setting of an override."""
    return models.DynamicConfigValue(id_val=id, value=value)


def steps(limits: Sequence[tuple[float | None, str]]) -> models.ThresholdsConfig:
    """Return absolute thresholds."""
    found = [models.Threshold(value=limit, color=color) for limit, color in limits]
    return models.ThresholdsConfig(mode=models.ThresholdsMode.ABSOLUTE, steps=found)


def words(mapping: dict[str, tuple[str, str]]) -> list[models.ValueMapping]:
    """Return value -> (text, color)."""
    options = {key: models.ValueMappingResult(text=text, color=color) for key, (text, color) in mapping.items()}
    return [models.ValueMap(options=options)]


def line_of(limits: Sequence[tuple[float | None, str]]) -> list[models.DynamicConfigValue]:
    """Return the settings that draw limits as lines for one series only."""
    return [value("thresholds", steps(limits)), value("custom.thresholdsStyle", {"mode": "line"})]


UP = words({"0": ("NO", RED), "1": ("yes", GREEN)})
PENDING = words({"0": ("none", GREEN), "1": ("PENDING", ORANGE)})
PASSED = words({"0": ("FAILED", RED), "1": ("passed", GREEN)})
ACTIVE = words({"0": ("off", ORANGE), "1": ("active", GREEN)})
RIGHT_AXIS = value("custom.axisPlacement", "right")
COLORED = {"type": "color-text"}
# no_value is for a panel without any row; a cell without a value stays empty.
EMPTY_CELLS = (".*", [value("noValue", " ")])

ALERTS = Panel(
    "Alerts firing",
    "What is wrong right now?",
    "Open docs/runbook.md at the alert's name, critical ones first.",
    ["ALERTS"],
    [Query('ALERTS{alertstate="firing"}', None, now=True)],
    "string",
    (0, 16, 10, 6),
    no_value="No alert is firing",
    overrides=[
        (
            "severity",
            [
                value("mappings", words({"critical": ("critical", RED), "warning": ("warning", ORANGE)})),
                value("custom.cellOptions", COLORED),
                value("custom.width", 100),
            ],
        ),
        ("alertname", [value("custom.width", 230)]),
        EMPTY_CELLS,
    ],
)
READY = Panel(
    "Engines",
    "Is every engine scraped, is its /ready 200, and does it run with the configuration that it has by now?",
    "NO for longer than a restart: SGLangTargetDown, SGLangNotReady. A restart is pending: SGLangRestartPending.",
    ["up", "ops_engine_ready", "ops_restart_pending"],
    [
        Query(f"max by (job, instance, role) (up{{{ENGINE}}})", "{{role}} scraped", now=True),
        Query(f"max by (unit, role) (ops_engine_ready{{{ROLE}}})", "{{role}} ready", now=True),
        Query(f"max by (unit, role) (ops_restart_pending{{{ROLE}}})", "{{role}} restart", now=True),
    ],
    "none",
    (10, 16, 5, 6),
    no_value="Nothing is scraped: SGLangTargetAbsent",
    overrides=[(".* restart", [value("mappings", PENDING)])],
)
SMOKE = Panel(
    "Smoke test",
    "Did the service answer right when it was last asked, and when was that?",
    "FAILED: read /var/lib/sglang/reports/smoke.json. Old: ansible-playbook smoke.yml.",
    ["ops_smoke_ok", "ops_smoke_timestamp_seconds"],
    [
        Query("min by (model) (ops_smoke_ok)", "result", now=True),
        Query("time() - max by (model) (ops_smoke_timestamp_seconds)", "age", now=True),
    ],
    "none",
    (15, 16, 4, 6),
    no_value="Smoke has never run: SGLangSmokeAbsent",
    overrides=[
        ("age", [value("unit", "s"), value("thresholds", steps([(None, GREEN), (LIMITS["smoke_stale_seconds"], RED)]))])
    ],
)
KERNELS = Panel(
    "Kernels and graphs",
    "Do our kernels compute, and does decode run from captured graphs?",
    "off: SGLangKernelDisabled; answers stay right, latency and throughput suffer. A CPU has neither.",
    ["dsv4_sm120_kernel_active", "sglang:is_cuda_graph"],
    [
        Query(
            f"min by (job, instance, role, kernel) (dsv4_sm120_kernel_active{{{ENGINE}}})",
            "{{role}} {{kernel}}",
            now=True,
        ),
        Query(f"max by (job, instance, role) (sglang:is_cuda_graph{{{ENGINE}}})", "{{role}} decode graph", now=True),
    ],
    "none",
    (19, 16, 5, 6),
    no_value="The engine exports no kernel state: SGLangMetricsAbsent",
)
CAPACITY = Panel(
    "KV capacity, planned and measured",
    "Has the engine as many tokens of cache as the memory plan promised?",
    "Off by more than the tolerance: something else holds memory, SGLangMemoryPlanDrift.",
    ["ops_memory_plan_pool_tokens", "sglang:max_total_num_tokens", "sglang:max_total_num_tokens_swa"],
    [
        Query(f"max by (role, pool) (ops_memory_plan_pool_tokens{{{ROLE}}})", "{{role}} {{pool}} planned", now=True),
        Query(f"instance:sglang_pool_tokens:sum{{{ENGINE}}}", "{{role}} {{pool}} measured", now=True),
        Query(f"instance:sglang_memory_plan_drift:ratio{{{ENGINE}}}", "{{role}} {{pool}} drift", now=True),
    ],
    TOKENS,
    (0, 0, 8, 8),
    no_value="No engine is scraped: SGLangTargetAbsent",
    overrides=[
        (
            ".* drift",
            [
                value("unit", "percentunit"),
                value(
                    "thresholds",
                    steps(
                        [
                            (None, RED),
                            (-LIMITS["memory_plan_drift_ratio"], GREEN),
                            (LIMITS["memory_plan_drift_ratio"], RED),
                        ]
                    ),
                ),
            ],
        )
    ],
)
USAGE = Panel(
    "KV pool usage",
    "How much of each pool do running requests hold?",
    "Over the line: fewer requests at once or a larger pool, SGLangPoolNearFull; only swa high: SGLangSWAPoolFull.",
    ["sglang:full_token_usage", "sglang:swa_token_usage"],
    [Query(f"instance:sglang_pool_usage:ratio{{{ENGINE}}}", "{{role}} {{pool}}")],
    "percentunit",
    (8, 0, 16, 8),
    limits=[(None, GREEN), (LIMITS["swa_pool_full_ratio"], ORANGE), (LIMITS["kv_pool_near_full_ratio"], RED)],
)
PD_QUEUES = (
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
QUEUE = Panel(
    "Queue and running",
    "Is anybody waiting, and is anything running?",
    "Waiting with nothing running: SGLangStalled, restart. Both high: too much load.",
    ["sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs", *PD_QUEUES],
    [
        Query(f"instance:sglang_running_requests:sum{{{ENGINE}}}", "{{role}} running"),
        Query(f"instance:sglang_waiting_requests:sum{{{ENGINE}}}", "{{role}} waiting"),
    ],
    "none",
    (16, 22, 8, 8),
)
FULL_POOL = Panel(
    "Full-attention pool",
    "Who holds the cache: running requests, or prefixes that can be evicted?",
    "Nothing available and little evictable: retractions are next. Much evictable is a warm cache, and good.",
    ["sglang:kv_used_tokens", "sglang:kv_evictable_tokens", "sglang:kv_available_tokens"],
    [
        Query(once("sglang:kv_used_tokens"), "{{role}} used"),
        Query(once("sglang:kv_evictable_tokens"), "{{role}} evictable"),
        Query(once("sglang:kv_available_tokens"), "{{role}} available"),
    ],
    TOKENS,
    (0, 8, 12, 8),
)
HAS_SWA = f'and on (job, instance, role) instance:sglang_pool_tokens:sum{{{ENGINE},pool="swa"}}'
SWA_POOL = Panel(
    "Sliding-window pool",
    "Is the small pool the one that is full?",
    "Full with room in the other: raise swa-full-tokens-ratio, SGLangSWAPoolFull.",
    ["sglang:swa_used_tokens", "sglang:swa_evictable_tokens", "sglang:swa_available_tokens"],
    [
        Query(f"{once('sglang:swa_used_tokens')} {HAS_SWA}", "{{role}} used"),
        Query(f"{once('sglang:swa_evictable_tokens')} {HAS_SWA}", "{{role}} evictable"),
        Query(f"{once('sglang:swa_available_tokens')} {HAS_SWA}", "{{role}} available"),
    ],
    TOKENS,
    (12, 8, 12, 8),
    no_value="This model has no sliding-window pool",
)
HIT_RATE = Panel(
    "Prefix cache hit rate",
    "Which share of the prompt tokens need not be computed?",
    "Falls while sessions stay the same: evicted, or sent to another replica, SGLangCacheThrashing.",
    ["sglang:prefill_effective_tokens_total"],
    [
        Query(
            f"{rate_once('sglang:prefill_effective_tokens_total', ',mode!=' + chr(34) + 'input' + chr(34))}"
            f" / ({rate_once('sglang:prefill_effective_tokens_total')} > 0)",
            "{{role}} now",
        ),
        Query(f"instance:sglang_prefix_hit:ratio_rate30m{{{ENGINE}}}", "{{role}} 30m"),
    ],
    "percentunit",
    (0, 22, 8, 8),
    no_value="No prompt in this time",
    limits=[(None, RED), (LIMITS["prefix_hit_low_ratio"], GREEN)],
)
LOSSES = Panel(
    "Eviction and retraction",
    "Is cache thrown away, and work with it?",
    "Eviction alone is how a full cache works. Retracted requests over the line: SGLangRetractions, admit fewer.",
    ["sglang:evicted_tokens_total", "sglang:num_retracted_requests_total"],
    [
        Query(or_zero(rate_once("sglang:evicted_tokens_total", ranks="tp_rank, pp_rank")), "{{role}} evicted"),
        Query(
            or_zero(f"instance:sglang_retracted_requests:increase{{{ENGINE}}}"),
            f"{{{{role}}}} retracted requests in {LIMITS['retraction_window']}",
        ),
    ],
    TOKEN_RATE,
    (8, 22, 8, 8),
    overrides=[
        (
            ".* retracted .*",
            [
                value("unit", "none"),
                RIGHT_AXIS,
                value("min", 0),
                *line_of([(None, GREEN), (LIMITS["retracted_requests_count"], RED)]),
            ],
        )
    ],
)
TTFT = Panel(
    "Time to first token",
    "How long does a client look at an empty answer?",
    "p95 over the line: the budget burns, SGLangTTFTBudgetBurnFast. Look at the queue first.",
    ["sglang:time_to_first_token_seconds"],
    quantiles("sglang:time_to_first_token_seconds"),
    "s",
    (0, 30, 8, 8),
    no_value="No request in this time",
    limits=[(None, GREEN), (LIMITS["ttft_target_seconds"], RED)],
)
ITL = Panel(
    "Inter-token latency",
    "How smoothly does the answer come?",
    "p95 over the line: long prefills in between or too large a batch, SGLangITLBudgetBurnFast.",
    ["sglang:inter_token_latency_seconds"],
    quantiles("sglang:inter_token_latency_seconds"),
    "s",
    (8, 30, 8, 8),
    no_value="No streamed answer in this time",
    limits=[(None, GREEN), (LIMITS["itl_target_seconds"], RED)],
)
E2E = Panel(
    "Request latency, end to end",
    "How long does a whole answer take?",
    "High with TTFT and ITL as ever: answers are long; look for requests without max_tokens.",
    ["sglang:e2e_request_latency_seconds"],
    quantiles("sglang:e2e_request_latency_seconds"),
    "s",
    (16, 30, 8, 8),
    no_value="No request ended in this time",
)
THROUGHPUT = Panel(
    "Throughput",
    "How much work is done?",
    "Falls with requests running: kernels and graphs, GPU clocks. Zero with requests running: SGLangStalled.",
    ["sglang:generation_tokens_total", "sglang:prompt_tokens_total"],
    [
        Query(
            or_zero(f"sum by (job, instance, role) (rate(sglang:{kind}_tokens_total{{{ENGINE}}}[$__rate_interval]))"),
            f"{{{{role}}}} {legend}",
        )
        for kind, legend in (("generation", "generated"), ("prompt", "prompt"))
    ],
    TOKEN_RATE,
    (0, 38, 12, 8),
)
SPLIT = f'{ENGINE},role!~"unified|replica-.+"'
PD_STAGES = ("transfer", "bootstrap")
PD = Panel(
    "Prefill to decode",
    "Does the KV cache arrive, and where do requests wait for it?",
    "Failures: SGLangPDTransferFailing. A queue that only grows: that role is too small, or the transfer hangs.",
    [*PD_QUEUES, *(f"sglang:num_{stage}_failed_reqs_total" for stage in PD_STAGES), "sglang:kv_transfer_latency_ms"],
    [
        *(
            Query(
                once(name, f',role="{name.split("_")[1]}"'),
                name.removeprefix("sglang:num_").removesuffix("_reqs").replace("_", " "),
            )
            for name in PD_QUEUES
        ),
        Query(
            f"instance:sglang_pd_failures:increase5m{{{SPLIT}}}"
            + "".join(f' or label_replace({zero(SPLIT)}, "stage", "{stage}", "", "")' for stage in PD_STAGES),
            "{{role}} {{stage}} failures in 5m",
        ),
        Query(
            f"histogram_quantile(0.95, sum by (le, role) (max without ({RANKS})"
            f" (rate(sglang:kv_transfer_latency_ms_bucket{{{SPLIT}}}[$__rate_interval]))))",
            "{{role}} transfer p95",
        ),
    ],
    "none",
    (12, 38, 12, 8),
    no_value="No disaggregated engine",
    overrides=[(".* transfer p95", [value("unit", "ms"), RIGHT_AXIS])],
)
GPU_COLUMNS = {
    "memory": "max by (gpu) (gpu_memory_used_bytes / gpu_memory_total_bytes)",
    "temperature": "max by (gpu) (gpu_temperature_celsius)",
    "power": "max by (gpu) (gpu_power_watts)",
    "power limit": "max by (gpu) (gpu_power_limit_watts)",
    "throttled": 'max by (gpu) (gpu_throttled{reason!="sw_power_cap"})',
    "answers": "min by (gpu) (gpu_up)",
    "Xid errors": "sum by (gpu) (gpu_xid_errors_total) or 0 * max by (gpu) (gpu_up)",
}
GPUS = Panel(
    "GPUs",
    "Is a card lost, faulty, hot, slowed down or full?",
    "GpuLost and GpuXid: drain and reboot. GpuThrottled: air and power.",
    [
        "gpu_up",
        "gpu_memory_used_bytes",
        "gpu_memory_total_bytes",
        "gpu_temperature_celsius",
        "gpu_power_watts",
        "gpu_power_limit_watts",
        "gpu_throttled",
        "gpu_xid_errors_total",
    ],
    [Query(expr, None, now=True) for expr in GPU_COLUMNS.values()],
    "none",
    (0, 46, 24, 10),
    no_value="No GPU exporter is scraped: the engines compute on a CPU, or GpuExporterAbsent",
    overrides=[
        ("memory", [value("unit", "percentunit"), value("decimals", 0)]),
        (
            "temperature",
            [
                value("unit", "celsius"),
                value("thresholds", steps([(None, GREEN), (LIMITS["gpu_temperature_celsius"], RED)])),
                value("custom.cellOptions", COLORED),
            ],
        ),
        ("power( limit)?", [value("unit", "watt"), value("decimals", 0)]),
        ("throttled", [value("mappings", words({"0": ("no", GREEN), "1": ("YES", RED)}))]),
        ("answers", [value("mappings", UP)]),
        EMPTY_CELLS,
        ("Xid errors", [value("thresholds", steps([(None, GREEN), (1, RED)])), value("custom.cellOptions", COLORED)]),
    ],
)
LATENCY_PANELS = [TTFT, ITL, E2E]
STACKED_PANELS = [FULL_POOL, SWA_POOL]


def targets(panel: Panel) -> list[prometheus.Dataquery]:
    """Return the queries of a panel as A, B, C ..."""
    found = []
    for number, query in enumerate(panel.queries):
        kind = prometheus_models.PromQueryFormat
        target = (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + number))
            .datasource(DATASOURCE)
            .expr(query.expr)
            .legend_format(query.legend or "")
            .format(kind.TABLE if query.legend is None else kind.TIME_SERIES)
        )
        found.append(target.instant() if query.now else target.range())
    return found


def dress(builder, panel: Panel):
    """Give a panel's builder what all kinds have."""
    x, y, width, height = panel.place
    builder = (
        builder.title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit)
        .no_value(panel.no_value)
        .grid_pos(models.GridPos(x=x, y=y, w=width, h=height))
        .targets(targets(panel))
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps(panel.limits).steps))
    )
    for pattern, settings in panel.overrides:
        builder = builder.with_override(
            models.MatcherConfig(id_val="byRegexp", options=f"/^{pattern}$/"), list(settings)
        )
    return builder


def as_stat(panel: Panel, mappings: list[models.ValueMapping] | None = None) -> stat.Panel:
    """Return a panel of single values."""
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"])
    builder = (
        stat.Panel()
        .reduce_options(reduce)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(common_models.BigValueTextMode.VALUE_AND_NAME)
    )
    return dress(builder, panel).mappings(mappings or [])


def as_lines(panel: Panel, stacked: bool = False) -> timeseries.Panel:
    """Return a panel of lines over time; its limits are drawn as lines when it has any."""
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["mean", "max", "lastNotNull"])
    )
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    builder = (
        dress(timeseries.Panel(), panel)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .legend(legend)
        .tooltip(tooltip)
        .line_width(1)
        .fill_opacity(25 if stacked else 5)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .min(0)
    )
    if stacked:
        builder = builder.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
        # Two roles are two pools: each has a stack of its own.
        apart = value("custom.stacking", {"mode": "normal", "group": "B"})
        builder = builder.with_override(models.MatcherConfig(id_val="byRegexp", options="/^decode .*$/"), [apart])
    if len(panel.limits) > 1:
        style = common_models.GraphThresholdsStyleMode.LINE
        builder = builder.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
    return builder


def as_table(panel: Panel, transformations: list[models.DataTransformerConfig]) -> table.Panel:
    """Return a panel of rows."""
    return dress(table.Panel(), panel).transformations(transformations)


def organize(exclude: Sequence[str], order: Sequence[str], rename: dict[str, str] | None = None):
    """Return the transformation that leaves columns out, orders and renames them."""
    options = {
        "excludeByName": dict.fromkeys(exclude, True),
        "indexByName": {name: number for number, name in enumerate(order)},
        "renameByName": rename or {},
    }
    return models.DataTransformerConfig(id_val="organize", options=options)


def gpu_table() -> table.Panel:
    """Return one row for each GPU: the queries joined by its number, each query a column."""
    values = {f"Value #{chr(ord('A') + number)}": name for number, name in enumerate(GPU_COLUMNS)}
    times = [f"Time {number}" for number in range(1, len(GPU_COLUMNS) + 1)]
    return as_table(
        GPUS,
        [
            models.DataTransformerConfig(id_val="joinByField", options={"byField": "gpu", "mode": "outer"}),
            organize(["Time", *times], ["gpu", *values], values),
        ],
    )


def alert_table() -> table.Panel:
    """Return one row for each alert; labels that say nothing new are left out."""
    return as_table(
        ALERTS,
        [
            organize(
                ["Time", "Value", "__name__", "alertstate", "job"],
                [
                    "severity",
                    "alertname",
                    "role",
                    "instance",
                    "pool",
                    "kernel",
                    "gpu",
                    "unit",
                    "worker",
                    "path",
                    "metric",
                ],
            )
        ],
    )


def variable(name: str, label: str, matchers: str) -> dashboard.QueryVariable:
    """Return a variable of the values that a label has among the engines."""
    query = f"label_values(sglang:max_total_num_tokens{matchers and f'{{{matchers}}}'}, {name})"
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def build() -> models.Dashboard:
    """Return the dashboard; panel numbers follow the picture, the cache first and then what is wrong."""
    panels = [
        as_stat(CAPACITY),
        as_lines(USAGE).max(1),
        *(as_lines(panel, stacked=True) for panel in STACKED_PANELS),
        alert_table(),
        as_stat(READY, UP),
        as_stat(SMOKE, PASSED),
        as_stat(KERNELS, ACTIVE),
        as_lines(HIT_RATE).max(1),
        as_lines(LOSSES),
        as_lines(QUEUE),
        *(as_lines(panel) for panel in LATENCY_PANELS),
        as_lines(THROUGHPUT),
        as_lines(PD),
        gpu_table(),
    ]
    result = (
        dashboard.Dashboard("SGLang KV cache")
        .uid("sglang-kv-cache")
        .description("One host with SGLang: is it right, is it ready, how full is the cache, how long do clients wait.")
        .tags(["sglang"])
        .readonly()
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").regex(""))
        .with_variable(variable("job", "Job", ""))
        .with_variable(variable("instance", "Instance", 'job=~"$job"'))
        .with_variable(variable("role", "Role", 'job=~"$job",instance=~"$instance"'))
    )
    for number, panel in enumerate(panels, start=1):
        result = result.with_panel(panel.id(number))
    return result.build()


def generate() -> str:
    """Return canonical JSON: sorted keys, two spaces."""
    plain = json.loads(json.dumps(build(), cls=JSONEncoder))
    return json.dumps(plain, indent=2, sort_keys=True) + "\n"


def main() -> None:
    OUTPUT.write_text(generate())


if __name__ == "__main__":
    main()
