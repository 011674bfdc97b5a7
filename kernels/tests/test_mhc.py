"""MHC kernels against ``naive`` in fp64: adversarial values, ragged batches, unwritten and stale memory."""

import dataclasses
import itertools

import pytest
import torch

from aot_checks import check_reports
from dsv4_sm120 import config
from dsv4_sm120.ops import mhc
from dsv4_sm120.ops.mhc import checks, naive
from dsv4_sm120.ops.mhc.kernel import Boundary, Constants, Settings, Tile, launch

HIDDEN = 192
SMALL = {
    "one step, 3 splits": Tile(None, 16, 64, 3, 4, 1, 1, 4),
    "two steps, 3 splits": Tile(None, 32, 32, 3, 4, 1, 4, 4),
    "three steps, 1 split": Tile(None, 16, 64, 1, 4, 1, 32, 4),
}
"""Shapes like those of shipped tiles, for a hidden size that is no power of two and quick to interpret."""

STACK_LIMIT_BYTES = 8
"""ptxas reserves one slot of 8 bytes in some tiles, depending on the Triton release."""


def small(tile: Tile, parts: int = 2):
    """``mhc_fused_post_pre`` for any hidden size, with ``tile``."""

    def fused(
        x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps,
        hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps,
    ):  # fmt: skip
        layer_input = torch.empty_like(x)
        constants = Constants(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps)
        settings = Settings(tile, parts, pdl=x.is_cuda)
        boundary = Boundary(x, post_layer_mix, comb_res_mix)
        new, post_mix, comb_mix = launch(
            residual, fn, hc_scale, hc_base, norm_weight, layer_input, constants, settings, boundary
        )
        return new, post_mix.unsqueeze(-1), comb_mix, layer_input

    return fused


@pytest.mark.parametrize(
    ("tokens", "name", "norm"),
    [
        (1, "one step, 3 splits", True),
        (1, "three steps, 1 split", False),
        (15, "three steps, 1 split", True),
        (31, "two steps, 3 splits", False),
        (32, "two steps, 3 splits", True),
        (33, "two steps, 3 splits", True),
        (17, "one step, 3 splits", False),
        (33, "three steps, 1 split", True),
    ],
)
def test_tokens(tokens: int, name: str, norm: bool, device: str) -> None:
    checks.check_fused(small(SMALL[name]), checks.inputs(tokens, HIDDEN, device, norm=norm))


@pytest.mark.parametrize(("parts", "tolerance"), [(2, 2e-5), (3, 2e-6)])
def test_parts_set_the_precision(parts: int, tolerance: float, device: str) -> None:
    case = checks.inputs(5, HIDDEN, device)
    tile = SMALL["one step, 3 splits"]
    errors = checks.check_fused(small(tile, parts), case, coefficients=tolerance)
    assert (errors["post_mix"] > 2e-7) == (parts == 2), "the number of parts has no effect"


def scaled(case: checks.Inputs, **factors: float) -> checks.Inputs:
    return dataclasses.replace(case, **{name: getattr(case, name) * factor for name, factor in factors.items()})


VALUES = {
    "huge streams": {"residual": 1e8, "x": 1e8},
    "tiny streams": {"residual": 1e-15, "x": 1e-15},
    "zero streams": {"residual": 0.0, "x": 0.0},
    "zero output of the sublayer": {"x": 0.0},
    "streams of very different size": {"x": 1e6},
    "zero weight": {"fn": 0.0},
    "huge weight, small scale": {"fn": 1e20, "hc_scale": 1e-20},
    "tiny weight, large scale": {"fn": 1e-20, "hc_scale": 1e20},
    "saturated gates": {"hc_base": 200.0},
    "no carried streams": {"comb_res_mix": 0.0},
}


@pytest.mark.parametrize("factors", VALUES.values(), ids=VALUES.keys())
def test_values(factors: dict[str, float], device: str) -> None:
    case = scaled(checks.inputs(5, HIDDEN, device), **factors)
    checks.check_fused(small(SMALL["two steps, 3 splits"]), case)


def test_equal_logits_give_a_uniform_comb_mix(device: str) -> None:
    case = scaled(checks.inputs(3, HIDDEN, device), hc_scale=0.0, hc_base=0.0)
    _, post_mix, comb_mix, _ = small(SMALL["three steps, 1 split"])(**case.kwargs())
    torch.testing.assert_close(comb_mix, torch.full_like(comb_mix, 0.25), rtol=1e-5, atol=0)
    torch.testing.assert_close(post_mix, torch.ones_like(post_mix))


