# SPDX-License-Identifier: GPL-3.0-or-later
"""Every fault of the misbehaving server is caught by the rows that should, and by no crash; the healthy one passes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import typing as t
from dataclasses import replace
from pathlib import Path

import pytest
from confusion import ASKED, CAUGHT, NOT_READY, OWN, PAGE, data, page_with_table, suite
from openai_server import FAULTS, MODEL, FakeServer
from ops.engine_load import parse_counters
from ops.http import Client, HttpError
from ops.probe import ask, wait_until_answering
from ops.prompt_checks import FAULTS as ANSWER_FAULTS
from ops.report import exposition, failure_text, summary_text, write_report
from ops.smoke import BUDGET_S, Suite, SuiteError, begun_report, main, run, stopped_report, suite_of

ROOT = Path(__file__).parents[2]


def full(fake: FakeServer, checks: Suite | None = None, **options: t.Any) -> dict[str, t.Any]:
    return run(Client(fake.base_url), MODEL, checks or suite(), **{"profile": "full", **options})


def row_of(report: dict[str, t.Any], id: str) -> dict[str, t.Any]:
    return next(row for row in report["checks"] if row["id"] == id)


# Faults


def test_every_fault_of_the_server_is_in_the_table() -> None:
    assert set(CAUGHT) == set(FAULTS)


@contextlib.contextmanager
def faulty(fault: str) -> t.Iterator[str]:
    """The URL of a server with a fault: a slow start that has not ended, and nobody where it died at start."""
    with FakeServer(fault, start_seconds=600 if fault == "not_ready" else 0) as fake:
        if fault != "dies_at_start":
            yield fake.base_url
    if fault == "dies_at_start":
        yield fake.base_url


@pytest.mark.parametrize("fault", CAUGHT)
def test_faults_are_caught_by_the_rows_that_should(fault: str) -> None:
    with faulty(fault) as url:
        report = run(Client(url), MODEL, suite(), "full")
    rows = CAUGHT[fault] - NOT_READY
    assert set(report["failed"]) == rows, json.dumps(report, indent=1)
    assert report["ok"] == (not rows)
    for row in report["checks"]:
        assert bool(row["cause"]) == (not row["ok"]), row["id"]
        assert bool(row["next_command"]) == (row["id"] in report["failed"]) or row["skipped"], row["id"]
        assert row["seen"]
        assert row["wanted"]


@pytest.mark.parametrize("fault", CAUGHT)
def test_faults_that_readiness_sees(fault: str) -> None:
    with faulty(fault) as url:
        answer = ask(Client(url), timeout=0.8)
    assert answer.ok == (not CAUGHT[fault] & NOT_READY), answer.detail


def test_a_slow_start_is_waited_for_and_then_right() -> None:
    said: list[str] = []
    with FakeServer("not_ready", start_seconds=0.5) as fake:
        assert wait_until_answering(Client(fake.base_url), 60, say=said.append) == 0
        assert full(fake)["ok"]
    assert said[0].endswith("the port is open, the engine says it is not ready (503)")
    assert said[-1].startswith("ready after ")


def test_every_row_can_fail() -> None:
    rows = {*NOT_READY, "server.model", *ASKED, *OWN, *(f"answer.{fault}" for fault in ANSWER_FAULTS)}
    assert set().union(*CAUGHT.values()) == rows


def test_the_healthy_server_passes_a_hundred_times() -> None:
    checks = suite(timeout=20.0)
    with FakeServer() as fake:
        reports = [full(fake, checks) for _run in range(100)]
    assert [
        report["failed"] + report["skipped"] for report in reports if report["passed"] < len(report["checks"])
    ] == []


def test_the_page_shows_the_table_of_these_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), "run python tests/unit/confusion.py"


@pytest.mark.parametrize("key", ["0123456789abcdef-of-a-client", "s3cr3t"])
@pytest.mark.parametrize("fault", ["key_in_error", "key_in_answer"])
def test_a_key_that_the_server_repeats_is_in_no_report(fault: str, key: str) -> None:
    """Of 16 characters and more, which is taken out wherever it stands, and shorter, where it is a word."""
    with FakeServer(fault) as fake:
        fake.api_key = key
        report = run(Client(fake.base_url, key), MODEL, suite(), "full")
    assert not report["ok"]
    assert "***" in json.dumps(report)
    assert key not in json.dumps(report)


@pytest.mark.parametrize("key", ["Paris", "391", "capital", "ok", "stop", "answer", "e", "prompt"])
def test_a_short_key_changes_no_verdict_and_no_name(key: str) -> None:
    """Keys of less than 16 characters may be words of an answer: the answer is judged as it came."""
    with FakeServer() as fake:
        fake.api_key = key
        report = run(Client(fake.base_url, key), MODEL, suite(timeout=20.0), "full")
    with FakeServer() as fake:
        wanted = full(fake, suite(timeout=20.0))
    assert report["failed"] == []
    assert [row["id"] for row in report["checks"]] == [row["id"] for row in wanted["checks"]]
    said = json.dumps([[row[name] for name in ("seen", "cause", "tries", "evidence")] for row in report["checks"]])
    assert not re.search(rf"(?<!\w){key}(?!\w)", said.replace("\\n", " "))
    if key in ("Paris", "391"):
        assert "***" in said


def test_every_endpoint_has_its_time_in_the_report() -> None:
    with FakeServer() as fake:
        row = row_of(full(fake, suite(timeout=20.0)), "server.endpoints")
    assert row["wanted"] == "each GET within 10 s"
    paths = {url.removeprefix(fake.base_url) for url in row["evidence"]["gets"]}
    assert paths == {"/v1/models", "/server_info", "/v1/loads", "/metrics"}
    assert all(one["longest_s"] < 10 and one["count"] for one in row["evidence"]["gets"].values())
    assert row["evidence"]["max_s"] == 10
    with FakeServer("slow_get") as fake:
        row = row_of(full(fake), "server.endpoints")
        assert f"slow: {fake.base_url}/metrics;" in row["cause"]
        assert row["next_command"].startswith(f"curl -sS -m 60 {fake.base_url}/metrics -o /dev/null")


def test_questions_state_what_was_asked_and_the_times_that_they_are_held_to() -> None:
    with FakeServer() as fake:
        report = full(fake, suite(timeout=20.0))
    assert row_of(report, "prompt.first_token")["evidence"] == {
        "question": "What is the capital of France?",
        "expected": "word: Paris",
        "timeout_s": 20,
        "max_ttft_s": 5,
        "max_gap_s": 5,
    }
    for id in ("prompt.capital", "tool.weather", "concurrent.capitals", "needle.2k"):
        assert row_of(report, id)["evidence"]["timeout_s"] == 20
    assert row_of(report, "tool.weather")["evidence"]["call"]["name"] == "weather"
    assert row_of(report, "concurrent.capitals")["evidence"]["questions"][0]["expected"] == "word: Berlin"
    assert row_of(report, "server.model")["evidence"] == {"timeout_s": 10, "status": 200, "served": [MODEL]}
    assert row_of(report, "answer.loop")["evidence"]["faulty_tries"] == 0


@pytest.mark.parametrize("fault", ["none", "refused", "loads_missing", "metrics_missing", "not_json", "dies_at_start"])
def test_every_row_that_was_judged_states_its_time_limit(fault: str) -> None:
    """Rows that were not asked for lack of an answer name the profile's time."""
    with faulty(fault) as url:
        report = run(Client(url), MODEL, suite(), "full")
    for row in report["checks"]:
        limit = "profile_s" if row["seen"] == "not asked" else "timeout_s"
        assert row["evidence"].get(limit, 0) > 0, (row["id"], row["evidence"])


