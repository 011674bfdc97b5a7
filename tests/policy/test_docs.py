# SPDX-License-Identifier: GPL-3.0-or-later
"""Links lead somewhere, and the commands that the documents name exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from repository import ROOT, tracked

DOCUMENTS = tracked("*.md")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(document: Path) -> str:
    """Return a document's text without its blocks of code."""
    return FENCE.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """Return the anchors that a document's headings get: lower case, spaces to dashes, other punctuation gone."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ (.+?) *#*$", prose(document), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document):
    broken = []
    for link in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def verbs() -> set[str]:
    """Return the targets of the Makefile that a person calls."""
    text = (ROOT / "Makefile").read_text()
    phony = {name for line in re.findall(r"^\.PHONY:(.*)$", text, re.M) for name in line.split()}
    assert phony
    return phony


def test_help_lists_every_verb():
    done = subprocess.run(["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {verb for verb in verbs() if not re.search(rf"^\W*(make )?{verb}\b", done.stdout, re.M)} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_verbs_that_a_document_names_exist(document):
    named = set(re.findall(r"(?:^|`|\$ |&& )make ([a-z][a-z-]*)", document.read_text(), re.M))
    if named:
        assert named - verbs() == set()


def test_readme_begins_with_the_two_commands():
    commands = re.findall(r"(?:^|`|\$ )make ([a-z][a-z-]*)", (ROOT / "README.md").read_text(), re.M)
    assert commands[:2] == ["site", "test"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_playbooks_that_a_document_names_exist(document):
    named = re.findall(r"ansible-playbook (?:-\S+ )*([\w./-]+\.yml)", document.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []
