# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory plan against the installed engine: SGLang's own pool configurator, prefix cache and indexer fallback.

An engine upgrade that changes any of them fails here. The engine runs in its own process, found through ENGINE_PYTHON.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops import memory_plan as mp
from ops.memory_plan_models import BUILTIN_MODELS, DenseFacts, weight_groups

HELPER = Path(__file__).with_name("memory_plan_engine.py")
FLASH, PRO = BUILTIN_MODELS["DeepSeek-V4-Flash"], BUILTIN_MODELS["DeepSeek-V4-Pro"]
SMOLLM = DenseFacts(
    name="SmolLM2-135M-Instruct",
    source="config.json",
    hidden_size=576,
    num_attention_heads=9,
    vocab_size=49_152,
    max_position_embeddings=8192,
    num_layers=30,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    tie_word_embeddings=True,
    dtype="float32",
)


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(HELPER)


def inputs_for(model, **changes) -> mp.PlanInputs:
    base = mp.PlanInputs(model, memory_free_mib=97_249, tp_size=8, context_length=524_288)
    return replace(base, **changes)


def test_engine_is_the_version_the_plan_is_written_for(engine):
    assert engine.ask("version") == "0.5.23"


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from([FLASH, PRO]),
    draft_tokens=st.sampled_from([0, 2, 4, 10]),
    max_running=st.integers(1, 2048),
    swa_ratio=st.one_of(st.sampled_from([0.02, 0.03, 0.1, 0.8, 1.0]), st.floats(0.005, 1.0)),
    context=st.sampled_from([8192, 131_072, 524_288, 1_048_576]),
    state_dtype=st.sampled_from(mp.COMPRESS_STATE_DTYPES),
    budget=st.integers(1 << 28, 120 << 30),
    extra_slots=st.sampled_from([None, None, 0, 7, 64]),
)
def test_v4_pools_are_equal_to_the_token(
    engine, model, draft_tokens, max_running, swa_ratio, context, state_dtype, budget, extra_slots
):
    inputs = inputs_for(
        model,
        context_length=context,
        speculative_num_draft_tokens=draft_tokens,
        max_running_requests=max_running,
        swa_full_tokens_ratio=swa_ratio,
        compress_state_dtype=state_dtype,
        decode_side=extra_slots is not None,
        decode_extra_slots=extra_slots,
    )
    theirs = engine.ask(
        "v4_pools",
        facts=asdict(model),
        budget=budget,
        context=context,
        draft_tokens=draft_tokens,
        max_running=max_running,
        swa_ratio=swa_ratio,
        state_dtype=state_dtype,
        extra_slots=extra_slots,
    )
    full, swa = mp.v4_pool_tokens(inputs, budget)
    if "refused" in theirs:
        # SGLang refuses an empty pool and an SWA pool at or below window + page; so does the plan.
        assert full == 0 or swa <= model.sliding_window + mp.V4_PAGE, theirs["refused"]
        return
    rates = mp.v4_rates(inputs)
    assert (full, swa) == (theirs["full"], theirs["swa"])
    assert rates.per_full_token == theirs["per_full_token"]
    assert rates.per_swa_token == theirs["per_swa_token"]
    assert rates.c128_state == theirs["c128_state"]
    parts = {part.name: part.tokens for pool in mp.v4_pools(inputs, budget) for part in pool.parts}
    assert {name: parts[name] for name in ("c4", "c128", "c4 state")} == {
        name: theirs[name] for name in ("c4", "c128", "c4 state")
    }


@settings(max_examples=40, deadline=None)
@given(
    tp_size=st.sampled_from([1, 3, 9]),
    dtype=st.sampled_from(["fp8_e4m3", "bfloat16", "float32"]),
    page_size=st.sampled_from([1, 16, 64]),
    budget=st.integers(64 << 20, 8 << 30),
)
def test_dense_pool_is_equal_to_the_token(engine, tp_size, dtype, page_size, budget):
    inputs = mp.PlanInputs(
        SMOLLM, memory_free_mib=16_384, tp_size=tp_size, kv_cache_dtype=dtype, page_size=page_size, cuda_graph_max_bs=0
    )
    theirs = engine.ask(
        "dense_pools",
        facts=asdict(SMOLLM),
        budget=budget,
        tp_size=tp_size,
        kv_bytes={"fp8_e4m3": 1, "bfloat16": 2, "float32": 4}[dtype],
        page_size=page_size,
    )
    assert budget // mp.dense_bytes_per_token(inputs) // page_size * page_size == theirs


@pytest.mark.parametrize("draft_tokens", [0, 2, 4, 10])
@pytest.mark.parametrize(("max_running", "chunk"), [(1, 256), (64, 4096), (256, 8192)])
def test_swa_need_of_running_requests_and_row_length(engine, draft_tokens, max_running, chunk):
    inputs = inputs_for(
        FLASH,
        speculative_num_draft_tokens=draft_tokens,
        max_running_requests=max_running,
        chunked_prefill_size=chunk,
    )
    theirs = engine.ask("swa_request_cap", draft_tokens=draft_tokens, max_running=max_running, chunk=chunk)
    assert mp.swa_in_flight(inputs, max_running) == theirs["cap"]
    assert mp.row_length(inputs) - inputs.context_length == theirs["extra_context"]


