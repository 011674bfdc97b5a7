# SPDX-License-Identifier: GPL-3.0-or-later
"""bench.yml on one real host with the real engine and its own load generator, as an operator meets it.

The tests build on each other, on the host of test_site.py when that ran before.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from site_host import CHECKOUT, ENGINE, Run, SiteHost

pytestmark = pytest.mark.integration
DIRECTORY = "/var/lib/sglang/bench"
API_KEY_FILE = CHECKOUT / ".cache" / "lab-api-key"
# Short levels: what is measured here is the benchmark, not the engine.
SHORT = ("-e", "sglang_bench_concurrency=4,16", "-e", "sglang_bench_contexts=0,256", "-e", "sglang_bench_waves=1")
ONE = ("-e", "sglang_bench_concurrency=4", "-e", "sglang_bench_contexts=0", "-e", "sglang_bench_waves=1")
# Another client of the service: it asks, and asks again.
CLIENT = """\
key=$(cat /etc/sglang/credentials/api-key)
body='{"model": "smollm2-135m-instruct", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}'
while :; do
  curl --silent --max-time 60 --header "Authorization: Bearer $key" --json "$body" \\
    http://127.0.0.1:30001/v1/chat/completions >/dev/null
  sleep 0.5
done
"""


@pytest.fixture(scope="module")
def host(site_host: SiteHost) -> SiteHost:
    return site_host


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results are fetched to."""
    return tmp_path_factory.mktemp("bench")


def bench(host: SiteHost, fetched: Path, *arguments: str, status: int | None = 0) -> Run:
    return host.play("playbooks/bench.yml", "-e", f"sglang_bench_fetch_directory={fetched}", *arguments, status=status)


def results(fetched: Path) -> list[dict[str, Any]]:
    """The fetched results, the newest last."""
    return [json.loads(path.read_text()) for path in sorted((fetched / "lab1").glob("*.json"))]


def times(row: dict[str, Any]) -> int:
    """How often a level was measured: once more when the canary met it, not at all when it was left out."""
    return 0 if row["status"] == "left_out" else 1 + ("contended_before" in row)


def counter(host: SiteHost, name: str) -> float:
    """A counter of the engine, read past everything that the benchmark uses."""
    page = host.shell("curl --silent http://127.0.0.1:30001/metrics")
    return sum(float(value) for value in re.findall(rf"^sglang:{name}{{.*}} (\S+)$", page, re.MULTILINE))


def test_levels_are_measured_and_the_engine_confirms_them(host: SiteHost, converged: None, fetched: Path) -> None:
    before = counter(host, "generation_tokens_total")
    run = bench(host, fetched, *SHORT)
    assert run.changed_tasks() in ([], ["sglang_bench : Create the directory of the results"])
    (result,) = results(fetched)
    assert result["measured"] == ["c4-ctx0", "c4-ctx256"], run.output[-5000:]
    assert result["left_out"] == ["c16-ctx0", "c16-ctx256"]
    rows = {row["id"]: row for row in result["rows"]}
    assert rows["c16-ctx0"]["why"] == [
        "the service runs 8 requests at once; more would wait, and waiting is not measured"
    ]
    for id in result["measured"]:
        row = rows[id]
        generator, engine = row["counted"]["generator"], row["counted"]["engine"]
        assert generator == {name: engine[name] for name in generator}
        assert generator["generation_tokens"] == row["requests"] * row["output_tokens"]
        assert generator["prompt_tokens"] == row["requests"] * row["prompt_tokens"]
        assert engine["cached_tokens"] <= 4 * row["requests"]
        assert row["output_tok_s"] == pytest.approx(generator["generation_tokens"] / row["duration_s"], rel=0.01)
        # The time of an answer is that of its first token and of the others.
        assert row["duration_s"] * 1000 > row["ttft_ms"]["p50"] + row["tpot_ms"]["p50"] * (row["output_tokens"] - 1)
        assert row["gpu"] is None
    assert 3 < rows["c4-ctx0"]["concurrency_mean"] <= 4
    measured = sum(times(row) * row["counted"]["generator"]["generation_tokens"] for row in rows.values() if times(row))
    warm_up = sum(times(row) * row["concurrency"] * row["output_tokens"] for row in rows.values())
    # What is left is the smoke run's, and perhaps the canary's.
    assert 0 < counter(host, "generation_tokens_total") - before - measured - warm_up < 400


def test_the_result_says_what_was_measured_where(host: SiteHost, fetched: Path) -> None:
    (result,) = results(fetched)
    pid = host.main_pid(ENGINE)
    assert f"OPS_CONFIG_SHA256={result['config_sha256']}" in host.shell(f"tr '\\0' '\\n' < /proc/{pid}/environ")
    assert result["packages"]["sglang"] == "0.5.23"
    assert result["topology"] == {"topology": "unified", "server": "unified", "tp": 1, "device": "cpu"}
    assert result["service"]["context_length"] == 8192
    assert result["host"]["name"] == "lab1"
    assert result["previous"] is None
    (page,) = (fetched / "lab1").glob("*.md")
    assert "# Benchmark of smollm2-135m-instruct on lab1" in page.read_text()
    assert "no GPU" in page.read_text()
    assert host.shell(f"cat {DIRECTORY}/{page.name}") == page.read_text().strip()