def test_a_check_that_breaks_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_args: object) -> None:
        raise TypeError("no such \x1b[2J thing")

    monkeypatch.setattr("ops.prompt_checks.judge", breaks)
    monkeypatch.setattr("ops.service_checks.RestingCheck.run", breaks)
    monkeypatch.setattr("ops.service_checks.CountersCheck.run_after", breaks)
    monkeypatch.setattr("ops.smoke.model_row", breaks)
    with FakeServer() as fake:
        report = full(fake)
    broken = {"server.model", *ASKED, "kv.resting_level", "metrics.counters"}
    assert broken <= set(report["failed"])
    assert row_of(report, "prompt.capital")["cause"] == ("the check itself failed: TypeError: no such \\x1b[2J thing")
    assert "TypeError" in row_of(report, "concurrent.capitals")["cause"], "a client that broke has not passed"
    assert "sglang_smoke_ok 0\n" in exposition("sglang_smoke", report, 0)


# Profiles and time


def test_rows_of_the_profiles() -> None:
    with FakeServer() as fake:
        rows = {profile: [row["id"] for row in full(fake, profile=profile)["checks"]] for profile in BUDGET_S}
    assert [id for id in rows["full"] if id not in rows["quick"]] == [
        "tool.weather",
        "concurrent.capitals",
        "concurrent.tools",
        "needle.2k",
        "kv.cancelled_client",
    ]
    assert rows["capacity"] == rows["full"]
    assert rows["quick"][0] == "server.model"
    assert rows["quick"][-len(ANSWER_FAULTS) :] == [f"answer.{fault}" for fault in ANSWER_FAULTS]


