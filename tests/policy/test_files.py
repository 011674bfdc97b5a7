# SPDX-License-Identifier: GPL-3.0-or-later
"""What no tracked file may hold."""

from __future__ import annotations

import re

import pytest
from repository import ROOT, tracked

# This file names what it looks for.
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(errors="replace")
    for path in tracked()
    if path.name != "test_files.py" and path.suffix not in (".png", ".gz")
}
FORBIDDEN = {
    "a package registry": (
        r"https?://[a-z0-9.-]*(pypi\.org|pythonhosted\.org|debian\.org|ubuntu\.com|npmjs\.org|pytorch\.org|docker\.io|ghcr\.io|nvcr\.io"
        r"|pypi\.nvidia\.com|quay\.io)"
    ),
    "a path of one person's machine": r"(?<![\w.$}/-])/(work|home|Users|tmp/venvs)/\w+",
    "a version that moves": r"(:latest\b|==\s*latest|\b(version|state|tag):\s*[\"']?latest)",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a token": (
        r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{20,})\b"
    ),
    "marks of a merge": r"^(<{7}|>{7}) ",
    # Ansible's set filters give another order in every run: a change that is none, a message that differs.
    "a set without an order": r"\| *(difference|union|intersect|symmetric_difference)\((?!.*\| (sort|length)\b)",
}
SECRET = re.compile(
    r"(?i)\b\w*(password|api_key|apikey|secret|token)[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9+/_-]{16,})[\"']?\s*$"
)


def lines_with(pattern: str, texts: dict[str, str]) -> list[str]:
    """Return file:line: text for every line that has the pattern."""
    found = re.compile(pattern, re.M)
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        if found.search(text)
        for number, line in enumerate(text.splitlines(), start=1)
        if found.search(line)
    ]


def test_there_are_files():
    assert "playbooks/site.yml" in TEXTS


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    assert lines_with(FORBIDDEN[what], TEXTS) == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry", "index: https://" + "pypi" + ".org/simple"),
        ("a set without an order", "names: '{{ wanted | difference(there) | list }}'"),
        ("a package registry", "url = 'https://download.pytorch.org/whl/cpu'"),
        ("a path of one person's machine", "path: /home/ada/models"),
        ("a version that moves", "image: prom/prometheus:latest"),
        ("a version that moves", "state: latest"),
        ("a private key", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("a token", "key: hf_" + 34 * "a"),
        ("marks of a merge", "<<<<<<< HEAD"),
    ],
)
def test_the_search_finds(what, line):
    assert lines_with(FORBIDDEN[what], {"x": line}) == [f"x:1: {line}"]


def test_no_secret_is_spelt_out():
    # A test's own keys open nothing.
    texts = {name: text for name, text in TEXTS.items() if not name.startswith(("tests/", "kernels/tests/"))}
    spelt = [
        f"{name}: {line.strip()}"
        for name, text in texts.items()
        for line in text.splitlines()
        if (match := SECRET.search(line)) and re.search(r"\d", match[2])
    ]
    assert spelt == []
    assert SECRET.search("vault_sglang_serve_api_key: 9f86d081884c7d659a2f")
