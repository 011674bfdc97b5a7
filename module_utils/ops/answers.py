# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare what a model said with what it should have said: as an answer, not as a search for a string.

`391` must not be found in 3910 or 1391, `Paris` not in `comparison`, and an answer that repeats itself for ever is
wrong even if it begins right.
"""

from __future__ import annotations

import json
import operator
import re
import typing as t
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from .http import parse_json

KINDS = ("non_empty", "exact", "word", "integer", "sequence", "json", "regex", "tool_call")

# Among them the marks of writing direction.
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\u061c\ufe0e\ufe0f\ufeff\u00ad]")
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_NUMBER = re.compile(r"(?<![\w.,])(?:(?<![^\s(\[=:*$\\{])-)?\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)", re.ASCII)
# Digits above or below the line or in a circle beside a digit; NFKC makes one number of both.
_SMALL = "[\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u2080-\u2089\u2460-\u249b\u24ea-\u24ff\u2776-\u2793]"
_BESIDE = re.compile(rf"(?<=\d)(?={_SMALL})|(?<={_SMALL})(?=\d)")
# A dash where a number's minus stands.
_DASH_MINUS = re.compile(r"(?<![^\s(\[=:*$\\{])[\u2010\u2012-\u2015](?=\d)")
# Words that turn a clause round, and words that take a whole answer back.
_NEGATIONS = ("not", "never", "neither", "nor", "cannot", "isnt", "wasnt", "hardly", "scarcely", "barely")
_NEGATIONS += ("nicht", "kein", "keine", "niet", "pas")
_NOT_CJK = re.compile("\u4e0d|\u5e76\u975e|\u7edd\u975e|\u7d55\u975e|\u6ca1|\u6c92|\u306a\u3044|\uc544\ub2c8")
_DOUBTS = ("wrong", "incorrect", "error", "sorry", "unsure", "false", "mistaken", "untrue", "unlikely", "doubtful")
# A refusal with an answer beside it, such as "I cannot say. 391": who says so has not answered.
_REFUSAL = re.compile(
    r"\b(?:i|we)(?:'m| am|'re| are)? (?:unable to|(?:can ?not|\w+n't|(?:(?:do|did|could|will) )?not)"
    r"(?: be| really| actually| even| fully)* (?:able to|sure|certain|know|say|tell|answer|help|assist|compute"
    r"|calculate|determine|provide|give|solve|remember|recall))\b"
)
_MAYBE = ("maybe", "perhaps", "possibly", "even")
_CLAUSE = re.compile(r"[^.;:!?\n]*(?:[.:](?=\d)[^.;:!?\n]*)*[.;:!?\n]?")
_BUT = re.compile(r"\b(?:but|sondern|mais)\b|(?:,|\(|\s[\u2013\u2014-]|\band)(?= ?(?:not|nicht|pas)\b)")
_RATHER = re.compile(
    r"\b(?:rather than|(?<!none )(?<!no )other than|instead of|as opposed to|far from|(?:any|every)thing but|all but"
    r"|no longer|formerly|without(?! (?:(?:a|any) )?(?:doubt|question|using))|except(?: for)?)\b"
)
# What stands in front of the rest of a computation that is partly told in words.
_ARITHMETIC_WORD = re.compile(r"\b(?:times|plus|minus|by|over|of|and)$")
# What makes another number of one, in front of it and behind it.
_BEFORE_NUMBER = re.compile(
    r"(?:[~\u2248\u00b1<\u2260\u2264\u2265]|(?<![-=])>|[<>!/]=|=[ ]*-[ ]"
    r"|\d[ ]*[*/+^x\u00d7\u00b7\u2044-]|\d(?:[ ]+|')|[/\u2044^]"
    r"|\b(?:minus|negative|plus|times|than|below|under|above|over|about|around|roughly|approximately|approx\.?|ca\.?"
    r"|circa|nearly|almost|at (?:least|most)|up to|half|(?:half|third|quarter) of|twice|double|triple|root of|sqrt|log"
    r"|or))"
    r"[ ]*$"
)
_AFTER_NUMBER = re.compile(
    r"[ ]*(?:%|\u2030|per ?cent|[*/+^x\u00d7\u00b7\u2044-][ ]*\d|\d|[ej]\d"
    r"|(?:hundred|thousand|million|billion|trillion|dozen)s?\b"
    r"|,?[ ]?or\b|(?:plus|minus|times|squared|cubed|factorial|point)\b|and (?:a|one)\b)"
)
# A computation without a word, such as 17*20+17*3 = 340+51.
_COMPUTATION = re.compile(r"[\d\s()*/+x\u00d7\u00b7\u2044.,\\{}$=-]+")
# The same, to be computed: its parts, and what stands at the end and at the beginning of a text.
_PART = re.compile(r"\s*(\d+(?:,\d{3})*(?:\.\d+)?|[-+*/()])", re.ASCII)
_TIMES = re.compile(r"[x\u00d7\u00b7\u22c5]|\\(?:times|cdot)\b")
_MARKUP = re.compile(r"\*\*|\\[()\[\]]|[$\\{}`_]")
_OPERAND = r"[(]*-?\d+(?:,\d{3})*(?:\.\d+)?(?![\d%])[)]*"
_TERM = rf"{_OPERAND}(?: ?[-+*/] ?{_OPERAND})*"
_LEFT_TERM = re.compile(rf"(?<![\w.,*/+^()-])(?<![*/+^)] )(?<!\d - ){_TERM}\s*$", re.ASCII)
_RIGHT_TERM = re.compile(rf"[\s*]*({_TERM})", re.ASCII)
_MAX_TERM = 200
_MAX_EQUATIONS = 100
# A column rule or an empty line of a Markdown table.
_TABLE_RULE = re.compile(r"[ \t]*\|[|:\- \t]{0,200}")
_LIST_NUMBER = re.compile(r"\(?\d{1,4}[.):]")
# So long a rule of dashes, or run of digits, is a loop; words need less.
_MIN_RULE = 40
# What a template, a reasoning parser or a tool parser should have taken out of the content.
_MARKERS = re.compile(
    # Among them the characters that stand for broken ones, and those that steer a terminal.
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]"
    # A turn of somebody else, which a model writes that does not see its own end.
    r"|(?:^|\n)(?:User|Human|Assistant|### (?:Instruction|Response|Human|Assistant|User)):"
    r"|</?think(?:ing)?>|<\|[a-z_]+\|>|<\uff5c[^\uff5c>]{1,40}\uff5c>|\|DSML\||\uff5cDSML\uff5c|\[/?INST\]|</?tool_calls?>"
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
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", _BESIDE.sub("^", _INVISIBLE.sub("", text))))
    text = text.replace("\u2212", "-").replace("\u2019", "'").replace("\u2018", "'")
    text = _DASH_MINUS.sub("-", text)
    return " ".join(text.split()).casefold()


def bare(text: str) -> str:
    """normalise, without the quotes, emphasis and final punctuation that surround a short answer."""
    return normalise(text).strip(
        " \"'`*_.!,;:()[]\u201c\u201d\u201e\u00ab\u00bb\u3001\u3002\u300a\u300b\u300c\u300d\u300e\u300f\u3010\u3011"
    )


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

    Three views: words (a phrase of 1 to 40 words), words without the numbers of a list, and characters (a unit of 1 to
    200, for text without spaces). A unit counts as a loop when it stands at least 4 times in a row and covers at least
    12 words, or 24 characters; one without a letter, such as a rule of dashes, at least 40 characters.
    """
    tokens = "\n".join(line for line in text.splitlines() if not _TABLE_RULE.fullmatch(line)).split()
    plain = [token for token in tokens if not _LIST_NUMBER.fullmatch(token)]
    for view in (tokens, plain):
        found = _repeated(view, max_unit=40, min_repeats=4, min_length=12)
        if found:
            return " ".join(found)
    found = _repeated("".join(tokens), max_unit=200, min_repeats=4, min_length=24)
    return "".join(found) if found else None


