"""``naive`` against SGLang's own torch functions, which round each head's dot product to bf16."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from dsv4_sm120 import layout
from dsv4_sm120.ops import indexer
from dsv4_sm120.ops.indexer import naive

PAGE = layout.INDEXER_PAGE_SIZE
sglang = pytest.importorskip("sglang", reason="the oracle is SGLang itself")
oracle = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    lengths = torch.tensor([700, 65, 1, 320], dtype=torch.int32)
    keys = torch.randn(16 * PAGE, layout.INDEXER_DIM)
    scale = keys.abs().amax(-1).clamp(min=1e-4) / layout.FP8_MAX
    cache = layout.pack_indexer_k((keys / scale[:, None]).to(torch.float8_e4m3fn), scale)
    q = torch.randn(4, 1, layout.INDEXER_HEADS, layout.INDEXER_DIM).to(torch.float8_e4m3fn)
    table = torch.stack([torch.randperm(16)[:11] for _ in range(4)]).int()
    return q, cache, torch.rand(4, layout.INDEXER_HEADS), lengths, table


@pytest.mark.parametrize("name", ["fp8_paged_mqa_logits_torch_sm120", "fp8_paged_mqa_logits_torch"])
def test_logits(name: str, inputs: tuple[torch.Tensor, ...]) -> None:
    theirs = getattr(oracle, name)(*inputs, None, 11 * PAGE, False)
    for row, ours in enumerate(naive.indexer_logits(*inputs)):
        torch.testing.assert_close(theirs[row, : len(ours)].double(), ours, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("k", [128, 512])
def test_topk_transform(k: int, inputs: tuple[torch.Tensor, ...]) -> None:
    *_, lengths, table = inputs
    logits = naive.indexer_logits(*inputs, dtype=torch.float32)
    scores = torch.full((4, 11 * PAGE), float("-inf"))
    for row, values in enumerate(logits):
        scores[row, : len(values)] = values
    slots, positions = naive.topk_transform(logits, table, k)
    out, raw = (torch.full((4, k), -7, dtype=torch.int32) for _ in range(2))
    oracle.topk_transform_pytorch_vectorized(scores, lengths, table, out, PAGE, raw)
    assert torch.equal(out.sort(1).values, slots.sort(1).values)
    assert torch.equal(raw.sort(1).values, positions.sort(1).values)


@pytest.mark.parametrize(
    ("path", "name", "ours"),
    [
        ("attention/dsa/tilelang_kernel.py", "tilelang_fp8_paged_mqa_logits", indexer.indexer_logits),
        ("attention/dsv4/topk.py", "topk_transform_paged", indexer.topk_transform),
    ],
)
def test_same_arguments_as_the_seam(path: str, name: str, ours: object) -> None:
    """Read from the source, because importing the first needs tilelang."""
    root = Path(importlib.util.find_spec("sglang").origin).parent
    tree = ast.parse((root / "kernels/ops" / path).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    theirs = [argument.arg for argument in function.args.args]
    parameters = inspect.signature(ours).parameters
    assert list(parameters) == theirs
    optional = [p.name for p in parameters.values() if p.default is not p.empty]
    assert optional == theirs[len(theirs) - len(function.args.defaults) :]
