# SPDX-License-Identifier: GPL-3.0-or-later
"""The page with the host's own state: true to what is there, silent about what is not."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ops import report as reports
from ops import smoke

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "roles/node_exporter/files/state_metrics.py"
NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def engine():
    """A server where the path in one attribute answers with the status in the other."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(server.status if self.path == server.ready else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Ready)
    server.status, server.ready = 200, "/ready"
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def state(tmp_path):
    """Return the page, as the samples' names and labels -> values."""
    collect = runpy.run_path(str(PROGRAM))["collect"]

    def look(engines: list[dict] | None = None, **more) -> dict[str, float]:
        config = {
            "device": "cpu",
            "engines": engines or [],
            "release": str(tmp_path / "current"),
            "smoke_reports": [str(tmp_path / "smoke.json"), str(tmp_path / "canary.json")],
        }
        text = collect({**config, "directories": [], **more})
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    return look


@pytest.mark.parametrize(("status", "ready"), [(200, 1), (503, 0), (500, 0)])
def test_ready_is_what_the_engine_says(state, engine, status, ready):
    engine.status = status
    one = {"unit": "sglang-unified.service", "role": "unified", "url": engine.url}
    assert state([one])['ops_engine_ready{unit="sglang-unified.service",role="unified"}'] == ready


def test_a_router_is_asked_elsewhere(state, engine):
    router = {"unit": "sglang-router.service", "role": "router", "url": engine.url, "ready_path": "/readiness"}
    name = 'ops_engine_ready{unit="sglang-router.service",role="router"}'
    assert state([router])[name] == 0
    engine.ready = "/readiness"
    assert state([router])[name] == 1


def test_an_engine_that_does_not_listen_is_not_ready(state):
    one = {"unit": "sglang-unified.service", "role": "unified", "url": NOBODY}
    assert state([one])['ops_engine_ready{unit="sglang-unified.service",role="unified"}'] == 0


def test_the_release_that_serves_is_told(state, tmp_path):
    assert not any(name.startswith("ops_release") for name in state())
    packages = tmp_path / "releases/0.5.23-abc/venv/lib/python3.11/site-packages"
    kernels = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text())["project"]["name"].replace("-", "_")
    for name in ("sglang-0.5.23", "sglang_router-0.3.2", f"{kernels}-1.0.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/0.5.23-abc")
    assert state()['ops_release_info{release="0.5.23-abc",sglang="0.5.23",kernels="1.0.0"}'] == 1


def test_the_configuration_of_a_unit_is_told(tmp_path):
    configs = runpy.run_path(str(PROGRAM))["config_samples"]
    engine = {"unit": "sglang-unified.service", "role": "unified", "url": NOBODY}
    assert configs([engine], str(tmp_path)) == []
    (tmp_path / engine["unit"]).write_text("[Service]\nEnvironment=OPS_CONFIG_SHA256=0123456789abcdef\n")
    (sample,) = configs([engine], str(tmp_path))
    assert sample.labels == {"unit": "sglang-unified.service", "role": "unified", "config": "0123456789ab"}


@pytest.fixture
def units(tmp_path):
    """Return what is said of a restart, with a unit's hash in its file and its processes' (unit, hash)."""
    restarts = runpy.run_path(str(PROGRAM))["restart_samples"]
    engine = {"unit": "sglang-unified.service", "role": "unified", "url": NOBODY}

    def look(wanted: str | None, *processes: tuple[str, str]) -> list[float]:
        if wanted:
            (tmp_path / engine["unit"]).write_text(f"[Service]\nEnvironment=OPS_CONFIG_SHA256={wanted}\n")
        for number, (unit, running) in enumerate(processes):
            process = tmp_path / "proc" / str(number)
            process.mkdir(parents=True)
            (process / "environ").write_bytes(f"HOME=/\0OPS_CONFIG_SHA256={running}\0".encode())
            (process / "cgroup").write_text(f"1:name=systemd:/\n0::/system.slice/{unit}\n")
        (tmp_path / "proc" / "self").mkdir(parents=True)
        return [sample.value for sample in restarts([engine], str(tmp_path), str(tmp_path / "proc"))]

    return look


