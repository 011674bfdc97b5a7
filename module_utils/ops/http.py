# SPDX-License-Identifier: GPL-3.0-or-later
"""A small HTTP client for one server on this network: JSON calls and server-sent events.

It uses no proxy (a loopback service must not be asked through one) and follows no redirect (a bearer token must not
travel to another host). The time limit covers the whole exchange, not one read: a server that sends one byte a second
still ends in time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import socket
import ssl
import threading
import time
import typing as t
from dataclasses import dataclass
from urllib.parse import urlsplit

BODY_EXCERPT_BYTES = 200
READ_BYTES = 65536


class HttpError(Exception):
    """The one failure of this client.

    kind is one of:
      connect    nothing listens there, or the name is unknown
      timeout    the time limit passed
      status     the server answered with a status outside 200-299
      truncated  the connection ended inside the answer
      body       the answer is not what the protocol promises (no JSON, an error object, not HTTP)
    """

    def __init__(
        self,
        kind: str,
        method: str,
        url: str,
        detail: str,
        elapsed_s: float,
        status: int | None = None,
        body: str = "",
    ) -> None:
        self.kind = kind
        self.method = method
        self.url = url
        self.detail = detail
        self.elapsed_s = elapsed_s
        self.status = status
        self.body = body
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [f"{self.method} {self.url}: {self.detail} after {self.elapsed_s:.2f} s"]
        if self.status is not None and self.kind != "status":
            parts.append(f"status {self.status}")
        if self.body:
            parts.append(f"body starts with {self.body!r}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Response:
    """A complete answer with a status in 200-299."""

    status: int
    headers: dict[str, str]
    body: bytes
    elapsed_s: float


def excerpt(body: bytes) -> str:
    """The first bytes of a body as text, for an error message."""
    return body[:BODY_EXCERPT_BYTES].decode("utf-8", errors="replace")


def read_token(token: str | None = None, token_file: str | None = None) -> str | None:
    """The bearer token, given as a string or as the path of a file that holds it; None when neither is given.

    Raises ValueError, which never quotes the token.
    """
    if token and token_file:
        raise ValueError("give the API key as a string or as a file, not both")
    if token_file:
        try:
            with open(token_file, encoding="utf-8") as handle:
                token = handle.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ValueError(f"cannot read the API key from {token_file}: {reason} (site.yml writes it)") from None
        if not token:
            raise ValueError(f"the API key file {token_file} is empty")
    if token and any(ord(char) < 33 or ord(char) > 126 for char in token):
        raise ValueError("the API key holds a space or a character outside printable ASCII")
    return token or None


def curl_command(url: str, key_file: str | None = None, *words: str) -> str:
    """A request as a command for a shell on the host.

    words are further words for curl, quoted already. A key goes from its file into curl's standard input; in a command
    line everybody could read it.
    """
    if key_file:
        return " ".join([f"sed 's/^/Authorization: Bearer /' {shlex.quote(key_file)} | curl -sS -H @-", url, *words])
    return " ".join(["curl -sS", url, *words])


def fields_command(url: str, key_file: str | None, names: t.Iterable[str]) -> str:
    """A request as a command that shows these fields of a JSON answer only: /server_info has the key among others."""
    return f"""{curl_command(url, key_file)} | grep -oE '"({"|".join(names)})": ?[^,}}]*'"""


def sse_data(pieces: t.Iterable[bytes]) -> t.Iterator[str]:
    """The data of each server-sent event, from a body cut anywhere.

    Lines are cut as bytes and decoded whole, so a character split between two pieces stays whole. An event whose
    closing blank line never came is not yielded: it may be cut.
    """
    rest = b""
    data: list[str] = []
    for piece in pieces:
        rest += piece
        *lines, rest = rest.split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r").decode("utf-8", errors="replace")
            if line.startswith("data:"):
                value = line[5:]
                data.append(value.removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []


class Client:
    """Calls to one base URL, such as http://127.0.0.1:30001."""

    def __init__(self, base_url: str, token: str | None = None, timeout: float = 30.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is not an http:// or https:// URL")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("the URL may hold scheme, host, port and path only; give the API key apart from it")
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._parts = parts
        self._path = parts.path.rstrip("/")
        # Raises ValueError when it is no port number.
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._token = token

    def get(self, path: str, timeout: float | None = None) -> Response:
        return self._whole("GET", path, None, timeout)

    def get_json(self, path: str, timeout: float | None = None) -> t.Any:
        return self._json("GET", path, None, timeout)

    def post_json(self, path: str, payload: t.Any, timeout: float | None = None) -> t.Any:
        return self._json("POST", path, payload, timeout)

    def post_sse(self, path: str, payload: t.Any, timeout: float | None = None) -> t.Iterator[str]:
        """The data of each event of a streamed answer, as they arrive."""
        call = _Call(self, "POST", path, payload, timeout)
        return sse_data(call.pieces())

    def _whole(self, method: str, path: str, payload: t.Any, timeout: float | None) -> Response:
        call = _Call(self, method, path, payload, timeout)
        body = b"".join(call.pieces())
        return Response(call.status, call.headers, body, call.elapsed_s)

    def _json(self, method: str, path: str, payload: t.Any, timeout: float | None) -> t.Any:
        response = self._whole(method, path, payload, timeout)
        try:
            return json.loads(response.body)
        except ValueError:
            raise HttpError(
                "body",
                method,
                self.base_url + path,
                "the answer is not JSON",
                response.elapsed_s,
                response.status,
                excerpt(response.body),
            ) from None


class _Call:
    """One exchange with one deadline."""

    def __init__(self, client: Client, method: str, path: str, payload: t.Any, timeout: float | None) -> None:
        self._client = client
        self._method = method
        self._url = client.base_url + path
        self._target = client._path + path
        self._payload = payload
        self._limit = client.timeout if timeout is None else timeout
        self._start = time.monotonic()
        self._expired = threading.Event()
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def error(self, kind: str, detail: str, body: bytes = b"") -> HttpError:
        return HttpError(kind, self._method, self._url, detail, self.elapsed_s, self.status or None, excerpt(body))

    def pieces(self) -> t.Iterator[bytes]:
        """The body as it arrives; raises HttpError."""
        connection = self._connection()
        try:
            yield from self._exchange(connection)
        except (OSError, http.client.HTTPException) as exc:
            raise self._translated(exc) from None
        finally:
            connection.close()
        if self._expired.is_set():
            raise self._timeout()

    def _translated(self, exc: Exception) -> HttpError:
        if self._expired.is_set() or isinstance(exc, (TimeoutError, socket.timeout)):  # two types before Python 3.10
            return self._timeout()
        if isinstance(exc, http.client.IncompleteRead):
            return self.error("truncated", "the connection ended inside the answer")
        if isinstance(exc, http.client.RemoteDisconnected):
            return self.error("truncated", "the connection ended before an answer")
        if isinstance(exc, http.client.HTTPException):
            return self.error("body", f"the answer is not HTTP ({type(exc).__name__})")
        kind = "truncated" if self.status else "connect"
        return self.error(kind, getattr(exc, "strerror", None) or str(exc))

    def _timeout(self) -> HttpError:
        return self.error("timeout", f"no complete answer within {self._limit:g} s")

    def _connection(self) -> http.client.HTTPConnection:
        parts = self._client._parts
        host, port = str(parts.hostname), self._client.port
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._limit, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=self._limit)

    def _exchange(self, connection: http.client.HTTPConnection) -> t.Iterator[bytes]:
        headers = {"Accept": "application/json, text/event-stream", "Connection": "close"}
        if self._client._token:
            headers["Authorization"] = f"Bearer {self._client._token}"
        body = None
        if self._payload is not None:
            body = json.dumps(self._payload).encode()
            headers["Content-Type"] = "application/json"
        connection.connect()
        alarm = threading.Timer(max(0.0, self._limit - self.elapsed_s), self._expire, [connection.sock])
        alarm.daemon = True
        alarm.start()
        try:
            connection.request(self._method, self._target, body=body, headers=headers)
            with connection.getresponse() as response:
                self.status = response.status
                self.headers = {name.lower(): value for name, value in response.getheaders()}
                yield from self._body(response)
        finally:
            alarm.cancel()

    def _expire(self, sock: socket.socket) -> None:
        """End a blocked read when the time is over; a limit for each read would let a slow sender go on for ever."""
        self._expired.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS' own, which another thread is reading with

    def _body(self, response: http.client.HTTPResponse) -> t.Iterator[bytes]:
        if not 200 <= response.status <= 299:
            raise self._status_error(response)
        while True:
            piece = response.read1(READ_BYTES)
            if not piece:
                break
            yield piece
        if response.length and not self._expired.is_set():
            raise self.error("truncated", f"the connection ended {response.length} bytes before the end")

    def _status_error(self, response: http.client.HTTPResponse) -> HttpError:
        try:
            body = response.read(BODY_EXCERPT_BYTES)
        except (OSError, http.client.HTTPException):
            body = b""
        return self.error("status", f"status {response.status} {response.reason}".rstrip(), body)
