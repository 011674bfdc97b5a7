# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that put what preflight found into lines for a person."""

from __future__ import annotations

import json


def finding_line(finding: dict[str, str], word: str = "") -> str:
    """Return a finding as one line; word replaces its severity."""
    return f"{word or finding['severity']} {{id}}: {{seen}}; wanted: {{wanted}}. Next: {{fix}}".format(**finding)


def unchecked_line(unchecked: dict[str, str]) -> str:
    """Return what was not looked at as one line."""
    return "not looked at: {id}, because {reason}".format(**unchecked)


def islands_lines(facts: dict) -> list[str]:
    """Return the proposed islands as the line that the inventory takes; nothing without GPUs."""
    islands = facts.get("islands") or []
    return [f"for the inventory: sglang_serve_islands: {json.dumps(islands)}"] if islands else []


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {"finding_line": finding_line, "unchecked_line": unchecked_line, "islands_lines": islands_lines}
