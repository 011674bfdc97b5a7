# SPDX-License-Identifier: GPL-3.0-or-later
"""What a benchmark measures, and what may be said about it: levels, judgement, comparison, tables.

Nothing here talks to anything. A level is one concurrency at one prompt length; its result is a row. A row is
  measured   the load generator and the engine's own counters agree, and nobody else was served
  contended  somebody else was served too, twice: the figures are shown and never compared
  failed     the figures can't be believed; why says so
  left_out   the service can't hold the level, or the time was over; why says so
"""

from __future__ import annotations

import glob
import json
import os
import typing as t
from dataclasses import asdict, dataclass

from .probe import Capacity, tokens_words

SCHEMA = 1
MEASURED, CONTENDED, FAILED, LEFT_OUT = "measured", "contended", "failed", "left_out"

# Length of the prompt of a level with context 0: a sentence. A prompt of no tokens does not exist.
SHORT_PROMPT_TOKENS = 32
# So many tokens of the context length, and of the KV pool, the engine gives to no request: it cuts the answer before
# (SGLang 0.5.23: max_req_len in srt/managers/tp_worker.py, less one in srt/managers/scheduler.py).
SPARE_TOKENS = 2
# Largest share by which the load generator and the engine may differ.
TOLERANCE = 0.01
# More of the prompts from the prefix cache means that they were not new, and TTFT is not that of a prefill. Two new
# prompts may still begin with the same few tokens.
MOST_CACHED = 0.05
SAME_START_TOKENS = 4
# The engine's counters, and the sums of the load generator that they must equal.
COUNTERS = ("requests", "prompt_tokens", "generation_tokens")
# Counters on /metrics that a measurement needs (see engine_load).
ENGINE_COUNTERS = {
    "requests": "num_requests_total",
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "cached_tokens": "cached_tokens_total",
    "aborted": "num_aborted_requests_total",
}


class BenchError(Exception):
    """The load generator's result can't be used; the text says why."""


# Levels


@dataclass(frozen=True)
class Level:
    """One step of the load: so many clients, each with one request at a time, with new prompts of one length.

    context is the prompt's length as asked for, 0 for a short one; output_tokens are generated whatever the model
    would have said; requests are sent in all.
    """

    concurrency: int
    context: int
    output_tokens: int
    requests: int

    @property
    def id(self) -> str:
        return f"c{self.concurrency}-ctx{self.context}"

    @property
    def prompt_tokens(self) -> int:
        return self.context or SHORT_PROMPT_TOKENS

    @property
    def tokens(self) -> int:
        """Tokens of one request, prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    def words(self) -> str:
        return f"C={self.concurrency}, context {tokens_words(self.context)}"


@dataclass(frozen=True)
class Protocol:
    """What is asked for. A level gets waves requests a client and at least least_requests, but fewer where they would
    be more than level_tokens tokens, and never fewer than one a client."""

    concurrency: tuple[int, ...]
    contexts: tuple[int, ...]
    output_tokens: int
    waves: int
    least_requests: int
    level_tokens: int

    def level(self, concurrency: int, context: int) -> Level:
        tokens = (context or SHORT_PROMPT_TOKENS) + self.output_tokens
        wanted = max(self.least_requests, self.waves * concurrency)
        return Level(
            concurrency, context, self.output_tokens, max(concurrency, min(wanted, self.level_tokens // tokens))
        )

    def levels(self) -> list[Level]:
        """All levels, the short prompts first."""
        return [self.level(c, context) for context in sorted(set(self.contexts)) for c in sorted(set(self.concurrency))]


def why_left_out(level: Level, capacity: Capacity) -> str:
    """Why the service can't hold a level, or an empty string. What the service did not say refuses nothing."""
    limit, running, pool = capacity.context_length, capacity.max_running_requests, capacity.max_total_num_tokens
    if limit and level.tokens > limit - SPARE_TOKENS:
        kept = f"{limit}, of which the engine keeps {SPARE_TOKENS}"
        return f"{level.prompt_tokens} + {level.output_tokens} tokens do not fit the context length {kept}"
    if running and level.concurrency > running:
        return f"the service runs {running} requests at once; more would wait, and waiting is not measured"
    if pool and (level.concurrency * level.tokens > pool or level.tokens > pool - SPARE_TOKENS):
        return f"{level.concurrency} x {level.tokens} tokens do not fit the KV pool of {pool} tokens"
    return ""


