# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
import time
import typing as t

import pytest
from ops.answers import check_expectation, find_loop, find_marker, is_empty, judge

PARIS = {"kind": "word", "value": "Paris"}
QUESTION = "What is 17*23? Answer with the number only."
PRODUCT = {"kind": "integer", "value": 391}
NUMBER = {"kind": "word", "value": ["4", "four"]}
CITY = {"kind": "json", "value": {"capital": "Paris"}}
CALL = {"kind": "tool_call", "value": {"name": "weather", "arguments": {"city": "Paris"}}}

RIGHT: list[tuple[dict[str, t.Any], str]] = [
    (PARIS, "Paris"),
    (PARIS, "The capital of France is Paris."),
    (PARIS, 'The answer is "PARIS"!'),
    (PARIS, "**Paris**"),
    (PARIS, "Not Lyon: Paris."),
    (PARIS, "It is not Paris, some say; but it is Paris."),
    (PARIS, "P\u200baris"),
    (PARIS, "Without a doubt, Paris."),
    (PARIS, "None other than Paris."),
    (PARIS, "Nicht Berlin, sondern Paris."),
    (PARIS, "Paris, pas Lyon."),
    (NUMBER, "Without using a calculator, the answer is 4."),
    (NUMBER, "2 plus 2 = 4"),
    (NUMBER, "The sum of 2 and 2 = 4."),
    (NUMBER, "half of 8 = 4"),
    (NUMBER, "20% of 20 = 4"),
    ({"kind": "word", "value": ["Rome", "Roma"]}, "Roma, Italia"),
    ({"kind": "word", "value": "New York"}, "It is New  York."),
    ({"kind": "word", "value": "stra\u00dfe"}, "STRASSE"),
    ({"kind": "exact", "value": "Paris"}, " paris. "),
    ({"kind": "exact", "value": ["yes", "y"]}, "Y"),
    ({"kind": "exact", "value": 391}, "391"),
    (PRODUCT, "391"),
    (PRODUCT, "391."),
    (PRODUCT, "17 * 23 = 391"),
    (PRODUCT, "17*23=391"),
    (PRODUCT, "**391**"),
    (PRODUCT, "\\boxed{391}"),
    (PRODUCT, "$391$"),
    (PRODUCT, "The product of 17 and 23 is 391.0"),
    (PRODUCT, "\uff13\uff19\uff11"),
    (PRODUCT, "17*23 = 17*20+17*3 = 340+51 = 391"),
    (PRODUCT, "17 \u00d7 23 = **391**"),
    (PRODUCT, "17*23:\n391"),
    (PRODUCT, "The answer is 391. Do not hesitate to ask."),
    (PRODUCT, "391\u00b0"),
    *(
        (PRODUCT, text)
        for text in (
            "The answer is 391 (17*23=391)",
            "17 times 23 = 391",
            "17 multiplied by 23 = 391",
            "The product of 17 and 23 = 391",
            "17 \u2022 23 = 391",
            "17\u221723 = 391",
            "17 &times; 23 = 391",
            "f(17, 23) = 391",
            "17 \\times 23 = 391",
            "\\(17 \\cdot 23 = 391\\)",
            "$$17 \\times 23 = \\boxed{391}$$",
            "17*23 = 17*(20+3) = 340+51 = 391",
            "17(23) = 391",
            "So 17(23) = 391",
            "17*23 = (17*20)+(17*3) = 391",
            "-17*-23 = 391",
            "782/2 = 391",
            "x = 391",
            "- 17 * 23 = 391",
            "Answer - 17 * 23 = 391",
            "17*23=391\n17*23=391",
            "391 = 17*23",
            "17*23 -> 391",
            "17*23 => 391",
            "Answer \u2013 391",
            "391 without doubt",
            "391!",
            "391 (391)",
            "The answer is equal to 391",
        )
    ),
    (PARIS, "Paris, without doubt."),
    (PARIS, "It is Paris, other than Lyon."),
    (PARIS, "It is no longer Lyon; it is Paris."),
    ({"kind": "integer", "value": -5}, "\u20135"),
    ({"kind": "exact", "value": "10\u00b2"}, "10\u00b2"),
    ({"kind": "word", "value": "life or death"}, "It is life or death."),
    (NUMBER, "2 + 2 = 4."),
    (NUMBER, "2+2=4"),
    (NUMBER, "It's 4!"),
    (NUMBER, "Four."),
    (PARIS, "It's not Lyon, but Paris."),
    (PARIS, "It's Paris, not Lyon."),
    (PARIS, "It is Paris and not Lyon."),
    (PARIS, "Paris (not Lyon)"),
    (PARIS, "Paris \u2013 not Lyon."),
    (PARIS, "It is Paris rather than Lyon."),
    (PARIS, "It's not Lyon and not Nice but Paris."),
    ({"kind": "word", "value": "error"}, "It is an error."),
    ({"kind": "exact", "value": "Paris"}, "\u202aParis\u202c\u3002"),
    ({"kind": "exact", "value": "Paris"}, "\u300cParis\u300d\uff01"),
    ({"kind": "integer", "value": 1391}, "1,391"),
    ({"kind": "integer", "value": -5}, "The answer is -5"),
    ({"kind": "integer", "value": -5}, "\u22125"),
    ({"kind": "integer", "value": 17}, "17"),
    (CITY, '{"capital": "Paris"}'),
    (CITY, ' {"capital": "paris", "country": "France"} '),
    ({"kind": "json", "value": {"a": [1, 2.0]}}, '{"a": [1.0, 2]}'),
    ({"kind": "regex", "value": r"[A-Z]{3}-\d+"}, " ABC-12\n"),
    ({"kind": "regex", "value": "a.*z"}, "a\nz"),
    ({"kind": "non_empty"}, "\U0001f5fc"),
]