def test_a_second_client_is_contention_and_is_said(host: SiteHost, fetched: Path) -> None:
    host.shell(f"cat > /run/client.sh <<'E'\n{CLIENT}E\nsystemd-run --quiet --unit=client sh /run/client.sh")
    try:
        run = bench(host, fetched, *ONE, "-vvv", status=None)
    finally:
        host.shell("systemctl stop client; rm /run/client.sh")
    assert run.status != 0, "nothing was measured"
    result = results(fetched)[-1]
    assert result["contended"] == ["c4-ctx0"]
    (row,) = result["rows"]
    assert "requests of others" in " ".join(row["contended_before"])
    assert row["counted"]["engine"]["requests"] > row["requests"]
    assert "requests of others" in " ".join(row["why"])
    assert "CONTENDED" in run.output
    assert API_KEY_FILE.read_text().split()[0] not in run.output + json.dumps(results(fetched))


def test_the_next_run_names_its_levels_and_is_compared_with_the_last_clean_one(host: SiteHost, fetched: Path) -> None:
    clean = [result for result in results(fetched) if result["measured"]][-1]
    run = bench(host, fetched, *ONE)
    assert "TASK [sglang_bench : Measure 1 of 1: C=4, context 0, 4 requests" in run.output
    line = r"C=4, context 0: [\d.]+ tok/s, TTFT p50 [\d.]+ ms, TPOT p50 [\d.]+ ms, 4 requests in"
    assert re.search(line, " ".join(run.output.split()))
    assert f"[{'#' * 24}] 1 of 1 levels" in run.output
    result = results(fetched)[-1]
    previous = result["previous"]
    assert (previous["time"], previous["same_config"]) == (clean["time"], True)
    ratios = previous["ratios"]["c4-ctx0"]
    rows = [next(row for row in one["rows"] if row["id"] == "c4-ctx0") for one in (clean, result)]
    old, new = (row["output_tok_s"] for row in rows)
    assert ratios["output_tok_s"] == pytest.approx(new / old, abs=0.002)
    assert f"against before: tok/s x{ratios['output_tok_s']:.2f}" in " ".join(run.output.split())


# The model says Paris.
WRONG = {"id": "x", "prompt": "What is the capital of France?", "expect": {"kind": "word", "value": "London"}}
REFUSALS = {
    "out of range": (["-e", "sglang_bench_concurrency=0,4"], ["sglang_bench_concurrency is 0,4", "1 to 4096"]),
    "wrong type": (["-e", "sglang_bench_contexts=8k"], ["sglang_bench_contexts", "8k", "int"]),
    "misspelt": (["-e", "sglang_bench_wave=1"], ["sglang_bench_wave", "did you mean sglang_bench_waves"]),
    "one token": (["-e", "sglang_bench_output_tokens=1"], ["sglang_bench_output_tokens is 1", "2 to 65536"]),
    "nothing fits": (["-e", "sglang_bench_concurrency=999"], ["The service can hold none", "sglang_bench_concurrency"]),
    "another configuration": (["-e", "sglang_serve_context_length=4096"], ["drift.arguments", "4096", "8192"]),
    "wrong answers": (
        ["-e", json.dumps({"sglang_smoke_checks": {"prompts": [{**WRONG, "max_tokens": 24}]}})],
        ["prompt.x", "London"],
    ),
}


# The others are the same for every role.
OWN = ("nothing fits", "another configuration", "wrong answers")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, id=name.replace(" ", "_"), marks=[] if name in OWN else pytest.mark.thorough)
        for name in REFUSALS
    ],
)
def test_it_refuses_before_it_loads(host: SiteHost, fetched: Path, case: str) -> None:
    arguments, wanted = REFUSALS[case]
    before = len(results(fetched))
    run = bench(host, fetched, *arguments, status=None)
    assert run.status != 0
    message = " ".join(run.output.split())
    assert [text for text in wanted if text not in message] == [], run.output[-3000:]
    assert "TASK [sglang_bench : Measure" not in run.output
    assert len(results(fetched)) == before
    if case == "wrong answers":  # its verdict is the host's now: an alert, and what the dashboard shows
        host.shell("systemctl start sglang-canary.service")


@pytest.mark.thorough
def test_results_at_two_context_lengths_give_a_curve(host: SiteHost, fetched: Path) -> None:
    length = ("-e", "sglang_serve_context_length=4096")
    host.play("site.yml", *length)
    run = bench(host, fetched, *ONE, *length)
    result = results(fetched)[-1]
    assert result["previous"]["same_config"] is False
    assert [point["context_length"] for point in result["context_length_curve"]] == [4096, 8192]
    assert result["context_length_curve"][0]["output_tok_s"]["4"] == result["rows"][0]["output_tok_s"]
    page = sorted((fetched / "lab1").glob("*.md"))[-1].read_text()
    assert "Short prompts over the configured context length" in page
    assert "another configuration" in " ".join(run.output.split())
    host.play("site.yml")