def test_comb_mix_is_doubly_stochastic(device: str) -> None:
    case = scaled(checks.inputs(5, HIDDEN, device), hc_scale=0.2, hc_base=0.2)
    comb_mix = small(SMALL["one step, 3 splits"])(**case.kwargs())[2]
    for axis in (1, 2):
        torch.testing.assert_close(comb_mix.sum(axis), torch.ones(5, 4, device=device), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["one step, 3 splits", "two steps, 3 splits"])
def test_a_bad_token_spoils_no_other(name: str, device: str) -> None:
    """Rows of NaN and infinity, as an idle slot of a graph may hold, inside the batch and right behind it."""
    case = checks.inputs(12, HIDDEN, device)
    spoilt = {n: getattr(case, n).clone() for n in ("x", "residual", "post_layer_mix", "comb_res_mix")}
    for tensor in spoilt.values():
        tensor[7] = float("nan")
        tensor[9:] = float("inf")
    batch = dataclasses.replace(case, **{n: t[:9] for n, t in spoilt.items()})
    good = [t for t in range(9) if t != 7]
    for out, want in zip(small(SMALL[name])(**batch.kwargs()), small(SMALL[name])(**case.kwargs()), strict=True):
        assert torch.equal(out[good], want[good])


@pytest.mark.parametrize("name", ["one step, 3 splits", "two steps, 3 splits"])
def test_a_row_does_not_depend_on_its_batch(name: str, device: str) -> None:
    """Same tile, same bits. (Different batch sizes may pick different tiles.)"""
    case = checks.inputs(17, HIDDEN, device)
    rows = {n: getattr(case, n)[16:] for n in ("x", "residual", "post_layer_mix", "comb_res_mix")}
    alone = small(SMALL[name])(**dataclasses.replace(case, **rows).kwargs())
    for out, want in zip(alone, small(SMALL[name])(**case.kwargs()), strict=True):
        assert torch.equal(out, want[16:])


def test_shipped_tile_at_full_size(device: str) -> None:
    checks.check_fused(mhc.mhc_fused_post_pre, checks.inputs(1, mhc.HIDDEN_SIZES[0], device))


