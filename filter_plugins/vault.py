# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for playbooks/secrets.yml: which secrets a vault file lacks, and whether its text may be replaced by another.

They say names and lines of a file and never a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """Takes a value with a tag of Ansible's, such as !vault, for its text."""


Loader.add_multi_constructor("!", lambda loader, _tag, node: loader.construct_scalar(node))


def read(text: str) -> tuple[Mapping[Any, Any], str]:
    """Return the names and values of a vault file's text, and why it has none."""
    try:
        found = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        return {}, f"no YAML (line {mark.line + 1})" if mark else "no YAML"
    if found is None:
        return {}, ""
    return (found, "") if isinstance(found, dict) else ({}, f"a {type(found).__name__}")


def missing_secrets(text: str, names: Sequence[str]) -> list[str]:
    """Return those of some names that the text of a vault file does not have; a name without a value is one it has."""
    found = read(text)[0]
    return [name for name in dict.fromkeys(names) if name not in found]


def whole_lines(text: str) -> str:
    """Return a text to which a line can be added: one whose last line has an end."""
    return text if not text or text.endswith("\n") else text + "\n"


def vault_fault(text: str, new: str, names: Sequence[str]) -> str:
    """Return why a vault file's text must not be replaced by a new one, which adds the names that it lacks."""
    before, fault = read(text)
    if fault:
        return f"is {fault}; wanted: lines NAME: VALUE"
    after, fault = read(new)
    if not fault:
        # By their text: true is 1 for Python.
        changed = [str(name) for name, value in before.items() if repr(after.get(name)) != repr(value)]
        fault = f"another value of {', '.join(changed)}" if changed else ""
    if not fault and not {*names} <= {*after}:
        fault = "a file without what was added"
    if fault:
        return (
            f"can't be added to: with new lines at its end it would be {fault}; wanted: names in the first column, no "
            "braces around them, no line ... after them, and an end to the last line"
        )
    empty = [name for name in names if not isinstance(after[name], str) or not after[name]]
    return f"has no text for {', '.join(empty)}; wanted: a text, in quotes, or no such line" if empty else ""


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {"missing_secrets": missing_secrets, "whole_lines": whole_lines, "vault_fault": vault_fault}