def test_a_profile_ends_in_time_and_names_what_it_left_out() -> None:
    with FakeServer("hang", after=2) as fake:
        start = time.monotonic()
        report = full(fake, suite(timeout=30.0), budget_s=0.5)
        elapsed = time.monotonic() - start
    assert elapsed < 5
    assert "no complete answer within 0" in row_of(report, "prompt.product")["cause"]
    left_out = row_of(report, "needle.2k")
    assert (left_out["ok"], left_out["seen"]) == (False, "not asked")
    assert "the 0.5 s of this profile were over" in left_out["cause"]


def test_tolerated_faults_are_counted() -> None:
    checks = suite()
    prompts = tuple(
        replace(check, min_pass_rate=0.9) if check.id == "steady" else check for check in checks.prompts[:9]
    )
    with FakeServer("sometimes_empty") as fake:
        report = full(fake, Suite(prompts=prompts))
    assert (report["ok"], report["failed_tries"]) == (True, 1)
    assert row_of(report, "prompt.steady")["passed"] == row_of(report, "prompt.steady")["tried"] - 1
    assert "1 failed tries were within their pass rate" in summary_text(report)
    assert "sglang_smoke_failed_tries 1\n" in exposition("sglang_smoke", report, 0)


# Evidence


def test_evidence_of_a_healthy_run() -> None:
    with FakeServer() as fake:
        report = full(fake, suite(timeout=20.0))
    needle = row_of(report, "needle.2k")["evidence"]
    assert needle["seed"] == 1
    assert all(2500 <= count <= 2650 for count in needle["prompt_tokens"])
    assert row_of(report, "concurrent.capitals")["evidence"]["clients"] == 8
    cancelled = row_of(report, "kv.cancelled_client")["evidence"]
    assert cancelled["while_running"][-1]["used_tokens"] > cancelled["resting_tokens"] == 0
    assert cancelled["after_leaving"][-1]["used_tokens"] == 0
    over_long = row_of(report, "limits.over_long")
    assert over_long["evidence"]["status"] == 400
    assert "longer than the model" in over_long["seen"]
    counters = row_of(report, "metrics.counters")["evidence"]
    assert counters["moved"]["num_requests_total"] > counters["wanted"]["num_requests_total"] > 40
    weather = row_of(report, "tool.weather")["tries"][0]["answers"]
    assert [answer["mode"] for answer in weather] == ["whole", "whole", "streamed", "streamed"]


def test_a_mix_up_names_the_other_client() -> None:
    with FakeServer("crossed") as fake:
        report = full(fake, Suite(concurrent=suite().concurrent))
    faults = [fault for one in row_of(report, "concurrent.capitals")["tries"] for fault in one["faults"]]
    assert any(re.fullmatch(r"this is the answer to 'What is the capital of \w+\?', .*", f["reason"]) for f in faults)


def test_a_tool_may_be_called_no_more_often_than_allowed() -> None:
    with FakeServer("tool_loop") as fake:
        report = full(fake, Suite(tools=suite().tools))
        assert fake.questions == 6, "three calls whole, three streamed"
    assert "called 3 times, wanted at most 2 calls" in row_of(report, "tool.weather")["cause"]


def test_without_a_seed_every_run_hides_other_facts() -> None:
    needles = tuple(replace(check, seed=None) for check in suite().needles)
    with FakeServer() as fake:
        reports = [full(fake, Suite(needles=needles)) for _run in range(2)]
    seeds = {row_of(report, "needle.2k")["evidence"]["seed"] for report in reports}
    assert all(report["ok"] for report in reports)
    assert len(seeds) == 2


def test_sizes_that_the_server_can_not_hold_are_not_judged() -> None:
    large = suite_of({"needles": [{"id": "32k", "tokens": 32768}, {"id": "near_limit", "share_of_limit": 0.9}]})
    with FakeServer() as fake:
        report = full(fake, large)
    assert row_of(report, "needle.32k")["skipped"]
    assert row_of(report, "needle.32k")["cause"] == "the longest request of this server is 8192 tokens"
    assert row_of(report, "needle.near_limit")["ok"]
    assert all(7160 <= count <= 8100 for count in row_of(report, "needle.near_limit")["evidence"]["prompt_tokens"])
    assert "not judged: needle.32k" in summary_text(report)
    assert 'check="needle.32k"' not in exposition("sglang_smoke", report, 0)