@pytest.mark.parametrize(
    ("wanted", "processes", "told"),
    [
        ("new", [("sglang-unified.service", "new"), ("sglang-unified.service", "new")], [0]),
        ("new", [("sglang-unified.service", "old"), ("prometheus.service", "new")], [1]),
        # While one is drained, and after somebody's own start of the other.
        ("new", [("sglang-unified.service", "old"), ("sglang-unified.service", "new")], [1]),
        ("new", [("prometheus.service", "old")], []),
        (None, [("sglang-unified.service", "old")], []),
    ],
)
def test_a_restart_that_was_put_off_is_told(units, wanted, processes, told):
    assert units(wanted, *processes) == told


def test_the_configuration_of_a_running_unit_is_read():
    """Of this process, with the kernel's own files; in a unit or out of one."""
    running = runpy.run_path(str(PROGRAM))["running_configs"]
    child = subprocess.Popen(["sleep", "60"], env={"OPS_CONFIG_SHA256": "of-the-child"})
    try:
        own = Path(f"/proc/{child.pid}/cgroup").read_text()
        units = {part for line in own.splitlines() for part in line.split("/") if part.endswith(".service")}
        assert {unit for unit, seen in running().items() if b"of-the-child" in seen} == units
    finally:
        child.kill()
        child.wait()


def test_without_a_report_there_is_no_smoke_result(state):
    assert not any(name.startswith("ops_smoke") for name in state())


def test_a_real_report_of_a_failed_smoke_test_is_read(state, tmp_path):
    rows = [
        reports.Row("prompt.capital", True, "Paris", "Paris", 0.2),
        reports.Row("prompt.sum", False, "4", "5", 0.2),
        reports.skipped_row("graph", "active", "no GPU"),
    ]
    report = reports.build_report(rows, 1764460800.0, 0.4, base_url=NOBODY, model="smollm2")
    reports.write_report(str(tmp_path / "smoke.json"), report)
    seen = state()
    labels = 'model="smollm2",report="smoke.json"'
    assert seen[f"ops_smoke_ok{{{labels}}}"] == 0
    assert seen[f"ops_smoke_timestamp_seconds{{{labels}}}"] == 1764460800
    for name in ("passed", "failed", "skipped"):
        assert seen[f'ops_smoke_checks{{{labels},result="{name}"}}'] == 1
    assert seen[f"ops_smoke_failed_tries{{{labels}}}"] == 0
    reports.write_report(str(tmp_path / "smoke.json"), {**report, "failed_tries": 3})
    assert state()[f"ops_smoke_failed_tries{{{labels}}}"] == 3
    verdicts = {name: value for name, value in seen.items() if name.startswith("ops_smoke_check_ok")}
    assert verdicts == {
        f'ops_smoke_check_ok{{{labels},check="prompt.capital"}}': 1,
        f'ops_smoke_check_ok{{{labels},check="prompt.sum"}}': 0,
    }


def test_a_run_that_could_not_begin_is_a_failed_one(state, tmp_path):
    report = smoke.unbegun_report("no key", NOBODY, "smollm2", "quick", 1764460800.0)
    reports.write_report(str(tmp_path / "smoke.json"), report)
    labels = 'model="smollm2",report="smoke.json"'
    assert state()[f"ops_smoke_ok{{{labels}}}"] == 0
    assert state()[f'ops_smoke_check_ok{{{labels},check="run.begin"}}'] == 0


def test_a_run_that_goes_on_leaves_the_last_word_and_one_that_was_killed_does_not(state, tmp_path):
    path, name = str(tmp_path / "smoke.json"), 'ops_smoke_ok{model="smollm2",report="smoke.json"}'
    head, now = (NOBODY, "smollm2", "quick"), time.time()
    reports.write_report(path, smoke.begun_report(path, *head, now))
    assert name not in state()
    rows = [reports.Row("prompt.capital", True, "Paris", "Paris", 0.2)]
    reports.write_report(path, reports.build_report(rows, now, 0.4, base_url=NOBODY, model="smollm2"))
    going_on = smoke.begun_report(path, *head, now)
    reports.write_report(path, going_on)
    assert state()[name] == 1
    reports.write_report(path, {**going_on, "ends_by": int(now) - 1})
    assert state()[name] == 0


