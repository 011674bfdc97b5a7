"""MHC (manifold-constrained hyper-connections): SGLang 0.5.23's ``mhc_pre`` and ``mhc_fused_post_pre`` on tensor cores.

Signatures, shapes, dtypes and assertions are those of ``sglang/kernels/ops/layernorm/mhc.py``. ``hc_mult`` is 4 and the
hidden size one of ``HIDDEN_SIZES``.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from ... import config

if TYPE_CHECKING:
    from ...aot import AotCase
    from .kernel import Boundary, Constants, Settings, Tile

HC_MULT = 4
HIDDEN_SIZES = (4096, 7168)
"""DeepSeek-V4-Flash and -Pro."""

SIGNATURES = {
    "sglang.kernels.ops.layernorm.mhc.mhc_fused_post_pre": "mhc_fused_post_pre",
    "sglang.kernels.ops.layernorm.mhc.mhc_pre": "mhc_pre",
}
"""SGLang function -> the function here that replaces it."""

Allocator = Callable[[int, int, torch.device], torch.Tensor]


def _allocate(tokens: int, hidden: int, device: torch.device) -> torch.Tensor:
    return torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)


_allocator: Allocator = _allocate


def set_layer_input_allocator(allocator: Allocator) -> None:
    """Allocate ``layer_input`` bf16 ``[tokens, hidden]`` with ``allocator(tokens, hidden, device)`` from now on.

    SGLang takes it from its symmetric memory pool when that is enabled, so that the all-reduce after the experts, which
    write into the same buffer, finds it there.
    """
    global _allocator
    _allocator = allocator


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    n_splits_pre: int = 32,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients and layer input of the residual streams, see ``naive.pre``.

    ``residual`` bf16 ``[..., 4, hidden]``; ``n_splits`` and ``n_splits_pre`` are unused. Returns fp32 ``post_mix
    [..., 4, 1]``, fp32 ``comb_mix [..., 4, 4]`` and bf16 ``layer_input [..., hidden]``. Raises ``AssertionError`` where
    SGLang does, ``ValueError`` for shapes without a config.
    """
    from .kernel import Constants

    constants = Constants(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps)
    _check(residual, fn, hc_scale, hc_base, norm_weight, norm_eps)
    _, post_mix, comb_mix, layer_input = _run(residual, fn, hc_scale, hc_base, norm_weight, constants, None)
    return post_mix, comb_mix, layer_input


