"""Sparse-MLA decode against its fp64 reference, on inputs chosen to break it.

Small shapes: the interpreter runs a program at a time. On a GPU the same tests run the compiled kernel.
"""

import itertools

import pytest
import torch

from aot_checks import check_reports
from dsv4_sm120 import config, layout
from dsv4_sm120.ops import decode
from dsv4_sm120.ops.decode.kernel import split_count

TOLERANCE = decode.TOLERANCE if torch.cuda.is_available() else 1.2e-2
"""The interpreter truncates fp32 to bf16 instead of rounding, which doubles each of the three rounding errors."""
ENTRY = {
    "block_h": 16,
    "block_n": 16,
    "num_warps": 4,
    "maxnreg": None,
    "min_tiles": 1,
    "ctas_per_sm": 4,
    "max_splits": 8,
    "merge": "fused",
    "merge_dims": 512,
    "pdl": False,
    "partials": "bf16",
    "prefetch": False,
    "via_fp32": False,
}
EXTRA_PAGES = {"swa": None, "c4": 64, "c128": 2}


def run(kwargs: dict, **changes: object) -> torch.Tensor:
    return decode.sparse_mla_decode(
        kwargs["q"],
        kwargs["k_cache"],
        kwargs["indices"],
        kwargs.get("topk_length"),
        kwargs.get("attn_sink"),
        kwargs["softmax_scale"],
        kwargs.get("extra_k_cache"),
        kwargs.get("extra_indices_in_kvcache"),
        kwargs.get("extra_topk_length"),
        entry=ENTRY | changes,
    )


def check(kwargs: dict, **changes: object) -> torch.Tensor:
    out, truth = run(kwargs, **changes), decode.reference(kwargs)
    assert out.dtype == torch.bfloat16 and out.shape == truth.shape
    assert torch.isfinite(out).all()
    error = (out.double() - truth).norm() / truth.norm().clamp(min=1e-30)
    assert error < TOLERANCE, f"relative error {error:.2e}"
    return out


def example(device: str, kind: str = "c4", rows: int = 2, heads: int = 8, width: int = 48, extra: int = 80) -> dict:
    return decode.example(device, rows, heads, EXTRA_PAGES[kind], width, extra)


@pytest.mark.parametrize("kind", EXTRA_PAGES)
@pytest.mark.parametrize("merge", ["fused", "kernel"])
def test_every_cache_kind(device: str, kind: str, merge: str) -> None:
    check(example(device, kind, rows=3), merge=merge)


@pytest.mark.parametrize("dims", [128, 256])
def test_a_merge_by_several_programs_a_head(device: str, dims: int) -> None:
    check(example(device, rows=3), merge="kernel", merge_dims=dims)


@pytest.mark.parametrize("heads", [16, 32])
def test_heads(device: str, heads: int) -> None:
    check(example(device, heads=heads))


@pytest.mark.parametrize("prefetch, via_fp32", [(False, True), (True, False), (True, True)])
def test_variants_of_the_loop(device: str, prefetch: bool, via_fp32: bool) -> None:
    check(example(device), prefetch=prefetch, via_fp32=via_fp32)


@pytest.mark.parametrize("partials", ["bf16", "fp32"])
@pytest.mark.parametrize("max_splits, min_tiles", [(1, 1), (3, 1), (8, 3)])
def test_splits(device: str, partials: str, max_splits: int, min_tiles: int) -> None:
    check(example(device), partials=partials, max_splits=max_splits, min_tiles=min_tiles)


@pytest.mark.parametrize("merge", ["fused", "kernel"])
def test_a_row_without_a_valid_key_is_exactly_zero(device: str, merge: str) -> None:
    kwargs = example(device, rows=4)
    kwargs["indices"][:3] = -1
    kwargs["extra_indices_in_kvcache"][:3] = -1
    kwargs["topk_length"][0], kwargs["extra_topk_length"][0] = 48, 80
    kwargs["topk_length"][1], kwargs["extra_topk_length"][1] = 0, 0
    kwargs["topk_length"][2], kwargs["extra_topk_length"][2] = 1, 1  # what SGLang passes for a row without keys
    out = check(kwargs, merge=merge)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 47, 48])