def row_of(level: Level, status: str, why: t.Sequence[str] = (), **more: t.Any) -> dict[str, t.Any]:
    return {
        "id": level.id,
        **asdict(level),
        "prompt_tokens": level.prompt_tokens,
        "status": status,
        "why": list(why),
        **more,
    }


# The load generator's result


@dataclass(frozen=True)
class Load:
    """What the load generator saw. Tokens are the server's own counts, request by request. duration is in seconds."""

    requests: int
    prompt_tokens: int
    generation_tokens: int
    duration: float
    figures: dict[str, t.Any]

    def sums(self) -> dict[str, float]:
        return {name: float(getattr(self, name)) for name in COUNTERS}


def parse_load(text: str, level: Level) -> Load:
    """Read the one line of JSON that the load generator wrote. Raises BenchError.

    Taken are the requests' own lists and what is computed from time alone. Not taken: total_input_tokens, which the
    client counts itself, and server_info, which holds the API key. A request that failed, was cut short or got no
    first token makes the result unusable: the generator ends with status 0 all the same.
    """
    result = _json_line(text)
    try:
        prompts, outputs, firsts, errors = (result[key] for key in ("input_lens", "output_lens", "ttfts", "errors"))
        if not len(prompts) == len(outputs) == len(firsts) == len(errors) == level.requests:
            raise BenchError(f"the load generator reports {len(outputs)} requests, {level.requests} were asked for")
        _refuse_bad_requests(level, outputs, firsts, errors)
        duration = float(result["duration"])
        if duration <= 0:
            raise BenchError(f"the load generator reports a duration of {duration} s")
        return Load(
            requests=len(outputs),
            prompt_tokens=sum(prompts),
            generation_tokens=sum(outputs),
            duration=duration,
            figures=_figures(result, sum(prompts), sum(outputs), duration),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"the load generator's result has another shape: {type(error).__name__}: {error}") from None


def _json_line(text: str) -> dict[str, t.Any]:
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1:
        raise BenchError(f"the load generator wrote {len(lines)} results, wanted one")
    try:
        result = json.loads(lines[0])
    except ValueError:
        raise BenchError(f"the load generator's result is cut: {len(lines[0])} characters that are no JSON") from None
    if not isinstance(result, dict):
        raise BenchError("the load generator's result is no JSON object")
    return result


def _refuse_bad_requests(level: Level, outputs: list[int], firsts: list[float], errors: list[str]) -> None:
    failed = [error for error in errors if error]
    if failed:
        raise BenchError(f"{len(failed)} of {level.requests} requests failed; the first: {failed[0][:300]}")
    short = [count for count in outputs if count != level.output_tokens]
    if short:
        raise BenchError(
            f"{len(short)} of {level.requests} answers have not {level.output_tokens} tokens; the first has {short[0]}"
        )
    silent = sum(first <= 0 for first in firsts)
    if silent:
        raise BenchError(f"{silent} of {level.requests} answers have no first token")


def _figures(result: dict[str, t.Any], prompt_tokens: int, output_tokens: int, duration: float) -> dict[str, t.Any]:
    """Rates over the whole measurement (prefill included), and the percentiles, in tokens/s and ms."""
    tpot = _percentiles(result, "tpot")
    return {
        "output_tok_s": round(output_tokens / duration, 2),
        "prompt_tok_s": round(prompt_tokens / duration, 2),
        "client_tok_s": round(1000 / tpot["p50"], 2) if tpot["p50"] else None,
        "ttft_ms": _percentiles(result, "ttft"),
        "tpot_ms": tpot,
        "duration_s": round(duration, 3),
        "concurrency_mean": round(float(result["concurrency"]), 2),
        "accept_length": result.get("accept_length"),
    }


def _percentiles(result: dict[str, t.Any], name: str) -> dict[str, float]:
    keys = {"p50": f"median_{name}_ms", "p95": f"p95_{name}_ms", "p99": f"p99_{name}_ms"}
    return {short: round(float(result[key]), 2) for short, key in keys.items()}


# Judgement


