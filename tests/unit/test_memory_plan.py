# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory plan by itself: history, figures, refusals, words, table, comparison, metrics."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops import memory_plan as mp
from ops import memory_plan_report as report
from ops.memory_plan_models import (
    BUILTIN_MODELS,
    PlanInputError,
    differing_facts,
    estimate_weights_gib,
    facts_from_config,
)

FLASH, PRO = BUILTIN_MODELS["DeepSeek-V4-Flash"], BUILTIN_MODELS["DeepSeek-V4-Pro"]
KERNELS = "dsv4_sm120"
SMOLLM_CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def card(**changes) -> mp.PlanInputs:
    """One 97,249 MiB card of a TP4 group at context 524,288."""
    base = mp.PlanInputs(FLASH, memory_free_mib=97_249, tp_size=4, context_length=524_288, mem_fraction_static=0.85)
    return replace(base, **changes)


def lab(**changes) -> mp.PlanInputs:
    """A small dense model on a CPU whose pool is capped at 8,192 tokens."""
    base = mp.PlanInputs(
        facts_from_config(SMOLLM_CONFIG, "SmolLM2-135M-Instruct"),
        memory_free_mib=16_384,
        context_length=8192,
        max_running_requests=8,
        cuda_graph_max_bs=0,
        chunked_prefill_size=2048,
        runtime_gib=0.0,
        max_total_tokens=8192,
    )
    return replace(base, **changes)


# The deployment before: TP4 with MTP on an SGLang of 0.5.14 or earlier, which priced the c128 state per SWA page and
# knew no page padding. Reported: 0.70 -> 1.63M tokens and 27.7 GB free, 0.85 -> 2.58M tokens and 13.2 GB free per GPU.
HISTORY = {0.70: (1_630_000, 27.7), 0.85: (2_580_000, 13.2)}
HISTORY_PRE_GIB = 94.2


def bytes_per_token_until_0514(model, swa_ratio: float = 0.1) -> float:
    row, state = 584, 4
    swa = (
        row * model.num_layers
        + 16 / 256 * 4 * (512 + 128) * state * model.layers_of(4)
        + 256 / 256 * 2 * 512 * state * model.layers_of(128)
    )
    full = row / 4 * model.layers_of(4) + row / 128 * model.layers_of(128) + 132 / 4 * model.layers_of(4)
    return (swa_ratio * swa + full) * (model.num_layers + 1) / model.num_layers


@pytest.mark.parametrize(("fraction", "residual"), [(0.70, 0.005), (0.85, 0.007)])
def test_history_reproduced_within_its_residual(fraction, residual):
    tokens, _ = HISTORY[fraction]
    resident = estimate_weights_gib(FLASH, 4, mtp=True) + mp.LOAD_OVERHEAD_GIB
    pool = HISTORY_PRE_GIB * fraction - resident
    planned = int(pool * mp.GIB / bytes_per_token_until_0514(FLASH)) // 256 * 256
    assert planned == pytest.approx(tokens, rel=residual)


@pytest.mark.parametrize("fraction", HISTORY)
def test_history_free_memory_is_the_slack_less_graphs(fraction):
    _, free = HISTORY[fraction]
    slack = HISTORY_PRE_GIB * (1 - fraction)
    # What is missing from the slack is what the captured graphs took: 0.6 to 0.9 GiB, below the plan's allowance.
    assert 0.5 < slack - free < mp.GRAPH_BASE_GIB


def test_history_slope_of_freed_memory_belongs_to_the_old_formula():
    slope = (27.7 - 13.2) * mp.GIB / (2_580_000 - 1_630_000)
    assert slope == pytest.approx(bytes_per_token_until_0514(FLASH), rel=0.01)
    assert slope > 2 * mp.v4_rates(card(speculative_num_draft_tokens=2)).per_full_token


