# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules as Ansible runs them: arguments in, one JSON result out.

The host is a scripted systemd and a fake server.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
import time
import types
import typing as t
from pathlib import Path

import pytest
from openai_server import MODEL, FakeServer
from ops.systemd import CommandResult
from scripted_systemd import RUNNING, STARTING, ScriptedSystemd

ROOT = Path(__file__).parents[2]
RunModule = t.Callable[..., "dict[str, t.Any]"]
UNIT = "engine.service"
NEW, OLD = "n" * 64, "o" * 64
OWN = {**RUNNING, "MainPID": str(os.getpid())}


# service_state


def on_host(systemd: ScriptedSystemd, running: str | None) -> t.Callable[[types.ModuleType], None]:
    def patch(module: types.ModuleType) -> None:
        module.Service = functools.partial(
            module.Service,
            runner=systemd.run,
            running_hash=lambda _pid: running,
            clock=systemd.clock,
            sleep=systemd.sleep,
        )

    return patch


def service_state(
    run_module: RunModule, systemd: ScriptedSystemd, running: str | None = None, check: bool = False, **options: t.Any
) -> dict[str, t.Any]:
    arguments = {"name": UNIT, "enabled": True, "config_sha256": NEW, **options}
    return run_module("service_state", arguments, check, on_host(systemd, running))


def test_service_state_leaves_a_right_unit_alone(run_module: RunModule) -> None:
    systemd = ScriptedSystemd(RUNNING)
    result = service_state(run_module, systemd, NEW)
    assert result["changed"] is False
    assert systemd.verbs == []
    assert (result["main_pid_before"], result["main_pid_after"]) == (100, 100)
    assert result["diff"]["before"] == result["diff"]["after"]
    assert result["config_sha256"] == NEW


@pytest.mark.parametrize(("wait", "verbs"), [(True, ["start"]), (False, [])])
def test_service_state_waits_for_a_start_under_way_unchanged(
    run_module: RunModule, wait: bool, verbs: list[str]
) -> None:
    systemd = ScriptedSystemd(STARTING, on={"start": RUNNING})
    result = service_state(run_module, systemd, NEW, wait=wait)
    assert (result["changed"], systemd.verbs) == (False, verbs)


def test_service_state_heals_a_run_that_ended_before_the_restart(run_module: RunModule) -> None:
    systemd = ScriptedSystemd(
        {**RUNNING, "NeedDaemonReload": "yes"}, on={"restart": {**RUNNING, "MainPID": "200", "InvocationID": "run2"}}
    )
    result = service_state(run_module, systemd, OLD)
    assert result["changed"] is result["restarted"] is True
    assert systemd.verbs == ["daemon-reload", "restart"]
    assert (result["main_pid_before"], result["main_pid_after"]) == (100, 200)
    assert "has configuration oooooooooooo, wanted is configuration nnnnnnnnnnnn" in result["reason"]


def test_service_state_in_check_mode_says_what_and_why(run_module: RunModule) -> None:
    systemd = ScriptedSystemd(RUNNING)
    result = service_state(run_module, systemd, OLD, check=True)
    assert (result["changed"], result["actions"], systemd.verbs) == (True, ["restart"], [])
    assert "restart: the running process has configuration" in result["diff"]["after"]


@pytest.mark.parametrize(("enabled", "actions"), [(True, ["enable", "start"]), (None, ["start"])])
def test_service_state_in_check_mode_on_an_empty_host(
    run_module: RunModule, enabled: bool | None, actions: list[str]
) -> None:
    result = service_state(run_module, ScriptedSystemd({"LoadState": "not-found"}), check=True, enabled=enabled)
    assert (result["changed"], result["actions"]) == (True, actions)
    assert result["reason"] == "engine.service does not exist on this host yet"


def test_service_state_without_a_unit_file_fails_with_a_next_command(run_module: RunModule) -> None:
    result = service_state(run_module, ScriptedSystemd({"LoadState": "not-found"}))
    assert result["failed"]
    assert "next command: systemctl list-unit-files 'engine.service'" in result["msg"]


