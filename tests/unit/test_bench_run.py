# SPDX-License-Identifier: GPL-3.0-or-later
"""One level measured with the engine's own load generator, against a small engine that keeps honest counters.

ENGINE_PYTHON names the environment with the load generator; each of its starts takes some seconds.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import typing as t
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gpu_samples import sample
from ops import bench
from ops.bench import Level, gpu_words, row_of
from ops.bench_run import NVIDIA_SMI, Sampler, Target, host_facts, measure
from ops.http import Client

TOKEN_S = 0.05
KEY = "key-of-the-small-engine"
LEVEL = Level(concurrency=2, context=0, output_tokens=4, requests=4)
# Every word is a token.
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
}


class SmallEngine:
    """The part of the engine that a benchmark talks to: /generate, /metrics, /v1/loads and /server_info.

    on_request is called with the number of each request, counted from 1, before it is answered. cut ends every answer
    in its middle. With forgets one token of each answer is not counted. busy is what /v1/loads reports as running
    beside the requests that do.
    """

    def __init__(
        self, on_request: t.Callable[[int], None] = lambda _number: None, cut: bool = False, forgets: bool = False
    ) -> None:
        self.counters = dict.fromkeys(bench.ENGINE_COUNTERS.values(), 0)
        self.on_request, self.cut, self.forgets, self.busy = on_request, cut, forgets, 0
        self.keys: set[str] = set()
        self.most_at_once = 0
        self._running = self._requests = 0
        self._lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_words: t.Any) -> None:
                pass

            def do_GET(self) -> None:
                self.whole(engine.page(self.path))

            def do_POST(self) -> None:
                engine.keys.add(self.headers.get("Authorization", ""))
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.answer(self, len(asked["input_ids"]), asked["sampling_params"]["max_new_tokens"])

            def whole(self, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def piece(self, text: str) -> None:
                self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
                self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> SmallEngine:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self, path: str) -> str:
        if path == "/metrics":
            return "".join(f"sglang:{name}{{}} {value}\n" for name, value in self.counters.items())
        load = {"num_used_tokens": 0, "num_running_reqs": self._running + self.busy, "num_waiting_reqs": 0}
        return json.dumps({"loads": [load], "api_key": KEY})

    def served(self, prompt_tokens: int, generation_tokens: int) -> None:
        with self._lock:
            self.counters["num_requests_total"] += 1
            self.counters["prompt_tokens_total"] += prompt_tokens
            self.counters["generation_tokens_total"] += generation_tokens

    def answer(self, handler: t.Any, prompt_tokens: int, tokens: int) -> None:
        with self._lock:
            self._requests += 1
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            number = self._requests
        self.on_request(number)
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for count in range(1, tokens + 1):
            time.sleep(TOKEN_S)
            counts = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
            handler.piece(f"data: {json.dumps({'text': 'word ' * count, 'meta_info': counts})}\n\n")
            if self.cut and count == 2:
                handler.close_connection = True
                handler.connection.shutdown(socket.SHUT_RDWR)
                break
        else:
            handler.piece("data: [DONE]\n\n")
            handler.wfile.write(b"0\r\n\r\n")
        # Like the engine, which counts an answer after it was sent.
        time.sleep(0.05)
        with self._lock:
            self._running -= 1
        self.served(prompt_tokens, tokens - self.forgets)


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a tokenizer, in a place where every temporary file is seen."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (model / "config.json").write_text("{}")
    return model


def target(engine: SmallEngine, model_path: Path, python: str) -> Target:
    return Target(engine.url, Client(engine.url, KEY), "m", str(model_path), python, token=KEY)


def measured(engine: SmallEngine, model_path: Path, python: str, limit_s: float = 120) -> dict[str, t.Any]:
    row = measure(target(engine, model_path, python), LEVEL, "run", time.time() + 120, limit_s)
    assert [path.name for path in model_path.parent.iterdir()] == ["model"], "the raw result, with the key, is left"
    assert KEY not in json.dumps(row)
    return row


def test_a_level_is_warmed_up_measured_and_confirmed(model_path: Path, engine_python: str) -> None:
    with SmallEngine() as engine:
        row = measured(engine, model_path, engine_python)
    assert (row["status"], row["why"]) == (bench.MEASURED, [])
    assert row["counted"]["generator"] == {"requests": 4, "prompt_tokens": 128, "generation_tokens": 16}
    assert row["counted"]["engine"]["generation_tokens"] == 16, "the warm-up is not in it"
    assert engine.counters["num_requests_total"] == 4 + 2, "two requests warmed up"
    assert engine.most_at_once >= LEVEL.concurrency
    assert engine.keys == {f"Bearer {KEY}"}
    # Four requests by two clients: two waves of four tokens.
    assert 8 * TOKEN_S < row["duration_s"] < 20 * TOKEN_S
    assert 0.6 * TOKEN_S < row["tpot_ms"]["p50"] / 1000 < 2 * TOKEN_S
    assert row["output_tok_s"] == pytest.approx(16 / row["duration_s"], rel=0.02)
    assert 1 < row["concurrency_mean"] <= 2


def test_counters_that_disagree_leave_no_figures(model_path: Path, engine_python: str) -> None:
    with SmallEngine(forgets=True) as engine:
        row = measured(engine, model_path, engine_python)
    assert row["status"] == bench.FAILED
    assert row["why"] == ["the load generator counted 16 generation tokens, the engine 12"]
    assert "output_tok_s" not in row


def test_others_are_noticed(model_path: Path, engine_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three that run all the time, and one that comes and goes meanwhile; requests 1, 2, 7 and 8 are the warm-up's."""
    monkeypatch.setattr("ops.bench_run.REST_S", 0.1)
    monkeypatch.setattr("ops.bench_run.SETTLE_S", 0.5)
    with SmallEngine(lambda number: engine.served(7, 9) if number == 4 else None) as engine:
        engine.busy = 3
        row = measured(engine, model_path, engine_python)
    always = [
        "3 requests of others were running and 0 waiting before the measurement",
        "3 requests of others were running and 0 waiting after the measurement",
    ]
    assert (row["status"], row["why"]) == (bench.CONTENDED, always)
    once = "the engine also served 1 requests of others with 7 prompt and 9 generated tokens"
    assert row["contended_before"] == [*always, once]
    assert "output_tok_s" in row


