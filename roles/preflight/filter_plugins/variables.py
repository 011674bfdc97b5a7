# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that find misspelt variables.

Ansible ignores a variable that nobody reads; an operator who misspells one wants to know.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml


def owning_role(name: str, roles: list[str]) -> str:
    """Return the role whose prefix the variable has, or "" when there is none; the longest prefix wins."""
    return max((role for role in roles if name.startswith(role + "_")), key=len, default="")


def close_names(name: str, role: str, every: list[str]) -> list[str]:
    """Return up to three known names that look like `name`; what follows the role's prefix decides."""
    rest = {known.removeprefix(role + "_"): known for known in every if known.startswith(role + "_")}
    found = difflib.get_close_matches(name.removeprefix(role + "_"), rest, n=3, cutoff=0.6) if role else []
    return [rest[word] for word in found] or difflib.get_close_matches(name, every, n=3, cutoff=0.7)


def unknown_variables(names: list[str], known: dict[str, list[str]], families: list[str]) -> list[str]:
    """Return one sentence for each variable that no role knows.

    names: variables that are set. known: role -> names of its variables. families: prefixes that belong to this project
    even where no role owns them ("sglang_" makes `sglang_prot` an error).
    """
    every = sorted(name for of_role in known.values() for name in of_role)
    sentences = []
    for name in sorted(set(names)):
        role = owning_role(name, list(known))
        if name in every or not (role or name.startswith(tuple(families))):
            continue
        close = close_names(name, role, every)
        accepted = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known.get(role) or every)}"
        sentences.append(f"{name} is not a variable of {'role ' + role if role else 'any role'}; {accepted}")
    return sentences


def role_variables(directory: str) -> dict[str, list[str]]:
    """Return, for each role in `directory`, the names of the variables that its argument_specs.yml declares."""
    files = Path(directory).glob("*/meta/argument_specs.yml")
    specs = {file.parent.parent.name: yaml.safe_load(file.read_text()) for file in files}
    return {role: sorted(spec["argument_specs"]["main"]["options"]) for role, spec in specs.items()}


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {"role_variables": role_variables, "unknown_variables": unknown_variables}
