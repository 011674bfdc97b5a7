"""Sparse-MLA decode: ours against FlashMLA, SGLang's sm_120 Triton kernel and its split-K Triton kernel.

The caches are larger than the L2, rows are drawn at random from them, and every contender reads the same ones.
"""

import functools
import importlib
import multiprocessing
from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Built, Case, Contender, rel_error
from dsv4_sm120 import layout
from dsv4_sm120.ops import decode

TOLERANCE = decode.TOLERANCE
WINDOW = 128
POOL = {256: 2**16, 64: 2**18, 2: 2**16}
"""Tokens in the cache of each page size."""
VALUE_DIM = layout.HEAD_DIM
FLASH_MLA_HEADS = 64


@functools.cache
def cache(page_size: int, device: torch.device) -> torch.Tensor:
    """A cache of random keys, as SGLang's view; shared by all cases."""
    tokens = POOL[page_size]
    nope = torch.randn(tokens, layout.NOPE_DIM, device=device).clamp(-440, 440).to(torch.float8_e4m3fn)
    scales = torch.randint(124, 130, (tokens, 7), dtype=torch.uint8, device=device)
    rope = torch.randn(tokens, layout.ROPE_DIM, device=device)
    return layout.kv_view(layout.pack_raw(nope, scales, rope, page_size), page_size)


def arguments(
    device: torch.device, rows: int, heads: int, page_size: int | None, live: int, width: int, window: int = WINDOW
) -> dict:
    """Keyword arguments of ``flash_mla_with_kvcache_sm120``: ``live`` of ``width`` extra entries valid in each row."""
    kwargs = {
        "q": torch.randn(rows, 1, heads, layout.HEAD_DIM, device=device, dtype=torch.bfloat16),
        "k_cache": cache(256, device),
        "indices": torch.randint(0, POOL[256], (rows, 1, WINDOW), device=device, dtype=torch.int32),
        "topk_length": torch.full((rows,), window, device=device, dtype=torch.int32),
        "attn_sink": torch.randn(heads, device=device),
        "head_dim_v": VALUE_DIM,
        "softmax_scale": layout.HEAD_DIM**-0.5,
    }
    if page_size is not None:
        extra = torch.full((rows, 1, width), -1, device=device, dtype=torch.int32)
        extra[:, :, :live] = torch.randint(0, POOL[page_size], (rows, 1, live), device=device, dtype=torch.int32)
        kwargs["extra_k_cache"] = cache(page_size, device)
        kwargs["extra_indices_in_kvcache"] = extra
        kwargs["extra_topk_length"] = torch.full((rows,), live, device=device, dtype=torch.int32)
    return kwargs


