"""Split-K sparse-MLA decode on tensor cores, over both index lists in one pass.

One program owns (row, head block, split). A key row is gathered once, dequantised to bf16 and used for all heads of the
block, as key and as value. How a row's tiles are shared among splits follows from its live lengths, on the device:
splits beyond them exit at once, and a row that needs one split writes its output directly. Otherwise each split leaves
a normalised partial with its log-sum-exp, and the last split to arrive merges them ("fused"), or a second kernel does
("kernel").
"""

import math

import torch
import triton
import triton.language as tl

from dsv4_sm120.triton_utils import dot, dot_acc, launch_dependents, mul_bf16, opaque, wait_for_primary

# Layout of ``dsv4_sm120.layout``, as constants a kernel may use.
HEAD_DIM = tl.constexpr(512)
GROUP = tl.constexpr(64)
ROPE_GROUP = tl.constexpr(7)
ROW_BYTES = tl.constexpr(576)
ROPE_OFFSET = tl.constexpr(448)
SCALE_BYTES = tl.constexpr(8)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def live_tiles(length_ptr, row, width, BLOCK_N: tl.constexpr, HAS_LENGTH: tl.constexpr):
    """Live length of a row's index list and the number of tiles that cover it."""
    length = width
    if HAS_LENGTH:
        length = tl.minimum(tl.maximum(tl.load(length_ptr + row), 0), width)
    return length, tl.cdiv(length, BLOCK_N)


@triton.jit
def share(tiles, splits, MIN_TILES: tl.constexpr):
    """Tiles per split, and how many splits that keeps busy: at least one, which writes the zeros of an empty row."""
    chunk = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    return chunk, tl.maximum(tl.cdiv(tiles, chunk), 1)


@triton.jit
def fetch_quarter(row_ptr, valid, FIRST: tl.constexpr):
    """Raw e4m3 ``[2, BLOCK_N, 64]`` of groups ``FIRST`` and ``FIRST + 1`` of each key; the rope group reads as zero."""
    group = FIRST + tl.arange(0, 2)
    return tl.load(
        row_ptr[None, :, None] + (group * GROUP)[:, None, None] + tl.arange(0, GROUP)[None, None, :],
        mask=valid[None, :, None] & (group != ROPE_GROUP)[:, None, None],
        other=0.0,
    )