def _repeated(items: t.Sequence[str], max_unit: int, min_repeats: int, min_length: int) -> t.Sequence[str] | None:
    """The shortest unit that stands often enough in a row anywhere in the items."""
    for unit in range(1, min(max_unit, len(items) // min_repeats) + 1):
        # One byte an item: whether it is the same as the one a unit before.
        same = bytes(map(operator.eq, items[unit:], items))
        wanted = b"\1" * (max(min_repeats * unit, min_length) - unit)
        start = same.find(wanted)
        while start >= 0:
            end = same.find(b"\0", start)
            run = items[start : (len(same) if end < 0 else end) + unit]
            if any(map(str.isalpha, "".join(run[:unit]))) or sum(map(len, run)) >= _MIN_RULE:
                return run[:unit]
            start = same.find(wanted, end) if end >= 0 else -1
    return None


def find_marker(text: str) -> str | None:
    """A control token of a chat template, reasoning or tool parser that leaked into the content, or None."""
    match = _MARKERS.search(text)
    return match.group(0) if match else None


def check_expectation(expectation: t.Mapping[str, t.Any]) -> str | None:
    """Why an expectation is not usable, or None. Known kinds are in KINDS."""
    kind, value = expectation.get("kind"), expectation.get("value")
    if kind not in KINDS:
        return f"kind is {kind!r}, known are {', '.join(KINDS)}"
    unknown = sorted(set(expectation) - {"kind", "value", "reject"})
    if unknown:
        return f"{', '.join(unknown)} is unknown, known are kind, value, reject"
    if kind != "non_empty" and (value is None or value in ("", [])):
        return f"kind {kind} needs a value"
    if not all(map(_is_word, _list(expectation.get("reject")))):
        return f"reject is {expectation['reject']!r}, wanted words"
    if kind in ("exact", "word") and not all(map(_is_word, _list(value))):
        return f"value is {value!r}, kind {kind} needs text, or a list of texts"
    if kind == "regex" and not isinstance(value, str):
        return f"value is {value!r}, kind regex needs text"
    if kind == "integer" and not re.fullmatch(r"-?\d+", str(expectation["value"])):
        return f"value is {expectation['value']!r}, kind integer needs an integer"
    if kind == "sequence" and not _is_sequence(value):
        return f"value is {value!r}, kind sequence needs the first and the last number"
    if kind in ("json", "tool_call") and not isinstance(expectation["value"], dict):
        return f"value is {expectation['value']!r}, kind {kind} needs a mapping"
    if kind == "tool_call" and not isinstance(value.get("name"), str):
        return "kind tool_call needs value.name, and value.arguments to compare the arguments"
    if kind == "tool_call" and not isinstance(value.get("arguments", {}), dict):
        return f"value.arguments is {value['arguments']!r}, wanted a mapping"
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
    kind word       the value stands in the answer as a word (or words), in a clause that neither denies nor asks it,
                    and no "or" beside it; a number as a word is not part of another one, such as 4 in 4.5, -4, 4,000
                    or 3/4
    kind integer    every number in the answer that is not in the question is the value, and it is there, or the answer
                    is a computation that ends in it; no equation of the answer is wrong
    kind sequence   the numbers in the answer are those from the first to the last of the value, each once and in order
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
        "integer": lambda: _integer(text, value, question, _list(expectation.get("reject"))),
        "sequence": lambda: _sequence(text, value),
        "json": lambda: _json(text, value),
        "regex": lambda: "" if re.fullmatch(str(value), text.strip(), re.DOTALL) else "the pattern does not match",
    }[kind]()
    if not reason:
        rejected = [word for word in _list(expectation.get("reject")) if _holds_words(words(text), words(str(word)))]
        reason = f"the answer holds {rejected[0]!r}, which makes it wrong" if rejected else ""
    if not reason and kind == "word" and _leaves_open(text, value):
        reason = "the answer leaves it open"
    return Verdict(not reason, text, wanted, reason)


def _list(value: t.Any) -> list[t.Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_word(value: t.Any) -> bool:
    """Whether a value is text, or a number that can be written as text."""
    return (isinstance(value, (str, int)) and not isinstance(value, bool) and value != "") or isinstance(value, float)


def _lines(text: str) -> str:
    """normalise, with the ends of the lines kept."""
    return "\n".join(map(normalise, text.splitlines()))


def _clauses(text: str) -> list[str]:
    """The clauses of a normalised text; "not A, but B" are two, and so are "B and not A" and "B rather than A".

    What divides a question makes two questions of it.
    """
    parts: list[str] = []
    for clause in _CLAUSE.findall(_RATHER.sub(", not", text)):
        end = "?" if clause.rstrip().endswith("?") else ""
        parts += [part + end for part in _BUT.split(clause) if part.strip()]
    return parts


def _denied(clause: str) -> bool:
    said = words(clause)
    return (
        clause.rstrip().endswith("?")
        or bool(_NOT_CJK.search(clause))
        or any(word in _NEGATIONS or word.endswith("n't") for word in said)
    )


def _doubt(text: str) -> str:
    """The word or words that take an answer back, or an empty string."""
    refusal = _REFUSAL.search(normalise(text))
    return refusal[0] if refusal else next((word for word in words(text) if word in _DOUBTS), "")


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether a number is no part of another one: no fraction, per cent, power or million."""
    return not _BEFORE_NUMBER.search(text[max(0, start - 20) : start]) and not _AFTER_NUMBER.match(text, end)


def _exact(text: str, value: t.Any) -> str:
    return "" if bare(text) in [bare(str(option)) for option in _list(value)] else "the answer is another one"


def _word(text: str, value: t.Any) -> str:
    clauses = _clauses(_lines(text))
    holding = [clause for clause in clauses if any(_says(clause, str(option)) for option in _list(value))]
    if not holding:
        return "the word is not in the answer"
    if all(_denied(clause) or _no(clause, value) for clause in holding):
        return "the answer denies the word"
    doubt = _doubt(text)
    if doubt and doubt not in words(" ".join(map(str, _list(value)))):
        return f"the answer holds {doubt!r}"
    return _miscomputed(_lines(text)) if any(_is_number(option) for option in _list(value)) else ""


def _leaves_open(text: str, value: t.Any) -> bool:
    """Whether the answer names the word or something else: "or" stands beside it."""
    said = words(text)
    for wanted in (words(str(option)) for option in _list(value)):
        for start in _positions(said, wanted):
            end = start + len(wanted)
            before = [word for word in said[max(0, start - 2) : start] if word not in _MAYBE][-1:]
            if before == ["or"] or said[end : end + 1] == ["or"]:
                return True
    return False


def _says(clause: str, option: str) -> bool:
    """Whether a clause holds the word; a number must stand alone."""
    if not re.fullmatch(r"\d+", option.strip()):
        return _holds_words(words(clause), words(option))
    wanted = Decimal(option.strip())
    return any(
        _value(match) == wanted and _stands_alone(clause, *match.span()) and not clause[: match.start()].endswith("-")
        for match in _NUMBER.finditer(clause)
    )


def _no(clause: str, value: t.Any) -> bool:
    said = words(clause)
    starts = [start for option in _list(value) for start in _positions(said, words(str(option)))]
    return bool(starts) and all(start > 0 and said[start - 1] == "no" for start in starts)


def _value(match: re.Match[str]) -> Decimal:
    return Decimal(match[0].replace(",", ""))


def _positions(said: t.Sequence[str], wanted: t.Sequence[str]) -> list[int]:
    width = len(wanted)
    return [start for start in range(len(said) - width + 1) if width and said[start : start + width] == list(wanted)]


def _holds_words(said: t.Sequence[str], wanted: t.Sequence[str]) -> bool:
    return bool(_positions(said, wanted))


def _integer(text: str, value: t.Any, question: str, reject: t.Sequence[t.Any] = ()) -> str:
    wanted = Decimal(str(value))
    lines = _lines(text)
    if _computes(lines, wanted):
        return ""
    operands = set(numbers(question)) - {wanted} - {Decimal(str(number)) for number in reject if _is_number(number)}
    said = [number for number in numbers(text) if number not in operands]
    if not said:
        return "the answer holds no number of its own"
    wrong = [str(number)[:40] for number in said if number != wanted]
    if wrong:
        return f"the answer says {', '.join(wrong[:5])}"
    places = [match.span() for match in _NUMBER.finditer(lines) if _value(match) == wanted]
    parts = [lines[max(0, start - 12) : end + 12] for start, end in places if not _stands_alone(lines, start, end)]
    if parts:
        return f"the answer says {parts[0]!r}"
    if any(_denied(clause) for clause in _clauses(lines) if wanted in numbers(clause)):
        return "the answer denies the number"
    doubt = _doubt(text)
    return f"the answer holds {doubt!r}" if doubt else _miscomputed(lines)


def _is_number(value: t.Any) -> bool:
    return bool(re.fullmatch(r"-?\d+", str(value), re.ASCII))


def _computes(text: str, wanted: Decimal) -> bool:
    """Whether the answer is one computation that ends in the value, and every step of it is that value."""
    text = text.strip(" .*$\n")
    steps = text.split("=")
    if len(steps) < 2 or not _COMPUTATION.fullmatch(text) or numbers(steps[-1]) != [wanted]:
        return False
    # Such as the x of "x = 391".
    steps = [step for step in steps if re.search(r"\d", step)]
    return bool(re.fullmatch(r"\W*-?[\d.,]+\W*", steps[-1])) and all(_worth(step) == wanted for step in steps)


def _miscomputed(text: str) -> str:
    """The first equation of a normalised text that does not hold, as a reason, or an empty string."""
    text = _MARKUP.sub(" ", _TIMES.sub("*", text))
    text = re.sub(r"[ ]+", " ", text)
    sides = text.split("=")
    if len(sides) > _MAX_EQUATIONS:
        return f"the answer holds more than {_MAX_EQUATIONS} equations"
    for one, other in zip(sides, sides[1:]):
        left, right = _LEFT_TERM.search(one[-_MAX_TERM:]), _RIGHT_TERM.match(other[:_MAX_TERM])
        if left and right and _whole(left) and _worth(left[0]) != _worth(right[1]):
            return f"the answer computes {f'{left[0].strip()} = {right[1]}'[:80]!r}"
    return ""


def _whole(term: re.Match[str]) -> bool:
    """Whether a term is all of an equation's left side: no words or unknown signs in front of it compute with it."""
    before = term.string[: term.start()].rstrip(" ")
    if re.search(r"[*/+]|\d[ ]*[-(]", term[0]):
        return not _ARITHMETIC_WORD.search(before)
    return not before or before[-1] in "\n.:!?"


def _worth(step: str) -> Fraction | None:
    """What a sum of products is, or None for anything else."""
    step = _MARKUP.sub(" ", _TIMES.sub("*", step)).strip(" .,*\n")
    # A bracket around more than this step.
    step = step.removeprefix("(") if step.count("(") > step.count(")") else step
    step = step.removesuffix(")") if step.count(")") > step.count("(") else step
    parts = _PART.findall(step)
    if len(step) > _MAX_TERM or "".join(parts) != "".join(step.split()):
        return None
    parts.reverse()
    try:
        value = _sum(parts)
    except (IndexError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return None if parts else value


def _sum(parts: list[str]) -> Fraction:
    """Takes what it computes from the end of the parts, and so do the others."""
    value = _product(parts)
    while parts and parts[-1] in "+-":
        value += _product(parts) if parts.pop() == "+" else -_product(parts)
    return value


def _product(parts: list[str]) -> Fraction:
    value = _factor(parts)
    while parts and parts[-1] in "*/(":
        if parts[-1] == "/":
            parts.pop()
            value /= _factor(parts)
            continue
        if parts[-1] == "*":
            parts.pop()
        value *= _factor(parts)
    return value


def _factor(parts: list[str]) -> Fraction:
    part = parts.pop()
    if part == "-":
        return -_factor(parts)
    if part != "(":
        return Fraction(part.replace(",", ""))
    value = _sum(parts)
    if parts.pop() != ")":
        raise ValueError
    return value


def _is_sequence(value: t.Any) -> bool:
    whole = [isinstance(one, int) and not isinstance(one, bool) for one in _list(value)]
    return whole == [True, True] and value[0] < value[1]


def _sequence(text: str, value: t.Sequence[int]) -> str:
    said, wanted = numbers(text), list(range(value[0], value[1] + 1))
    at = next((at for at, pair in enumerate(zip(said, wanted)) if pair[0] != pair[1]), min(len(said), len(wanted)))
    if at == len(said) == len(wanted):
        return ""
    return f"after {at} numbers in order the answer says {str(said[at])[:40] if at < len(said) else 'nothing'}"


def _json(text: str, value: t.Any) -> str:
    try:
        seen = parse_json(text)
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
        arguments = parse_json(call.get("arguments") or "")
    except ValueError:
        return Verdict(False, seen, wanted, "the arguments are not JSON")
    reason = _difference(arguments, value.get("arguments") or {}, "arguments")
    return Verdict(not reason, seen, wanted, reason)