def test_drafts_are_looked_at_where_they_are_asked_for() -> None:
    assert suite_of({"prompts": data()["prompts"]}).speculation is None
    with FakeServer("drafts_refused") as fake:
        report = full(fake)
    assert row_of(report, "speculation.accepted")["seen"].startswith("1.00 tokens a step")


@pytest.mark.parametrize(("fault", "ok"), [("none", True), ("drafts_refused", False), ("drafts_missing", False)])
def test_drafts_of_short_answers_are_judged_by_a_long_one(fault: str, ok: bool) -> None:
    """Half of the tokens of an answer with two come with its prompt: that is no step with two tokens."""
    short = suite_of({"prompts": data()["prompts"][:1], "cancelled_client": False, "speculation": {"min_steps": 40}})
    with FakeServer(fault) as fake:
        row = row_of(full(fake, short), "speculation.accepted")
    assert row["ok"] == ok, row
    assert row["evidence"]["moved"]["num_requests_total"] == 2 + 1
    assert ("speculation is off" in row["cause"]) == (fault == "drafts_missing")


def test_drafts_that_nobody_could_judge_are_not_accepted() -> None:
    few = suite_of({"prompts": data()["prompts"][:1], "speculation": {"min_steps": 1000}})
    with FakeServer() as fake:
        report = full(fake, few)
    assert (report["ok"], report["skipped"]) == (False, [])
    row = row_of(report, "speculation.accepted")
    assert "too few to tell whether drafts are accepted, wanted 1000 steps" in row["cause"]
    assert "max_tokens in models/NAME.yml" in row["cause"]
    with FakeServer("metrics_missing") as fake:
        row = row_of(full(fake), "speculation.accepted")
    assert (row["ok"], row["skipped"], row["seen"]) == (False, False, "no counters")


def test_a_busy_server_is_not_judged_on_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"loads": [{"num_used_tokens": 500, "num_running_reqs": 2, "num_waiting_reqs": 1}]}
    real = Client.get_json
    monkeypatch.setattr(
        Client, "get_json", lambda self, path, *rest: busy if path == "/v1/loads" else real(self, path, *rest)
    )
    with FakeServer() as fake:
        report = full(fake)
    assert report["ok"]
    assert report["skipped"] == ["kv.cancelled_client", "kv.resting_level"]
    assert "500 tokens in use, 2 requests running, 1 waiting" in row_of(report, "kv.cancelled_client")["cause"]


def test_an_unreachable_server_gives_url_time_and_next_command() -> None:
    report = run(Client("http://127.0.0.1:1"), MODEL, suite(), "full")
    text = failure_text(report)
    assert not report["ok"]
    assert re.search(r"POST http://127\.0\.0\.1:1/v1/chat/completions: Connection refused after \d\.\d\d s", text)
    assert "next command: systemctl status 'sglang-*'" in text


@pytest.mark.parametrize(
    ("fault", "row", "words"),
    [
        ("metrics_nan", "metrics.counters", "prompt_tokens_total is 'NaN', wanted a finite count"),
        ("loads_negative", "kv.resting_level", "num_used_tokens is '-7', wanted a count"),
        ("loads_empty", "kv.resting_level", "the answer reports no load: it has no ranks"),
    ],
)
def test_a_reading_of_no_number_is_named(fault: str, row: str, words: str) -> None:
    with FakeServer(fault) as fake:
        report = full(fake)
    assert words in row_of(report, row)["cause"]


def test_counters_as_they_may_stand_on_a_page() -> None:
    page = """sglang:num_requests_total{a="}b {c=\\"d\\"} 7"} 1.0 1700000000000
sglang_num_requests_total{r="1"}  2 # {trace_id="x"} 1.0 1700000000.1
sglang:generation_tokens_total 3e0
sglang:other_total NaN
"""
    assert parse_counters(page) == {"prompt_tokens_total": 0, "generation_tokens_total": 3, "num_requests_total": 3}
    for value in ("NaN", "+Inf", "-1", "abc"):
        with pytest.raises(HttpError, match=re.escape(f"num_requests_total is '{value}', wanted a finite count")):
            parse_counters(f"sglang:num_requests_total {value}\n")
    with pytest.raises(HttpError, match="'inf'"):
        parse_counters('sglang:num_requests_total{r="0"} 1e308\nsglang:num_requests_total{r="1"} 1e308\n')