@triton.jit
def fetch(
    cache_ptr, indices_ptr, length, tile, PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Gather one tile of keys as stored: scale bytes as one word per key, four quarters of e4m3, and the rope part."""
    pos = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(indices_ptr + pos, mask=pos < length, other=-1)
    valid = slot >= 0
    page_ptr = cache_ptr + (slot // PAGE_SIZE).to(tl.int64) * PAGE_BYTES
    row_ptr = page_ptr + (slot % PAGE_SIZE) * ROW_BYTES
    word_ptr = page_ptr + PAGE_SIZE * ROW_BYTES + (slot % PAGE_SIZE) * SCALE_BYTES
    word = tl.load(word_ptr.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    rope_ptr = (row_ptr + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(rope_ptr[:, None] + tl.arange(0, GROUP)[None, :], mask=valid[:, None], other=0.0)
    a = fetch_quarter(row_ptr, valid, 0)
    b = fetch_quarter(row_ptr, valid, 2)
    c = fetch_quarter(row_ptr, valid, 4)
    d = fetch_quarter(row_ptr, valid, 6)
    return word, a, b, c, d, rope


@triton.jit
def dequantise(raw, rope, word, FIRST: tl.constexpr, VIA_FP32: tl.constexpr, BLOCK_N: tl.constexpr):
    """A fetched quarter as bf16 ``[BLOCK_N, 128]``. Exact: e4m3 fits bf16 and scales are powers of two.

    sm_120 converts e4m3 to bf16 in one instruction per pair; sm_90 is faster through fp32.
    """
    group = FIRST + tl.arange(0, 2)
    exponent = ((word[None, :] >> (group * 8)[:, None]) & 0xFF).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    if VIA_FP32:
        key = (raw.to(tl.float32) * scale[:, :, None]).to(tl.bfloat16)
    else:
        key = mul_bf16(raw.to(tl.bfloat16), scale.to(tl.bfloat16)[:, :, None])
    if FIRST == 6:
        key = tl.where((group == ROPE_GROUP)[:, None, None], rope[None, :, :], key)
    return tl.permute(opaque(key), (1, 0, 2)).reshape(BLOCK_N, 128)


@triton.jit
def attend(
    state,
    query,
    cache_ptr,
    indices_ptr,
    length,
    first,
    last,
    scale_log2,
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VIA_FP32: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Online softmax over tiles ``first .. last`` of one index list; returns the new state.

    The state is the running maximum (base 2) ``[BLOCK_H]``, the denominator, still spread over ``[BLOCK_H, BLOCK_N]``
    so that no tile needs a sum across warps, and the output in quarters of the head dimension. Quarters shorten the
    chains of dependent tensor-core instructions and the lifetime of their operands in registers.
    """
    m, weight, acc_a, acc_b, acc_c, acc_d = state
    q_a, q_b, q_c, q_d = query
    bound = tl.where(first < last, length, 0)
    if PREFETCH:
        word, raw_a, raw_b, raw_c, raw_d, rope = fetch(
            cache_ptr, indices_ptr, bound, first, PAGE_SIZE, PAGE_BYTES, BLOCK_N
        )
    for tile in tl.range(first, last):
        if not PREFETCH:
            word, raw_a, raw_b, raw_c, raw_d, rope = fetch(
                cache_ptr, indices_ptr, length, tile, PAGE_SIZE, PAGE_BYTES, BLOCK_N
            )
        k_a = dequantise(raw_a, rope, word, 0, VIA_FP32, BLOCK_N)
        k_b = dequantise(raw_b, rope, word, 2, VIA_FP32, BLOCK_N)
        k_c = dequantise(raw_c, rope, word, 4, VIA_FP32, BLOCK_N)
        k_d = dequantise(raw_d, rope, word, 6, VIA_FP32, BLOCK_N)
        if PREFETCH:
            # The next tile travels while this one is computed on.
            bound = tl.where(tile + 1 < last, length, 0)
            word, raw_a, raw_b, raw_c, raw_d, rope = fetch(
                cache_ptr, indices_ptr, bound, tile + 1, PAGE_SIZE, PAGE_BYTES, BLOCK_N
            )
        pos = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = tl.load(indices_ptr + pos, mask=pos < length, other=-1) >= 0
        s = dot(q_a, tl.trans(k_a)) + dot(q_b, tl.trans(k_b)) + (dot(q_c, tl.trans(k_c)) + dot(q_d, tl.trans(k_d)))
        s = tl.where(valid[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # The tile, and all before it, may hold no valid key: -inf minus -inf would be NaN.
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_ref[:, None])
        alpha = tl.exp2(m - m_ref)
        weight = weight * alpha[:, None] + p
        m = m_new
        p = p.to(tl.bfloat16)
        acc_a = dot_acc(p, k_a, acc_a * alpha[:, None])
        acc_b = dot_acc(p, k_b, acc_b * alpha[:, None])
        acc_c = dot_acc(p, k_c, acc_c * alpha[:, None])
        acc_d = dot_acc(p, k_d, acc_d * alpha[:, None])
    return m, weight, acc_a, acc_b, acc_c, acc_d


@triton.jit
def store_quarters(ptr, mask, factor, acc_a, acc_b, acc_c, acc_d):
    """Store the four accumulators times ``factor`` at row pointers ``ptr``, in the pointer's type."""
    dtype = ptr.dtype.element_ty
    dim = tl.arange(0, 128)[None, :]
    tl.store(ptr[:, None] + dim, (acc_a * factor[:, None]).to(dtype), mask=mask[:, None])
    tl.store(ptr[:, None] + 128 + dim, (acc_b * factor[:, None]).to(dtype), mask=mask[:, None])
    tl.store(ptr[:, None] + 256 + dim, (acc_c * factor[:, None]).to(dtype), mask=mask[:, None])
    tl.store(ptr[:, None] + 384 + dim, (acc_d * factor[:, None]).to(dtype), mask=mask[:, None])


@triton.jit
def sink_weight(sink_ptr, head, mask, m_ref, HAS_SINK: tl.constexpr):
    """What the sink adds to a softmax denominator that is expressed relative to ``2**m_ref``."""
    if HAS_SINK:
        sink = tl.load(sink_ptr + head, mask=mask, other=float("-inf")).to(tl.float32)
        return tl.exp2(sink * LOG2E - m_ref)
    else:
        return m_ref * 0.0


# SGLang passes slices of its lengths, aligned or not; without the last argument each case would be a binary of its own.
@triton.jit(do_not_specialize=["heads", "splits"], do_not_specialize_on_alignment=["length_ptr", "extra_length_ptr"])
def decode_fwd_kernel(
    q_ptr,
    cache_ptr,
    indices_ptr,
    length_ptr,
    extra_cache_ptr,
    extra_indices_ptr,
    extra_length_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    scale_log2,
    q_row_stride,
    q_head_stride,
    indices_stride,
    extra_indices_stride,
    width,
    extra_width,
    heads,
    splits,
    PAGE_SIZE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_BYTES: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTH: tl.constexpr,
    HAS_SINK: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    VIA_FP32: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, splits, head blocks). Partials are ``[rows, splits, heads, 512]``, their LSE (base 2) fp32."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head_block = tl.program_id(2)

    length, tiles = live_tiles(length_ptr, row, width, BLOCK_N, HAS_LENGTH)
    total = tiles
    if HAS_EXTRA:
        extra_length, extra_tiles = live_tiles(extra_length_ptr, row, extra_width, BLOCK_N, HAS_EXTRA_LENGTH)
        total += extra_tiles
    chunk, live = share(total, splits, MIN_TILES)
    if PDL:
        launch_dependents()
    if split >= live:
        return
    first = split * chunk
    last = tl.minimum(first + chunk, total)

    head = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = head < heads
    q_row = (q_ptr + row * q_row_stride + head * q_head_stride)[:, None] + tl.arange(0, 128)[None, :]
    query = (
        tl.load(q_row, mask=mask[:, None], other=0.0),
        tl.load(q_row + 128, mask=mask[:, None], other=0.0),
        tl.load(q_row + 256, mask=mask[:, None], other=0.0),
        tl.load(q_row + 384, mask=mask[:, None], other=0.0),
    )
    zero = tl.zeros([BLOCK_H, 128], tl.float32)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    state = (m, tl.zeros([BLOCK_H, BLOCK_N], tl.float32), zero, zero, zero, zero)
    state = attend(
        state,
        query,
        cache_ptr,
        indices_ptr + row * indices_stride,
        length,
        tl.minimum(first, tiles),
        tl.minimum(last, tiles),
        scale_log2,
        PAGE_SIZE,
        PAGE_BYTES,
        BLOCK_N,
        VIA_FP32,
        PREFETCH,
    )
    if HAS_EXTRA:
        state = attend(
            state,
            query,
            extra_cache_ptr,
            extra_indices_ptr + row * extra_indices_stride,
            extra_length,
            tl.maximum(first - tiles, 0),
            tl.maximum(last - tiles, 0),
            scale_log2,
            EXTRA_PAGE_SIZE,
            EXTRA_PAGE_BYTES,
            BLOCK_N,
            VIA_FP32,
            PREFETCH,
        )
    m, weight, acc_a, acc_b, acc_c, acc_d = state
    weight = tl.sum(weight, 1)
    empty = weight == 0.0
    m_ref = tl.where(empty, 0.0, m)
    out_row = out_ptr + (row * heads + head) * HEAD_DIM
    if live == 1:
        total_weight = weight + sink_weight(sink_ptr, head, mask, m_ref, HAS_SINK)
        factor = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total_weight))
        store_quarters(out_row, mask, factor, acc_a, acc_b, acc_c, acc_d)
    else:
        divisor = tl.where(empty, 1.0, weight)
        partial_row = partial_ptr + ((row * splits + split) * heads + head) * HEAD_DIM
        store_quarters(partial_row, mask, 1.0 / divisor, acc_a, acc_b, acc_c, acc_d)
        lse = tl.where(empty, float("-inf"), m_ref + tl.log2(divisor))
        tl.store(lse_ptr + (row * splits + split) * heads + head, lse, mask=mask)
        if FUSED:
            # The barrier orders every thread's stores before the one thread's atomic; acq_rel publishes them.
            tl.debug_barrier()
            counter = counter_ptr + row * tl.num_programs(2) + head_block
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == live - 1:
                merge_heads(
                    partial_ptr, lse_ptr, sink_ptr, out_row, row, head, mask, live, heads, splits, HAS_SINK, BLOCK_H
                )
                tl.store(counter, 0)


