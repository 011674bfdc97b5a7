# SPDX-License-Identifier: GPL-3.0-or-later
"""What the roles write to a host: equal to the golden files, and accepted by the programs that read it there.

`UPDATE_GOLDEN=1 pytest tests/templates` writes the golden files anew; read their difference before committing it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment
from ops.drift import Intent, Reality, environment_row
from ops.engine_checks import check_configuration
from ops.http import Client
from ops.preflight import Host
from ops.smoke import suite_of
from ops.systemd import UnitState

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden")
TEMPLATES = sorted((ROOT / "roles").glob("*/templates/*.j2"))
FILES = sorted(path for path in GOLDEN.glob("*/*") if path.is_file())
UNITS = [path for path in FILES if path.suffix == ".service"]
SCRIPTS = [path for path in FILES if path.suffix == ".sh"]
ROUTERS = [path for path in SCRIPTS if path.name == "launch-router.sh"]
ENGINES = [path for path in SCRIPTS if path not in ROUTERS]
ENGINE_UNITS = [path.with_name(path.stem.replace("launch", "sglang") + ".service") for path in ENGINES]
PROMETHEUS = [path for path in FILES if path.name == "prometheus.yml"]
ALERTMANAGER = [path for path in FILES if path.name == "alertmanager.yml"]
UPDATE = "Next: UPDATE_GOLDEN=1 pytest tests/templates, then git diff tests/templates/golden"
# systemd-analyze counts tenths: 4.0 at most.
EXPOSURE = 40
VENV = "/opt/sglang/releases/@RELEASE@/venv"


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: f"{path.parent.name}/{path.name}")


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    """Run a program, its output and its complaints in one text."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False} | options
    return subprocess.run([str(word) for word in command], **options)


def program(name: str, package: str) -> str:
    """Return the path of a program, or say which Debian package has it."""
    return shutil.which(name) or pytest.fail(f"{name} is not installed. Next: apt-get install {package}")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_template_parses(template):
    Environment().parse(template.read_text())


def test_every_template_is_rendered_here():
    lookup = re.compile(r"^(\w+): .*lookup\('ansible.builtin.template', '(\S+)'", re.M)
    looked_up = {
        (file.parents[1].name, template): variable
        for file in sorted((ROOT / "roles").glob("*/vars/main.yml"))
        for variable, template in lookup.findall(file.read_text())
    }
    assert {(path.parents[1].name, path.name) for path in TEMPLATES} == set(looked_up)
    play = (Path(__file__).parent / "render.yml").read_text()
    assert [variable for variable in looked_up.values() if variable not in play] == []


