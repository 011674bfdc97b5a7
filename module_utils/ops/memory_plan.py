# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory plan of an SGLang server: what fits on a GPU, before anything is started.

Pure functions over dataclasses, standard library only. The DeepSeek-V4 arithmetic follows SGLang 0.5.23
(``srt/model_executor/pool_configurator.py``, ``srt/mem_cache/kv_cache_configurator.py``) number for number;
``tests/unit/test_memory_plan_engine.py`` compares it with the installed engine, so an upgrade that changes a pool
fails there.

Units: ``*_bytes`` are bytes, ``*_gib`` are 2**30 bytes, ``*_mib`` 2**20 bytes, lengths and pools are tokens. One GPU
is planned; every rank of a tensor-parallel group is alike, because DeepSeek-V4's latent KV is replicated on each of
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .memory_plan_models import (
    FORMAT_BYTES,
    DeepSeekV4Facts,
    DenseFacts,
    ModelFacts,
    PlanInputError,
    estimate_weights_gib,
)

GIB = 1 << 30
MIB = 1 << 20

# SGLang pins the DeepSeek-V4 page size on CUDA (model_overrides/deepseek_v4.py, deepseek_v4_backend.py).
V4_PAGE = 256
# KVLayout.V4: 448 e4m3 + 64 bf16 per token, 7 scale bytes + 1 pad, pages padded to the reader's TMA row stride.
V4_DATA_BYTES, V4_SCALE_BYTES, V4_PAGE_ALIGN = 576, 8, 576
# Slots a request holds between two sliding-window evictions (SGLANG_SWA_EVICTION_INTERVAL's default).
SWA_EVICTION_INTERVAL = 128
# A decode side keeps two request slots more for each running request, up to so many of them.
DECODE_EXTRA_UP_TO = 32
# Rows of the torch indexer fallback per step (fp8_paged_mqa_logits_torch_sm120: _QUERY_CHUNK).
TORCH_INDEXER_ROWS = 1024
# The dsv4_sm120 indexer (docs/kernels.md), by top-k: parts of a row in the dense form and splits in the merge form,
# each up to so many rows; rows of a merge launch; the model's longest sequence in compressed positions, which is not
# the configured context.
DSV4_SM120_DENSE_PARTS = {512: ((4, 64), (16, 16), (64, 4)), 1024: ((4, 32), (16, 8))}
DSV4_SM120_MERGE_SPLITS = {512: ((512, 3), (1024, 1)), 1024: ((32, 8), (512, 4), (1024, 1))}
DSV4_SM120_MERGE_ROWS = 1024
DSV4_SM120_POSITIONS = 262_144
# Decode graphs beyond their known tensors: 1.2 GiB in a public report of this model and card, 0.6-0.9 GiB in ours.
GRAPH_BASE_GIB = 1.2
# Free memory that CUDA and NCCL take before SGLang measures "free before load": 97,249 MiB card, 94.2 GiB seen.
RUNTIME_GIB = 0.77
# Resident at KV sizing beyond the weights (rope tables, workspaces): the remainder of the deployment in the tests.
LOAD_OVERHEAD_GIB = 0.4

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
INDEXER_BACKENDS = ("dsv4_sm120", "tilelang", "torch")
COMPRESS_STATE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class PlanInputs:
    """Everything the plan depends on; names follow SGLang's flags.

    ``memory_free_mib`` is what the device has free before the server starts. ``speculative_num_draft_tokens`` 0 means
    no MTP. ``decode_side`` is the server of a disaggregated pair that answers; ``decode_extra_slots`` replaces SGLang's
    own choice of request slots for prompts on their way to it. ``weights_gib`` and ``graph_gib`` replace the estimates
    once a server has reported them.
    """

    model: ModelFacts
    memory_free_mib: float
    tp_size: int = 1
    context_length: int = 8192
    mem_fraction_static: float = 0.80
    max_running_requests: int = 64
    cuda_graph_max_bs: int = 64
    chunked_prefill_size: int = 4096
    kv_cache_dtype: str = "auto"
    swa_full_tokens_ratio: float = 0.1
    compress_state_dtype: str = "float32"
    speculative_num_draft_tokens: int = 0
    indexer_backend: str = "dsv4_sm120"
    decode_side: bool = False
    decode_extra_slots: int | None = None
    max_total_tokens: int | None = None
    page_size: int = 1
    weights_gib: float | None = None
    graph_gib: float | None = None
    runtime_gib: float = RUNTIME_GIB
    load_overhead_gib: float = LOAD_OVERHEAD_GIB
    headroom_gib: float | None = None
    session_tokens: int = 65_536
    session_answer_tokens: int = 1024

    @property
    def mtp(self) -> bool:
        return self.speculative_num_draft_tokens > 0

    @property
    def extra_slots(self) -> int:
        """Request slots beyond ``max_running_requests``: srt/arg_groups/pd_disaggregation_hook.py."""
        if not self.decode_side:
            return 0
        if self.decode_extra_slots is not None:
            return self.decode_extra_slots
        return 2 * self.max_running_requests if self.max_running_requests <= DECODE_EXTRA_UP_TO else 0

    @property
    def request_rows(self) -> int:
        """Request slots with the padding slot."""
        return self.max_running_requests + self.extra_slots + 1

    @property
    def headroom(self) -> float:
        """GiB the plan keeps free for what it does not list: ``headroom_gib``, or SGLang's own reserve for activations.

        That reserve (srt/arg_groups/memory_hook.py) is 512 MiB, 1.5 MiB per token of a prefill chunk, 1/8 GiB per rank.
        """
        if self.headroom_gib is not None:
            return self.headroom_gib
        return 0.5 + 1.5 * max(self.chunked_prefill_size, 2048) / 1024 + self.tp_size / 8

    @property
    def page(self) -> int:
        return V4_PAGE if isinstance(self.model, DeepSeekV4Facts) else self.page_size


