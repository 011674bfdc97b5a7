"""MHC boundaries: ours against SGLang's kernels and the torch reference, compiled and not.

Each call takes the next of several weights, as the boundaries of a model do, so that a weight is read from memory and
not from L2. The error is the larger of those of ``post_mix`` and ``comb_mix``, relative to fp64.
"""

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Built, Case, Contender
from dsv4_sm120.ops import mhc
from dsv4_sm120.ops.mhc import checks, naive

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
QUICK_TOKENS = (8, 32, 64, 512, 2048, 8192)
CHECKED_ROWS = 32
PEER_TOLERANCE = 1e-3
"""Peers may project in tf32."""
WEIGHT_BYTES_AHEAD = 96 * 2**20
"""Weights to rotate through: more than an H200's L2."""
BF16_ERROR = 4e-3
"""Relative Frobenius error of a bf16 result that was rounded twice."""


def optional(module: str):
    """The module, or None when it is not installed here."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def rows_of(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, tokens - 1, min(tokens, CHECKED_ROWS), device=device).long()


def contender(fused: Callable, case: checks.Inputs, tolerance: float) -> Contender:
    """``fused`` has the signature of ``mhc_fused_post_pre``."""
    hidden = case.x.shape[-1]
    count = max(2, WEIGHT_BYTES_AHEAD // (case.fn.numel() * case.fn.element_size()))
    weights = itertools.cycle([torch.randn_like(case.fn) * hidden**-0.5 for _ in range(count)])
    others = {name: value for name, value in case.kwargs().items() if name != "fn"}

    def error() -> float:
        rows = rows_of(case.x.shape[0], case.x.device)
        residual, *outputs = (output[rows] for output in fused(**case.kwargs()))
        want = naive.post(*(t[rows] for t in (case.x, case.residual, case.post_layer_mix, case.comb_res_mix)))
        checks.check_bf16("residual", residual, want)
        errors = [checks.error(o, w) for o, w in zip(outputs, naive.pre(**case.pre_kwargs(residual)), strict=True)]
        assert errors[2] <= BF16_ERROR, f"layer_input: relative error {errors[2]:.1e}"
        return max(errors[:2])

    return Contender(lambda: fused(fn=next(weights), **others), error, tolerance)


def reference(x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor, **pre):
    """``naive`` in fp32."""
    new = naive.post(x, residual, post_layer_mix, comb_res_mix, dtype=torch.float32)
    post_mix, comb_mix, layer_input = naive.pre(new, **pre, dtype=torch.float32)
    return new, post_mix, comb_mix, layer_input.bfloat16()


def peers(case: checks.Inputs) -> dict[str, Contender]:
    found: dict[str, Callable] = {"torch": reference}
    if case.x.shape[0] in QUICK_TOKENS[::3]:  # a compilation takes longer than all measurements of a case
        found["torch.compile"] = torch.compile(reference, dynamic=False)
    found |= stock_peers()
    return {name: contender(fused, case, PEER_TOLERANCE) for name, fused in found.items()}


def stock_peers() -> dict[str, Callable]:
    """SGLang's own: as it is on this GPU, and without DeepGEMM's product, which sm_120 does not have."""
    stock = optional("sglang.kernels.ops.layernorm.mhc")
    if stock is None or optional("tilelang") is None:
        return {}
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel

    # A server publishes its group of ranks; a process alone has none.
    get_parallel().override_permanently(tp_group=None)

    def without_deepgemm(**arguments: object) -> tuple:
        with envs.SGLANG_OPT_DEEPGEMM_HC_PRENORM.override(False):
            return stock.mhc_fused_post_pre(**arguments)

    return {"SGLang": stock.mhc_fused_post_pre, "SGLang, TileLang only": without_deepgemm}


def replay(case: checks.Inputs) -> None:
    """Capture once, replay with other contents, compare each time."""
    case = dataclasses.replace(case, **{k: v.clone() for k, v in case.kwargs().items() if isinstance(v, torch.Tensor)})
    tokens, hidden = case.x.shape
    mhc.mhc_fused_post_pre(**case.kwargs())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = mhc.mhc_fused_post_pre(**case.kwargs())
    for seed in (11, 12):
        other = checks.inputs(tokens, hidden, case.x.device, seed)
        for name, value in other.kwargs().items():
            if isinstance(value, torch.Tensor):
                getattr(case, name).copy_(value)
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        checks.check_fused(lambda **_: outputs, other, rows=CHECKED_ROWS)


def build(tokens: int, hidden: int, device: torch.device) -> Built:
    case = checks.inputs(tokens, hidden, device)
    streams = case.residual.numel() * case.residual.element_size()
    single = case.x.numel() * case.x.element_size()
    return Built(
        ours=contender(mhc.mhc_fused_post_pre, case, checks.COEFFICIENTS),
        peers=peers(case),
        bytes=2 * streams + 2 * single + case.fn.numel() * case.fn.element_size(),
        flops=2 * tokens * case.fn.numel(),
        replay=lambda: replay(case),
    )


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for hidden in mhc.HIDDEN_SIZES[:1] if quick else mhc.HIDDEN_SIZES:
        for tokens in QUICK_TOKENS if quick or hidden != mhc.HIDDEN_SIZES[0] else TOKENS:
            yield Case(
                "mhc",
                f"post and pre with norm, hidden {hidden}",
                {"tokens": tokens},
                lambda tokens=tokens, hidden=hidden: build(tokens, hidden, device),
            )