def test_every_report_counts(state, tmp_path):
    for name, began, ok in (("smoke", 1764460800.0, False), ("canary", 1764464400.0, True)):
        rows = [reports.Row("prompt.capital", ok, "Paris", "?", 0.2)]
        report = reports.build_report(rows, began, 0.4, base_url=NOBODY, model="smollm2")
        reports.write_report(str(tmp_path / f"{name}.json"), report)
    seen = state()
    assert [seen[f'ops_smoke_ok{{model="smollm2",report="{name}.json"}}'] for name in ("smoke", "canary")] == [0, 1]
    assert seen['ops_smoke_timestamp_seconds{model="smollm2",report="canary.json"}'] == 1764464400


BROKEN_ROWS = (
    '{"ok": true, "model": "m", "started": "2026-11-30T00:00:00Z", "passed": 1, "failed": [], "checks": [{"ok": true}]}'
)


@pytest.mark.parametrize("text", ["", "{}", '{"model": "m", "started": "yesterday"}', "[]", BROKEN_ROWS])
def test_a_broken_report_gives_no_result_and_a_word_in_the_journal(state, tmp_path, capsys, text):
    (tmp_path / "smoke.json").write_text(text)
    assert not any(name.startswith("ops_smoke") for name in state())
    assert "cannot read" in capsys.readouterr().err


def test_directories_that_do_not_exist_are_left_out(state, tmp_path):
    seen = state(directories=[str(tmp_path), "/no/such/directory"])
    size = seen[f'ops_directory_size_bytes{{path="{tmp_path}"}}']
    assert 0 < seen[f'ops_directory_avail_bytes{{path="{tmp_path}"}}'] <= size
    assert not any("/no/such" in name for name in seen)


def test_labels_are_escaped():
    page, sample = (runpy.run_path(str(PROGRAM))[name] for name in ("page", "Sample"))
    assert 'path="a\\"b\\\\c\\n"' in page([sample("ops_directory_size_bytes", {"path": 'a"b\\c\n'}, 1.0)])


def test_a_page_that_cannot_be_written_ends_nothing(tmp_path):
    """A full disk, here a directory that is not there yet: said, and written as soon as it can be."""
    output, said = tmp_path / "later" / "state.prom", tmp_path / "said"
    config = {"device": "cpu", "engines": [], "release": "/no/such", "smoke_reports": [], "directories": []}
    config["output"] = str(output)
    (tmp_path / "config.json").write_text(json.dumps(config | {"interval_seconds": 0.1}))
    with said.open("w") as stderr:
        program = subprocess.Popen([sys.executable, PROGRAM, tmp_path / "config.json"], stderr=stderr)

    def within(seconds, condition):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return condition()

    try:
        assert within(20, lambda: f"cannot write {output}: No such file or directory" in said.read_text())
        output.parent.mkdir()
        assert within(20, output.exists)
        assert program.poll() is None
    finally:
        program.terminate()
        program.wait()


def test_promtool_takes_the_page_of_the_running_program(promtool, tmp_path, engine):
    output = tmp_path / "state.prom"
    config = {
        "device": "cuda",
        "release": "/no/such",
        "smoke_reports": ["/no/such"],
        "directories": ["/"],
        "output": str(output),
    }
    config |= {"engines": [{"unit": "u", "role": "unified", "url": engine.url}], "interval_seconds": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = subprocess.Popen([sys.executable, PROGRAM, tmp_path / "config.json"])
    try:
        deadline = time.monotonic() + 10
        while not output.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        program.terminate()
        program.wait()
    done = subprocess.run([promtool, "check", "metrics"], input=output.read_bytes(), capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"ops_engine_ready" in output.read_bytes()
