"""C4 indexer: FP8 MQA logits and exact top-k, at a cost that follows each row's own length.

Seams in SGLang 0.5.23 (``srt/layers/attention/dsv4/indexer.py``, ``forward_c4_indexer``)::

    logits = tilelang_fp8_paged_mqa_logits(q, kv, weights, lens, page_table, metadata, max_len, False)
    topk_transform_paged(logits, lens, page_table, out_page_indices, 64, out_raw_indices)

``indexer_logits`` takes the place of the first and ``topk_transform`` of the second, both or neither:
``indexer_logits`` only notes its arguments, and ``topk_transform``, which alone knows k, runs both kernels. To install:
bind ``sglang.kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits`` to ``indexer_logits`` (SGLang
imports that name on each call), and wrap ``sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged`` so that
``PendingLogits`` go to ``topk_transform`` and real logits to the original. Needs the top-k backend ``sgl-kernel`` and
top-k v2 off, SGLang's defaults on sm_120.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dsv4_sm120 import config, layout
from dsv4_sm120.aot import AotCase

TOPK = (512, 1024)
MAX_TOKENS = 262_144
"""Compressed tokens of the model's longest sequence, 1,048,576 positions / 4."""
MAX_PAGES = MAX_TOKENS // layout.INDEXER_PAGE_SIZE


@dataclass(frozen=True)
class PendingLogits:
    """Stands in for the logits ``[rows, max_seq_len]``, which are never written as a whole."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor


def indexer_logits(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    deep_gemm_metadata: object,
    max_seq_len: int,
    clean_logits: bool = True,
) -> PendingLogits:
    """Same arguments as SGLang's ``tilelang_fp8_paged_mqa_logits``; launches nothing.

    ``q_fp8`` e4m3 ``[rows, 1, 64, 128]``; ``kvcache_fp8`` uint8 or e4m3 ``[pages, 64, 1, 132]`` (layout in
    ``dsv4_sm120.layout``); ``weight`` fp32 ``[rows, 64]``; ``seq_lens`` int32 ``[rows]``; ``page_table`` int32
    ``[rows, pages]``. Raises ``ValueError`` for other shapes or dtypes and for ``clean_logits=True``.
    """
    rows = q_fp8.shape[0]
    heads, dim, page = layout.INDEXER_HEADS, layout.INDEXER_DIM, layout.INDEXER_PAGE_SIZE
    _require(tuple(q_fp8.shape) == (rows, 1, heads, dim), "q shape", tuple(q_fp8.shape), (rows, 1, heads, dim))
    _require(q_fp8.dtype == torch.float8_e4m3fn, "q dtype", q_fp8.dtype, torch.float8_e4m3fn)
    _require(
        tuple(kvcache_fp8.shape[1:]) == (page, 1, dim + 4), "cache shape", tuple(kvcache_fp8.shape), "[*,64,1,132]"
    )
    _require(kvcache_fp8.element_size() == 1, "cache dtype", kvcache_fp8.dtype, "one byte per element")
    _require(tuple(weight.shape) == (rows, heads), "weight shape", tuple(weight.shape), (rows, heads))
    _require(weight.dtype == torch.float32, "weight dtype", weight.dtype, torch.float32)
    _require(tuple(seq_lens.shape) == (rows,), "seq_lens shape", tuple(seq_lens.shape), (rows,))
    _require(not clean_logits, "clean_logits", clean_logits, False)
    return PendingLogits(q_fp8.contiguous(), kvcache_fp8, weight.contiguous())


def topk_transform(
    scores: PendingLogits,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Same arguments as SGLang's ``topk_transform_paged``, with the logits of ``indexer_logits`` as ``scores``.

    Writes, for each row, the slots ``page_table[p // 64] * 64 + p % 64`` of the ``k`` positions ``p`` with the largest
    logits into ``out_page_indices`` int32 ``[rows, k]``, k = 512 or 1024, -1 past the row's length, and the positions
    themselves into ``out_raw_indices``. Of equal logits the lower position wins; the result, its order included, is the
    same on every run. Lengths above 262,144 count as 262,144. Raises ``TypeError`` for real logits, ``ValueError`` for
    shapes that it does not take.
    """
    if not isinstance(scores, PendingLogits):
        raise TypeError(
            f"topk_transform got {type(scores).__name__}, wants the PendingLogits of indexer_logits: "
            "the two hooks must be installed together"
        )
    rows, k = out_page_indices.shape
    _require(k in TOPK, "k", k, TOPK)
    _require(page_size == layout.INDEXER_PAGE_SIZE, "page_size", page_size, layout.INDEXER_PAGE_SIZE)
    _require(scores.q.shape[0] == rows == seq_lens.shape[0] == page_tables.shape[0], "rows", rows, scores.q.shape[0])
    for name, tensor in (("out_page_indices", out_page_indices), ("out_raw_indices", out_raw_indices)):
        if tensor is not None:
            _require(tensor.shape == (rows, k) and tensor.stride(1) == 1, name, tuple(tensor.shape), f"rows of {k}")
            _require(tensor.dtype == torch.int32, f"{name} dtype", tensor.dtype, torch.int32)
    _require(page_tables.stride(1) == 1, "page_tables stride", page_tables.stride(), "contiguous rows")
    if rows == 0:
        return
    settings = load_settings(config.arch_of(scores.q.device.index or 0), k)
    run = _dense if rows <= settings["dense"]["max_rows"] else _merge
    step = settings["merge"]["chunk_rows"]
    for start in range(0, rows, step):
        part = slice(start, start + step)
        run(
            PendingLogits(scores.q[part], scores.kv_cache, scores.weights[part]),
            seq_lens[part],
            page_tables[part],
            out_page_indices[part],
            None if out_raw_indices is None else out_raw_indices[part],
            settings,
        )