def _check(ok: bool, variable: str, value: Any, accepted: str) -> None:
    if not ok:
        raise PlanInputError(variable, value, accepted)


def validate(inputs: PlanInputs) -> None:
    """Raises PlanInputError for a value that is wrong whatever the hardware."""
    limit = inputs.model.max_position_embeddings
    _check(inputs.memory_free_mib > 0, "memory_free_mib", inputs.memory_free_mib, "MiB free on the device, above 0")
    _check(
        0 < inputs.mem_fraction_static < 1,
        "mem_fraction_static",
        inputs.mem_fraction_static,
        "a fraction between 0 and 1",
    )
    _check(
        1 <= inputs.context_length <= limit,
        "context_length",
        inputs.context_length,
        f"1 to {limit:,} (max_position_embeddings of {inputs.model.name})",
    )
    _check(inputs.max_running_requests >= 1, "max_running_requests", inputs.max_running_requests, "1 or more")
    _check(
        inputs.decode_extra_slots is None or inputs.decode_extra_slots >= 0,
        "decode_extra_slots",
        inputs.decode_extra_slots,
        "0 or more, or unset",
    )
    _check(inputs.cuda_graph_max_bs >= 0, "cuda_graph_max_bs", inputs.cuda_graph_max_bs, "0 (no decode graphs) or more")
    _check(
        inputs.max_total_tokens is None or inputs.max_total_tokens >= 1,
        "max_total_tokens",
        inputs.max_total_tokens,
        "1 or more, or unset",
    )
    _check(inputs.page_size >= 1, "page_size", inputs.page_size, "1 or more")
    _check(inputs.session_tokens >= 1, "session_tokens", inputs.session_tokens, "1 or more")
    _check(
        0 <= inputs.session_answer_tokens <= inputs.session_tokens,
        "session_answer_tokens",
        inputs.session_answer_tokens,
        f"0 to session_tokens ({inputs.session_tokens})",
    )
    for name in ("weights_gib", "graph_gib", "runtime_gib", "load_overhead_gib", "headroom_gib"):
        value = getattr(inputs, name)
        _check(value is None or value >= 0, name, value, "GiB, 0 or more")
    if isinstance(inputs.model, DeepSeekV4Facts):
        _validate_v4(inputs, inputs.model)
    else:
        _validate_dense(inputs, inputs.model)


def _validate_v4(inputs: PlanInputs, model: DeepSeekV4Facts) -> None:
    _check(
        inputs.tp_size >= 1
        and model.num_attention_heads % inputs.tp_size == 0
        and model.o_groups % inputs.tp_size == 0,
        "tp_size",
        inputs.tp_size,
        f"a divisor of {model.num_attention_heads} query heads and {model.o_groups} output groups",
    )
    _check(
        inputs.kv_cache_dtype in ("auto", "fp8_e4m3"),
        "kv_cache_dtype",
        inputs.kv_cache_dtype,
        "auto or fp8_e4m3 (the packed DeepSeek-V4 layout has no other)",
    )
    _check(
        inputs.chunked_prefill_size >= V4_PAGE and inputs.chunked_prefill_size % V4_PAGE == 0,
        "chunked_prefill_size",
        inputs.chunked_prefill_size,
        f"a multiple of the page size {V4_PAGE}",
    )
    _check(
        0 < inputs.swa_full_tokens_ratio <= 1,
        "swa_full_tokens_ratio",
        inputs.swa_full_tokens_ratio,
        "above 0, at most 1",
    )
    _check(
        inputs.compress_state_dtype in COMPRESS_STATE_DTYPES,
        "compress_state_dtype",
        inputs.compress_state_dtype,
        " or ".join(COMPRESS_STATE_DTYPES),
    )
    _check(
        inputs.indexer_backend in INDEXER_BACKENDS,
        "indexer_backend",
        inputs.indexer_backend,
        ", ".join(INDEXER_BACKENDS),
    )
    # The c4 ring of 16 rows keeps its window of 8 plus at most 10 draft positions (get_compress_state_write_pad).
    _check(
        0 <= inputs.speculative_num_draft_tokens <= 10,
        "speculative_num_draft_tokens",
        inputs.speculative_num_draft_tokens,
        "0 (no MTP) to 10 (what the c4 state ring keeps)",
    )