def truth(kwargs: dict) -> torch.Tensor:
    """fp64 reference, a few rows at a time: the gathered keys of all rows at once would not fit."""
    per_row = ("q", "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    parts = []
    for first in range(0, kwargs["q"].shape[0], 32):
        part = {k: v[first : first + 32] if k in per_row and v is not None else v for k, v in kwargs.items()}
        parts.append(decode.reference(part))
    return torch.cat(parts)


def contender(run: Callable[[], torch.Tensor], expected: torch.Tensor) -> Contender:
    return Contender(run, lambda: rel_error(run(), expected), TOLERANCE)


def peers(kwargs: dict, expected: torch.Tensor, triton_peers: bool) -> dict[str, Contender]:
    """The peers that can be imported here and accept these shapes; the Triton ones compile, or tune, for each shape."""
    found: dict[str, Callable[[], torch.Tensor]] = {}
    args = (
        kwargs["q"],
        kwargs["k_cache"],
        kwargs["indices"],
        kwargs["topk_length"],
        kwargs["attn_sink"],
        VALUE_DIM,
        kwargs["softmax_scale"],
        kwargs.get("extra_k_cache"),
        kwargs.get("extra_indices_in_kvcache"),
        kwargs.get("extra_topk_length"),
    )
    flash_mla = optional("flash_mla.flash_mla_interface")
    if flash_mla is not None and kwargs["q"].shape[2] <= FLASH_MLA_HEADS:
        found["FlashMLA"] = flash_mla_call(flash_mla, kwargs)
    in_tree = optional("sglang.kernels.ops.attention.flash_mla_sm120_triton")
    if in_tree is not None and triton_peers:
        found["SGLang sm_120 Triton"] = lambda: in_tree.flash_mla_sparse_decode_triton(*args)[0]
    split_k = optional("sglang.kernels.ops.attention.dsv4.triton_sparse_decode")
    if split_k is not None and triton_peers:
        found["SGLang split-K Triton"] = lambda: split_k.triton_fp8_attention_fwd(**kwargs)[0]
    return {name: contender(run, expected) for name, run in found.items()}


def optional(module: str):
    """The module, or None when it is not installed here."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def flash_mla_call(module, kwargs: dict) -> Callable[[], torch.Tensor]:
    """FlashMLA on heads padded to 64, the least it accepts; the padding is made outside the timed call."""
    heads = kwargs["q"].shape[2]
    pad = FLASH_MLA_HEADS - heads
    padded = dict(kwargs)
    padded["q"] = torch.nn.functional.pad(kwargs["q"], (0, 0, 0, pad))
    padded["attn_sink"] = torch.nn.functional.pad(kwargs["attn_sink"], (0, pad))
    metadata = module.get_mla_metadata()[0]
    fixed = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": metadata, "is_fp8_kvcache": True}
    return lambda: module.flash_mla_with_kvcache(**padded, **fixed, use_legacy=True)[0][:, :, :heads]


def key_bytes(rows: int, keys: int) -> int:
    return rows * keys * layout.VIEW_BYTES


def build(
    device: torch.device,
    rows: int,
    heads: int,
    page_size: int | None,
    live: int,
    width: int,
    with_peers: bool = True,
    triton_peers: bool = False,
    replay: bool = False,
    seed: int | None = None,
) -> Built:
    if seed is not None:
        cache(256, device), cache(page_size, device)  # drawn once, so not from this seed
        torch.manual_seed(seed)
    kwargs = arguments(device, rows, heads, page_size, live, width)
    expected = truth(kwargs)

    def run() -> torch.Tensor:
        return decode.flash_mla_with_kvcache_sm120(**kwargs)[0]

    keys = WINDOW + (live if page_size else 0)
    return Built(
        ours=contender(run, expected),
        peers=peers(kwargs, expected, triton_peers) if with_peers else {},
        bytes=key_bytes(rows, keys),
        flops=4 * rows * heads * keys * layout.HEAD_DIM,
        replay=functools.partial(check_replay, kwargs) if replay else None,
    )


def check_replay(kwargs: dict) -> None:
    """Capture with full lists, then replay with shorter, empty and re-drawn ones; each must match the reference."""
    changed = ("q", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    kwargs = kwargs | {name: kwargs[name].clone() for name in changed}
    run = functools.partial(decode.flash_mla_with_kvcache_sm120, **kwargs)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()[0]
    extra, lengths = kwargs["extra_indices_in_kvcache"], kwargs["extra_topk_length"]
    rows, _, width = extra.shape
    for live in (width, 1, 0, width // 3, 65):
        lengths.copy_(torch.randint(0, live + 1, (rows,), device=lengths.device, dtype=torch.int32))
        lengths[0] = live
        kwargs["topk_length"].copy_(torch.randint(0, WINDOW + 1, (rows,), device=lengths.device, dtype=torch.int32))
        if live == 0:
            kwargs["topk_length"].zero_()
        extra.copy_(torch.randint(-1, POOL[kwargs["extra_k_cache"].shape[1]], extra.shape, device=extra.device))
        kwargs["q"].normal_()
        out.fill_(float("nan"))
        graph.replay()
        expected = truth(kwargs)
        if live == 0:
            assert out.abs().max() == 0, "rows without a valid key must be exactly zero"
            continue
        error = rel_error(out, expected)
        assert error < TOLERANCE, f"replay at live length {live}: error {error:.2e}"


def compile_entry(job: tuple[int, int, int | None]) -> None:
    """Compile what a call of this size needs; the disk cache hands it to the other processes."""
    rows, heads, page_size = job
    device = torch.device("cuda", 0)
    kwargs = arguments(device, rows, heads, page_size, 64, 64)
    decode.flash_mla_with_kvcache_sm120(**kwargs)


def precompile() -> None:
    """Compile all entries in parallel: one after the other would take most of a run."""
    entries = decode.config.load("decode", decode.config.arch_of(0))["entries"]
    sizes = {(entry["max_rows"] or 200, entry["max_heads"]) for entry in entries}
    jobs = [(*size, page_size) for size in sizes for page_size in (64, 2, None)]
    with multiprocessing.get_context("spawn").Pool(
        len(jobs), initializer=POOL.update, initargs=(dict.fromkeys(POOL, 4096),)
    ) as pool:
        pool.map(compile_entry, jobs, chunksize=1)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """``quick`` leaves out all but the target line."""

    def case(
        group: str,
        rows: int,
        heads: int,
        page_size: int | None,
        live: int,
        width: int,
        together: str | None = None,
        **options,
    ) -> Case:
        kind = {None: "SWA only", 64: "c4", 2: "c128"}[page_size]
        params = {"heads": heads, "rows": rows, "extra": kind, "live": live, "width": width}
        return Case(
            "decode",
            group,
            params,
            functools.partial(build, device, rows, heads, page_size, live, width, **options),
            together,
        )

    precompile()
    for rows in (1, 4, 16, 32, 64):
        yield case("16 heads, 128 SWA + 512 c4", rows, 16, 64, 512, 512, triton_peers=True, replay=rows in (1, 64))
    if quick:
        return
    for heads in (8, 64, 128):
        for rows in (1, 16, 64):
            yield case(f"{heads} heads, 128 SWA + 512 c4", rows, heads, 64, 512, 512, replay=rows == 16)
    for rows in (1, 16, 64):
        yield case("16 heads, 128 SWA + 1024 c4", rows, 16, 64, 1024, 1024)
        yield case("16 heads, SWA only", rows, 16, None, 0, 0)
    for rows in (1, 16, 64):
        for width in (4160, 8256):
            for live in (4, 64, 512, 4096):
                group = f"c128, {rows} rows: time by live length"
                options = {"with_peers": rows == 16 and width == 4160, "replay": width == 8256 and live == 4096}
                yield case(group, rows, 16, 2, live, width, **options)
    # The same rows, keys and lengths in lists of other widths; then one width four times over: no difference at all.
    tax = {"with_peers": False, "seed": 1}
    for rows, live in ((16, 32), (64, 32), (16, 512)):
        for width in (max(64, live), 1024, 4096, 8192):
            yield case("zero tax: configured maximum", rows, 16, 2, live, width, f"{rows} rows, {live} live", **tax)
    for _ in range(4):
        yield case("zero tax: control", 16, 16, 2, 32, 1024, "16 rows, 32 live, 1,024 wide each time", **tax)
    for rows in (128, 512, 2048, 8192):
        yield case("prefill rows, 16 heads, 128 SWA + 512 c4", rows, 16, 64, 512, 512, with_peers=rows < 2048)
