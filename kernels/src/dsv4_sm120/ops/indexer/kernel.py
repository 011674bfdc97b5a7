"""Indexer logits and exact top-k, in two launches per call.

A logit becomes an order-preserving unsigned key; key 0 means "no token". Two forms, chosen by the number of rows alone:

dense (few rows)
    ``dense_logits_kernel`` stores the row's keys by position, and the largest key of each of 1.5 to 4 k groups.
    ``dense_topk_kernel``: the k-th largest of the group maxima bounds the k-th largest key from below, because each of
    those k groups holds a key that large. Each program keeps the keys of its pages that reach the bound (little more
    than k of them in all); the program of a row that finishes last selects from what was kept.
merge (many rows)
    ``merge_logits_kernel`` goes through its part of a row in chunks, keeps what beats the k-th best so far, and drops
    all but the k best when its list fills up. ``merge_topk_kernel`` selects among the splits' lists.

A row of at most k tokens needs no logits: the first kernel writes all its slots. A row of at most 8 k tokens is scored
by position in both forms, and one program of the second kernel selects from its keys.
"""

import triton
import triton.language as tl

from dsv4_sm120.triton_utils import INTERPRETED

PAGE = tl.constexpr(64)
HEADS = tl.constexpr(64)
DIM = tl.constexpr(128)
PAGE_BYTES = tl.constexpr(64 * 132)
PAGE_WORDS = tl.constexpr(64 * 132 // 4)
SCALE_WORD = tl.constexpr(64 * 128 // 4)

OCTAVE = tl.constexpr(1 << 23)
"""Keys of positive logits this far apart differ by a factor of two."""
UNKNOWN = tl.constexpr(0x7FFFFFFF)

# One binary, whatever these are: SGLang passes slices of its metadata, aligned or not, and what the start has not
# compiled would be compiled while serving.
STRIDES = ["page_stride", "out_stride", "raw_stride", "max_pages", "splits"]
SLICES = ["seq_lens", "page_table", "out", "raw"]


@triton.jit
def _order_key(logit):
    """fp32 -> uint32 that sorts the same way, never 0. Both zeros are equal."""
    bits = logit.to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    key = tl.where(logit == 0.0, 0x80000000, key)
    return tl.maximum(key, 1)


@triton.jit
def _pack(key, position):
    """Key and position as one uint64, 0 where the key is."""
    low = (position.to(tl.uint32) ^ 0xFFFFFFFF).to(tl.uint64)
    return tl.where(key != 0, (key.to(tl.uint64) << 32) | low, 0)


@triton.jit
def _unpack(packed):
    return (packed >> 32).to(tl.uint32), (packed.to(tl.uint32) ^ 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _bit_length(x):
    """Bits needed for the unsigned scalar ``x``; one too many at most, and exact below 2**24."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def _first_shift(span, BINS: tl.constexpr):
    BITS: tl.constexpr = BINS.bit_length() - 1
    return tl.maximum(_bit_length(span) - BITS, 0)


@triton.jit
def _count(keys, lo, shift, BINS: tl.constexpr):
    """Histogram over ``BINS`` bins of width ``2**shift`` from ``lo``; the first and last take what lies beyond."""
    digit = (tl.maximum(keys, lo) - lo) >> shift.to(tl.uint32)
    return tl.histogram(tl.minimum(digit, BINS - 1).to(tl.int32), BINS)


@triton.jit
def _narrow(counts, total, k, start, lo, shift, sure, reach, SLACK: tl.constexpr, BINS: tl.constexpr):
    """From a histogram of ``total`` keys to the bin of the k-th largest: the next ``(lo, shift, sure, reach)``.

    ``start``: a value that at least ``k`` keys reach. ``sure``: whether that holds for ``lo`` too. ``reach``: how many
    keys reach ``lo``, or ``UNKNOWN``. The new ``shift`` is -1 when ``lo`` will do.
    """
    BITS: tl.constexpr = BINS.bit_length() - 1
    bins = tl.arange(0, BINS)
    upward = total - tl.cumsum(counts, 0) + counts  # A reversed scan costs two more passes of shuffles.
    enough = (upward >= k) & (bins > 0)
    chosen = tl.max(tl.where(enough, bins, 0), 0)
    reach = tl.where(chosen > 0, tl.min(tl.where(enough, upward, UNKNOWN), 0), reach)
    missed = (chosen == 0) & (sure == 0)
    done = (reach <= k + SLACK) | (shift == 0)
    width = ((lo * 0) + 1) << shift.to(tl.uint32)
    below = _first_shift(lo + width - start, BINS)  # Missed: look between the start and the end of the first bin.
    shift = tl.where(missed, below, tl.where(done, -1, tl.maximum(shift - BITS, 0)))
    lo = tl.where(missed, start, lo + chosen.to(tl.uint32) * width)
    return lo, shift, 1, reach


@triton.jit
def _bound(keys, k, start, WINDOW: tl.constexpr, SLACK: tl.constexpr, BINS: tl.constexpr):
    """``(bound, reach)``: ``reach`` of the ``keys`` are at least ``bound``, between ``k`` and ``k + SLACK`` of them.

    If the k-th largest key has more equals than that, the bound is that key, and ``reach`` more, or ``UNKNOWN``.
    At least ``k`` keys must reach ``start >= 1``. The search begins ``WINDOW`` keys below the largest; each round
    divides the interval that holds the k-th by ``BINS``.
    """
    top = tl.max(keys, 0)
    lo = tl.maximum(start, top - tl.minimum(top, WINDOW))
    shift = _first_shift(top - lo, BINS)
    sure = (lo == start).to(tl.int32)
    reach = UNKNOWN + 0 * shift
    while shift >= 0:
        counts = _count(keys, lo, shift, BINS)
        lo, shift, sure, reach = _narrow(counts, keys.shape[0], k, start, lo, shift, sure, reach, SLACK, BINS)
    return lo, reach


@triton.jit
def _best(keys, position, start, K: tl.constexpr, BINS: tl.constexpr):
    """``(mask, bar)``: the ``K`` largest keys, lower positions first among equals, and what a later key must exceed."""
    bound, reach = _bound(keys, K, start, 8 * OCTAVE - 64, 0, BINS)
    falling = position.to(tl.uint32) ^ 0xFFFFFFFF  # Rises as the position falls.
    floor = tl.full((), 0, tl.uint32)
    bar = bound - 1
    if reach > K:
        missing = K - tl.sum((keys > bound).to(tl.int32), 0)
        one = tl.full((), 1, tl.uint32)
        floor, _ = _bound(tl.where(keys == bound, falling, 0), missing, one, 8 * OCTAVE - 64, 0, BINS)
        bar = bound
    return (keys > bound) | ((keys == bound) & (falling >= floor)), bar


@triton.jit
def _slots(position, live, page_row):
    return tl.load(page_row + position // PAGE, mask=live, other=0) * PAGE + position % PAGE


@triton.jit
def _write_all(length, page_row, out_row, raw_row, K: tl.constexpr, HAS_RAW: tl.constexpr):
    position = tl.arange(0, K)
    live = position < length
    tl.store(out_row + position, tl.where(live, _slots(position, live, page_row), -1))
    if HAS_RAW:
        tl.store(raw_row + position, tl.where(live, position, -1))


@triton.jit
def _select(
    keys,
    position,
    start,
    page_row,
    out_row,
    raw_row,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    BINS: tl.constexpr,
):
    """Write the slots of the ``K`` best, in tile order. At least ``K`` keys reach ``start``."""
    if keys.shape[0] <= 4 * K:
        # Loaded for all, before the search, which hides the latency.
        slot = _slots(position, keys != 0, page_row)
        best, _ = _best(keys, position, start, K, BINS)
    else:
        # A large tile has no registers to spare.
        best, _ = _best(keys, position, start, K, BINS)
        slot = _slots(position, best, page_row)
    index = tl.cumsum(best.to(tl.int32), 0) - 1
    tl.store(out_row + index, slot, mask=best)
    if HAS_RAW:
        tl.store(raw_row + index, position, mask=best)


@triton.jit
def _select_row(
    key_row,
    length,
    page_row,
    out_row,
    raw_row,
    TILE: tl.constexpr,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    BINS: tl.constexpr,
):
    """Select from a row of at most ``TILE`` keys stored by position."""
    position = tl.arange(0, TILE)
    keys = tl.load(key_row + position, mask=position < length, other=0)
    _select(keys, position, tl.full((), 1, tl.uint32), page_row, out_row, raw_row, K, HAS_RAW, BINS)


@triton.jit
def _select_segments(
    base,
    counts,
    stride,
    width,
    segments,
    page_row,
    out_row,
    raw_row,
    TILE: tl.constexpr,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    BINS: tl.constexpr,
):
    """Select from ``segments`` lists, ``width`` (a power of two) apart in the tile and ``stride`` apart in memory."""
    flat = tl.arange(0, TILE)
    segment = flat // width
    offset = flat % width
    inside = segment < segments
    count = tl.load(counts + segment, mask=inside, other=0)
    keys, position = _unpack(tl.load(base + segment * stride + offset, mask=inside & (offset < count), other=0))
    _select(keys, position, tl.full((), 1, tl.uint32), page_row, out_row, raw_row, K, HAS_RAW, BINS)


@triton.jit
def _load_query(q, weights, row):
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    query = tl.load(q + row.to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM + dim[None, :])
    return query, tl.load(weights + row * HEADS + head)


@triton.jit
def _page_ids(page_row, step, pages, PAGES: tl.constexpr):
    """Ids of the ``PAGES`` (1 or 2) pages of a step, as a pair; past the last page, the last one's."""
    first = tl.load(page_row + tl.minimum(step * PAGES, pages - 1))
    if PAGES == 1:
        return first, first
    else:
        return first, tl.load(page_row + tl.minimum(step * PAGES + 1, pages - 1))


@triton.jit
def _scores(k, query):
    """fp32 ``[tokens, heads]``."""
    if INTERPRETED:
        return tl.dot(k.to(tl.float32), query.to(tl.float32).T)  # fp8 dot, upcast: exact
    else:
        return tl.dot(k, query.T)  # fp8 dot


@triton.jit
def _step_keys(keys, scales, first, second, query, weight, step, length, PAGES: tl.constexpr):
    """Order keys ``[64 * PAGES]`` of a step's tokens, 0 from ``length`` on.

    What the cache holds past the length may be NaN; it stays in its lane and is masked by position.
    """
    lane = tl.arange(0, PAGE * PAGES)
    dim = tl.arange(0, DIM)
    page = first.to(tl.int64)
    if PAGES == 2:
        page = tl.where(lane < PAGE, page, second.to(tl.int64))
    slot = lane % PAGE
    k = tl.load(keys + (page * PAGE_BYTES + slot * DIM)[:, None] + dim[None, :])
    scale = tl.load(scales + page * PAGE_WORDS + SCALE_WORD + slot)
    logit = tl.sum(tl.maximum(_scores(k, query), 0.0) * weight[None, :], 1) * scale
    return tl.where(lane + step * (PAGE * PAGES) < length, _order_key(logit), 0)


@triton.jit
def _length(seq_lens, row, max_pages):
    return tl.minimum(tl.maximum(tl.load(seq_lens + row), 0), max_pages * PAGE)


@triton.jit
def _groups(steps, splits, K: tl.constexpr, PAGES: tl.constexpr):
    """``(programs that score, group maxima of each)``: at most 4 K groups, and more than 2 K if there are programs."""
    active = tl.minimum(steps, splits)
    each = 1 << (_bit_length(4 * K // active) - 1)
    return active, tl.minimum(each, PAGE * PAGES)


@triton.jit(do_not_specialize=[*STRIDES, "row_keys"], do_not_specialize_on_alignment=SLICES)
def dense_logits_kernel(
    q,
    keys,
    scales,
    weights,
    seq_lens,
    page_table,
    out,
    raw,
    row_key,
    row_max,
    arrived,
    page_stride,
    out_stride,
    raw_stride,
    max_pages,
    splits,
    row_keys,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    PAGES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keys of one split of one row, by position, and its group maxima. Grid: (rows, splits)."""
    if PDL and not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    split = tl.program_id(1)
    page_row = page_table + row.to(tl.int64) * page_stride
    # All loads that do not wait for the length are issued with it.
    first, second = _page_ids(page_row, split, max_pages, PAGES)
    query, weight = _load_query(q, weights, row)
    length = _length(seq_lens, row, max_pages)
    if split == 0:
        tl.store(arrived + row, 0)
    if length <= K:
        if split == 0:
            out_row = out + row.to(tl.int64) * out_stride
            _write_all(length, page_row, out_row, raw + row.to(tl.int64) * raw_stride, K, HAS_RAW)
        return
    pages = tl.cdiv(length, PAGE)
    steps = tl.cdiv(pages, PAGES)
    if split >= steps:
        return
    WIDTH: tl.constexpr = PAGE * PAGES
    lane = tl.arange(0, WIDTH)
    key_row = row_key + row.to(tl.int64) * row_keys
    largest = tl.zeros((WIDTH,), tl.uint32)
    if PAGES == 2:
        second = tl.where(split * PAGES + 1 < pages, second, first)
    for step in tl.range(split, steps, splits, num_stages=STAGES):
        # One step ahead: the page ids must be there when the loads of their keys are issued.
        next_first, next_second = _page_ids(page_row, step + splits, pages, PAGES)
        key = _step_keys(keys, scales, first, second, query, weight, step, length, PAGES)
        tl.store(key_row + step * WIDTH + lane, key)
        largest = tl.maximum(largest, key)
        first = next_first
        second = next_second
    if length > 8 * K:
        _, each = _groups(steps, splits, K, PAGES)
        group_max = row_max + row * (4 * K) + split * each
        for bits in tl.static_range(1, 7 + PAGES // 2):
            if each == 1 << bits:
                maxima = tl.max(tl.reshape(largest, (1 << bits, PAGE * PAGES // (1 << bits))), 1)
                tl.store(group_max + tl.arange(0, 1 << bits), maxima)


@triton.jit
def _select_exact(
    key_row,
    length,
    page_row,
    out_row,
    raw_row,
    TILE: tl.constexpr,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    BINS: tl.constexpr,
):
    """As ``_select_row`` for a row of any length, reading its keys again in every round."""
    lane = tl.arange(0, TILE)
    start = tl.full((), 1, tl.uint32)
    lo = start
    total = tl.cdiv(length, TILE) * TILE
    shift = _first_shift(lo ^ 0xFFFFFFFF, BINS)
    sure = 1
    reach = UNKNOWN + 0 * shift
    while shift >= 0:
        counts = tl.zeros((BINS,), tl.int32)
        for first in range(0, length, TILE):
            position = first + lane
            counts += _count(tl.load(key_row + position, mask=position < length, other=0), lo, shift, BINS)
        lo, shift, sure, reach = _narrow(counts, total, K, start, lo, shift, sure, reach, 0, BINS)
    bar = lo - (reach <= K).to(tl.uint32)
    missing = K
    for first in range(0, length, TILE):
        position = first + lane
        missing -= tl.sum((tl.load(key_row + position, mask=position < length, other=0) > bar).to(tl.int32), 0)
    written = 0
    for first in range(0, length, TILE):
        position = first + lane
        key = tl.load(key_row + position, mask=position < length, other=0)
        equal = (key == bar) & (key != 0)
        taken = (key > bar) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
        missing -= tl.sum(equal.to(tl.int32), 0)
        index = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out_row + index, _slots(position, taken, page_row), mask=taken)
        if HAS_RAW:
            tl.store(raw_row + index, position, mask=taken)
        written += tl.sum(taken.to(tl.int32), 0)


@triton.jit(do_not_specialize=[*STRIDES, "row_keys"], do_not_specialize_on_alignment=SLICES)
def dense_topk_kernel(
    seq_lens,
    page_table,
    out,
    raw,
    row_key,
    row_max,
    arrived,
    kept,
    kept_count,
    page_stride,
    out_stride,
    raw_stride,
    max_pages,
    splits,
    row_keys,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select from what ``dense_logits_kernel`` with ``splits`` and ``PAGES`` stored. Grid: (rows, SPLITS)."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    length = _length(seq_lens, row, max_pages)
    if PDL and not INTERPRETED:
        # On every path: this kernel must not end before the first one has.
        tl.extra.cuda.gdc_wait()
    if length <= K:
        return
    page_row = page_table + row.to(tl.int64) * page_stride
    out_row = out + row.to(tl.int64) * out_stride
    raw_row = raw + row.to(tl.int64) * raw_stride
    key_row = row_key + row.to(tl.int64) * row_keys
    if length <= 8 * K:
        if split == 0:
            if length <= 4 * K:
                _select_row(key_row, length, page_row, out_row, raw_row, 4 * K, K, HAS_RAW, BINS)
            else:
                _select_row(key_row, length, page_row, out_row, raw_row, 8 * K, K, HAS_RAW, BINS)
        return

    CAP: tl.constexpr = 8 * K // SPLITS
    group = tl.arange(0, 4 * K)
    lane = tl.arange(0, TILE)
    pages = tl.cdiv(length, PAGE)
    active, each = _groups(tl.cdiv(pages, PAGES), splits, K, PAGES)
    maxima = tl.load(row_max + row * (4 * K) + group, mask=group < active * each, other=0)
    # Pages go round the programs, so that a run of good tokens is spread over them.
    position = (lane // PAGE * SPLITS + split) * PAGE + lane % PAGE
    key = tl.load(key_row + position, mask=position < length, other=0)
    bound, _ = _bound(maxima, K, tl.full((), 1, tl.uint32), 2 * OCTAVE - 64, K // 4, BINS)
    count = 0
    kept_row = kept + row * (SPLITS * CAP)
    kept_split = kept_row + split * CAP
    for _ in range(split * PAGE, length, TILE * SPLITS):
        reaches = key >= bound
        index = count + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(kept_split + index, _pack(key, position), mask=reaches & (index < CAP))
        count += tl.sum(reaches.to(tl.int32), 0)
        position += TILE * SPLITS
        key = tl.load(key_row + position, mask=position < length, other=0)
    rest = tl.arange(0, CAP)
    tl.store(kept_split + rest, tl.zeros((CAP,), tl.uint64), mask=rest >= count)
    tl.store(kept_count + row * SPLITS + split, count)
    tl.debug_barrier()
    if SPLITS > 1:
        # Releases this program's stores and acquires those of the programs that came before.
        before = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
        if before != SPLITS - 1:
            return
        tl.debug_barrier()
    # Nearly always half of each list is empty: load the other halves before it is known.
    half = group // (CAP // 2) * CAP + group % (CAP // 2)
    few, few_at = _unpack(tl.load(kept_row + half, cache_modifier=".cg"))
    most = tl.max(tl.load(kept_count + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg"), 0)
    if most <= CAP // 2:
        _select(few, few_at, bound, page_row, out_row, raw_row, K, HAS_RAW, BINS)
    elif most <= CAP:
        many, many_at = _unpack(tl.load(kept_row + tl.arange(0, 8 * K), cache_modifier=".cg"))
        _select(many, many_at, bound, page_row, out_row, raw_row, K, HAS_RAW, BINS)
    else:
        # Only when thousands of keys reach the bound: long runs of equal logits.
        _select_exact(key_row, length, page_row, out_row, raw_row, 4 * K, K, HAS_RAW, BINS)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SLICES)
def merge_logits_kernel(
    q,
    keys,
    scales,
    weights,
    seq_lens,
    page_table,
    out,
    raw,
    row_key,
    chunk,
    kept,
    kept_count,
    page_stride,
    out_stride,
    raw_stride,
    max_pages,
    splits,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    PAGES: tl.constexpr,
    STAGES: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The ``K`` best of one split of one row; of a row of at most ``8 * K`` tokens, all keys. Grid: (rows, splits)."""
    if PDL and not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    split = tl.program_id(1)
    page_row = page_table + row.to(tl.int64) * page_stride
    query, weight = _load_query(q, weights, row)
    length = _length(seq_lens, row, max_pages)
    if length <= K:
        if split == 0:
            out_row = out + row.to(tl.int64) * out_stride
            _write_all(length, page_row, out_row, raw + row.to(tl.int64) * raw_stride, K, HAS_RAW)
        return
    pages = tl.cdiv(length, PAGE)
    steps = tl.cdiv(pages, PAGES)
    begin = split * steps // splits
    end = (split + 1) * steps // splits
    if begin >= end:
        return
    WIDTH: tl.constexpr = PAGE * PAGES
    CHUNK: tl.constexpr = 2 * K
    lane = tl.arange(0, WIDTH)
    by_position = length <= 8 * K
    segment = row * splits + split
    kept_split = kept + segment.to(tl.int64) * (4 * K)
    chunk_split = chunk + segment.to(tl.int64) * CHUNK
    target = chunk_split
    per_chunk = CHUNK // WIDTH
    if by_position:
        target = row_key + row.to(tl.int64) * (8 * K) + begin * WIDTH
        per_chunk = end - begin
    count = 0
    bar = tl.full((), 0, tl.uint32)
    first, second = _page_ids(page_row, begin, pages, PAGES)
    while begin < end:
        stop = tl.minimum(end, begin + per_chunk)
        for step in tl.range(begin, stop, num_stages=STAGES):
            next_first, next_second = _page_ids(page_row, step + 1, pages, PAGES)
            key = _step_keys(keys, scales, first, second, query, weight, step, length, PAGES)
            tl.store(target + (step - begin) * WIDTH + lane, key)
            first = next_first
            second = next_second
        if by_position == 0:
            tl.debug_barrier()
            offset = tl.arange(0, CHUNK)
            new = tl.load(chunk_split + offset, mask=offset < (stop - begin) * WIDTH, other=0)
            better = new > bar
            index = count + tl.cumsum(better.to(tl.int32), 0) - 1
            tl.store(kept_split + index, _pack(new, offset + begin * WIDTH), mask=better)
            count += tl.sum(better.to(tl.int32), 0)
            tl.debug_barrier()
            if count > tl.where(stop < end, CHUNK, K):
                entry = tl.arange(0, 4 * K)
                packed = tl.load(kept_split + entry, mask=entry < count, other=0)
                old, position = _unpack(packed)
                best, bar = _best(old, position, tl.maximum(bar, 1), K, BINS)
                tl.debug_barrier()
                tl.store(kept_split + tl.cumsum(best.to(tl.int32), 0) - 1, packed, mask=best)
                tl.debug_barrier()
                count = tl.minimum(count, K)
        begin = stop
    if by_position == 0:
        tl.store(kept_count + segment, count)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SLICES)
def merge_topk_kernel(
    seq_lens,
    page_table,
    out,
    raw,
    row_key,
    kept,
    kept_count,
    page_stride,
    out_stride,
    raw_stride,
    max_pages,
    splits,
    K: tl.constexpr,
    HAS_RAW: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select among what ``merge_logits_kernel`` kept. Grid: (rows,)."""
    row = tl.program_id(0)
    length = _length(seq_lens, row, max_pages)
    if PDL and not INTERPRETED:
        # On every path: this kernel must not end before the first one has.
        tl.extra.cuda.gdc_wait()
    if length <= K:
        return
    page_row = page_table + row.to(tl.int64) * page_stride
    out_row = out + row.to(tl.int64) * out_stride
    raw_row = raw + row.to(tl.int64) * raw_stride
    key_row = row_key + row.to(tl.int64) * (8 * K)
    if length <= 4 * K:
        _select_row(key_row, length, page_row, out_row, raw_row, 4 * K, K, HAS_RAW, BINS)
    elif length <= 8 * K:
        _select_row(key_row, length, page_row, out_row, raw_row, 8 * K, K, HAS_RAW, BINS)
    else:
        _select_segments(
            kept + (row * splits).to(tl.int64) * (4 * K),
            kept_count + row * splits,
            4 * K,
            K,
            splits,
            page_row,
            out_row,
            raw_row,
            8 * K,
            K,
            HAS_RAW,
            BINS,
        )
