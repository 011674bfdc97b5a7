"""Manifold-constrained hyper-connections (MHC) of DeepSeek-V4 in plain torch, float64 by default.

A token carries ``hc_mult`` = 4 residual streams ``[4, hidden]``. ``post`` writes a sublayer's output back into them;
``pre`` mixes them into the next sublayer's input and derives the coefficients of the next ``post``. The model runs
``post`` and ``pre`` back to back at every sublayer boundary, with the streams rounded to bf16 in between.
"""

import torch


def post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """New residual streams, bf16 ``[T, 4, hidden]``: j is ``post_mix[j] * x + sum_k comb_mix[k, j] * residual[k]``.

    ``x`` bf16 ``[T, hidden]``, ``residual`` bf16 ``[T, 4, hidden]``, ``post_mix`` fp32 ``[T, 4]`` or ``[T, 4, 1]``,
    ``comb_mix`` fp32 ``[T, 4, 4]``.
    """
    gain = post_mix.reshape(residual.shape[:2]).to(dtype)
    carried = comb_mix.to(dtype).transpose(1, 2) @ residual.to(dtype)
    return (gain.unsqueeze(-1) * x.unsqueeze(1).to(dtype) + carried).to(torch.bfloat16)


def sinkhorn(logits: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    """Nearly doubly stochastic ``[T, 4, 4]``: row softmax, then columns and rows divided by their sums, in turn."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(post_mix [T, 4, 1], comb_mix [T, 4, 4], layer_input [T, hidden])``, all in ``dtype``.

    ``residual`` bf16 ``[T, 4, hidden]``, ``fn`` fp32 ``[24, 4 * hidden]``, ``hc_scale`` fp32 ``[3]``, ``hc_base`` fp32
    ``[24]``. With ``norm_weight`` the layer input is RMS-normalised as SGLang's fused kernel does it: the statistics
    come from the unrounded mixture, the normalised values from the mixture rounded to bf16.
    """
    tokens, streams, _ = residual.shape
    flat = residual.to(dtype).flatten(1)
    mixes = flat @ fn.to(dtype).T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    raw = mixes.split([streams, streams, streams * streams], dim=-1)
    base = hc_base.to(dtype).split([streams, streams, streams * streams])
    pre_logits, post_logits, comb_logits = (r * s + b for r, s, b in zip(raw, hc_scale.to(dtype), base, strict=True))

    post_mix = hc_post_mult_value * torch.sigmoid(post_logits)
    comb_mix = sinkhorn(comb_logits.view(tokens, streams, streams), sinkhorn_repeat, hc_sinkhorn_eps)
    pre_mix = torch.sigmoid(pre_logits) + hc_pre_eps
    layer_input = (pre_mix.unsqueeze(-1) * residual.to(dtype)).sum(1)
    if norm_weight is not None:
        inv_rms = torch.rsqrt(layer_input.square().mean(-1, keepdim=True) + norm_eps)
        layer_input = layer_input.bfloat16().to(dtype) * inv_rms * norm_weight.bfloat16().to(dtype)
    return post_mix.unsqueeze(-1), comb_mix, layer_input