def test_golden_files_are_what_is_rendered(rendered):
    texts = {f"{scenario}/{name}": text for scenario, one in rendered.items() for name, text in one["texts"].items()}
    if os.environ.get("UPDATE_GOLDEN"):
        shutil.rmtree(GOLDEN, ignore_errors=True)
        for name, text in texts.items():
            (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name).write_text(text)
    golden = {str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*")}
    assert golden == set(texts), UPDATE
    for name, text in texts.items():
        assert (GOLDEN / name).read_text() == text, f"{name} is not the golden one. {UPDATE}"


def test_no_inventory_of_this_repository_is_warned_of(rendered):
    servers = [server for one in rendered.values() for server in one["servers"]]
    assert [found for one in servers for found in check_configuration(one["arguments"], one["environment"])] == []


def test_no_key_is_in_any_text(rendered):
    texts = [text for one in rendered.values() for text in one["texts"].values()]
    assert any("LoadCredential=" in text for text in texts)
    assert not any("0123456789abcdef" in text for text in texts)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A file system root with systemd's own units and an empty executable for each program that the golden units start.

    `systemd-analyze verify --root` then looks at the units as they are, and complains of nothing that only a host has.
    """
    root = tmp_path_factory.mktemp("root")
    shutil.copytree("/usr/lib/systemd/system", root / "usr/lib/systemd/system", symlinks=True)
    (root / "etc/systemd/system").mkdir(parents=True)
    for path in UNITS:
        (root / "etc/systemd/system" / path.name).write_text(path.read_text())  # units name each other
        for name in re.findall(r"^Exec\w+=[-+!@:]*(/\S+)", path.read_text(), re.M):
            (root / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            (root / name.lstrip("/")).touch(mode=0o755)
    return root


def verify(root: Path, name: str, text: str) -> str:
    """Return what systemd-analyze verify has to say about a unit."""
    (root / "etc/systemd/system" / name).write_text(text)
    done = run(program("systemd-analyze", "systemd"), "verify", f"--root={root}", "--man=no", name)
    return done.stdout + ("" if done.returncode == 0 else f"exit status {done.returncode}")


@each(UNITS)
def test_systemd_takes_the_unit_without_a_word(root, path):
    assert verify(root, path.name, path.read_text()) == ""


def test_systemd_would_speak(root):
    text = (GOLDEN / "tp8" / "sglang-unified.service").read_text()
    assert "Unknown key 'KilMode'" in verify(root, "sglang-unified.service", text.replace("KillMode=", "KilMode="))
    assert "/no/such/bin/python is not executable" in verify(
        root, "sglang-unified.service", text.replace(f"ExecStartPost=+{VENV}", "ExecStartPost=+/no/such")
    )


@each(UNITS)
def test_unit_is_hardened(path):
    analyze = program("systemd-analyze", "systemd")
    done = run(analyze, "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", path)
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout


@each([path for path in UNITS if "ops.port_free" in path.read_text()])
def test_starts_that_wait_for_a_port_are_never_the_last(path):
    """Each lasts TimeoutStartSec, so the fourth is outside of the interval in which three are too many."""
    text = path.read_text()
    burst, interval, timeout = (
        int(re.search(rf"^{name}=(\d+)$", text, re.M)[1])
        for name in ("StartLimitBurst", "StartLimitIntervalSec", "TimeoutStartSec")
    )
    assert interval <= burst * timeout


@each(UNITS)
def test_environment_survives_quoting(rendered, path):
    # The quoted form is systemd's C-like one; within it, JSON's reader sees the same text once %% is %.
    found = re.findall(r'^Environment=(".*")$', path.read_text(), re.M)
    pairs = dict(json.loads(line.replace("%%", "%")).split("=", 1) for line in found)
    servers = {server["unit"]: server for server in rendered[path.parent.name]["servers"]}
    wanted = servers.get(path.name, {"environment": {}})["environment"]
    assert pairs == {name: str(value) for name, value in wanted.items()}


@each(SCRIPTS)
def test_shell_takes_the_script(path):
    assert run(program("dash", "dash"), "-n", path).stdout == ""


def started(script: Path, directory: Path, key: str, program: str = "${0%/*}/venv/bin/sglang") -> list[str]:
    """Run a launch script with another program in the engine's place that notes its arguments, and return these."""
    (directory / "engine.yaml").write_text(f"api-key: {json.dumps(key)}\n")
    notes = directory / "notes"
    notes.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {directory}/arguments\necho $$ > {directory}/pid\n")
    notes.chmod(0o755)
    text = script.read_text()
    assert text.count(program) == 1
    (directory / "launch.sh").write_text(text.replace(program, str(notes)))
    shell = subprocess.Popen(["dash", directory / "launch.sh"], env={"CREDENTIALS_DIRECTORY": str(directory)})
    assert shell.wait(10) == 0
    assert (directory / "pid").read_text().strip() == str(shell.pid), "the shell did not make way for the engine"
    return (directory / "arguments").read_text().split("\0")[:-1]


@each(ENGINES)
def test_engine_understands_the_launch_line(rendered, sglang, path, tmp_path):
    key = "0123456789abcdef-of-a-client"
    command, *arguments = started(path, tmp_path, key)
    assert command == "serve"
    assert key not in arguments
    parsed = sglang.ask("parse", argv=arguments)
    names = {f"launch-{server['name']}.sh": server["arguments"] for server in rendered[path.parent.name]["servers"]}
    wanted = names[path.name]
    assert parsed["options"] == {f"--{name}": value for name, value in wanted.items() if value is not False}
    assert parsed["api_key"] == (key if "--config" in arguments else None)


@pytest.mark.parametrize("name", ["context-lenght", "cuda-graph-max-bs"])
def test_arguments_are_read_by_the_engine_before_it_is_touched(engine_python, name):
    """One that is misspelt, and one that older releases had and that begins like several of this one."""
    read = yaml.safe_load((ROOT / "roles/sglang_serve/vars/main.yml").read_text())["__sglang_serve_parse"]
    words = ["--model-path", "/srv/model", f"--{name}", "1"]
    done = run(engine_python, "-I", "-c", read, *words, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"})
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith("sglang serve: error: ")
    assert f"--{name}" in done.stdout.splitlines()[-1]


def unknown_variables(engine_python: str, *names: str) -> dict[str, str]:
    """What the role's program says of variables and the engine for tests."""
    look = ROOT / "roles/sglang_serve/files/look_for_variables.py"
    return json.loads(run(sys.executable, "-I", look, Path(engine_python).parents[1], *names).stdout)


def test_engine_knows_every_variable_of_its_own(rendered, engine_python):
    """SGLang ignores one that it does not know; a release that drops or renames one is seen here."""
    servers = [server for one in rendered.values() for server in one["servers"]]
    given = {name for server in servers for name in server["environment"] if name.startswith(("SGLANG_", "SGL_"))}
    assert given >= {"SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"}
    assert unknown_variables(engine_python, *given) == {}


def test_variables_are_looked_for_before_the_engine_is_touched(engine_python):
    names = ["SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "SGLANG_ENABLE_PCIE_IPC_ALLREDUC"]
    assert unknown_variables(engine_python, *names) == {names[2]: f" (did you mean {names[1]}?)"}


@each(ROUTERS)
def test_router_understands_the_launch_line(rendered, router, path, tmp_path):
    venv = "/opt/sglang/router/environment/venv/bin/python"
    program, *arguments = started(path, tmp_path, "", venv)
    assert program == "/opt/sglang/bin/start_router.py"
    parsed = router(arguments)
    scenario = rendered[path.parent.name]
    wanted = {name.replace("-", "_"): value for name, value in scenario["router"].items() if value is not False}
    assert {name: parsed[name] for name in wanted} == wanted
    sides = {
        side: [server for server in scenario["routed"] if server["name"] == side] for side in ("prefill", "decode")
    }
    assert parsed["prefill_urls"] == [[server["url"], server["bootstrap_port"]] for server in sides["prefill"]]
    assert parsed["decode_urls"] == [server["url"] for server in sides["decode"]]
    assert parsed["api_key"] is None


@pytest.mark.parametrize(
    ("topology", "ids"), [("unified", ["2k"]), ("replicas", ["2k"]), ("disaggregated", ["2k", "32k"])]
)
def test_prefill_and_decode_apart_are_never_proven_without_a_long_text(rendered, topology, ids):
    suite = suite_of(rendered[f"production-{topology}-gpu1"]["checks"])
    assert [check.id for check in suite.of("quick").needles] == ids
    assert [check.id for check in suite.of("full").needles] == ["2k", "32k"]


def test_drafts_are_planned_for_and_proven_where_they_are_asked_for(rendered):
    asked = [name for name, one in rendered.items() if suite_of(one["checks"]).speculation]
    assert asked == [name for name, one in rendered.items() if int(one["planned_draft_tokens"])] == ["tp4"]
    given = {name: value for name, value in rendered["tp4"]["servers"][0]["arguments"].items() if "specul" in name}
    assert {name.removeprefix("speculative-"): str(value) for name, value in given.items()} == {
        "algorithm": "EAGLE",
        "num-steps": "1",
        "eagle-topk": "1",
        "num-draft-tokens": "2",
    }
    assert int(rendered["tp4"]["planned_draft_tokens"]) == 2


def test_router_reads_its_arguments_before_it_is_touched(engine_python):
    start = [engine_python, ROOT / "roles/sglang_router/files/start_router.py", "--only-read", "--port", "30001"]
    assert (run(*start).stdout, run(*start).returncode) == ("", 0)
    refused = run(*start, "--polcy", "x")
    assert refused.returncode == 1
    assert refused.stdout.startswith("unrecognized arguments: --polcy x. The router was not touched. Next: correct")


@each(PROMETHEUS)
def test_prometheus_takes_its_configuration(path):
    done = run(program("promtool", "prometheus"), "check", "config", path)
    assert done.returncode == 0, done.stdout


@each(ALERTMANAGER)
def test_alertmanager_takes_its_configuration(path):
    done = run(program("amtool", "prometheus-alertmanager"), "check-config", path)
    assert done.returncode == 0, done.stdout


@each(ENGINE_UNITS)
def test_the_environment_of_an_engines_unit_is_no_drift(path, tmp_path):
    """Variables in quotes are those of the inventory, which drift knows; the others are the unit's own."""
    lines = [line.removeprefix("Environment=") for line in path.read_text().splitlines() if "Environment=" in line]
    named = [json.loads(line).replace("%%", "%") for line in lines if line.startswith('"')]
    own = [word for line in lines if not line.startswith('"') for word in line.split()]
    script = path.with_name(path.stem.replace("sglang", "launch") + ".sh").read_text()
    assert re.findall(r"\bexport (\w+)", script) == ["OPS_CONFIG_SHA256"]
    environ = tmp_path / "proc/1/environ"
    environ.parent.mkdir(parents=True)
    intent = Intent("engine.service", environment=dict(one.split("=", 1) for one in named))
    reality = Reality(Client("http://127.0.0.1:1"), Host(str(tmp_path)))
    for extra, ok in ([], True), (["TRITON_INTERPRET=1"], False):
        environ.write_text("\0".join([*named, *own, *extra]))
        row = environment_row(intent, UnitState("engine.service", main_pid=1), reality)
        assert row.ok == ok, row.seen
