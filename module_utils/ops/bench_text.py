# SPDX-License-Identifier: GPL-3.0-or-later
"""Prompts for a load: English prose of any length, each one new to the server.

The prose is the language reference inside Python's standard library (pydoc_data), so that an air-gapped host has it.
Natural text matters: made-up token numbers send a mixture of experts other ways, and repetition flatters speculation.
"""

from __future__ import annotations

import hashlib
import json
import os
import typing as t
from itertools import cycle, islice

from .bench import BenchError, Level

# Characters of English that surely have a token (a token is about four of them); the load generator cuts what is over.
CHARACTERS_A_TOKEN = 8
# Far enough apart that two prompts of a run share no page of text at the same place, and odd, so that starts differ.
STRIDE = 7919


def prose() -> str:
    """The text that prompts are cut from. Raises BenchError where this Python has none."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise BenchError("this Python has no pydoc_data.topics; install the full standard library") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def prompt(text: str, number: int, run_id: str, characters: int) -> str:
    """The prompt of a number. It begins with what no other prompt begins with, so the prefix cache can't know it."""
    start = number * STRIDE % len(text)
    mark = hashlib.sha256(f"{run_id} {number}".encode()).hexdigest()[:16]
    return f"{mark}\n" + "".join(islice(cycle(text), start, start + characters))


def conversations(level: Level, run_id: str) -> list[dict[str, t.Any]]:
    """The prompts of a level in the form of ShareGPT, which the load generator reads."""
    text = prose()
    characters = level.prompt_tokens * CHARACTERS_A_TOKEN
    turns = (
        [
            {"from": "human", "value": prompt(text, number, f"{run_id} {level.id}", characters)},
            {"from": "gpt", "value": "-"},
        ]
        for number in range(level.requests)
    )
    return [{"conversations": turn} for turn in turns]


def write_prompts(path: str, level: Level, run_id: str) -> None:
    """Write the prompts of a level where the load generator finds them, readable for it."""
    with open(path, "w", encoding="utf-8") as handle:
        json.dump(conversations(level, run_id), handle)
    os.chmod(path, 0o644)