@pytest.mark.parametrize("length", [-5, 0, 2**24 + 1, 10**30, True, "8192"])
def test_a_limit_that_no_server_means_is_not_asked(monkeypatch: pytest.MonkeyPatch, length: t.Any) -> None:
    models = {"data": [{"id": MODEL, "max_model_len": length}]}
    real = Client.get_json
    monkeypatch.setattr(
        Client, "get_json", lambda self, path, *rest: models if path == "/v1/models" else real(self, path, *rest)
    )
    with FakeServer() as fake:
        report = full(fake, Suite(over_long=suite().over_long))
        assert fake.questions == 0
    assert report["failed"] == ["limits.over_long"]
    assert row_of(report, "limits.over_long")["seen"] == "no limit"


def test_a_server_that_counts_no_tokens_gets_no_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.service_checks.NeedleCheck._count", lambda *_args: 100)
    with FakeServer() as fake:
        report = full(fake, Suite(needles=suite().needles))
    assert report["failed"] == ["needle.2k", "answer.usage"]


# Data


def test_a_suite_from_data() -> None:
    checks = suite_of({"prompts": [{"id": "a", "system": "s", "prompt": "p", "expect": {"kind": "non_empty"}}]})
    assert [message["role"] for message in checks.prompts[0].messages] == ["system", "user"]
    assert (checks.over_long is not None, checks.tools) == (True, ())
    own = dict.fromkeys(("over_long", "cancelled_client", "resting_level", "endpoints"), False)
    assert suite_of({**own, "counters": {"profile": "full"}}).over_long is None


def test_a_suite_asks_something_or_says_that_it_does_not() -> None:
    own = dict.fromkeys(("over_long", "cancelled_client", "resting_level", "counters", "endpoints"), False)
    assert not suite_of({**own, "speculation": False}).asks
    for given in ({}, {"prompts": []}, {**own, "counters": {}, "over_long": None}, {"over_long": False}):
        if set(given) != set(own):
            with pytest.raises(SuiteError, match="there is no question"):
                suite_of(given)
    late = suite_of({**own, "prompts": [{**data()["prompts"][0], "profile": "full"}]})
    assert "no check belongs to the profile quick" in late.problem("quick")
    assert late.problem("full") == suite_of(own).problem("quick") == ""


def broken(kind: str, **changes: t.Any) -> dict[str, t.Any]:
    """One check of a kind with changes; None removes a key."""
    check = {**data()[kind][0], **changes}
    return {kind: [{name: value for name, value in check.items() if value is not None}]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"needle": []}, "'needle' is no kind of check"),
        ({"over_long": {"max_s": 0}}, "over_long: max_s is 0, wanted more than 0"),
        ({"counters": {"windows_s": 3}}, "counters: windows_s is unknown"),
        ({"counters": {"profile": "fast"}}, "profile is 'fast', known are quick, full, capacity"),
        ({"prompts": ["x"]}, "prompts[0] is 'x', wanted a mapping"),
        ({"prompts": "x"}, "prompts is 'x', wanted a list"),
        ({"prompts": False}, "prompts is False, wanted a list"),
        ({"over_long": 0}, "over_long is 0, wanted a mapping"),
        ({1: 2}, "the key 1 is no text"),
        (broken("prompts", prompt=5), "prompt is 5, wanted str"),
        (broken("prompts", system=["x"]), "system is ['x'], wanted str"),
        (broken("prompts", extra_body="x"), "extra_body is 'x', wanted a mapping"),
        (broken("prompts", timeout=float("nan")), "timeout is nan, wanted a finite number"),
        (broken("prompts", timeout=0), "timeout is 0, wanted more than 0"),
        (broken("prompts", id='a"} 1'), "wanted letters, digits"),
        (broken("prompts", id=""), "wanted letters, digits"),
        (broken("tools", tools=["x"]), "wanted a list of mappings"),
        (broken("needles", tokens=-5, share_of_limit=0.5), "tokens is -5"),
        (broken("concurrent", cases=["x", "y"]), "a case is 'x'"),
        (broken("concurrent", cases=[{"prompt": "x", "expect": "y"}] * 2), "expect is 'y', wanted a mapping"),
        ({"prompts": data()["prompts"][:1] * 2}, "prompts: check id 'capital' is used twice"),
        (broken("prompts", prompt=None), "prompts[0]: wanted prompt (with or without system), or messages"),
        (broken("prompts", expect=None), "prompts[0]: expect is missing"),
        (broken("prompts", max_tokens="many"), "max_tokens is 'many', wanted int"),
        (broken("prompts", tries=True), "tries is True, wanted int"),
        (broken("prompts", stream="yes"), "stream is 'yes', known are both, only, never"),
        (broken("prompts", extra={}), "wanted extra_body instead of extra"),
        (broken("prompts", expect={"kind": "contains", "value": "x"}), "kind is 'contains'"),
        (broken("tools", max_calls=0), "max_calls is 0"),
        (broken("tools", call={"arguments": {}}), "tool_call needs value.name"),
        (broken("needles", tokens=0), "tokens is 0, share_of_limit is 0.0, wanted one of them"),
        (broken("needles", needles=99), "needles is 99, wanted 1 to 8"),
        (broken("needles", tokens=None, share_of_limit=1.5), "share_of_limit is 1.5, wanted at most 0.99"),
        (broken("concurrent", cases=[]), "0 cases and 1 rounds"),
        (
            broken("concurrent", cases=data()["concurrent"][0]["cases"][:1] * 2),
            "two cases have the same expected answer",
        ),
    ],
)
def test_unusable_data_is_refused(given: dict[str, t.Any], words: str) -> None:
    with pytest.raises(SuiteError, match=re.escape(words)):
        suite_of(given)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(SuiteError) as caught:
        suite_of({"needle": [], "counters": {"x": 1}, **broken("prompts", tries=0)})
    assert str(caught.value).count(";") == 2


