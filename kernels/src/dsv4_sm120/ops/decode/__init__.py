"""Sparse-MLA decode (and, with rows = tokens, prefill) over SGLang's V4 FP8 cache, read in place at any page size."""

import functools
import itertools
from collections.abc import Iterator

import torch

from dsv4_sm120 import config, layout
from dsv4_sm120.aot import AotCase

from . import naive

HEADS = (8, 16, 32, 64, 128)
COUNTERS = 4096
"""Arrival counters per device: rows x head blocks of the largest call that still splits rows."""


def flash_mla_with_kvcache_sm120(**kwargs) -> tuple[torch.Tensor, None]:
    """Replaces SGLang's function of this name; keywords as in its call in ``deepseek_v4_backend.py``.

    ``q`` bf16 ``[rows, 1, heads, 512]`` 8 to 128 heads; ``k_cache`` e4m3 ``[pages, page_size, 1, 584]``,
    see ``dsv4_sm120.layout``; ``indices`` int32 ``[rows, 1, width]``, -1 = invalid; ``topk_length`` int32 ``[rows]``;
    ``attn_sink`` fp32 ``[heads]``; the ``extra_*`` ones likewise, or None. Returns (bf16 ``[rows, 1, heads, 512]``,
    None): the caller does not read the log-sum-exp. Raises ``ValueError`` on any other layout.
    """
    return sparse_mla_decode(
        kwargs["q"],
        kwargs["k_cache"],
        kwargs["indices"],
        kwargs.get("topk_length"),
        kwargs.get("attn_sink"),
        kwargs.get("softmax_scale") or kwargs["q"].shape[-1] ** -0.5,
        kwargs.get("extra_k_cache"),
        kwargs.get("extra_indices_in_kvcache"),
        kwargs.get("extra_topk_length"),
    ), None


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    entry: dict | None = None,
) -> torch.Tensor:
    """The kernel under its own name; see ``naive.sparse_mla_decode`` for the mathematics.

    ``entry`` overrides the shipped launch configuration. Calls on one device must not overlap in time: they share the
    arrival counters, as SGLang's layers, which run one after another, may.
    """
    _check(q, k_cache, indices)
    if extra_k_cache is not None:
        _check(q, extra_k_cache, extra_indices)
    from .kernel import launch

    rows, _, heads, _ = q.shape
    if q.stride(-1) != 1:
        q = q.contiguous()
    entry = entry or select(heads, rows, config.arch_of(q.device.index or 0))
    return launch(
        q,
        k_cache,
        indices,
        topk_length,
        attn_sink,
        softmax_scale,
        extra_k_cache,
        extra_indices,
        extra_topk_length,
        entry,
        multiprocessors(q.device),
        arrival_counters(q.device),
    )


def _check(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor) -> None:
    """Only shapes and strides are read: nothing here waits for the device."""
    page_size = cache.shape[1]
    if q.shape[1:2] != (1,) or q.shape[2] not in HEADS or q.shape[3] != layout.HEAD_DIM or q.dtype != torch.bfloat16:
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)}; expected bf16 [rows, 1, {HEADS}, {layout.HEAD_DIM}]")
    if cache.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"cache is {cache.dtype}; expected e4m3, or its bytes")
    if cache.shape[2:] != (1, layout.VIEW_BYTES) or page_size not in layout.PAGE_SIZES.values():
        raise ValueError(
            f"cache view is {tuple(cache.shape)}; expected [pages, one of {sorted(layout.PAGE_SIZES.values())}, 1, "
            f"{layout.VIEW_BYTES}], the V4 layout"
        )
    if cache.stride(0) != layout.page_bytes(page_size):
        raise ValueError(f"cache page stride is {cache.stride(0)} bytes; expected {layout.page_bytes(page_size)}")
    if indices.shape[:2] != (q.shape[0], 1) or indices.stride(-1) != 1 or indices.dtype != torch.int32:
        raise ValueError(f"indices are {indices.dtype} {tuple(indices.shape)}; expected int32 [{q.shape[0]}, 1, width]")