def test_forecast_more_than_doubles_the_historical_capacity():
    plan = mp.plan_memory(card(max_running_requests=256, weights_gib=38.6))
    assert plan.resident_gib == pytest.approx(39.0)
    assert plan.max_total_num_tokens == pytest.approx(5.84e6, rel=0.002)
    assert plan.max_total_num_tokens > 2 * HISTORY[0.85][0]
    estimated = mp.plan_memory(card(max_running_requests=256))
    assert estimated.max_total_num_tokens == pytest.approx(plan.max_total_num_tokens, rel=0.035)
    assert estimated.max_total_num_tokens > 2 * HISTORY[0.85][0]


def test_compressed_cache_of_a_million_tokens_is_the_famous_3_8_gib():
    rates = mp.v4_rates(card())
    compressed = rates.c4_kv + rates.indexer_k + rates.c128_kv
    assert compressed == 3899.25
    assert compressed * 2**20 / mp.GIB == pytest.approx(3.81, abs=0.005)


@pytest.mark.parametrize(("draft_tokens", "rings", "whole"), [(0, 8, 7_086.75), (2, 16, 7_939.19)])
def test_parts_of_the_pools_add_up_to_a_token_of_context(draft_tokens, rings, whole):
    plan = mp.plan_memory(card(speculative_num_draft_tokens=draft_tokens))
    pools = {pool["name"]: pool for pool in report.plan_to_dict(plan)["pools"]}
    parts = {part["name"]: part for pool in pools.values() for part in pool["parts"]}
    assert list(parts) == ["c4", "c128", "indexer", "swa", "c4 state"]
    full, swa = pools["full"]["tokens"], pools["swa"]["tokens"]
    entries = {"c4": full // 4, "c128": full // 128, "indexer": full // 4, "swa": swa, "c4 state": swa // 256 * rings}
    assert {name: part["tokens"] for name, part in parts.items()} == entries
    assert sum(part["bytes_per_context_token"] for part in parts.values()) == pytest.approx(plan.bytes_per_token)
    assert plan.bytes_per_token == pytest.approx(whole, abs=0.005)
    for pool in (pools["full"], pools["swa"]):
        assert sum(part["bytes_per_token"] for part in pool["parts"]) == pytest.approx(pool["bytes_per_token"])
        assert sum(part["bytes"] for part in pool["parts"]) == pytest.approx(pool["bytes"], abs=len(pool["parts"]))


def test_summary_shows_every_part_with_its_entries():
    plan = mp.plan_memory(card())
    lines = {line[:22].strip(): line for line in report.summary_lines(plan)}
    names = ["pool full", "c4", "c128", "indexer", "pool swa", "swa", "c4 state", "pool c128 state"]
    assert [name for name in lines if name in names] == names
    full = plan.max_total_num_tokens
    assert f"{full // 4:,} entries, 3,071.25 B of each token" in lines["c4"]
    assert f"{full // 128:,} entries, 135.00 B of each token" in lines["c128"]
    assert f"{full // 4:,} entries, 693.00 B of each token" in lines["indexer"]
    assert "2,515.50 B of each token" in lines["swa"] and "672.00 B of each token" in lines["c4 state"]
    assert "7,086.75 B" in lines["a token of context"]
    assert len(report.summary_lines(mp.plan_memory(lab()))) == 9


def test_logits_are_megabytes_and_the_fallback_is_gigabytes():
    # "[64, 131072] fp32 = 33.5 GB" cost a deployment half of its decode batch; it is 33.5 MB.
    (logits,) = mp.indexer_tensors(card(context_length=524_284), 64, "decode", "tilelang")
    assert logits.shape == (64, 131_072)
    assert logits.bytes == 33_554_432
    fallback = {t.name: t for t in mp.indexer_tensors(card(context_length=1_048_576), 32, "decode", "torch")}
    assert fallback["indexer score x weight"].shape == (32, 262_208, 64)
    assert fallback["indexer score x weight"].bytes == 2_148_007_936
    assert fallback["indexer gathered pages"].shape == (32, 4097, 8448)
    assert sum(t.bytes for t in fallback.values()) > 6e9


def test_kernel_package_workspace_does_not_follow_the_context():
    sizes = {
        context: sum(t.bytes for t in mp.indexer_tensors(card(context_length=context), 4096, "prefill", "dsv4_sm120"))
        for context in (8192, 131_072, 1_048_576)
    }
    assert len(set(sizes.values())) == 1


def test_page_table_width_of_live_servers():
    # 524,288 gives 4,160 c128 indices and 1,048,576 gives 262,208 indexer positions on running servers.
    wide = next(t for t in mp.v4_tensors(card()) if t.name == "c128 indices")
    assert wide.shape[1] == 4160
    assert mp.context_pages(card(context_length=1_048_576)) * 64 == 262_208


@pytest.mark.parametrize(("slots", "size"), [(256, 149_760), (64, 37_440), (2, 1_728)])
def test_page_bytes(slots, size):
    assert mp.v4_page_bytes(slots) == size


def test_decode_side_keeps_slots_for_prompts_on_their_way():
    few, many = card(max_running_requests=32), card(max_running_requests=33)
    plan, side = mp.plan_memory(few), mp.plan_memory(replace(few, decode_side=True))
    assert (plan.pool("c128 state").tokens, side.pool("c128 state").tokens) == (32, 96)
    assert side.pool("c128 state").bytes - plan.pool("c128 state").bytes == 64 * 128 * 1024 * 4 * 20
    assert side.max_total_num_tokens < plan.max_total_num_tokens
    assert next(t for t in side.tensors if t.name == "req_to_token").shape[0] == 97
    assert (
        mp.plan_memory(replace(many, decode_side=True)).max_total_num_tokens
        == mp.plan_memory(many).max_total_num_tokens
    )
    said = replace(few, decode_side=True, decode_extra_slots=0)
    assert mp.plan_memory(said).max_total_num_tokens == plan.max_total_num_tokens
    # Without a pair the number says nothing.
    assert mp.plan_memory(replace(few, decode_extra_slots=9)).pools == plan.pools


def test_levers_have_a_gain_and_a_cost():
    found = {(lever.setting, lever.new): lever for lever in mp.levers(mp.plan_memory(card(max_running_requests=256)))}
    assert found[("max_running_requests", 128)].tokens_gain > 150_000
    assert found[("swa_full_tokens_ratio", 0.05)].tokens_gain > 1_000_000
    assert found[("swa_full_tokens_ratio", 0.05)].sessions_gain < 0
    assert found[("compress_state_dtype", "bfloat16")].tokens_gain > 300_000
    assert found[("chunked_prefill_size", 2048)].sessions_gain < 0 < found[("chunked_prefill_size", 2048)].free_gain_gib
    assert all(lever.cost for lever in found.values())


def test_lever_gains_are_what_a_new_plan_says():
    plan = mp.plan_memory(card(indexer_backend="torch", speculative_num_draft_tokens=2))
    for lever in mp.levers(plan):
        changed = mp.plan_memory(replace(plan.inputs, **{lever.setting: lever.new}))
        assert changed.max_total_num_tokens - plan.max_total_num_tokens == lever.tokens_gain


@pytest.mark.parametrize(
    ("changes", "finding", "named"),
    [
        (
            {"mem_fraction_static": 0.30},
            "weights_exceed_budget",
            ("0.3", "94.2 GiB", "mem_fraction_static above 0.428"),
        ),
        ({"model": PRO}, "weights_exceed_budget", ("no fraction helps", "tp_size 4")),
        ({"max_running_requests": 20_000}, "state_exceeds_budget", ("20000 request slots", "max_running_requests")),
        ({"swa_full_tokens_ratio": 0.00002}, "swa_pool_below_floor", ("384", "2e-05", "swa_full_tokens_ratio")),
        (
            {"mem_fraction_static": 0.43, "max_running_requests": 1},
            "context_exceeds_pool",
            ("524,288", "bytes per token"),
        ),
        ({"max_total_tokens": 262_144}, "context_exceeds_pool", ("max_total_tokens is 262,144", "524,288")),
        (
            {"indexer_backend": "torch"},
            "no_memory_for_near_limit_prompt",
            ("[1024, 131136, 128]", "32.0 GiB", "chunked_prefill_size 4,096", "leave indexer_backend torch"),
        ),
    ],
)
def test_refusals_name_the_numbers_that_clash(changes, finding, named):
    plan = mp.plan_memory(card(**changes))
    assert [refusal.id for refusal in plan.refusals] == [finding]
    for text in named:
        assert text in plan.refusals[0].reason
    assert plan.refusals[0].numbers
    assert report.verdict(plan)[0].startswith(f"Refused ({finding})")


def test_minimum_fraction_named_by_a_refusal_is_enough_for_the_weights():
    refused = mp.plan_memory(card(mem_fraction_static=0.30))
    minimum = refused.refusals[0].numbers["minimum_mem_fraction_static"]
    assert mp.plan_memory(card(mem_fraction_static=minimum)).budget_bytes > 0
    assert mp.plan_memory(card(mem_fraction_static=minimum - 0.001)).budget_bytes == 0


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"mem_fraction_static": 1.2}, "mem_fraction_static"),
        ({"context_length": 2_000_000}, "context_length"),
        ({"context_length": 0}, "context_length"),
        ({"memory_free_mib": 0}, "memory_free_mib"),
        ({"tp_size": 3}, "tp_size"),
        ({"tp_size": 16}, "tp_size"),
        ({"max_running_requests": 0}, "max_running_requests"),
        ({"cuda_graph_max_bs": -1}, "cuda_graph_max_bs"),
        ({"decode_extra_slots": -1}, "decode_extra_slots"),
        ({"chunked_prefill_size": 1000}, "chunked_prefill_size"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"swa_full_tokens_ratio": 0}, "swa_full_tokens_ratio"),
        ({"compress_state_dtype": "float16"}, "compress_state_dtype"),
        ({"indexer_backend": "cuda"}, "indexer_backend"),
        ({"speculative_num_draft_tokens": 11}, "speculative_num_draft_tokens"),
        ({"max_total_tokens": 0}, "max_total_tokens"),
        ({"headroom_gib": -1}, "headroom_gib"),
        ({"session_tokens": 0}, "session_tokens"),
    ],
)
def test_wrong_input_is_named_with_what_is_accepted(changes, variable):
    with pytest.raises(PlanInputError) as caught:
        mp.plan_memory(card(**changes))
    assert caught.value.variable == variable
    assert str(next(iter(changes.values()))) in str(caught.value)
    assert "accepted" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"mem_fraction_static": 0.95}, "thin_headroom"),
        ({"cuda_graph_max_bs": 32}, "graphs_below_running_requests"),
        (
            {"swa_full_tokens_ratio": 0.0005, "max_running_requests": 2, "cuda_graph_max_bs": 2},
            "swa_pool_below_two_chunks",
        ),
        ({"swa_full_tokens_ratio": 0.005}, "swa_pool_below_running_requests"),
    ],
)
def test_warnings(changes, warning):
    plan = mp.plan_memory(card(**changes))
    assert plan.fits
    assert warning in [finding.id for finding in plan.warnings]


