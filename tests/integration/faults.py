# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults that tests make for real, and what they write down of each for docs/reliability.md.

    @fault("disk full under the journal", "the engine answers, and new lines are kept as soon as there is room")
    def test_...(serving, seen): ...; seen("...", seconds)

One line of JSON for each fault that was survived goes to .cache/faults.jsonl; tests/bench/reliability makes the table.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "bench"))
from performance import commit  # noqa: E402

FAULTS_FILE = HERE.parents[1] / ".cache" / "faults.jsonl"
SOAK_FILE = HERE.parents[1] / ".cache" / "soak.json"


def fault(name: str, expected: str) -> pytest.MarkDecorator:
    """Mark a test with the fault that it makes, and with what is expected of the host."""
    return pytest.mark.fault(name, expected)


def declared() -> dict[str, str]:
    """Return fault -> what is expected, of all tests of this directory in their order."""
    found = {}
    for file in sorted(HERE.glob("test_*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: node.lineno):
            if isinstance(call.func, ast.Name) and call.func.id == "fault":
                name, expected = (ast.literal_eval(argument) for argument in call.args)
                found[name] = expected
    return found


class Seen:
    """What became of the fault of one test."""

    def __init__(self, name: str, expected: str) -> None:
        self.name, self.expected = name, expected

    def __call__(self, words: str, seconds: float | None = None) -> None:
        """Note it: in words, and the seconds from the fault until everything was as before (None: never otherwise)."""
        FAULTS_FILE.parent.mkdir(exist_ok=True)
        line = {"fault": self.name, "expected": self.expected, "seen": words, "seconds": seconds, "commit": commit()}
        with FAULTS_FILE.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
