#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernels inside the real server: correctness, then speed; prefill and decode apart, on one GPU and on two; p2p.

    python tests/gpu/server/run.py --launch launch.json --out DIRECTORY [STEP ...]

Needs a GPU and, in this interpreter, SGLang with what its DeepSeek-V4 path needs. launch.json comes from launch.py. The
model has DeepSeek-V4-Flash's dimensions per layer, few layers and experts, and random weights (seam/). Every result is
written to DIRECTORY/results.json as soon as it is there, and as tables to DIRECTORY/results.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE))

import compare  # noqa: E402  # after the import path
import disaggregated  # noqa: E402  # after the import path
import model  # noqa: E402  # after the import path
import speed  # noqa: E402  # after the import path
from server import Router, Server, Variant, wait  # noqa: E402  # after the import path

KERNELS = ("decode", "indexer", "mhc")
SEAM = {"DSV4_SEAM_ATTENTION": "sm_120", "SGLANG_SM120_FLASHMLA_BACKEND": "triton"}
SEAM |= {"SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0"}
TILELANG = {"SGLANG_OPT_USE_TILELANG_INDEXER": "1", "SGLANG_OPT_USE_TOPK_V2": "0"}
TILELANG |= {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
HISTORY = SEAM | {"SGLANG_OPT_USE_TILELANG_INDEXER": "0", "SGLANG_OPT_USE_TOPK_V2": "0"}
HISTORY |= {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
CONTEXTS = ("context-8k", "context-128k", "context-512k", "context-1m")
MARKER = re.compile(r"^dsv4_sm120 (\{.*\})$", re.MULTILINE)
CAPACITY_LINES = re.compile(
    r"max_total_num_tokens=|DSV4 (?:SWA sizing|pool sizes|memory calculation)|Load weight (?:begin|end)|"
    r"Memory pool end|Capture .* end"
)
WITHOUT_GRAPHS = ("--cuda-graph-backend-decode", "disabled")
SLOW_ATTENTION = 3_000
"""Longest prompt, in tokens, for variants with SGLang's scalar attention, which takes minutes for more."""


def switches(*active: str) -> dict[str, str]:
    """The plugin's switches with only these kernels on."""
    return {f"DSV4_SM120_{name.upper()}": "1" if name in active else "0" for name in KERNELS}


def correct_variants() -> list[Variant]:
    """``stock`` first: everything is compared with it. ``stock_*`` show how far SGLang's own kernels are apart."""
    host = "context-128k"
    return [
        Variant("stock", host, switches()),
        Variant("all", host, SEAM | TILELANG | switches(*KERNELS)),
        Variant("decode", host, SEAM | switches("decode")),
        Variant("indexer", host, TILELANG | switches("indexer")),
        Variant("mhc", host, switches("mhc")),
        Variant("stock_again", host, switches()),
        Variant("stock_tilelang", host, TILELANG | switches()),
        Variant("stock_sm120_triton", host, SEAM | TILELANG | switches()),
        Variant("all_without_graphs", host, SEAM | TILELANG | switches(*KERNELS), WITHOUT_GRAPHS),
        Variant("broken_decode", host, SEAM | TILELANG | switches(*KERNELS) | {"DSV4_SEAM_BREAK": "decode"}),
    ]


def speed_variants() -> list[list[Variant]]:
    """Groups of servers that are alive together."""
    stock = [Variant(f"stock {host}", host, switches()) for host in CONTEXTS]
    ours = [Variant(f"all {host}", host, SEAM | TILELANG | switches(*KERNELS)) for host in CONTEXTS]
    history = [
        Variant(f"history {host}", host, HISTORY | switches(), ("--dsa-topk-backend", "torch"))
        for host in ("context-8k", "context-512k")
    ]
    return [[*stock, *ours], history]


PAIR_TURNS = 3
"""How often each way to send is asked: a race need not show each time."""


class Results:
    """What has been found so far, on disk at all times."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.file = directory / "results.json"
        self.data: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def put(self, step: str, name: str, value: Any) -> None:
        self.data.setdefault(step, {})[name] = value
        self.file.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        (self.directory / "results.md").write_text(markdown(self.data), encoding="utf-8")


def write_plugins(directory: Path) -> list[Path]:
    """Folders for the import path in which SGLang finds the tests' plugin and the kernels', as after an installation.

    SGLang loads plugins in the order of the import path: the seam comes first.
    """
    sources = {"dsv4_seam": HERE / "seam/dsv4_seam.py", "dsv4_sm120": ROOT / "kernels/src/dsv4_sm120"}
    for name, source in sources.items():
        info = write_metadata(directory / name, name, "0")
        module = "dsv4_sm120.plugin" if name == "dsv4_sm120" else name
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")
        link_once(directory / name / source.name, source)
    link_once(directory / "dsv4_seam/dsv4_shadow.py", HERE / "seam/dsv4_shadow.py")
    return [directory / name for name in sources]


def write_metadata(directory: Path, name: str, version: str) -> Path:
    """Let a package look installed in a folder of the import path; return the folder of its metadata."""
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


def link_once(link: Path, target: Path) -> None:
    if not link.exists():
        link.symlink_to(target)


def describe(server: Server) -> dict[str, Any]:
    """What a server says of itself: start time, the plugin's line, its gauges, the lines on memory, errors."""
    text = server.text()
    marker = MARKER.search(text)
    found: dict[str, Any] = {"ready_s": server.ready_s, "marker": json.loads(marker[1]) if marker else None}
    found["lines"] = [line[-400:] for line in text.splitlines() if CAPACITY_LINES.search(line)][-20:]
    if server.ready_s is None:
        found["tail"] = text.splitlines()[-60:]
        return found
    metrics = server.get("/metrics").text
    found["gauges"] = [line for line in metrics.splitlines() if line.startswith("dsv4_sm120")]
    found["memory_mib"] = server.gpu_memory_mib()
    return found


def start(variants: Sequence[Variant], options: argparse.Namespace) -> list[Server]:
    return [start_one(variant, options, slot) for slot, variant in enumerate(variants, options.first_slot)]


def start_one(
    variant: Variant, options: argparse.Namespace, slot: int | None = None, ahead: Sequence[Path] = ()
) -> Server:
    """Start a server; the folders ``ahead`` come before the plugins' on its import path."""
    plugins = [*ahead, *write_plugins(options.out / "plugins")]
    directory = model.write(options.out / "model", options.layers, options.experts, options.heads)
    return Server(variant, read_launch(options), directory, plugins, options.out, slot)


def read_launch(options: argparse.Namespace) -> dict[str, Any]:
    return json.loads(options.launch.read_text(encoding="utf-8"))


def run_group(step: str, variants: Sequence[Variant], options: argparse.Namespace, results: Results, use: Any) -> None:
    """Start servers together, describe each, hand the ready ones to ``use``, stop all."""
    servers = start(variants, options)
    try:
        ready = wait(servers, options.start_timeout)
        for server in servers:
            results.put("servers", f"{step}: {server.variant.name}", describe(server))
        use(ready)
        for server in ready:  # now that their kernels have been called
            results.put("servers", f"{step}: {server.variant.name}", describe(server))
    finally:
        for server in servers:
            server.stop()


def do_capacity(options: argparse.Namespace, results: Results) -> None:
    """One server as a deployment sizes it, alone on the GPU: what it reports is compared with the memory plan."""
    variant = Variant("capacity", "capacity", SEAM | TILELANG | switches(*KERNELS))

    def use(ready: list[Server]) -> None:
        for server in ready:
            info = server.get("/server_info").json()
            internal = info.get("internal_states") or [{}]
            results.put("capacity", "server_info", {k: v for k, v in (info | internal[0]).items() if _plain(k, v)})
            results.put("capacity", "answer", compare.ask(server, compare.PROMPTS[1])[0]["tokens"])

    run_group("capacity", [variant], options, results, use)


def _plain(name: str, value: Any) -> bool:
    wanted = ("token", "mem", "max_running", "context", "page_size", "ratio", "weight", "graph")
    return isinstance(value, (int, float, str, bool, dict)) and any(word in name for word in wanted)


def do_refuse(options: argparse.Namespace, results: Results) -> None:
    """With an SGLang that calls itself by another version the server must end at once and say why."""
    variant = Variant("wrong_version", "context-8k", switches(*KERNELS))
    other = options.out / "other_version"
    write_metadata(other, "sglang", "0.5.22")
    server = start_one(variant, options, options.first_slot, [other])
    try:
        ready, cause = wait([server], 120), server.cause()
        found = {"ready": bool(ready), "seconds": time.monotonic() - server.started, "status": server.process.poll()}
        results.put("refuse", variant.name, found | {"cause": cause and f"{cause.cause}: {cause.line}"})
        results.put("refuse", "tail", server.text().splitlines()[-5:])
    finally:
        server.stop()


def do_shadow(options: argparse.Namespace, results: Results) -> None:
    """SGLang's kernels serve, ours run beside them on the same tensors; see seam/dsv4_shadow.py."""
    prefix = options.out / "shadow"
    environment = TILELANG | switches() | {"SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0", "DSV4_SEAM_SHADOW": str(prefix)}

    def use(ready: list[Server]) -> None:
        for server in ready:
            for prompt in compare.PROMPTS:
                compare.ask(server, prompt)
                print("shadow", prompt.name, flush=True)
        for file in sorted(options.out.glob("shadow-*.json")):
            for kind, found in json.loads(file.read_text(encoding="utf-8")).items():
                results.put("shadow", kind, found)

    run_group("shadow", [Variant("shadow", "context-128k", environment, WITHOUT_GRAPHS)], options, results, use)


def do_correct(options: argparse.Namespace, results: Results) -> None:
    """Each variant's answers against stock's. Stock's stay on disk, so the groups need not be alive together."""
    variants = [v for v in correct_variants() if not options.only or v.name in options.only]
    for first in range(0, len(variants), options.together):
        group = variants[first : first + options.together]
        run_group("correct", group, options, results, lambda ready: ask_all(ready, results))


def ask_all(ready: Iterable[Server], results: Results) -> None:
    for server in ready:
        name = server.variant.name
        slow = name in ("stock_sm120_triton", "broken_decode")
        for prompt in compare.PROMPTS:
            if slow and max(prompt.lengths) > SLOW_ATTENTION:
                continue
            try:
                answers = compare.ask(server, prompt)
            except Exception as error:
                traceback.print_exc()
                results.put("distance", f"{name} | {prompt.name}", {"failed": f"{type(error).__name__}: {error}"[:300]})
                continue
            results.data.setdefault("answers", {})[f"{name} | {prompt.name}"] = answers
            reference = results.data["answers"].get(f"stock | {prompt.name}")
            if reference is not None:
                found = compare.distance(answers, reference)
                results.put("distance", f"{name} | {prompt.name}", found)
                print(name, "|", prompt.name, {k: round(v, 5) for k, v in found.items()}, flush=True)


def do_speed(options: argparse.Namespace, results: Results) -> None:
    for number, group in enumerate(speed_variants()):
        if number and options.flat_only:
            return

        def use(ready: list[Server], history: bool = number > 0) -> None:
            time_all(ready, history, options, results)

        run_group("speed", group, options, results, use)


def time_all(ready: list[Server], history: bool, options: argparse.Namespace, results: Results) -> None:
    """Steps of short requests, in rounds; then, of the servers of one context, of long ones and a prefill."""
    rounds = 3 if history else options.rounds
    short = [(batch, 64) for batch in speed.BATCHES]
    time_rounds(ready, short, rounds, options, results)
    if history:
        return
    put_verdict(results)
    if options.flat_only:
        return
    long = [server for server in ready if server.variant.host == "context-512k"]
    time_rounds(long, [(16, 8192), (2, 65_000)], 2, options, results)
    for server in long:
        before, best = server.gpu_memory_mib(), speed.prefill(server, 65_000)
        found = {"seconds": best, "mib_before": before, "mib_after": server.gpu_memory_mib()}
        results.put("prefill", server.variant.name, found)


def time_rounds(
    servers: list[Server], loads: Sequence[tuple[int, int]], rounds: int, options: argparse.Namespace, results: Results
) -> None:
    """Time every load, (batch, prompt tokens), once a round; keep what there is after each. The first one warms up."""
    kept = results.data.setdefault("step_ms", {})
    with speed.Watch() as watch:
        for turn, found in enumerate(speed.rounds(servers, loads, rounds + 1, options.until)):
            if turn:
                for (name, batch, length), values in found.items():
                    kept.setdefault(f"{name} | {length} | {batch}", []).append(values)
            shown = {f"{name} | {batch}": round(statistics.median(v), 3) for (name, batch, _), v in found.items()}
            print("round", turn, shown, flush=True)
            idle = speed.rest(watch)
            results.put("speed_rounds", f"{loads[0][1]} tokens, {turn}", watch.turn() | {"idle": idle})


def put_verdict(results: Results) -> None:
    """Medians of what was timed with short requests, and whether they are flat and as fast as stock's."""
    found = {key: value for key, value in results.data["step_ms"].items() if " | 64 | " in key}
    for batch in speed.BATCHES:
        by_name = {key.split(" | ")[0]: value for key, value in found.items() if key.endswith(f" | {batch}")}
        verdict = {}
        for who in ("all", "stock"):
            mine = {name.split(" ")[1]: value for name, value in by_name.items() if name.split(" ")[0] == who}
            verdict[f"{who}, flat"] = speed.flatness(mine)
        for host in CONTEXTS:
            one, other = by_name.get(f"all {host}"), by_name.get(f"stock {host}")
            if one and other:
                verdict[f"all / stock, {host}"] = speed.against(one, other)
        results.put("verdict", str(batch), verdict)
        print("batch", batch, json.dumps(verdict), flush=True)


def do_disaggregated(options: argparse.Namespace, results: Results) -> None:
    """On two GPUs: prefill and decode apart, two replicas, each pair behind a router; all with our kernels."""
    environment = SEAM | TILELANG | switches(*KERNELS)
    names = ("replicas replica-0", "replicas replica-1", "disaggregated prefill", "disaggregated decode")
    variants = {name: Variant(name, name, environment) for name in names}
    programs: dict[str, Any] = {name: start_one(variant, options) for name, variant in variants.items()}
    put = putter("disaggregated", results)
    try:
        ready = wait(list(programs.values()), options.start_timeout)
        for name in names:
            results.put("servers", name, describe(programs[name]))
        if len(ready) < len(names):
            raise RuntimeError("not every server is ready; its log says why")
        for topology in ("replicas", "disaggregated"):
            router = programs[f"{topology} router"] = Router(f"{topology} router", read_launch(options), options.out)
            router.wait(60)
        unified, router = programs["replicas replica-0"], programs["disaggregated router"]
        put("equal tokens, two replicas", disaggregated.same_tokens(unified, programs["replicas replica-1"]))
        put("equal tokens", disaggregated.same_tokens(router, unified))
        put("too long a prompt", disaggregated.refused(router, 131_100))
        put(
            "load",
            disaggregated.compare_load({name: programs[f"{name} router"] for name in ("replicas", "disaggregated")}),
        )
        for name in names[2:]:
            put(f"metrics of {name}", disaggregated.transfer_metrics(programs[name]))
        for name in names[:1:-1]:
            programs[name], found = disaggregated.killed(
                router, programs[name], lambda name=name: start_one(variants[name], options), options.start_timeout
            )
            put(f"killed: {name}", found)
        put("equal tokens after both", disaggregated.same_tokens(router, unified))
    finally:
        for program in programs.values():
            program.stop()


@contextlib.contextmanager
def pair_on_one_gpu(options: argparse.Namespace, results: Results, early: bool) -> Iterator[dict[str, Any]]:
    """Programs of a deployed pair, both sides on one GPU, its router, and a unified server that says what is right.

    early: also a prefill server with SGLang's default, which sends chunks while they are computed, and a router for it
    and the same decode server. "start" of the result starts a server that was stopped once more.
    """
    environment = SEAM | TILELANG | switches(*KERNELS)
    variants = {
        "unified": Variant("unified", "context-128k", environment),
        "prefill": Variant("prefill", "disaggregated prefill", environment),
        "decode": Variant("decode", "disaggregated decode", environment, values=disaggregated.ON_ONE_GPU),
    }
    if early:
        own = environment | {disaggregated.EARLY_SEND: "1"}
        host = "disaggregated prefill"
        variants["early prefill"] = Variant("early prefill", host, own, values=disaggregated.EARLY_PORTS)
    programs: dict[str, Any] = {name: start_one(variant, options) for name, variant in variants.items()}
    try:
        ready = wait(list(programs.values()), options.start_timeout)
        for name in variants:
            results.put("servers", f"pair: {name}", describe(programs[name]))
        if len(ready) < len(variants):
            raise RuntimeError("not every server is ready; its log says why")
        launch, host = read_launch(options), "disaggregated router"
        programs["router"] = Router("router", launch, options.out, host)
        if early:
            programs["early router"] = Router("early router", launch, options.out, host, disaggregated.EARLY_ROUTER)
        for name in ("router", "early router")[: 1 + early]:
            programs[name].wait(60)

        def start_again(name: str) -> Server:
            programs[name] = start_one(variants[name], options)
            return programs[name]

        yield programs | {"start": start_again}
    finally:
        for program in programs.values():
            program.stop()


def putter(step: str, results: Results) -> Callable[[str, Any], None]:
    """A function that keeps one finding of a step and shows it."""

    def put(name: str, value: Any) -> None:
        results.put(step, name, value)
        print(step, "|", name, "|", json.dumps(value)[:600], flush=True)

    return put


def do_pair(options: argparse.Namespace, results: Results) -> None:
    """Both sides on one GPU: tokens of prompts of several chunks, with a chunk sent when it is ready and before."""
    put = putter("pair", results)
    with pair_on_one_gpu(options, results, early=True) as programs:
        unified, router, early = (programs[name] for name in ("unified", "router", "early router"))
        put("equal tokens, unified with itself", disaggregated.same_tokens(unified, unified))
        for turn in range(PAIR_TURNS):
            put(f"equal tokens, sent early, {turn}", disaggregated.same_tokens(early, unified))
            put(f"equal tokens, {turn}", disaggregated.same_tokens(router, unified))
        put("too long a prompt", disaggregated.refused(router, 131_100))
        for name in ("prefill", "decode"):
            put(f"metrics of {name}", disaggregated.transfer_metrics(programs[name]))


def load_pair(programs: Mapping[str, Any], put: Callable[[str, Any], None]) -> list[str]:
    """A pair under load, beside the unified server that shares its GPU; tokens meanwhile; errors of the clients.

    The tokens are those of a loaded and an idle program, so they come once with either of them loaded: what the unified
    server's batches change in its own answers is no fault of the transfer.
    """
    topologies = {"unified": programs["unified"], "the pair": programs["router"]}
    clients = []
    for name, loaded in topologies.items():
        found = disaggregated.same_tokens_under_load(loaded, *topologies.values())
        put(f"equal tokens, {name} under load", found)
        clients.append(found["clients"])
        put(f"warm-up of {name}", disaggregated.warm_up(loaded, disaggregated.CLIENTS))
    put("metrics of prefill before the load", disaggregated.transfer_metrics(programs["prefill"]))
    load = disaggregated.compare_load(topologies)
    put("load", load)
    for name in ("prefill", "decode"):
        put(f"metrics of {name} after the load", disaggregated.transfer_metrics(programs[name]))
    return [error for found in (*clients, *load.values()) for error in disaggregated.failures(found)]


def do_pair_killed(options: argparse.Namespace, results: Results) -> None:
    """Both sides on one GPU: under load, then each killed under load and started again, and the tokens after that."""
    put = putter("pair killed", results)
    with pair_on_one_gpu(options, results, early=False) as programs:
        unified, router = programs["unified"], programs["router"]
        put("equal tokens before", disaggregated.same_tokens(router, unified))
        errors = load_pair(programs, put)
        put("warm-up of the pair, 16 clients", disaggregated.warm_up(router, disaggregated.CHATTING))
        for name in ("decode", "prefill"):
            _again, found = disaggregated.killed(
                router, programs[name], lambda name=name: programs["start"](name), options.start_timeout
            )
            put(f"killed: {name}", found)
        put("equal tokens after both", disaggregated.same_tokens(router, unified))
    assert not errors, f"clients' requests failed with nothing killed: {errors[:4]}"


def do_p2p(_options: argparse.Namespace, results: Results) -> None:
    """Preflight's timed transfers between this machine's GPUs: each pair alone, all of them at once, nothing wrong."""
    program = ROOT / "roles/preflight/files/p2p_bandwidth.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    results.put("p2p", "transfers", found)
    assert "alone" in found, f"nothing was measured: {found}"
    count = len(found["gpus"])
    pairs = {f"{source}-{target}" for source in range(count) for target in range(count) if source != target}
    assert count > 1
    assert set(found["alone"]) == pairs
    assert set(found["rounds"]) == {"all pairs", *(f"shift {k}" for k in range(1, count))}
    assert set(found["rounds"]["all pairs"]) == pairs
    assert found["findings"] == []


def markdown(data: dict[str, Any]) -> str:
    """The tables: distances from stock, and milliseconds of a decode step."""
    lines = []
    if "distance" in data:
        lines += ["| variant | prompt | mean, prompt | max, prompt | mean, output | equal tokens |", "|" + "---|" * 6]
        for name, found in data["distance"].items():
            variant, prompt = name.split(" | ")
            if "failed" in found:
                lines.append(f"| {variant} | {prompt} | {found['failed']} | | | |")
                continue
            cells = [f"{found[key]:.2e}" for key in ("prompt_mean", "prompt_max", "output_mean")]
            lines.append(f"| {variant} | {prompt} | {' | '.join(cells)} | {found['equal']:.0%} |")
    if "shadow" in data:
        lines += ["", "| call | calls | largest errors |", "|" + "---|" * 3]
        for kind, found in data["shadow"].items():
            errors = ", ".join(f"{name} {value:.1e}" for name, value in found.items() if name != "calls")
            lines.append(f"| {kind} | {found['calls']} | {errors} |")
    if "step_ms" in data:
        lines += ["", "| server | live tokens | batch | best | quartile | median | quartile |", "|" + "---|" * 7]
        for name, rounds in data["step_ms"].items():
            values = [value for values in rounds for value in values]
            cells = [f"{value:.3f}" for value in (min(values), *statistics.quantiles(values, method="inclusive"))]
            lines.append(f"| {' | '.join(name.split(' | '))} | {' | '.join(cells)} |")
    if "prefill" in data:
        lines += ["", "| server | prefill of 65,000 tokens, s | MiB before | MiB after |", "|" + "---|" * 4]
        for name, found in data["prefill"].items():
            lines.append(f"| {name} | {found['seconds']:.3f} | {found['mib_before']} | {found['mib_after']} |")
    return "\n".join(lines) + "\n"


STEPS = {"capacity": do_capacity, "refuse": do_refuse, "shadow": do_shadow, "correct": do_correct, "speed": do_speed}
PAIR = {"pair": do_pair, "pair_killed": do_pair_killed}
TWO_GPUS = {"disaggregated": do_disaggregated, "p2p": do_p2p}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps",
        nargs="*",
        help=f"of {', '.join(STEPS)}; all of these without any. Prefill and decode apart on one GPU: "
        f"{', '.join(PAIR)}; on two GPUs: {', '.join(TWO_GPUS)}",
    )
    parser.add_argument("--launch", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--heads", type=int, default=64, help="attention heads: 64 / TP size of the rank to stand for")
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--together", type=int, default=5, help="servers alive at the same time in the step correct")
    parser.add_argument("--first-slot", type=int, default=0, help="added to ports: another one for a second run beside")
    parser.add_argument("--rounds", type=int, default=8, help="of the step speed, after one that warms up")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then the step speed begins no further round")
    parser.add_argument("--flat-only", action="store_true", help="the step speed: short requests, without the history")
    parser.add_argument("--only", nargs="*", help="variants of the step correct")
    options = parser.parse_args(argv)
    known = STEPS | PAIR | TWO_GPUS
    unknown = set(options.steps) - set(known)
    if unknown:
        parser.error(f"unknown step {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    options.out = options.out.resolve()
    options.until = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out)
    for step in options.steps or STEPS:
        known[step](options, results)
    print((options.out / "results.md").read_text() if (options.out / "results.md").exists() else "nothing found")


if __name__ == "__main__":
    main()