def select(heads: int, rows: int, arch: str) -> dict:
    """The first entry of ``configs/decode.<arch>.json`` whose ``max_heads`` and ``max_rows`` are not exceeded."""
    for entry in config.load("decode", arch)["entries"]:
        if heads <= entry["max_heads"] and rows <= (entry["max_rows"] or rows):
            return entry
    raise ValueError(f"configs/decode.{arch}.json has no entry for {heads} heads and {rows} rows")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; 4 in the interpreter, so that small tests still split rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_counters: dict[torch.device, torch.Tensor] = {}


def arrival_counters(device: torch.device) -> torch.Tensor | None:
    """Zeroed int32 ``[COUNTERS]`` that outlives every CUDA graph, or None when the first request is inside a capture.

    Memory allocated inside a capture belongs to that graph's pool and would be handed to other tensors.
    """
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


def example(
    device: torch.device | str, rows: int, heads: int, extra_page_size: int | None, width: int, extra_width: int
) -> dict:
    """Random keyword arguments of ``flash_mla_with_kvcache_sm120`` on ``device``, with ragged lengths and some -1.

    Bytes of the caches that belong to no key are 0xFF, which reads as NaN.
    """
    generator = torch.Generator(device="cpu").manual_seed(rows * 1000 + heads)

    def scope(page_size: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = 3 * width
        pages = -(-tokens // page_size) + 1
        kv = torch.randn(tokens, layout.HEAD_DIM, generator=generator).to(torch.bfloat16)
        raw = layout.pack_kv(kv, page_size, pages, fill=0xFF).to(device)
        indices = torch.randint(0, tokens, (rows, 1, width), generator=generator, dtype=torch.int32)
        indices[torch.rand(indices.shape, generator=generator) < 0.1] = -1
        lengths = torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32)
        lengths[0] = width
        return layout.kv_view(raw, page_size), indices.to(device), lengths.to(device)

    kwargs = {
        "q": torch.randn(rows, 1, heads, layout.HEAD_DIM, generator=generator).to(torch.bfloat16).to(device),
        "attn_sink": torch.randn(heads, generator=generator).to(device),
        "head_dim_v": layout.HEAD_DIM,
        "softmax_scale": layout.HEAD_DIM**-0.5,
    }
    kwargs["k_cache"], kwargs["indices"], kwargs["topk_length"] = scope(layout.PAGE_SIZES["swa"], width)
    if extra_page_size is not None:
        extra = scope(extra_page_size, extra_width)
        kwargs["extra_k_cache"], kwargs["extra_indices_in_kvcache"], kwargs["extra_topk_length"] = extra
    return kwargs


def reference(kwargs: dict, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``naive.sparse_mla_decode`` on the keyword arguments of ``flash_mla_with_kvcache_sm120``."""
    return naive.sparse_mla_decode(
        kwargs["q"],
        kwargs["k_cache"],
        kwargs["indices"],
        kwargs.get("topk_length"),
        kwargs.get("attn_sink"),
        kwargs["softmax_scale"],
        kwargs.get("extra_k_cache"),
        kwargs.get("extra_indices_in_kvcache"),
        kwargs.get("extra_topk_length"),
        dtype=dtype,
    )


TOLERANCE = 8e-3
"""Relative Frobenius error allowed against fp64: probabilities, partials and output are each rounded to bf16 once."""


def checked_rows(heads: int, arch: str) -> Iterator[int]:
    """A number of rows for each entry that ``heads`` can meet: the largest it serves; of the last one, the smallest."""
    rows = 1
    while True:
        largest = select(heads, rows, arch)["max_rows"]
        yield largest or rows
        if largest is None:
            return
        rows = largest + 1


def self_check(device: torch.device, heads: int = 16) -> None:
    """Compare every shipped entry for ``heads`` with ``naive`` on ``device``, for each kind of cache.

    Compiles every kernel that serving will need. Raises ``AssertionError`` on a difference.
    """
    sizes = checked_rows(heads, config.arch_of(device.index or 0))
    for rows, page_size in itertools.product(sizes, (layout.PAGE_SIZES["c4"], layout.PAGE_SIZES["c128"], None)):
        kwargs = example(device, rows, heads, page_size, 128, 512)
        out, _ = flash_mla_with_kvcache_sm120(**kwargs)
        truth = reference(kwargs)
        error = ((out.double() - truth).norm() / truth.norm()).item()
        if not error < TOLERANCE:
            raise AssertionError(
                f"decode, {rows} rows, {heads} heads, extra page {page_size}: error {error:.2e} > {TOLERANCE:.0e}"
            )


def aot_cases(arch: str) -> Iterator[AotCase]:
    """Every entry shipped for ``arch``, with each cache kind it can meet."""
    from . import kernel

    pointers = {"q": "bf16", "cache": "fp8e4nv", "indices": "i32", "length": "i32", "extra_cache": "fp8e4nv"}
    pointers |= {"extra_indices": "i32", "extra_length": "i32", "sink": "fp32", "out": "bf16", "lse": "fp32"}
    pointers |= {"counter": "i32"}
    strides = ("q_row_stride", "q_head_stride", "indices_stride", "extra_indices_stride", "width", "extra_width")
    for index, entry in enumerate(config.load("decode", arch)["entries"]):
        signature = {f"{name}_ptr": f"*{dtype}" for name, dtype in pointers.items()}
        signature |= {"partial_ptr": "*" + entry["partials"], "scale_log2": "fp32", "heads": "i32", "splits": "i32"}
        signature |= dict.fromkeys(strides, "i32")
        for kind, page_size in (("swa", None), ("c4", 64), ("c128", 2)):
            extra = page_size or layout.PAGE_SIZES["swa"]
            # Arguments that are None at run time are constants to the compiler.
            absent = () if page_size else ("extra_indices_ptr", "extra_length_ptr")
            absent += () if entry["merge"] == "fused" else ("counter_ptr",)
            constexprs = dict.fromkeys(absent) | {
                "PAGE_SIZE": layout.PAGE_SIZES["swa"],
                "PAGE_BYTES": layout.page_bytes(layout.PAGE_SIZES["swa"]),
                "EXTRA_PAGE_SIZE": extra,
                "EXTRA_PAGE_BYTES": layout.page_bytes(extra),
                "HAS_LENGTH": True,
                "HAS_EXTRA": page_size is not None,
                "HAS_EXTRA_LENGTH": page_size is not None,
                "HAS_SINK": True,
                "FUSED": entry["merge"] == "fused",
                "BLOCK_H": entry["block_h"],
                "BLOCK_N": entry["block_n"],
                "MIN_TILES": entry["min_tiles"],
                "VIA_FP32": entry["via_fp32"],
                "PREFETCH": entry["prefetch"],
                "PDL": entry["pdl"],
            }
            yield AotCase(
                name=f"decode[{index}] {kind}",
                fn=kernel.decode_fwd_kernel,
                signature=signature,
                constexprs=constexprs,
                num_warps=entry["num_warps"],
                maxnreg=entry["maxnreg"],
                divisible=strides,
            )
            if entry["merge"] == "kernel":
                names = ("length_ptr", "extra_length_ptr", "sink_ptr", "out_ptr", "partial_ptr", "lse_ptr")
                numbers = ("width", "extra_width", "heads", "splits")
                flags = ("HAS_LENGTH", "HAS_EXTRA", "HAS_EXTRA_LENGTH", "HAS_SINK", "BLOCK_N", "MIN_TILES", "PDL")
                yield AotCase(
                    name=f"decode[{index}] {kind} merge",
                    fn=kernel.merge_kernel,
                    signature={name: signature[name] for name in names + numbers},
                    constexprs={name: constexprs[name] for name in flags}
                    | {"BLOCK_S": kernel.merge_block(entry["max_splits"]), "BLOCK_D": entry["merge_dims"]},
                    divisible=("width", "extra_width"),
                    tensor_cores=False,
                )