def _validate_dense(inputs: PlanInputs, model: DenseFacts) -> None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    _check(
        inputs.tp_size >= 1
        and heads % inputs.tp_size == 0
        and (kv_heads % inputs.tp_size == 0 or inputs.tp_size % kv_heads == 0),
        "tp_size",
        inputs.tp_size,
        f"a divisor of {heads} query heads that divides or is a multiple of {kv_heads} KV heads",
    )
    _check(
        inputs.kv_cache_dtype == "auto" or inputs.kv_cache_dtype in _DTYPE_BYTES,
        "kv_cache_dtype",
        inputs.kv_cache_dtype,
        "auto, " + ", ".join(_DTYPE_BYTES),
    )
    _check(model.dtype in FORMAT_BYTES, "config.json torch_dtype", model.dtype, ", ".join(FORMAT_BYTES))
    _check(inputs.chunked_prefill_size >= 1, "chunked_prefill_size", inputs.chunked_prefill_size, "1 or more")
    _check(
        inputs.speculative_num_draft_tokens == 0,
        "speculative_num_draft_tokens",
        inputs.speculative_num_draft_tokens,
        "0",
    )


def _ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


def v4_page_bytes(slots: int) -> int:
    """Bytes of one page of ``slots`` latent rows in KVLayout.V4: 256 -> 149,760; 64 -> 37,440; 2 -> 1,728."""
    raw = slots * (V4_DATA_BYTES + V4_SCALE_BYTES)
    return _ceil_div(raw, V4_PAGE_ALIGN) * V4_PAGE_ALIGN


@dataclass(frozen=True)
class V4Rates:
    """What one token costs in each DeepSeek-V4 pool, in bytes over all layers of a rank.

    ``swa_kv`` and ``c4_state`` are per SWA token; ``c4_kv``, ``c128_kv`` and ``indexer_k`` per token of context.
    ``draft`` is the factor for the MTP layer's own cache. ``c128_state`` is a fixed amount per server: one ring per
    request slot.
    """

    swa_kv: float
    c4_state: float
    c4_kv: float
    c128_kv: float
    indexer_k: float
    draft: float
    swa_ratio: float
    c128_state: int

    @property
    def per_swa_token(self) -> float:
        return (self.swa_kv + self.c4_state) * self.draft

    @property
    def per_full_token(self) -> float:
        # Same order of additions as SGLang's sum over ratios: the token counts must agree to the last page.
        return (
            self.swa_ratio * (self.swa_kv + self.c4_state) + ((self.c4_kv + self.indexer_k) + self.c128_kv)
        ) * self.draft


def v4_state_rings(inputs: PlanInputs) -> tuple:
    """Rows of compressor state: (c4, per page of the SWA pool; c128, per request slot)."""
    return (16, 256) if inputs.mtp else (8, 128)