def mhc_fused_post_pre(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``naive.post`` of one sublayer, then ``naive.pre`` of the next. ``n_splits`` and ``tile_n`` are unused.

    ``x`` bf16 ``[..., hidden]``, ``residual`` bf16 ``[..., 4, hidden]``, ``post_layer_mix`` fp32 ``[..., 4]`` or
    ``[..., 4, 1]``, ``comb_res_mix`` fp32 ``[..., 4, 4]``. Returns the new residual, bf16, then what ``mhc_pre`` does.
    """
    from .kernel import Boundary, Constants

    outer, hidden = residual.shape[:-2], residual.shape[-1]
    assert x.dtype == torch.bfloat16
    assert post_layer_mix.dtype == torch.float32
    assert comb_res_mix.dtype == torch.float32
    assert x.shape == (*outer, hidden)
    assert post_layer_mix.shape in ((*outer, HC_MULT, 1), (*outer, HC_MULT))
    assert comb_res_mix.shape == (*outer, HC_MULT, HC_MULT)
    _check(residual, fn, hc_scale, hc_base, norm_weight, norm_eps)
    constants = Constants(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps)
    boundary = Boundary(x.contiguous(), post_layer_mix.contiguous(), comb_res_mix.contiguous())
    return _run(residual, fn, hc_scale, hc_base, norm_weight, constants, boundary)


def _check(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float | None,
) -> None:
    assert residual.dtype == torch.bfloat16
    assert fn.dtype == torch.float32
    assert hc_scale.dtype == torch.float32
    assert hc_base.dtype == torch.float32
    streams, hidden = residual.shape[-2:]
    mixes = streams * (2 + streams)
    assert fn.shape == (mixes, streams * hidden)
    assert hc_scale.shape == (3,)
    assert hc_base.shape == (mixes,)
    if norm_weight is not None:
        assert norm_eps is not None, "norm_eps required when norm_weight is provided"
        assert norm_weight.shape == (hidden,), f"norm_weight shape {tuple(norm_weight.shape)} != ({hidden},)"
    if streams != HC_MULT or hidden not in HIDDEN_SIZES:
        raise ValueError(f"MHC kernel: hc_mult {streams}, hidden size {hidden}; supported: {HC_MULT}, {HIDDEN_SIZES}")


def _run(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    constants: "Constants",
    boundary: "Boundary | None",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    outer, hidden = residual.shape[:-2], residual.shape[-1]
    flat = residual.contiguous().view(-1, HC_MULT, hidden)
    tokens = flat.shape[0]
    layer_input = _allocator(tokens, hidden, residual.device)
    if tokens:
        from .kernel import launch

        flat, post_mix, comb_mix = launch(
            flat,
            fn.contiguous(),
            hc_scale.contiguous(),
            hc_base.contiguous(),
            None if norm_weight is None else norm_weight.to(torch.bfloat16).contiguous(),
            layer_input,
            constants,
            select(tokens, hidden, residual.device),
            boundary,
        )
    else:  # a rank of data-parallel attention without requests
        post_mix = comb_mix = residual.new_empty(0, dtype=torch.float32)
    return (
        flat.view(residual.shape),
        post_mix.view(*outer, HC_MULT, 1),
        comb_mix.view(*outer, HC_MULT, HC_MULT),
        layer_input.view(*outer, hidden),
    )


def min_tokens(device: torch.device) -> int:
    """Smallest batch for which this op was measured faster than SGLang's; leave smaller ones to SGLang."""
    return config.load("mhc", config.arch_of(device.index or 0))["min_tokens"]


def select(tokens: int, hidden: int, device: torch.device) -> "Settings":
    """Shipped settings for a batch of ``tokens``."""
    from .kernel import Settings

    arch = config.arch_of(device.index or 0)
    shared = config.load("mhc", arch)
    tile = next(t for t in tiles(arch, hidden) if t.max_tokens is None or tokens <= t.max_tokens)
    return Settings(tile, shared["parts"], shared["pdl"])


@functools.cache
def tiles(arch: str, hidden: int) -> "tuple[Tile, ...]":
    """Shipped launch parameters for ``arch`` and ``hidden``, ascending in ``max_tokens``; the last one has no limit."""
    from .kernel import Tile

    return tuple(Tile(**entry) for entry in config.load("mhc", arch)["tiles"][str(hidden)])


def self_check(device: torch.device, hidden_size: int = HIDDEN_SIZES[0]) -> None:
    """Compare every shipped tile for ``hidden_size`` with ``naive`` on ``device``; ``AssertionError`` on a difference.

    One batch per tile, the largest it serves (4,096 tokens at most), of which 16 rows are compared. Compiles every
    kernel that serving will need.
    """
    from .checks import check_fused, inputs

    device = torch.device(device)
    smallest = 1
    for tile in tiles(config.arch_of(device.index or 0), hidden_size):
        tokens = max(smallest, min(tile.max_tokens or smallest, 4096))
        check_fused(mhc_fused_post_pre, inputs(tokens, hidden_size, device), rows=16)
        smallest = tokens + 1


def aot_cases(arch: str) -> "Iterator[AotCase]":
    """Both kernels for every shipped tile of ``arch``, as DeepSeek-V4 calls them: with norm, 20 Sinkhorn iterations."""
    from ...aot import AotCase
    from .kernel import finish_constexprs, mhc_finish_fwd_kernel, mhc_mix_fwd_kernel, mix_constexprs

    settings = config.load("mhc", arch)
    bf16, fp32 = "*bf16", "*fp32"
    mix = {"x": bf16, "post_mix": fp32, "comb_mix": fp32, "residual": bf16, "fn": fp32, "residual_out": bf16}
    mix |= {"partial": fp32, "num_tokens": "i32"}
    finish = {"partial": fp32, "hc_scale": fp32, "hc_base": fp32, "residual": bf16, "norm_weight": bf16}
    finish |= {"post_mix": fp32, "comb_mix": fp32, "layer_input": bf16, "num_tokens": "i32"}
    finish |= dict.fromkeys(("rms_eps", "pre_eps", "sinkhorn_eps", "post_mult", "norm_eps"), "fp32")
    for hidden in HIDDEN_SIZES:
        for tile in tiles(arch, hidden):
            name = f"hidden {hidden}, up to {tile.max_tokens or 'any'} tokens"
            for has_post in (True, False):
                constexprs = mix_constexprs(hidden, tile, settings["parts"], settings["pdl"]) | {"HAS_POST": has_post}
                label = f"mhc_{'fused_post_pre' if has_post else 'pre'}_mix, {name}"
                yield AotCase(label, mhc_mix_fwd_kernel, mix, constexprs, tile.mix_warps, tile.mix_stages)
            constexprs = finish_constexprs(hidden, tile, settings["pdl"]) | {"HAS_NORM": True, "REPEAT": 20}
            yield AotCase(
                f"mhc_finish, {name}", mhc_finish_fwd_kernel, finish, constexprs, tile.finish_warps, tensor_cores=False
            )
