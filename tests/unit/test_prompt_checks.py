# SPDX-License-Identifier: GPL-3.0-or-later
"""Questions with checkable answers: what is wrong with an answer, pass rates, the report."""

from __future__ import annotations

import json
import os
import subprocess
import typing as t
from dataclasses import replace
from pathlib import Path

import pytest
from openai_server import ANSWERS, MODEL, REASONING, FakeServer
from ops.http import Client
from ops.openai import ChatAnswer
from ops.prompt_checks import (
    FAULTS as ROWS,
)
from ops.prompt_checks import (
    Fault,
    PromptCheck,
    Target,
    Try,
    ask_once,
    chat_command,
    check_problem,
    faults_of,
    repeat,
)
from ops.report import failure_text, plain, write_report
from ops.smoke import Suite, run

TIMEOUT = 0.8


def run_checks(client: Client, model: str, checks: t.Sequence[PromptCheck]) -> dict[str, t.Any]:
    return run(client, model, Suite(prompts=tuple(checks)))


def question(id: str, text: str, kind: str, value: t.Any, **more: t.Any) -> PromptCheck:
    expect = {"kind": kind, "value": value}
    return PromptCheck(id, ({"role": "user", "content": text},), expect, **{"timeout": TIMEOUT, **more})


TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}
CALL = {"name": "weather", "arguments": {"city": "Paris", "unit": "celsius"}}
CHECKS = (
    question("capital", "What is the capital of France?", "word", "Paris"),
    question("product", "What is 17*23? Answer with the number only.", "integer", 391),
    question("unicode", "Which tower?", "word", "\u6771\u4eac"),
    question("json", "The capital as JSON", "json", {"capital": "Paris"}),
    question("tool", "What is the weather in Paris?", "tool_call", CALL, extra=TOOLS),
    question(
        "thinking",
        "What is the capital of France?",
        "word",
        "Paris",
        reasoning="required",
        extra={"chat_template_kwargs": {"thinking": True}},
    ),
)
PROMPTS = {f"prompt.{check.id}" for check in CHECKS}


def test_a_report_is_json_for_every_reader_and_harmless_for_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = {"value": float("nan"), "list": (float("inf"), 1.5, True), "text": "a\x1b[2J\n\ud83d"}
    write_report(str(path), report)
    seen = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert seen == {"value": "nan", "list": ["inf", 1.5, True], "text": "a\\x1b[2J\n\\ud83d"}
    assert plain("key sk-1", lambda text: text.replace("sk-1", "***")) == "key ***"


def test_what_was_not_answered_is_not_judged() -> None:
    report = run_checks(Client("http://127.0.0.1:1"), MODEL, CHECKS)
    judged = [row["id"] for row in report["checks"] if row["id"].startswith("answer.") and not row["skipped"]]
    assert judged == ["answer.request"]
    assert set(report["skipped"]) == {f"answer.{fault}" for fault in ROWS if fault != "request"}
    assert run_checks(Client("http://127.0.0.1:1"), MODEL, [])["skipped"] == [f"answer.{fault}" for fault in ROWS]


def test_every_row_is_there_in_every_report_in_the_same_order() -> None:
    wanted = ["server.model", *(f"prompt.{check.id}" for check in CHECKS), *(f"answer.{fault}" for fault in ROWS)]
    for fault in ("none", "overloaded"):
        with FakeServer(fault) as fake:
            report = run_checks(Client(fake.base_url), MODEL, CHECKS)
        assert [row["id"] for row in report["checks"]] == wanted


