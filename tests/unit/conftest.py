# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes module_utils/ops importable as `ops` (as on a host) and as `ansible.module_utils.ops` (as in a module)."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
import typing as t
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for path in (ROOT / "module_utils", ROOT / "tests" / "fakes"):
    sys.path.insert(0, str(path))

import ansible.module_utils  # noqa: E402
from ansible.module_utils.testing import patch_module_args  # noqa: E402

ansible.module_utils.__path__.append(str(ROOT / "module_utils"))


@pytest.fixture
def load_module() -> t.Callable[[str], types.ModuleType]:
    """Import a module of library/ by its name."""

    def load(name: str) -> types.ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "library" / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def run_module(
    load_module: t.Callable[[str], types.ModuleType], capsys: pytest.CaptureFixture[str]
) -> t.Callable[..., dict[str, t.Any]]:
    """Run a module of library/ with arguments, as Ansible does, and return its result.

    `before` gets the imported module first, to replace what reaches the host.
    """

    def run(
        name: str,
        arguments: dict[str, t.Any],
        check: bool = False,
        before: t.Callable[[types.ModuleType], None] | None = None,
    ) -> dict[str, t.Any]:
        module = load_module(name)
        if before:
            before(module)
        capsys.readouterr()
        with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run
