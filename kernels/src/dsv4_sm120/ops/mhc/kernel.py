"""Triton kernels of MHC and their launcher: two launches per boundary, whatever the batch.

``mhc_mix_fwd_kernel`` forms the new residual streams, stores them, and projects them with the mixing weight on tensor
cores; programs split tokens and hidden. ``mhc_finish_fwd_kernel`` adds the splits, derives the coefficients and mixes
the layer's input. A row of the workspace between them is 32 floats: 24 projections, the sum of squares, padding.

The fp32 weight enters the tensor cores as ``PARTS`` bf16 parts that add up to it, split in registers. So there is no
second copy of the weights to store (129 MiB per rank for DeepSeek-V4-Flash) or to go stale when they are reloaded.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...triton_utils import INTERPRETED, dot, dot_acc

HC_MULT = tl.constexpr(4)
MIX = tl.constexpr(24)
"""Projections per token: 4 pre, 4 post, 4 x 4 comb. Column ``MIX`` of the workspace holds the sum of squares."""
MIX_PAD = tl.constexpr(32)


@triton.jit
def _bf16(value):
    """Round to nearest even as GPUs do; Triton's interpreter truncates, so there the rounding is added first."""
    if INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)
    return value.to(tl.bfloat16)


@triton.jit
def _masked(pointer, mask):
    """Load fp32 with zero where masked; by ``where`` for the reason given in ``_weight_parts``."""
    return tl.where(mask, tl.load(pointer, mask=mask), 0.0)


@triton.jit
def _post_column(post_mix, comb_mix, rows, mask, j):
    """Coefficients of the new stream ``j``, [BLOCK_M] each: of ``x`` and of the four old streams."""
    column = comb_mix + rows * (HC_MULT * HC_MULT) + j
    gain = _masked(post_mix + rows * HC_MULT + j, mask)
    c0, c1 = _masked(column, mask), _masked(column + HC_MULT, mask)
    c2, c3 = _masked(column + 2 * HC_MULT, mask), _masked(column + 3 * HC_MULT, mask)
    return gain[:, None], c0[:, None], c1[:, None], c2[:, None], c3[:, None]


@triton.jit
def _post(column, x, r0, r1, r2, r3):
    """One new stream: fp32 in SGLang's order of operations, rounded to bf16."""
    new = column[0] * x + column[1] * r0 + column[2] * r1 + column[3] * r2 + column[4] * r3
    return _bf16(new)


@triton.jit
def _weight_parts(weight, mask, part, PARTS: tl.constexpr):
    """bf16 [BLOCK_H, PARTS_PAD * 32]: an fp32 weight tile's parts side by side, so that one product does for all.

    Part 0 holds the high bits. The mask is applied by ``where`` to end Triton's search for the loads behind an operand:
    it would otherwise convert them to the operand's layout and repeat the splitting in every warp.
    """
    w = tl.where(mask, tl.load(weight, mask=mask, eviction_policy="evict_last"), 0.0)
    high = _bf16(w)
    rest = w - high.to(tl.float32)
    middle = _bf16(rest)
    parts = tl.where(part == 0, high, middle)
    if PARTS == 3:
        parts = tl.where(part == 2, _bf16(rest - middle.to(tl.float32)), parts)
    return tl.trans(parts)


@triton.jit
def _squares(s0, s1, s2, s3):
    f0, f1, f2, f3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
    return tl.sum(f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3, axis=1)


