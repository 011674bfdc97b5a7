# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers taken out of the real sglang-router and put back while they answer. They are small stand-ins."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import typing as t
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ops.engine_load import watch_idle
from ops.http import Client, HttpError
from ops.router import ABSENT, PRESENT, RouterError, set_worker, workers

KEY = "0123456789abcdef-of-the-router"
PIECES = 20
# A little longer than the router needs to choose a server.
PIECE_S = 0.1


class Server(ThreadingHTTPServer):
    """Answers like SGLang, PIECES pieces at PIECE_S each.

    running: how many it is answering; asked: how many it got; keys: with what it was asked about itself.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.running = self.asked = 0
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: t.Any) -> None:
        pass

    def do_GET(self) -> None:
        load = {"num_used_tokens": 0, "num_running_reqs": self.server.running, "num_waiting_reqs": 0}
        if self.path == "/server_info":
            self.server.keys.add(self.headers.get("Authorization"))
        info = {"model_path": "m", "served_model_name": "m", "is_generation": True, "tp_size": 1, "dp_size": 1}
        self.answer({"loads": [load]} if self.path == "/v1/loads" else info)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.running += 1
            self.server.asked += 1
        if request.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(PIECES):
                self.piece(json.dumps({"choices": [{"delta": {"content": f"{number} "}}]}))
                time.sleep(PIECE_S)
            self.piece("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        else:
            time.sleep(PIECES * PIECE_S)
            self.answer({"choices": [{"message": {"content": self.server.url}}]})
        with self.server.lock:
            self.server.running -= 1

    def piece(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def answer(self, value: t.Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def servers() -> list[Server]:
    return [Server(), Server()]


@pytest.fixture(scope="module")
def router(engine_python: str, servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The real router in front of both, as roles/sglang_router starts it."""
    port = free_port()
    words = [engine_python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--api-key", KEY]
    words += ["--policy", "round_robin", "--health-check-endpoint", "/ready", "--log-level", "warn"]
    words += ["--worker-urls", *(server.url for server in servers)]
    with (tmp_path_factory.mktemp("router") / "log").open("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        client = Client(f"http://127.0.0.1:{port}", KEY)
        try:
            deadline = time.monotonic() + 60
            while not healthy(client):
                assert process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()[-2000:]
                time.sleep(0.2)
            assert [server.keys for server in servers] == 2 * [{f"Bearer {KEY}"}]
            yield client
        finally:
            process.kill()
            process.wait()


def healthy(client: Client) -> bool:
    try:
        return [one.healthy for one in workers(client)] == [True, True]
    except HttpError:
        return False


@pytest.fixture(autouse=True)
def _both_in(router: Client, servers: list[Server]) -> None:
    for server in servers:
        set_worker(router, server.url, PRESENT)


def ask(router: Client, stream: bool) -> bool:
    """Ask through the router; whether the whole answer came."""
    request = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": stream}
    if not stream:
        return bool(router.post_json("/v1/chat/completions", request)["choices"])
    return len(list(router.post_sse("/v1/chat/completions", request))) == PIECES + 1


def test_what_a_server_is_answering_goes_on_and_nothing_new_reaches_it(router: Client, servers: list[Server]) -> None:
    first, second = servers
    with ThreadPoolExecutor(max_workers=16) as pool:
        before = [pool.submit(ask, router, number % 2 == 0) for number in range(8)]
        while sum(server.running for server in servers) < len(before):
            time.sleep(0.01)
        assert first.running and second.running
        outcome = set_worker(router, first.url, ABSENT, others=[second.url])
        assert (outcome.changed, outcome.reason) == (True, f"{first.url} is out of the router")
        got = first.asked
        assert first.running  # so the router did not wait for them, and did not end them
        after = [pool.submit(ask, router, number % 2 == 0) for number in range(8)]
        watched = watch_idle(Client(first.url), 30, settle=0.3)
        assert (watched.held, first.running) == (True, 0)
        assert all(one.result() for one in before + after)
    assert first.asked == got
    assert set_worker(router, first.url, PRESENT).changed
    with ThreadPoolExecutor(max_workers=8) as pool:
        assert all(pool.map(lambda _number: ask(router, False), range(8)))
    assert first.asked > got


def test_a_second_time_changes_nothing(router: Client, servers: list[Server]) -> None:
    url = servers[0].url
    assert [set_worker(router, url, ABSENT).changed for _time in range(2)] == [True, False]
    assert [set_worker(router, url, PRESENT).changed for _time in range(2)] == [True, False]


def test_check_mode_says_and_does_not(router: Client, servers: list[Server]) -> None:
    url = servers[0].url
    assert set_worker(router, url, ABSENT, check=True).changed
    assert url in {one.url for one in workers(router)}
    set_worker(router, url, ABSENT)
    assert set_worker(router, url, PRESENT, check=True).changed
    assert url not in {one.url for one in workers(router)}


def test_the_last_one_that_answers_stays(router: Client, servers: list[Server]) -> None:
    first, second = (server.url for server in servers)
    set_worker(router, first, ABSENT, others=[second])
    with pytest.raises(RouterError, match="is the only server that the router has left"):
        set_worker(router, second, ABSENT, others=[first])
    assert second in {one.url for one in workers(router)}
    # Where no other is meant to be, there is nobody to wait for.
    assert set_worker(router, second, ABSENT).changed


def test_a_server_that_does_not_answer_is_not_called_back(router: Client) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RouterError, match=r"is not healthy there after 0\.5 s"):
        set_worker(router, url, PRESENT, timeout=0.5)


def test_a_router_that_does_not_run_has_nobody() -> None:
    outcome = set_worker(Client(f"http://127.0.0.1:{free_port()}"), "http://127.0.0.1:1", ABSENT)
    assert (outcome.changed, "does not run" in outcome.reason) == (False, True)


def test_the_budget_of_a_drain_ends(servers: list[Server]) -> None:
    servers[0].running += 1
    try:
        watched = watch_idle(Client(servers[0].url), 0.5)
    finally:
        servers[0].running -= 1
    assert (watched.held, watched.last.running) == (False, 1)


def test_the_module(router: Client, servers: list[Server], run_module: t.Callable[..., dict], tmp_path: Path) -> None:
    first, second = (server.url for server in servers)
    arguments = {"router_url": router.base_url, "url": first, "others": [second], "state": "absent"}
    refused = run_module("sglang_router_worker", {**arguments, "api_key_file": str(tmp_path / "none")})
    assert refused["failed"]
    assert "status 401" in refused["msg"] and refused["next_command"] in refused["msg"]
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    arguments["api_key_file"] = str(key)
    assert run_module("sglang_router_worker", arguments, True)["changed"]
    assert run_module("sglang_router_worker", arguments)["reason"] == f"{first} is out of the router"
    assert not run_module("sglang_router_worker", arguments)["changed"]
    servers[0].keys.clear()
    last = run_module("sglang_router_worker", {**arguments, "url": second, "others": [first]})
    assert last["failed"] and "the only server" in last["msg"]
    assert KEY not in json.dumps([refused, last])
    assert run_module("sglang_router_worker", {**arguments, "state": "present"})["changed"]
    assert servers[0].keys == {f"Bearer {KEY}"}
    assert KEY not in json.dumps(router.get_json("/workers"))


def test_the_module_that_waits(servers: list[Server], run_module: t.Callable[..., dict]) -> None:
    idle = run_module("sglang_drain", {"base_url": servers[0].url, "timeout": 10})
    assert (idle["drained"], idle["changed"]) == (True, False)
    servers[0].running += 1
    try:
        busy = run_module("sglang_drain", {"base_url": servers[0].url, "timeout": 0.3})
    finally:
        servers[0].running -= 1
    assert (busy["drained"], busy["running"]) == (False, 1)
    assert "1 requests running" in busy["msg"]
    gone = run_module("sglang_drain", {"base_url": f"http://127.0.0.1:{free_port()}", "timeout": 10})
    assert (gone["drained"], "failed" in gone) == (False, False)