def test_a_good_plan_has_neither_refusal_nor_warning():
    plan = mp.plan_memory(card())
    assert (plan.refusals, plan.warnings, plan.keeps_headroom) == ((), (), True)


@settings(max_examples=100, deadline=None)
@given(
    fraction=st.floats(0.46, 0.97),
    step=st.floats(0.001, 0.02),
    context=st.integers(1024, 1_000_000),
    chunk=st.sampled_from([1024, 4096, 8192]),
    backend=st.sampled_from(mp.INDEXER_BACKENDS),
)
def test_more_fraction_gives_more_tokens_and_less_free_memory(fraction, step, context, chunk, backend):
    inputs = card(
        mem_fraction_static=fraction, context_length=context, chunked_prefill_size=chunk, indexer_backend=backend
    )
    plan, larger = mp.plan_memory(inputs), mp.plan_memory(replace(inputs, mem_fraction_static=fraction + step))
    assert larger.max_total_num_tokens >= plan.max_total_num_tokens
    assert larger.free_left_gib <= plan.free_left_gib
    spent = sum(pool.bytes for pool in plan.pools)
    # Both pools are rounded down to whole pages.
    page_bytes = mp.V4_PAGE * (plan.bytes_per_token + plan.pool("swa").bytes_per_token)
    assert spent <= plan.budget_bytes < spent + page_bytes
    assert plan.full_context_requests * context <= plan.max_total_num_tokens or plan.full_context_requests == 0