@pytest.mark.parametrize("draft_tokens", [0, 2])
@pytest.mark.parametrize("max_running", [1, 31, 32, 33, 64])
def test_slots_and_swa_need_of_a_decode_side(engine, draft_tokens, max_running):
    inputs = inputs_for(
        FLASH, speculative_num_draft_tokens=draft_tokens, max_running_requests=max_running, decode_side=True
    )
    slots = engine.ask("decode_extra_slots", max_running=max_running)
    assert inputs.extra_slots == slots
    theirs = engine.ask(
        "swa_request_cap", draft_tokens=draft_tokens, max_running=max_running, chunk=4096, extra_slots=slots
    )
    assert mp.swa_in_flight(inputs, max_running) == theirs["cap"]


@pytest.mark.parametrize(("rows", "context"), [(2, 508), (3, 1276), (7, 16_000), (1024, 252), (2048, 508)])
def test_torch_indexer_fallback_peaks_where_the_plan_says(engine, rows, context):
    inputs = inputs_for(FLASH, context_length=context)
    tensors = mp.indexer_tensors(inputs, rows, "decode", "torch")
    theirs = engine.ask("indexer_fallback", rows=rows, pages=mp.context_pages(inputs))
    assert sum(tensor.bytes for tensor in tensors) == theirs["peak"]
    assert max(tensor.bytes for tensor in tensors) == theirs["largest"]
    (logits,) = mp.indexer_tensors(inputs, rows, "decode", "tilelang")
    assert list(logits.shape) == theirs["logits"]


@pytest.mark.parametrize("topk", [512, 1024])
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 32, 33, 64, 65, 512, 513, 1024, 1025, 8192])
def test_our_indexer_needs_what_the_plan_says(engine, rows, topk):
    assert mp.dsv4_sm120_workspace(rows, topk) == engine.ask("indexer_workspace", rows=rows, topk=topk)


def _v4_config(model) -> dict:
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": model.num_layers,
        "compress_ratios": list(model.compress_ratios),
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "o_lora_rank": model.o_lora_rank,
        "o_groups": model.o_groups,
        "n_routed_experts": model.n_routed_experts,
        "moe_intermediate_size": model.moe_intermediate_size,
        "index_topk": model.index_topk,
    }


@pytest.mark.parametrize("model", [FLASH, PRO], ids=lambda model: model.name)
def test_weight_inventory_counts_every_parameter(engine, model):
    theirs = engine.ask("parameters", config=_v4_config(model))
    assert sum(group.parameters for group in weight_groups(model)) == theirs


def test_dense_weight_inventory_counts_every_parameter(engine):
    config = {
        "model_type": "llama",
        "vocab_size": SMOLLM.vocab_size,
        "hidden_size": SMOLLM.hidden_size,
        "intermediate_size": SMOLLM.intermediate_size,
        "num_hidden_layers": SMOLLM.num_layers,
        "num_attention_heads": SMOLLM.num_attention_heads,
        "num_key_value_heads": SMOLLM.num_key_value_heads,
        "tie_word_embeddings": True,
    }
    assert sum(group.parameters for group in weight_groups(SMOLLM)) == engine.ask("parameters", config=config)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 6000),
    answer=st.sampled_from([1, 40, 130, 255, 256, 257, 400, 700, 1500]),
    chunk=st.sampled_from([512, 1024, 2048]),
)
@example(prompt=511, answer=257, chunk=1024)
def test_a_session_leaves_no_more_swa_than_the_plan_charges(engine, prompt, answer, chunk):
    inputs = inputs_for(FLASH, chunked_prefill_size=chunk)
    left = engine.ask("sessions", count=1, tokens=prompt + answer, answer=answer, swa=40_960, chunk=chunk)["swa_left"]
    # An answer adds one boundary, its end; by the prompt alone the charge is this tight.
    assert mp.swa_per_session(inputs, prompt) - 2 * mp.V4_PAGE <= left <= mp.swa_per_session(inputs, prompt, answer)


@pytest.mark.parametrize(("tokens", "chunk"), [(20_000, 4096), (20_000, 2048), (2_000, 2048)])
def test_planned_sessions_return_warm_and_a_pool_full_does_not(engine, tokens, chunk):
    inputs = inputs_for(FLASH, chunked_prefill_size=chunk, session_tokens=tokens, max_running_requests=1)
    swa = 40_960
    per_session = mp.swa_per_session(inputs, tokens)
    planned = (swa - mp.swa_in_flight(inputs, 1)) // per_session
    assert planned >= 1
    question = {"tokens": tokens, "answer": 40, "swa": swa, "chunk": chunk}
    assert engine.ask("sessions", count=planned, **question)["warm"] == planned
    # A session ends on a page boundary with as little as half of what it is charged.
    too_many = 2 * swa // per_session + 1
    assert engine.ask("sessions", count=too_many, **question)["warm"] < too_many
