# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
import typing as t
from pathlib import Path

import pytest
from openai_server import FakeServer
from ops import http
from ops.http import Client, HttpError, fields_command, parse_json, read_token, sse_data

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = (
    'data: {"a": 1}\n\nevent: x\ndata: Stra\u00dfe \u6771\u4eac \U0001f5fc\r\n\r\n: comment\n\ndata: one\ndata: two\n\n'
).encode()
EXPECTED = ['{"a": 1}', "Stra\u00dfe \u6771\u4eac \U0001f5fc", "one\ntwo"]


@pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
def test_events_are_the_same_wherever_the_body_is_cut(cut: int) -> None:
    assert list(sse_data([EVENTS[:cut], EVENTS[cut:]])) == EXPECTED


def test_events_arrive_byte_by_byte() -> None:
    assert list(sse_data(EVENTS[i : i + 1] for i in range(len(EVENTS)))) == EXPECTED


def test_an_event_without_its_end_is_not_yielded() -> None:
    assert list(sse_data([b"data: whole\n\ndata: cut"])) == ["whole"]


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n"])
@pytest.mark.parametrize("bytewise", [False, True])
def test_events_with_any_line_end_and_a_byte_order_mark(end: bytes, bytewise: bool) -> None:
    body = b"\xef\xbb\xbf" + end.join([b"data: one", b"data: two", b"", b"data: three", b"", b""])
    assert list(sse_data([body[i : i + 1] for i in range(len(body))] if bytewise else [body])) == ["one\ntwo", "three"]


@pytest.mark.parametrize("end", ["data: [DONE]", "data: [DONE]\n", "data: [DONE] \n\n", "data:[DONE]\r\r"])
def test_the_end_of_a_stream_needs_no_blank_line(end: str) -> None:
    assert [data.strip() for data in sse_data([b"data: one\n\n", end.encode()])] == ["one", "[DONE]"]


def test_a_line_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_LINE_BYTES", 1 << 20)
    answer = OK + b"\r\ndata: " + b"x" * (2 << 20)
    with RawServer(answer) as server, pytest.raises(HttpError, match="a line of the stream is longer") as caught:
        list(Client(server.url, timeout=5).post_sse("/", None))
    assert caught.value.kind == "body"


def test_a_line_in_pieces_of_one_byte_takes_no_time() -> None:
    line = b"data: " + b"x" * 1_000_000
    start = time.process_time()
    assert len(list(sse_data(line[i : i + 1] for i in range(len(line))))) == 0
    assert time.process_time() - start < 10  # searched from its start each time: many minutes


