# SPDX-License-Identifier: GPL-3.0-or-later
"""What doctor.yml has found, in the order in which to act: one cause, what follows from it, and what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

READY = "ready"
# The id of a line at error level that no row of the log classifier knows.
UNKNOWN = "unknown"
Finding = Mapping[str, str]
Result = Mapping[str, Any]


def bad_rows(result: Result) -> list[str]:
    """Return the ids of what failed or could not be judged; of a result without a report, nothing."""
    report = result.get("report") or {}
    return [*report.get("failed", []), *report.get("skipped", [])]


def is_bad(result: Result) -> bool:
    """Whether a comparison or a run of questions went wrong, or came to nothing."""
    return not result.get("skipped") and not (result.get("report") or {}).get("ok")


def host_line(finding: Finding) -> str:
    """Return an error of the host as the other causes are told."""
    seen = f"{finding['id']}: {finding['seen']}; wanted: {finding['wanted']}"
    return f"{seen}\nnext command: {finding['fix']}"


def first_cause(
    host: Sequence[Finding], broken: Sequence[Result], behind: str, others: Sequence[Result], unproven: str
) -> str:
    """Return the cause that is to be removed first, "" when nothing is wrong.

    A server that fails may do so because of its host; one that somebody stopped does not.
    """
    errors = [host_line(finding) for finding in host if finding["severity"] == "error"]
    servers = [result.get("msg") or f"{result['item']['unit']}: {result.get('detail', '')}" for result in broken]
    stopped = any((result.get("cause") or {}).get("id") == "unit_stopped" for result in broken[:1])
    found = [*servers, *errors] if stopped else [*errors, *servers]
    found += [behind] if behind else []
    found += [str(result.get("msg", "")) for result in others]
    found += [unproven] if unproven else []
    return found[0] if found else ""


def diagnosis(
    servers: Sequence[Result],
    host: Sequence[Finding],
    drifts: Sequence[Result],
    answers: Result,
    behind: str = "",
    router: str = "sglang-router.service",
    unproven: str = "",
) -> dict[str, Any]:
    """Return what to show of the results of the modules.

    servers: of sglang_ready, each with its server as item; drifts: of sglang_drift, each with (server, intent) as item;
    answers: of sglang_smoke; host: findings of host_preflight; behind: why another release serves than the wanted one;
    unproven: that the one which serves was never proven.

    The result has `cause` (text, "" when nothing is wrong), `follow` (ids of what follows from it) and the names of
    the servers whose unreadiness (`servers`) or drift (`drifts`) is told by that, and whether the `answers` are.
    """
    broken = [result for result in servers if result.get("status", "failed") != READY]
    engines = [result for result in broken if result["item"]["unit"] != router]
    units = [result["item"]["unit"] for result in engines]
    told = [result for result in drifts if is_bad(result) and (result["item"][0]["unit"] in units or behind)]
    follow = [result["item"]["unit"] for result in broken if engines and result not in engines]
    several = len(drifts) > 1
    follow += [f"{result['item'][0]['name']} {id}" if several else id for result in told for id in bad_rows(result)]
    answers_follow = bool(engines) and is_bad(answers)
    follow += bad_rows(answers) if answers_follow else []
    others = [result for result in [*drifts, answers] if is_bad(result) and result not in told]
    cause = first_cause(host, engines or broken, behind, others, unproven)
    return {
        "cause": cause,
        "follow": follow,
        "servers": [
            result["item"]["unit"]
            for result in broken
            if result.get("msg") == cause or (engines and result not in engines)
        ],
        "drifts": [result["item"][0]["name"] for result in told],
        "answers": answers_follow,
    }


def journal_words(servers: Sequence[Result]) -> list[str]:
    """Return what the journals of servers that answer have to say, once each: known lines by their cause.

    servers: results of sglang_ready. An unknown error is told with its line, from which secrets were taken already.
    """
    words = []
    for finding in (finding for result in servers for finding in result.get("warnings_seen") or []):
        unknown = finding["id"] == UNKNOWN
        words.append(f"{finding['cause']}: {finding['line']}" if unknown else str(finding["cause"]))
    return list(dict.fromkeys(words))


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {"diagnosis": diagnosis, "journal_words": journal_words}
