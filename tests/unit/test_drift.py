# SPDX-License-Identifier: GPL-3.0-or-later
"""What runs against what was meant: each difference is seen by its own row, and nothing secret is shown."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import time
import types
import typing as t
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from openai_server import FakeServer
from ops import systemd
from ops.drift import ENGINE_VARIABLES, KERNEL_ACTIVE, Intent, Reality, drift_report, intent_of, kernels_row, same
from ops.engine_load import samples
from ops.http import Client
from ops.preflight import Host
from scripted_systemd import RUNNING, ScriptedSystemd

RunModule = t.Callable[..., "dict[str, t.Any]"]
UNIT = "engine.service"
SMI = "101, 00000000:01:00.0, 41000 MiB\n102, 00000000:21:00.0, 41000 MiB\n"
INTENT = Intent(
    unit=UNIT,
    unit_source="/opt/sglang/current/engine.service",
    arguments={"tp-size": 4, "dtype": "float32", "enable-metrics": True, "max-total-tokens": False, "api-key": "sk-1"},
    environment={"SGLANG_X": "1", "HF_TOKEN": "hf_secret"},
    server_info={"attention_backend": "dsv4"},
    release="/opt/sglang/current/venv",
    version="0.5.23",
    min_total_tokens=16000,
    kernels=("decode", "indexer"),
    gpus=True,
)


@dataclass
class Machine:
    """A host below a directory, with one unit whose main process is 100, and a server beside it."""

    root: Path
    fake: FakeServer
    environment: dict[str, str] = field(default_factory=dict)
    release: str = "a"
    smi: tuple[int, str] = (0, SMI)
    owner: str = "engine.service"
    drop_ins: str = ""
    on_disk: str = "a" * 64
    edited: str = ""
    unit: dict[str, str] = field(default_factory=dict)
    # Of each rank, whether it is active; mhc was switched off on purpose.
    kernels: dict[str, list[int]] = field(
        default_factory=lambda: {"decode": [1] * 4, "indexer": [1] * 4, "mhc": [0] * 4}
    )
    deleted: str = ""

    def build(self) -> Reality:
        for release in ("a", "b"):
            (self.root / "opt/sglang/releases" / release / "venv").mkdir(parents=True, exist_ok=True)
        link = self.root / "opt/sglang/current"
        if not link.is_symlink():
            link.symlink_to("releases/a")
        for pid, unit in ((100, UNIT), (101, UNIT), (102, UNIT), (200, "other.service")):
            self.write(f"proc/{pid}/cgroup", f"0::/system.slice/{unit}\n")
            self.write(f"proc/{pid}/comm", "sglang\n")
        environment = {"OPS_CONFIG_SHA256": "a" * 64, "SGLANG_X": "1", "HF_TOKEN": "hf_secret", **self.environment}
        self.write("proc/100/environ", "\0".join(f"{name}={value}" for name, value in environment.items() if value))
        self.write(
            "proc/100/maps", f"7f r-xp 0 0:0 1  {self.library()}{self.deleted}\n7f r-xp 0 0:0 2  /usr/lib/libc.so.6\n"
        )
        port = int(self.fake.base_url.rsplit(":", 1)[1])
        address = f"0100007F:{port:04X}"
        row = f"0: {address} 00000000:0000 0A 0:0 0:0 0 0 0 777"
        self.write("proc/net/tcp", f"header\n{row}\n")
        self.write("proc/net/tcp6", "header\n")
        text = "[Service]\nRestartSec=5\nEnvironment=OPS_CONFIG_SHA256="
        self.write("opt/sglang/releases/a/engine.service", f"{text}@CONFIG_SHA256@\n")
        self.write("etc/systemd/system/engine.service", self.edited or f"{text}{self.on_disk}\n")
        holder = {"engine.service": 100, "other.service": 200}[self.owner]
        descriptors = self.root / f"proc/{holder}/fd"
        descriptors.mkdir(exist_ok=True)
        if not (descriptors / "3").is_symlink():
            (descriptors / "3").symlink_to("socket:[777]")
        self.fake.arguments = {"tp_size": 4, "dtype": "float32", "enable_metrics": True, "attention_backend": "dsv4"}
        self.fake.kernels = self.kernels
        scripted = ScriptedSystemd({**RUNNING, "DropInPaths": self.drop_ins, **self.unit})
        host = Host(str(self.root), lambda _command: self.smi)
        return Reality(Client(self.fake.base_url), host, scripted.run)

    def library(self) -> str:
        return f"/opt/sglang/releases/{self.release}/venv/lib/python3.11/site-packages/torch/lib/libtorch.so"

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> t.Iterator[Machine]:
    with FakeServer() as fake:
        yield Machine(tmp_path, fake)


def row_of(report: dict[str, t.Any], id: str) -> dict[str, t.Any]:
    return next(row for row in report["checks"] if row["id"] == id)


def test_what_was_meant_runs(machine: Machine) -> None:
    report = drift_report(INTENT, machine.build())
    assert (report["failed"], report["skipped"], report["passed"]) == ([], [], 11)
    arguments = row_of(report, "drift.arguments")
    assert arguments["evidence"]["compared"] == ["dtype", "enable_metrics", "tp_size"]
    assert arguments["evidence"]["not_compared"] == ["api_key"]


EDITED = f"[Service]\nRestartSec=50\nNice=5\nEnvironment=OPS_CONFIG_SHA256={'a' * 64}\n"
DIFFERENCES: list[tuple[dict[str, t.Any], str, str]] = [
    ({"unit": {"NeedDaemonReload": "yes"}}, "drift.unit", "the unit file was changed and not loaded"),
    ({"unit": {"ActiveState": "deactivating"}}, "drift.unit", "the unit is not running"),
    ({"drop_ins": "/etc/systemd/system/engine.service.d/x.conf"}, "drift.unit", "engine.service.d/x.conf"),
    ({"edited": EDITED}, "drift.unit", "not as it was rendered, at RestartSec, Nice: site.yml writes it anew"),
    ({"environment": {"OPS_CONFIG_SHA256": "b" * 64}}, "drift.config", "restart it"),
    ({"environment": {"OPS_CONFIG_SHA256": ""}}, "drift.config", "restart it"),
    ({"on_disk": "b" * 64}, "drift.config", "restart it"),
    ({"owner": "other.service"}, "drift.port", "another server answers"),
    ({"release": "b"}, "drift.release", "another release"),
    ({"environment": {"SGLANG_X": "0"}}, "drift.environment", "another environment"),
    ({"environment": {"SGLANG_X": ""}}, "drift.environment", "another environment"),
    ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "drift.environment", "another environment"),
    ({"environment": {"DSV4_SM120_ON_MISMATCH": "stock"}}, "drift.environment", "another environment"),
    ({"environment": {"LD_PRELOAD": "/x.so"}}, "drift.environment", "another environment"),
    ({"deleted": " (deleted)"}, "drift.release", "files of the release were replaced under the running process"),
    ({"kernels": {"decode": [1, 0, 1, 1], "indexer": [1] * 4}}, "drift.kernels", "does the work of decode"),
    ({"kernels": {"decode": [1] * 4}}, "drift.kernels", "does the work of indexer"),
    ({"kernels": {"decode": [1] * 2, "indexer": [1] * 4}}, "drift.kernels", "is said of decode on TP2, TP3: those"),
    ({"kernels": {}}, "drift.kernels", "their plugin is not loaded"),
    ({"smi": (0, SMI + "200, 00000000:41:00.0, 900 MiB\n")}, "drift.gpus", "not the engine's"),
    ({"smi": (0, "")}, "drift.gpus", "no process of the engine"),
    ({"smi": (127, "not found")}, "drift.gpus", "nvidia-smi does not answer"),
]


VENDORS = [
    "/usr/lib/systemd/system/service.d/10-timeout-abort.conf",
    "/run/systemd/system/service.d/zzz-lxc-service.conf",
]
OTHERS = [
    "/etc/systemd/system/service.d/x.conf",
    "/run/systemd/system.control/engine.service.d/50-CPUQuota.conf",
    "/run/systemd/system/engine.service.d/x.conf",
]


def test_a_drop_in_of_somebody_is_named_and_one_of_the_system_is_not(machine: Machine) -> None:
    report = drift_report(INTENT, replace(machine, drop_ins=" ".join(VENDORS)).build())
    assert report["failed"] == []
    row = row_of(drift_report(INTENT, replace(machine, drop_ins=" ".join(VENDORS + OTHERS)).build()), "drift.unit")
    assert row["cause"] == f"drop-ins that are not part of the configuration: {', '.join(OTHERS)}"
    assert row["next_command"] == "systemctl cat engine.service"


@pytest.mark.parametrize(("changes", "id", "words"), DIFFERENCES)
def test_a_difference_on_the_host_is_seen_by_its_row(
    machine: Machine, changes: dict[str, t.Any], id: str, words: str
) -> None:
    report = drift_report(INTENT, replace(machine, **changes).build())
    assert report["failed"] == [id]
    assert words in row_of(report, id)["cause"]
    assert row_of(report, id)["next_command"]


@pytest.mark.parametrize(
    ("intent", "id", "seen"),
    [
        ({"arguments": {"tp-size": 8}, "kernels": ()}, "drift.arguments", "tp_size is 4, wanted 8"),
        ({"arguments": {"tp": 8}, "kernels": ()}, "drift.arguments", "tp_size is 4, wanted 8"),
        ({"arguments": {"no-such-thing": 8}}, "drift.arguments", "not reported: no_such_thing"),
        ({"server_info": {"attention_backend": "triton"}}, "drift.server_info", "is 'dsv4', wanted 'triton'"),
        ({"version": "0.5.24"}, "drift.version", "SGLang 0.5.23"),
        ({"min_total_tokens": 20000}, "drift.capacity", "16384 tokens of KV"),
    ],
)
def test_a_difference_in_the_server_is_seen_by_its_row(
    machine: Machine, intent: dict[str, t.Any], id: str, seen: str
) -> None:
    report = drift_report(replace(INTENT, **intent), machine.build())
    assert report["failed"] == [id]
    assert seen in row_of(report, id)["seen"]


def test_a_difference_is_shown_without_secrets(machine: Machine) -> None:
    machine.fake.api_key = "sk-of-the-server"
    machine.environment = {"HF_TOKEN": "hf_other", "NCCL_TOKEN": "nccl_secret"}
    text = json.dumps(drift_report(INTENT, machine.build()))
    assert "HF_TOKEN is (hidden), wanted (hidden)" in text
    for secret in ("sk-of", "sk-1", "hf_secret", "hf_other", "nccl_secret", "launch_command"):
        assert secret not in text


def test_without_a_process_the_other_rows_are_not_judged(machine: Machine) -> None:
    machine.unit = {"MainPID": "0", "ActiveState": "failed", "Result": "exit-code"}
    report = drift_report(replace(INTENT, gpus=False), machine.build())
    assert report["failed"] == ["drift.unit"]
    assert len(report["skipped"]) == 9
    assert "failed (running), result exit-code" in row_of(report, "drift.config")["cause"]


def test_a_silent_server_fails_the_rows_that_need_it(machine: Machine) -> None:
    reality = replace(machine.build(), client=Client("http://127.0.0.1:1"))
    report = drift_report(replace(INTENT, gpus=False), reality)
    named = ("kernels", "arguments", "server_info", "version", "capacity")
    assert report["failed"] == [f"drift.{name}" for name in named]
    assert "Connection refused after" in row_of(report, "drift.version")["cause"]


def test_only_what_is_named_is_compared(machine: Machine) -> None:
    report = drift_report(Intent(UNIT), machine.build())
    assert [row["id"] for row in report["checks"]] == ["drift.unit", "drift.config", "drift.port"]


def test_a_hash_of_the_intent_counts_more_than_that_of_the_unit_file(machine: Machine) -> None:
    report = drift_report(replace(INTENT, config_sha256="c" * 64), machine.build())
    assert report["failed"] == ["drift.config"]


def test_a_unit_file_without_a_hash_is_not_judged(machine: Machine) -> None:
    machine.on_disk = ""
    assert drift_report(Intent(UNIT), machine.build())["skipped"] == ["drift.config"]


@pytest.mark.parametrize(
    ("wanted", "seen", "equal"),
    [
        (8, "8", True),
        (0.85, "0.85", True),
        ("0.90", 0.9, True),
        (True, True, True),
        ("true", True, True),
        (True, 1, True),
        ("1", True, True),
        (0, False, True),
        (False, 1, False),
        (True, "yes", False),
        (float("nan"), 1.0, False),
        ("[" * 100_000, 1, False),
        (1, "[" * 100_000, False),
        ('{"a": 1}', '{"a":1}', True),
        ([1, 2], ["1", "2"], True),
        ([1], 1, True),
        ("float16", "float32", False),
        (4, None, False),
        ([1, 2], [1], False),
    ],
)
def test_values_that_mean_the_same(wanted: t.Any, seen: t.Any, equal: bool) -> None:
    assert same(wanted, seen) == equal


SAMPLE = 'dsv4_sm120_kernel_active{{kernel="decode",pp_rank="{}",tp_rank="{}"}} {}\n'
TWO = {"tp-size": 2}


@dataclass
class Saying:
    """A client whose server says one text, whatever it is asked."""

    text: str
    base_url: str = "http://127.0.0.1:1"

    def get(self, _path: str, _timeout: float) -> types.SimpleNamespace:
        return types.SimpleNamespace(body=self.text.encode())


@pytest.mark.parametrize(
    ("arguments", "text", "cause"),
    [
        (TWO, SAMPLE.format(0, 0, "1.0") + SAMPLE.format(0, 1, "1.0 1795997372000"), ""),
        (TWO, (SAMPLE.format(0, 0, "1.0") + SAMPLE.format(0, 1, 1)).replace("\n", "\r\n"), ""),
        (TWO, SAMPLE.format(0, 0, "1.0") + SAMPLE.format(0, 1, "abc"), "does the work of decode"),
        (TWO, SAMPLE.format(0, 0, "1.0") + SAMPLE.format(0, 1, "NaN"), "does the work of decode"),
        (TWO, SAMPLE.format(0, 0, "1.0") + SAMPLE.format(0, 0, "0.0"), "does the work of decode"),
        (TWO, SAMPLE.format(0, 0, "1.0"), "decode on TP1"),
        ({"tp": "2"}, SAMPLE.format(0, 1, "1.0"), "decode on TP0"),
        ({}, SAMPLE.format(0, 0, "1.0"), ""),
        ({"tp-size": 1, "pp-size": 2}, SAMPLE.format(0, 0, "1.0"), "decode on PP1 TP0"),
        ({"tp-size": 1, "pp-size": 2}, SAMPLE.format(0, 0, "1.0") + SAMPLE.format(1, 0, "1.0"), ""),
    ],
)
def test_each_rank_must_say_that_a_kernel_is_active(arguments: dict[str, t.Any], text: str, cause: str) -> None:
    intent, state = Intent(UNIT, arguments, kernels=("decode",)), systemd.show(UNIT, ScriptedSystemd(RUNNING).run)
    row = kernels_row(intent, state, Reality(t.cast(Client, Saying(text))))
    assert row.ok == (not cause)
    assert cause in row.cause


@pytest.mark.parametrize("text", [',kernel="a"' * 100_000, "a" * 1_000_000, "\ndsv4_sm120_kernel_active{" * 50_000])
def test_odd_metrics_take_no_time(text: str) -> None:
    start = time.process_time()
    assert not list(samples(f"{KERNEL_ACTIVE}{{{text}", (KERNEL_ACTIVE,)))
    assert time.process_time() - start < 5.0  # it takes 0.1 s; where it grows with the square, minutes


class OneBody(http.server.BaseHTTPRequestHandler):
    """Answers every request with the server's text."""

    def do_GET(self) -> None:
        body = self.server.text.encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: t.Any) -> None:
        """Not to stderr."""


