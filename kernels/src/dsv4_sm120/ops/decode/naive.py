"""Truth for sparse-MLA decode: gather, dequantise, softmax, in plain torch."""

import math

import torch

from dsv4_sm120 import layout


def gather(cache: torch.Tensor, indices: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Dequantised rows fp32 ``[*indices.shape, 512]`` of a cache view; rows that are not ``valid`` are zero."""
    pages, page_size = cache.shape[:2]
    raw = cache.view(torch.uint8).as_strided((pages, cache.stride(0)), (cache.stride(0), 1))
    rows = layout.unpack_kv(raw, torch.where(valid, indices, 0), page_size)
    return torch.where(valid[..., None], rows, 0.0)


def live(indices: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Which entries of ``indices [rows, width]`` count: not negative and, if given, before the row's length."""
    valid = indices >= 0
    if lengths is not None:
        valid &= torch.arange(indices.shape[-1], device=indices.device) < lengths[:, None]
    return valid


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
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention of ``q`` bf16 ``[rows, 1, heads, 512]`` over the union of both index lists, in ``dtype``.

    Caches are views as described in ``dsv4_sm120.layout``; index lists are int32 ``[rows, 1, width]``. The sink adds
    ``exp(sink)`` to the softmax denominator only. A row without a valid index is exactly zero. Returns
    ``[rows, 1, heads, 512]`` in ``dtype``.
    """
    valid = live(indices[:, 0], topk_length)
    kv = gather(k_cache, indices[:, 0], valid)
    if extra_k_cache is not None:
        extra_valid = live(extra_indices[:, 0], extra_topk_length)
        kv = torch.cat([kv, gather(extra_k_cache, extra_indices[:, 0], extra_valid)], 1)
        valid = torch.cat([valid, extra_valid], 1)
    kv = kv.to(dtype)
    scores = torch.einsum("rhd,rkd->rhk", q[:, 0].to(dtype), kv) * softmax_scale
    scores = scores.masked_fill(~valid[:, None], -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    total = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(dtype)[None, :, None])
    weights = torch.where(torch.isneginf(lse), 0.0, torch.exp(scores - torch.where(torch.isneginf(lse), 0.0, total)))
    return torch.einsum("rhk,rkd->rhd", weights, kv)[:, None]