def test_capacity_in_words_of_the_lab():
    plan = mp.plan_memory(lab())
    assert plan.max_total_num_tokens == 8192
    assert plan.bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert report.capacity_in_words(plan) == "one 8k request, or 8 of 512 tokens (max_running_requests; 16 would fit)"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (lab(context_length=2048), "4 2k requests, or 8 of 512 tokens (max_running_requests; 16 would fit)"),
        (lab(max_total_tokens=4096), "no 8k request, or 8 of 512 tokens"),
        (
            lab(kv_cache_dtype="bfloat16", context_length=4096),
            "2 4k requests, or 8 of 512 tokens (max_running_requests; 16 would fit)",
        ),
    ],
)
def test_capacity_in_words(inputs, words):
    assert report.capacity_in_words(mp.plan_memory(inputs)) == words


def test_verdict_says_what_limits():
    text = " ".join(report.verdict(mp.plan_memory(card())))
    assert "full-context requests of 512k tokens at once (limit: KV pool)" in text
    assert "returning sessions of 64k tokens stay warm" in text
    assert "limit: SWA pool" in text
    assert "GiB per GPU stay free at the end of a prompt of 512k tokens" in text


def test_table_marks_the_largest_fraction_that_keeps_the_headroom():
    fractions, contexts = [0.6, 0.7, 0.8, 0.85, 0.9, 0.95], [8192, 131_072, 524_288, 1_048_576]
    table = report.plan_table(card(), fractions, contexts)
    keeping = [f for f in fractions if mp.plan_memory(card(mem_fraction_static=f)).keeps_headroom]
    assert table.recommended == max(keeping)
    lines = report.table_lines(table)
    (marked,) = [line for line in lines if line.startswith("> 0.")]
    assert marked.split()[1] == f"{max(keeping):g}"
    assert all(line == line.rstrip() and len(line) <= 120 for line in lines)
    assert {"8k", "128k", "[512k]", "1M"} <= set(lines[0].split())


