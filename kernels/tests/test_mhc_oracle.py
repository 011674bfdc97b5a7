"""``naive`` against two independent implementations: SGLang's torch functions and nano-deepseek-v4."""

import importlib
import inspect

import pytest
import torch

from dsv4_sm120.ops import mhc
from dsv4_sm120.ops.mhc import checks, naive

HIDDEN = 512


@pytest.fixture(scope="module")
def sglang_mhc():
    pytest.importorskip("sglang", reason="the oracle is SGLang itself")
    return importlib.import_module("sglang.kernels.ops.layernorm.mhc")


def test_post(sglang_mhc) -> None:
    case = checks.inputs(19, HIDDEN, "cpu")
    args = (case.x, case.residual, case.post_layer_mix, case.comb_res_mix)
    checks.check_bf16("residual", sglang_mhc._mhc_post_torch(*args), naive.post(*args))


def test_pre(sglang_mhc) -> None:
    case = checks.inputs(19, HIDDEN, "cpu", norm=False)
    kwargs = {k: v for k, v in case.pre_kwargs(case.residual).items() if not k.startswith("norm")}
    checks.check_pre(sglang_mhc._mhc_pre_torch(**kwargs), case, case.residual)


@pytest.mark.parametrize(("target", "name"), mhc.SIGNATURES.items())
def test_signatures(sglang_mhc, target: str, name: str) -> None:
    theirs = inspect.signature(getattr(sglang_mhc, target.rpartition(".")[2]))
    ours = inspect.signature(getattr(mhc, name))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_input_gates_match_nano_deepseek_v4() -> None:
    """Its comb_mix starts from a sigmoid and its post_mix is not doubled, so only the layer input is comparable."""
    nano = pytest.importorskip("nano_deepseek_v4", reason="the oracle is that package")
    modeling = importlib.import_module("nano_deepseek_v4.modeling")
    layer = modeling.HyperConnection(nano.DeepSeekV4Config(hidden_size=HIDDEN, hc_mult=4))
    case = checks.inputs(19, HIDDEN, "cpu", norm=False)
    with torch.no_grad():
        layer.fn.copy_(case.fn)
        layer.base.copy_(case.hc_base)
        layer.scale.copy_(case.hc_scale)
        theirs = layer(case.residual.float().unsqueeze(0))[2][0]
    ours = naive.pre(**case.pre_kwargs(case.residual) | {"rms_eps": layer.input_norm.eps, "hc_pre_eps": layer.eps})[2]
    torch.testing.assert_close(theirs.double(), ours, rtol=1e-5, atol=1e-5)