def judge(load: Load, before: t.Mapping[str, float], after: t.Mapping[str, float]) -> tuple[str, list[str]]:
    """Compare the load generator's sums with what the engine counted meanwhile; returns (status, why).

    The engine was idle at both ends, so every request of somebody else began and ended in between, and was counted.
    """
    engine = {name: after[name] - before[name] for name in ENGINE_COUNTERS}
    if any(value < 0 for value in engine.values()):
        return FAILED, ["the engine's counters went back: it was restarted meanwhile"]
    mine = load.sums()
    others = {name: engine[name] - mine[name] for name in COUNTERS}
    missing = [name for name in COUNTERS if others[name] < -TOLERANCE * mine[name]]
    if missing:
        return FAILED, [_disagreement(name, mine, engine) for name in missing]
    if others["requests"] >= 1 or engine["aborted"] >= 1:
        return CONTENDED, [_others_words(others, engine["aborted"])]
    excess = [name for name in COUNTERS if others[name] > TOLERANCE * mine[name]]
    if excess:
        return FAILED, [_disagreement(name, mine, engine) for name in excess]
    if engine["cached_tokens"] > MOST_CACHED * mine["prompt_tokens"] + SAME_START_TOKENS * mine["requests"]:
        share = engine["cached_tokens"] / mine["prompt_tokens"]
        return FAILED, [f"{share:.0%} of the prompts came from the prefix cache; they were meant to be new"]
    return MEASURED, []


def _disagreement(name: str, mine: t.Mapping[str, float], engine: t.Mapping[str, float]) -> str:
    words = name.replace("_", " ")
    return f"the load generator counted {mine[name]:.0f} {words}, the engine {engine[name]:.0f}"


def _others_words(others: t.Mapping[str, float], aborted: float) -> str:
    text = (
        f"the engine also served {others['requests']:.0f} requests of others with {others['prompt_tokens']:.0f} prompt "
        f"and {others['generation_tokens']:.0f} generated tokens"
    )
    return f"{text}, and {aborted:.0f} requests were aborted" if aborted else text


def row_words(row: t.Mapping[str, t.Any]) -> str:
    """One row in one line."""
    name = f"C={row['concurrency']}, context {tokens_words(row['context'])}"
    if "output_tok_s" not in row:
        return f"{name}: {row['status'].replace('_', ' ')}: {'; '.join(row['why'])}"
    text = (
        f"{name}: {row['output_tok_s']:g} tok/s, TTFT p50 {row['ttft_ms']['p50']:g} ms, "
        f"TPOT p50 {row['tpot_ms']['p50']:g} ms, {row['requests']} requests in {row['duration_s']:.1f} s"
    )
    text = text if row["status"] == MEASURED else f"{text}; {row['status'].upper()}: {'; '.join(row['why'])}"
    return f"{text}; {again_words(row)}" if again_words(row) else text


def again_words(row: t.Mapping[str, t.Any]) -> str:
    """Why a row is that of a second measurement; "" when it is that of the first."""
    why = row.get("contended_before", ())  # a result of an earlier version has none
    return f"measured again: the first time {'; '.join(why)}" if why else ""


# Comparison

# What two rows must have in common to be compared.
_SAME = ("id", "prompt_tokens", "output_tokens", "requests")


def measured_rows(result: t.Mapping[str, t.Any] | None) -> dict[tuple[t.Any, ...], t.Mapping[str, t.Any]]:
    """The measured rows of a result by what they must share to be compared."""
    rows = (result or {}).get("rows", ())
    return {tuple(row[key] for key in _SAME): row for row in rows if row["status"] == MEASURED}


def compare(
    result: t.Mapping[str, t.Any], previous: t.Mapping[str, t.Any] | None
) -> dict[str, dict[str, float | None]]:
    """Ratios new/old by id, of rows that were measured both times in the same way."""
    old = measured_rows(previous)
    return {
        row["id"]: {
            "output_tok_s": _ratio(row["output_tok_s"], old[key]["output_tok_s"]),
            "ttft_p50": _ratio(row["ttft_ms"]["p50"], old[key]["ttft_ms"]["p50"]),
            "tpot_p50": _ratio(row["tpot_ms"]["p50"], old[key]["tpot_ms"]["p50"]),
        }
        for key, row in measured_rows(result).items()
        if key in old
    }


