# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/preflight.md knows every finding, and every pitfall in it leads to a check and a test that exist."""

from __future__ import annotations

import re

import yaml
from ops.engine_checks import MOE_BACKEND
from ops.findings import KINDS
from ops.journal_causes import CAUSES
from repository import ROLES, ROOT, load, tracked

TEXT = (ROOT / "docs/preflight.md").read_text()
FINDINGS, _, REST = TEXT.partition("## Transfers between GPUs")
PITFALLS = REST.partition("## Pitfalls")[2].partition("## The role")[0]
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
ALERTS = {
    rule["alert"]
    for group in yaml.safe_load((ROOT / "prometheus/rules/sglang.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
VARIABLES = {name for role in ROLES for name in role.options}


def pitfalls() -> list[tuple[str, str, str]]:
    """Return (pitfall, what catches it, its test)."""
    return [row for row in ROW.findall(PITFALLS) if row[0] != "pitfall" and not row[0].startswith("---")]


def test_every_finding_is_explained_with_its_severity():
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (\w+) \| .+ \| .+ \|$", FINDINGS, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == {id: severity for id, (severity, _meaning) in KINDS.items()}


def test_no_other_id_is_named_anywhere_in_it():
    named = set(re.findall(r"`((?:host|gpu|engine)\.[a-z0-9_]+)`", TEXT))
    assert named == set(KINDS)


def test_what_catches_a_pitfall_exists():
    known = set(KINDS) | {cause.id for cause in CAUSES} | ALERTS | VARIABLES
    words = {"HF_HUB_OFFLINE", "SGLANG_", "SGL_", "quantization", "role"}
    for pitfall, caught, test in pitfalls():
        names = set(re.findall(r"`([A-Za-z][\w.]*)`", caught)) - words
        assert names <= known, pitfall
        assert test or caught.startswith("nothing: "), f"{pitfall}: no test and no reason"
    assert len(pitfalls()) == 43


def test_variables_that_are_named_exist():
    """In what operators are told to change; the proposed islands are named as an inventory takes them."""
    texts = [TEXT, *(path.read_text() for path in sorted((ROOT / "module_utils/ops").glob("*_checks.py")))]
    named = set(re.findall(r"\b(?:preflight|gpu_host|sglang_(?:serve|venv))_\w+", "\n".join(texts)))
    assert "gpu_host_packages" in named
    assert named - VARIABLES - {"sglang_serve_islands"} == set()


def test_tests_that_are_named_exist():
    tests = {path.name: path.read_text() for path in tracked("*test_*.py")}
    for pitfall, _caught, test in pitfalls():
        file, _, name = test.strip("`").partition("::")
        text = tests[file] if name else (ROOT / "tests/policy/test_preflight_docs.py").read_text()
        assert not test or f"def {name or file}(" in text, pitfall


def test_policy_of_pitfalls():
    """Limits that the validation of sglang_serve keeps, and that this page promises."""
    serve = next(role for role in ROLES if role.name == "sglang_serve")
    assert "{{ __sglang_serve_ranges }}" in [task.get("loop") for task in serve.tasks["validate.yml"]]
    ranges = {item["name"]: (item["least"], item["most"]) for item in serve.variables["__sglang_serve_ranges"]}
    assert ranges["sglang_serve_max_running_requests"][0] == 2
    assert ranges["sglang_serve_nccl_port"][1] < 32768
    assert serve.defaults["sglang_serve_start_timeout_seconds"] >= 1800
    assert load(ROOT / "models/deepseek-v4-flash-nvfp4.yml")["arguments"]["moe-runner-backend"] == MOE_BACKEND
    assert MOE_BACKEND == "flashinfer_cutlass"