def test_lengths(device: str, length: int) -> None:
    kwargs = example(device)
    kwargs["topk_length"].fill_(length)
    kwargs["extra_topk_length"].fill_(33)
    check(kwargs)


def test_without_lengths_and_without_a_sink(device: str) -> None:
    kwargs = example(device)
    for name in ("topk_length", "extra_topk_length", "attn_sink"):
        kwargs[name] = None
    check(kwargs)


@pytest.mark.parametrize("sink", [-float("inf"), -40.0, 60.0])
def test_extreme_sinks(device: str, sink: float) -> None:
    kwargs = example(device)
    kwargs["attn_sink"].fill_(sink)
    check(kwargs)


def test_entries_past_the_length_are_not_read(device: str) -> None:
    kwargs = example(device)
    kwargs["topk_length"].fill_(20)
    kwargs["indices"][:, :, :20] = kwargs["indices"][:, :, :20].clamp(min=0)
    kwargs["indices"][:, :, 20:] = 2**31 - 1  # no such slot: reading it faults
    kwargs["extra_topk_length"].fill_(3)
    kwargs["extra_indices_in_kvcache"][:, :, 3:] = 2**31 - 1
    kept = {name: kwargs[name].clone() for name in ("indices", "extra_indices_in_kvcache")}
    out = run(kwargs)
    kwargs["indices"][:, :, 20:] = -1
    kwargs["extra_indices_in_kvcache"][:, :, 3:] = -1
    torch.testing.assert_close(out, run(kwargs), rtol=0, atol=0)
    assert (kept["indices"][:, :, 20:] == 2**31 - 1).all()


def test_duplicates_count_as_often_as_they_are_listed(device: str) -> None:
    kwargs = example(device)
    kwargs["indices"].fill_(7)
    kwargs["extra_indices_in_kvcache"][:, :, ::2] = 3
    check(kwargs)


@pytest.mark.parametrize("kind, slots", [("c4", [0, 63, 64, 127, 128]), ("c128", [0, 1, 2, 3, 4])])
def test_page_boundaries(device: str, kind: str, slots: list[int]) -> None:
    kwargs = example(device, kind, width=512, extra=80)
    kwargs["topk_length"].fill_(6)
    kwargs["indices"][:, :, :6] = torch.tensor([0, 255, 256, 511, 512, 767], dtype=torch.int32, device=device)
    kwargs["extra_topk_length"].fill_(len(slots))
    kwargs["extra_indices_in_kvcache"][:, :, : len(slots)] = torch.tensor(slots, dtype=torch.int32, device=device)
    check(kwargs)


@pytest.mark.parametrize("via_fp32", [False, True])
def test_all_scale_bytes(device: str, via_fp32: bool) -> None:
    """Scale bytes 0 to 254. Values are kept within what fp32 can hold: e4m3 shrinks as the scale grows."""
    tokens = 255
    byte = torch.arange(tokens)[:, None].expand(tokens, 7)
    nope = torch.randn(tokens, layout.NOPE_DIM)
    nope[180:] = 0.0
    raw = layout.pack_raw(
        nope.to(torch.float8_e4m3fn), byte.to(torch.uint8), torch.randn(tokens, 64), 64, fill=0xFF
    ).to(device)
    kwargs = example(device)
    kwargs["extra_k_cache"] = layout.kv_view(raw, 64)
    kwargs["q"] *= 1e-3
    for first in (0, 100, 175):
        kwargs["extra_topk_length"].fill_(80)
        listed = torch.arange(first, first + 80, dtype=torch.int32, device=device)
        kwargs["extra_indices_in_kvcache"][:] = listed
        check(kwargs, via_fp32=via_fp32)


def test_slots_beyond_four_million_tokens(device: str) -> None:
    """A page id whose byte offset exceeds 2**31. Only the last page of the cache is ever touched."""
    page, page_bytes = 17_000, layout.page_bytes(256)
    raw = torch.empty(page + 1, page_bytes, dtype=torch.uint8, device=device)
    raw[page] = layout.pack_kv(torch.randn(256, layout.HEAD_DIM).to(torch.bfloat16), 256)[0].to(device)
    kwargs = example(device, "swa")
    kwargs["k_cache"] = layout.kv_view(raw, 256)
    kwargs["indices"] = kwargs["indices"].clamp(min=0) % 256 + page * 256
    assert kwargs["indices"].min() > 4_000_000 and page * page_bytes > 2**31
    check(kwargs)