WRONG: list[tuple[dict[str, t.Any], str, str]] = [
    (PARIS, "", "empty"),
    (PARIS, " \n\u200b\u00a0", "empty"),
    (PARIS, "Lyon", "not in the answer"),
    (PARIS, "Parisian cafes", "not in the answer"),
    (PARIS, "A comparison", "not in the answer"),
    (PARIS, "Paris-Nord", "not in the answer"),
    (PARIS, "The capital of France is not Paris.", "denies"),
    (PARIS, "It isn't Paris", "denies"),
    (PARIS, "It isn\u2019t Paris", "denies"),
    ({**PARIS, "reject": ["Lyon"]}, "Paris or Lyon", "'Lyon'"),
    ({"kind": "word", "value": "New York"}, "York, the new one", "not in the answer"),
    ({"kind": "exact", "value": "Paris"}, "The capital of France is Paris.", "another one"),
    (PARIS, "I'm sorry, I can't say whether Paris is the capital.", "denies"),
    (PARIS, "It is neither Lyon nor Paris", "denies"),
    (PARIS, "It was never Paris", "denies"),
    (PARIS, "It is Lyon, not Paris.", "denies"),
    (PARIS, "It is Lyon and not Paris.", "denies"),
    (PARIS, "Lyon (not Paris)", "denies"),
    (PARIS, "It is Lyon rather than Paris.", "denies"),
    (PARIS, "It is not Lyon and not Paris.", "denies"),
    (PARIS, "It isn't Paris and not Lyon.", "denies"),
    (PARIS, "It is not Lyon and Paris.", "denies"),
    (PARIS, "Is it Paris, not Lyon?", "denies"),
    (PARIS, "Is it Paris and not Lyon?", "denies"),
    (PARIS, "Paris? No.", "denies"),
    (PARIS, "Is it Paris?", "denies"),
    (PARIS, "No Paris", "denies"),
    (PARIS, "Paris. No, that is wrong.", "'wrong'"),
    (PARIS, "Error: Paris", "'error'"),
    *((NUMBER, text, "not in the answer") for text in ("2+2 = -4.5", "-4", "4,000", "3/4", "4%", "4 million", "14")),
    *((PRODUCT, text, "denies") for text in ("It is not 391", "It isn't 391", "Never 391", "Is it 391?")),
    *(
        (PRODUCT, text, "the answer says")
        for text in ("391%", "391 percent", "17/391", "391/17", "391 million", "17 391", "17'391", "17*391", "391*23")
    ),
    *(
        (PRODUCT, text, "the answer holds")
        for text in (
            "I cannot say. 391",
            "I can not tell you. 391",
            "I don\u2019t know. 391",
            "I'm unable to compute that. 391",
            "I'm not certain: 391",
            "We do not really know: 391",
            "I won't be able to help. 391",
        )
    ),
    ({"kind": "word", "value": "Paris"}, "I cannot say. Paris", "the answer holds 'i cannot say'"),
    *((PRODUCT, text, "the answer says") for text in ("391^2", "~391", "17-391", "17*23 = 381 = 391")),
    *(
        (PRODUCT, text, "the answer says")
        for text in (
            "17*22=391",
            "1*1=391",
            "17*23=390+2=391",
            "39\u00b9",
            "3\u2079\u00b9",
            "\u00b391",
            "39\u2460",
            "39\u2081",
            "17*23 \u2260 391",
            "17*23 != 391",
            "17*23 >= 391",
            "<391",
            ">391",
            "17*23 = - 391",
            "less than 391",
            "about 391",
            "minus 391",
            "negative 391",
            "half of 391",
            "twice 391",
            "the square root of 391",
            "391 plus one",
            "391 and a half",
            "391 or 17",
            *(f"{dash}391" for dash in "\u2010\u2013\u2014"),
        )
    ),
    *(
        (PRODUCT, text, "the answer computes")
        for text in (
            "17+23=391",
            "The answer is 17 + 23 = 391.",
            "17+23 =\n391",
            "**17+23** = **391**",
            "17-23 = 391",
            "17*17 = 391",
            "17 \\times 17 = 391",
            "17*23 = 17*17 = 391",
            "(17+23) = 391",
            "23/17 = 391",
            "17/(17-17) = 391",
            "17*(23 = 391",
        )
    ),
    (PRODUCT, "391 = 391\n" * 200, "more than 100 equations"),
    *((PRODUCT, text, "denies") for text in ("anything but 391", "hardly 391", "\u4e0d\u662f391", "nicht 391")),
    *((PRODUCT, text, "holds") for text in ("391 is false", "391 is mistaken")),
    *(
        (PARIS, text, "denies")
        for text in (
            "anything but Paris",
            "hardly Paris",
            "without Paris",
            "except for Paris",
            "it is no longer Paris",
            "It is London, formerly Paris",
            "\u4e0d\u662f Paris",
        )
    ),
    (PARIS, "Paris is false", "'false'"),
    *((PARIS, text, "leaves it open") for text in ("Paris or London", "London, or Paris", "London or maybe Paris")),
    (NUMBER, "1+1=4", "the answer computes"),
    (NUMBER, "less than 4", "not in the answer"),
    ({"kind": "exact", "value": "102"}, "10\u00b2", "another one"),
    (PRODUCT, "Sorry, 391", "'sorry'"),
    (PRODUCT, "3910", "says 3910"),
    (PRODUCT, "1391", "says 1391"),
    (PRODUCT, "391391", "says 391391"),
    (PRODUCT, "17*23 = 381.", "says 381"),
    (PRODUCT, "391 or 392", "says 392"),
    (PRODUCT, "17*20=340 and 17*3=51, so 391", "says 20, 340, 3, 51"),
    (PRODUCT, "391.5", "says 391.5"),
    (PRODUCT, "-391", "says -391"),
    (PRODUCT, "0391x", "no number"),
    (PRODUCT, "x391", "no number"),
    (PRODUCT, "3.9.1", "no number"),
    (PRODUCT, "39 1", "says 39"),
    (PRODUCT, "three hundred ninety-one", "no number"),
    (PRODUCT, "17*23", "no number"),
    ({"kind": "integer", "value": 4}, "4*4=16", "says 16"),
    (CITY, "The capital is Paris", "not JSON"),
    (CITY, '```json\n{"capital": "Paris"}\n```', "not JSON"),
    (CITY, '{"capital": "Lyon"}', "capital is 'Lyon'"),
    (CITY, '{"city": "Paris"}', "no key 'capital'"),
    (CITY, '["Paris"]', "no JSON object"),
    ({"kind": "json", "value": {"ok": True}}, '{"ok": 1}', "ok is 1"),
    ({"kind": "json", "value": {"n": 1}}, '{"n": "1"}', "n is '1'"),
    ({"kind": "json", "value": {"a": [1, 2]}}, '{"a": [1]}', "no list of 2"),
    ({"kind": "json", "value": {"a": [1, 2]}}, '{"a": [1, 3]}', r"a\[1\] is 3"),
    ({"kind": "regex", "value": r"\d"}, "12", "does not match"),
    ({"kind": "non_empty"}, "...", "empty"),
]