def test_table_says_so_when_no_fraction_is_good_enough():
    table = report.plan_table(card(indexer_backend="torch"), [0.6, 0.9], [8192])
    assert table.recommended is None
    assert "none of these fractions" in report.table_lines(table)[-1]


def test_table_leaves_out_contexts_the_model_does_not_have():
    assert report.plan_table(lab(), [0.8], [8192, 131_072]).contexts == (8192,)


def test_tensor_lines_give_every_tensor_of_every_backend_for_decode_and_prefill():
    # 524,284 gives the famous width of 131,072; the figure was once read as 33.5 GB.
    lines = report.tensor_lines(card(context_length=524_284, cuda_graph_max_bs=64, chunked_prefill_size=4096))
    heads = [(line.split()[0], line.split()[3]) for line in lines if not line.startswith(" ")]
    assert heads == [(phase, backend) for phase in ("decode", "prefill") for backend in ("torch", "tilelang", KERNELS)]
    assert len(lines) == len(heads) + (6 + 1 + 1) + (7 + 1 + 1)
    said = "\n".join(lines)
    for tensor in (
        "logits [64 x 131,072] fp32 = 32.0 MiB (33.55 MB)",
        "queries [64 x 64 x 128] bf16 = 1.0 MiB (1.05 MB)",
        "gathered pages [64 x 2,048 x 8,448] uint8 = 1.0 GiB (1,107.30 MB)",
        "values [64 x 131,072 x 128] bf16 = 2.0 GiB (2,147.48 MB)",
        "scale [64 x 131,072] fp32 = 32.0 MiB (33.55 MB)",
        "score [64 x 131,072 x 64] bf16 = 1.0 GiB (1,073.74 MB)",
        "score x weight [64 x 131,072 x 64] fp32 = 2.0 GiB (2,147.48 MB)",
        "workspace [69,731,584] uint8 = 66.5 MiB (69.73 MB)",
        "gathered pages [1,024 x 2,048 x 8,448] uint8",
        "score x weight [1,024 x 131,072 x 64] fp32 = 32.0 GiB",
        "logits of earlier steps [3,072 x 131,072] fp32 = 1.5 GiB",
        "logits [4,096 x 131,072] fp32 = 2.0 GiB",
        "workspace [37,752,832] uint8 = 36.0 MiB (37.75 MB)",
    ):
        assert f"indexer {tensor}" in said


