# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure one level of a benchmark on this host: warm up, wait for rest, load the engine, see what it counted.

The load comes from SGLang's own client (sglang.benchmark.rust_client of the engine's environment), which is a program
of its own here: its start, its key and its end are this module's business, its figures are judged by bench.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import typing as t
from contextlib import contextmanager
from dataclasses import dataclass

from . import bench
from .bench import BenchError, Level, judge, parse_load, row_of
from .bench_text import write_prompts
from .engine_load import METRICS_PATH, Load, parse_counters, read_load
from .http import Client, HttpError
from .redact import without_key

# Tokens that each warm-up answer has at most: enough for every kernel of a decode step to be compiled and tuned.
WARM_UP_TOKENS = 32
# An engine at rest reports this long after its last request.
REST_S = 10.0
SETTLE_S = 5.0
SAMPLE_S = 1.0
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=power.draw,clocks.sm,temperature.gpu", "--format=csv,noheader,nounits")


class TimeOver(Exception):
    """The time limit ended the load generator."""


@dataclass(frozen=True)
class Target:
    """The service, and the load generator for it.

    url is what the load is sent to, engine the client of the engine's own /metrics and /v1/loads. python is the
    engine's interpreter, user the account that the load generator runs as (none: the own one).
    """

    url: str
    engine: Client
    model: str
    model_path: str
    python: str
    token: str | None = None
    user: str | None = None

    def command(self, level: Level, prompts: str, output: str) -> list[str]:
        """The load generator's command line. The key is not in it."""
        return [
            self.python,
            "-m",
            "sglang.benchmark.rust_client",
            "--backend=sglang",
            f"--base-url={self.url}",
            f"--model={self.model_path}",
            f"--tokenizer={self.model_path}",
            f"--served-model-name={self.model}",
            "--dataset-name=random",
            f"--dataset-path={prompts}",
            "--tokenize-prompt",
            f"--random-input-len={level.prompt_tokens}",
            f"--random-output-len={level.output_tokens}",
            "--random-range-ratio=1",
            f"--num-prompts={level.requests}",
            f"--max-concurrency={level.concurrency}",
            "--warmup-requests=0",
            "--ready-check-timeout-sec=0",
            "--disable-tqdm",
            "--disable-retokenize",
            f"--output-file={output}",
            "--output-details",
        ]

    def environment(self, home: str) -> dict[str, str]:
        """The whole environment of the load generator: no proxy, hub or GPU. Only its user can read the key there."""
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": home,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if self.token:
            variables["OPENAI_API_KEY"] = self.token
        return variables


def measure(target: Target, level: Level, run_id: str, deadline: float, limit_s: float) -> dict[str, t.Any]:
    """Measure one level, and once more when others were served too, as the hourly canary is; returns the row.

    run_id makes the prompts new, so that the prefix cache holds none of them. deadline (seconds since the epoch) is the
    end of the benchmark: a level that it ends is left out. limit_s (seconds) is what one level may take: a server that
    leaves a request without an end makes it fail.
    """
    row = _measure_once(target, level, run_id, deadline, limit_s)
    if row["status"] != bench.CONTENDED or time.time() + row["elapsed_s"] > deadline:
        return row
    again = _measure_once(target, level, f"{run_id} again", deadline, limit_s)
    if again["status"] == bench.LEFT_OUT:
        return row
    return {**again, "contended_before": row["why"], "elapsed_s": round(row["elapsed_s"] + again["elapsed_s"], 1)}


