# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare what a model said with what it should have said: as an answer, not as a search for a string.

`391` must not be found in 3910 or 1391, `Paris` not in `comparison`, and an answer that repeats itself for ever is
wrong even if it begins right.
"""

from __future__ import annotations

import json
import re
import typing as t
import unicodedata
from dataclasses import dataclass
from decimal import Decimal

KINDS = ("non_empty", "exact", "word", "integer", "json", "regex", "tool_call")

_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_NUMBER = re.compile(r"(?<![\w.,])(?:(?<![^\s(\[=:*$\\{])-)?\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)", re.ASCII)
_NEGATIONS = ("not", "no", "never", "isn't", "wasn't", "isnt", "cannot")
# What a template, a reasoning parser or a tool parser should have taken out of the content.
_MARKERS = re.compile(
    r"</?think(?:ing)?>|<\|[a-z_]+\|>|<\uff5c[^\uff5c>]{1,40}\uff5c>|\|DSML\||\uff5cDSML\uff5c|\[/?INST\]|</?tool_calls?>"
)


@dataclass(frozen=True)
class Verdict:
    """ok, what was seen, what was wanted; reason names the fault in words when not ok."""

    ok: bool
    seen: str
    wanted: str
    reason: str = ""


def normalise(text: str) -> str:
    """NFKC, no invisible characters, plain minus and quotes, single spaces, no case."""
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    text = text.replace("\u2212", "-").replace("\u2019", "'").replace("\u2018", "'")
    return " ".join(text.split()).casefold()


def bare(text: str) -> str:
    """normalise, without the quotes, emphasis and final punctuation that surround a short answer."""
    return normalise(text).strip(" \"'`*_.!,;:()[]\u201c\u201d")


def words(text: str) -> list[str]:
    return _WORD.findall(normalise(text))


def numbers(text: str) -> list[Decimal]:
    """The numbers of a text as written: 1,391 is 1391, 391.0 is 391, x391 and 3.9.1 are none."""
    return [Decimal(match.replace(",", "")) for match in _NUMBER.findall(normalise(text))]


def is_empty(text: str) -> bool:
    """Nothing a reader could see: no letter, digit or symbol once spaces and invisible characters are gone."""
    return not any(unicodedata.category(char)[0] in "LNS" for char in _INVISIBLE.sub("", text))


def find_loop(text: str) -> str | None:
    """The unit that a text repeats, or None.

    Two views: words (a phrase of 1 to 40 words) and characters (a unit of 1 to 12, for text without spaces). A unit
    counts as a loop when it stands at least 4 times in a row and covers at least 12 words, or 24 characters.
    """
    tokens = text.split()
    found = _repeated(tokens, max_unit=40, min_repeats=4, min_length=12)
    if found:
        return " ".join(found)
    squeezed = "".join(tokens)
    unit = _repeated(squeezed, max_unit=12, min_repeats=4, min_length=24)
    return "".join(unit) if unit else None


def _repeated(items: t.Sequence[str], max_unit: int, min_repeats: int, min_length: int) -> t.Sequence[str] | None:
    """The shortest unit that stands often enough in a row anywhere in the items."""
    for unit in range(1, min(max_unit, len(items) // min_repeats) + 1):
        needed = max(min_repeats * unit, min_length)
        run = unit
        for index in range(unit, len(items)):
            run = run + 1 if items[index] == items[index - unit] else unit
            if run >= needed:
                return items[index + 1 - unit : index + 1]
    return None


def find_marker(text: str) -> str | None:
    """A control token of a chat template, reasoning or tool parser that leaked into the content, or None."""
    match = _MARKERS.search(text)
    return match.group(0) if match else None


def check_expectation(expectation: t.Mapping[str, t.Any]) -> str | None:
    """Why an expectation is not usable, or None. Known kinds are in KINDS."""
    kind = expectation.get("kind")
    if kind not in KINDS:
        return f"kind is {kind!r}, known are {', '.join(KINDS)}"
    if kind != "non_empty" and expectation.get("value") in (None, ""):
        return f"kind {kind} needs a value"
    if kind == "integer" and not re.fullmatch(r"-?\d+", str(expectation["value"])):
        return f"value is {expectation['value']!r}, kind integer needs an integer"
    if kind in ("json", "tool_call") and not isinstance(expectation["value"], dict):
        return f"value is {expectation['value']!r}, kind {kind} needs a mapping"
    if kind == "tool_call" and "name" not in expectation["value"]:
        return "kind tool_call needs value.name, and value.arguments to compare the arguments"
    if kind == "regex":
        try:
            re.compile(str(expectation["value"]))
        except re.error as error:
            return f"value {expectation['value']!r} is no regular expression: {error}"
    return None


def judge(
    expectation: t.Mapping[str, t.Any],
    text: str,
    question: str = "",
    tool_calls: t.Sequence[t.Mapping[str, t.Any]] = (),
) -> Verdict:
    """Compare an answer with an expectation.

    kind exact      the whole answer is the value, but for case, quotes and a final full stop
    kind word       the value stands in the answer as a word (or words), and not behind a negation
    kind integer    every number in the answer that is not in the question is the value, and it is there
    kind json       the answer is JSON and holds the value (a mapping: at least these keys with these values)
    kind regex      the value matches the whole answer
    kind tool_call  exactly one call, of value.name, whose arguments are JSON and hold value.arguments
    kind non_empty  anything a reader can see

    A list as value of exact or word means: any of these. `reject` lists words that make an answer wrong.
    """
    kind = expectation["kind"]
    value = expectation.get("value")
    wanted = kind if kind == "non_empty" else f"{kind} {value}"
    if kind == "tool_call":
        return _judge_tool_call(value or {}, tool_calls, wanted)
    if is_empty(text):
        return Verdict(False, text, wanted, "the answer is empty")
    reason = {
        "non_empty": lambda: "",
        "exact": lambda: _exact(text, value),
        "word": lambda: _word(text, value),
        "integer": lambda: _integer(text, value, question),
        "json": lambda: _json(text, value),
        "regex": lambda: "" if re.fullmatch(str(value), text.strip(), re.DOTALL) else "the pattern does not match",
    }[kind]()
    if not reason:
        rejected = [word for word in _list(expectation.get("reject")) if _holds_words(words(text), words(str(word)))]
        reason = f"the answer holds {rejected[0]!r}, which makes it wrong" if rejected else ""
    return Verdict(not reason, text, wanted, reason)


def _list(value: t.Any) -> list[t.Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _exact(text: str, value: t.Any) -> str:
    return "" if bare(text) in [bare(str(option)) for option in _list(value)] else "the answer is another one"


def _word(text: str, value: t.Any) -> str:
    said = words(text)
    positions = [(start, option) for option in _list(value) for start in _positions(said, words(str(option)))]
    if not positions:
        return "the word is not in the answer"
    if all(start > 0 and said[start - 1] in _NEGATIONS for start, option in positions):
        return "the answer denies the word"
    return ""


def _positions(said: t.Sequence[str], wanted: t.Sequence[str]) -> list[int]:
    width = len(wanted)
    return [start for start in range(len(said) - width + 1) if width and said[start : start + width] == list(wanted)]


def _holds_words(said: t.Sequence[str], wanted: t.Sequence[str]) -> bool:
    return bool(_positions(said, wanted))


def _integer(text: str, value: t.Any, question: str) -> str:
    wanted = Decimal(str(value))
    operands = set(numbers(question)) - {wanted}
    said = [number for number in numbers(text) if number not in operands]
    if not said:
        return "the answer holds no number of its own"
    wrong = [str(number) for number in said if number != wanted]
    return f"the answer says {', '.join(wrong[:5])}" if wrong else ""


def _json(text: str, value: t.Any) -> str:
    try:
        seen = json.loads(text)
    except ValueError:
        return "the answer is not JSON"
    return _difference(seen, value, "answer")


def _difference(seen: t.Any, wanted: t.Any, where: str) -> str:
    """Why seen does not hold wanted, or an empty string. Mappings may hold more, strings compare without case."""
    if isinstance(wanted, dict):
        if not isinstance(seen, dict):
            return f"{where} is no JSON object"
        for key, value in wanted.items():
            if key not in seen:
                return f"{where} has no key {key!r}"
            reason = _difference(seen[key], value, f"{where}.{key}")
            if reason:
                return reason
        return ""
    if isinstance(wanted, list):
        if not isinstance(seen, list) or len(seen) != len(wanted):
            return f"{where} is no list of {len(wanted)}"
        reasons = [_difference(one, other, f"{where}[{i}]") for i, (one, other) in enumerate(zip(seen, wanted))]
        return next(filter(None, reasons), "")
    if isinstance(wanted, str) and isinstance(seen, str):
        return "" if bare(seen) == bare(wanted) else f"{where} is {seen!r}, wanted {wanted!r}"
    if type(seen) is not type(wanted) and not _both_numbers(seen, wanted):
        return f"{where} is {seen!r}, wanted {wanted!r}"
    return "" if seen == wanted else f"{where} is {seen!r}, wanted {wanted!r}"


def _both_numbers(one: t.Any, other: t.Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))


def _judge_tool_call(value: t.Mapping[str, t.Any], calls: t.Sequence[t.Mapping[str, t.Any]], wanted: str) -> Verdict:
    seen = json.dumps([dict(call) for call in calls])
    if len(calls) != 1:
        return Verdict(False, seen, wanted, f"{len(calls)} tool calls, wanted exactly one")
    call = calls[0]
    if call.get("name") != value["name"]:
        return Verdict(False, seen, wanted, f"the call is of {call.get('name')!r}")
    try:
        arguments = json.loads(call.get("arguments") or "")
    except ValueError:
        return Verdict(False, seen, wanted, "the arguments are not JSON")
    reason = _difference(arguments, value.get("arguments") or {}, "arguments")
    return Verdict(not reason, seen, wanted, reason)
