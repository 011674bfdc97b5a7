# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import math
import typing as t
from urllib.parse import parse_qs, urlsplit

import pytest
from ops.http import Client, HttpError
from ops.prometheus import Expectation, Sample, instant, judge, query_until


def vector(*values: float | str) -> dict[str, t.Any]:
    rows = [{"metric": {"tp_rank": str(i)}, "value": [1795997372.1, str(value)]} for i, value in enumerate(values)]
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


class FakePrometheus(Client):
    """Answers queries from a list; the last answer stays. An exception in it is raised."""

    def __init__(self, *answers: t.Any) -> None:
        super().__init__("http://127.0.0.1:9090")
        self.answers = list(answers)
        self.queries: list[str] = []
        self.now = 0.0

    def get_json(self, path: str, timeout: float | None = None) -> t.Any:
        self.queries += parse_qs(urlsplit(path).query)["query"]
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def error(kind: str, status: int | None) -> HttpError:
    return HttpError(kind, "GET", "http://127.0.0.1:9090/api/v1/query", "it failed", 0.1, status)


QUERY = 'sum(rate(sglang:generation_tokens_total{model_name="a&b"}[1m]))'


def test_an_instant_query_is_quoted_and_read() -> None:
    server = FakePrometheus(vector(1, "2.5"))
    assert instant(server, QUERY) == (Sample({"tp_rank": "0"}, 1.0), Sample({"tp_rank": "1"}, 2.5))
    assert server.queries == [QUERY]


def test_a_scalar() -> None:
    server = FakePrometheus({"status": "success", "data": {"resultType": "scalar", "result": [1.1, "7"]}})
    assert instant(server, "7") == (Sample({}, 7.0),)


@pytest.mark.parametrize(
    "answer", [[], {}, {"data": None}, {"data": {"resultType": "matrix", "result": [{"metric": {}, "values": []}]}}]
)
def test_an_answer_of_another_shape(answer: t.Any) -> None:
    with pytest.raises(HttpError, match="no instant vector or scalar"):
        instant(FakePrometheus(answer), "up")


@pytest.mark.parametrize(
    ("values", "expectation", "reason"),
    [
        ([], {}, "the result is empty"),
        ([], {"non_empty": False}, ""),
        ([0], {}, ""),
        ([5, 3], {"min_value": 3}, ""),
        ([5, 3], {"min_value": 4}, "the value is 3, wanted at least 4"),
        ([5, 3], {"max_value": 5}, ""),
        ([5, 3], {"max_value": 4}, "the value is 5, wanted at most 4"),
        ([5, 3], {"increased_over": 7}, ""),
        ([5, 3], {"increased_over": 8}, "the value is 8 and has not increased over 8"),
        ([5, 3], {"increased_over": math.nan}, ""),
        ([math.nan, 3], {}, "a value is NaN"),
    ],
)
def test_expectations(values: list[float], expectation: dict[str, t.Any], reason: str) -> None:
    assert judge([Sample({}, value) for value in values], Expectation(**expectation)) == reason


def test_a_window_is_waited_in() -> None:
    server = FakePrometheus(vector(), error("connect", None), vector(5), vector(9))
    outcome = query_until(server, "x", Expectation(increased_over=5), 30, lambda: server.now, server.sleep)
    assert outcome.ok
    assert (outcome.attempts, outcome.elapsed_s, outcome.value) == (4, 6, 9)


def test_a_window_ends() -> None:
    server = FakePrometheus(vector())
    outcome = query_until(server, "x", Expectation(), 10, lambda: server.now, server.sleep)
    assert (outcome.ok, outcome.reason, outcome.value) == (False, "the result is empty", None)
    assert outcome.elapsed_s <= 10


def test_an_unreachable_server_is_the_reason() -> None:
    outcome = query_until(FakePrometheus(error("connect", None)), "x", Expectation())
    assert "it failed" in outcome.reason


def test_a_refused_query_is_not_tried_again() -> None:
    server = FakePrometheus(error("status", 400))
    with pytest.raises(HttpError):
        query_until(server, "sum(", Expectation(), 30, lambda: server.now, server.sleep)
    assert len(server.queries) == 1


def test_the_fake_speaks_json() -> None:
    assert json.loads(json.dumps(vector(1)))["data"]["result"][0]["value"][1] == "1"