def _measure_once(target: Target, level: Level, run_id: str, deadline: float, limit_s: float) -> dict[str, t.Any]:
    start = time.monotonic()
    try:
        row = _measure(target, level, run_id, min(deadline, time.time() + limit_s))
    except TimeOver:
        took = time.monotonic() - start
        over = time.time() >= deadline
        why = (
            f"the benchmark's time was over, after {took:.0f} s of it"
            if over
            else f"it was not over within {took:.0f} s"
        )
        row = row_of(level, bench.LEFT_OUT if over else bench.FAILED, [why])
    except BenchError as error:
        row = row_of(level, bench.FAILED, [str(error)])
    except HttpError as error:
        row = row_of(level, bench.FAILED, [f"{error}; next command: systemctl status 'sglang-*'"])
    return {**row, "elapsed_s": round(time.monotonic() - start, 1)}


def _measure(target: Target, level: Level, run_id: str, deadline: float) -> dict[str, t.Any]:
    contended = [_busy_words(load, "before") for load in [at_rest(target.engine, REST_S)] if load.busy]
    warm = Level(level.concurrency, level.context, min(level.output_tokens, WARM_UP_TOKENS), level.concurrency)
    generate(target, warm, f"{run_id} warm-up", deadline)
    at_rest(target.engine, REST_S)
    before = read_counters(target.engine)
    with Sampler() as sampler:
        load = generate(target, level, run_id, deadline)
    rest = at_rest(target.engine, SETTLE_S)
    after = settled(target.engine, before, level.requests)
    contended += [_busy_words(rest, "after")] if rest.busy else []
    status, why = judge(load, before, after)
    if contended and status != bench.FAILED:
        status = bench.CONTENDED
    counted = {"generator": load.sums(), "engine": {name: after[name] - before[name] for name in after}}
    if status == bench.FAILED:
        return row_of(level, status, [*contended, *why], counted=counted)
    return row_of(level, status, [*contended, *why], **load.figures, counted=counted, gpu=sampler.gpu())


def _busy_words(load: Load, when: str) -> str:
    """The numbers are of the engine's last look at itself, which may be some steps old; that they are not 0 counts."""
    return f"{load.running} requests of others were running and {load.waiting} waiting {when} the measurement"


# The engine


def read_counters(engine: Client) -> dict[str, float]:
    """The engine's counters under the names of bench.ENGINE_COUNTERS. Raises HttpError."""
    text = engine.get(METRICS_PATH, 10.0).body.decode("utf-8", errors="replace")
    found = parse_counters(text, tuple(bench.ENGINE_COUNTERS.values()))
    return {name: found[counter] for name, counter in bench.ENGINE_COUNTERS.items()}


def at_rest(engine: Client, window: float) -> Load:
    """The load as soon as nothing runs or waits, or what it is when the window (seconds) is over. Raises HttpError."""
    end = time.monotonic() + window
    while True:
        load = read_load(engine)
        if not load.busy or time.monotonic() > end:
            return load
        time.sleep(0.2)


def settled(engine: Client, before: t.Mapping[str, float], requests: int) -> dict[str, float]:
    """The counters once the last request is in them: an answer reaches its client before it is counted."""
    end = time.monotonic() + SETTLE_S
    while True:
        counters = read_counters(engine)
        if counters["requests"] - before["requests"] >= requests or time.monotonic() > end:
            return counters
        time.sleep(0.2)


# The load generator


def generate(target: Target, level: Level, run_id: str, deadline: float) -> bench.Load:
    """Run the load generator once. Raises BenchError and TimeOver."""
    with _directory(target.user) as home:
        prompts, output = os.path.join(home, "prompts.json"), os.path.join(home, "result.jsonl")
        write_prompts(prompts, level, run_id)
        said = _run(target, target.command(level, prompts, output), home, deadline)
        try:
            with open(output, encoding="utf-8") as handle:
                text = handle.read()
        except FileNotFoundError:
            raise BenchError(f"the load generator wrote no result; it said: {said}") from None
        return parse_load(text, level)


