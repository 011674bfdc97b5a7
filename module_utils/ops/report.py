# SPDX-License-Identifier: GPL-3.0-or-later
"""The report of a run of checks: one row a check, the same ids in the same order every time.

A row is ok, failed, or skipped. Skipped means that it could not be judged, and says why; it is never counted as passed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import tempfile
import time
import typing as t
from dataclasses import dataclass, field

from .redact import printable

REPORT_SCHEMA = 2
# What a server said stands in these fields of a row only; ids, questions and commands are ours.
_SAID = ("seen", "cause", "tries", "evidence")


@dataclass(frozen=True)
class Row:
    """One line of the report, with the evidence for it.

    tries are the single askings, each with its answers and faults; evidence is whatever else was measured. unanswered
    means that the last request got no answer at all.
    """

    id: str
    ok: bool
    wanted: str
    seen: str
    elapsed_s: float
    ttft_s: float | None = None
    cause: str = ""
    next_command: str = ""
    passed: int = 0
    tried: int = 0
    tries: tuple[t.Any, ...] = ()
    unanswered: bool = False
    skipped: bool = False
    evidence: dict[str, t.Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return not self.ok and not self.skipped

    def as_dict(self) -> dict[str, t.Any]:
        return {
            "id": self.id,
            "ok": self.ok,
            "skipped": self.skipped,
            "wanted": self.wanted,
            "seen": self.seen,
            "elapsed_s": round(self.elapsed_s, 3),
            "ttft_s": rounded(self.ttft_s),
            "cause": self.cause,
            "next_command": self.next_command,
            "passed": self.passed,
            "tried": self.tried,
            "tries": [one.as_dict() for one in self.tries],
            "evidence": self.evidence,
        }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def skipped_row(
    id: str,
    wanted: str,
    why: str,
    next_command: str = "",
    elapsed_s: float = 0.0,
    evidence: dict[str, t.Any] | None = None,
) -> Row:
    """The row of a check that could not be judged."""
    shown = evidence or {}
    seen = "not judged"
    return Row(id, False, wanted, seen, elapsed_s, cause=why, next_command=next_command, skipped=True, evidence=shown)


def judged_before(reports: t.Sequence[t.Mapping[str, t.Any]]) -> list[Row]:
    """The rows of reports that were made before, such as those of drift, to stand in one of today.

    One row an id: of several servers' rows the worst counts (failed, then not judged), and its evidence names the unit.
    Raises ValueError for what is no report.
    """
    worst: dict[str, Row] = {}
    for report in reports:
        try:
            rows = [_row_of(row, report.get("unit")) for row in report["checks"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"before holds {str(report)[:80]!r}, wanted a report with checks ({said})") from None
        for row in rows:
            if row.id not in worst or _badness(row) > _badness(worst[row.id]):
                worst[row.id] = row
    return list(worst.values())


def _row_of(given: t.Mapping[str, t.Any], unit: str | None) -> Row:
    return Row(
        str(given["id"]),
        given["ok"] is True,
        str(given["wanted"]),
        str(given["seen"]),
        float(given["elapsed_s"]),
        cause=str(given["cause"]),
        next_command=str(given["next_command"]),
        passed=int(given["passed"]),
        tried=int(given["tried"]),
        skipped=given["skipped"] is True,
        evidence={**given["evidence"], **({"unit": unit} if unit else {})},
    )


def _badness(row: Row) -> int:
    return 2 if row.failed else int(row.skipped)


def plain(value: t.Any, redacted: t.Callable[[str], str] = str) -> t.Any:
    """The value as any reader of JSON and any terminal takes it; redacted takes secrets out of a text.

    Characters that are none to read are escaped but for tabs and line ends, numbers that are not finite become text.
    """
    if isinstance(value, str):
        return printable(redacted(value), keep="\t\n")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {plain(str(name), redacted): plain(one, redacted) for name, one in value.items()}
    return [plain(one, redacted) for one in value] if isinstance(value, (list, tuple)) else value


def build_report(rows: t.Sequence[Row], started: float, elapsed_s: float, **head: t.Any) -> dict[str, t.Any]:
    """The report as plain data. started is seconds since the epoch; head are further fields, such as base_url.

    failed_tries counts every try that went wrong, also those that a pass rate tolerated.
    """
    failed = [row.id for row in rows if row.failed]
    asked = [row for row in rows if row.tries]
    return {
        "schema": REPORT_SCHEMA,
        **head,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "elapsed_s": round(elapsed_s, 3),
        "ok": not failed,
        "passed": sum(row.ok for row in rows),
        "failed": failed,
        "skipped": [row.id for row in rows if row.skipped],
        "tries": sum(row.tried for row in asked),
        "failed_tries": sum(row.tried - row.passed for row in asked),
        "checks": [row.as_dict() for row in rows],
    }


def without_key(report: dict[str, t.Any], redacted: t.Callable[[str], str]) -> dict[str, t.Any]:
    """The report as plain data, and what a server said in it without the API key."""
    shown = plain(report)
    for row in shown["checks"]:
        row.update({name: plain(row[name], redacted) for name in _SAID})
    return shown


def summary_text(report: t.Mapping[str, t.Any]) -> str:
    """One line."""
    text = f"{report['passed']} of {len(report['checks'])} checks passed in {report['elapsed_s']:.1f} s"
    if report["skipped"]:
        text += f", not judged: {_ids(report['skipped'])}"
    tolerated = report["failed_tries"] if report["ok"] else 0
    return f"{text}; {tolerated} failed tries were within their pass rate" if tolerated else text


def _ids(ids: t.Sequence[str]) -> str:
    """Ids for one line; the report has them all."""
    return ", ".join(ids) if len(ids) <= 6 else f"{', '.join(ids[:3])} and {len(ids) - 3} more"


def failure_text(report: t.Mapping[str, t.Any]) -> str:
    """The failed rows for an operator: what was wanted, what was seen, likely cause, next command."""
    where = report.get("base_url") or report.get("unit")
    lines = [f"{len(report['failed'])} of {len(report['checks'])} checks failed at {where}"]
    bad = [row for row in report["checks"] if not row["ok"]]
    unjudged: dict[str, list[str]] = {}
    for row in bad:
        if row["skipped"]:
            unjudged.setdefault(row["cause"], []).append(row["id"])
        else:
            lines.append(f"{row['id']}: wanted {row['wanted']!r}, seen {row['seen']!r}; {row['cause']}")
    lines += [f"{_ids(ids)}: not judged: {cause}" for cause, ids in unjudged.items()]
    commands = dict.fromkeys(row["next_command"] for row in bad if row["next_command"])
    lines += [f"next command: {command}" for command in commands]
    return "\n".join(lines)


def write_problem(path: str) -> str:
    """Why a file can't be written there, or an empty string. Nothing is left behind."""
    try:
        if os.path.isdir(path):
            return f"cannot write {path}: it is a directory"
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)
        handle, temporary = tempfile.mkstemp(prefix=".report-", dir=os.path.dirname(path) or ".")
        os.close(handle)
        os.unlink(temporary)
    except (OSError, ValueError) as error:  # a NUL is a ValueError
        return f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
    return ""