@triton.jit
def merge_heads(
    partial_ptr,
    lse_ptr,
    sink_ptr,
    out_row,
    row,
    head,
    mask,
    live,
    heads,
    splits,
    HAS_SINK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Merge the ``live`` partials of one head block into ``out_row``."""
    base = row * splits * heads + head
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for split in range(live):
        m = tl.maximum(m, tl.load(lse_ptr + base + split * heads, mask=mask, other=float("-inf"), cache_modifier=".cg"))
    empty = m == float("-inf")
    m_ref = tl.where(empty, 0.0, m)
    weight_sum = sink_weight(sink_ptr, head, mask, m_ref, HAS_SINK)
    acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)
    dim = tl.arange(0, HEAD_DIM)
    for split in tl.range(0, live, loop_unroll_factor=4):
        lse = tl.load(lse_ptr + base + split * heads, mask=mask, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(lse - m_ref)
        weight_sum += weight
        source = partial_ptr + (base + split * heads) * HEAD_DIM
        value = tl.load(source[:, None] + dim[None, :], mask=mask[:, None], other=0.0, cache_modifier=".cg")
        acc += value.to(tl.float32) * weight[:, None]
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, weight_sum))
    value = (acc * inverse[:, None]).to(out_row.dtype.element_ty)
    tl.store(out_row[:, None] + dim[None, :], value, mask=mask[:, None])


@triton.jit(do_not_specialize=["heads", "splits"], do_not_specialize_on_alignment=["length_ptr", "extra_length_ptr"])
def merge_kernel(
    length_ptr,
    extra_length_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    width,
    extra_width,
    heads,
    splits,
    HAS_LENGTH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENGTH: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge ``BLOCK_D`` dims of the partials of one (row, head); a row that needed one split was written by it."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, total = live_tiles(length_ptr, row, width, BLOCK_N, HAS_LENGTH)
    if HAS_EXTRA:
        _, extra_tiles = live_tiles(extra_length_ptr, row, extra_width, BLOCK_N, HAS_EXTRA_LENGTH)
        total += extra_tiles
    _, live = share(total, splits, MIN_TILES)
    if PDL:
        wait_for_primary()
    if live == 1:
        return
    split = tl.arange(0, BLOCK_S)
    valid = split < live
    source = (row * splits + split) * heads + head
    dim = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + source, mask=valid, other=float("-inf"))
    partial = tl.load(partial_ptr + source[:, None] * HEAD_DIM + dim[None, :], mask=valid[:, None], other=0.0)
    m = tl.max(lse, 0)
    empty = m == float("-inf")
    m_ref = tl.where(empty, 0.0, m)
    weight = tl.exp2(lse - m_ref)
    weight_sum = tl.sum(weight, 0) + sink_weight(sink_ptr, head, True, m_ref, HAS_SINK)
    acc = tl.sum(partial.to(tl.float32) * weight[:, None], 0)
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, weight_sum))
    tl.store(out_ptr + (row * heads + head) * HEAD_DIM + dim, (acc * inverse).to(out_ptr.dtype.element_ty))


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    entry: dict,
    sms: int,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """Run ``entry`` of ``configs/decode.<arch>.json`` on a GPU with ``sms`` multiprocessors; see ``naive`` for shapes.

    ``counters`` is zeroed int32 of at least ``rows * head_blocks``, left zeroed; without it a second kernel merges.
    Every buffer's shape follows from the shapes of the arguments, never from lengths.
    """
    rows, _, heads, dim = q.shape
    block_h, block_n = entry["block_h"], entry["block_n"]
    head_blocks = triton.cdiv(heads, block_h)
    width = indices.shape[-1]
    extra_width = 0 if extra_indices is None else extra_indices.shape[-1]
    splits = split_count(rows * head_blocks, entry, sms)
    # With one split nothing is merged; the same binary serves.
    fused = entry["merge"] == "fused" and counters is not None
    fused = fused and (splits == 1 or counters.numel() >= rows * head_blocks)

    # Without splits nothing is merged, so nothing depends on an early launch.
    pdl = entry["pdl"] and splits > 1 and not fused and q.is_cuda

    out = q.new_empty((rows, 1, heads, dim))
    dtype = torch.bfloat16 if entry["partials"] == "bf16" else torch.float32
    partial = q.new_empty((rows, splits, heads, dim) if splits > 1 else (1,), dtype=dtype)
    lse = q.new_empty((rows, splits, heads) if splits > 1 else (1,), dtype=torch.float32)
    k_cache = k_cache.view(torch.float8_e4m3fn)  # SGLang's pool may call its bytes uint8
    has_extra = extra_k_cache is not None
    extra_cache = extra_k_cache.view(torch.float8_e4m3fn) if has_extra else k_cache
    flags = {
        "HAS_LENGTH": topk_length is not None,
        "HAS_EXTRA": has_extra,
        "HAS_EXTRA_LENGTH": extra_topk_length is not None,
        "HAS_SINK": attn_sink is not None,
    }
    decode_fwd_kernel[(rows, splits, head_blocks)](
        q,
        k_cache,
        indices,
        topk_length,
        extra_cache,
        extra_indices,
        extra_topk_length,
        attn_sink,
        out,
        partial,
        lse,
        counters if fused else None,
        softmax_scale * math.log2(math.e),
        q.stride(0),
        q.stride(2),
        indices.stride(0),
        extra_indices.stride(0) if has_extra else 0,
        width,
        extra_width,
        heads,
        splits,
        PAGE_SIZE=k_cache.shape[1],
        PAGE_BYTES=k_cache.stride(0),
        EXTRA_PAGE_SIZE=extra_cache.shape[1],
        EXTRA_PAGE_BYTES=extra_cache.stride(0),
        FUSED=fused,
        BLOCK_H=block_h,
        BLOCK_N=block_n,
        MIN_TILES=entry["min_tiles"],
        VIA_FP32=entry["via_fp32"],
        PREFETCH=entry["prefetch"],
        PDL=pdl,
        num_warps=entry["num_warps"],
        num_stages=1,
        maxnreg=entry["maxnreg"],
        **flags,
    )
    if splits > 1 and not fused:
        merge_kernel[(rows, heads, dim // entry["merge_dims"])](
            topk_length,
            extra_topk_length,
            attn_sink,
            out,
            partial,
            lse,
            width,
            extra_width,
            heads,
            splits,
            BLOCK_N=block_n,
            MIN_TILES=entry["min_tiles"],
            BLOCK_S=merge_block(entry["max_splits"]),
            BLOCK_D=entry["merge_dims"],
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
            **flags,
        )
    return out


def split_count(blocks: int, entry: dict, sms: int) -> int:
    """Splits per row: as many as one wave of programs holds for ``blocks`` = rows x head blocks.

    The width of the index lists has no say, so neither time nor workspace grows with the configured maximum. Workspace:
    ``rows * splits * heads * (512 * bytes per partial + 4)`` bytes.
    """
    return max(1, min(sms * entry["ctas_per_sm"] // blocks, entry["max_splits"]))


def merge_block(splits: int) -> int:
    """Width of the merge kernel's tile: a power of two that holds all ``splits`` partials at once."""
    return max(triton.next_power_of_2(splits), 2)
