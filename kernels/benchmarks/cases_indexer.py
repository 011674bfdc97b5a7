"""Indexer logits and top-k: ours against DeepGEMM's logits with SGLang's CUDA top-k, and TileLang's where it is there.

A contender's time covers both steps, from e4m3 queries to slot ids. Its error is the worst shortfall, over all rows, of
the least logit selected against the true k-th best, relative to the row's largest logit.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.harness import Built, Case, Contender
from dsv4_sm120 import layout
from dsv4_sm120.ops import indexer
from dsv4_sm120.ops.indexer import naive

PAGE = layout.INDEXER_PAGE_SIZE
TOLERANCE = 2e-3
"""The tensor cores of sm_90 add fp8 products with fewer mantissa bits than fp32."""
POINTS = ((1, 128), (16, 128), (64, 128), (16, 2048), (64, 2048), (1, 131072), (4, 131072), (16, 32768))
EXTRA_POINTS = (
    (4, 2048),
    (16, 8192),
    (64, 8192),
    (128, 2048),
    (64, 32768),
    (256, 4096),
    (512, 2048),
    (512, 8192),
)
MAXIMA = (2048, 32768, 131072, 262144)
"""Configured maxima in compressed tokens: contexts of 8k, 128k, 512k and 1M."""


@dataclass
class Problem:
    """Random inputs for ``rows`` rows of given lengths, on pages in random order."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    k: int

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions, poisoned."""
        out = torch.full((self.rows, self.k), -7, dtype=torch.int32, device=self.q.device)
        return out, out.clone()


def make_problem(
    lengths: list[int], max_tokens: int, k: int, device: torch.device, shared: bool = False, seed: int = 0
) -> Problem:
    """``shared``: all rows read the same pages, as the rows of a prefill chunk do."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows, need = len(lengths), [-(-n // PAGE) for n in lengths]
    pages = (max(need) if shared else sum(need)) + 3
    kv_cache = torch.empty(pages, layout.INDEXER_PAGE_BYTES, dtype=torch.uint8, device=device)
    split = PAGE * layout.INDEXER_DIM
    for start in range(0, pages, 4096):  # bounds the fp32 copy
        part = kv_cache[start : start + 4096]
        keys = torch.randn(part.shape[0], split, device=device, generator=generator)
        part[:, :split] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        part[:, split:] = torch.rand(part.shape[0], PAGE, device=device, generator=generator).view(torch.uint8)
    order = torch.randperm(pages, device=device, generator=generator).int()
    table = torch.zeros(rows, max_tokens // PAGE, dtype=torch.int32, device=device)
    first = 0
    for row, count in enumerate(need):
        table[row, :count] = order[first : first + count]
        first += 0 if shared else count
    heads, dim = layout.INDEXER_HEADS, layout.INDEXER_DIM
    return Problem(
        q=torch.randn(rows, 1, heads, dim, device=device, generator=generator).to(torch.float8_e4m3fn),
        kv_cache=kv_cache.view(pages, PAGE, 1, dim + 4),
        weights=torch.randn(rows, heads, device=device, generator=generator),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table,
        k=k,
    )


def shortfall(problem: Problem, out: torch.Tensor, positions: torch.Tensor | None) -> float:
    """Error of a selection (see above). Raises ``AssertionError`` for wrong counts, repeats or impossible slots."""
    worst = 0.0
    for row in range(problem.rows):
        part = slice(row, row + 1)
        (logits,) = naive.indexer_logits(
            problem.q[part],
            problem.kv_cache,
            problem.weights[part],
            problem.seq_lens[part],
            problem.page_table[part],
            dtype=torch.float32,
        )
        expected = min(len(logits), problem.k)
        chosen = out[row][out[row] >= 0].long()
        assert len(chosen) == expected, f"row {row}: {len(chosen)} slots, wanted {expected}"
        assert (out[row][expected:] == -1).all() or expected == problem.k, f"row {row}: not -1 filled"
        position = torch.arange(len(logits), device=out.device)
        slots = problem.page_table[row, position // PAGE].long() * PAGE + position % PAGE
        order = slots.argsort()
        at = torch.searchsorted(slots[order], chosen).clamp(max=max(len(logits) - 1, 0))
        assert (slots[order][at] == chosen).all(), f"row {row}: a slot that is not the row's"
        taken = order[at]
        assert len(taken.unique()) == expected, f"row {row}: a slot twice"
        if positions is not None:
            raw = positions[row][positions[row] >= 0].long()
            assert torch.equal(raw.sort().values, taken.sort().values), f"row {row}: raw indices differ from slots"
        if expected:
            best = logits.topk(expected).values
            worst = max(worst, ((best[-1] - logits[taken].min()) / logits.abs().max()).item())
    return worst


def run_ours(problem: Problem, out: torch.Tensor, raw: torch.Tensor | None = None) -> None:
    width = problem.page_table.shape[1] * PAGE
    table, lengths = problem.page_table, problem.seq_lens
    logits = indexer.indexer_logits(problem.q, problem.kv_cache, problem.weights, lengths, table, None, width, False)
    indexer.topk_transform(logits, lengths, table, out, PAGE, raw)


def contender(problem: Problem, run: Callable[[torch.Tensor, torch.Tensor | None], None], has_raw: bool) -> Contender:
    timed, _ = problem.outputs()

    def error() -> float:
        out, raw = problem.outputs()
        run(out, raw if has_raw else None)
        return shortfall(problem, out, raw if has_raw else None)

    return Contender(run=lambda: run(timed, None), error=error, tolerance=TOLERANCE)


def replay(problem: Problem, others: list[Problem]) -> None:
    """Capture on ``problem``, then replay with the contents of each of ``others``; same shapes, other lengths."""
    out, raw = problem.outputs()
    run_ours(problem, out, raw)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_ours(problem, out, raw)
    for other in others:
        for name in ("q", "weights", "seq_lens", "page_table"):
            getattr(problem, name).copy_(getattr(other, name))
        problem.kv_cache[: other.kv_cache.shape[0]].copy_(other.kv_cache)
        out.fill_(-7)
        raw.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        first = out.clone()
        assert shortfall(problem, out, raw) <= TOLERANCE, f"lengths {other.seq_lens.tolist()[:8]}"
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, out), "two replays on the same input differ"


def _optional(name: str) -> object | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"peer {name}: not here ({type(error).__name__}: {error})")
        return None


