# SPDX-License-Identifier: GPL-3.0-or-later
"""What a benchmark says: which levels fit, what is believed, what is compared, and how it reads."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest
from gpu_samples import sample
from ops import bench
from ops.bench import BenchError, Level, Protocol, build_result, gpu_words, judge, parse_load, row_of, why_left_out
from ops.bench_run import gpu_samples, gpu_summary
from ops.bench_text import conversations, prose
from ops.engine_load import parse_counters
from ops.probe import Capacity

# One result as sglang.benchmark.rust_client 0.5.23 wrote it about the real engine: 8 requests at C=4, 16 tokens each.
# The report of the server in it is shortened, and its API key replaced.
SAMPLE = Path(__file__).with_name("bench_load.jsonl").read_text()
LEVEL = Level(concurrency=4, context=0, output_tokens=16, requests=8)


def altered(**changes: t.Any) -> str:
    return json.dumps({**json.loads(SAMPLE), **changes}) + "\n"


# Levels

PROTOCOL = Protocol((16, 1), (65536, 0), output_tokens=256, waves=4, least_requests=16, level_tokens=2_000_000)


def test_levels_come_short_prompts_first_and_each_once() -> None:
    levels = Protocol((4, 1, 4), (512, 0), 16, 2, 4, 10_000).levels()
    assert [level.id for level in levels] == ["c1-ctx0", "c4-ctx0", "c1-ctx512", "c4-ctx512"]


@pytest.mark.parametrize(
    ("concurrency", "context", "requests"),
    [
        (1, 0, 16),  # the least number of requests
        (16, 0, 64),  # so many a client
        (1, 65536, 16),
        (16, 65536, 30),  # 2,000,000 tokens hold no more
        (64, 65536, 64),  # but one a client, always
    ],
)
def test_a_level_has_enough_requests_but_not_too_many_tokens(concurrency: int, context: int, requests: int) -> None:
    assert PROTOCOL.level(concurrency, context).requests == requests


CAPACITY = Capacity(max_total_num_tokens=8192, context_length=4096, max_running_requests=8)


@pytest.mark.parametrize(
    ("level", "why"),
    [
        (Level(8, 0, 16, 16), ""),
        (Level(1, 4078, 16, 1), ""),
        (Level(1, 4079, 16, 1), "4079 + 16 tokens do not fit the context length 4096, of which the engine keeps 2"),
        (Level(9, 0, 16, 9), "the service runs 8 requests at once"),
        (Level(4, 2033, 16, 4), "4 x 2049 tokens do not fit the KV pool of 8192 tokens"),
    ],
)
def test_what_the_service_cannot_hold_is_left_out(level: Level, why: str) -> None:
    assert why_left_out(level, CAPACITY).startswith(why)
    assert bool(why_left_out(level, CAPACITY)) == bool(why)
    assert why_left_out(level, Capacity()) == ""


# The load generator's result


def test_its_own_lists_are_taken_and_its_guesses_are_not() -> None:
    sample = json.loads(SAMPLE)
    load = parse_load(altered(total_input_tokens=999_999, total_output_tokens=999_999, output_throughput=1e9), LEVEL)
    assert load.sums() == {
        "requests": 8,
        "prompt_tokens": sum(sample["input_lens"]),
        "generation_tokens": 8 * 16,
    }
    assert load.figures["output_tok_s"] == pytest.approx(8 * 16 / sample["duration"], abs=0.01)
    assert load.figures["ttft_ms"] == {
        "p50": pytest.approx(sample["median_ttft_ms"], abs=0.01),
        "p95": pytest.approx(sample["p95_ttft_ms"], abs=0.01),
        "p99": pytest.approx(sample["p99_ttft_ms"], abs=0.01),
    }
    assert load.figures["concurrency_mean"] == pytest.approx(sample["concurrency"], abs=0.01)
    assert load.figures["client_tok_s"] == pytest.approx(1000 / sample["median_tpot_ms"], abs=0.1)


def test_nothing_of_the_servers_report_is_kept() -> None:
    assert json.loads(SAMPLE)["server_info"]["api_key"] == "replaced-in-this-sample"
    assert "replaced-in-this-sample" not in json.dumps(parse_load(SAMPLE, LEVEL).figures)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "wrote 0 results"),
        (SAMPLE + SAMPLE, "wrote 2 results"),
        (SAMPLE[: len(SAMPLE) // 2], "is cut"),
        ("[]", "no JSON object"),
        (altered(ttfts=None), "another shape: TypeError"),
        ("{}", "another shape: KeyError: 'input_lens'"),
        (altered(median_ttft_ms=None), "another shape: TypeError"),
        (
            altered(errors=["", "", "stream read failed", "", "", "", "", ""]),
            "1 of 8 requests failed; the first: stream",
        ),
        (altered(output_lens=[16, 16, 16, 2, 16, 16, 16, 16]), "1 of 8 answers have not 16 tokens; the first has 2"),
        (altered(ttfts=[0.1] * 7 + [0.0]), "1 of 8 answers have no first token"),
        (altered(output_lens=[16] * 7), "reports 7 requests, 8 were asked for"),
        (altered(duration=0), "a duration of 0.0 s"),
    ],
)
def test_a_result_that_cannot_be_used_is_refused(text: str, why: str) -> None:
    with pytest.raises(BenchError, match=r"the load generator|of 8") as caught:
        parse_load(text, LEVEL)
    assert why in str(caught.value)


# Judgement

LOAD = parse_load(SAMPLE, LEVEL)
BEFORE = {
    "requests": 100.0,
    "prompt_tokens": 5000.0,
    "generation_tokens": 3000.0,
    "cached_tokens": 40.0,
    "aborted": 1.0,
}


def after(**more: float) -> dict[str, float]:
    """The counters after the load, and whatever else was counted."""
    mine = {**dict.fromkeys(BEFORE, 0.0), **LOAD.sums()}
    return {name: BEFORE[name] + mine[name] + more.get(name, 0.0) for name in BEFORE}


@pytest.mark.parametrize(
    ("more", "status", "why"),
    [
        ({}, bench.MEASURED, ""),
        ({"generation_tokens": 1}, bench.MEASURED, ""),
        ({"cached_tokens": 8 * 4}, bench.MEASURED, ""),
        ({"requests": 1, "prompt_tokens": 9, "generation_tokens": 40}, bench.CONTENDED, "served 1 requests of others"),
        ({"requests": 1}, bench.CONTENDED, "served 1 requests of others"),
        ({"aborted": 2}, bench.CONTENDED, "and 2 requests were aborted"),
        ({"generation_tokens": 2}, bench.FAILED, "the load generator counted 128 generation tokens, the engine 130"),
        ({"generation_tokens": -2}, bench.FAILED, "counted 128 generation tokens, the engine 126"),
        ({"prompt_tokens": -128}, bench.FAILED, "prompt tokens, the engine"),
        ({"requests": -1, "prompt_tokens": 500}, bench.FAILED, "counted 8 requests, the engine 7"),
        ({"requests": -200}, bench.FAILED, "it was restarted meanwhile"),
        ({"cached_tokens": 128}, bench.FAILED, "came from the prefix cache"),
    ],
)
def test_the_engine_has_the_last_word(more: dict[str, float], status: str, why: str) -> None:
    seen, reasons = judge(LOAD, BEFORE, after(**more))
    assert seen == status
    assert why in "; ".join(reasons)


def test_counters_are_read_by_name_and_summed_over_labels() -> None:
    page = (
        'sglang:num_requests_total{is_streaming="true",model_name="m"} 7.0\n'
        'sglang:num_requests_total{is_streaming="false",model_name="m"} 2.0\n'
        'sglang:cached_tokens_total{cache_source="device"} 12.0\n'
    )
    found = parse_counters(page, tuple(bench.ENGINE_COUNTERS.values()))
    assert (found["num_requests_total"], found["cached_tokens_total"], found["num_aborted_requests_total"]) == (
        9,
        12,
        0,
    )


# Prompts


def test_prompts_are_prose_and_each_is_new() -> None:
    level = Level(4, 128, 16, 50)
    first = [turns["conversations"][0]["value"] for turns in conversations(level, "run 1")]
    again = [turns["conversations"][0]["value"] for turns in conversations(level, "run 2")]
    assert {len(text) >= 4 * level.prompt_tokens for text in first} == {True}
    assert len({text[:8] for text in first + again}) == 100, (
        "the prefix cache would know a start that two prompts share"
    )
    assert first[0].split("\n", 1)[1] == again[0].split("\n", 1)[1], "two runs read the same text"
    words = prose().split()
    assert words.count("the") > 1000


def test_a_long_prompt_goes_on_at_the_start_of_the_text() -> None:
    text = conversations(Level(1, 65536, 16, 1), "run")[0]["conversations"][0]["value"]
    assert len(text) >= 65536 * 6


# GPUs


def test_gpu_samples_are_summed_up() -> None:
    samples = gpu_samples("71.20, 345, 31\n[N/A], 345, 31\n598.75, 2430, 77\nNo devices were found\n")
    assert samples == [(71.2, 345.0, 31.0), (598.75, 2430.0, 77.0)]
    assert gpu_summary(samples) == {
        "samples": 2,
        "unread": 0,
        "power_w_mean": 335.0,
        "power_w_max": 598.75,
        "sm_mhz_min": 345.0,
        "temperature_c_max": 77.0,
    }
    assert gpu_summary([], 3) == {"samples": 0, "unread": 3}


def test_what_a_real_gpu_said() -> None:
    """An H200 at rest, three times, and the answer to a question about a GPU that is not there."""
    samples = gpu_samples(sample("nvidia_smi_load.csv"))
    assert samples == [(125.54, 1980.0, 36.0), (125.53, 1980.0, 36.0), (126.72, 1980.0, 37.0)]
    assert gpu_words(gpu_summary(samples, 1)) == ("126 W mean, 127 W most, 1980 MHz least, 37 °C most, 1 of 4 not said")


@pytest.mark.parametrize("said", ["", sample("nvidia_smi_lost.txt"), "[N/A], [Not Supported], [Unknown Error]\n"])
def test_gpus_that_say_nothing_are_not_no_gpus(said: str) -> None:
    assert gpu_samples(said) == []
    assert gpu_words(gpu_summary([], 4)) == "not known: nvidia-smi gave no figures (4 looks)"


def test_what_a_gpu_did_not_say_stands_beside_the_others() -> None:
    whole = "412 W mean, 412 W most, 2377 MHz least, 61 °C most"
    assert gpu_words(gpu_summary([(412.5, 2377.0, 61.0)])) == whole
    assert gpu_words(gpu_summary([(412.5, 2377.0, 61.0)], 1)) == f"{whole}, 1 of 2 not said"
    assert gpu_words(None) == "no GPU"


# The result

HEAD: dict[str, t.Any] = {
    "time": "2026-11-30T03:50:12Z",
    "model": "smollm2-135m-instruct",
    "config_sha256": "a" * 64,
    "packages": {"sglang": "0.5.23"},
    "topology": {"tp": 1},
    "service": {"context_length": 8192, "max_running_requests": 8, "max_total_num_tokens": 8192},
    "host": {"name": "lab1", "cpu": "some CPU", "cores": 2, "load_before": 0.5, "gpus": ""},
}
MEASURED_ROW = row_of(LEVEL, bench.MEASURED, **LOAD.figures, gpu=None, elapsed_s=14.0)
LEFT_OUT_ROW = row_of(Level(16, 0, 16, 32), bench.LEFT_OUT, ["the service runs 8 requests at once"])


def faster(row: dict[str, t.Any], factor: float) -> dict[str, t.Any]:
    return {
        **row,
        "output_tok_s": row["output_tok_s"] * factor,
        "ttft_ms": {name: value / factor for name, value in row["ttft_ms"].items()},
        "tpot_ms": {name: value / factor for name, value in row["tpot_ms"].items()},
    }


def test_a_result_without_an_earlier_one() -> None:
    result = build_result(HEAD, [MEASURED_ROW, LEFT_OUT_ROW], [])
    assert (result["ok"], result["previous"], result["context_length_curve"]) == (True, None, [])
    assert bench.summary_text(result) == "1 of 2 levels measured, left out: c16-ctx0"


def test_a_result_is_compared_with_the_newest_earlier_one() -> None:
    old = build_result({**HEAD, "time": "2026-11-29T01:00:00Z"}, [MEASURED_ROW], [])
    older = build_result({**HEAD, "time": "2026-11-28T01:00:00Z"}, [faster(MEASURED_ROW, 9.0)], [])
    spoilt = build_result(HEAD, [{**MEASURED_ROW, "status": bench.CONTENDED}], [])
    result = build_result({**HEAD, "config_sha256": "b" * 64}, [faster(MEASURED_ROW, 2.0)], [older, old, spoilt])
    assert result["previous"]["time"] == "2026-11-29T01:00:00Z"
    assert result["previous"]["same_config"] is False
    ratios = result["previous"]["ratios"]["c4-ctx0"]
    assert ratios == {"output_tok_s": 2.0, "ttft_p50": 0.5, "tpot_p50": 0.5}
    page = bench.markdown(result)
    assert "tok/s x2.00, TTFT x0.50, TPOT x0.50" in page
    assert f"- before: 2026-11-29T01:00:00Z, another configuration, {'a' * 64}" in page
    first, *_about, last = bench.result_lines(result)
    assert first.endswith("; against before: tok/s x2.00, TTFT x0.50, TPOT x0.50")
    assert last == "1 of 1 levels measured"


@pytest.mark.parametrize(
    "row",
    [
        {**MEASURED_ROW, "status": bench.CONTENDED},
        {**MEASURED_ROW, "output_tokens": 256},
        {**MEASURED_ROW, "requests": 64},
    ],
    ids=["contended", "other answers", "other number of requests"],
)
def test_what_was_measured_otherwise_is_not_compared(row: dict[str, t.Any]) -> None:
    old = build_result(HEAD, [MEASURED_ROW], [])
    assert build_result(HEAD, [row], [old])["previous"]["ratios"] == {}
    backwards = build_result(HEAD, [MEASURED_ROW], [build_result(HEAD, [row], [])])["previous"]
    assert backwards is None or backwards["ratios"] == {}


def at(context_length: int, factor: float, **head: t.Any) -> dict[str, t.Any]:
    service = {**HEAD["service"], "context_length": context_length}
    return build_result({**HEAD, "service": service, **head}, [faster(MEASURED_ROW, factor)], [])


def test_results_at_several_context_lengths_give_a_curve() -> None:
    earlier = [at(8192, 1.0), at(524288, 0.25), at(524288, 0.5), at(4096, 9.0, packages={"sglang": "0.5.22"})]
    result = build_result(HEAD, [MEASURED_ROW], earlier)
    speed = MEASURED_ROW["output_tok_s"]
    assert [(point["context_length"], point["output_tok_s"]) for point in result["context_length_curve"]] == [
        (8192, {"4": speed}),
        (524288, {"4": pytest.approx(0.5 * speed)}),
    ]
    assert "| context length | tok/s at C=4 | measured |" in bench.markdown(result)


def test_a_curve_has_only_levels_that_were_measured_alike() -> None:
    long = build_result(HEAD, [{**MEASURED_ROW, "context": 512}], [])
    other = at(524288, 1.0)
    other["rows"][0]["output_tokens"] = 256
    assert build_result(HEAD, [MEASURED_ROW], [other])["context_length_curve"] == []
    assert build_result(HEAD, long["rows"], [at(524288, 1.0)])["context_length_curve"] == []


def test_another_model_is_not_compared() -> None:
    old = build_result({**HEAD, "model": "another"}, [MEASURED_ROW], [])
    assert build_result(HEAD, [MEASURED_ROW], [old])["previous"] is None


def test_an_answer_in_one_event_has_no_speed_of_its_own() -> None:
    """TPOT is 0 then, and nothing is divided by it."""
    load = parse_load(altered(median_tpot_ms=0.0), LEVEL)
    row = row_of(LEVEL, bench.MEASURED, **load.figures)
    page = bench.markdown(build_result(HEAD, [row], [build_result(HEAD, [row], [])]))
    assert "tok/s x1.00, TTFT x1.00 |" in page


def test_a_result_says_what_is_wrong_with_it() -> None:
    contended = row_of(LEVEL, bench.CONTENDED, ["the engine also served 3 requests of others"], **LOAD.figures)
    again = row_of(Level(1, 0, 16, 16), bench.MEASURED, contended_before=["2 requests were aborted"], **LOAD.figures)
    failed = row_of(Level(8, 0, 16, 16), bench.FAILED, ["1 of 16 requests failed"])
    result = build_result(HEAD, [contended, failed, again], [])
    assert result["ok"] is False
    page = bench.markdown(result)
    assert f"{LOAD.figures['output_tok_s']:g} (contended)" in page
    assert "- c4-ctx0: contended: the engine also served 3 requests of others" in page
    assert "- c8-ctx0: failed: 1 of 16 requests failed" in page
    assert "- c1-ctx0: measured again: the first time 2 requests were aborted" in page
    assert bench.row_words(contended).endswith("CONTENDED: the engine also served 3 requests of others")
    assert bench.row_words(failed) == "C=8, context 0: failed: 1 of 16 requests failed"


def test_a_result_of_which_nothing_was_measured_is_not_ok() -> None:
    assert build_result(HEAD, [LEFT_OUT_ROW], [])["ok"] is False


def test_every_table_row_has_a_cell_for_each_title() -> None:
    rows = [MEASURED_ROW, row_of(LEVEL, bench.FAILED, ["x"]), LEFT_OUT_ROW]
    table = [line for line in bench.markdown(build_result(HEAD, rows, [])).splitlines() if line.startswith("| ")]
    results = table[[line.startswith("| C |") for line in table].index(True) :]
    assert len(results) == 3, "what was left out is a note below"
    assert len({line.count("|") for line in results}) == 1
    assert "no GPU" in results[1]


def test_results_are_read_oldest_first_and_others_are_passed_over(tmp_path: Path) -> None:
    for name, text in {
        "2.json": json.dumps(at(8192, 1.0)),
        "1.json": json.dumps(at(4096, 1.0)),
        "3.json": "{",
        "4.json": "[]",
        "5.json": json.dumps({"schema": 0}),
        "6.md": "# x",
    }.items():
        (tmp_path / name).write_text(text)
    assert [result["service"]["context_length"] for result in bench.read_results(str(tmp_path))] == [4096, 8192]
    assert bench.read_results(str(tmp_path / "none")) == []
