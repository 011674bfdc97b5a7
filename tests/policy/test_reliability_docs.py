# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/reliability.md has exactly the faults that the tests make, and names tests that exist for the others."""

from __future__ import annotations

import re
import sys

from repository import ROOT, tracked

sys.path.append(str(ROOT / "tests" / "integration"))
from faults import declared

TEXT = (ROOT / "docs/reliability.md").read_text()
TABLE, _, REST = TEXT.partition("<!-- faults: end -->")
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| ?(.*?) ?\|$", re.MULTILINE)


def rows(text: str) -> list[tuple[str, str, str, str]]:
    """Return the rows of tables of four columns, without their heads."""
    return [row for row in ROW.findall(text) if row[0] != "fault" and not row[0].startswith("---")]


def test_the_table_has_the_faults_of_the_tests():
    assert [(name, expected) for name, expected, _seen, _took in rows(TABLE)] == list(declared().items())


def test_the_tests_of_the_other_faults_exist():
    tests = {path.name: path.read_text() for path in tracked("tests/*test_*.py", "tests/**/test_*.py")}
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", REST)
    assert named
    assert [name for file, name in named if f"def {name}(" not in tests[file]] == []
