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
from dsv4_sm120.ops.decode.kernel import split_count

SHAPES = {
    16: [(16, 4, None), (32, 4, None), (32, 4, 168), (64, 4, None), (64, 8, None), (64, 8, 128)],
    32: [(32, 8, None), (64, 8, None)],
    64: [(32, 8, None), (64, 8, None)],
}
"""By block of heads: (keys per tile, warps, register cap)."""


def candidates(blocks: list[int], via_fp32: bool) -> list[dict]:
    """Every combination worth compiling for ``blocks`` of heads; ``via_fp32`` is a property of the GPU."""
    found = []
    for block_h in blocks:
        for (block_n, warps, cap), merge, prefetch in itertools.product(
            SHAPES[block_h], ("fused", "kernel"), (False, True)
        ):
            if prefetch and cap:
                continue  # a prefetched tile needs the registers
            entry = {"block_h": block_h, "block_n": block_n, "num_warps": warps, "maxnreg": cap, "prefetch": prefetch}
            found.append(entry | {"merge": merge, "partials": "bf16", "via_fp32": via_fp32, "pdl": merge == "kernel"})
    return found


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


def compile_one(job: tuple[int, int, dict]) -> dict:
    """Compile in a worker; the disk cache hands the binary to the parent. Returns what the compiler reported."""
    heads, page_size, entry = job
    from dsv4_sm120.ops.decode import kernel

    device = torch.device("cuda")
    kwargs = decode.example(device, 2, heads, page_size, 128, 512)
    try:
        call(kwargs, entry | {"max_splits": 2, "ctas_per_sm": 1, "min_tiles": 1})
    except Exception as error:
        return entry | {"heads": heads, "failed": f"{type(error).__name__}: {error}"[:200]}
    caches = kernel.decode_fwd_kernel.device_caches[torch.cuda.current_device()][0]
    binary = next(iter(caches.values()))
    return entry | {
        "heads": heads,
        "shared": binary.metadata.shared,
        "registers": binary.n_regs,
        "spills": binary.n_spills,
    }


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
    sms = decode.multiprocessors(kwargs["q"].device)
    results = []
    for base in compiled:
        seen = set()
        for per_sm, fewest in itertools.product((1, 2, 3, 4), (1, 2, 4)):
            entry = base | {"ctas_per_sm": per_sm, "min_tiles": fewest, "max_splits": 64}
            splits = split_count(rows * -(-heads // base["block_h"]), entry, sms)
            live_tiles = -(-128 // base["block_n"]) + -(-live // base["block_n"])
            chunk = max(-(-live_tiles // splits), fewest)  # many settings give the same chunk
            if chunk in seen:
                continue
            seen.add(chunk)
            error = rel_error(call(kwargs, entry), truth)
            if error > decode.TOLERANCE:
                results.append(entry | {"chunk": chunk, "error": error, "us": float("inf")})
                continue
            us = replay_us(lambda entry=entry: call(kwargs, entry))
            results.append(entry | {"chunk": chunk, "error": error, "us": us})
    return sorted(results, key=lambda r: r["us"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--live", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--block-h", type=int, nargs="+", default=[16], help="blocks of heads to try")
    parser.add_argument("--fit", choices=sorted(SHARED_MEMORY_LIMIT))
    parser.add_argument("--top", type=int, default=6)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    via_fp32 = torch.cuda.get_device_capability()[0] == 9
    jobs = [(heads, args.page_size, entry) for heads in args.heads for entry in candidates(args.block_h, via_fp32)]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1), maxtasksperchild=1) as pool:
        compiled = pool.map(compile_one, jobs, chunksize=1)
    every = []
    for heads in args.heads:
        usable = [c for c in compiled if c["heads"] == heads and "failed" not in c]
        for c in compiled:
            print("compiled", json.dumps(c), flush=True)
        if args.fit:
            usable = [c for c in usable if c["shared"] <= SHARED_MEMORY_LIMIT[args.fit]]
        for rows in args.rows:
            results = sweep(heads, rows, args.page_size, args.live, args.width, usable)
            every += [r | {"rows": rows} for r in results]
            for r in results[: args.top]:
                print(
                    f"heads {heads} rows {rows}: {r['us']:.2f} us, chunk {r['chunk']}, min {r['min_tiles']}, "
                    f"per SM {r['ctas_per_sm']}, h{r['block_h']} n{r['block_n']} w{r['num_warps']} cap {r['maxnreg']} "
                    f"prefetch {r['prefetch']} {r['merge']}, shared {r['shared']}, error {r['error']:.1e}",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(every, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
