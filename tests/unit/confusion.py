# SPDX-License-Identifier: GPL-3.0-or-later
"""Which check catches which fault: the suite that is tried, what must fail for each fault, the table in docs/smoke.md.

    python tests/unit/confusion.py

writes the table anew.
"""

from __future__ import annotations

import sys
import typing as t
from pathlib import Path

ROOT = Path(__file__).parents[2]
for path in (ROOT / "module_utils", ROOT / "tests" / "fakes"):
    sys.path.insert(0, str(path))

from openai_server import CAPITALS, FAULTS  # noqa: E402
from ops.prompt_checks import FAULTS as ANSWER_FAULTS  # noqa: E402
from ops.smoke import Suite, suite_of  # noqa: E402

PAGE = ROOT / "docs" / "smoke.md"
BEGIN, END = "<!-- confusion table: python tests/unit/confusion.py -->", "<!-- end of the confusion table -->"

WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"name": "weather", "arguments": {"city": "Paris", "unit": "celsius"}}
CAPITAL = {"prompt": "What is the capital of France?", "expect": {"kind": "word", "value": "Paris"}}


def data(timeout: float = 0.8) -> dict[str, t.Any]:
    """A suite with every kind of check, in the form in which a model's file has it."""
    suite: dict[str, t.Any] = {
        "prompts": [
            {"id": "capital", **CAPITAL},
            {
                "id": "product",
                "prompt": "What is 17*23? Answer with the number only.",
                "expect": {"kind": "integer", "value": 391},
            },
            {"id": "unicode", "prompt": "Which tower?", "expect": {"kind": "word", "value": "\u6771\u4eac"}},
            {
                "id": "json",
                "prompt": "The capital as JSON",
                "expect": {"kind": "json", "value": {"capital": "Paris"}},
                "response_format": {"type": "json_object"},
            },
            {
                "id": "tool",
                "prompt": "What is the weather in Paris?",
                "expect": {"kind": "tool_call", "value": CALL},
                "tools": WEATHER,
            },
            {"id": "thinking", **CAPITAL, "reasoning": "required", "chat_template_kwargs": {"thinking": True}},
            {"id": "not_thinking", **CAPITAL, "reasoning": "forbidden", "chat_template_kwargs": {"thinking": False}},
            {
                "id": "first_token",
                **CAPITAL,
                "stream": "only",
                "max_ttft_s": timeout / 4,
                "max_gap_s": timeout / 4,
                "tries": 2,
                "min_pass_rate": 0.5,
            },
            {
                "id": "steady",
                "prompt": "Hello",
                "expect": {"kind": "word", "value": "Hello"},
                "stream": "never",
                "tries": 12,
            },
            {
                "id": "json_unsaid",
                **CAPITAL,
                "expect": {"kind": "json", "value": {"capital": "Paris"}},
                "response_format": {"type": "json_object"},
            },
            {
                "id": "long",
                "prompt": "Count from 1 to 60, with commas.",
                "expect": {"kind": "sequence", "value": [1, 60]},
            },
            {
                "id": "cut",
                "prompt": "Count from 1 to 60, with commas.",
                "expect": {"kind": "non_empty"},
                "max_tokens": 8,
                "finish_reason": "length",
            },
            {
                "id": "stopped",
                "prompt": "Count from 1 to 60, with commas.",
                "expect": {"kind": "sequence", "value": [1, 4]},
                "extra_body": {"stop": [", 5"]},
            },
            {
                "id": "sampled",
                **CAPITAL,
                "temperature": 0.8,
                "same_when_streamed": False,
            },
            {
                "id": "second_turn",
                "messages": [
                    {"role": "user", "content": "My name is Ada."},
                    {"role": "assistant", "content": "Hello Ada."},
                    {"role": "user", "content": "What is my name?"},
                ],
                "expect": {"kind": "word", "value": "Ada"},
            },
            {
                "id": "system",
                "system": "The code word is walnut.",
                "prompt": "What is the code word?",
                "expect": {"kind": "word", "value": "walnut"},
            },
        ],
        "tools": [
            {
                "id": "weather",
                "prompt": "What is the weather in Paris?",
                "tools": WEATHER,
                "call": CALL,
                "result": '{"degrees": 23}',
                "expect": {"kind": "integer", "value": 23},
            }
        ],
        "concurrent": [
            {
                "id": "capitals",
                "cases": [
                    {"prompt": f"What is the capital of {country}?", "expect": {"kind": "word", "value": city}}
                    for country, city in CAPITALS.items()
                ],
            },
            {
                "id": "tools",
                "tools": WEATHER,
                "cases": [
                    {
                        "prompt": f"What is the weather in {city}?",
                        "expect": {"kind": "tool_call", "value": {"name": "weather", "arguments": {"city": city}}},
                    }
                    for city in CAPITALS.values()
                ],
            },
        ],
        "needles": [{"id": "2k", "tokens": 2500, "seed": 1}],
        "over_long": {"max_s": timeout},
        "cancelled_client": {"window_s": 0.6, "settle_s": 0.6, "timeout": timeout},
        "resting_level": {"window_s": 2.0},
        "counters": {"window_s": 0.6},
        "endpoints": {"max_s": timeout / 2},
        "speculation": {},
    }
    for kind in ("prompts", "tools", "concurrent", "needles"):
        suite[kind] = [{"max_tokens": 256, **check, "timeout": timeout} for check in suite[kind]]
    return suite