@pytest.mark.parametrize(
    ("text", "cause"),
    [("api_key=sk-s3cr3t", "the answer is not JSON"), ("[" * 100_000, "nested too deeply")],
)
def test_a_report_that_cannot_be_read_is_not_quoted(machine: Machine, text: str, cause: str) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), OneBody) as server:
        server.text = text  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_address[1]}")
        report = drift_report(Intent(UNIT, version="0.5.23"), replace(machine.build(), client=client))
        server.shutdown()
    assert cause in row_of(report, "drift.version")["cause"]
    assert "s3cr3t" not in json.dumps(report)


def test_values_of_others_are_shown_bounded_and_in_one_line(machine: Machine) -> None:
    reality = machine.build()
    machine.fake.arguments |= {"dtype": "x" * 5000, "device": "a\x1b[2J\nb", "note": "--api-key sk-s3cr3t"}
    intent = Intent(UNIT, {"dtype": "float32", "device": "cuda", "note": "none"})
    seen = row_of(drift_report(intent, reality), "drift.arguments")["seen"]
    assert len(seen) < 800
    assert "a\\x1b[2J\\nb" in seen
    assert "s3cr3t" not in seen


@pytest.mark.parametrize(
    ("name", "steers"),
    [
        ("NCCL_P2P_LEVEL", True),
        ("DSV4_SM120_SELF_CHECK", True),
        ("TORCH_NCCL_BLOCKING_WAIT", True),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("TRITON_INTERPRET", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("CUDNN_LOGLEVEL_DBG", True),
        ("GLOO_SOCKET_IFNAME", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("LD_PRELOAD", True),
        ("LD_LIBRARY_PATH", True),
        ("PYTHONPATH", True),
        ("NVIDIA_VISIBLE_DEVICES", False),
        ("PYTHONUNBUFFERED", False),
        ("XDG_CACHE_HOME", False),
    ],
)
def test_variables_that_steer_the_engine(name: str, steers: bool) -> None:
    assert bool(ENGINE_VARIABLES.match(name)) == steers


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "no unit"),
        ({"unit": "x", "argument": {}}, "the intent has argument"),
        ({"unit": 5}, "unit is 5, wanted a text"),
        ({"unit": "x", "arguments": []}, r"arguments is \[\], wanted a mapping"),
        ({"unit": "x", "kernels": "decode"}, "kernels is 'decode', wanted a list of texts"),
        ({"unit": "x", "neighbours": [1]}, "neighbours is .1., wanted a list of texts"),
        ({"unit": "x", "min_total_tokens": "8"}, "min_total_tokens is '8', wanted a whole number"),
        ({"unit": "x", "gpus": "no"}, "gpus is 'no', wanted true or false"),
        ({"unit": "x", "environment": {"A": None}}, "environment: A is not set, wanted a single value"),
        ({"unit": "x", "environment": {"HF_TOKEN": ["s"]}}, "HF_TOKEN is .hidden., wanted a single value"),
    ],
)
def test_an_unusable_intent_is_refused(data: dict[str, t.Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        intent_of(data)


# The module


def drift(
    run_module: RunModule, machine: Machine, intent: dict[str, t.Any], check: bool = False, **options: t.Any
) -> dict[str, t.Any]:
    reality = machine.build()

    def patch(module: types.ModuleType) -> None:
        module.Reality = functools.partial(module.Reality, host=reality.host, runner=reality.runner)

    given = {"intent": {"unit": UNIT, **intent}, "base_url": machine.fake.base_url, **options}
    return run_module("sglang_drift", given, check, patch)


def test_sglang_drift_reports(run_module: RunModule, machine: Machine, tmp_path: Path) -> None:
    result = drift(run_module, machine, {"arguments": {"tp-size": 4}}, report_path=str(tmp_path / "drift.json"))
    assert (result["changed"], result["report"]["ok"]) == (False, True)
    assert result["summary"].startswith("4 of 4 checks passed in ")
    assert json.loads((tmp_path / "drift.json").read_text()) == result["report"]


def test_sglang_drift_fails_and_names_the_difference(run_module: RunModule, machine: Machine) -> None:
    result = drift(run_module, machine, {"arguments": {"tp-size": 8}})
    assert result["failed"]
    assert "1 of 4 checks failed at http://127.0.0.1" in result["msg"]
    assert "tp_size is 4, wanted 8" in result["msg"]
    assert f'next command: curl -sS -m 60 {machine.fake.base_url}/server_info | grep -oE \'"(tp_size)"' in result["msg"]


def test_sglang_drift_in_check_mode_never_fails(run_module: RunModule, machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "drift.json"
    result = drift(run_module, machine, {"arguments": {"tp-size": 8}}, check=True, report_path=str(path))
    assert not result.get("failed")
    assert result["report"]["failed"] == ["drift.arguments"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("intent", "options", "words"),
    [
        ({}, {"base_url": "nonsense"}, "not an http"),
        ({}, {"api_key_file": "/nonexistent"}, "cannot read the API key from /nonexistent"),
        ({"min_total_tokens": "many"}, {}, "min_total_tokens is 'many', wanted a whole number"),
        ({"kernel": ["decode"]}, {}, "the intent has kernel; known are"),
        ({}, {"report_path": "/nonexistent/x.json"}, "/nonexistent/x.json: No such file"),
    ],
)
def test_sglang_drift_refuses_bad_arguments(
    run_module: RunModule, machine: Machine, intent: dict[str, t.Any], options: dict[str, t.Any], words: str
) -> None:
    result = drift(run_module, machine, intent, **options)
    assert result["failed"]
    assert words in result["msg"]
