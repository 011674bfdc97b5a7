"""The MHC hook leaves batches that are too small to gain to SGLang."""

import types

import pytest
import torch

from dsv4_sm120 import plugin
from dsv4_sm120.ops import mhc


@pytest.mark.parametrize(("tokens", "served_by"), [(1, "stock"), (7, "stock"), (8, "ours"), (64, "ours")])
def test_small_batches_stay_with_sglang(monkeypatch: pytest.MonkeyPatch, tokens: int, served_by: str) -> None:
    counted = []
    kernel = types.SimpleNamespace(active=True, metrics=types.SimpleNamespace(count=lambda: counted.append(1)))
    monkeypatch.setitem(plugin.state.kernels, "mhc", kernel)
    monkeypatch.setattr(mhc, "min_tokens", lambda device: 8)
    monkeypatch.setattr(mhc, "mhc_fused_post_pre", lambda *args, **kwargs: "ours")
    answer = plugin.mhc(lambda *args, **kwargs: "stock", torch.zeros(tokens, 4096, dtype=torch.bfloat16))
    assert (answer, len(counted)) == (served_by, int(served_by == "ours"))