def suite(timeout: float = 0.8) -> Suite:
    return suite_of(data(timeout))


PROMPTS = {f"prompt.{check['id']}" for check in data()["prompts"]}
ASKED = PROMPTS | {"tool.weather", "concurrent.capitals", "concurrent.tools", "needle.2k"}
OWN = {
    "server.endpoints",
    "limits.over_long",
    "kv.cancelled_client",
    "kv.resting_level",
    "metrics.counters",
    "speculation.accepted",
}
# What the readiness core says, before anything is asked; no row of a report.
NOT_READY = {"ready.generation"}
STREAMED = ASKED - {"prompt.steady", "needle.2k"}
ONCE_MORE = STREAMED - {"prompt.first_token", "concurrent.capitals", "concurrent.tools"}
TOOLS = {"prompt.tool", "tool.weather", "concurrent.tools"}
TEXT = ASKED - {"prompt.tool", "concurrent.tools"}
PARIS = {"prompt.capital", "prompt.thinking", "prompt.not_thinking", "prompt.first_token", "prompt.sampled"}
JSON = {"prompt.json", "prompt.json_unsaid"}
CUT = {"prompt.cut"}
UNANSWERED = {*ASKED, "answer.request", "limits.over_long", "kv.cancelled_client"}
REFUSED = {*NOT_READY, *UNANSWERED}