def v4_rates(inputs: PlanInputs) -> V4Rates:
    """Bytes per token of every pool: DSV4PoolConfigurator in ratio mode, the only one a V4 server reaches in 0.5.23."""
    model = inputs.model
    state_bytes = _DTYPE_BYTES[inputs.compress_state_dtype]
    ring4, ring128 = v4_state_rings(inputs)
    c4, c128 = model.layers_of(4), model.layers_of(128)
    index_bytes = model.index_head_dim + model.index_head_dim // 128 * 4
    state_row = 4 * model.head_dim * state_bytes + 4 * model.index_head_dim * state_bytes
    # One ring per slot and one spare, rows padded to the compression ratio.
    rows = _ceil_div(inputs.request_rows * ring128 + ring128 + 1, 128) * 128
    quarter = 1 / 4
    return V4Rates(
        swa_kv=v4_page_bytes(V4_PAGE) / V4_PAGE * model.num_layers,
        c4_state=ring4 / V4_PAGE * state_row * c4,
        c4_kv=quarter * (v4_page_bytes(V4_PAGE // 4) / (V4_PAGE // 4)) * c4,
        c128_kv=1 / 128 * (v4_page_bytes(V4_PAGE // 128) / (V4_PAGE // 128)) * c128,
        indexer_k=quarter * index_bytes * c4,
        draft=(model.num_layers + 1) / model.num_layers if inputs.mtp else 1.0,
        swa_ratio=inputs.swa_full_tokens_ratio,
        c128_state=rows * 2 * model.head_dim * state_bytes * c128,
    )


def v4_pool_tokens(inputs: PlanInputs, budget_bytes: int) -> tuple:
    """(full, swa) tokens that a byte budget gives; whole pages, full first, SWA a ratio of it."""
    rates = v4_rates(inputs)
    for_tokens = max(budget_bytes - rates.c128_state, 0)
    full = int(for_tokens / rates.per_full_token) // V4_PAGE * V4_PAGE
    if inputs.max_total_tokens is not None:
        full = min(full, inputs.max_total_tokens) // V4_PAGE * V4_PAGE
    return full, int(full * inputs.swa_full_tokens_ratio) // V4_PAGE * V4_PAGE


def swa_per_request(inputs: PlanInputs) -> int:
    """Worst-case SWA slots of one decoding request (``compute_swa_request_cap``, overlap scheduling)."""
    draft = inputs.speculative_num_draft_tokens
    trailing = inputs.model.sliding_window + SWA_EVICTION_INTERVAL * max(draft, 1) + V4_PAGE
    return trailing + (2 * draft if draft else V4_PAGE)


def swa_in_flight(inputs: PlanInputs, requests: int) -> int:
    """SWA slots of ``requests`` decoding requests plus the two prefill chunks of overlap scheduling.

    A decode side computes no chunk; it has a window and a page for each request on its way.
    """
    if inputs.decode_side:
        return swa_per_request(inputs) * requests + (inputs.model.sliding_window + V4_PAGE) * inputs.extra_slots
    return swa_per_request(inputs) * requests + 2 * inputs.chunked_prefill_size + V4_PAGE


def swa_per_session(inputs: PlanInputs, tokens: int, answer_tokens: int = 0) -> int:
    """SWA slots a finished session leaves in the radix cache, at most; tokens prefilled and generated are given apart.

    Every prefill chunk keeps the two pages around its end, a boundary another request may continue from; so does the
    end of an answer. All of them age in one LRU list. So a smaller chunked_prefill_size makes long sessions *more*
    expensive here.
    """
    boundaries = _ceil_div(tokens, inputs.chunked_prefill_size) + (1 if answer_tokens else 0)
    return 2 * boundaries * V4_PAGE


def swa_of_planned_session(inputs: PlanInputs) -> int:
    """SWA slots of one session of ``session_tokens``."""
    answer = inputs.session_answer_tokens
    return swa_per_session(inputs, inputs.session_tokens - answer, answer)


def dense_bytes_per_token(inputs: PlanInputs) -> int:
    """Bytes of K and V per token and rank of a dense model; KV heads fewer than ranks are replicated."""
    model = inputs.model
    kv_heads = max(1, model.num_key_value_heads // inputs.tp_size)
    dtype = model.dtype if inputs.kv_cache_dtype == "auto" else inputs.kv_cache_dtype
    return 2 * model.num_layers * kv_heads * model.head_dim * _DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Tensor:
    """A tensor the static budget does not hold.

    ``phase`` is decode (graph pool), prefill (one near-limit chunk) or resident.
    """

    name: str
    phase: str
    shape: tuple
    dtype: str
    bytes: int


_TENSOR_BYTES = {"fp32": 4, "int32": 4, "int64": 8, "bf16": 2, "uint8": 1}


def _tensor(name: str, phase: str, shape: Sequence[int], dtype: str) -> Tensor:
    return Tensor(name, phase, tuple(shape), dtype, math.prod(shape) * _TENSOR_BYTES[dtype])


def row_length(inputs: PlanInputs) -> int:
    """Positions in a request's row of ``req_to_token``: the context plus what a decode step may allocate ahead."""
    draft = inputs.speculative_num_draft_tokens
    return inputs.context_length + (2 * draft + V4_PAGE - 1 if draft else 4)


def context_pages(inputs: PlanInputs) -> int:
    """Pages per row of the page table in a decode graph, which is built for the whole request row."""
    return _ceil_div(row_length(inputs), V4_PAGE)


def dsv4_sm120_workspace(rows: int, topk: int) -> int:
    """Bytes one indexer call of the dsv4_sm120 kernels needs for ``rows`` queries, whatever the context."""

    def up_to(table: Sequence[tuple], count: int) -> int:
        return next(value for limit, value in table if count <= limit)

    dense, merge = (table[512 if topk <= 512 else 1024] for table in (DSV4_SM120_DENSE_PARTS, DSV4_SM120_MERGE_SPLITS))
    if rows <= dense[-1][0]:
        return rows * (4 * DSV4_SM120_POSITIONS + 4 * 4 * topk + 8 * 8 * topk + 4 * (1 + up_to(dense, rows)))
    rows = min(rows, DSV4_SM120_MERGE_ROWS)
    return rows * (4 * 8 * topk + up_to(merge, rows) * (4 * 2 * topk + 8 * 4 * topk + 4))


def indexer_tensors(inputs: PlanInputs, rows: int, phase: str, backend: str | None = None) -> tuple:
    """Tensors one c4 layer's indexer call makes for ``rows`` queries at full context, for one of INDEXER_BACKENDS.

    ``torch`` lists those alive at its peak (score times weight): queries, pages gathered per row, their values in bf16,
    scale, score, product. Source: srt/layers/attention/dsv4/indexer.py, kernels/ops/attention/dsa/tilelang_kernel.py of
    0.5.23.
    """
    backend = backend or inputs.indexer_backend
    model, pages = inputs.model, context_pages(inputs)
    positions = pages * 64
    if backend == "dsv4_sm120":
        return (_tensor("indexer workspace", phase, (dsv4_sm120_workspace(rows, model.index_topk),), "uint8"),)
    if backend == "tilelang":
        return (_tensor("indexer logits", phase, (rows, positions), "fp32"),)
    step = min(rows, TORCH_INDEXER_ROWS)
    tensors = [
        _tensor("indexer queries", phase, (step, model.index_n_heads, model.index_head_dim), "bf16"),
        _tensor("indexer gathered pages", phase, (step, pages, 64 * (model.index_head_dim + 4)), "uint8"),
        _tensor("indexer values", phase, (step, positions, model.index_head_dim), "bf16"),
        _tensor("indexer scale", phase, (step, positions), "fp32"),
        _tensor("indexer score", phase, (step, positions, model.index_n_heads), "bf16"),
        _tensor("indexer score x weight", phase, (step, positions, model.index_n_heads), "fp32"),
    ]
    if rows > step:
        tensors.append(_tensor("indexer logits of earlier steps", phase, (rows - step, positions), "fp32"))
    return tuple(tensors)


def v4_tensors(inputs: PlanInputs) -> tuple:
    """Large tensors outside the static budget: the largest decode graph, the last chunk of a near-limit prompt."""
    model, pages = inputs.model, context_pages(inputs)
    tensors = [_tensor("req_to_token", "resident", (inputs.request_rows, row_length(inputs)), "int32")]
    for phase, rows in (("decode", inputs.cuda_graph_max_bs), ("prefill", inputs.chunked_prefill_size)):
        if not rows:
            continue
        c128_width = _ceil_div(2 * pages, 64) * 64
        tensors += indexer_tensors(inputs, rows, phase)
        tensors += [
            _tensor("page table", phase, (rows, pages), "int32"),
            _tensor("c128 indices", phase, (rows, c128_width), "int32"),
            _tensor("hyper-connection streams", phase, (2, rows, model.hc_mult, model.hidden_size), "bf16"),
            _tensor(
                "queries and output",
                phase,
                (2, rows, model.num_attention_heads // inputs.tp_size, model.head_dim),
                "bf16",
            ),
        ]
    return tuple(tensors)


def _v4_pool_tensors(inputs: PlanInputs, full: int, swa: int) -> tuple:
    tensors = (_tensor("full_to_swa map", "resident", (full + V4_PAGE + 1,), "int64"),)
    if inputs.indexer_backend != "dsv4_sm120":
        tensors += (_swa_split_buffer(inputs, swa),)
    return tensors


def _swa_split_buffer(inputs: PlanInputs, swa_tokens: int) -> Tensor:
    # flash_mla_sm120._split_kv_pages_to_64: one layer's SWA pool again, in 64-token pages. The dsv4_sm120 kernels read
    # the pages.
    pages = _ceil_div(swa_tokens + V4_PAGE, V4_PAGE)
    return _tensor("SWA page re-split buffer", "resident", (4 * pages, v4_page_bytes(64)), "uint8")


def dense_tensors(inputs: PlanInputs) -> tuple:
    model = inputs.model
    rows = inputs.chunked_prefill_size
    return (
        _tensor("req_to_token", "resident", (inputs.request_rows, row_length(inputs)), "int32"),
        _tensor("MLP gate and up", "prefill", (rows, 2 * model.intermediate_size // inputs.tp_size), "fp32"),
        _tensor("logits", "decode", (max(inputs.cuda_graph_max_bs, 1), model.vocab_size), "fp32"),
    )


def format_bytes(count: float) -> str:
    """Bytes in binary units, three significant digits: 33,554,432 -> '32.0 MiB'."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size >= 100 else f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class PoolPart:
    """What one kind of cache takes of a pool.

    ``tokens`` are the entries it keeps (c4: one for four tokens of the pool). ``bytes_per_token`` is per token of the
    pool, ``bytes_per_context_token`` per token of the main pool: those of all parts add up to the plan's
    ``bytes_per_token``. Bytes are over all layers of a rank.
    """

    name: str
    tokens: int
    bytes_per_token: float
    bytes_per_context_token: float
    bytes: int


@dataclass(frozen=True)
class Pool:
    """One cache pool: ``tokens`` it serves, ``bytes_per_token`` over all layers of a rank, bytes in the budget.

    ``parts`` is empty where the pool holds one kind of cache.
    """

    name: str
    tokens: int
    bytes_per_token: float
    bytes: int
    parts: tuple = ()


@dataclass(frozen=True)
class Finding:
    """A refusal or a warning: stable id, one sentence with the numbers that clash, the same numbers by name."""

    id: str
    reason: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lever:
    """One change of one input: what it gains in tokens, warm sessions and free memory, and what it costs."""

    setting: str
    old: Any
    new: Any
    tokens_gain: int
    sessions_gain: int
    free_gain_gib: float
    cost: str


@dataclass(frozen=True)
class MemoryPlan:
    """Result of ``plan_memory``. All GiB figures are per GPU."""

    inputs: PlanInputs
    weights_gib: float
    resident_gib: float
    free_before_load_gib: float
    budget_bytes: int
    pools: tuple
    max_total_num_tokens: int
    swa_tokens: int
    max_running_requests: int
    bytes_per_token: float
    tensors: tuple
    graph_gib: float
    free_after_pools_gib: float
    near_limit_prefill_gib: float
    free_left_gib: float
    full_context_requests: int
    full_context_limit: str
    warm_sessions: int
    warm_sessions_limit: str
    refusals: tuple
    warnings: tuple

    @property
    def fits(self) -> bool:
        return not self.refusals

    @property
    def keeps_headroom(self) -> bool:
        return self.fits and self.free_left_gib >= self.inputs.headroom

    def pool(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)


def plan_memory(inputs: PlanInputs) -> MemoryPlan:
    """Plans one GPU.

    Raises PlanInputError for a wrong value; numbers that clash are ``refusals`` of the plan returned.
    """
    validate(inputs)
    weights = inputs.weights_gib
    if weights is None:
        weights = estimate_weights_gib(inputs.model, inputs.tp_size, mtp=inputs.mtp)
    before = inputs.memory_free_mib / 1024 - inputs.runtime_gib
    resident = weights + inputs.load_overhead_gib
    # _profile_available_bytes: free after load minus the slack that mem_fraction_static leaves to the rest.
    budget = int(max(before - resident - before * (1 - inputs.mem_fraction_static), 0) * GIB)
    if isinstance(inputs.model, DeepSeekV4Facts):
        pools = v4_pools(inputs, budget)
        tensors = v4_tensors(inputs) + _v4_pool_tensors(inputs, pools[0].tokens, pools[1].tokens)
    else:
        pools, tensors = _dense_pools(inputs, budget)
    return _assemble(inputs, weights, resident, before, budget, pools, tensors)


def v4_pools(inputs: PlanInputs, budget: int) -> tuple:
    """The pools that a budget of so many bytes gives a DeepSeek-V4 server: full, swa, c128 state."""
    rates = v4_rates(inputs)
    full, swa = v4_pool_tokens(inputs, budget)

    def part(name: str, tokens: int, entries: int, rate: float, share: float = 1.0) -> PoolPart:
        rate *= rates.draft
        return PoolPart(name, entries, rate, rate * share, int(tokens * rate))

    def pool(name: str, tokens: int, rate: float, parts: tuple) -> Pool:
        return Pool(name, tokens, rate * rates.draft, int(tokens * rate * rates.draft), parts)

    # As DSV4PoolConfigurator._compute_dsv4_sizes counts them; the indexer has one key for each c4 entry.
    full_parts = (
        part("c4", full, full // 4, rates.c4_kv),
        part("c128", full, full // 128, rates.c128_kv),
        part("indexer", full, full // 4, rates.indexer_k),
    )
    swa_parts = (
        part("swa", swa, swa, rates.swa_kv, rates.swa_ratio),
        part("c4 state", swa, swa // V4_PAGE * v4_state_rings(inputs)[0], rates.c4_state, rates.swa_ratio),
    )
    # With no token at all the server does not start; its pools are shown empty.
    slots = inputs.max_running_requests + inputs.extra_slots if full else 0
    return (
        pool("full", full, rates.c4_kv + rates.c128_kv + rates.indexer_k, full_parts),
        pool("swa", swa, rates.swa_kv + rates.c4_state, swa_parts),
        Pool("c128 state", slots, rates.c128_state / (inputs.request_rows - 1), rates.c128_state if full else 0),
    )


def _dense_pools(inputs: PlanInputs, budget: int) -> tuple:
    rate = dense_bytes_per_token(inputs)
    tokens = budget // rate // inputs.page * inputs.page
    if inputs.max_total_tokens is not None:
        tokens = min(tokens, inputs.max_total_tokens) // inputs.page * inputs.page
    return (Pool("full", tokens, float(rate), tokens * rate),), dense_tensors(inputs)


def _assemble(inputs, weights, resident, before, budget, pools, tensors) -> MemoryPlan:
    def total(phase: str) -> float:
        return sum(tensor.bytes for tensor in tensors if tensor.phase == phase) / GIB

    full = pools[0].tokens
    swa = pools[1].tokens if len(pools) > 1 else 0
    graph = inputs.graph_gib
    if graph is None:
        graph = total("decode") + (GRAPH_BASE_GIB if inputs.cuda_graph_max_bs else 0.0)
    after_pools = before - resident - sum(pool.bytes for pool in pools) / GIB - total("resident")
    prefill = total("prefill")
    left = after_pools - graph - prefill
    requests, requests_limit = _full_context_requests(inputs, full, swa)
    sessions, sessions_limit = _warm_sessions(inputs, full, swa)
    plan = MemoryPlan(
        inputs=inputs,
        weights_gib=weights,
        resident_gib=resident,
        free_before_load_gib=before,
        budget_bytes=budget,
        pools=pools,
        max_total_num_tokens=full,
        swa_tokens=swa,
        max_running_requests=min(inputs.max_running_requests, full // 2),
        bytes_per_token=_bytes_per_token(inputs),
        tensors=tensors,
        graph_gib=graph,
        free_after_pools_gib=after_pools,
        near_limit_prefill_gib=prefill,
        free_left_gib=left,
        full_context_requests=requests,
        full_context_limit=requests_limit,
        warm_sessions=sessions,
        warm_sessions_limit=sessions_limit,
        refusals=(),
        warnings=(),
    )
    return replace(plan, refusals=tuple(_refusals(plan)), warnings=tuple(_warnings(plan)))


def _bytes_per_token(inputs: PlanInputs) -> float:
    if isinstance(inputs.model, DeepSeekV4Facts):
        return v4_rates(inputs).per_full_token
    return float(dense_bytes_per_token(inputs))


def _least(limits: Sequence[tuple]) -> tuple:
    """(count, what limits it) of the smallest count, never below 0."""
    count, limit = min(limits, key=lambda item: item[0])
    return max(count, 0), limit


def _full_context_requests(inputs: PlanInputs, full: int, swa: int) -> tuple:
    page = inputs.page
    limits = [
        (full // (_ceil_div(inputs.context_length, page) * page), "KV pool"),
        (inputs.max_running_requests, "max_running_requests"),
    ]
    if swa:
        limits.append(((swa - swa_in_flight(inputs, 0)) // swa_per_request(inputs), "SWA pool"))
    return _least(limits)


def _warm_sessions(inputs: PlanInputs, full: int, swa: int) -> tuple:
    page = inputs.page
    limits = [(full // (_ceil_div(inputs.session_tokens, page) * page), "KV pool")]
    if isinstance(inputs.model, DeepSeekV4Facts):
        # A pair's sessions stay warm where prompts are computed.
        busy = swa_in_flight(replace(inputs, decode_side=False), inputs.max_running_requests)
        limits.append(((swa - busy) // swa_of_planned_session(inputs), "SWA pool"))
    return _least(limits)


def _refusals(plan: MemoryPlan) -> list:
    inputs, before = plan.inputs, plan.free_before_load_gib
    static = before * inputs.mem_fraction_static
    if plan.budget_bytes == 0:
        minimum = math.ceil(plan.resident_gib / before * 1000) / 1000 if before > 0 else math.inf
        fix = (
            f"raise mem_fraction_static above {minimum:.3f} or spread the weights over more GPUs (tp_size "
            f"{inputs.tp_size})"
            if minimum < 1
            else f"no fraction helps: spread the weights over more GPUs (tp_size {inputs.tp_size})"
        )
        return [
            Finding(
                "weights_exceed_budget",
                f"weights and runtime take {plan.resident_gib:.1f} GiB, but mem_fraction_static "
                f"{inputs.mem_fraction_static:g} "
                f"of {before:.1f} GiB is {static:.1f} GiB: nothing is left for the KV cache; {fix}",
                {"resident_gib": plan.resident_gib, "static_gib": static, "minimum_mem_fraction_static": minimum},
            )
        ]
    found = []
    if isinstance(inputs.model, DeepSeekV4Facts):
        found += _v4_refusals(plan)
    if not found and plan.max_total_num_tokens < inputs.context_length:
        cap = inputs.max_total_tokens
        why = (
            f"max_total_tokens is {cap:,}"
            if cap is not None and cap < inputs.context_length
            else (f"{plan.budget_bytes / GIB:.2f} GiB at {plan.bytes_per_token:,.0f} bytes per token")
        )
        found.append(
            Finding(
                "context_exceeds_pool",
                f"the KV pool holds {plan.max_total_num_tokens:,} tokens ({why}), one full-context request needs "
                f"{inputs.context_length:,}: lower context_length, or make the pool larger (see the levers)",
                {"max_total_num_tokens": plan.max_total_num_tokens, "context_length": inputs.context_length},
            )
        )
    if not found and plan.free_left_gib < 0:
        largest = max((t for t in plan.tensors if t.phase == "prefill"), key=lambda tensor: tensor.bytes)
        found.append(
            Finding(
                "no_memory_for_near_limit_prompt",
                f"{plan.free_after_pools_gib:.1f} GiB stay free after the pools, but decode graphs need "
                f"{plan.graph_gib:.1f} GiB "
                f"and the last prefill chunk of a {inputs.context_length:,}-token prompt "
                f"{plan.near_limit_prefill_gib:.1f} GiB "
                f"(largest: {largest.name} {list(largest.shape)} {largest.dtype}, {format_bytes(largest.bytes)}): "
                f"lower "
                f"mem_fraction_static {inputs.mem_fraction_static:g} or chunked_prefill_size "
                f"{inputs.chunked_prefill_size:,}"
                + (
                    ""
                    if inputs.indexer_backend == "dsv4_sm120"
                    else f", or leave indexer_backend {inputs.indexer_backend}"
                ),
                {
                    "free_after_pools_gib": plan.free_after_pools_gib,
                    "graph_gib": plan.graph_gib,
                    "near_limit_prefill_gib": plan.near_limit_prefill_gib,
                },
            )
        )
    return found


def _v4_refusals(plan: MemoryPlan) -> list:
    inputs, rates = plan.inputs, v4_rates(plan.inputs)
    if plan.budget_bytes <= rates.c128_state:
        return [
            Finding(
                "state_exceeds_budget",
                f"the c128 state of {inputs.request_rows - 1} request slots takes "
                f"{rates.c128_state / GIB:.2f} GiB of the "
                f"{plan.budget_bytes / GIB:.2f} GiB left for the cache: lower max_running_requests or raise "
                f"mem_fraction_static {inputs.mem_fraction_static:g}",
                {"c128_state_gib": rates.c128_state / GIB, "budget_gib": plan.budget_bytes / GIB},
            )
        ]
    floor = inputs.model.sliding_window + V4_PAGE
    if plan.swa_tokens <= floor:
        return [
            Finding(
                "swa_pool_below_floor",
                f"the SWA pool has {plan.swa_tokens:,} tokens (swa_full_tokens_ratio "
                f"{inputs.swa_full_tokens_ratio:g} of "
                f"{plan.max_total_num_tokens:,}), SGLang admits no request at or below {floor} (window + page): raise "
                "swa_full_tokens_ratio or mem_fraction_static",
                {"swa_tokens": plan.swa_tokens, "floor": floor},
            )
        ]
    return []


def _warnings(plan: MemoryPlan) -> list:
    inputs = plan.inputs
    if plan.refusals or _refusals(plan):
        return []
    found = []
    if plan.free_left_gib < inputs.headroom:
        found.append(
            Finding(
                "thin_headroom",
                f"{plan.free_left_gib:.1f} GiB stay free while a {inputs.context_length:,}-token prompt ends its "
                f"prefill, "
                f"the headroom is {inputs.headroom:.1f}: a start may succeed and the first near-limit prompt fail",
                {"free_left_gib": plan.free_left_gib, "headroom_gib": inputs.headroom},
            )
        )
    if not isinstance(inputs.model, DeepSeekV4Facts):
        return found
    chunks = 2 * inputs.chunked_prefill_size + V4_PAGE
    if plan.swa_tokens < chunks:
        found.append(
            Finding(
                "swa_pool_below_two_chunks",
                f"the SWA pool has {plan.swa_tokens:,} tokens, two prefill chunks in flight need {chunks:,}: "
                f"prefill will run in "
                "smaller chunks or wait; raise swa_full_tokens_ratio or lower chunked_prefill_size",
                {"swa_tokens": plan.swa_tokens, "two_chunks": chunks},
            )
        )
    busy = swa_in_flight(inputs, inputs.max_running_requests)
    if plan.swa_tokens >= chunks and plan.swa_tokens < busy:
        found.append(
            Finding(
                "swa_pool_below_running_requests",
                f"{inputs.max_running_requests} running requests may hold {busy:,} SWA tokens, the pool has "
                f"{plan.swa_tokens:,}: requests will be retracted before max_running_requests is reached",
                {"swa_tokens": plan.swa_tokens, "swa_in_flight": busy},
            )
        )
    if inputs.cuda_graph_max_bs < inputs.max_running_requests:
        found.append(
            Finding(
                "graphs_below_running_requests",
                f"decode batches of {inputs.cuda_graph_max_bs + 1} to {inputs.max_running_requests} run without a "
                f"CUDA graph "
                f"(cuda_graph_max_bs {inputs.cuda_graph_max_bs})",
                {"cuda_graph_max_bs": inputs.cuda_graph_max_bs, "max_running_requests": inputs.max_running_requests},
            )
        )
    return found


def levers(plan: MemoryPlan) -> tuple:
    """Each input worth turning, planned again with that one change, with its cost in words.

    Empty for a dense model's cap.
    """
    inputs = plan.inputs
    if not isinstance(inputs.model, DeepSeekV4Facts):
        return _dense_levers(plan)
    found = []

    def turn(setting: str, value: Any, cost: str) -> None:
        old = getattr(inputs, setting)
        if value == old:
            return
        try:
            changed = plan_memory(replace(inputs, **{setting: value}))
        except PlanInputError:
            return
        lever = _lever(plan, changed, setting, old, value, cost)
        if max(lever.tokens_gain, lever.sessions_gain, round(lever.free_gain_gib, 1)) > 0:
            found.append(lever)

    fraction = round(inputs.mem_fraction_static + 0.02, 3)
    turn("mem_fraction_static", min(fraction, 0.97), "less free memory for graphs and prefill")
    turn(
        "max_running_requests",
        max(inputs.max_running_requests // 2, 1),
        "requests beyond it wait in the queue",
    )
    turn(
        "swa_full_tokens_ratio",
        round(inputs.swa_full_tokens_ratio / 2, 4),
        "fewer returning sessions keep their prefix",
    )
    turn(
        "swa_full_tokens_ratio",
        min(round(inputs.swa_full_tokens_ratio * 2, 4), 1.0),
        "fewer tokens in the KV pool",
    )
    turn("compress_state_dtype", "bfloat16", "rounded state: compare answers before and after")
    if inputs.mtp:
        turn("speculative_num_draft_tokens", 0, "no speculative decoding")
    turn(
        "chunked_prefill_size",
        inputs.chunked_prefill_size * 2,
        "longer stalls of running requests",
    )
    turn(
        "chunked_prefill_size",
        inputs.chunked_prefill_size // 2 // V4_PAGE * V4_PAGE,
        "slower prefill, fewer warm sessions",
    )
    if inputs.indexer_backend != "dsv4_sm120":
        turn("indexer_backend", "dsv4_sm120", "needs the kernel package of this repository")
    turn("tp_size", inputs.tp_size * 2, "twice the GPUs, all-reduce over more of them")
    return tuple(found)


def _dense_levers(plan: MemoryPlan) -> tuple:
    inputs, found = plan.inputs, []
    if inputs.max_total_tokens is not None:
        doubled = replace(inputs, max_total_tokens=inputs.max_total_tokens * 2)
        cost = f"{format_bytes(inputs.max_total_tokens * dense_bytes_per_token(inputs))} more memory"
        changed = plan_memory(doubled)
        found.append(_lever(plan, changed, "max_total_tokens", inputs.max_total_tokens, doubled.max_total_tokens, cost))
    return tuple(found)


def _lever(plan: MemoryPlan, changed: MemoryPlan, setting: str, old: Any, new: Any, cost: str) -> Lever:
    return Lever(
        setting=setting,
        old=old,
        new=new,
        tokens_gain=changed.max_total_num_tokens - plan.max_total_num_tokens,
        sessions_gain=changed.warm_sessions - plan.warm_sessions,
        free_gain_gib=changed.free_left_gib - plan.free_left_gib,
        cost=cost,
    )
