"""Inputs and comparisons shared by the start-up self-check, the tests and the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from . import naive

BF16_ULP = 2.0**-7
"""Largest step between neighbouring bf16 values, relative to the smaller of them."""

COEFFICIENTS = 2e-5
"""Relative error allowed in post_mix and comb_mix: two bf16 parts keep 16 bits of the weight."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``mhc_fused_post_pre``, shapes as documented there."""

    x: torch.Tensor
    residual: torch.Tensor
    post_layer_mix: torch.Tensor
    comb_res_mix: torch.Tensor
    fn: torch.Tensor
    hc_scale: torch.Tensor
    hc_base: torch.Tensor
    rms_eps: float = 1e-6
    hc_pre_eps: float = 1e-6
    hc_sinkhorn_eps: float = 1e-6
    hc_post_mult_value: float = 2.0
    sinkhorn_repeat: int = 20
    norm_weight: torch.Tensor | None = None
    norm_eps: float | None = None

    def kwargs(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def pre_kwargs(self, residual: torch.Tensor) -> dict:
        boundary = ("x", "post_layer_mix", "comb_res_mix")
        return {k: v for k, v in self.kwargs().items() if k not in boundary} | {"residual": residual}


def inputs(tokens: int, hidden: int, device: torch.device | str, seed: int = 0, norm: bool = True) -> Inputs:
    """Random inputs of the magnitudes a trained model shows: streams of unit size, logits of a few units."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=gen)

    return Inputs(
        x=normal(tokens, hidden).bfloat16(),
        residual=normal(tokens, 4, hidden).bfloat16(),
        post_layer_mix=2 * torch.sigmoid(normal(tokens, 4, 1)),
        comb_res_mix=naive.sinkhorn(normal(tokens, 4, 4), 20, 1e-6).contiguous(),
        fn=normal(24, 4 * hidden) * hidden**-0.5,
        hc_scale=normal(3).abs() + 0.5,
        hc_base=normal(24),
        norm_weight=(1 + 0.1 * normal(hidden)).bfloat16() if norm else None,
        norm_eps=1e-6 if norm else None,
    )


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative Frobenius error; infinity when ``out`` is not finite."""
    out, truth = out.double(), truth.double()
    if not torch.isfinite(out).all():
        return float("inf")
    return ((out - truth).norm() / truth.norm().clamp(min=1e-300)).item()


def check_fused(
    fused: Callable, case: Inputs, rows: int | None = None, coefficients: float = COEFFICIENTS
) -> dict[str, float]:
    """Run ``fused`` (signature of ``mhc_fused_post_pre``) and compare it with ``naive``; returns the errors.

    New streams and layer input must be within one bf16 step of the fp64 truth, ``post_mix`` and ``comb_mix`` within a
    relative error of ``coefficients``. What follows from the new streams is judged from those ``fused`` itself
    returned. Only ``rows`` evenly spaced tokens are compared when given.
    """
    outputs = fused(**case.kwargs())
    tokens = case.x.shape[0]
    picked = torch.arange(tokens, device=case.x.device)
    if rows is not None and rows < tokens:
        picked = torch.linspace(0, tokens - 1, rows, device=case.x.device).long()
    residual, post_mix, comb_mix, layer_input = (o[picked] for o in outputs)

    want = naive.post(*(t[picked] for t in (case.x, case.residual, case.post_layer_mix, case.comb_res_mix)))
    check_bf16("residual", residual, want)
    return {"residual": error(residual, want)} | check_pre(
        (post_mix, comb_mix, layer_input), case, residual, coefficients
    )


def check_pre(outputs, case: Inputs, residual: torch.Tensor, coefficients: float = COEFFICIENTS) -> dict[str, float]:
    """Compare ``(post_mix, comb_mix, layer_input)`` with ``naive.pre(residual)``; returns the relative errors."""
    want = naive.pre(**case.pre_kwargs(residual))
    errors = {n: error(o, w) for n, o, w in zip(("post_mix", "comb_mix", "layer_input"), outputs, want, strict=True)}
    for name in ("post_mix", "comb_mix"):
        assert errors[name] <= coefficients, f"{name}: relative error {errors[name]:.1e}, at most {coefficients:.1e}"
    # The mixture is rounded to bf16 before the norm and the result again after it; its gates are as exact as post_mix.
    check_bf16("layer_input", outputs[2], want[2], 1 if case.norm_weight is None else 2, noise=coefficients)
    return errors


def check_bf16(name: str, out: torch.Tensor, truth: torch.Tensor, steps: int = 1, noise: float = 1e-6) -> None:
    """Every element of bf16 ``out`` within ``steps`` bf16 steps of ``truth``.

    Terms may cancel: what is left of them is right to ``noise`` times the largest element of the row only.
    """
    out, truth = out.double(), truth.double()
    assert torch.isfinite(out).all(), f"{name}: not finite"
    below = noise * truth.abs().amax(-1, keepdim=True)
    worst = ((out - truth).abs() - below) / truth.abs().clamp(min=1e-30)
    assert worst.max() <= steps * BF16_ULP, f"{name}: {worst.max():.1e} relative, more than {steps} bf16 step(s)"