# The command


def command(*arguments: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ops.smoke", *arguments]
    env = {**os.environ, "PATH": path}
    return subprocess.run(argv, cwd=ROOT / "module_utils", env=env, capture_output=True, text=True, check=False)


def test_the_command_writes_report_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(json.dumps(data(20.0)))
    (tmp_path / "key").write_text("sk-secret")
    files = ["--report", str(tmp_path / "report.json"), "--metrics-file", str(tmp_path / "smoke.prom")]
    with FakeServer("more_digits") as fake:
        fake.api_key = "sk-secret"
        options = ["--suite", str(tmp_path / "suite.json"), "--url", fake.base_url, "--model", MODEL]
        done = command(*options, "--api-key-file", str(tmp_path / "key"), *files)
    assert done.returncode == 1, done.stderr
    assert "prompt.product: wanted 'integer: 391', seen '3910'" in done.stdout
    report, metrics = ((tmp_path / name).read_text() for name in ("report.json", "smoke.prom"))
    assert json.loads(report)["profile"] == "quick"
    for line in (
        "sglang_smoke_ok 0",
        'sglang_smoke_check_ok{check="prompt.product"} 0',
        'sglang_smoke_check_ok{check="prompt.capital"} 1',
    ):
        assert line in metrics.splitlines()
    assert "sk-secret" not in done.stdout + done.stderr + report + metrics


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("suite.json", "{", "suite.json is no JSON: Expecting property name"),
        ("suite.json", "[" * 5000, "suite.json is no JSON: it is nested too deeply"),
        ("suite.json", '{"counters": {"window_s": NaN}}', "suite.json is no JSON: NaN"),
        ("suite.json", "[]", "suite.json is [], wanted a mapping"),
        ("suite.json", "{}", "there is no question"),
        ("suite.json", '{"needle": []}', "'needle' is no kind of check"),
        ("intent.json", '{"units": "x"}', "the intent has units"),
    ],
)
def test_the_command_refuses_what_it_can_not_use(tmp_path: Path, name: str, text: str, words: str) -> None:
    usable = json.dumps({"prompts": data()["prompts"]})
    for file, content in {"suite.json": usable, "intent.json": '{"unit": "x.service"}', name: text}.items():
        (tmp_path / file).write_text(content)
    options = ["--suite", str(tmp_path / "suite.json"), "--intent", str(tmp_path / "intent.json")]
    (tmp_path / "report.json").write_text('{"ok": true}')
    files = ["--report", str(tmp_path / "report.json"), "--metrics-file", str(tmp_path / "smoke.prom")]
    done = command(*options, *files, "--url", "http://127.0.0.1:1", "--model", "m", path=str(tmp_path))
    assert done.returncode == 2
    assert words in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["failed"], report["model"], report["profile"]) == (["run.begin"], "m", "quick")
    assert words in report["checks"][0]["cause"]
    assert report["checks"][0]["next_command"].startswith("ansible-playbook site.yml")
    metrics = (tmp_path / "smoke.prom").read_text()
    assert "sglang_smoke_ok 0\n" in metrics
    assert 'check_ok{check="run.begin"} 0\n' in metrics


def test_a_password_in_the_url_is_refused_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(json.dumps({"prompts": data()["prompts"]}))
    options = ["--suite", str(tmp_path / "suite.json"), "--report", str(tmp_path / "report.json")]
    done = command(*options, "--url", "http://u:s3cr3t@127.0.0.1:1", "--model", "m")
    report = (tmp_path / "report.json").read_text()
    assert (done.returncode, json.loads(report)["failed"]) == (2, ["run.begin"])
    assert "s3cr3t" not in done.stdout + done.stderr + report