def _ratio(new: float, old: float) -> float | None:
    return round(new / old, 3) if old else None


def context_length_curve(results: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """Speed of short prompts by clients over the configured context length, from the newest result of each length.

    results are in order of time, the newest last. Only those of the newest's model, packages and topology count, and
    only levels that were measured as in the newest. Empty when there is but one length.
    """
    newest = results[-1]
    short = {key: row for key, row in measured_rows(newest).items() if row["context"] == 0}
    points = {}
    for result in results:
        speeds = {
            str(row["concurrency"]): row["output_tok_s"] for key, row in measured_rows(result).items() if key in short
        }
        length = result["service"].get("context_length")
        if length and speeds and all(result[key] == newest[key] for key in ("model", "packages", "topology")):
            points[length] = {"context_length": length, "time": result["time"], "output_tok_s": speeds}
    return [point for _length, point in sorted(points.items())] if len(points) > 1 else []


# The result


def read_results(directory: str) -> list[dict[str, t.Any]]:
    """The results in a directory, the newest last. What is no result of this schema is passed over."""
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), "*.json"))):
        try:
            with open(path, encoding="utf-8") as handle:
                result = json.load(handle)
        except (OSError, ValueError):
            continue
        if isinstance(result, dict) and result.get("schema") == SCHEMA:
            found.append(result)
    return found


def build_result(
    head: t.Mapping[str, t.Any], rows: t.Sequence[dict[str, t.Any]], earlier: t.Sequence[t.Mapping[str, t.Any]]
) -> dict[str, t.Any]:
    """The result as plain data. head is what is the same for all rows; earlier are older results, the newest last.

    It is compared with the newest one of its model in which anything was measured.
    """
    same_model = [one for one in earlier if one["model"] == head["model"] and one[MEASURED]]
    previous = same_model[-1] if same_model else None
    result: dict[str, t.Any] = {"schema": SCHEMA, **head, "rows": list(rows)}
    for status in (MEASURED, CONTENDED, FAILED, LEFT_OUT):
        result[status] = [row["id"] for row in rows if row["status"] == status]
    result["ok"] = bool(result[MEASURED]) and not result[FAILED]
    result["previous"] = previous and {
        "time": previous["time"],
        "config_sha256": previous["config_sha256"],
        "same_config": previous["config_sha256"] == head["config_sha256"],
        "ratios": compare(result, previous),
    }
    result["context_length_curve"] = context_length_curve([*earlier, result])
    return result


def summary_text(result: t.Mapping[str, t.Any]) -> str:
    """One line."""
    text = f"{len(result[MEASURED])} of {len(result['rows'])} levels measured"
    for status in (CONTENDED, FAILED, LEFT_OUT):
        if result[status]:
            text += f", {status.replace('_', ' ')}: {', '.join(result[status])}"
    return text


_TITLES = (
    "C",
    "context",
    "requests",
    "output tok/s",
    "one client tok/s",
    "TTFT ms p50 / p95 / p99",
    "TPOT ms p50 / p95 / p99",
)


def markdown(result: t.Mapping[str, t.Any]) -> str:
    """The result as a page."""
    lines = [f"# Benchmark of {result['model']} on {result['host']['name']}", "", *_head_lines(result), ""]
    lines += _table(
        [*_TITLES, "power, clock, temperature", "against before"],
        [_cells(row, result) for row in result["rows"] if row["status"] != LEFT_OUT],
    )
    lines += ["", *_note_lines(result)]
    if result["context_length_curve"]:
        lines += [
            "",
            "## Short prompts over the configured context length",
            "",
            *_curve_lines(result["context_length_curve"]),
        ]
    return "\n".join(lines).rstrip() + "\n"


def _head_lines(result: t.Mapping[str, t.Any]) -> list[str]:
    host = result["host"]
    facts = {
        "time": result["time"],
        "configuration": result["config_sha256"] or "unknown",
        "topology": ", ".join(f"{name} {value}" for name, value in result["topology"].items()),
        "service": service_words(result["service"]),
        "packages": ", ".join(f"{name} {version}" for name, version in result["packages"].items()),
        "host": f"{host['cpu']}, {host['cores']} cores, load {host['load_before']:g} before",
        "GPU": host["gpus"] or "no GPU",
    }
    return _table(["", ""], [[name, str(value)] for name, value in facts.items()])


