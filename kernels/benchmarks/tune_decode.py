"""Sweep launch configurations of the decode kernel and print the fastest per batch; the shipped JSON comes from this.

Candidates compile in parallel, are checked against the reference, then timed by graph replay. ``--fit sm_120`` leaves
out those that need more shared memory than that GPU has.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys

import torch

from benchmarks import cases_decode
from benchmarks.harness import rel_error
from dsv4_sm120.config import SHARED_MEMORY_LIMIT
from dsv4_sm120.ops import decode

SHAPES = (
    (16, 4, None, False, 1),
    (16, 2, None, False, 1),
    (16, 4, None, False, 2),
    (32, 4, None, False, 1),
    (32, 4, 168, False, 1),
    (32, 8, None, False, 1),
    (32, 4, None, True, 1),
    (32, 4, None, False, 2),
    (64, 4, None, False, 1),
    (64, 8, None, False, 1),
    (64, 8, 128, False, 1),
    (64, 8, None, True, 1),
)
"""Keys per tile, warps, register cap, prefetch, stages."""
CHUNKS = (1, 2, 3, 4, 5)
"""Tiles per split."""
MERGES = (("fused", 512), ("kernel", 512), ("kernel", 128))
"""Who merges, and dims per program of the kernel that does."""


def candidates(via_fp32: bool) -> list[dict]:
    """Every combination worth compiling; ``via_fp32`` is a property of the GPU."""
    names = ("block_n", "num_warps", "maxnreg", "prefetch", "num_stages")
    fixed = {"block_h": 16, "partials": "bf16", "via_fp32": via_fp32, "min_tiles": 1, "ctas_per_sm": 64}
    return [
        dict(zip(names, shape, strict=True)) | fixed | {"merge": merge, "pdl": merge == "kernel"}
        for shape, merge in itertools.product(SHAPES, dict(MERGES))
    ]


def split_counts(block_n: int, live: int) -> list[int]:
    """Splits of a row that give each of ``CHUNKS``; at most 40."""
    tiles = -(-cases_decode.WINDOW // block_n) + -(-live // block_n)
    return sorted({-(-tiles // chunk) for chunk in CHUNKS if -(-tiles // chunk) <= 40}, reverse=True)


def call(kwargs: dict, entry: dict) -> torch.Tensor:
    return decode.sparse_mla_decode(
        kwargs["q"],
        kwargs["k_cache"],
        kwargs["indices"],
        kwargs["topk_length"],
        kwargs["attn_sink"],
        kwargs["softmax_scale"],
        kwargs.get("extra_k_cache"),
        kwargs.get("extra_indices_in_kvcache"),
        kwargs.get("extra_topk_length"),
        entry=entry,
    )


def compile_one(job: tuple[int, int, int, dict]) -> dict:
    """Compile in a worker; the disk cache hands the binaries to the parent. Returns what the compiler reported."""
    heads, page_size, live, entry = job
    from dsv4_sm120.ops.decode import kernel

    device = torch.device("cuda")
    kwargs = decode.example(device, 2, heads, page_size, 128, 512)
    try:
        for (merge, dims), splits in itertools.product(MERGES, split_counts(entry["block_n"], live)):
            if merge == entry["merge"]:
                call(kwargs, entry | {"max_splits": splits, "merge_dims": dims})
    except Exception as error:
        return entry | {"failed": f"{type(error).__name__}: {error}"[:200]}
    caches = kernel.decode_fwd_kernel.device_caches[torch.cuda.current_device()][0]
    binary = next(iter(caches.values()))
    return entry | {"shared": binary.metadata.shared, "registers": binary.n_regs, "spills": binary.n_spills}


def replay_us(run, calls: int = 20, replays: int = 12) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def sweep(heads: int, rows: int, page_size: int, live: int, width: int, compiled: list[dict]) -> list[dict]:
    """Verified timings of every candidate at one shape, fastest first."""
    device = torch.device("cuda")
    kwargs = cases_decode.arguments(device, rows, heads, page_size, live, width)
    truth = cases_decode.truth(kwargs)
    results = []
    for base, (merge, dims) in itertools.product(compiled, MERGES):
        if merge != base["merge"]:
            continue
        for splits in split_counts(base["block_n"], live):
            if rows * splits < 20 or rows * splits > 2048:
                continue
            entry = base | {"max_splits": splits, "merge_dims": dims}
            error = rel_error(call(kwargs, entry), truth)
            us = float("inf")
            if error <= decode.TOLERANCE:
                us = replay_us(lambda entry=entry: call(kwargs, entry))
            results.append(entry | {"splits": splits, "error": error, "us": us})
    return sorted(results, key=lambda r: r["us"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--live", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--fit", choices=sorted(SHARED_MEMORY_LIMIT))
    parser.add_argument("--top", type=int, default=6)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    via_fp32 = torch.cuda.get_device_capability()[0] == 9
    every = []
    for heads in args.heads:
        jobs = [(heads, args.page_size, args.live, entry) for entry in candidates(via_fp32)]
        with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1), maxtasksperchild=1) as pool:
            compiled = pool.map(compile_one, jobs, chunksize=1)
        for c in compiled:
            print("compiled", json.dumps(c), flush=True)
        usable = [c for c in compiled if "failed" not in c]
        if args.fit:
            usable = [c for c in usable if c["shared"] <= SHARED_MEMORY_LIMIT[args.fit]]
        for rows in args.rows:
            results = sweep(heads, rows, args.page_size, args.live, args.width, usable)
            every += [r | {"heads": heads, "rows": rows} for r in results]
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump(every, file)
            for r in results[: args.top]:
                print(
                    f"heads {heads} rows {rows}: {r['us']:.2f} us, splits {r['splits']}, n{r['block_n']} "
                    f"w{r['num_warps']} cap {r['maxnreg']} prefetch {r['prefetch']} stages {r['num_stages']} "
                    f"{r['merge']} {r['merge_dims']}, shared {r['shared']}, error {r['error']:.1e}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