# Fault of the server -> the rows that must fail, and no other. Ready is what generates a token, right or wrong.
CAUGHT: dict[str, set[str]] = {
    "none": set(),
    "empty": {*ASKED, "answer.expected", "answer.non_empty", "answer.finish_reason", "answer.usage"},
    "only_reasoning": {*TEXT, "answer.expected", "answer.non_empty", "answer.reasoning"},
    "loop": {*ASKED - CUT, "answer.expected", "answer.loop", "answer.finish_reason"},
    "loop_then_stop": {*ASKED - CUT, "answer.loop", "answer.expected"},
    "more_digits": {"prompt.product", "answer.expected"},
    "digits_inside": {"prompt.product", "answer.expected"},
    "denied": {*PARIS, "answer.expected"},
    "inside_word": {*PARIS, *JSON, "answer.expected"},
    "reasoning_leak": {*ASKED - CUT, "answer.markers", "answer.expected"},
    "template_leak": {*ASKED - CUT, "answer.markers", "answer.expected"},
    "truncated_stream": {*STREAMED, "answer.request"},
    "no_end_marker": {*STREAMED, "answer.request"},
    "stream_drops": {
        *ONCE_MORE - {"prompt.sampled"},
        "concurrent.tools",
        "answer.same_when_streamed",
        "answer.expected",
    },
    "error_text": {*TEXT - CUT, "answer.expected"},
    "error_object": {*NOT_READY, *ASKED, "answer.request"},
    "error_in_stream": {*STREAMED, "answer.request"},
    "not_json": {*NOT_READY, *ASKED, "answer.request"},
    "refused": REFUSED,
    "overloaded": REFUSED,
    "not_ready": REFUSED,
    "dies_at_start": {*REFUSED, "server.model", "kv.resting_level"},
    "shallow_health": REFUSED,
    "hang": {*REFUSED, "kv.resting_level"},
    "slow_trickle": {*STREAMED, "answer.request"},
    "wrong_model": {"server.model"},
    "content_parts": {*NOT_READY, *ASKED, "kv.cancelled_client", "answer.request"},
    "usage_as_list": {*NOT_READY, *ASKED, "answer.request"},
    "usage_differs": {*ONCE_MORE - {"tool.weather"}, "answer.usage"},
    "denied_number": {"prompt.product", "answer.expected"},
    "control_characters": {*TEXT - CUT, "answer.markers", "answer.expected"},
    "loop_without_spaces": {*TEXT - CUT, "answer.loop", "answer.expected"},
    "unasked_call": {*ASKED - TOOLS, "answer.expected", "answer.finish_reason"},
    "finish_without_call": {*TEXT, "answer.finish_reason"},
    "key_in_error": REFUSED,
    "key_in_answer": {*TEXT - CUT, "answer.expected", "answer.usage"},
    "needles_all": {"needle.2k", "answer.expected"},
    "metrics_nan": {"metrics.counters", "speculation.accepted"},
    "loads_negative": {"kv.cancelled_client", "kv.resting_level"},
    "loads_empty": {"kv.cancelled_client", "kv.resting_level"},
    "no_usage": {*NOT_READY, *ASKED, "answer.usage"},
    "zero_usage": {*NOT_READY, *ASKED, "answer.usage"},
    "cut": {*ASKED - CUT, "answer.finish_reason"},
    "aborted": {*ASKED, "answer.finish_reason"},
    "no_finish_reason": {*ASKED, "answer.finish_reason"},
    "tool_as_text": {*TOOLS, "answer.expected", "answer.markers"},
    "tool_wrong_arguments": {*TOOLS, "answer.expected"},
    "tool_broken_arguments": {*TOOLS, "answer.expected"},
    "tool_arguments_loop": {*TOOLS, "answer.expected", "answer.loop", "answer.finish_reason"},
    "tool_loop": {"tool.weather", "answer.tool_loop"},
    "tool_result_unseen": {"tool.weather", "answer.expected"},
    "metrics_frozen": {"metrics.counters", "speculation.accepted"},
    "metrics_missing": {"metrics.counters", "speculation.accepted"},
    "drafts_refused": {"speculation.accepted"},
    "drafts_missing": {"speculation.accepted"},
    "json_as_prose": {*JSON, "answer.expected"},
    "thinking_always": {"prompt.not_thinking", *CUT, "answer.reasoning", "answer.non_empty", "answer.expected"},
    "thinking_never": {"prompt.thinking", "answer.reasoning"},
    "unicode_split": set(),
    "unicode_broken": {"prompt.unicode", "answer.same_when_streamed", "answer.expected", "answer.markers"},
    "needle_lost": {"needle.2k", "answer.expected"},
    "prompt_cut": {"needle.2k", "answer.prompt_size", "answer.usage"},
    "sometimes_empty": {"prompt.steady", "concurrent.capitals", "answer.non_empty", "answer.expected"},
    "slow_first_token": {"prompt.first_token", "answer.first_token"},
    "crossed": {"concurrent.capitals", "concurrent.tools", "answer.crossed", "answer.expected"},
    "garbled_when_busy": {"concurrent.capitals", "answer.expected"},
    "over_long_cut": {"limits.over_long"},
    "over_long_hangs": {"limits.over_long"},
    "over_long_breaks": {"limits.over_long"},
    "cancel_ignored": {"kv.cancelled_client"},
    "kv_leak": {"kv.resting_level"},
    "loads_missing": {"kv.cancelled_client", "kv.resting_level"},
    "loads_frozen": {"kv.cancelled_client"},
    "slow_get": {"server.endpoints"},
    "in_one_piece": {
        *PARIS - {"prompt.thinking"},
        "prompt.unicode",
        "prompt.json",
        "prompt.long",
        "concurrent.capitals",
        "kv.cancelled_client",
        "answer.stream",
    },
    "slow_stream": {"prompt.first_token", "answer.stream"},
    "history_lost": {"prompt.second_turn", "answer.expected"},
    "system_lost": {"prompt.system", "answer.expected"},
    "hot_empty": {"prompt.sampled", "answer.expected", "answer.non_empty"},
    "stop_when_cut": {*CUT, "answer.finish_reason"},
    "max_tokens_ignored": {*CUT, "answer.finish_reason", "answer.usage"},
    "stop_ignored": {"prompt.stopped", "answer.expected"},
    "usage_halved": {*NOT_READY, *ASKED - {"prompt.product", "prompt.steady"}, "answer.usage"},
    "usage_doubled": {*CUT, "metrics.counters", "answer.usage"},
    "talks_on": {*TEXT - CUT, "answer.expected", "answer.markers"},
    "other_model_answers": {*ASKED, "answer.model"},
    "json_ignored": {"prompt.json_unsaid", "answer.expected"},
    "garbled_when_long": {"prompt.long", "answer.expected"},
    "tool_crossed": {"concurrent.tools", "answer.crossed", "answer.expected"},
    "tool_finish_stop": {*TOOLS, "answer.finish_reason"},
    "nan_stop": {*ASKED, "answer.finish_reason"},
    "tool_without_id": {*TOOLS, "answer.expected"},
}
# Columns of the table, with the rows of a report that belong to them; "ready" is the word of the readiness core.
COLUMNS: dict[str, str] = {
    "ready": "ready.",
    "server": "server.",
    "prompt": "prompt.",
    "tool": "tool.",
    "concurrent": "concurrent.",
    "needle": "needle.",
    "limits": "limits.",
    "kv": "kv.",
    "metrics": "metrics.",
    "speculation": "speculation.",
    "kind of fault": "answer.",
}


def table() -> str:
    """The confusion table as Markdown: one row a fault, one column a group of checks."""
    ids = {*NOT_READY, *ASKED, *OWN, "server.model", *(f"answer.{fault}" for fault in ANSWER_FAULTS)}
    lines = [f"| the server's fault | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for fault, rows in CAUGHT.items():
        cells = []
        for name, prefix in COLUMNS.items():
            group = {id for id in ids if id.startswith(prefix)}
            hit = group & rows
            if name == "kind of fault":
                cells.append(", ".join(sorted(id[len(prefix) :] for id in hit)))
            elif len(group) > 1 and hit and hit != group:
                names = ", ".join(sorted(id[len(prefix) :] for id in hit))
                cells.append(names if len(hit) <= 2 else f"{len(hit)} of {len(group)}")
            else:
                cells.append("caught" if hit else "")
        lines.append(f"| {FAULTS[fault]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """The page with the table between its two marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