@contextmanager
def _directory(user: str | None) -> t.Iterator[str]:
    """A directory that only the load generator's user can read: its raw result holds the API key."""
    path = tempfile.mkdtemp(prefix="sglang-bench-")
    try:
        if user:
            os.chown(path, _account(user)["user"], -1)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run(target: Target, command: list[str], home: str, deadline: float) -> str:
    """Run a command until its end or the deadline; returns the end of what it said. Raises BenchError and TimeOver."""
    account = _account(target.user) if target.user else {}
    try:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=target.environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            **account,
        )
    except OSError as error:
        raise BenchError(f"cannot run {command[0]}: {error.strerror}; run site.yml first") from None
    try:
        _out, said = process.communicate(timeout=max(0.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        raise TimeOver from None
    finally:
        _end(process)
    said = _last_words(said, target.token)
    if process.returncode != 0:
        raise BenchError(f"the load generator ended with status {process.returncode}; it said: {said}")
    return said


def _account(user: str) -> dict[str, t.Any]:
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise BenchError(f"this host has no user {user}; run site.yml first") from None
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _end(process: subprocess.Popen[str]) -> None:
    """End the whole process group, whatever is left of it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _last_words(said: str, token: str | None) -> str:
    text = " ".join(said.split())[-400:] or "nothing"
    return without_key(text, token) if token else text


# What happens beside it


class Sampler(threading.Thread):
    """Looks at the GPUs while a load runs, where there is an nvidia-smi; what it did not say is counted."""

    def __init__(self, nvidia_smi: t.Sequence[str] = NVIDIA_SMI) -> None:
        super().__init__(daemon=True)
        self._command = list(nvidia_smi) if shutil.which(nvidia_smi[0]) else []
        self._gpus: list[tuple[float, float, float]] = []
        self._unread = 0
        self._ended = threading.Event()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while self._command and not self._ended.wait(SAMPLE_S):
            said = _output(self._command)
            found = gpu_samples(said)
            self._gpus += found
            # A line for each GPU; a look that says nothing is one.
            self._unread += max(1, len(said.splitlines())) - len(found)

    def gpu(self) -> dict[str, float] | None:
        return gpu_summary(self._gpus, self._unread) if self._command else None


def _output(command: t.Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def gpu_samples(text: str) -> list[tuple[float, float, float]]:
    """(power in W, SM clock in MHz, temperature in degrees C) of each GPU that says all three."""
    found = []
    for line in text.splitlines():
        try:
            power, clock, temperature = (float(cell) for cell in line.split(","))
        except ValueError:
            continue
        found.append((power, clock, temperature))
    return found


def gpu_summary(samples: t.Sequence[tuple[float, float, float]], unread: int = 0) -> dict[str, float]:
    """What a table shows of the samples, over all GPUs. unread is how many times a GPU did not say all three."""
    if not samples:
        return {"samples": 0, "unread": unread}
    power, clock, temperature = zip(*samples)
    return {
        "samples": len(samples),
        "unread": unread,
        "power_w_mean": round(sum(power) / len(power), 1),
        "power_w_max": max(power),
        "sm_mhz_min": min(clock),
        "temperature_c_max": max(temperature),
    }


# The host

PACKAGES = ("sglang", "torch", "triton", "transformers", "flashinfer-python", "sglang-kernel", "sglang-dsv4-sm120")
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {d.metadata["Name"]: d.version for d in m.distributions() if d.metadata["Name"] in sys.argv[1:]}
print(json.dumps(found))
"""


def versions_command(python: str) -> list[str]:
    """A command that prints the versions of PACKAGES as JSON."""
    return [python, "-c", _VERSIONS, *PACKAGES]


def host_facts() -> dict[str, t.Any]:
    """Name, processor, load and GPUs of this host."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            model = re.search(r"^model name\s*: (.*)$", handle.read(), re.MULTILINE)
    except OSError:
        model = None
    names = [
        line.strip()
        for line in _output(
            ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
        ).splitlines()
    ]
    gpus = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return {
        "name": os.uname().nodename,
        "cpu": model[1] if model else "unknown CPU",
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "gpus": "; ".join(gpus),
    }