def unwritten(path: str, error: OSError) -> dict[str, str]:
    """What a module fails with when its report can't be written: msg, which ends with the next command, and that."""
    command = f"df -h {shlex.quote(os.path.dirname(path) or '.')}"
    said = f"cannot write the report to {path}: {error.strerror}"
    return {"msg": f"{said}\nnext command: {command}", "next_command": command}


def write_text(path: str, text: str, mode: int = 0o644) -> None:
    """Write a file whole or not at all."""
    directory = os.path.dirname(path) or "."
    handle, temporary = tempfile.mkstemp(prefix=".report-", dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_report(path: str, report: t.Mapping[str, t.Any], mode: int = 0o644) -> None:
    """Write the report as JSON, whole or not at all."""
    write_text(path, json.dumps(plain(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n", mode)


def exposition(prefix: str, report: t.Mapping[str, t.Any], started: float) -> str:
    """The report in Prometheus' text format, for node_exporter's textfile collector. started: seconds since the epoch.

    A check that was not judged has no sample: it is absent, neither 0 nor 1.
    """
    values: list[tuple[str, str, list[tuple[str, float]]]] = [
        ("ok", "1 when no check failed", [("", float(report["ok"]))]),
        (
            "check_ok",
            "1 when the check passed, 0 when it failed; absent when it could not be judged",
            [(f'{{check="{row["id"]}"}}', float(row["ok"])) for row in report["checks"] if not row["skipped"]],
        ),
        ("tries", "Questions asked in the last run", [("", float(report["tries"]))]),
        (
            "failed_tries",
            "Questions answered wrong in the last run, tolerated or not",
            [("", float(report["failed_tries"]))],
        ),
        ("skipped_checks", "Checks of the last run that could not be judged", [("", float(len(report["skipped"])))]),
        ("duration_seconds", "Length of the last run", [("", float(report["elapsed_s"]))]),
        ("timestamp_seconds", "Start of the last run, in seconds since the epoch", [("", started)]),
    ]
    lines = []
    for name, text, samples in values:
        lines += [f"# HELP {prefix}_{name} {text}.", f"# TYPE {prefix}_{name} gauge"]
        lines += [f"{prefix}_{name}{labels} {value:.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"
