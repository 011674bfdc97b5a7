# SPDX-License-Identifier: GPL-3.0-or-later
"""A filter that reads the checks of a model before anything is touched, as the module sglang_smoke reads them later."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Ansible has these files at hand for modules only.
sys.path.append(str(Path(__file__).resolve().parents[3] / "module_utils"))


def suite_fault(checks: Mapping[str, Any], profile: str) -> str:
    """Return why a run of a profile can't begin with some checks."""
    # Ansible loads every filter anew for every task: this import at the top is a third of a converge's time.
    from ops.smoke import SuiteError, suite_of

    try:
        return suite_of(checks).problem(profile)
    except SuiteError as error:
        return str(error)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {"suite_fault": suite_fault}