@pytest.mark.parametrize(("expectation", "text"), RIGHT, ids=[text.strip()[:30] for _expectation, text in RIGHT])
def test_right_answers(expectation: dict[str, t.Any], text: str) -> None:
    verdict = judge(expectation, text, QUESTION if expectation is PRODUCT else "")
    assert verdict.ok, verdict
    assert verdict.reason == ""


@pytest.mark.parametrize(("expectation", "text", "reason"), WRONG, ids=[text.strip()[:30] for _e, text, _r in WRONG])
def test_wrong_answers(expectation: dict[str, t.Any], text: str, reason: str) -> None:
    verdict = judge(expectation, text, QUESTION if expectation is PRODUCT else "2+2")
    assert not verdict.ok
    assert re.search(reason, verdict.reason), verdict
    assert str(expectation.get("value", "")) in verdict.wanted


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([{"name": "weather", "arguments": '{"city": "Paris", "unit": "celsius"}'}], ""),
        ([], "0 tool calls"),
        ([{"name": "weather", "arguments": "{}"}] * 2, "2 tool calls"),
        ([{"name": "time", "arguments": '{"city": "Paris"}'}], "of 'time'"),
        ([{"name": "weather", "arguments": '{"city": "London"}'}], "city is 'London'"),
        ([{"name": "weather", "arguments": '{"city": "Pa'}], "not JSON"),
        ([{"name": "weather", "arguments": ""}], "not JSON"),
    ],
)
def test_tool_calls(calls: list[dict[str, str]], reason: str) -> None:
    verdict = judge(CALL, "", tool_calls=calls)
    assert verdict.ok == (reason == "")
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("expectation", "problem"),
    [
        ({"kind": "word", "value": "x"}, None),
        ({"kind": "non_empty"}, None),
        ({}, "kind is None"),
        ({"kind": "words", "value": "x"}, "known are"),
        ({"kind": "word"}, "needs a value"),
        ({"kind": "word", "value": ""}, "needs a value"),
        ({"kind": "integer", "value": "39l"}, "needs an integer"),
        ({"kind": "integer", "value": 3.5}, "needs an integer"),
        ({"kind": "json", "value": "{}"}, "needs a mapping"),
        ({"kind": "tool_call", "value": {}}, "needs value.name"),
        ({"kind": "regex", "value": "("}, "no regular expression"),
        ({"kind": "regex", "value": ["a"]}, "needs text"),
        ({"kind": "word", "value": {"a": 1}}, "needs text"),
        ({"kind": "word", "value": ["x", ""]}, "needs text"),
        ({"kind": "word", "value": []}, "needs a value"),
        ({"kind": "word", "value": "x", "values": "y"}, "values is unknown"),
        ({"kind": "word", "value": "x", "reject": [None]}, "wanted words"),
        ({"kind": "tool_call", "value": {"name": "x", "arguments": "{}"}}, "wanted a mapping"),
    ],
)
def test_unusable_expectations_are_named(expectation: dict[str, t.Any], problem: str | None) -> None:
    found = check_expectation(expectation)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