def _require(ok: bool, what: str, seen: object, wanted: object) -> None:
    if not ok:
        raise ValueError(f"indexer: {what} is {seen}, wanted {wanted}")


def load_settings(arch: str, k: int) -> dict:
    """Launch parameters shipped for an architecture and a k."""
    return config.load("indexer", arch)[f"k={k}"]


def workspace_bytes(rows: int, k: int, arch: str) -> int:
    """Device bytes that one call needs beside its arguments. No term follows the context length.

    dense: ``rows * (4 * 262,144 + 4 * 4 k + 8 * 8 k + 4 * (1 + parts))``
    merge: ``min(rows, chunk_rows) * (4 * 8 k + splits * (4 * 2 k + 8 * 4 k + 4))``
    """
    settings = load_settings(arch, k)
    if rows <= settings["dense"]["max_rows"]:
        return rows * (4 * MAX_TOKENS + 4 * 4 * k + 8 * 8 * k + 4 * (1 + topk_splits(rows, settings)))
    rows = min(rows, settings["merge"]["chunk_rows"])
    return rows * (4 * 8 * k + merge_splits(rows, settings) * (4 * 2 * k + 8 * 4 * k + 4))


def dense_splits(rows: int, settings: dict) -> int:
    """Splits of a row in the dense form: at most ``programs`` programs for all rows; a second wave would cost more."""
    return max(1, settings["dense"]["programs"] // rows)


def topk_splits(rows: int, settings: dict) -> int:
    """Programs that share one long row in the dense form's second kernel."""
    return next((splits for limit, splits in settings["dense"]["topk"]["splits"] if rows <= limit), 1)


def merge_splits(rows: int, settings: dict) -> int:
    """Splits of a row in the merge form: at most 8, and one for prefill, where the rows alone fill the GPU."""
    return next((splits for limit, splits in settings["merge"]["splits"] if rows <= limit), 1)


def _memory(like: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    signed = torch.int64 if dtype == torch.uint64 else torch.int32
    return torch.empty(count, dtype=signed, device=like.device).view(dtype)


def _views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache as e4m3 and as fp32 words."""
    flat = kv_cache.view(kv_cache.shape[0], layout.INDEXER_PAGE_BYTES)
    return flat.view(torch.float8_e4m3fn), flat.view(torch.float32)


def _dense(
    logits: PendingLogits,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    raw: torch.Tensor | None,
    settings: dict,
) -> None:
    from . import kernel

    rows, k = out.shape
    splits, parts = dense_splits(rows, settings), topk_splits(rows, settings)
    first, second, pdl = settings["dense"]["logits"], settings["dense"]["topk"], settings["pdl"]
    row_key = _memory(out, rows * MAX_TOKENS, torch.uint32)
    row_max = _memory(out, rows * 4 * k, torch.uint32)
    arrived = _memory(out, rows, torch.int32)
    kept = _memory(out, rows * 8 * k, torch.uint64)
    kept_count = _memory(out, rows * parts, torch.int32)
    target = out if raw is None else raw
    strides = (page_table.stride(0), out.stride(0), target.stride(0), min(page_table.shape[1], MAX_PAGES))
    kernel.dense_logits_kernel[(rows, splits)](
        logits.q,
        *_views(logits.kv_cache),
        logits.weights,
        seq_lens,
        page_table,
        out,
        target,
        row_key,
        row_max,
        arrived,
        *strides,
        splits,
        MAX_TOKENS,
        K=k,
        HAS_RAW=raw is not None,
        PAGES=first["pages"],
        STAGES=first["stages"],
        PDL=pdl,
        num_warps=first["num_warps"],
    )
    kernel.dense_topk_kernel[(rows, parts)](
        seq_lens,
        page_table,
        out,
        target,
        row_key,
        row_max,
        arrived,
        kept,
        kept_count,
        *strides,
        splits,
        MAX_TOKENS,
        K=k,
        HAS_RAW=raw is not None,
        PAGES=first["pages"],
        SPLITS=parts,
        TILE=second["tile"],
        BINS=second["bins"],
        PDL=pdl,
        num_warps=second["num_warps"],
        **({"launch_pdl": True} if pdl else {}),
    )


def _merge(
    logits: PendingLogits,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    raw: torch.Tensor | None,
    settings: dict,
) -> None:
    from . import kernel

    rows, k = out.shape
    splits, pdl = merge_splits(rows, settings), settings["pdl"]
    first, second = settings["merge"]["logits"], settings["merge"]["topk"]
    row_key = _memory(out, rows * 8 * k, torch.uint32)
    chunk = _memory(out, rows * splits * 2 * k, torch.uint32)
    kept = _memory(out, rows * splits * 4 * k, torch.uint64)
    kept_count = _memory(out, rows * splits, torch.int32)
    target = out if raw is None else raw
    strides = (page_table.stride(0), out.stride(0), target.stride(0), page_table.shape[1])
    kernel.merge_logits_kernel[(rows, splits)](
        logits.q,
        *_views(logits.kv_cache),
        logits.weights,
        seq_lens,
        page_table,
        out,
        target,
        row_key,
        chunk,
        kept,
        kept_count,
        *strides,
        splits,
        K=k,
        HAS_RAW=raw is not None,
        PAGES=first["pages"],
        STAGES=first["stages"],
        BINS=first["bins"],
        PDL=pdl,
        num_warps=first["num_warps"],
    )
    kernel.merge_topk_kernel[(rows,)](
        seq_lens,
        page_table,
        out,
        target,
        row_key,
        kept,
        kept_count,
        *strides,
        splits,
        K=k,
        HAS_RAW=raw is not None,
        BINS=second["bins"],
        PDL=pdl,
        num_warps=second["num_warps"],
        **({"launch_pdl": True} if pdl else {}),
    )


def self_check(device: torch.device, k: int = TOPK[0]) -> None:
    """Compare both forms with ``naive`` on ``device``; raises ``AssertionError`` on the first difference.

    Inputs are small integers, so that logits are exact in fp32, ties are many and the answer is unique. Compiles every
    kernel that serving with this ``k`` will need.
    """
    settings = load_settings(config.arch_of(device.index or 0), k)
    for rows, _ in settings["dense"]["topk"]["splits"]:
        _compare(_dense, device, [0, k, k + 1, 9 * k + 1, *[k + 1] * (rows - 4)], k, settings)
    _compare(_merge, device, [0, k, k + 1, 9 * k + 1], k, settings)


def _compare(form: Callable, device: torch.device, lengths: list[int], k: int, settings: dict) -> None:
    """One form against ``naive``. Without raw indices, as in serving, so that it compiles what serving runs."""
    from .naive import indexer_logits as naive_logits
    from .naive import topk_transform as naive_topk

    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    rows, pages = len(lengths), -(-max(lengths) // layout.INDEXER_PAGE_SIZE)
    cache = layout.pack_indexer_k(
        integers(pages * layout.INDEXER_PAGE_SIZE, layout.INDEXER_DIM).to(torch.float8_e4m3fn),
        2.0 ** integers(pages * layout.INDEXER_PAGE_SIZE),
    ).to(device)
    q = integers(rows, 1, layout.INDEXER_HEADS, layout.INDEXER_DIM).to(torch.float8_e4m3fn).to(device)
    weights = integers(rows, layout.INDEXER_HEADS).to(device)
    table = torch.stack([torch.randperm(pages, generator=generator) for _ in range(rows)]).int().to(device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    slots, _ = naive_topk(naive_logits(q, cache, weights, counts, table), table, k)
    out = torch.full_like(slots, -7)
    form(PendingLogits(q, cache, weights), counts, table, out, None, settings)
    assert torch.equal(out.sort(1).values, slots.sort(1).values), (
        f"indexer: {form.__name__} of {rows} rows differs from naive"
    )


def aot_cases(arch: str) -> Iterator[AotCase]:
    """Every kernel in every shipped configuration."""
    from . import kernel

    types = {
        "q": "*fp8e4nv",
        "keys": "*fp8e4nv",
        "scales": "*fp32",
        "weights": "*fp32",
        "row_key": "*u32",
        "row_max": "*u32",
        "chunk": "*u32",
        "kept": "*u64",
        **dict.fromkeys(("seq_lens", "page_table", "out", "raw", "arrived", "kept_count"), "*i32"),
        **dict.fromkeys(("page_stride", "out_stride", "raw_stride", "max_pages", "splits", "row_keys"), "i32"),
    }

    def case(fn: object, launch: dict, constexprs: dict, tensor_cores: bool = True) -> AotCase:
        signature = {name: types[name] for name in fn.arg_names if name not in constexprs}
        name = f"indexer {fn.__name__} k={constexprs['K']}"
        return AotCase(
            name, fn, signature, constexprs, num_warps=launch["num_warps"], num_stages=3, tensor_cores=tensor_cores
        )

    for k in TOPK:
        settings = load_settings(arch, k)
        first, second = settings["dense"]["logits"], settings["dense"]["topk"]
        fixed = {"K": k, "HAS_RAW": False, "PAGES": first["pages"], "PDL": settings["pdl"]}
        yield case(kernel.dense_logits_kernel, first, fixed | {"STAGES": first["stages"]})
        fixed["BINS"] = second["bins"]
        for _, parts in second["splits"]:
            launch = fixed | {"SPLITS": parts, "TILE": second["tile"]}
            yield case(kernel.dense_topk_kernel, second, launch, tensor_cores=False)
        first, second = settings["merge"]["logits"], settings["merge"]["topk"]
        fixed = {"K": k, "HAS_RAW": False, "PDL": settings["pdl"]}
        scan = {"PAGES": first["pages"], "STAGES": first["stages"], "BINS": first["bins"]}
        yield case(kernel.merge_logits_kernel, first, fixed | scan)
        yield case(kernel.merge_topk_kernel, second, fixed | {"BINS": second["bins"]}, tensor_cores=False)