@pytest.mark.parametrize("check", [True, False])
def test_service_state_stops_nothing_where_nothing_is(run_module: RunModule, check: bool) -> None:
    systemd = ScriptedSystemd({"LoadState": "not-found"})
    assert service_state(run_module, systemd, check=check, state="stopped")["changed"] is False


def test_service_state_defers_a_restart(run_module: RunModule) -> None:
    systemd = ScriptedSystemd(RUNNING)
    result = service_state(run_module, systemd, OLD, restart_policy="defer")
    assert (result["changed"], result["restart_pending"], systemd.verbs) == (False, True, [])


def test_service_state_reports_a_failed_start(run_module: RunModule) -> None:
    systemd = ScriptedSystemd({"InvocationID": "run1"}, on={"start": CommandResult(1, "", "Job failed.")})
    systemd.journal = [("run1", "sglang serve: error: unrecognized arguments: --bogus 3")]
    result = service_state(run_module, systemd)
    assert result["failed"]
    assert result["cause"]["id"] == "unknown_argument"
    assert result["next_command"] == "systemctl cat engine.service"
    assert result["last_lines"] == ["sglang serve: error: unrecognized arguments: --bogus 3"]
    assert "change: sglang_serve_arguments_custom" in result["msg"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "engine"}, "engine.service"),
        ({"name": "engine.timer"}, "config_sha256 is for .service units"),
        ({"state": "restarted"}, "must be one of: started, stopped"),
        ({"restart_policy": "never"}, "must be one of: auto, defer"),
        ({"nmae": "x"}, "Unsupported parameters"),
    ],
)
def test_service_state_refuses_bad_arguments(run_module: RunModule, options: dict[str, t.Any], words: str) -> None:
    systemd = ScriptedSystemd()
    result = service_state(run_module, systemd, **options)
    assert result["failed"]
    assert words in result["msg"]
    assert systemd.calls == []


def test_service_state_without_the_right_to_read_asks_for_become(run_module: RunModule) -> None:
    def refuse(_pid: int) -> str:
        raise PermissionError(13, "Permission denied", "/proc/100/environ")

    def patch(module: types.ModuleType) -> None:
        module.Service = functools.partial(module.Service, runner=ScriptedSystemd(RUNNING).run, running_hash=refuse)

    result = run_module("service_state", {"name": UNIT, "config_sha256": NEW}, False, patch)
    assert result["failed"]
    assert "run with become: true" in result["msg"]


# sglang_ready


def ready(
    run_module: RunModule,
    systemd: ScriptedSystemd,
    base_url: str,
    check: bool = False,
    running: str | None = None,
    **options: t.Any,
) -> dict[str, t.Any]:
    def patch(module: types.ModuleType) -> None:
        module.Watch = functools.partial(
            module.Watch,
            runner=systemd.run,
            clock=systemd.clock,
            sleep=systemd.sleep,
            running_hash=lambda _pid: running,
        )

    return run_module("sglang_ready", {"unit": UNIT, "base_url": base_url, **options}, check, patch)


def test_sglang_ready_reports_capacity(run_module: RunModule) -> None:
    with FakeServer() as fake:
        result = ready(run_module, ScriptedSystemd(OWN), fake.base_url)
    assert (result["status"], result["changed"]) == ("ready", False)
    assert (result["max_total_num_tokens"], result["context_length"], result["model"]) == (16384, 8192, MODEL)
    words = "16384 tokens of KV: 2 requests of 8k tokens, or 8 requests of 512 tokens"
    assert result["capacity"] == f"{words} (max_running_requests; the pool holds 32)"
    assert result["warnings_seen"] == []
    # A dense model has no window.
    assert (result["max_total_num_tokens_swa"], result["weight_memory_usage_gb"]) == (None, None)


