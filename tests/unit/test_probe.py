# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest
from openai_server import FakeServer
from ops import probe
from ops.http import Client
from ops.listeners import foreign_listener
from ops.openai import chat
from ops.preflight import Host
from ops.probe import Answer, Capacity, ask, ask_unit, capacity, main, wait_until_answering

ROOT = Path(__file__).parents[2]


def started_process(*words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "module_utils")}
    return subprocess.Popen(
        [sys.executable, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    ("fault", "ok", "words"),
    [
        ("none", True, "one token generated in"),
        ("empty", True, "one token generated in"),
        ("not_ready", False, "the port is open, the engine says it is not ready (503)"),
        ("shallow_health", False, "status 503"),
        ("error_object", False, "status 200 with an error object"),
        ("not_json", False, "the answer is not JSON"),
        ("no_usage", False, "completion_tokens=None, wanted at least 1"),
        ("zero_usage", False, "completion_tokens=0, wanted at least 1"),
        ("hang", False, "no complete answer within 0.5 s"),
    ],
)
def test_one_look(fault: str, ok: bool, words: str) -> None:
    with FakeServer(fault, start_seconds=60) as fake:
        answer = ask(Client(fake.base_url), timeout=0.5)
    assert answer.ok == ok
    assert words in answer.detail


@pytest.mark.parametrize(("side", "sent"), [(False, {}), (True, {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0})])
def test_one_side_is_asked_without_the_other(monkeypatch: pytest.MonkeyPatch, side: bool, sent: dict) -> None:
    payloads = []
    monkeypatch.setattr(probe, "chat", lambda client, payload, **_: payloads.append(payload) or chat(client, payload))
    with FakeServer() as fake:
        assert ask(Client(fake.base_url), side=side).ok
    assert {name: value for name, value in payloads[0].items() if name.startswith("bootstrap")} == sent


def test_a_closed_port() -> None:
    assert ask(Client("http://127.0.0.1:1")).detail == "nothing listens on the port yet"


def test_capacity_of_a_server_holds_nothing_else() -> None:
    with FakeServer() as fake:
        fake.api_key = "sk-secret"
        seen = capacity(Client(fake.base_url))
    assert seen == Capacity("fake-model", 16384, 8192, 8, "0.5.23")


def test_capacity_has_the_windows_pool_and_the_weights() -> None:
    memory = {"weight": 39.83, "kvcache": 39.2, "token_capacity": 16384, "token_capacity_swa": 1536, "graph": {}}
    with FakeServer() as fake:
        fake.arguments = {"internal_states": [{"memory_usage": memory, "env_vars": {"KEY": "sk-secret"}}]}
        seen = capacity(Client(fake.base_url))
    assert (seen.max_total_num_tokens_swa, seen.weight_memory_usage_gb) == (1536, 39.83)
    assert "sk-secret" not in repr(seen)


@pytest.mark.parametrize(
    "states",
    [
        None,
        [],
        [None],
        {"memory_usage": {"weight": 1.0}},
        [{"memory_usage": None}],
        [{"memory_usage": {"weight": 0, "token_capacity_swa": None}}],
        [{"memory_usage": {"weight": True, "token_capacity_swa": "1536"}}],
    ],
)
def test_capacity_without_a_window_or_a_size_that_can_be_meant(states: object) -> None:
    with FakeServer() as fake:
        fake.arguments = {"internal_states": states}
        assert capacity(Client(fake.base_url)) == Capacity("fake-model", 16384, 8192, 8, "0.5.23")


def test_capacity_of_a_server_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capacity(Client("http://127.0.0.1:1")) == Capacity()
    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr(client, "get_json", lambda *_args: {"data": [], "max_total_num_tokens": True})
    assert capacity(client) == Capacity()


@pytest.mark.parametrize(
    ("total", "context", "words"),
    [
        (8192, 8192, "8192 tokens of KV: 1 request of 8k tokens, or 16 requests of 512 tokens"),
        (16384, 8192, "16384 tokens of KV: 2 requests of 8k tokens, or 32 requests of 512 tokens"),
        (
            2580480,
            524288,
            "2580480 tokens of KV: 4 requests of 512k tokens, or 315 requests of 8k tokens",
        ),
        (
            300000,
            524288,
            "300000 tokens of KV: no request of the full context (512k tokens), the longest is 300000 tokens, "
            "or 36 requests of 8k tokens",
        ),
        (4096, 256, "4096 tokens of KV: 16 requests of 256 tokens"),
        (4096, None, "4096 tokens of KV: 8 requests of 512 tokens"),
        (None, 8192, "the server does not report its KV capacity"),
    ],
)
def test_capacity_in_words(total: int | None, context: int | None, words: str) -> None:
    assert Capacity("m", total, context).words() == words


def test_no_more_requests_run_than_the_scheduler_admits() -> None:
    seen = Capacity("m", 8192, 8192, 8).words()
    assert seen.endswith(
        "1 request of 8k tokens, or 8 requests of 512 tokens (max_running_requests; the pool holds 16)"
    )


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait(base_url: str, timeout: float, main_pid: int | None = None) -> tuple[int, list[str], float]:
    said: list[str] = []
    time_ = Time()
    status = wait_until_answering(Client(base_url), timeout, main_pid, said.append, time_.clock, time_.sleep)
    return status, said, time_.now


def test_the_probe_ends_with_the_first_answer() -> None:
    with FakeServer() as fake:
        status, said, took = wait(fake.base_url, 600)
    assert (status, took) == (0, 0)
    assert said == [line for line in said if line.startswith("ready after 0 s: one token generated")]
    assert "2 requests of 8k tokens" in said[0]


def test_the_probe_shows_progress_and_gives_up_in_time() -> None:
    status, said, took = wait("http://127.0.0.1:1", 100)
    assert status == 1
    assert 98 <= took <= 100
    assert len(said) == 8, "one line now, one every 15 s, one at the end"
    assert said[0] == "waiting for http://127.0.0.1:1, 0 s: nothing listens on the port yet"
    assert said[-1].startswith("not ready: no answer from http://127.0.0.1:1 within 100 s; last seen: nothing listens")


def test_the_probe_ends_when_the_main_process_is_gone() -> None:
    with started_process("-c", "pass") as process:
        process.communicate()
    status, said, took = wait("http://127.0.0.1:1", 600, process.pid)
    assert (status, took) == (1, 0)
    assert f"the main process {process.pid} is gone" in said[0]


def test_the_probe_as_a_command() -> None:
    with (
        FakeServer("not_ready", start_seconds=1.5) as fake,
        started_process("-m", "ops.probe", "--url", fake.base_url, "--timeout", "20") as process,
    ):
        output = process.communicate(timeout=30)[0]
    assert process.returncode == 0, output
    lines = output.splitlines()
    assert "not ready (503)" in lines[0]
    assert lines[-1].startswith("ready after ")


def test_the_probe_with_a_key_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    with FakeServer() as fake:
        fake.api_key = "sk-secret"
        assert main(["--url", fake.base_url, "--timeout", "5", "--api-key-file", str(key)]) == 0
        assert main(["--url", fake.base_url, "--timeout", "1"]) == 1
    output = capsys.readouterr().out
    assert "status 401" in output
    assert "sk-secret" not in output


@pytest.mark.parametrize(
    "arguments", [[], ["--url", "nonsense"], ["--url", "http://h", "--api-key-file", "/nonexistent"]]
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.fixture
def other_server() -> t.Iterator[subprocess.Popen[str]]:
    """The fake server in a process of its own; its port is the last word of its command line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = started_process(str(ROOT / "tests" / "fakes" / "openai_server.py"), "--port", str(port))
    end = time.monotonic() + 20
    while ask(Client(f"http://127.0.0.1:{port}")).status != 200 and time.monotonic() < end:
        time.sleep(0.05)
    with process:
        yield process
        process.kill()


def test_an_answer_of_another_process_does_not_count(other_server: subprocess.Popen[str]) -> None:
    port = int(t.cast("list[str]", other_server.args)[-1])
    client = Client(f"http://127.0.0.1:{port}")
    assert ask_unit(client, other_server.pid).ok
    answer = ask_unit(client, os.getpid())
    assert not answer.ok
    assert answer.detail.startswith(f"port {port} is held by process {other_server.pid} (python")
    assert ask_unit(client, None).ok, "without a main process nobody can tell"


def test_a_refused_key_ends_the_wait_for_the_unit_that_refuses_it() -> None:
    with FakeServer() as fake:
        fake.api_key = "sk-of-the-server"
        status, said, took = wait(fake.base_url, 600, os.getpid())
        assert (status, took) == (1, 0)
        assert said[0].startswith("not ready: the server refuses the API key after 0 s; last seen: ")
        assert "status 401" in said[0]


def test_a_refusal_of_another_process_does_not_count(other_server: subprocess.Popen[str], monkeypatch) -> None:
    monkeypatch.setattr(probe, "ask", lambda *_: Answer(probe.STARTING, "status 401", 401))
    client = Client(f"http://127.0.0.1:{t.cast('list[str]', other_server.args)[-1]}")
    assert ask_unit(client, os.getpid()).state == probe.STARTING
    assert ask_unit(client, other_server.pid).state == probe.REFUSED


LISTENING = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7531 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0 100 0 0 10 0
"""
OURS = "0::/system.slice/sglang-unified.service\n"


def process(root: Path, pid: int, name: str, cgroup: str, inode: int | None) -> None:
    directory = root / "proc" / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "cgroup").write_text(cgroup)
    (directory / "comm").write_text(name + "\n")
    (directory / "fd" / "0").symlink_to("/dev/null")
    if inode:
        (directory / "fd" / "7").symlink_to(f"socket:[{inode}]")


@pytest.mark.parametrize(
    ("cgroup", "inode", "table", "words"),
    [
        pytest.param(OURS, 4242, LISTENING, None, id="a worker of the unit"),
        pytest.param("0::/system.slice/old.service\n", 4242, LISTENING, "process 9 (python3, old.service)", id="other"),
        pytest.param("0::/user.slice\n", 4242, LISTENING, "process 9 (python3)", id="no unit"),
        pytest.param(OURS, None, LISTENING, "a process of another user", id="not visible"),
        pytest.param(OURS, None, "", None, id="nothing listens here"),
    ],
)
def test_the_owner_of_a_port(tmp_path: Path, cgroup: str, inode: int | None, table: str, words: str | None) -> None:
    process(tmp_path, 5, "python3", OURS, None)
    process(tmp_path, 9, "python3", cgroup, inode)
    (tmp_path / "proc" / "net").mkdir()
    (tmp_path / "proc" / "net" / "tcp").write_text(table)
    found = foreign_listener(30001, 5, Host(str(tmp_path)))
    assert found == (words and f"port 30001 is held by {words}, not by this unit")


def test_an_owner_that_nobody_could_see_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "tcp6").write_text(LISTENING)
    assert foreign_listener(30001, 5, Host(str(tmp_path))) is None


def test_capacity_is_json() -> None:
    assert json.loads(json.dumps(vars(Capacity("m", 1)))) == {
        "model": "m",
        "max_total_num_tokens": 1,
        "context_length": None,
        "max_running_requests": None,
        "version": None,
        "max_total_num_tokens_swa": None,
        "weight_memory_usage_gb": None,
    }
