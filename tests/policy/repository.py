# SPDX-License-Identifier: GPL-3.0-or-later
"""The repository as the policy tests see it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def load(path: Path) -> Any:
    """Return the content of a YAML file, None when there is no such file."""
    return yaml.safe_load(path.read_text()) if path.is_file() else None


def tasks_in(content: Any) -> Iterator[dict]:
    """Yield every task of a list of tasks, those inside of blocks as well."""
    for task in content or []:
        yield task
        for part in ("block", "rescue", "always"):
            yield from tasks_in(task.get(part))


@dataclass(frozen=True)
class Role:
    """One directory in roles/."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def specs(self) -> dict[str, dict]:
        """Entry point -> its argument spec."""
        return (load(self.path / "meta/argument_specs.yml") or {}).get("argument_specs", {})

    @cached_property
    def options(self) -> dict[str, dict]:
        """Variable -> its spec, of the main entry point."""
        return self.specs.get("main", {}).get("options", {})

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return load(self.path / "defaults/main.yml") or {}

    @cached_property
    def variables(self) -> dict[str, Any]:
        return load(self.path / "vars/main.yml") or {}

    @cached_property
    def tasks(self) -> dict[str, list[dict]]:
        """File name -> every task in it."""
        return {file.name: list(tasks_in(load(file))) for file in sorted(self.path.glob("tasks/*.yml"))}

    @cached_property
    def registered(self) -> set[str]:
        """Variables that tasks set."""
        names: set[str] = set()
        for task in (task for tasks in self.tasks.values() for task in tasks):
            names |= {task["register"]} if "register" in task else set()
            names |= set(task.get("ansible.builtin.set_fact", {})) - {"cacheable"}
        return names


ROLES = [Role(path) for path in sorted((ROOT / "roles").iterdir()) if path.is_dir()]


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks, of all or of these patterns."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def each(items: list, name=lambda item: item.name) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("item", items, ids=name)