def service_words(service: t.Mapping[str, t.Any]) -> str:
    return (
        f"context length {service.get('context_length')}, {service.get('max_running_requests')} requests at once, "
        f"{service.get('max_total_num_tokens')} tokens of KV"
    )


def _cells(row: t.Mapping[str, t.Any], result: t.Mapping[str, t.Any]) -> list[str]:
    ids = [str(row["concurrency"]), tokens_words(row["context"]), str(row["requests"])]
    if "output_tok_s" not in row:
        return [*ids, row["status"], "", "", "", "", ""]
    mark = "" if row["status"] == MEASURED else f" ({row['status']})"
    return [
        *ids,
        f"{row['output_tok_s']:g}{mark}",
        _number(row["client_tok_s"]),
        " / ".join(f"{value:g}" for value in row["ttft_ms"].values()),
        " / ".join(f"{value:g}" for value in row["tpot_ms"].values()),
        gpu_words(row.get("gpu")),
        _ratio_words(row, result["previous"]) or "-",
    ]


def gpu_words(gpu: t.Mapping[str, float] | None) -> str:
    if not gpu:
        return "no GPU"
    if not gpu["samples"]:
        return f"not known: nvidia-smi gave no figures ({gpu['unread']} looks)"
    text = (
        f"{gpu['power_w_mean']:.0f} W mean, {gpu['power_w_max']:.0f} W most, {gpu['sm_mhz_min']:.0f} MHz least, "
        f"{gpu['temperature_c_max']:.0f} °C most"
    )
    unread = gpu.get("unread")  # a result of an earlier version has none
    return f"{text}, {unread} of {gpu['samples'] + unread} not said" if unread else text


def result_lines(result: t.Mapping[str, t.Any]) -> list[str]:
    """The result for a screen: a line for each level that was loaded, then what there is to say about them."""
    lines = []
    for row in result["rows"]:
        if row["status"] != LEFT_OUT:
            against = _ratio_words(row, result["previous"])
            lines.append(f"{row_words(row)}; against before: {against}" if against else row_words(row))
    return [*lines, *_about_lines(result), summary_text(result)]


def _ratio_words(row: t.Mapping[str, t.Any], previous: t.Mapping[str, t.Any] | None) -> str:
    ratios = (previous or {}).get("ratios", {}).get(row["id"])
    if not ratios:
        return ""
    words = {"tok/s": ratios["output_tok_s"], "TTFT": ratios["ttft_p50"], "TPOT": ratios["tpot_p50"]}
    return ", ".join(f"{name} x{ratio:.2f}" for name, ratio in words.items() if ratio is not None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _note_lines(result: t.Mapping[str, t.Any]) -> list[str]:
    notes = [
        f"{row['id']}: {row['status'].replace('_', ' ')}: {'; '.join(row['why'])}"
        for row in result["rows"]
        if row["why"]
    ]
    notes += [f"{row['id']}: {again_words(row)}" for row in result["rows"] if again_words(row)]
    return [f"- {note}" for note in [*notes, *_about_lines(result)]]


def _about_lines(result: t.Mapping[str, t.Any]) -> list[str]:
    """What is to be known when reading the figures."""
    lines = []
    previous = result["previous"]
    if previous:
        same = (
            "the same configuration"
            if previous["same_config"]
            else f"another configuration, {previous['config_sha256']}"
        )
        lines.append(f"before: {previous['time']}, {same}")
    if any(row["status"] == MEASURED and row["requests"] < 100 for row in result["rows"]):
        lines.append("p99 of fewer than 100 requests is next to the slowest one")
    return lines


def _curve_lines(curve: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    clients = sorted({int(c) for point in curve for c in point["output_tok_s"]})
    rows = [
        [str(point["context_length"]), *(f"{point['output_tok_s'].get(str(c), '-')}" for c in clients), point["time"]]
        for point in curve
    ]
    return _table(["context length", *(f"tok/s at C={c}" for c in clients), "measured"], rows)


def _table(titles: t.Sequence[str], rows: t.Sequence[t.Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]
