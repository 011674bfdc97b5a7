"""Byte layouts of SGLang 0.5.23's DeepSeek-V4 caches, and helpers that pack and unpack them.

Main KV page (``kernels/ops/attention/dsv4/kv_layout.py`` in SGLang, ``KVLayout.V4``), for ``page_size`` slots::

    [0, page_size*576)            rows: 448 x e4m3 (nope) | 64 x bf16 (rope, rotated)
    [page_size*576, +page_size*8) scales: 7 x ue8m0 (one per 64 nope values) | 1 pad byte
    ... padded up to a multiple of 576 bytes

The attention code sees it as ``[pages, page_size, 1, 584]`` e4m3 with ``stride(0)`` = page bytes; its rows are NOT
584-byte records. Indexer key page of 64 slots: 64 x 128 e4m3, then 64 x fp32 scale.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
QUANT_GROUP = 64
"""Nope values that share one scale."""
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = NOPE_DIM // QUANT_GROUP + 1
"""Scale bytes per slot, the pad byte included."""
VIEW_BYTES = ROW_BYTES + SCALE_BYTES
PAGE_SIZES = {"swa": 256, "c4": 64, "c128": 2}
E8M0_BIAS = 127
FP8_MAX = 448.0

INDEXER_HEADS = 64
INDEXER_DIM = 128
INDEXER_PAGE_SIZE = 64
INDEXER_PAGE_BYTES = INDEXER_PAGE_SIZE * (INDEXER_DIM + 4)


def page_bytes(page_size: int) -> int:
    """Bytes of one main KV page: 149,760 for 256 slots, 37,440 for 64, 1,728 for 2."""
    return math.ceil(page_size * VIEW_BYTES / ROW_BYTES) * ROW_BYTES


def kv_view(raw: "torch.Tensor", page_size: int) -> "torch.Tensor":
    """View uint8 ``raw [pages, page_bytes]`` as SGLang hands it to attention: e4m3 ``[pages, page_size, 1, 584]``."""
    import torch

    pages = raw.shape[0]
    return raw.view(torch.float8_e4m3fn).as_strided(
        (pages, page_size, 1, VIEW_BYTES), (raw.stride(0), VIEW_BYTES, VIEW_BYTES, 1)
    )


def pack_kv(kv: "torch.Tensor", page_size: int, pages: int | None = None, fill: int = 0) -> "torch.Tensor":
    """Quantise bf16 ``kv [tokens, 512]`` into slots 0..tokens-1 of a fresh cache, uint8 ``[pages, page_bytes]``.

    Scales are powers of two, the smallest with ``amax / scale <= 448``. Bytes of slots past ``tokens`` and padding
    hold ``fill``: 0xFF makes both e4m3 and bf16 read as NaN.
    """
    import torch

    tokens = kv.shape[0]
    nope = kv[:, :NOPE_DIM].float().view(tokens, -1, QUANT_GROUP)
    exponent = torch.ceil(torch.log2(nope.abs().amax(-1).clamp(min=1e-4) / FP8_MAX))
    fp8 = (nope / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).view(tokens, NOPE_DIM)
    return pack_raw(fp8, (exponent + E8M0_BIAS).to(torch.uint8), kv[:, NOPE_DIM:], page_size, pages, fill)


def pack_raw(
    nope: "torch.Tensor",
    scales: "torch.Tensor",
    rope: "torch.Tensor",
    page_size: int,
    pages: int | None = None,
    fill: int = 0,
) -> "torch.Tensor":
    """Lay out e4m3 ``nope [tokens, 448]``, ue8m0 ``scales [tokens, 7]`` and bf16 ``rope [tokens, 64]`` as pages."""
    import torch

    tokens = nope.shape[0]
    pages = math.ceil(tokens / page_size) if pages is None else pages
    raw = torch.full((pages, page_bytes(page_size)), fill, dtype=torch.uint8, device=nope.device)
    slot = torch.arange(tokens, device=nope.device)
    rows = raw[:, : page_size * ROW_BYTES].view(pages, page_size, ROW_BYTES)
    rows[slot // page_size, slot % page_size] = torch.cat(
        [nope.contiguous().view(torch.uint8), rope.to(torch.bfloat16).contiguous().view(torch.uint8)], -1
    )
    tail = raw[:, page_size * ROW_BYTES : page_size * VIEW_BYTES].view(pages, page_size, SCALE_BYTES)
    tail[slot // page_size, slot % page_size, : SCALE_BYTES - 1] = scales
    return raw


def unpack_kv(raw: "torch.Tensor", slots: "torch.Tensor", page_size: int) -> "torch.Tensor":
    """Dequantise ``slots`` (any shape, non-negative) to fp32 ``[*slots.shape, 512]``."""
    import torch

    flat = slots.flatten().long()
    page, offset = flat // page_size, flat % page_size
    rows = raw[:, : page_size * ROW_BYTES].unflatten(1, (page_size, ROW_BYTES))[page, offset]
    tail = raw[:, page_size * ROW_BYTES : page_size * VIEW_BYTES].unflatten(1, (page_size, SCALE_BYTES))[page, offset]
    nope = rows[:, :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float().view(-1, SCALE_BYTES - 1, QUANT_GROUP)
    scale = torch.exp2(tail[:, : SCALE_BYTES - 1].float() - E8M0_BIAS)
    rope = rows[:, NOPE_DIM:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(nope * scale[..., None]).flatten(1), rope], -1).view(*slots.shape, HEAD_DIM)


def pack_indexer_k(
    fp8: "torch.Tensor", scale: "torch.Tensor", pages: int | None = None, fill: int = 0
) -> "torch.Tensor":
    """Indexer cache, uint8 ``[pages, 64, 1, 132]``, of e4m3 ``fp8 [tokens, 128]`` and fp32 ``scale [tokens]``."""
    import torch

    tokens = fp8.shape[0]
    pages = math.ceil(tokens / INDEXER_PAGE_SIZE) if pages is None else pages
    raw = torch.full((pages, INDEXER_PAGE_BYTES), fill, dtype=torch.uint8, device=fp8.device)
    slot = torch.arange(tokens, device=fp8.device)
    split = INDEXER_PAGE_SIZE * INDEXER_DIM
    keys = raw[:, :split].view(pages, INDEXER_PAGE_SIZE, INDEXER_DIM)
    keys[slot // INDEXER_PAGE_SIZE, slot % INDEXER_PAGE_SIZE] = fp8.contiguous().view(torch.uint8)
    scales = raw[:, split:].view(torch.float32)
    scales[slot // INDEXER_PAGE_SIZE, slot % INDEXER_PAGE_SIZE] = scale.float()
    return raw.view(pages, INDEXER_PAGE_SIZE, 1, INDEXER_DIM + 4)


def unpack_indexer_k(cache: "torch.Tensor", slots: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
    """Keys fp32 ``[*slots.shape, 128]`` (unscaled) and scales fp32 ``[*slots.shape]`` of an indexer cache."""
    import torch

    raw = cache.reshape(cache.shape[0], INDEXER_PAGE_BYTES).view(torch.uint8)
    page, offset = slots.long() // INDEXER_PAGE_SIZE, slots.long() % INDEXER_PAGE_SIZE
    split = INDEXER_PAGE_SIZE * INDEXER_DIM
    keys = raw[:, :split].view(torch.float8_e4m3fn).view(-1, INDEXER_PAGE_SIZE, INDEXER_DIM)
    return keys[page, offset].float(), raw[:, split:].contiguous().view(torch.float32)[page, offset]
