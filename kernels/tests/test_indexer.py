"""The indexer's kernels against ``naive``: same slots, same positions, ties included."""

import copy

import pytest
import torch

from dsv4_sm120 import layout
from dsv4_sm120.ops import indexer
from dsv4_sm120.ops.indexer import naive
from tests.aot_checks import check_reports

PAGE = layout.INDEXER_PAGE_SIZE
NAN_BYTE = 0xFF
"""Reads as NaN in e4m3, and four of them as NaN in fp32."""


class Inputs:
    """Rows on shuffled pages. Small integers by default: logits are exact in fp32 and full of ties.

    Every byte of the cache that belongs to no row is NaN, and so is the tail of each last page.
    """

    def __init__(self, lengths: list[int], device: str, pages: int | None = None, exact: bool = True) -> None:
        rows = len(lengths)
        need = [-(-n // PAGE) for n in lengths]
        total = sum(need) + 3 if pages is None else pages
        tokens = sum(lengths)
        heads, dim = layout.INDEXER_HEADS, layout.INDEXER_DIM
        if exact:
            keys = torch.randint(-2, 3, (tokens, dim)).float()
            scale = 2.0 ** torch.randint(-2, 2, (tokens,))
            q = torch.randint(-2, 3, (rows, 1, heads, dim)).float()
            weights = torch.randint(-2, 3, (rows, heads)).float()
        else:
            keys, scale = torch.randn(tokens, dim), torch.rand(tokens)
            q, weights = torch.randn(rows, 1, heads, dim), torch.randn(rows, heads)
        self.lengths = lengths
        self.q = q.to(torch.float8_e4m3fn).to(device)
        self.weights = weights.to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        order = torch.randperm(min(total, 4096)) + max(total - 4096, 0)  # the last pages of a large cache
        self.page_table = torch.full((rows, max(need) + 2), total - 1, dtype=torch.int32)
        raw = torch.empty(total, layout.INDEXER_PAGE_BYTES, dtype=torch.uint8)
        if pages is None:
            raw.fill_(NAN_BYTE)
        split = PAGE * dim
        token = page = 0
        for row, (length, count) in enumerate(zip(lengths, need, strict=True)):
            ids = order[page : page + count]
            self.page_table[row, :count] = ids.int()
            block = torch.full((count * PAGE, dim), NAN_BYTE, dtype=torch.uint8)
            block[:length] = keys[token : token + length].to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.full((count * PAGE,), float("nan"))
            scales[:length] = scale[token : token + length]
            raw[ids, :split] = block.view(count, split)
            raw[ids, split:] = scales.view(count, PAGE).view(torch.uint8)
            token, page = token + length, page + count
        self.kv_cache = raw.view(total, PAGE, 1, dim + 4).to(device)
        self.page_table = self.page_table.to(device)

    def logits(self) -> list[torch.Tensor]:
        return naive.indexer_logits(self.q, self.kv_cache, self.weights, self.seq_lens, self.page_table)

    def run(self, k: int, with_raw: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = torch.full((len(self.lengths), k), -7, dtype=torch.int32, device=self.q.device)
        raw = out.clone() if with_raw else None
        width = self.page_table.shape[1] * PAGE
        table, lengths = self.page_table, self.seq_lens
        pending = indexer.indexer_logits(self.q, self.kv_cache, self.weights, lengths, table, None, width, False)
        indexer.topk_transform(pending, lengths, table, out, PAGE, raw)
        return out, raw

    def check(self, k: int) -> None:
        out, raw = self.run(k)
        slots, positions = naive.topk_transform(self.logits(), self.page_table, k)
        # Both in the order of positions: the kernel's order is its own.
        assert torch.equal(raw.sort(1).values, positions.sort(1).values)
        assert torch.equal(out.sort(1).values, slots.sort(1).values)
        assert torch.equal(torch.where(raw < 0, raw, raw % PAGE), torch.where(out < 0, out, out % PAGE))


@pytest.fixture(params=["dense", "merge"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one form, with few programs: each costs the interpreter milliseconds, also when it leaves at once."""
    shipped = indexer.load_settings

    def settings(arch: str, k: int) -> dict:
        forced = copy.deepcopy(shipped(arch, k))
        forced["dense"] |= {"max_rows": 10**6 if request.param == "dense" else 0, "programs": 64}
        forced["dense"]["topk"]["splits"] = [[10**6, 4]]
        forced["merge"]["splits"] = [[10**6, 3]]
        return forced

    monkeypatch.setattr(indexer, "load_settings", settings)
    return request.param


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([0, 1, 63, 64, 65, 511, 512, 513, 1000], id="short"),
        pytest.param([2048, 2049], id="one-tile"),
        pytest.param([4096, 4097], id="two-tiles"),
        pytest.param([9001], id="long"),
    ],
)
def test_matches_naive(form: str, lengths: list[int], device: str) -> None:
    Inputs(lengths, device).check(512)


def test_k_1024(form: str, device: str) -> None:
    Inputs([1023, 1024, 1025, 8300], device).check(1024)


@pytest.mark.parametrize("weights", ["zero", "negative"])
def test_weights_without_a_positive_one(form: str, weights: str, device: str) -> None:
    """Zero weights make all logits equal: the first k positions win, on the path for thousands of ties."""
    inputs = Inputs([700, 4500], device)
    inputs.weights = inputs.weights * 0 if weights == "zero" else -inputs.weights.abs() - 1
    inputs.check(512)


def test_rising_logits(form: str, device: str) -> None:
    """Each token beats all before it, so that no early bound holds."""
    inputs = Inputs([4800], device)
    split = PAGE * layout.INDEXER_DIM
    raw = inputs.kv_cache.view(-1, layout.INDEXER_PAGE_BYTES)
    raw[:, :split] = torch.ones(1).to(torch.float8_e4m3fn).view(torch.uint8).item()
    inputs.q = torch.ones_like(inputs.q.float()).to(torch.float8_e4m3fn)
    inputs.weights = torch.ones_like(inputs.weights)
    table = inputs.page_table[0, :75].long()
    raw[table, split:] = torch.arange(1.0, 4801.0, device=device).view(75, PAGE).view(torch.uint8)
    out, raw_indices = inputs.run(512)
    assert torch.equal(raw_indices[0].sort().values, torch.arange(4288, 4800, dtype=torch.int32, device=device))
    assert (out >= 0).all()


def test_pages_past_two_gigabytes(form: str, device: str) -> None:
    """Page ids near 262,000 put bytes past 2**31."""
    Inputs([600, 4200], device, pages=262_000).check(512)


def test_random_logits_within_rounding(form: str, device: str) -> None:
    inputs = Inputs([3000, 5000], device, exact=False)
    _, raw = inputs.run(512)
    for chosen, logits in zip(raw, inputs.logits(), strict=True):
        assert len(chosen.unique()) == 512
        kth = logits.topk(512).values[-1]
        assert logits[chosen.long()].min() >= kth - 1e-5 * logits.abs().max()


def test_without_raw_indices(form: str, device: str) -> None:
    inputs = Inputs([100, 600], device)
    assert torch.equal(inputs.run(512, with_raw=False)[0], inputs.run(512)[0])


def test_strided_page_table_and_outputs(form: str, device: str) -> None:
    """SGLang hands over slices of wider buffers."""
    inputs = Inputs([10, 700], device)
    expected, _ = inputs.run(512)
    wide = torch.full((2, 999), -(2**30), dtype=torch.int32, device=device)
    wide[:, : inputs.page_table.shape[1]] = inputs.page_table
    out = torch.full((2, 700), -7, dtype=torch.int32, device=device)
    pending = indexer.PendingLogits(inputs.q, inputs.kv_cache, inputs.weights)
    indexer.topk_transform(pending, inputs.seq_lens, wide[:, : inputs.page_table.shape[1]], out[:, :512], PAGE)
    assert torch.equal(out[:, :512], expected)
    assert (out[:, 512:] == -7).all()


def test_length_past_the_page_table_is_cut(form: str, device: str) -> None:
    """Padded rows of a graph may carry any length; reads stay inside the page table."""
    inputs = Inputs([128], device)
    inputs.page_table = inputs.page_table[:, :2].contiguous()
    inputs.seq_lens += 10_000
    out, _ = inputs.run(512)
    assert (out[0] >= 0).sum() == 128


def test_rows_in_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = indexer.load_settings

    def settings(arch: str, k: int) -> dict:
        forced = copy.deepcopy(shipped(arch, k))
        forced["dense"]["max_rows"] = 0
        forced["merge"] |= {"splits": [], "chunk_rows": 2}
        return forced

    monkeypatch.setattr(indexer, "load_settings", settings)
    Inputs([600, 5, 1100, 0, 640], device).check(512)


@pytest.mark.parametrize(("rows", "k"), [(1, 512), (3, 1024), (70, 512)])
def test_workspace_is_what_the_formula_says(rows: int, k: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shipped config: bytes taken per call equal ``workspace_bytes``, which knows no context length."""
    inputs = Inputs([5] * rows, device)
    taken = 0
    original = torch.empty

    def counted(*args: object, **options: object) -> torch.Tensor:
        nonlocal taken
        tensor = original(*args, **options)
        taken += tensor.numel() * tensor.element_size()
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    inputs.run(k, with_raw=False)
    assert taken == indexer.workspace_bytes(rows, k, "sm_120")


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
@pytest.mark.parametrize("k", indexer.TOPK)
def test_workspace_bounds(arch: str, k: int) -> None:
    most = max(indexer.workspace_bytes(rows, k, arch) for rows in (*range(1, 600), 2048, 8192, 65536))
    assert most <= 256 * 2**20


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
@pytest.mark.parametrize("k", indexer.TOPK)
def test_settings_keep_the_bound_valid(arch: str, k: int) -> None:
    """The dense form wants 1.5 k group maxima or more in every row of more than 8 k tokens."""
    settings = indexer.load_settings(arch, k)
    width = PAGE * settings["dense"]["logits"]["pages"]
    for rows in range(1, settings["dense"]["max_rows"] + 1):
        splits = indexer.dense_splits(rows, settings)
        for tokens in (8 * k + 1, 32_769, indexer.MAX_TOKENS):
            active = min(-(-tokens // width), splits)
            assert min(width, 1 << ((4 * k // active).bit_length() - 1)) * active >= 1.5 * k
    assert all(splits <= 8 for _, splits in settings["merge"]["splits"]), "8 k candidates are one tile"
    assert all(rows <= settings["dense"]["topk"]["splits"][-1][0] for rows in (1, settings["dense"]["max_rows"]))


def test_logits_that_are_real_are_refused(device: str) -> None:
    inputs = Inputs([5], device)
    out = torch.empty(1, 512, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="must be installed together"):
        indexer.topk_transform(torch.zeros(1, 128), inputs.seq_lens, inputs.page_table, out, PAGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_fp8": torch.zeros(1, 1, 64, 128)}, "q dtype"),
        ({"q_fp8": torch.zeros(1, 1, 32, 128).to(torch.float8_e4m3fn)}, "q shape"),
        ({"kvcache_fp8": torch.zeros(2, 64, 1, 68, dtype=torch.uint8)}, "cache shape"),
        ({"weight": torch.zeros(1, 64, dtype=torch.bfloat16)}, "weight dtype"),
        ({"seq_lens": torch.zeros(1, 1, dtype=torch.int32)}, "seq_lens shape"),
        ({"clean_logits": True}, "clean_logits"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str, device: str) -> None:
    inputs = Inputs([5], device)
    arguments = {
        "q_fp8": inputs.q,
        "kvcache_fp8": inputs.kv_cache,
        "weight": inputs.weights,
        "seq_lens": inputs.seq_lens,
        "page_table": inputs.page_table,
        "deep_gemm_metadata": None,
        "max_seq_len": 192,
        "clean_logits": False,
    }
    with pytest.raises(ValueError, match=message):
        indexer.indexer_logits(**(arguments | change))


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_shipped_configs_compile(arch: str, aot_reports) -> None:
    check_reports(aot_reports("indexer", arch))


def test_self_check(device: str) -> None:
    indexer.self_check(torch.device(device))


@pytest.mark.gpu
def test_capture_at_the_maximum_replay_at_other_lengths() -> None:
    from benchmarks.cases_indexer import make_problem, replay

    device = torch.device("cuda")
    captured = make_problem([262_144] * 4, 262_144, 512, device)
    others = ([5, 4000, 131_072, 5000], [0, 1, 513, 4097], [30_000, 32_769, 65_536, 262_143])
    replay(captured, [make_problem(list(lengths), 262_144, 512, device, seed=1) for lengths in others])