@pytest.mark.parametrize("how", ["missing", "refuses", "hangs"])
def test_a_systemd_that_does_not_answer_is_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("ops.systemd.QUERY_S", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    script = {"refuses": "echo no bus >&2; exit 1", "hangs": "exec /bin/sleep 60"}
    if how in script:
        (tmp_path / "systemctl").write_text(f"#!/bin/sh\n{script[how]}\n")
        (tmp_path / "systemctl").chmod(0o755)
    (tmp_path / "suite.json").write_text(json.dumps({"prompts": data(20.0)["prompts"][:1]}))
    (tmp_path / "intent.json").write_text('{"unit": "x.service", "version": "0.5.23"}')
    options = ["--suite", str(tmp_path / "suite.json"), "--intent", str(tmp_path / "intent.json")]
    files = ["--report", str(tmp_path / "report.json"), "--metrics-file", str(tmp_path / "smoke.prom")]
    with FakeServer() as fake:
        assert main([*options, "--url", fake.base_url, "--model", MODEL, *files]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["failed"], report["skipped"][0]) == (["drift.unit"], "drift.config")
    words = {"missing": "systemctl is not installed", "refuses": "status 1: no bus", "hangs": "not end within 0.2 s"}
    assert words[how] in row_of(report, "drift.unit")["cause"]
    assert row_of(report, "drift.unit")["next_command"] == "systemctl is-system-running"
    assert row_of(report, "prompt.capital")["ok"]
    assert "sglang_smoke_ok 0\n" in (tmp_path / "smoke.prom").read_text()


def files_of(tmp_path: Path, ok: bool = True) -> list[str]:
    """The options of a run, with the verdict of an older one in place."""
    (tmp_path / "suite.json").write_text(json.dumps({"prompts": data(20.0)["prompts"][:1], "counters": False}))
    (tmp_path / "report.json").write_text(json.dumps({"ok": ok, "model": "old"}))
    (tmp_path / "smoke.prom").write_text(f"sglang_smoke_ok {int(ok)}\n")
    files = [("suite", "suite.json"), ("report", "report.json"), ("metrics-file", "smoke.prom")]
    return [word for option, name in files for word in (f"--{option}", str(tmp_path / name))]


@pytest.mark.parametrize(
    ("state", "cause", "next_command"),
    [
        ("inactive", "x.service is not active: inactive (dead)", "systemctl start x.service"),
        ("failed", "x.service is not active: failed (dead)", "systemctl status x.service"),
    ],
)
def test_a_unit_that_does_not_run_is_a_failed_run(tmp_path: Path, state: str, cause: str, next_command: str) -> None:
    options = files_of(tmp_path)
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho ActiveState={state}\necho SubState=dead\n")
    (tmp_path / "systemctl").chmod(0o755)
    with FakeServer() as fake:
        done = command(
            *options, "--unit", "x.service", "--url", fake.base_url, "--model", MODEL, path=f"{tmp_path}:/bin"
        )
        assert fake.questions == 0
    assert done.returncode == 1, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["failed"], report["model"]) == (["run.begin"], MODEL)
    assert [report["checks"][0][name] for name in ("cause", "next_command")] == [cause, next_command]
    assert cause in done.stdout
    assert f"next command: {next_command}" in done.stdout
    assert "sglang_smoke_ok 0\n" in (tmp_path / "smoke.prom").read_text()


def test_a_run_that_is_killed_leaves_no_older_verdict(tmp_path: Path) -> None:
    options = files_of(tmp_path)
    with FakeServer("hang") as fake:
        options += ["--url", fake.base_url, "--model", MODEL]
        argv = [sys.executable, "-m", "ops.smoke", *options]
        with subprocess.Popen(argv, cwd=ROOT / "module_utils", stderr=subprocess.DEVNULL) as process:
            while fake.questions == 0:
                assert process.poll() is None
                time.sleep(0.05)
            process.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ok"], report["failed"], report["before"]) == (False, ["run.begin"], {"ok": True, "model": "old"})
    assert "has not ended: it goes on, or it was killed" in report["checks"][0]["cause"]
    assert 60 < report["ends_by"] - time.time() <= 180
    environment = {"EXIT_CODE": "killed", "EXIT_STATUS": "KILL", "SERVICE_RESULT": "timeout"}
    for more, failed in (({"EXIT_CODE": "exited"}, None), ({}, ["run.begin"])):
        env = {**os.environ, **environment, **more}
        subprocess.run([*argv, "--ended"], cwd=ROOT / "module_utils", env=env, check=True)
        after = json.loads((tmp_path / "report.json").read_text())
        assert after == report if failed is None else "signal before it had a verdict: KILL (timeout)" in str(after)
    assert (after["failed"], "ends_by" in after) == (["run.begin"], False)
    assert "sglang_smoke_ok 0\n" in (tmp_path / "smoke.prom").read_text()


