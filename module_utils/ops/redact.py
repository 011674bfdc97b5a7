# SPDX-License-Identifier: GPL-3.0-or-later
"""What may be shown of a text that somebody else wrote: no secret, no colour, no character that moves a cursor."""

from __future__ import annotations

import json
import re
import unicodedata

# A shorter key may be a word of an ordinary answer.
LEAST_KEY = 16
HIDDEN = "(hidden: it may hold a secret)"
# So many characters of a key's beginning, such as "sk-", may stand in any text.
LEAST_START = 4
_MASK = "***"
# A longer text is cut before it is looked at.
_LONGEST = 2000

# Names of variables and fields whose values are never shown. A number behind "token" is a count.
_SECRET_NAME = re.compile(
    r"key|token(?!iz)|secret|passw|passphrase|(?:^|_)pass(?:$|_)|pwd|credential|auth|bearer|headers?(?:$|_)|_urls?$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?|true|false|none|null", re.IGNORECASE)

# The same in running text: words that are followed by a secret in any case, and words that are by "=" or ":".
_SECRET_WORD = re.compile(
    r"(?:api[-_ ]?keys?|authorization|bearer|auth[-_ ]token|server_args(?==)|ServerArgs(?=\()|\bsk-(?=\w)"
    r"|\bhf_(?=[a-z0-9]{16})"
    r"|(?:(?P<token>token(?!iz))|secret|passw|passphrase|pass(?![a-z])|pwd|credential|auth(?!ent)|headers?"
    r"|_urls?|[-_]keys?)[\w-]{0,64}(?=[\"']?\s{0,4}[=:]))",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"(?P<lead>[\"']?\s{0,4}[=:]\s{0,4})"
    r"(?:(?P<number>-?\d+(?:\.\d+)?|None|null|True|False)(?![^\s,;)}\]])"
    r"|(?P<text>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'))"
)
# Up to the last "@": a password may hold one.
_USER_INFO = re.compile(r"://\S*@")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")


def is_secret(name: str, value: object = None) -> bool:
    """Whether a variable or field of this name, with this value, may hold a secret."""
    found = _SECRET_NAME.search(name)
    if not found:
        return False
    counts = found[0].lower() == "token" and _NUMBER.fullmatch(str(value))
    return not counts or bool(_SECRET_NAME.search(name, found.end()))


def without_colours(text: str) -> str:
    """The text without the escape sequences of a terminal."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def masked(text: str) -> str:
    """The text with the values of secrets masked; what follows a secret without clear ends is hidden as a whole."""
    shown, rest = "", _USER_INFO.sub(f"://{_MASK}@", text[:_LONGEST])
    while True:
        name = _SECRET_WORD.search(rest)
        if not name:
            return shown + rest
        shown += rest[: name.end()]
        value = _VALUE.match(rest, name.end())
        if not value:
            after = rest[name.end() :]
            return f"{shown} {HIDDEN}" if re.search(r"\w", after) else shown + after
        counts = value["number"] and (name["token"] or not value["number"].lstrip("-")[0].isdigit())
        shown += value["lead"] + (value["number"] if counts else _MASK)
        rest = rest[value.end() :]


def without_key(text: str, key: str) -> str:
    """A text without a key, as it is and as it stands in JSON, where each character may be written as \\u and a number.

    One of less than LEAST_KEY characters is taken out where it is a word of its own, and left inside other words, which
    it can't be told from.
    """
    escaped = json.dumps(key)[1:-1]
    forms = [*map(re.escape, dict.fromkeys((key, escaped)))]
    if "\\" in text:
        forms.append("".join(map(_in_json, key)))
    for form in forms:
        pattern = form if len(key) >= LEAST_KEY else rf"(?<!\w){form}(?!\w)"
        text = re.sub(pattern, lambda _found: _MASK, text)
    return text


def without_key_start(text: str, key: str) -> str:
    """A text that may be cut, without the beginning of a key at its end. Less than LEAST_START characters stay."""
    tail = text[-6 * len(key) :] if key else ""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), _CUT_ESCAPE.sub("", tail))
    for length in range(len(key) - 1, LEAST_START - 1, -1):
        if plain.endswith(key[:length]):
            return text[: len(text) - len(tail)] + plain[:-length] + _MASK
    return text


def _in_json(character: str) -> str:
    """A pattern for every way in which JSON, or JSON in JSON, may write a character."""
    plain = re.escape(character) if character.isalnum() else rf"\\{{0,4}}{re.escape(character)}"
    return rf"(?:{plain}|\\{{1,4}}u(?i:{ord(character):04x}))"


def printable(text: str, longest: int | None = None, keep: str = "") -> str:
    """A text, bounded, with every character escaped that is none to read; keep are further ones that stay, such as a
    line's end. Spaces of other scripts stay too.
    """
    cut = text[:longest]
    if not cut.isprintable():
        cut = "".join(
            one if one.isprintable() or one in keep or unicodedata.category(one) == "Zs" else _escaped(one)
            for one in cut
        )[:longest]
    return cut


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