def test_strided_query(device: str) -> None:
    """SGLang may hand over the first heads of a wider, otherwise uninitialised, query."""
    kwargs = example(device)
    wide = torch.full((2, 1, 64, layout.HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, :, :8] = kwargs["q"]
    kwargs["q"] = wide[:, :, :8]
    check(kwargs)


def test_counters_are_left_zero(device: str) -> None:
    run(example(device, rows=3), merge="fused")
    counters = decode.arrival_counters(torch.zeros(1, device=device).device)
    assert counters is not None and int(counters.abs().sum()) == 0


def test_without_counters_a_second_kernel_merges(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the first call of a process is inside a graph capture, where no lasting memory can be had."""
    monkeypatch.setattr(decode, "arrival_counters", lambda device: None)
    check(example(device, rows=3), merge="fused")


def test_caches_may_be_plain_bytes(device: str) -> None:
    kwargs = example(device)
    expected = run(kwargs)
    kwargs |= {name: kwargs[name].view(torch.uint8) for name in ("k_cache", "extra_k_cache")}
    assert torch.equal(run(kwargs), expected)


def test_the_seam_returns_out_and_no_lse(device: str) -> None:
    kwargs = example(device)
    out, lse = decode.flash_mla_with_kvcache_sm120(**kwargs)
    truth = decode.reference(kwargs)
    assert lse is None and (out.double() - truth).norm() / truth.norm() < TOLERANCE


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(2, 1, 12, 512, dtype=torch.bfloat16)}, "q is"),
        ({"q": torch.zeros(2, 1, 8, 576, dtype=torch.bfloat16)}, "q is"),
        ({"k_cache": torch.zeros(4, 256, 1, 528, dtype=torch.uint8)}, "cache view"),
        ({"k_cache": torch.zeros(4, 256, 1, 584, dtype=torch.uint8)}, "page stride"),
        ({"k_cache": torch.zeros(4, 256, 1, 584, dtype=torch.bfloat16)}, "cache is"),
        ({"indices": torch.zeros(3, 1, 64, dtype=torch.int32)}, "indices are"),
        ({"indices": torch.zeros(2, 1, 64, dtype=torch.int64)}, "indices are"),
    ],
)
def test_other_layouts_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode.flash_mla_with_kvcache_sm120(**(example("cpu") | change))


@pytest.mark.parametrize("arch", config.ARCHS)
def test_every_size_has_an_entry(arch: str) -> None:
    for heads, rows in itertools.product(decode.HEADS, (1, 2, 3, 8, 9, 64, 512, 8192)):
        entry = decode.select(heads, rows, arch)
        blocks = rows * -(-heads // entry["block_h"])
        splits = split_count(blocks, entry, sms=188)
        assert 1 <= splits <= entry["max_splits"]
        if entry["merge"] == "fused" and splits > 1:
            assert blocks <= decode.COUNTERS
    assert split_count(8192, decode.select(16, 8192, arch), sms=188) == 1


# Bytes of stack per thread with the engine's Triton 3.8, in the SWA-only variant; 3.6 and 3.9 need none.
STACK_LIMIT = {"sm_120": 16, "sm_90": 40}


@pytest.mark.parametrize("arch", config.ARCHS)
def test_shipped_configs_compile(arch: str, aot_reports) -> None:
    check_reports(aot_reports("decode", arch), STACK_LIMIT[arch])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size, width", [(64, 512), (2, 4160)])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_capture_then_replay_with_other_lengths(rows: int, page_size: int, width: int) -> None:
    from benchmarks import cases_decode

    device = torch.device("cuda", 0)
    cases_decode.check_replay(cases_decode.arguments(device, rows, 16, page_size, width, width))


@pytest.mark.gpu
def test_self_check() -> None:
    decode.self_check(torch.device("cuda", 0))