@triton.jit(do_not_specialize=["num_tokens"])
def mhc_mix_fwd_kernel(
    x,  # bf16 [T, HIDDEN]; unused without HAS_POST, as are the next two and residual_out
    post_mix,  # fp32 [T, 4]
    comb_mix,  # fp32 [T, 4, 4]
    residual,  # bf16 [T, 4, HIDDEN]
    fn,  # fp32 [24, 4 * HIDDEN]
    residual_out,  # bf16 [T, 4, HIDDEN]
    partial,  # fp32 [T, SPLITS, 32]
    num_tokens,
    HIDDEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_POST: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that run at the same time read neighbouring blocks of the same rows.
    split = tl.program_id(0)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = rows < num_tokens
    mask = mask_m[:, None]
    hidden = split * BLOCK_H + tl.arange(0, BLOCK_H)
    STEP: tl.constexpr = SPLITS * BLOCK_H
    PARTS_PAD: tl.constexpr = 2 if PARTS == 2 else 4
    cols = tl.arange(0, MIX_PAD)
    part = (tl.arange(0, PARTS_PAD * MIX_PAD) // MIX_PAD)[:, None]
    part_cols = (tl.arange(0, PARTS_PAD * MIX_PAD) % MIX_PAD)[:, None]
    mask_w = (part_cols < MIX) & (part < PARTS)

    x_tile = x + rows[:, None] * HIDDEN + hidden[None, :]
    stream_offsets = rows[:, None] * (HC_MULT * HIDDEN) + hidden[None, :]
    old = residual + stream_offsets
    new = residual_out + stream_offsets
    w_tile = fn + part_cols * (HC_MULT * HIDDEN) + hidden[None, :]

    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    if HAS_POST:
        column0 = _post_column(post_mix, comb_mix, rows, mask_m, 0)
        column1 = _post_column(post_mix, comb_mix, rows, mask_m, 1)
        column2 = _post_column(post_mix, comb_mix, rows, mask_m, 2)
        column3 = _post_column(post_mix, comb_mix, rows, mask_m, 3)
    acc = tl.zeros([BLOCK_M, PARTS_PAD * MIX_PAD], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for _ in range(HIDDEN // SPLITS // BLOCK_H):
        s0 = tl.load(old, mask=mask, other=0.0)
        s1 = tl.load(old + HIDDEN, mask=mask, other=0.0)
        s2 = tl.load(old + 2 * HIDDEN, mask=mask, other=0.0)
        s3 = tl.load(old + 3 * HIDDEN, mask=mask, other=0.0)
        if HAS_POST:
            xf = tl.load(x_tile, mask=mask, other=0.0).to(tl.float32)
            r0, r1, r2, r3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
            s0 = _post(column0, xf, r0, r1, r2, r3)
            s1 = _post(column1, xf, r0, r1, r2, r3)
            s2 = _post(column2, xf, r0, r1, r2, r3)
            s3 = _post(column3, xf, r0, r1, r2, r3)
            tl.store(new, s0, mask=mask)
            tl.store(new + HIDDEN, s1, mask=mask)
            tl.store(new + 2 * HIDDEN, s2, mask=mask)
            tl.store(new + 3 * HIDDEN, s3, mask=mask)
        squares += _squares(s0, s1, s2, s3)
        # Tensor cores truncate when they accumulate. A fresh accumulator per tile keeps that chain short; the tiles are
        # added with rounding.
        tile = dot(s0, _weight_parts(w_tile, mask_w, part, PARTS))
        tile = dot_acc(s1, _weight_parts(w_tile + HIDDEN, mask_w, part, PARTS), tile)
        tile = dot_acc(s2, _weight_parts(w_tile + 2 * HIDDEN, mask_w, part, PARTS), tile)
        tile = dot_acc(s3, _weight_parts(w_tile + 3 * HIDDEN, mask_w, part, PARTS), tile)
        acc += tile
        x_tile += STEP
        old += STEP
        new += STEP
        w_tile += STEP

    mixes = tl.sum(tl.reshape(acc, [BLOCK_M, PARTS_PAD, MIX_PAD]), axis=1)
    out = tl.where(cols[None, :] == MIX, squares[:, None], mixes)
    tl.store(partial + (rows[:, None] * SPLITS + split) * MIX_PAD + cols[None, :], out, mask=mask)


@triton.jit
def _sinkhorn(comb, REPEAT: tl.constexpr, eps):
    """Row softmax, then alternate column and row normalisation of [N, 4, 4] logits."""
    comb = tl.exp(comb - tl.max(comb, axis=2)[:, :, None])
    comb = comb / tl.sum(comb, axis=2)[:, :, None] + eps
    comb = comb / (tl.sum(comb, axis=1)[:, None, :] + eps)
    for _ in range(REPEAT - 1):
        comb = comb / (tl.sum(comb, axis=2)[:, :, None] + eps)
        comb = comb / (tl.sum(comb, axis=1)[:, None, :] + eps)
    return comb


@triton.jit
def _inv_rms(squares, hc_hidden, eps):
    return tl.rsqrt(squares / hc_hidden + eps)


@triton.jit
def _pre_column(row, splits, mask, j):
    """Sum over the splits of workspace column ``j`` of one token."""
    return tl.sum(tl.load(row + splits * MIX_PAD + j, mask=mask, other=0.0))


@triton.jit(do_not_specialize=["num_tokens"])
def mhc_finish_fwd_kernel(
    partial,  # fp32 [T, SPLITS, 32]
    hc_scale,  # fp32 [3]
    hc_base,  # fp32 [24]
    residual,  # bf16 [T, 4, HIDDEN]: the new streams
    norm_weight,  # bf16 [HIDDEN]; unused without HAS_NORM
    post_mix,  # fp32 [T, 4]
    comb_mix,  # fp32 [T, 4, 4]
    layer_input,  # bf16 [T, HIDDEN]
    num_tokens,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    norm_eps,
    HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first ``cdiv(T, BLOCK_T)`` programs write post_mix and comb_mix, the others one row of layer_input each.

    Sinkhorn is a chain of 2 * REPEAT dependent steps; programs of its own overlap it with the others' memory traffic.
    """
    pid = tl.program_id(0)
    splits = tl.arange(0, SPLITS_PAD)
    mask_s = splits < SPLITS
    coefficient_programs = tl.cdiv(num_tokens, BLOCK_T)
    if pid < coefficient_programs:
        j = tl.arange(0, HC_MULT)
        jk = j[:, None] * HC_MULT + j[None, :]
        scale_post = tl.load(hc_scale + 1)
        scale_comb = tl.load(hc_scale + 2)
        base_post = tl.load(hc_base + HC_MULT + j)
        base_comb = tl.load(hc_base + 2 * HC_MULT + jk)
        tokens = pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = tokens < num_tokens
        rows = partial + (tokens[:, None] * SPLITS + splits[None, :]) * MIX_PAD
        mask = mask_t[:, None] & mask_s[None, :]
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        squares = tl.sum(tl.load(rows + MIX, mask=mask, other=0.0), axis=1)
        post = tl.load(rows[:, :, None] + HC_MULT + j[None, None, :], mask=mask[:, :, None], other=0.0)
        comb = tl.load(
            rows[:, :, None, None] + 2 * HC_MULT + jk[None, None, :, :], mask=mask[:, :, None, None], other=0.0
        )
        inv_rms = _inv_rms(squares, HC_MULT * HIDDEN, rms_eps)
        post = tl.sum(post, axis=1) * inv_rms[:, None] * scale_post + base_post[None, :]
        tl.store(post_mix + tokens[:, None] * HC_MULT + j[None, :], post_mult * tl.sigmoid(post), mask=mask_t[:, None])
        comb = tl.sum(comb, axis=1) * inv_rms[:, None, None] * scale_comb + base_comb[None, :, :]
        tl.store(
            comb_mix + tokens[:, None, None] * (HC_MULT * HC_MULT) + jk[None, :, :],
            _sinkhorn(comb, REPEAT, sinkhorn_eps),
            mask=mask_t[:, None, None],
        )
    else:
        # Last token first: its streams were written last and are the likeliest to be in L2 still.
        token = (num_tokens - 1 - (pid - coefficient_programs)).to(tl.int64)
        hidden = tl.arange(0, HIDDEN_PAD)
        mask_h = hidden < HIDDEN
        if HAS_NORM:
            gain = tl.load(norm_weight + hidden, mask=mask_h, other=0.0)
        scale_pre = tl.load(hc_scale)
        base0, base1 = tl.load(hc_base), tl.load(hc_base + 1)
        base2, base3 = tl.load(hc_base + 2), tl.load(hc_base + 3)
        stream = residual + token * (HC_MULT * HIDDEN) + hidden
        row = partial + token * (SPLITS * MIX_PAD)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        s0 = tl.load(stream, mask=mask_h, other=0.0, eviction_policy="evict_first")
        s1 = tl.load(stream + HIDDEN, mask=mask_h, other=0.0, eviction_policy="evict_first")
        s2 = tl.load(stream + 2 * HIDDEN, mask=mask_h, other=0.0, eviction_policy="evict_first")
        s3 = tl.load(stream + 3 * HIDDEN, mask=mask_h, other=0.0, eviction_policy="evict_first")
        scale_pre *= _inv_rms(_pre_column(row, splits, mask_s, MIX), HC_MULT * HIDDEN, rms_eps)
        pre0 = tl.sigmoid(_pre_column(row, splits, mask_s, 0) * scale_pre + base0) + pre_eps
        pre1 = tl.sigmoid(_pre_column(row, splits, mask_s, 1) * scale_pre + base1) + pre_eps
        pre2 = tl.sigmoid(_pre_column(row, splits, mask_s, 2) * scale_pre + base2) + pre_eps
        pre3 = tl.sigmoid(_pre_column(row, splits, mask_s, 3) * scale_pre + base3) + pre_eps
        y = pre0 * s0.to(tl.float32) + pre1 * s1.to(tl.float32)
        y += pre2 * s2.to(tl.float32) + pre3 * s3.to(tl.float32)
        if HAS_NORM:
            inv_norm = tl.rsqrt(tl.sum(y * y) / HIDDEN + norm_eps)
            y = _bf16(y).to(tl.float32) * inv_norm * gain.to(tl.float32)
        tl.store(layer_input + token * HIDDEN + hidden, _bf16(y), mask=mask_h)


@dataclass(frozen=True)
class Tile:
    """Launch parameters for batches of up to ``max_tokens`` tokens (``None``: any), for one hidden size."""

    max_tokens: int | None
    block_m: int
    """Tokens per program of the mix kernel."""
    block_h: int
    """Hidden positions per loop iteration of the mix kernel."""
    splits: int
    """Programs that share the hidden size; ``splits * block_h`` divides it."""
    mix_warps: int
    mix_stages: int
    block_t: int
    """Tokens per coefficient program of the finish kernel."""
    finish_warps: int


@dataclass(frozen=True)
class Settings:
    """A tile, the number of bf16 parts the weight is split into, and use of programmatic dependent launch.

    With ``pdl`` the second kernel is resident before the first one has drained, and waits for it on the device.
    """

    tile: Tile
    parts: int
    pdl: bool


@dataclass(frozen=True)
class Constants:
    """The scalars of ``mhc_pre``. ``norm_eps`` is unused without a norm weight."""

    rms_eps: float
    pre_eps: float
    sinkhorn_eps: float
    post_mult: float
    sinkhorn_repeat: int
    norm_eps: float | None = None


@dataclass(frozen=True)
class Boundary:
    """Output ``x [T, hidden]`` of the previous sublayer and the coefficients that write it back."""

    x: torch.Tensor
    post_mix: torch.Tensor
    comb_mix: torch.Tensor


def launch(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    layer_input: torch.Tensor,
    constants: Constants,
    settings: Settings,
    boundary: Boundary | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run both kernels on at least one token and return ``(residual, post_mix [T, 4], comb_mix [T, 4, 4])``.

    ``residual`` bf16 ``[T, 4, hidden]``; ``layer_input`` bf16 ``[T, hidden]`` is written. Without ``boundary`` the
    streams are taken as they are. Everything is contiguous.
    """
    tokens, streams, hidden = residual.shape
    tile, pdl = settings.tile, settings.pdl and not INTERPRETED.value
    new_residual = residual if boundary is None else torch.empty_like(residual)
    partial = residual.new_empty((tokens, tile.splits, MIX_PAD.value), dtype=torch.float32)
    post_mix = residual.new_empty((tokens, streams), dtype=torch.float32)
    comb_mix = residual.new_empty((tokens, streams, streams), dtype=torch.float32)
    options = {"launch_pdl": True} if pdl else {}
    mhc_mix_fwd_kernel[(tile.splits, triton.cdiv(tokens, tile.block_m))](
        residual if boundary is None else boundary.x,
        fn if boundary is None else boundary.post_mix,
        fn if boundary is None else boundary.comb_mix,
        residual,
        fn,
        new_residual,
        partial,
        tokens,
        HAS_POST=boundary is not None,
        **mix_constexprs(hidden, tile, settings.parts, pdl),
        num_warps=tile.mix_warps,
        num_stages=tile.mix_stages,
        **options,
    )
    mhc_finish_fwd_kernel[(triton.cdiv(tokens, tile.block_t) + tokens,)](
        partial,
        hc_scale,
        hc_base,
        new_residual,
        residual if norm_weight is None else norm_weight,
        post_mix,
        comb_mix,
        layer_input,
        tokens,
        constants.rms_eps,
        constants.pre_eps,
        constants.sinkhorn_eps,
        constants.post_mult,
        0.0 if norm_weight is None else constants.norm_eps,
        HAS_NORM=norm_weight is not None,
        REPEAT=constants.sinkhorn_repeat,
        **finish_constexprs(hidden, tile, pdl),
        num_warps=tile.finish_warps,
        **options,
    )
    return new_residual, post_mix, comb_mix


def mix_constexprs(hidden: int, tile: Tile, parts: int, pdl: bool) -> dict[str, object]:
    """Compile-time arguments of the mix kernel that follow from the configuration."""
    return {
        "HIDDEN": hidden,
        "SPLITS": tile.splits,
        "BLOCK_M": tile.block_m,
        "BLOCK_H": tile.block_h,
        "PARTS": parts,
        "PDL": pdl,
    }


def finish_constexprs(hidden: int, tile: Tile, pdl: bool) -> dict[str, object]:
    """Compile-time arguments of the finish kernel that follow from the configuration."""
    return {
        "HIDDEN": hidden,
        "HIDDEN_PAD": triton.next_power_of_2(hidden),
        "SPLITS": tile.splits,
        "SPLITS_PAD": triton.next_power_of_2(tile.splits),
        "BLOCK_T": tile.block_t,
        "PDL": pdl,
    }