@pytest.mark.parametrize("stream", [False, True])
def test_a_sender_of_small_pieces_without_end_is_ended_in_time(stream: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with RawServer(head + b"1\r\nx\r\n" * 4_000_000) as server:
        client = Client(server.url, timeout=1.0)
        start = time.monotonic()
        with pytest.raises(HttpError) as caught:
            list(client.post_sse("/", None)) if stream else client.get("/")
    assert caught.value.kind == "timeout"
    assert time.monotonic() - start < 2.5


def test_the_limit_is_for_all_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the connections: the listeners have no place for one more."""
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", 0)
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            listener = stack.enter_context(socket.create_server((host, address[1]), backlog=0))
            address = listener.getsockname()
            for _ in range(4):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(address)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", address[1])) for last in (1, 2, 3)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
        start = time.monotonic()
        with pytest.raises(HttpError, match="no complete answer") as caught:
            Client(f"http://many:{address[1]}").get("/health", 0.9)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - start < 1.7


def test_the_next_address_of_a_name_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(OK + b"\r\n{}") as server:
        port = int(server.url.rsplit(":", 1)[1])
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (2, 1)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
        assert Client(f"http://many:{port}", timeout=5).get_json("/") == {}


def test_a_body_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1 << 20)
    answer = OK + b"\r\n" + b" " * (2 << 20)
    with RawServer(answer) as server, pytest.raises(HttpError, match="the answer is longer than 1 MiB"):
        Client(server.url, timeout=5).get_json("/")


def test_reason_phrases_are_cut() -> None:
    answer = b"HTTP/1.1 500 " + b"A" * 5000 + b"\r\nContent-Length: 0\r\n\r\n"
    with RawServer(answer) as server, pytest.raises(HttpError) as caught:
        Client(server.url, timeout=5).get("/")
    assert len(caught.value.detail) == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested too deeply"),
        ("[" * 200 + "]" * 200, "nested too deeply"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ("-Infinity", "-Infinity is no JSON number"),
        ('"\\ud83d"', "half a character"),
        ('{"\\udc00": 1}', "half a character"),
        ('"Paris \ud83d"', "half a character"),
        ('{"a": 1, "b": [{"c": 1, "c": 2}]}', "a name twice"),
        ('{"a": 1, "\\u0061": 1}', "a name twice"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_breaks_others_is_refused(text: str, words: str) -> None:
    for given in (text, text.encode(errors="surrogatepass")):
        with pytest.raises(ValueError, match=words):
            parse_json(given)


@pytest.mark.parametrize("given", ['{"a": 1}'.encode("utf-16"), b'{"a": "\xff"}'])
def test_bytes_of_another_encoding_are_refused(given: bytes) -> None:
    with pytest.raises(ValueError, match="not UTF-8"):
        parse_json(given)


def test_json_that_only_looks_strange_is_read() -> None:
    assert parse_json('"\\ud83d\\uddfc"') == "\U0001f5fc"
    assert parse_json(b'\xef\xbb\xbf{"a": [[[1]]]}') == {"a": [[[1]]]}
    assert len(parse_json("[" + ",".join(["{}"] * 500) + "]")) == 500


KEY = 'sk-"secret-and-long'


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 401 no " + KEY.encode() + b"\r\n\r\n" + KEY.encode(),
        b"HTTP/1.1 401 no\r\n\r\n" + b"x" * 195 + KEY.encode(),
        OK + b"\r\n" + KEY.encode(),
        OK + b"X-Key: " + KEY.encode() + b"\r\n\r\n" + json.dumps({"key": KEY}).encode(),
        OK + b"\r\ndata: " + json.dumps({"key": KEY}).encode() + b"\n\n",
    ],
)
def test_a_key_that_the_server_repeats_is_not_shown(answer: bytes) -> None:
    shown = []
    with RawServer(answer) as server:
        client = Client(server.url, KEY, timeout=5)
        for call in (client.get, client.get_json, lambda path: list(client.post_sse(path, None))):
            try:
                shown.append(repr(call("/")))
            except HttpError as error:
                shown.append(repr(error) + error.body)
    assert "***" in str(shown)
    assert "secret" not in str(shown)
    assert "sk-" not in str(shown)


def test_a_key_that_comes_in_two_pieces_is_not_shown() -> None:
    body = b'{"error": "bad key: sk-secret-and-long"}'
    head = b"HTTP/1.1 401 no\r\nContent-Length: %d\r\n\r\n" % len(body)
    cut = (head + body).index(b"-and-long")
    with RawServer(head + body, pause=0.2, step=cut) as server, pytest.raises(HttpError) as caught:
        Client(server.url, "sk-secret-and-long", timeout=5).get("/")
    assert caught.value.body == '{"error": "bad key: ***"}'


@pytest.mark.parametrize("pause", [0.0, 5.0])
def test_an_error_that_breaks_off_inside_the_key_is_shown_without_it(pause: float) -> None:
    answer = b"HTTP/1.1 401 no\r\nContent-Length: 99\r\n\r\nbad key: sk-secret-a"
    with RawServer(answer, pause) as server, pytest.raises(HttpError) as caught:
        Client(server.url, "sk-secret-and-long", timeout=0.5).get("/")
    assert (caught.value.status, caught.value.body) == (401, "bad key: ***")
    assert caught.value.elapsed_s < 3


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_a_key_in_another_encoding_is_not_shown(encoding: str) -> None:
    answer = b"HTTP/1.1 401 no\r\n\r\n" + "bad key: sk-secret-and-long".encode(encoding)
    with RawServer(answer) as server, pytest.raises(HttpError) as caught:
        Client(server.url, "sk-secret-and-long", timeout=5).get("/")
    assert caught.value.body.endswith("bad key: ***")


class RawServer:
    """Sends prepared bytes to each connection after its request, then closes."""

    def __init__(self, answer: bytes, pause: float = 0.0, step: int = 0) -> None:
        self.answer, self.pause, self.step = answer, pause, step
        self.requests: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self) -> RawServer:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _address = self.listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(connection.recv(65536))
                step = self.step or len(self.answer)
                try:
                    for start in range(0, len(self.answer), max(1, step)):
                        connection.sendall(self.answer[start : start + step])
                        time.sleep(self.pause)
                except OSError:
                    pass


@pytest.mark.parametrize(
    ("answer", "kind", "status", "words"),
    [
        pytest.param(b"", "truncated", None, "before an answer", id="closed at once"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", "body", None, "not HTTP", id="another protocol"),
        pytest.param(
            OK + b'Content-Length: 50\r\n\r\n{"a"', "truncated", 200, "46 bytes before the end", id="short body"
        ),
        pytest.param(
            OK + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n', "truncated", 200, "inside", id="short chunks"
        ),
        pytest.param(OK + b"Content-Length: 5\r\n\r\nhello", "body", 200, "not JSON", id="no JSON"),
        pytest.param(
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 400\r\n\r\n" + b"x" * 400,
            "status",
            500,
            "status 500 Internal Server Error",
            id="status 500",
        ),
        pytest.param(
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            "status",
            302,
            "status 302",
            id="a redirect is not followed",
        ),
    ],
)
def test_failures_have_a_kind_and_the_evidence(answer: bytes, kind: str, status: int | None, words: str) -> None:
    with RawServer(answer) as server, pytest.raises(HttpError) as caught:
        Client(server.url, timeout=5).get_json("/path")
    error = caught.value
    assert (error.kind, error.status) == (kind, status)
    assert words in str(error)
    assert f"GET {server.url}/path" in str(error)
    assert 0 <= error.elapsed_s < 5
    assert len(error.body) <= 200


def test_a_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(HttpError, match="Connection refused") as caught:
        Client(f"http://127.0.0.1:{port}", timeout=5).get("/")
    assert caught.value.kind == "connect"


def test_an_unknown_name() -> None:
    with pytest.raises(HttpError) as caught:
        Client("http://name.invalid:1", timeout=5).get("/")
    assert caught.value.kind == "connect"


def test_the_limit_is_for_the_whole_answer_not_for_one_read() -> None:
    body = b"{" + b" " * 200 + b"}"
    answer = OK + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with RawServer(answer, pause=0.05, step=1) as server:
        start = time.monotonic()
        with pytest.raises(HttpError, match=r"no complete answer within 0\.5 s") as caught:
            Client(server.url, timeout=0.5).get_json("/")
    assert caught.value.kind == "timeout"
    assert 0.4 < time.monotonic() - start < 5  # reading it all takes 11 s


def test_a_streamed_answer_that_never_ends_is_ended() -> None:
    with FakeServer("slow_trickle") as fake:
        payload = {"messages": [{"role": "user", "content": "capital of France"}], "stream": True}
        with pytest.raises(HttpError) as caught:
            list(Client(fake.base_url, timeout=0.5).post_sse("/v1/chat/completions", payload))
    assert caught.value.kind == "timeout"


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with FakeServer() as fake:
        assert Client(fake.base_url).get("/health").status == 200


def test_the_token_is_sent_and_never_shown() -> None:
    with FakeServer() as fake:
        fake.api_key = "right"
        client = Client(fake.base_url, token="wrong-secret")
        with pytest.raises(HttpError) as caught:
            client.post_json("/v1/chat/completions", {})
        assert fake.seen_keys == ["Bearer wrong-secret"]
    assert caught.value.status == 401
    assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:30001", "not an http"),
        ("ftp://host", "not an http"),
        ("http://", "not an http"),
        ("http://user:secret@host", "apart from it"),
        ("http://host?key=secret", "apart from it"),
        ("http://host:port", "ort"),
        ("http://host:99999", "ort"),
        ("http://host:0", "port 0"),
        ("http://[::1", "not usable"),
        ("http://ho st", "a space"),
        ("http://host/a\x00b", "a space"),
        ("http://host/\u00e4", "outside printable ASCII"),
        ("http://" + "a" * 70, "not usable"),
        ("ftp://user:secret@host", "not an http"),
    ],
)
def test_bad_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Client(url)
    assert "secret" not in str(caught.value)


def test_token_from_a_file(tmp_path: t.Any) -> None:
    path = tmp_path / "key"
    path.write_text("  sk-123\n")
    assert read_token(token_file=str(path)) == "sk-123"
    assert read_token("sk-123") == "sk-123"
    assert read_token() is None


@pytest.mark.parametrize(
    ("token", "content", "words"),
    [
        ("a", "b", "not both"),
        (None, "", "is empty"),
        (None, "two words", "space"),
        (None, b"\xff\xfe", "not UTF-8"),
        (None, None, "No such file"),
        ("sk-\t1", None, "space"),
    ],
)
def test_bad_tokens_are_refused_unquoted(tmp_path: t.Any, token: str | None, content: t.Any, words: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    token_file = None if token == "sk-\t1" else str(path)
    with pytest.raises(ValueError, match=words) as caught:
        read_token(token, token_file)
    assert "two words" not in str(caught.value)
    assert "sk-" not in str(caught.value)


def test_a_command_sends_the_key_of_its_file_and_shows_the_named_fields_only(tmp_path: Path) -> None:
    (tmp_path / "a key").write_text("sk-1234\n")
    body = b'{"api_key":"sk-1234","context_length":8192,"max_context_length":1,"version":"0.5.23"}'
    with RawServer(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as server:
        command = fields_command(server.url, str(tmp_path / "a key"), ["context_length", "version"])
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert "sk-1234" not in command
    assert b"Authorization: Bearer sk-1234\r\n" in server.requests[0]
    assert done.stdout.splitlines() == ['"context_length":8192', '"version":"0.5.23"']
