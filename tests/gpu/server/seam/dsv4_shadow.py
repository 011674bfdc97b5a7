# SPDX-License-Identifier: GPL-3.0-or-later
"""Beside every call of SGLang's own kernels, the same call of ours: same tensors, in the running server.

The server goes on with SGLang's result, so an error of ours can't change what comes after it. ``DSV4_SEAM_SHADOW`` is
the prefix of files: each process writes ``<prefix>-<pid>.json``: kind of call -> calls, and the largest errors seen.
Needs decode without CUDA graphs: a replay calls no Python.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

SAMPLED_ROWS = 64
"""Rows of an indexer call that are compared; a whole prefill chunk's logits would not fit a second time."""

found: dict[str, dict[str, float]] = {}
logits_arguments: list[tuple] = []


def record(kind: str, rows: int, **errors: float) -> None:
    bucket = next(limit for limit in (1, 16, 64, 1024, 8192, 1 << 30) if rows <= limit)
    entry = found.setdefault(f"{kind}, up to {bucket} rows", {"calls": 0})
    entry["calls"] += 1
    for name, value in errors.items():
        entry[name] = max(entry.get(name, 0.0), value)
    path = f"{os.environ['DSV4_SEAM_SHADOW']}-{os.getpid()}.json"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(f"{path}.new", path)


def difference(ours: object, theirs: object) -> tuple[float, float]:
    """Relative Frobenius norms of the difference: of the whole, and of the worst row."""
    ours, theirs = ours.double().flatten(1), theirs.double().flatten(1)
    rows = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-30)
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item(), rows.max().item()


def attention(original: Callable, **kwargs: object) -> tuple:
    """AROUND the attention of this GPU."""
    from dsv4_seam import SM120_ARGUMENTS
    from dsv4_sm120.ops.decode import flash_mla_with_kvcache_sm120

    theirs = original(**kwargs)
    ours = flash_mla_with_kvcache_sm120(**{name: kwargs.get(name) for name in SM120_ARGUMENTS})
    extra = kwargs.get("extra_k_cache")
    kind = "window only" if extra is None else f"window and pages of {extra.shape[1]}"
    whole, row = difference(ours[0], theirs[0])
    record(f"decode, {kind}", theirs[0].shape[0], whole=whole, worst_row=row)
    return theirs


def logits(original: Callable, *args: object) -> object:
    """AROUND the indexer's logits: keep the arguments for the top-k that follows."""
    logits_arguments[:] = [args]
    return original(*args)


def topk(original: Callable, scores: object, lengths: object, tables: object, out: object, page: int, raw=None) -> None:
    """AROUND top-k: our pair on the arguments of both, judged by SGLang's logits."""
    import torch
    from dsv4_sm120.ops.indexer import indexer_logits, topk_transform

    original(scores, lengths, tables, out, page, raw)
    ours, positions = torch.full_like(out, -7), torch.full_like(out, -7)
    topk_transform(indexer_logits(*logits_arguments[0]), lengths, tables, ours, page, positions)
    rows = torch.linspace(0, out.shape[0] - 1, min(SAMPLED_ROWS, out.shape[0]), device=out.device).long()
    short, swapped = 0.0, 0.0
    for row in rows.tolist():
        length, k = int(lengths[row]), out.shape[1]
        chosen = positions[row][positions[row] >= 0].long()
        live = scores[row, :length]
        assert chosen.numel() == min(length, k) and chosen.unique().numel() == chosen.numel(), "not k different tokens"
        if length > k:
            worst = live.topk(k).values[-1] - live[chosen].min()
            short = max(short, (worst / live.abs().max()).item())
        ids, other = set(ours[row].tolist()), set(out[row].tolist())
        swapped = max(swapped, len(ids - other) / k)
    record("indexer", out.shape[0], short_of_the_kth=short, share_swapped=swapped)


def mhc(original: Callable, *args: object, **kwargs: object) -> tuple:
    """AROUND the MHC boundary."""
    from dsv4_sm120.ops.mhc import mhc_fused_post_pre

    theirs = original(*args, **kwargs)
    ours = mhc_fused_post_pre(*args, **kwargs)
    names = ("residual", "post_mix", "comb_mix", "layer_input")
    errors = {name: difference(a, b)[0] for name, a, b in zip(names, ours, theirs, strict=True)}
    record("mhc", theirs[3].numel() // theirs[3].shape[-1], **errors)
    return theirs


HOOKS = {
    "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache": attention,
    "sglang.kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits": logits,
    "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged": topk,
    "sglang.kernels.ops.layernorm.mhc.mhc_fused_post_pre": mhc,
}