def peers(problem: Problem) -> dict[str, Contender]:
    deep_gemm, topk = _optional("deep_gemm"), _optional("sglang.kernels.ops.attention.dsv4.topk")
    tilelang = _optional("sglang.kernels.ops.attention.dsa.tilelang_kernel")
    table, lengths = problem.page_table, problem.seq_lens
    width = table.shape[1] * PAGE
    logits: dict[str, Callable[[], torch.Tensor]] = {}
    if deep_gemm:
        column = lengths.unsqueeze(-1)
        sms = torch.cuda.get_device_properties(problem.q.device).multi_processor_count
        schedule = deep_gemm.get_paged_mqa_logits_metadata(column, PAGE, sms)
        logits["DeepGEMM"] = lambda: deep_gemm.fp8_paged_mqa_logits(
            problem.q, problem.kv_cache, problem.weights, column, table, schedule, width, False
        )
    if tilelang:
        logits["TileLang"] = lambda: tilelang.tilelang_fp8_paged_mqa_logits(
            problem.q, problem.kv_cache, problem.weights, lengths, table, None, width, False
        )
    found = {}
    if topk:
        plan = topk.plan_topk_v2(lengths)  # once per step, shared by the layers: not timed
        for name, call in logits.items():

            def v1(out: torch.Tensor, raw: torch.Tensor | None, call: Callable = call) -> None:
                topk.topk_transform_paged(call(), lengths, table, out, PAGE, raw)

            def v2(out: torch.Tensor, raw: torch.Tensor | None, call: Callable = call) -> None:
                topk.topk_transform_paged_v2(call(), lengths, table, out, PAGE, plan, raw)

            found[f"{name} + top-k v1"] = contender(problem, v1, has_raw=False)
            found[f"{name} + top-k v2"] = contender(problem, v2, has_raw=False)
    return found


def _build(
    lengths: list[int], max_tokens: int, k: int, device: torch.device, with_peers: bool = True, shared: bool = False
) -> Built:
    problem = make_problem(lengths, max_tokens, k, device, shared)
    scored = [n for n in lengths if n > k]

    def replay_shorter() -> None:
        captured = make_problem(lengths, max_tokens, k, device)
        ragged = [(n * (row + 1) // len(lengths), n // 3, min(n, k + 1), 0)[row % 4] for row, n in enumerate(lengths)]
        short = [min(n, row) for row, n in enumerate(lengths)]
        replay(captured, [make_problem(other, max_tokens, k, device, seed=1) for other in (ragged, short, lengths)])

    return Built(
        ours=contender(problem, lambda out, raw: run_ours(problem, out, raw), has_raw=True),
        peers=peers(problem) if with_peers else {},
        bytes=(max(scored, default=0) if shared else sum(scored)) * (layout.INDEXER_DIM + 4),
        flops=2 * sum(scored) * layout.INDEXER_HEADS * layout.INDEXER_DIM,
        replay=None if shared else replay_shorter,
    )


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The tables "decode", "zero tax" (same lengths, other configured maxima) and "prefill"."""

    def case(
        group: str, params: dict[str, object], *args: object, together: str | None = None, **options: object
    ) -> Case:
        return Case("indexer", group, params, lambda: _build(*args, device, **options), together)

    for rows, length in POINTS if quick else POINTS + EXTRA_POINTS:
        params = {"rows": rows, "c4_length": length, "k": 512}
        yield case("decode", params, [length] * rows, max(131072, length), 512)
    for rows, length in ((16, 2048), (4, 131072)):
        yield case("decode", {"rows": rows, "c4_length": length, "k": 1024}, [length] * rows, 131072, 1024)
    alone = {"with_peers": False}
    for rows, length in ((16, 128), (16, 2048), (64, 2048)):
        for maximum in MAXIMA:
            params = {"rows": rows, "c4_length": length, "max_c4": maximum}
            together = f"{rows} rows of {length:,}"
            yield case(
                "zero tax: configured maximum", params, [length] * rows, maximum, 512, together=together, **alone
            )
    for _ in range(4):
        params = {"rows": 64, "c4_length": 2048, "max_c4": 32768}
        together = "64 rows of 2,048, 32,768 wide each time"
        yield case("zero tax: control", params, [2048] * 64, 32768, 512, together=together, **alone)
    if not quick:
        rows, length = 8192, 32768
        params = {"rows": rows, "c4_length": length, "max_c4": 131072}
        lengths = [length - (rows - 1 - row) // 4 for row in range(rows)]
        yield case("prefill", params, lengths, 131072, 512, with_peers=False, shared=True)