def test_a_level_that_others_met_is_measured_again(model_path: Path, engine_python: str) -> None:
    with SmallEngine(lambda number: engine.served(7, 9) if number == 4 else None) as engine:
        row = measured(engine, model_path, engine_python)
    assert (row["status"], row["why"]) == (bench.MEASURED, [])
    why = "the engine also served 1 requests of others with 7 prompt and 9 generated tokens"
    assert row["contended_before"] == [why]
    assert bench.row_words(row).endswith(f"measured again: the first time {why}")
    assert engine.counters["num_requests_total"] == 2 * (2 + 4) + 1


def test_without_the_time_for_another_the_first_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured here: a level of 10 s met others, and 5 s are left, or the second is not over in time."""
    contended = row_of(LEVEL, bench.CONTENDED, ["the engine also served 1 requests of others"], elapsed_s=10.0)
    rows = [contended]
    monkeypatch.setattr("ops.bench_run._measure_once", lambda *_: rows.pop(0))
    assert measure(None, LEVEL, "run", time.time() + 5, 120) == contended
    for second, wanted in ((bench.LEFT_OUT, bench.CONTENDED), (bench.FAILED, bench.FAILED)):
        rows[:] = [contended, row_of(LEVEL, second, ["the benchmark's time was over"], elapsed_s=10.0)]
        assert measure(None, LEVEL, "run", time.time() + 60, 120)["status"] == wanted


def test_an_answer_that_breaks_off_is_no_result(model_path: Path, engine_python: str) -> None:
    with SmallEngine(cut=True) as engine:
        row = measured(engine, model_path, engine_python)
    assert row["status"] == bench.FAILED
    assert "2 of 2 requests failed; the first: stream read failed" in row["why"][0]
    assert "output_tok_s" not in row


def test_a_load_generator_that_cannot_work_says_so(model_path: Path, engine_python: str) -> None:
    (model_path / "tokenizer.json").unlink()
    with SmallEngine() as engine:
        row = measured(engine, model_path, engine_python)
    assert row["status"] == bench.FAILED
    assert "the load generator ended with status 1; it said: " in row["why"][0]
    assert "tokenizer" in row["why"][0]


def test_a_request_without_an_end_fails_the_level(model_path: Path) -> None:
    """`sleep` stands for the load generator, which would wait for ever as well."""
    waiter = model_path.parent / "model" / "python"
    waiter.write_text("#!/bin/sh\nsleep 98764 & sleep 98764\n")
    waiter.chmod(0o755)
    with SmallEngine() as engine:
        row = measured(engine, model_path, str(waiter), limit_s=1)
        over = measure(target(engine, model_path, str(waiter)), LEVEL, "run", time.time() + 0.5, 60)
    assert (row["status"], row["why"]) == (bench.FAILED, ["it was not over within 1 s"])
    assert (over["status"], over["why"]) == (bench.LEFT_OUT, ["the benchmark's time was over, after 1 s of it"])
    left = subprocess.run(["pgrep", "-f", "^sleep 98764"], capture_output=True, text=True, check=False)
    assert left.stdout == "", "a process of the load generator is left"


def test_no_engine_no_row(model_path: Path) -> None:
    with SmallEngine() as engine:
        pass
    row = measured(engine, model_path, "/usr/bin/python3")
    assert row["status"] == bench.FAILED
    assert f"GET {engine.url}/v1/loads" in row["why"][0]


def test_no_environment_no_row(model_path: Path) -> None:
    with SmallEngine() as engine:
        row = measured(engine, model_path, "/nonexistent/python")
    assert row["why"] == ["cannot run /nonexistent/python: No such file or directory; run site.yml first"]


def test_the_key_is_in_no_command_line_and_no_proxy_or_gpu_in_reach(model_path: Path) -> None:
    with SmallEngine() as engine:
        it = target(engine, model_path, "python")
    assert KEY not in " ".join(it.command(LEVEL, "prompts", "result"))
    environment = it.environment("/tmp/x")
    assert environment.pop("OPENAI_API_KEY") == KEY
    assert set(environment) == {"PATH", "LANG", "HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"}
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


EIGHT = "".join(f"{400 + index}.50, {2300 + index}, {60 + index}\n" for index in range(8))
LOST = sample("nvidia_smi_lost.txt")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"printf '%s' '{EIGHT}'", "404 W mean, 408 W most, 2300 MHz least, 67 °C most"),
        (f"printf '%s' '{EIGHT}[N/A], [Unknown Error], 61\n'", "404 W mean, 408 W most, 2300 MHz least, 67 °C most, "),
        (f"printf '%s' '{LOST}'; exit 15", "not known: nvidia-smi gave no figures ("),
        ("exit 9", "not known: nvidia-smi gave no figures ("),
    ],
)
def test_the_gpus_are_looked_at_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setattr("ops.bench_run.SAMPLE_S", 0.01)
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
    nvidia_smi.chmod(0o755)
    with Sampler([str(nvidia_smi), *NVIDIA_SMI[1:]]) as sampler:
        time.sleep(0.5)
    shown = gpu_words(sampler.gpu())
    assert shown.startswith(words)
    assert ("not said" in shown) == words.endswith(", ")
    asked = (tmp_path / "asked").read_text()
    assert asked == "--query-gpu=power.draw,clocks.sm,temperature.gpu --format=csv,noheader,nounits\n"


def test_a_host_without_a_gpu_says_nothing_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("ops.bench_run.SAMPLE_S", 0.01)
    with Sampler() as sampler:
        time.sleep(0.1)
    assert sampler.gpu() is None
    assert gpu_words(sampler.gpu()) == "no GPU"
    facts = host_facts()
    assert facts["gpus"] == ""
    assert facts["cores"] >= 1
    assert facts["cpu"]