LOOPS = [
    "4*4=16 " * 12,
    "The answer is Paris. " + "I hope this helps. " * 6,
    "no " * 12,
    "Paris." + "!" * 40,
    "\u6771\u4eac" * 20,
    "Right. " + "<pad>" * 10,
    "\n".join(["- item one two three"] * 5),
]
LONG_UNIT = "\u6211\u4e0d\u77e5\u9053\u8fd9\u4e2a\u95ee\u9898\u7684\u7b54\u6848\u662f\u4ec0\u4e48\u3002"
LOOPS += [LONG_UNIT * 6, "-" * 50, "0.1 " * 20]
NO_LOOPS = [
    "-" * 39,
    "0." + "3" * 30,
    "1" + ",000" * 8,
    "| a | b |\n" + "|---" * 20 + "|\n| c | d |",
    "| " * 20,
    "0 0 0 0 0 0 0 0 0 0 0 0",
    "",
    "The capital of France is Paris.",
    "Well, well, well. It is what it is.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16",
    "row one | a | b | c\nrow two | a | b | c\nrow three | a | b | c",
    "=" * 20,
    "Buffalo buffalo Buffalo buffalo buffalo buffalo Buffalo buffalo",
    "The cat sat. The dog sat. The bird sat. The fish swam. The man stood.",
]


