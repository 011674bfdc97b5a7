"""The reference and the cache layout against two independent implementations: SGLang's torch code, nano-deepseek-v4."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from dsv4_sm120 import layout
from dsv4_sm120.ops import decode
from dsv4_sm120.ops.decode import naive


@pytest.fixture(scope="module")
def sglang():
    """The installed SGLang's modules by short name."""
    pytest.importorskip("sglang", reason="the oracle is SGLang itself")
    names = {
        "flash_mla": "sglang.kernels.ops.attention.flash_mla_sm120",
        "store": "sglang.kernels.ops.kvcache.dsv4_main_kv_store",
        "reference": "sglang.test.kernels.deepseek_v4.k_cache_reference",
    }
    return SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


@pytest.mark.parametrize("page_size", layout.PAGE_SIZES.values())
def test_pages_are_byte_for_byte_those_of_sglang(sglang, page_size: int) -> None:
    tokens = 3 * page_size - 1
    kv = torch.randn(tokens, layout.HEAD_DIM).to(torch.bfloat16)
    ours = layout.pack_kv(kv, page_size)
    rows = layout.unpack_kv(ours, torch.arange(tokens), page_size)
    nope = kv[:, : layout.NOPE_DIM].float().view(tokens, 7, 64)
    exponent = torch.ceil(torch.log2(nope.abs().amax(-1).clamp(min=1e-4) / layout.FP8_MAX))
    pack = sglang.store.NopeFp8RopeBf16Pack(
        k_nope_fp8=(nope / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).view(tokens, -1).contiguous(),
        k_rope_bf16=kv[:, layout.NOPE_DIM :].contiguous(),
        scale_k_nope_ue8m0=(exponent + layout.E8M0_BIAS).to(torch.uint8),
    )
    theirs = torch.zeros_like(ours)
    sglang.reference.set_k_and_s_torch(theirs, torch.arange(tokens), pack, page_size)
    assert torch.equal(ours, theirs)
    dequantised = sglang.reference.dequantize_k_cache_paged_ref(theirs, torch.arange(tokens), page_size)[:, 0]
    torch.testing.assert_close(rows.to(torch.bfloat16), dequantised, rtol=0, atol=0)


@pytest.mark.parametrize("page_size", [None, 64, 2])
def test_naive_agrees_with_sglang(sglang, page_size: int | None) -> None:
    kwargs = decode.example("cpu", 5, 16, page_size, 128, 192)
    for name in ("indices", "extra_indices_in_kvcache"):
        if name in kwargs:
            kwargs[name][4] = -1
    theirs, _ = sglang.flash_mla._sm120_sparse_decode_fwd(
        kwargs["q"],
        kwargs["k_cache"],
        kwargs["indices"],
        kwargs["topk_length"],
        kwargs["attn_sink"],
        layout.HEAD_DIM,
        kwargs["softmax_scale"],
        kwargs.get("extra_k_cache"),
        kwargs.get("extra_indices_in_kvcache"),
        kwargs.get("extra_topk_length"),
    )
    ours = decode.reference(kwargs)
    torch.testing.assert_close(theirs.double(), ours, rtol=2**-8, atol=1e-4)
    assert not theirs[4].any() and not ours[4].any()


def test_naive_agrees_with_nano_deepseek_v4() -> None:
    """Its attention takes keys and a mask instead of pages and lists; both see the same dequantised keys."""
    modeling = pytest.importorskip("nano_deepseek_v4.modeling", reason="the oracle is that package")
    rows, heads = 4, 16
    kwargs = decode.example("cpu", rows, heads, 64, 64, 96)
    truth = decode.reference(kwargs, torch.float32)
    scopes = [("k_cache", "indices", "topk_length")]
    scopes.append(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
    keys, masks = [], []
    for cache, indices, length in scopes:
        valid = naive.live(kwargs[indices][:, 0], kwargs[length])
        keys.append(naive.gather(kwargs[cache], kwargs[indices][:, 0], valid))
        masks.append(valid)
    attention = SimpleNamespace(
        head_dim=layout.HEAD_DIM, num_heads=heads, attention_sink=kwargs["attn_sink"], dropout=lambda x: x
    )
    shared = torch.cat(keys, 1)[:, None].expand(-1, heads, -1, -1)
    out = modeling.DeepSeekV4Attention._core_attention(
        attention, kwargs["q"].transpose(1, 2), shared, shared, torch.cat(masks, 1)[:, None]
    )
    torch.testing.assert_close(out[:, :, 0], truth[:, 0], rtol=1e-4, atol=1e-5)
