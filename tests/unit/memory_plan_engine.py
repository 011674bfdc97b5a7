# SPDX-License-Identifier: GPL-3.0-or-later
"""Answers questions about memory with the installed engine's own code; runs under the engine's Python, on a CPU.

One JSON request per line on stdin, one JSON answer per line on stdout. ``test_memory_plan_engine.py`` starts it, so
that the tests themselves need neither torch nor SGLang.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
import weakref
from array import array
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)
# The engine prints while it is imported; answers keep the real stdout.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import sglang  # noqa: E402  after the environment is set
import torch  # noqa: E402
from sglang.srt.arg_groups.overrides import resolving_view  # noqa: E402
from sglang.srt.arg_groups.pd_disaggregation_hook import handle_pd_disaggregation  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.attention.dsv4.indexer import fp8_paged_mqa_logits_torch_sm120  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, match_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.model_executor import pool_configurator  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

PAGE, WINDOW = 256, 128


def version() -> str:
    return sglang.__version__


def _server_args(draft_tokens: int, **fields):
    if draft_tokens:
        fields.update(
            speculative_algorithm="EAGLE",
            speculative_eagle_topk=1,
            speculative_num_steps=draft_tokens - 1,
            speculative_num_draft_tokens=draft_tokens,
        )
    return get_context().override_server_args(page_size=PAGE, **fields)


def v4_pools(*, facts, budget, context, draft_tokens, max_running, swa_ratio, state_dtype, extra_slots=None) -> dict:
    """Pool sizes of DSV4PoolConfigurator, with the request-scoped pools of ``max_running`` requests."""
    ratios = facts["compress_ratios"]
    model = SimpleNamespace(
        qk_nope_head_dim=facts["qk_nope_head_dim"],
        qk_rope_head_dim=facts["qk_rope_head_dim"],
        index_head_dim=facts["index_head_dim"],
        window_size=facts["sliding_window"],
        context_len=context,
        compress_ratios=[*ratios, 0],
        hf_config=SimpleNamespace(kv_source_layer_ids=[]),
    )
    engine = SimpleNamespace(
        kv_cache_dtype_str="fp8_e4m3",
        model_config=model,
        layer_info=SimpleNamespace(start_layer=0, end_layer=len(ratios)),
        pp_size=1,
        attn_dp_size=1,
        page_size=PAGE,
        sliding_window_size=facts["sliding_window"],
        spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE" if draft_tokens else None),
        spec_aux_config=None,
    )
    with ExitStack() as stack:
        stack.enter_context(envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.override(state_dtype))
        stack.enter_context(
            _server_args(
                draft_tokens,
                max_running_requests=max_running,
                swa_full_tokens_ratio=swa_ratio,
                _swa_full_tokens_ratio_explicitly_set=True,
                **_decode_side(extra_slots),
            )
        )
        configurator = pool_configurator.DSV4PoolConfigurator(engine)
        try:
            sizes = configurator.calculate_pool_sizes(budget, PAGE)
        except (RuntimeError, ValueError) as refused:
            return {"refused": str(refused)}
        return {
            "full": sizes.full_max_total_num_tokens,
            "swa": sizes.swa_max_total_num_tokens,
            "c4": sizes.c4_max_total_num_tokens,
            "c128": sizes.c128_max_total_num_tokens,
            "c4 state": sizes.c4_state_pool_size,
            "per_full_token": configurator.bytes_per_full_token,
            "per_swa_token": configurator.bytes_per_swa_token,
            "c128_state": configurator._get_c128_state_fixed_bytes(max_running),
        }


def _decode_side(extra_slots: int | None) -> dict:
    if extra_slots is None:
        return {}
    return {"disaggregation_mode": "decode", "disaggregation_decode_extra_slots": extra_slots}


def decode_extra_slots(*, max_running) -> int:
    arguments = ServerArgs(model_path="none", disaggregation_mode="decode", max_running_requests=max_running)
    handle_pd_disaggregation(arguments)
    return resolving_view(arguments).disaggregation_decode_extra_slots


def swa_request_cap(*, draft_tokens, max_running, chunk, extra_slots=None) -> dict:
    settings = {"max_running_requests": max_running, "chunked_prefill_size": chunk, **_decode_side(extra_slots)}
    with _server_args(draft_tokens, **settings):
        cap = pool_configurator.compute_swa_request_cap(page_size=PAGE, window=WINDOW, attn_dp_size=1)
        return {"cap": cap, "extra_context": get_req_to_token_extra_context_len()}


def dense_pools(*, facts, budget, tp_size, kv_bytes, page_size) -> int:
    heads = SimpleNamespace(get_total_num_kv_heads=lambda: facts["num_key_value_heads"], is_draft_model=False)
    model = SimpleNamespace(
        head_dim=facts["head_dim"],
        v_head_dim=facts["head_dim"],
        context_len=8192,
        hf_config=LlamaConfig(),
        hf_text_config=LlamaConfig(),
        linear_attn_registry_result=None,
        get_num_kv_heads=lambda tp, dcp=1: ModelConfig.get_num_kv_heads(heads, tp, dcp),
    )
    dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}[kv_bytes]
    engine = SimpleNamespace(
        kv_cache_dtype=dtype,
        kv_cache_dtype_str="auto",
        model_config=model,
        layer_info=SimpleNamespace(
            num_effective_layers=facts["num_layers"], start_layer=0, end_layer=facts["num_layers"]
        ),
        use_mla_backend=False,
        is_draft_worker=False,
        pp_size=1,
        mambaish_config=None,
        spec_algorithm=SpeculativeAlgorithm.from_string(None),
        server_args=SimpleNamespace(enable_hisparse=False),
        fused_entry_bytes=lambda name: None,
    )
    with get_context().override_server_args(tp_size=tp_size, page_size=page_size):
        configurator = pool_configurator.DefaultPoolConfigurator(engine)
        return configurator.calculate_pool_sizes(budget, page_size).max_total_num_tokens


class _LiveBytes(TorchDispatchMode):
    """Peak bytes of the storages made inside the block, and the largest single tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.largest, self._seen = 0, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id_of(t) for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in given | self._seen:
                self._track(tensor)
        return result

    def _track(self, tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id_of(tensor), storage.nbytes()
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size) -> None:
        self._seen.discard(key)
        self.live -= size