def test_sglang_ready_does_not_take_another_server_for_the_unit(run_module: RunModule) -> None:
    with FakeServer() as fake:
        result = ready(run_module, ScriptedSystemd({**RUNNING, "MainPID": "1"}), fake.base_url, max_wait=0)
    assert (result["status"], result["cause"]["id"]) == ("failed", "generation_fails")
    assert f"is held by process {os.getpid()}" in result["detail"]


def test_sglang_ready_returns_progress_for_a_loop(run_module: RunModule) -> None:
    systemd = ScriptedSystemd({**STARTING, "InactiveExitTimestampMonotonic": "1000000"}, now=39.0)
    systemd.journal = [("run1", "Load weight begin."), ("run1", "loading shards:  50% Completed | 2/4")]
    result = ready(run_module, systemd, "http://127.0.0.1:1", max_wait=10)
    assert not result.get("failed")
    assert result["status"] == "starting"
    assert result["progress"] == "engine.service: loading weights, 50 %, 48 s since the start"
    assert 48 <= systemd.now <= 49


def test_sglang_ready_fails_with_cause_line_variable_and_command(run_module: RunModule) -> None:
    systemd = ScriptedSystemd({**STARTING, "ActiveState": "failed", "Result": "exit-code"})
    line = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    systemd.journal = [("run1", line)]
    result = ready(run_module, systemd, "http://127.0.0.1:1", restarts_before=0)
    assert result["failed"]
    assert result["cause"]["id"] == "kv_pool_empty"
    for part in ("engine.service is not ready at http://127.0.0.1:1", line, "change: sglang_serve_mem_fraction_static"):
        assert part in result["msg"]
    assert f"next command: {result['next_command']}" in result["msg"]


def test_sglang_ready_fails_when_the_time_is_over(run_module: RunModule) -> None:
    systemd = ScriptedSystemd({**STARTING, "InactiveExitTimestampMonotonic": "1000000"}, now=120.0)
    systemd.journal = [("run1", "Capture target decode CUDA graph begin.")]
    result = ready(run_module, systemd, "http://127.0.0.1:1", timeout=100, max_wait=1)
    assert result["failed"]
    assert result["status"] == "failed"
    assert "still capturing CUDA graphs after 120 s, limit 100 s; seen: nothing listens" in result["msg"]


