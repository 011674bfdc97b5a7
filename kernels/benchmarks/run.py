"""Verify, then time, every kernel on this GPU, beside its peers. One command: ``python benchmarks/run.py``.

Each contender is first compared with the fp64 reference on fresh inputs; one that fails gets no time, and the run exits
with status 1. Times are medians of CUDA-graph replays in this process; cases that differ in the configured maximum
alone are timed in turn, in rounds, with the spread of their medians. Peers are used where they can be imported;
``DSV4_BENCH_PEERS`` names a folder to add to the import path. ``--op`` and ``--group`` select, ``--out`` names the
folder for ``benchmark.json`` and ``benchmark.md``.
"""

import argparse
import gc
import importlib
import itertools
import json
import math
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402  # after the import path
import triton  # noqa: E402  # after the import path

from benchmarks import harness  # noqa: E402  # after the import path
from dsv4_sm120 import __version__  # noqa: E402  # after the import path

OPS = ("decode", "indexer", "mhc")
OURS = "ours"


def measure(case: harness.Case) -> dict:
    """Verify and time one case. ``times`` holds verified contenders only; ``failures`` says why others have none."""
    return measure_built(case, case.build(), harness.graph_median_us)


def measure_together(cases: list[harness.Case]) -> list[dict]:
    """As ``measure``, for cases alive at once: ours alone, each verified first, then timed in turn; see ``harness``."""
    built = [case.build() for case in cases]
    records = [measure_built(case, its, lambda run: math.nan) for case, its in zip(cases, built, strict=True)]
    verified = [(record, its) for record, its in zip(records, built, strict=True) if OURS in record["times"]]
    if not verified:
        return records
    times = harness.interleaved_us([its.ours.run for _, its in verified])
    percent, low, high = harness.spread_percent(times)
    for (record, _), samples in zip(verified, times, strict=True):
        record["times"] = {OURS: statistics.median(samples)}
        record["together"] = {
            "with": cases[0].together,
            "rounds": len(samples),
            "quartiles": statistics.quantiles(samples, n=4)[::2],
            "spread_percent": percent,
            "spread_95": [low, high],
        }
    return records


def measure_built(case: harness.Case, built: harness.Built, time_us: Callable[[Callable[[], object]], float]) -> dict:
    """Verify each contender of a built case, then take its time with ``time_us``."""
    record = {"op": case.op, "group": case.group, "params": case.params, "bytes": built.bytes, "flops": built.flops}
    record |= {"times": {}, "errors": {}, "failures": {}}
    for name, contender in {OURS: built.ours, **built.peers}.items():
        try:
            error = contender.error()
            if not error <= contender.tolerance:
                raise AssertionError(f"error {error:.2e} exceeds {contender.tolerance:.0e}")
            if name == OURS and built.replay is not None:
                built.replay()
            record["errors"][name] = error
            record["times"][name] = time_us(contender.run)
        except Exception as failure:
            # A peer may refuse shapes or not compile here; ours failing is what the exit status reports.
            record["failures"][name] = f"{type(failure).__name__}: {failure}"[:300]
            if name == OURS:
                traceback.print_exc()
    return record


def environment(bandwidth: float) -> dict:
    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "multiprocessors": device.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "package": __version__,
        "copy_bandwidth_gb_s": round(bandwidth / 1e9),
    }


def markdown(records: list[dict], env: dict) -> str:
    """Tables by group: microseconds, the ratio to each peer, and the one-read floor at the measured copy bandwidth."""
    lines = [f"# {env['gpu']}, torch {env['torch']}, triton {env['triton']}, package {env['package']}", ""]
    lines.append(f"Copy bandwidth {env['copy_bandwidth_gb_s']} GB/s. Times in microseconds; ratio = ours / peer.")
    groups: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        groups.setdefault((record["op"], record["group"]), []).append(record)
    for (op, group), rows in groups.items():
        params = list(dict.fromkeys(p for row in rows for p in row["params"]))
        peers = list(dict.fromkeys(n for row in rows for n in [*row["times"], *row["failures"]] if n != OURS))
        header = [*params, OURS, *[c for peer in peers for c in (peer, "ratio")], "floor", "error"]
        lines += ["", f"## {op}: {group}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for row in rows:
            ours = row["times"].get(OURS)
            cells = [str(row["params"].get(p, "")) for p in params] + [_us(ours, row["failures"].get(OURS))]
            for peer in peers:
                other = row["times"].get(peer)
                ratio = f"{ours / other:.2f}" if ours and other else ""
                cells += [_us(other, row["failures"].get(peer)), ratio]
            floor = row["bytes"] / (env["copy_bandwidth_gb_s"] * 1e3)
            cells += [f"{floor:.2f}", f"{row['errors'][OURS]:.1e}" if OURS in row["errors"] else ""]
            lines.append("| " + " | ".join(cells) + " |")
        for peer in peers:
            ratios = [r["times"][OURS] / r["times"][peer] for r in rows if {OURS, peer} <= r["times"].keys()]
            if len(ratios) > 1:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                lines.append(f"\nGeometric mean of ours / {peer}: {mean:.2f}, worst {max(ratios):.2f}.")
        for spread in {r["together"]["with"]: r["together"] for r in rows if "together" in r}.values():
            low, high = spread["spread_95"]
            text = f"{spread['with']}, {spread['rounds']} rounds: medians {spread['spread_percent']:.2f} % apart"
            lines.append(f"\n{text} (95 %: {low:.2f} to {high:.2f}).")
    return "\n".join(lines) + "\n"


def _us(value: float | None, failure: str | None) -> str:
    if value is not None:
        return f"{value:.2f}"
    return "unverified" if failure else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", "--ops", dest="ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--group", default="", help="only groups whose name contains this")
    parser.add_argument("--quick", action="store_true", help="only the lines that have a target")
    parser.add_argument("--budget", type=float, default=330, help="seconds after which remaining cases are left out")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU: nothing can be timed here (`pytest` checks the kernels without one)")
    harness.add_peers_path()
    started = time.monotonic()
    torch.manual_seed(0)
    env = environment(harness.copy_bandwidth())
    print(json.dumps(env), flush=True)
    device = torch.device("cuda", 0)
    records, left_out = [], 0
    for op in args.ops:
        every = importlib.import_module(f"benchmarks.cases_{op}").cases(device, args.quick)
        wanted = (case for case in every if args.group in case.group)
        for together, group in itertools.groupby(wanted, lambda case: case.together):
            for batch in [list(group)] if together else ([case] for case in group):
                if time.monotonic() - started > args.budget:
                    left_out += len(batch)
                    continue
                done = measure_together(batch) if together else [measure(*batch)]
                records += done
                for record in done:
                    shown = ("op", "params", "times", "failures", "together")
                    print(json.dumps({k: record[k] for k in shown if k in record}), flush=True)
                gc.collect()
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": env, "left_out": left_out, "records": records}
    (args.out / "benchmark.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    table = markdown(records, env)
    (args.out / "benchmark.md").write_text(table, encoding="utf-8")
    print(table, flush=True)
    failed = [r for r in records if OURS in r["failures"]]
    print(f"{len(records)} cases, {len(failed)} failed, {left_out} left out, {time.monotonic() - started:.0f} s")
    return 1 if failed or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