def test_a_report_survives_json(tmp_path: Path) -> None:
    with FakeServer("stream_drops") as fake:
        report = run_checks(Client(fake.base_url), MODEL, CHECKS)
    path = tmp_path / "report.json"
    path.write_text("old")
    write_report(str(path), report)
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(report))
    assert os.listdir(tmp_path) == ["report.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_report(str(path), {"not JSON": object()})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


GOOD = ChatAnswer("Paris", "", "stop", {"prompt_tokens": 1, "completion_tokens": 1}, "m", (), 0.1, 0.2, 1)


class Flaky:
    """Replaces ask_once: answers right or wrong by a list."""

    def __init__(self, outcomes: list[bool]) -> None:
        self.outcomes = list(outcomes)
        self.asked = 0

    def __call__(self, *_args: object) -> t.Any:
        self.asked += 1
        faults = () if self.outcomes.pop(0) else (Fault("non_empty", "whole", "the content is empty"),)
        return Try(faults, (("whole", GOOD),), 0.1)


@pytest.mark.parametrize(
    ("tries", "rate", "outcomes", "ok", "asked"),
    [
        pytest.param(1, 1.0, [True], True, 1, id="one of one"),
        pytest.param(1, 1.0, [False], False, 1, id="none of one"),
        pytest.param(3, 0.3, [False, True], True, 2, id="a retry"),
        pytest.param(3, 0.66, [True, True], True, 2, id="certain after two"),
        pytest.param(3, 0.67, [True, False], False, 2, id="lost after two"),
        pytest.param(20, 0.95, [True] * 10 + [False] + [True] * 9, True, 20, id="one empty of twenty"),
        pytest.param(20, 0.95, [False, True, False], False, 3, id="two empty of twenty"),
    ],
)
def test_rates(
    monkeypatch: pytest.MonkeyPatch, tries: int, rate: float, outcomes: list[bool], ok: bool, asked: int
) -> None:
    flaky = Flaky(outcomes)
    monkeypatch.setattr("ops.prompt_checks.ask_once", flaky)
    check = question("q", "?", "word", "x", tries=tries, min_pass_rate=rate)
    monkeypatch.setattr("ops.prompt_checks.served_models", lambda *_arguments: [MODEL])
    report = run_checks(Client("http://127.0.0.1:1"), MODEL, [check])
    row = next(row for row in report["checks"] if row["id"] == "prompt.q")
    assert (row["ok"], row["tried"], row["passed"]) == (ok, asked, sum(outcomes))
    assert [one["ok"] for one in row["tries"]] == outcomes, "every try is kept"
    empty = next(row for row in report["checks"] if row["id"] == "answer.non_empty")
    assert (empty["ok"], empty["passed"], empty["tried"]) == (ok, sum(outcomes), asked), "a tolerated fault is counted"


def test_a_silent_server_is_not_asked_to_the_end() -> None:
    with FakeServer("hang", after=2) as fake:
        report = run_checks(Client(fake.base_url), MODEL, CHECKS)
        assert fake.questions == 4, "two answers to the first, then one silence for each of two more"
    seen = {row["id"]: row["seen"] for row in report["checks"]}
    assert "no complete answer within 0.8 s" in seen["prompt.product"]
    assert seen["prompt.json"] == "not asked"
    assert set(report["failed"]) == PROMPTS - {"prompt.capital"} | {"answer.request"}


def test_asking_stops_when_it_cannot_pass_any_more() -> None:
    check = question("q", "?", "word", "x", tries=5)
    target = Target(Client("http://127.0.0.1:1"), MODEL)
    assert len(repeat(lambda: ask_once(target, check), 5, 1.0, lambda: False)) == 1


def test_the_failure_text_holds_what_an_operator_needs() -> None:
    with FakeServer("more_digits") as fake:
        report = run_checks(Client(fake.base_url), MODEL, CHECKS)
        text = failure_text(report)
        command = next(row for row in report["checks"] if row["id"] == "prompt.product")["next_command"]
        assert "2 of 22 checks failed" in text
        assert "prompt.product: wanted 'integer: 391', seen '3910'; the answer says 3910" in text
        assert f"next command: {command}" in text
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "3910", "the command repeats the question"


def test_a_closed_port_points_to_the_unit() -> None:
    report = run_checks(Client("http://127.0.0.1:1"), MODEL, CHECKS[:1])
    row = report["checks"][1]
    assert row["next_command"] == "systemctl status 'sglang-*'"
    assert "Connection refused" in row["cause"]


def test_a_key_is_never_part_of_the_command() -> None:
    command = chat_command("http://h", {"a": "it's"}, "/run/key")
    assert command == (
        "sed 's/^/Authorization: Bearer /' /run/key | curl -sS -m 60 -H @- http://h/v1/chat/completions "
        "-H 'Content-Type: application/json' -d '{\"a\": \"it'\"'\"'s\"}'"
    )
    assert chat_command("http://h", {"a": "x" * 2000}) == "journalctl -u 'sglang-*' -n 100 --no-pager"


CALLED = {"tool_calls": ({"name": "rm", "arguments": "{}"},), "finish_reason": "tool_calls"}
CUT = {"finish_reason": "length"}


@pytest.mark.parametrize(
    ("change", "check", "faults"),
    [
        ({}, {}, []),
        ({"reasoning": REASONING}, {"reasoning": "forbidden"}, ["reasoning"]),
        ({"reasoning": " "}, {"reasoning": "required"}, ["reasoning"]),
        ({"reasoning": REASONING}, {"reasoning": "required"}, []),
        ({"reasoning": "so " * 50}, {}, ["loop"]),
        ({"finish_reason": "length"}, {"allow_length": True}, []),
        ({"ttft_s": 3.0}, {"max_ttft_s": 2.5}, ["first_token"]),
        ({"ttft_s": None}, {"max_ttft_s": 2.5}, []),
        ({"usage": {"prompt_tokens": 1}}, {}, ["usage"]),
        ({"usage": []}, {}, ["usage"]),
        ({"usage": {"prompt_tokens": True, "completion_tokens": True}}, {}, ["usage"]),
        ({"usage": {"prompt_tokens": 1, "completion_tokens": 10**9}}, {}, ["finish_reason", "usage"]),
        ({"tool_calls": ({"name": "rm", "arguments": "{}"},)}, {}, ["expected", "finish_reason"]),
        ({**CALLED, "call_ids": ("a",)}, {"extra": TOOLS}, []),
        ({**CALLED, "call_ids": ("",)}, {"extra": TOOLS}, ["expected"]),
        (
            {"tool_calls": CALLED["tool_calls"] * 2, "call_ids": ("a", "a")},
            {"extra": TOOLS},
            ["expected", "finish_reason"],
        ),
        ({**CALLED, "call_ids": ("a",), "finish_reason": "stop"}, {"extra": TOOLS}, ["finish_reason"]),
        (
            {**CALLED, "call_ids": ("a",), "finish_reason": "stop"},
            {"extra": {**TOOLS, "tool_choice": "required"}},
            [],
        ),
        ({"usage": {"prompt_tokens": 1, "completion_tokens": 64}}, {}, []),
        ({"usage": {"prompt_tokens": 1, "completion_tokens": 65}}, {}, ["finish_reason"]),
        ({"matched_stop": "NaN happened"}, {}, ["finish_reason"]),
        ({"usage": {"prompt_tokens": 1, "completion_tokens": 64}, "finish_reason": "length"}, CUT, []),
        ({"usage": {"prompt_tokens": 1, "completion_tokens": 62}, "finish_reason": "length"}, CUT, ["usage"]),
        ({}, CUT, ["finish_reason", "usage"]),
        ({"chunks": 3}, {}, []),
        ({"chunks": 4}, {}, ["usage"]),
        ({"model": None}, {}, []),
        ({"model": "n"}, {}, ["model"]),
        ({"gap_s": 3.0}, {"max_gap_s": 2.5}, ["stream"]),
        ({"gap_s": None}, {"max_gap_s": 2.5}, []),
        ({"finish_reason": "tool_calls"}, {}, ["finish_reason"]),
        ({"text": "Paris\x00"}, {}, ["markers"]),
    ],
)
def test_faults_of_one_answer(change: dict[str, t.Any], check: dict[str, t.Any], faults: list[str]) -> None:
    found = faults_of(question("q", "?", "word", "Paris", **check), "whole", replace(GOOD, **change), "m")
    assert [fault.id for fault in found] == faults


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"messages": ()}, "neither prompt nor messages"),
        ({"tries": 0}, "tries is 0"),
        ({"max_gap_s": 0}, "max_gap_s is 0"),
        ({"finish_reason": "end"}, "finish_reason is 'end', known are stop, tool_calls, length"),
        ({"min_pass_rate": 0.0}, "min_pass_rate is 0.0"),
        ({"min_pass_rate": 1.1}, "min_pass_rate is 1.1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"timeout": -1.0}, "timeout is -1.0"),
        ({"max_ttft_s": 0}, "max_ttft_s is 0"),
        ({"messages": ("Hello",)}, "a message is 'Hello'"),
        ({"messages": ({"role": "user"},)}, "wanted a mapping with role and content"),
        ({"expect": {"kind": "contains", "value": "x"}}, "kind is 'contains'"),
    ],
)
def test_unusable_checks_are_named(changes: dict[str, t.Any], problem: str | None) -> None:
    found = check_problem(replace(CHECKS[0], **changes))
    assert (found is None) == (problem is None)
    assert problem is None or (problem in str(found) and "'capital'" in str(found))


def test_the_fake_knows_the_answers_it_is_asked() -> None:
    assert all(any(part in check.question() for part in (*ANSWERS, "weather")) for check in CHECKS)
