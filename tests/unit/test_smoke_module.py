# SPDX-License-Identifier: GPL-3.0-or-later
"""The sglang_smoke module as Ansible runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import typing as t
from pathlib import Path

import pytest
import yaml
from confusion import data
from openai_server import MODEL, FakeServer
from ops.answers import judge
from ops.report import exposition
from ops.smoke import suite_of

ROOT = Path(__file__).parents[2]
RunModule = t.Callable[..., "dict[str, t.Any]"]
MODELS = sorted((ROOT / "models").glob("*.yml"))


def smoke(run_module: RunModule, fake: FakeServer, check: bool = False, **options: t.Any) -> dict[str, t.Any]:
    arguments = {"base_url": fake.base_url, "model": MODEL, "checks": data(20.0), **options}
    return run_module("sglang_smoke", arguments, check)


def test_it_passes_and_writes_its_report(run_module: RunModule, tmp_path: Path) -> None:
    with FakeServer() as fake:
        result = smoke(run_module, fake, profile="full", report_path=str(tmp_path / "smoke.json"))
    assert (result["changed"], result["report"]["ok"], result["report"]["profile"]) == (False, True, "full")
    assert json.loads((tmp_path / "smoke.json").read_text()) == result["report"]


def test_it_fails_with_the_report(run_module: RunModule, tmp_path: Path) -> None:
    with FakeServer("over_long_cut") as fake:
        result = smoke(run_module, fake, report_path=str(tmp_path / "smoke.json"))
    assert result["failed"]
    assert result["report"]["failed"] == ["limits.over_long"]
    assert "limits.over_long: wanted 'status 400, 413, 422 within 20 s', seen 'an answer; the server" in result["msg"]
    assert json.loads((tmp_path / "smoke.json").read_text())["ok"] is False


def test_a_run_that_can_not_begin_leaves_no_old_verdict(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "smoke.json"
    path.write_text('{"ok": true}')
    with FakeServer() as fake:
        smoke(run_module, fake, check=True, report_path=str(path), checks={"needle": []})
        assert json.loads(path.read_text()) == {"ok": True}, "check mode writes nothing"
        result = smoke(run_module, fake, report_path=str(path), api_key_file="/nonexistent")
    assert result["failed"]
    assert result["report"] == json.loads(path.read_text())
    assert (result["report"]["ok"], result["report"]["failed"]) == (False, ["run.begin"])


def test_what_stops_a_run_is_its_verdict(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "smoke.json"
    path.write_text('{"ok": true}')
    with FakeServer() as fake:
        why = {"stopped": "not ready: x.service hangs\nnext command: systemctl restart x.service"}
        smoke(run_module, fake, check=True, report_path=str(path), **why)
        assert json.loads(path.read_text()) == {"ok": True}, "check mode writes nothing"
        result = smoke(run_module, fake, report_path=str(path), **why)
        assert fake.questions == 0
    assert result["failed"]
    assert "nothing was asked: not ready: x.service hangs" in result["msg"]
    assert result["report"] == json.loads(path.read_text())
    row = result["report"]["checks"][0]
    assert (row["id"], row["cause"], row["next_command"]) == (
        "run.begin",
        "not ready: x.service hangs",
        "systemctl restart x.service",
    )


def drift(unit: str, **changes: t.Any) -> dict[str, t.Any]:
    """A report of drift with one row."""
    row = {"id": "drift.unit", "wanted": "active", "seen": "active", "elapsed_s": 0.1, "evidence": {"timeout_s": 30}}
    row |= {"ok": True, "skipped": False, "cause": "", "next_command": "", "passed": 1, "tried": 1, "tries": []}
    return {"unit": unit, "ok": True, "checks": [row | changes]}


RED = {"ok": False, "cause": "edited", "next_command": "systemctl cat b", "passed": 0}


def test_what_was_judged_before_is_in_the_report_and_its_verdict(run_module: RunModule, tmp_path: Path) -> None:
    with FakeServer() as fake:
        green = smoke(run_module, fake, before=[drift("a"), drift("b")])
        red = smoke(run_module, fake, before=[drift("a"), drift("b", **RED)], report_path=str(tmp_path / "smoke.json"))
    assert green["report"]["checks"][0] == drift("b")["checks"][0] | {
        "ttft_s": None,
        "evidence": {"timeout_s": 30, "unit": "a"},
    }
    assert green["report"]["passed"] == len(green["report"]["checks"])
    assert (red["failed"], red["report"]["failed"]) == (True, ["drift.unit"])
    assert red["report"]["checks"][0]["evidence"]["unit"] == "b"
    assert "drift.unit: wanted 'active'" in red["msg"]
    assert exposition("x", json.loads((tmp_path / "smoke.json").read_text()), 0).count('check="drift.unit"} 0\n') == 1


def test_drift_that_stops_a_run_has_its_rows_in_the_report(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "smoke.json"
    with FakeServer() as fake:
        smoke(run_module, fake, report_path=str(path), stopped="drift: edited", before=[drift("b", **RED)])
        assert fake.questions == 0
    report = json.loads(path.read_text())
    assert report["failed"] == ["run.begin", "drift.unit"]
    with FakeServer() as fake:
        result = smoke(run_module, fake, report_path=str(path), before=[{"unit": "b"}])
        assert fake.questions == 0
    assert "before holds" in result["msg"] and "wanted a report with checks" in result["msg"]


def test_the_engine_may_be_elsewhere(run_module: RunModule) -> None:
    with FakeServer("loads_missing") as router, FakeServer() as engine:
        result = smoke(run_module, router, engine_url=engine.base_url)
    assert result["report"]["failed"] == ["metrics.counters", "speculation.accepted"], (
        "the other engine has counted nothing"
    )


def test_check_mode_examines_the_checks_and_asks_nothing(run_module: RunModule, tmp_path: Path) -> None:
    with FakeServer() as fake:
        result = smoke(run_module, fake, check=True, report_path=str(tmp_path / "smoke.json"))
        refused = smoke(run_module, fake, check=True, checks={"needle": []})
        asleep = smoke(
            run_module,
            fake,
            check=True,
            checks={
                "prompts": [{**data()["prompts"][0], "profile": "full"}],
                **dict.fromkeys(("over_long", "cancelled_client", "resting_level", "counters", "endpoints"), False),
            },
        )
        assert fake.questions == 0
    assert "no check belongs to the profile quick" in asleep["msg"]
    assert not result.get("failed")
    assert os.listdir(tmp_path) == []
    assert "'needle' is no kind of check" in refused["msg"]


def test_its_key_is_never_shown(run_module: RunModule, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-from-a-file\n")
    for options in ({"api_key": "sk-from-a-file"}, {"api_key_file": str(key)}):
        for fault in ("none", "refused", "key_in_error", "key_in_answer"):
            with FakeServer(fault) as fake:
                fake.api_key = "sk-from-a-file"
                result = smoke(run_module, fake, profile="full", **options)
            assert bool(result.get("failed")) == (fault != "none")
            assert "sk-from-a-file" not in json.dumps(result)
            assert set(fake.seen_keys) == {"Bearer sk-from-a-file"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": "nonsense"}, "nothing was asked: 'nonsense' is not an http"),
        ({"engine_url": "nonsense"}, "nothing was asked: 'nonsense' is not an http"),
        ({"api_key_file": "/nonexistent"}, "cannot read the API key from /nonexistent"),
        ({"profile": "fast"}, "must be one of: quick, full, capacity"),
        ({"report_path": "/nonexistent/smoke.json"}, "/nonexistent/smoke.json: No such file or directory"),
    ],
)
def test_bad_arguments_are_refused(run_module: RunModule, options: dict[str, t.Any], words: str) -> None:
    with FakeServer() as fake:
        result = smoke(run_module, fake, **options)
    assert result["failed"]
    assert words in result["msg"]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_checks_of_a_model_are_usable(path: Path) -> None:
    checks = suite_of(yaml.safe_load(path.read_text(encoding="utf-8"))["checks"])
    assert len(checks.of("quick").prompts) >= 2
    assert all(len(concurrent.cases) >= 16 for concurrent in checks.concurrent if concurrent.profile != "quick")
    assert any(len(concurrent.cases) >= 16 for concurrent in checks.of("full").concurrent)
    assert any(needle.tokens > 2048 for needle in checks.of("full").needles)


def test_the_quick_proof_of_the_production_model_holds_one_of_each_kind() -> None:
    quick = suite_of(yaml.safe_load((ROOT / "models/deepseek-v4-flash-nvfp4.yml").read_text())["checks"]).of("quick")
    assert [check.id for check in quick.needles if check.tokens > 2048] == ["2k"]
    assert [check.id for check in quick.tools] == ["weather"]
    assert any("response_format" in check.extra for check in quick.prompts)
    assert [len(check.cases) for check in quick.concurrent] == [4]


def test_the_production_model_is_asked_for_text_of_several_bytes() -> None:
    checks = suite_of(yaml.safe_load((ROOT / "models/deepseek-v4-flash-nvfp4.yml").read_text())["checks"])
    (check,) = (one for one in checks.of("quick").prompts if one.id == "non_ascii")
    answer = check.expect["value"]
    assert {len(char.encode()) for char in answer} == {1, 2, 3, 4}
    assert check.modes() == (False, True)
    assert judge(check.expect, f"{answer}\n").ok
    for damaged in (answer.replace("東", "\ufffd\ufffd"), answer.replace("🗼", ""), answer.replace("é", "Ã©")):
        assert not judge(check.expect, damaged).ok


def test_one_side_of_a_disaggregated_pair_is_asked_nothing_on_purpose() -> None:
    path = ROOT / "roles/sglang_serve/filter_plugins/servers.py"
    spec = importlib.util.spec_from_file_location("servers", path)
    assert spec and spec.loader
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    side = suite_of(dict.fromkeys(plugin.OWN_CHECKS, False))
    assert (side.asks, side.problem("quick")) == (False, "")