def test_leading_shapes_and_strides(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``[..., 4, hidden]`` in, the same leading dimensions out; ``post_layer_mix`` with or without its last axis."""
    monkeypatch.setattr(mhc, "HIDDEN_SIZES", (HIDDEN,))
    monkeypatch.setattr(mhc, "select", lambda *_: Settings(SMALL["one step, 3 splits"], 2, False))
    case = checks.inputs(4, HIDDEN, device)
    flat = mhc.mhc_fused_post_pre(**case.kwargs())
    nested = {n: getattr(case, n).unflatten(0, (2, 2)) for n in ("x", "residual", "post_layer_mix", "comb_res_mix")}
    nested["post_layer_mix"] = nested["post_layer_mix"].squeeze(-1)
    nested["comb_res_mix"] = nested["comb_res_mix"].transpose(-1, -2).contiguous().transpose(-1, -2)
    for out, want in zip(mhc.mhc_fused_post_pre(**case.kwargs() | nested), flat, strict=True):
        assert torch.equal(out, want.unflatten(0, (2, 2)))
    outputs = mhc.mhc_pre(**case.pre_kwargs(nested["residual"]))
    assert [tuple(o.shape) for o in outputs] == [(2, 2, 4, 1), (2, 2, 4, 4), (2, 2, HIDDEN)]
    checks.check_pre([o.flatten(0, 1) for o in outputs], case, case.residual)


def test_no_tokens(device: str) -> None:
    case = checks.inputs(0, 4096, device)
    residual, post_mix, comb_mix, layer_input = mhc.mhc_fused_post_pre(**case.kwargs())
    assert (residual.shape, residual.dtype) == ((0, 4, 4096), torch.bfloat16)
    assert (post_mix.shape, post_mix.dtype) == ((0, 4, 1), torch.float32)
    assert (comb_mix.shape, comb_mix.dtype) == ((0, 4, 4), torch.float32)
    assert (layer_input.shape, layer_input.dtype) == ((0, 4096), torch.bfloat16)


def test_layer_input_comes_from_the_allocator(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mhc, "HIDDEN_SIZES", (HIDDEN,))
    monkeypatch.setattr(mhc, "select", lambda *_: Settings(SMALL["one step, 3 splits"], 2, False))
    monkeypatch.setattr(mhc, "_allocator", mhc._allocator)
    buffer = torch.empty(2, HIDDEN, dtype=torch.bfloat16, device=device)
    mhc.set_layer_input_allocator(lambda tokens, hidden, _: buffer[:tokens, :hidden])
    out = mhc.mhc_fused_post_pre(**checks.inputs(2, HIDDEN, device).kwargs())[3]
    assert out.data_ptr() == buffer.data_ptr()
    assert torch.isfinite(buffer).all()


BAD = {
    "fp32 residual": (AssertionError, {"residual": lambda t: t.float()}),
    "bf16 weight": (AssertionError, {"fn": lambda t: t.bfloat16()}),
    "x of another batch": (AssertionError, {"x": lambda t: t[:1]}),
    "norm weight of another width": (AssertionError, {"norm_weight": lambda t: t[1:]}),
    "norm weight without eps": (AssertionError, {"norm_eps": lambda _: None}),
    "hidden size without a config": (
        ValueError,
        {
            "x": lambda t: t[:, :64],
            "residual": lambda t: t[..., :64],
            "fn": lambda t: t[:, :256],
            "norm_weight": lambda t: t[:64],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("error", "changes"), BAD.values(), ids=BAD.keys())
def test_wrong_arguments_are_refused(error: type[Exception], changes: dict, device: str) -> None:
    kwargs = checks.inputs(2, 4096, device).kwargs()
    kwargs |= {name: change(kwargs[name]) for name, change in changes.items()}
    with pytest.raises(error):
        mhc.mhc_fused_post_pre(**kwargs)


@pytest.mark.parametrize(("arch", "hidden"), list(itertools.product(config.ARCHS, mhc.HIDDEN_SIZES)))
def test_shipped_tiles_cover_every_batch(arch: str, hidden: int) -> None:
    tiles = mhc.tiles(arch, hidden)
    limits = [t.max_tokens for t in tiles]
    assert limits[-1] is None
    assert limits[:-1] == sorted(set(limits[:-1]))
    assert all(hidden % (t.splits * t.block_h) == 0 for t in tiles)


@pytest.mark.parametrize("arch", config.ARCHS)
def test_shipped_configs_compile(arch: str, aot_reports) -> None:
    check_reports(aot_reports("mhc", arch), stack_limit=STACK_LIMIT_BYTES)


def test_checks_notice_a_wrong_result(device: str) -> None:
    case = checks.inputs(4, HIDDEN, device)
    right = small(SMALL["one step, 3 splits"])(**case.kwargs())
    for index in range(4):
        wrong = [output.clone() for output in right]
        wrong[index].view(4, -1)[3, 2] += 0.1
        with pytest.raises(AssertionError):
            checks.check_fused(lambda wrong=wrong, **_: wrong, case)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", mhc.HIDDEN_SIZES)
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 257, 1025, 2049, 8192])
def test_full_size(tokens: int, hidden: int) -> None:
    case = checks.inputs(tokens, hidden, "cuda")
    checks.check_fused(mhc.mhc_fused_post_pre, case, rows=64)
    checks.check_pre([o[:64] for o in mhc.mhc_pre(**case.pre_kwargs(case.residual))], case, case.residual[:64])


@pytest.mark.gpu
def test_capture_then_replay_with_other_contents() -> None:
    case = checks.inputs(48, 4096, "cuda")
    mhc.mhc_fused_post_pre(**case.kwargs())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = mhc.mhc_fused_post_pre(**case.kwargs())
    for seed in (1, 2):
        other = checks.inputs(48, 4096, "cuda", seed=seed)
        for name in ("x", "residual", "post_layer_mix", "comb_res_mix", "fn", "hc_scale", "hc_base", "norm_weight"):
            getattr(case, name).copy_(getattr(other, name))
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        checks.check_fused(lambda **_: outputs, other)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", mhc.HIDDEN_SIZES)
def test_self_check(hidden: int) -> None:
    mhc.self_check(torch.device("cuda"), hidden)


def test_naive_precision_is_what_it_is_told() -> None:
    case = checks.inputs(4, HIDDEN, "cpu")
    assert {o.dtype for o in naive.pre(**case.pre_kwargs(case.residual))} == {torch.float64}
    assert {o.dtype for o in naive.pre(**case.pre_kwargs(case.residual), dtype=torch.float32)} == {torch.float32}
