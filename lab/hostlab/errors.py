# SPDX-License-Identifier: GPL-3.0-or-later
"""The one exception that reaches the user."""

from __future__ import annotations


class LabError(Exception):
    """What was wrong, the value seen, the value wanted and the next command; only the first is required."""

    def __init__(self, problem: str, *, seen: object = None, wanted: str = "", next: str = "") -> None:
        super().__init__(problem)
        self.problem, self.seen, self.wanted, self.next = problem, seen, wanted, next

    def as_dict(self) -> dict[str, str]:
        seen = "" if self.seen is None else str(self.seen)
        return {"problem": self.problem, "seen": seen, "wanted": self.wanted, "next": self.next}

    def __str__(self) -> str:
        details = {key: value for key, value in self.as_dict().items() if key != "problem" and value}
        return "\n".join([self.problem, *(f"  {key + ':':<7} {value}" for key, value in details.items())])