def test_tensor_lines_of_the_fallback_at_the_longest_context():
    said = "\n".join(report.tensor_lines(card(context_length=1_048_576, cuda_graph_max_bs=32)))
    assert "indexer score x weight [32 x 262,208 x 64] fp32 = 2.0 GiB (2,148.01 MB)" in said
    assert "indexer gathered pages [32 x 4,097 x 8,448] uint8 = 1.0 GiB (1,107.57 MB)" in said


def test_report_ends_with_the_largest_tensors_of_the_plan():
    for inputs in (card(), card(indexer_backend="torch", context_length=8192), lab()):
        plan = mp.plan_memory(inputs)
        head, *lines = report.report(plan).rpartition("\n\n")[2].splitlines()
        assert head == "largest tensors outside the budget" and len(lines) == 3
        sizes = sorted((tensor.bytes for tensor in plan.tensors), reverse=True)[:3]
        assert [mp.format_bytes(size) in line for size, line in zip(sizes, lines, strict=True)] == [True] * 3
    assert "prefill   hyper-connection streams [2 x 4,096 x 4 x 4,096] bf16 = 256 MiB" in report.report(
        mp.plan_memory(card())
    )


def test_comparison_within_tolerance_is_quiet():
    plan = mp.plan_memory(card())
    reported = {
        "max_total_num_tokens": plan.max_total_num_tokens * 1.029,
        "context_len": 524_288,
        "max_running_requests": 64,
    }
    drifts = report.compare_with_server(plan, reported)
    assert all(drift.ok for drift in drifts)
    assert report.drift_warnings(drifts) == ()


def test_comparison_off_by_more_than_3_percent_names_both_numbers():
    plan = mp.plan_memory(card())
    actual = int(plan.max_total_num_tokens * 0.96)
    warnings = report.drift_warnings(
        report.compare_with_server(plan, {"max_total_num_tokens": actual, "max_total_num_tokens_swa": None})
    )
    assert len(warnings) == 1
    assert f"planned {plan.max_total_num_tokens:,}" in warnings[0] and f"reports {actual:,}" in warnings[0]
    assert "-4.0%" in warnings[0]


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_comparison_has_the_windows_pool_and_the_weights_of_the_model_itself(draft_tokens):
    plan = mp.plan_memory(card(speculative_num_draft_tokens=draft_tokens))
    model = estimate_weights_gib(FLASH, 4)
    reported = {"max_total_num_tokens_swa": plan.swa_tokens, "weight_memory_usage_gb": model}
    drifts = {drift.quantity: drift for drift in report.compare_with_server(plan, reported)}
    assert list(drifts) == list(reported) and all(drift.ok for drift in drifts.values())
    assert drifts["weight_memory_usage_gb"].planned == model == pytest.approx(39.83, abs=0.005)
    reported = {"max_total_num_tokens_swa": plan.swa_tokens * 0.96, "weight_memory_usage_gb": 41.5}
    window, weights = report.drift_warnings(report.compare_with_server(plan, reported))
    assert "max_total_num_tokens_swa: planned" in window and "(-4.0%)" in window
    assert "weight_memory_usage_gb: planned 39.83, the server reports 41.50 (+4.2%)" in weights
    given = mp.plan_memory(card(weights_gib=38.6))
    (drift,) = report.compare_with_server(given, {"weight_memory_usage_gb": 38.6})
    assert drift.planned == 38.6