def test_a_second_run_that_is_killed_keeps_no_pile_of_reports(tmp_path: Path) -> None:
    path = str(tmp_path / "report.json")
    for _ in range(2):
        write_report(path, begun_report(path, "http://h:1", "m", "quick", 0))
    assert json.loads((tmp_path / "report.json").read_text())["before"]["failed"] == ["run.begin"]


def test_what_stopped_a_run_is_in_its_report() -> None:
    words = "drift: 2 of 9 checks failed\ndrift.unit: wanted 'x'\nnext command: systemctl cat x\nnext command: b"
    row = stopped_report(words, "http://h:1", "m", "quick", 0)["checks"][0]
    assert (row["cause"], row["next_command"]) == (
        "drift: 2 of 9 checks failed; drift.unit: wanted 'x'",
        "systemctl cat x",
    )


@pytest.mark.parametrize("option", ["--report", "--metrics-file"])
def test_the_command_asks_nothing_when_it_can_not_write(tmp_path: Path, option: str) -> None:
    (tmp_path / "suite.json").write_text(json.dumps(data()))
    for path, words in ((tmp_path / "no" / "file", "No such file"), (tmp_path, "it is a directory")):
        with FakeServer() as fake:
            options = ["--suite", str(tmp_path / "suite.json"), "--url", fake.base_url, "--model", MODEL]
            done = command(*options, option, str(path))
            assert fake.questions == 0
        assert done.returncode == 2
        assert f"cannot write {path}: {words}" in done.stderr
    assert os.listdir(tmp_path) == ["suite.json"]


def test_one_file_that_can_not_be_written_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "suite.json").write_text(json.dumps({"prompts": data(20.0)["prompts"][:1], "counters": False}))

    def full_disk(path: str, *_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ops.smoke.write_report", full_disk)
    with FakeServer() as fake:
        options = ["--suite", str(tmp_path / "suite.json"), "--url", fake.base_url, "--model", MODEL]
        files = ["--report", str(tmp_path / "report.json"), "--metrics-file", str(tmp_path / "smoke.prom")]
        assert main([*options, *files]) == 1
    assert "report.json: No space left on device" in capsys.readouterr().err
    assert "sglang_smoke_ok 1\n" in (tmp_path / "smoke.prom").read_text()


def test_drift_that_breaks_leaves_a_report_that_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "suite.json").write_text(json.dumps(data(20.0)))
    (tmp_path / "intent.json").write_text('{"unit": "x.service"}')

    def breaks(*_args: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("ops.smoke.drift_rows", breaks)
    with FakeServer() as fake:
        options = ["--suite", str(tmp_path / "suite.json"), "--intent", str(tmp_path / "intent.json")]
        files = ["--report", str(tmp_path / "report.json"), "--metrics-file", str(tmp_path / "smoke.prom")]
        assert main([*options, "--url", fake.base_url, "--model", MODEL, *files]) == 1
    assert json.loads((tmp_path / "report.json").read_text())["failed"] == ["drift"]
    assert "sglang_smoke_ok 0\n" in (tmp_path / "smoke.prom").read_text()


def test_the_command_puts_drift_into_the_same_report(tmp_path: Path) -> None:
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho ActiveState=inactive\n")
    (tmp_path / "systemctl").chmod(0o755)
    (tmp_path / "suite.json").write_text(json.dumps(data(20.0)))
    (tmp_path / "intent.json").write_text('{"unit": "x.service"}')
    options = ["--suite", str(tmp_path / "suite.json"), "--intent", str(tmp_path / "intent.json")]
    with FakeServer() as fake:
        files = ["--metrics-file", str(tmp_path / "smoke.prom")]
        path = f"{tmp_path}:/bin"
        done = command(*options, "--url", fake.base_url, "--model", MODEL, *files, path=path)
    assert done.returncode == 1, done.stderr
    assert "drift.unit: wanted 'active, as rendered and on disk" in done.stdout
    assert 'sglang_smoke_check_ok{check="drift.unit"} 0\n' in (tmp_path / "smoke.prom").read_text()