def test_sglang_ready_in_check_mode_never_fails(run_module: RunModule, tmp_path: Path) -> None:
    systemd = ScriptedSystemd({"LoadState": "not-found"})
    result = ready(run_module, systemd, "http://127.0.0.1:1", check=True)
    assert (result["status"], result["changed"]) == ("failed", False)
    assert not result.get("failed")
    missing = str(tmp_path / "key")
    result = ready(run_module, systemd, "http://127.0.0.1:1", check=True, api_key_file=missing)
    assert not result.get("failed")
    assert systemd.now == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": "nonsense"}, "not an http"),
        ({"api_key_file": "/nonexistent"}, "cannot read the API key from /nonexistent"),
        ({"api_key": "sk-123", "api_key_file": "/k"}, "mutually exclusive"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_sglang_ready_refuses_bad_arguments(run_module: RunModule, options: dict[str, t.Any], words: str) -> None:
    arguments = {"base_url": "http://127.0.0.1:1", **options}
    result = ready(run_module, ScriptedSystemd(RUNNING), **arguments)
    assert result["failed"]
    assert words in result["msg"]


# prometheus_query_info


def query(run_module: RunModule, values: list[float], check: bool = False, **options: t.Any) -> dict[str, t.Any]:
    def patch(module: types.ModuleType) -> None:
        def get_json(_self: t.Any, _path: str, _timeout: t.Any = None) -> dict[str, t.Any]:
            rows = [{"metric": {"job": "sglang"}, "value": [1, str(value)]} for value in values]
            return {"data": {"resultType": "vector", "result": rows}}

        module.Client = type("Client", (module.Client,), {"get_json": get_json})

    arguments = {"url": "http://127.0.0.1:9090/", "query": "sum(sglang:generation_tokens_total)", **options}
    return run_module("prometheus_query_info", arguments, check, patch)


def test_prometheus_query_info_returns_value_and_series(run_module: RunModule) -> None:
    result = query(run_module, [4, 5], min_value=4, increased_over=8)
    assert (result["value"], result["changed"], result["attempts"]) == (9, False, 1)
    assert result["result"][0] == {"labels": {"job": "sglang"}, "value": 4}


@pytest.mark.parametrize(
    ("values", "options", "words", "command"),
    [
        ([], {}, "the result is empty; seen: no series", "curl -sS http://127.0.0.1:9090/api/v1/targets"),
        (
            [4],
            {"increased_over": 4},
            "the value is 4 and has not increased over 4; seen: 4 {'job': 'sglang'}",
            "curl -sS -G http://127.0.0.1:9090/api/v1/query --data-urlencode "
            "'query=sum(sglang:generation_tokens_total)'",
        ),
    ],
)
def test_prometheus_query_info_fails_with_what_it_saw(
    run_module: RunModule, values: list[float], options: dict[str, t.Any], words: str, command: str
) -> None:
    result = query(run_module, values, **options)
    assert result["failed"]
    assert "query sum(sglang:generation_tokens_total) at http://127.0.0.1:9090: " + words in result["msg"]
    assert result["next_command"] == command
    assert result["msg"].endswith(f"next command: {command}")


def test_prometheus_query_info_on_an_unreachable_server(run_module: RunModule) -> None:
    result = run_module("prometheus_query_info", {"url": "http://127.0.0.1:1", "query": "up"})
    assert result["failed"]
    assert "Connection refused" in result["msg"]


def test_prometheus_query_info_in_check_mode_asks_nothing(run_module: RunModule) -> None:
    result = run_module("prometheus_query_info", {"url": "http://127.0.0.1:1", "query": "up"}, True)
    assert not result.get("failed")
    assert result["value"] is None


def test_prometheus_query_info_refuses_a_bad_url(run_module: RunModule) -> None:
    result = run_module("prometheus_query_info", {"url": "nonsense", "query": "up"})
    assert result["failed"]
    assert "'nonsense' is not an http" in result["msg"]


# All of them

NOBODY = "http://127.0.0.1:1"
QUESTION = {"id": "a", "prompt": "2+2?", "expect": {"kind": "integer", "value": 4}}
LEVEL = {"concurrency": 1, "context": 0, "output_tokens": 8, "requests": 1}
MEASURE = {"step": "measure", "model": "m", "model_path": "/m", "python": "/p", "level": LEVEL, "run_id": "r"}
MANIFEST = {"files": {"config.json": {"size": 2, "sha256": "0" * 64}}}
# Every module that asks a URL: the arguments of a call whose server is not there, the argument that is the URL, and
# what the module says of it.
ASKING: dict[str, tuple[dict[str, t.Any], str]] = {
    "model_files": ({"path": "/nonexistent/m", "manifest": MANIFEST, "url": NOBODY}, "url"),
    "prometheus_query_info": ({"url": NOBODY, "query": "up"}, "url"),
    "sglang_bench": ({**MEASURE, "engine_url": NOBODY, "deadline": time.time() + 600}, "engine_url"),
    "sglang_drain": ({"base_url": NOBODY, "timeout": 5}, "base_url"),
    "sglang_drift": ({"base_url": NOBODY, "intent": {"unit": UNIT, "version": "0.5.23"}}, "base_url"),
    "sglang_ready": ({"base_url": NOBODY, "unit": UNIT, "timeout": 1, "max_wait": 1}, "base_url"),
    "sglang_router_worker": ({"router_url": NOBODY, "url": NOBODY, "timeout": 1}, "router_url"),
    "sglang_smoke": ({"base_url": NOBODY, "model": "m", "checks": {"prompts": [QUESTION]}}, "base_url"),
}


def test_every_module_with_a_url_is_tried_without_its_server() -> None:
    urls = re.compile(r'^ +"(?:\w+_)?url": \{', re.MULTILINE)
    found = {path.stem for path in (ROOT / "library").glob("*.py") if urls.search(path.read_text(encoding="utf-8"))}
    assert found == set(ASKING)


def told(
    run_module: RunModule, name: str, tmp_path: Path, url: str | None = None, **options: t.Any
) -> dict[str, t.Any]:
    """The result of a module whose server is not there, on a host where the unit is about to start."""
    systemd = ScriptedSystemd({**STARTING, "InactiveExitTimestampMonotonic": "1000000"}, now=10.0)

    def patch(module: types.ModuleType) -> None:
        if name == "sglang_ready":
            module.Watch = functools.partial(module.Watch, runner=systemd.run, clock=systemd.clock, sleep=systemd.sleep)
        if name == "sglang_drift":
            module.Reality = functools.partial(module.Reality, runner=systemd.run)

    arguments, parameter = ASKING[name]
    if name == "model_files":
        options |= {"path": str(tmp_path / "model"), "state_path": str(tmp_path / "state.json")}
    return run_module(name, {**arguments, **({parameter: url} if url else {}), **options}, False, patch)


# A router that does not run takes all servers in when it starts: nothing is wrong.
@pytest.mark.parametrize("name", [name for name in ASKING if name != "sglang_router_worker"])
def test_an_unreachable_server_is_told_with_url_time_and_next_command(
    run_module: RunModule, name: str, tmp_path: Path
) -> None:
    result = told(run_module, name, tmp_path)
    # A benchmark goes on with its next level, a drain with the stop that it stands before.
    assert bool(result.get("failed")) != (name in ("sglang_bench", "sglang_drain")), result
    text = " ".join(result["row"]["why"]) if name == "sglang_bench" else result["msg"]
    assert NOBODY in text
    assert re.search(r"(after|looked at for) \d+\.\d+ s", text), text
    assert re.search(r"next command: \S", text), text


def test_a_router_that_refuses_is_told_with_url_time_and_next_command(run_module: RunModule, tmp_path: Path) -> None:
    with FakeServer() as fake:
        result = told(run_module, "sglang_router_worker", tmp_path, fake.base_url)
    assert result["failed"]
    assert re.search(rf"GET {fake.base_url}/\w+: status 404 Not Found after \d+\.\d+ s", result["msg"]), result["msg"]
    assert result["msg"].endswith(f"next command: {result['next_command']}")


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("url", ["nonsense", "http://h:0", "http://user:s3cr3t@h:1"])
def test_a_bad_url_is_told_with_the_next_command(run_module: RunModule, name: str, url: str, tmp_path: Path) -> None:
    result = told(run_module, name, tmp_path, url)
    assert bool(result.get("failed")) != (name == "sglang_drain"), result
    assert re.search(r"next command: \S", result["msg"]), result["msg"]
    assert "s3cr3t" not in result["msg"]


@pytest.mark.parametrize("name", ["sglang_bench", "sglang_drift", "sglang_ready", "sglang_smoke"])
def test_a_key_that_cannot_be_read_is_for_site_yml_to_write(run_module: RunModule, name: str, tmp_path: Path) -> None:
    for key, words in ((str(tmp_path / "none"), "No such file"), (os.devnull, "is empty")):
        result = told(run_module, name, tmp_path, api_key_file=key)
        assert result["failed"] and words in result["msg"]
        assert result["next_command"] == "ansible-playbook site.yml"
        assert result["msg"].endswith(f"next command: {result['next_command']}")


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "library").glob("*.py"), *(ROOT / "module_utils" / "ops").glob("*.py")]),
    ids=lambda p: p.name,
)
def test_target_code_is_python_3_9(path: Path) -> None:
    """Grammar only; what is imported must be of the standard library or of Ansible."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names | {"ansible"}