def id_of(tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def indexer_fallback(*, rows, pages) -> dict:
    """Peak and largest allocation of the torch indexer fallback, ``rows`` queries over ``pages`` of 64 positions."""
    query = torch.zeros(rows, 1, 64, 128).to(torch.float8_e4m3fn)
    cache = torch.zeros(4, 64, 1, 132, dtype=torch.uint8)
    weight = torch.zeros(rows, 64)
    lengths = torch.full((rows,), 64, dtype=torch.int32)
    table = torch.zeros(rows, pages, dtype=torch.int32)
    with _LiveBytes() as tracked:
        logits = fp8_paged_mqa_logits_torch_sm120(
            query, cache, weight, lengths, table, None, pages * 64, clean_logits=False
        )
    return {"peak": tracked.peak, "largest": tracked.largest, "logits": list(logits.shape)}


def indexer_workspace(*, rows, topk) -> int:
    """Bytes that this repository's indexer asks for on sm_120."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "src"))
    from dsv4_sm120.ops.indexer import workspace_bytes

    return workspace_bytes(rows, topk, "sm_120")


def parameters(*, config) -> int:
    """Parameters of the model that transformers builds from a config.json, counted without allocating them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    return sum(parameter.numel() for parameter in model.parameters())


class _Cache:
    """SGLang's own prefix cache and SWA allocator with one-byte-wide KV, driven as its scheduler drives them."""

    def __init__(self, *, full, swa, chunk) -> None:
        self.chunk = chunk
        self.rows = ReqToTokenPool(size=2, max_context_len=full, device="cpu", enable_memory_saver=False)
        shape = {"page_size": PAGE, "dtype": torch.float8_e4m3fn, "device": "cpu"}
        pool = SWAKVPool(
            size=full,
            size_swa=swa,
            head_num=1,
            head_dim=1,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
            **shape,
        )
        self.allocator = SWATokenToKVPoolAllocator(size=full, size_swa=swa, kvcache=pool, need_sort=False, **shape)
        self.tree = UnifiedRadixCache(
            params=CacheInitParams(
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                disable=False,
                sliding_window_size=WINDOW,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )

    def _grow(self, request, allocated, end) -> int:
        need = -(-end // PAGE) * PAGE - allocated
        if need > 0:
            self.allocator.evict_to_free_tokens(self.tree, need)
            full = self.allocator.full_attn_allocator.alloc(need)
            swa = self.allocator.swa_attn_allocator.alloc(need)
            self.allocator.set_full_to_swa_mapping(full, swa)
            self.rows.write((request.kv.req_pool_idx, slice(allocated, allocated + need)), full.to(torch.int32))
        request.kv.kv_committed_len = request.kv.kv_allocated_len = end
        return max(allocated + need, allocated)

    def turn(self, prompt, answer) -> int:
        """Prefills ``prompt`` in chunks, decodes ``answer``, finishes; returns how many tokens the cache gave."""
        request = Req(
            rid="r",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=len(answer) + 1),
        )
        request.output_ids = array("q")
        match_kv_cache(request, self.tree, request.origin_input_ids[:-1])
        hit = allocated = request.prefix_len
        self.rows.alloc([request])
        request.lock = self.tree.lock(request.last_node)
        if hit:
            held = self.tree.prefix_device_indices(request).to(torch.int32)
            self.rows.write((request.kv.req_pool_idx, slice(0, hit)), held)
        request.kv.cache_protected_len = hit
        request.full_untruncated_fill_ids = array("q", prompt)
        for start in range(hit, len(prompt), self.chunk):
            end = min(len(prompt), start + self.chunk)
            allocated = self._grow(request, allocated, end)
            request.extend_end = end
            checkpoint_kv_cache(request, self.tree)
        for count, token in enumerate(answer, start=1):
            request.output_ids.append(token)
            request.full_untruncated_fill_ids.append(token)
            allocated = self._grow(request, allocated, len(prompt) + count)
            request.extend_end = len(prompt) + count
            evicted = request.kv.get_evicted_seqlen(ComponentType.SWA)
            if count > 1 and request.seqlen - 1 - WINDOW >= evicted + envs.SGLANG_SWA_EVICTION_INTERVAL.get():
                self.tree.evict_sliding_windows(request, request.seqlen - 1)
        request.finished_reason = FINISH_LENGTH(length=len(answer))
        release_kv_cache(request, self.tree, checkpoint=True)
        return hit


def sessions(*, count, tokens, answer, swa, chunk) -> dict:
    """``count`` sessions of ``tokens`` (answer included) loaded in turn, then each returns once, in the same order.

    Returns the SWA slots that the first one left behind, and how many returned to find their last page still held.
    """
    prompt = tokens - answer
    room = count * (tokens + 4 * PAGE) // PAGE * PAGE + 64 * PAGE
    with get_context().override_server_args(page_size=PAGE):
        cache = _Cache(full=room, swa=swa, chunk=chunk)
        histories = [list(range(i << 32, (i << 32) + tokens)) for i in range(count)]
        before = cache.allocator.swa_available_size()
        left = 0
        for history in histories:
            cache.turn(history[:prompt], history[prompt:])
            left = left or before - cache.allocator.swa_available_size()
        warm = 0
        for history in histories:
            question = [*history, -history[0] - 1]
            warm += cache.turn(question, [-history[0] - 2]) >= (tokens - 1) // PAGE * PAGE
    return {"swa_left": left, "warm": warm}


QUESTIONS = {
    function.__name__: function
    for function in (
        version,
        v4_pools,
        decode_extra_slots,
        swa_request_cap,
        dense_pools,
        indexer_fallback,
        indexer_workspace,
        parameters,
        sessions,
    )
}


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"ok": QUESTIONS[question["ask"]](**question["with"])}
        except Exception as error:  # the test shows it; the process stays for the next question
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=ANSWERS)


if __name__ == "__main__":
    main()
