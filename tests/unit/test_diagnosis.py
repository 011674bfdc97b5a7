# SPDX-License-Identifier: GPL-3.0-or-later
"""doctor.yml names one cause and folds what follows from it; what does not follow is still told."""

from __future__ import annotations

import importlib.util
import typing as t
from pathlib import Path

from ops.journal_causes import UNKNOWN, classify

FILE = Path(__file__).parents[2] / "filter_plugins" / "diagnosis.py"
spec = importlib.util.spec_from_file_location("diagnosis", FILE)
assert spec and spec.loader
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)

UNIT = "sglang-unified.service"
STOPPED = f"{UNIT} is not ready: the unit is not started\nnext command: systemctl start {UNIT}"
DISK = {"id": "host.disk", "severity": "error", "seen": "1 GiB", "wanted": "9 GiB", "fix": "free some"}
ANSWERS = {"msg": "answers failed", "report": {"ok": False, "failed": ["prompt.a", "prompt.b"], "skipped": ["kv.c"]}}
RIGHT = {"report": {"ok": True, "failed": [], "skipped": ["kv.c"]}, "summary": "all right"}
DRIFT_ROWS = {"ok": False, "failed": ["drift.unit"], "skipped": ["drift.config"]}


def server(status: str = "ready", msg: str = "", unit: str = UNIT, id: str = "") -> dict[str, t.Any]:
    cause = {"cause": {"id": id}} if id else {}
    return {
        "item": {"unit": unit, "name": unit.split("-")[1]},
        "status": status,
        **({"msg": msg} if msg else {}),
        **cause,
    }


def drift(ok: bool = False, unit: str = UNIT, name: str = "unified") -> dict[str, t.Any]:
    report = {"ok": True, "failed": [], "skipped": []} if ok else DRIFT_ROWS
    return {"item": [{"unit": unit, "name": name}, {}], "msg": f"{name} drifts", "report": report}


def test_a_stopped_unit_is_the_cause_of_all_that_follows() -> None:
    seen = plugin.diagnosis([server("failed", STOPPED, id="unit_stopped")], [DISK], [drift()], ANSWERS)
    assert seen == {
        "cause": STOPPED,
        "follow": ["drift.unit", "drift.config", "prompt.a", "prompt.b", "kv.c"],
        "servers": [UNIT],
        "drifts": ["unified"],
        "answers": True,
    }


def test_an_error_of_the_host_comes_before_an_engine_that_fails() -> None:
    seen = plugin.diagnosis([server("failed", "it hangs", id="engine_hangs")], [DISK], [drift()], ANSWERS)
    assert seen["cause"] == "host.disk: 1 GiB; wanted: 9 GiB\nnext command: free some"
    assert (seen["servers"], seen["answers"]) == ([], True), "the server's own words stand on the screen"


def test_the_router_follows_the_servers_and_the_other_replica_does_not() -> None:
    one, two = "sglang-replica-0.service", "sglang-replica-1.service"
    router = server("failed", "no server", "sglang-router.service")
    servers = [server("failed", "it hangs", one), server(unit=two), router]
    drifts = [drift(unit=one, name="replica-0"), drift(unit=two, name="replica-1")]
    seen = plugin.diagnosis(servers, [], drifts, ANSWERS)
    assert seen["cause"] == "it hangs"
    assert seen["follow"][:2] == ["sglang-router.service", "replica-0 drift.unit"]
    assert (seen["servers"], seen["drifts"]) == ([one, "sglang-router.service"], ["replica-0"])
    alone = plugin.diagnosis([server(unit=one), server(unit=two), router], [], [drift(True)], ANSWERS)
    assert (alone["cause"], alone["follow"], alone["answers"]) == ("no server", [], False)


def test_a_rollback_explains_drift_and_not_the_answers() -> None:
    seen = plugin.diagnosis([server()], [], [drift()], ANSWERS, "rolled back")
    assert (seen["cause"], seen["follow"]) == ("rolled back", ["drift.unit", "drift.config"])
    assert not seen["answers"]


def test_without_a_deeper_cause_the_first_that_failed_is_it() -> None:
    assert plugin.diagnosis([server()], [], [drift()], ANSWERS)["cause"] == "unified drifts"
    assert plugin.diagnosis([server()], [], [drift(True)], ANSWERS)["cause"] == "answers failed"
    assert plugin.diagnosis([server()], [], [drift(True)], {"skipped": True})["cause"] == ""
    unasked = plugin.diagnosis(
        [{"item": {"unit": UNIT}, "msg": "no key"}], [], [{**drift(), "report": {}}], {"msg": "x"}
    )
    assert (unasked["cause"], unasked["follow"]) == ("no key", [])


def test_an_unknown_error_is_shown_with_its_line_and_a_known_one_by_its_cause() -> None:
    lines = [
        ("[2026-11-30 09:00:00] ERROR SGLANG_API_KEY=sk-s3cr3t", 6),
        ("KeyError: 'model.layers.0'", 6),
        ("KeyError: 'model.layers.0'", 6),
        ("Triton kernel 'decode_fwd_kernel' took 1.97 s to compile after serving started.", 6),
    ]
    seen = [finding.as_dict() for finding in classify(lines)]
    unknown = "an error that is not in the table of known causes"
    words = plugin.journal_words([{**server(), "warnings_seen": seen}, server(), {**server(), "warnings_seen": seen}])
    assert words == [
        f"{unknown}: [2026-11-30 09:00:00] ERROR SGLANG_API_KEY (hidden: it may hold a secret)",
        f"{unknown}: KeyError: 'model.layers.0'",
        "a kernel was compiled while requests waited; it happens once for each cache of /var/cache/sglang",
    ]
    assert plugin.UNKNOWN == UNKNOWN


def test_a_release_that_was_never_proven_is_the_last_cause() -> None:
    assert plugin.diagnosis([server()], [], [drift(True)], RIGHT, unproven="never proven")["cause"] == "never proven"
    seen = plugin.diagnosis([server()], [], [drift()], RIGHT, unproven="never proven")
    assert seen["cause"] == "unified drifts"


def test_all_is_well() -> None:
    seen = plugin.diagnosis([server()], [{**DISK, "severity": "warning"}], [drift(True)], RIGHT)
    assert (seen["cause"], seen["follow"], seen["servers"], seen["drifts"]) == ("", [], [], [])