def test_comparison_of_context_allows_no_difference():
    (drift,) = report.compare_with_server(mp.plan_memory(card()), {"context_len": 524_287})
    assert not drift.ok


def test_comparison_needs_something_to_compare():
    with pytest.raises(PlanInputError, match="max_total_num_tokens"):
        report.compare_with_server(mp.plan_memory(card()), {"uptime": 3})


def test_metrics_hold_plan_and_actual_and_escape_labels():
    plan = mp.plan_memory(card())
    drifts = report.compare_with_server(plan, {"max_total_num_tokens": 1000})
    text = report.metrics_text(plan, drifts, {"unit": 'a"b\\c'})
    assert f'ops_memory_plan_pool_tokens{{unit="a\\"b\\\\c",pool="full"}} {plan.max_total_num_tokens}' in text
    assert 'ops_memory_plan_actual{unit="a\\"b\\\\c",quantity="max_total_num_tokens"} 1000' in text
    assert 'ops_memory_plan_drift{unit="a\\"b\\\\c",quantity="max_total_num_tokens"} 1' in text
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)) and text.endswith("\n")
    assert "ops_memory_plan_actual" not in report.metrics_text(plan)


def test_facts_from_config_equal_the_built_in_ones():
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "compress_ratios": [*FLASH.compress_ratios, 0],
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "quantization_config": {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"},
        **{
            key: getattr(FLASH, key)
            for key in (
                "hidden_size",
                "num_attention_heads",
                "q_lora_rank",
                "o_lora_rank",
                "o_groups",
                "n_routed_experts",
                "moe_intermediate_size",
                "index_topk",
                "max_position_embeddings",
                "vocab_size",
            )
        },
    }
    assert facts_from_config(config, FLASH.name) == replace(FLASH, source="config.json")
    assert (
        facts_from_config({**config, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}).expert_format
        == "fp8"
    )


def test_a_checkpoint_of_the_plans_facts_does_not_differ():
    assert differing_facts(facts_from_config(SMOLLM_CONFIG, "a"), {**SMOLLM_CONFIG, "head_dim": 64}) == ()


def test_what_a_checkpoint_says_otherwise():
    planned = facts_from_config(SMOLLM_CONFIG, "a")
    config = {**SMOLLM_CONFIG, "num_hidden_layers": 32, "torch_dtype": "bfloat16", "architectures": ["X"]}
    assert differing_facts(planned, config) == (("num_layers", 30, 32), ("dtype", "float32", "bfloat16"))
    ((fact, name, kind),) = differing_facts(FLASH, SMOLLM_CONFIG)
    assert (fact, name, kind) == ("model_type", "DeepSeek-V4-Flash", "llama")
    ((fact, name, error),) = differing_facts(FLASH, {"model_type": "deepseek_v4"})
    assert (fact, name) == ("config.json", "DeepSeek-V4-Flash") and "no num_hidden_layers" in error


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4]},
        {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 7]},
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        {"model_type": "llama", "num_attention_heads": 9},
    ],
)
def test_config_that_is_no_model_of_ours_is_refused(config):
    with pytest.raises(PlanInputError, match=r"config\.json"):
        facts_from_config(config)


def test_plan_is_plain_data():
    data = report.plan_to_dict(mp.plan_memory(card()))
    assert json.loads(json.dumps(data)) == data
    assert data["fits"] is True and data["levers"] and data["verdict"]