@pytest.mark.parametrize("text", LOOPS)
def test_loops_are_found(text: str) -> None:
    unit = find_loop(text)
    assert unit
    assert "".join(unit.split()) in "".join(text.split())


@pytest.mark.parametrize("text", NO_LOOPS)
def test_ordinary_text_is_no_loop(text: str) -> None:
    assert find_loop(text) is None


def test_a_numbered_loop_is_found() -> None:
    assert find_loop("\n".join(f"{number}. I do not know." for number in range(1, 9))) == "I do not know."


def test_a_loop_in_a_long_answer_is_found_fast() -> None:
    text = " ".join(str(number * 7919 % 10007) for number in range(8000)) + " the same words" * 10
    start = time.monotonic()
    assert find_loop(text)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("I know it.</think>Paris", "</think>"),
        ("<think>Paris", "<think>"),
        ("Paris<|im_end|>", "<|im_end|>"),
        ("<\uff5cbegin\u2581of\u2581sentence\uff5c>Paris", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"),
        ("[INST] Paris", "[INST]"),
        ("<tool_call>{}</tool_call>", "<tool_call>"),
        ("Paris\x00", "\x00"),
        ("Paris\ufffd", "\ufffd"),
        ("\x1b[2JParis", "\x1b"),
        ("a\tb\r\nc", None),
        ("a < b and b > c | d", None),
        ("<p>Paris</p>", None),
        ("I think it is Paris", None),
    ],
)
def test_control_tokens_are_found(text: str, marker: str | None) -> None:
    assert find_marker(text) == marker


@pytest.mark.parametrize(
    ("text", "empty"), [("", True), ("\u200b\ufeff \n", True), ("...", True), ("0", False), ("+", False)]
)
def test_empty(text: str, empty: bool) -> None:
    assert is_empty(text) is empty


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1, 2, 3, 4", ""),
        ("1\n2\n3\n4.", ""),
        ("1, 2, 3", "after 3 numbers in order the answer says nothing"),
        ("1, 2, 3, 4, 5", "after 4 numbers in order the answer says 5"),
        ("1, 2, 4, 3", "after 2 numbers in order the answer says 4"),
        ("1. 1\n2. 2", "after 1 numbers in order the answer says 1"),
        ("one", "after 0 numbers in order the answer says nothing"),
    ],
)
def test_a_sequence(text: str, reason: str) -> None:
    assert judge({"kind": "sequence", "value": [1, 4]}, text).reason == reason


@pytest.mark.parametrize("value", [[1], [4, 1], [1, 2, 3], "1", [True, 4], ["1", "4"], 7])
def test_a_sequence_needs_its_ends(value: object) -> None:
    assert "kind sequence needs the first and the last number" in str(
        check_expectation({"kind": "sequence", "value": value})
    )


@pytest.mark.parametrize("text", ["Paris.\nUser: and Italy?", "Human: hello", "x\n### Response: y", "\nAssistant: z"])
def test_a_turn_of_somebody_else_is_a_marker(text: str) -> None:
    assert find_marker(text)


def test_who_is_spoken_of_is_no_marker() -> None:
    assert find_marker("The User: a person. An assistant: helps. Human rights.") is None


@pytest.mark.parametrize("piece", ["1+", "1", "(", "-", "1 = ", "=", "x", "391 ", "1*(", "\u00b9", "\\"])
def test_a_long_computation_takes_no_time(piece: str) -> None:
    start = time.process_time()
    judge(PRODUCT, piece * (200_000 // len(piece)) + "=391", QUESTION)
    judge(PRODUCT, "391\n" + piece * 50 + "=391", QUESTION)
    assert time.process_time() - start < 5.0
