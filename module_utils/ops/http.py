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
import re
import shlex
import socket
import ssl
import threading
import time
import typing as t
from dataclasses import dataclass
from urllib.parse import urlsplit

from .redact import LEAST_KEY, without_key, without_key_start

BODY_EXCERPT = 200
READ_BYTES = 65536
# A server that sends without end fills no memory: whole bodies and streams, and one line of a stream.
MAX_BODY_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20
# Error texts and reason phrases of a server, in characters.
MAX_WORDS = 200
MAX_JSON_DEPTH = 100
STREAM_END = "[DONE]"

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n|\Z)")


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


def parse_json(text: str | bytes) -> t.Any:
    """The value of a JSON text from elsewhere. Raises ValueError, also for what other readers refuse or choke on.

    Refused are NaN and Infinity, a name that stands twice in an object, bytes that are no UTF-8, half a character (a
    surrogate without its other half), and nesting that is too deep.
    """
    try:
        raw = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_object)
        if raw.count("[") + raw.count("{") > MAX_JSON_DEPTH and _is_deep(value):
            raise RecursionError
        raw.encode()
        if _HALF_CHARACTER.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8, or holds half a character") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a character") from None
    return value


def _object(pairs: list[tuple[str, t.Any]]) -> dict[str, t.Any]:
    """Readers differ in which of two values counts."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object holds a name twice")
    return value


def _is_deep(value: t.Any) -> bool:
    level = [value]
    for _depth in range(MAX_JSON_DEPTH):
        inner = [one for one in level if isinstance(one, (dict, list))]
        level = [item for one in inner for item in (one.values() if isinstance(one, dict) else one)]
    return bool(level)


def _refuse_constant(name: str) -> t.Any:
    raise ValueError(f"{name} is no JSON number")


def url_problem(url: str) -> str:
    """Why a text is no URL of a server, or an empty string. The reason never quotes what may be a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError as error:  # UnicodeError is one
        return f"the URL is not usable: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return f"{url!r} is not an http:// or https:// URL" if "@" not in url else "the URL is not an http:// URL"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "the URL may hold scheme, host, port and path only; give the API key apart from it"
    if any(ord(char) < 33 or ord(char) > 126 for char in url):
        return f"the URL {url!r} holds a space or a character outside printable ASCII"
    return f"the URL {url!r} has port 0, wanted 1 to 65535" if port == 0 else ""


class KeyFileError(ValueError):
    """The file with the API key can't be read, or holds none; site.yml writes it."""


def read_token(token: str | None = None, token_file: str | None = None) -> str | None:
    """The bearer token, given as a string or as the path of a file that holds it; None when neither is given.

    Raises ValueError, KeyFileError among them, which never quotes the token.
    """
    if token and token_file:
        raise ValueError("give the API key as a string or as a file, not both")
    if token_file:
        try:
            with open(token_file, encoding="utf-8") as handle:
                token = handle.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise KeyFileError(f"cannot read the API key from {token_file}: {reason} (site.yml writes it)") from None
        if not token:
            raise KeyFileError(f"the API key file {token_file} is empty")
    if token and any(ord(char) < 33 or ord(char) > 126 for char in token):
        raise ValueError("the API key holds a space or a character outside printable ASCII")
    return token or None


SITE = "ansible-playbook site.yml"


def refusal(module: str, what: str, error: object) -> dict[str, str]:
    """What a module fails with when it can't begin: msg, which ends with the next command, and next_command.

    what says what was not done for it. A key file is site.yml's to write, everything else is an argument.
    """
    command = SITE if isinstance(error, KeyFileError) else f"ansible-doc -t module {module}"
    return {"msg": f"{what}: {error}\nnext command: {command}", "next_command": command}


# A hung engine keeps a connection without a word.
CURL = "curl -sS -m 60"


def curl_command(url: str, key_file: str | None = None, *words: str) -> str:
    """A request as a command for a shell on the host.

    words are further words for curl, quoted already. A key goes from its file into curl's standard input; in a command
    line everybody could read it.
    """
    if key_file:
        words = ("-H @-", url, *words)
        return " ".join([f"sed 's/^/Authorization: Bearer /' {shlex.quote(key_file)} |", CURL, *words])
    return " ".join([CURL, url, *words])


def fields_command(url: str, key_file: str | None, names: t.Iterable[str]) -> str:
    """A request as a command that shows these fields of a JSON answer only: /server_info has the key among others."""
    return f"""{curl_command(url, key_file)} | grep -oE '"({"|".join(names)})": ?[^,}}]*'"""


def sse_data(pieces: t.Iterable[bytes]) -> t.Iterator[str]:
    """The data of each server-sent event, from a body cut anywhere.

    Lines are cut as bytes and decoded whole, so a character split between two pieces stays whole; they end with CRLF,
    LF or CR. An event whose closing blank line never came is not yielded: it may be cut. Only STREAM_END needs none.
    Raises ValueError for a line that is too long.
    """
    data: list[str] = []
    for line in _sse_lines(pieces):
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        if data and (not line or data[-1].strip() == STREAM_END):
            yield "\n".join(data)
            data = []


def _sse_lines(pieces: t.Iterable[bytes]) -> t.Iterator[str]:
    rest = bytearray()
    first = True
    for piece in pieces:
        # Only what is new is searched: pieces of one byte would have the whole line searched for each. A CR before it
        # may be a line's end.
        start = 0 if first else max(0, len(rest) - 1)
        rest += piece
        if first and len(rest) >= len(_BYTE_ORDER_MARK):
            first, rest = False, rest.removeprefix(_BYTE_ORDER_MARK)
        lines: list[bytes] = []
        if _LINE_END.search(rest, start):
            *lines, last = _LINE_END.split(bytes(rest))
            rest = bytearray(last)
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream is longer than {MAX_LINE_BYTES >> 20} MiB")
        for raw in lines:
            yield raw.decode("utf-8", errors="replace")
    end = rest.decode("utf-8", errors="replace")
    if end.endswith("\r") or end.strip() == f"data: {STREAM_END}":
        yield end.rstrip("\r")
        yield ""


class Client:
    """Calls to one base URL, such as http://127.0.0.1:30001."""

    def __init__(self, base_url: str, token: str | None = None, timeout: float = 30.0) -> None:
        problem = url_problem(base_url)
        if problem:
            raise ValueError(problem)
        parts = urlsplit(base_url)
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._parts = parts
        self._path = parts.path.rstrip("/")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._token = token
        # Path -> how many GET requests were answered, and the longest time of one in seconds.
        self.gets: dict[str, tuple[int, float]] = {}

    def redacted(self, text: str) -> str:
        """A text without this client's key, which some servers repeat in their errors."""
        return without_key(text, self._token) if self._token else text

    def readable(self, text: str) -> str:
        """An answer to be judged: without a key that can be nothing else. A short one may be a word of the answer, and
        is taken out when the answer is shown."""
        return self.redacted(text) if len(self._token or "") >= LEAST_KEY else text

    def cut(self, text: str) -> str:
        """A text that ended too early, without this client's key and without the first part of it at the end."""
        return without_key_start(self.redacted(text), self._token or "")

    def excerpt(self, body: bytes) -> str:
        """The beginning of a body as text, for an error message; without the NULs that UTF-16 has between letters."""
        text = body[: 2 * READ_BYTES].decode("utf-8", errors="replace").replace("\0", "")
        return self.cut(text)[:BODY_EXCERPT]

    def get(self, path: str, timeout: float | None = None) -> Response:
        return self._whole("GET", path, None, timeout)

    def get_json(self, path: str, timeout: float | None = None) -> t.Any:
        return self._json("GET", path, None, timeout)

    def post_json(self, path: str, payload: t.Any, timeout: float | None = None) -> t.Any:
        return self._json("POST", path, payload, timeout)

    def delete_json(self, path: str, timeout: float | None = None) -> t.Any:
        return self._json("DELETE", path, None, timeout)

    def post_sse(self, path: str, payload: t.Any, timeout: float | None = None) -> t.Iterator[str]:
        """The data of each event of a streamed answer, as they arrive."""
        call = _Call(self, "POST", path, payload, timeout)
        try:
            for data in sse_data(call.pieces()):
                yield self.readable(data)
        except ValueError as error:
            raise call.error("body", str(error)) from None

    def _whole(self, method: str, path: str, payload: t.Any, timeout: float | None) -> Response:
        call = _Call(self, method, path, payload, timeout)
        body = self.readable(b"".join(call.pieces()).decode("utf-8", errors="surrogateescape"))
        if method == "GET":
            count, slowest = self.gets.get(path, (0, 0.0))
            self.gets[path] = (count + 1, max(slowest, call.elapsed_s))
        headers = {name: self.redacted(value) for name, value in call.headers.items()}
        return Response(call.status, headers, body.encode("utf-8", errors="surrogateescape"), call.elapsed_s)

    def _json(self, method: str, path: str, payload: t.Any, timeout: float | None) -> t.Any:
        response = self._whole(method, path, payload, timeout)
        try:
            return parse_json(response.body)
        except ValueError as error:
            raise HttpError(
                "body",
                method,
                self.base_url + path,
                f"the answer is not JSON: {str(error)[:MAX_WORDS]}",
                response.elapsed_s,
                response.status,
                self.excerpt(response.body),
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
        detail, said = self._client.redacted(detail)[:MAX_WORDS], self._client.excerpt(body)
        return HttpError(kind, self._method, self._url, detail, self.elapsed_s, self.status or None, said)

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

    def _socket(self, address: tuple[str, int], *_default: t.Any) -> socket.socket:
        """A connection to the first address of a name that takes one. The time that is left is divided among them."""
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        problem = OSError("the name has no address")
        for tried, (family, kind, protocol, _name, where) in enumerate(found):
            left = self._limit - self.elapsed_s
            if left <= 0:
                raise TimeoutError
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:  # such as IPv6, which this host has not
                problem = error
                continue
            try:
                sock.settimeout(left / (len(found) - tried))
                sock.connect(where)
            except OSError as error:
                sock.close()
                problem = error
                continue
            sock.settimeout(max(0.001, self._limit - self.elapsed_s))
            return sock
        raise problem

    def _exchange(self, connection: http.client.HTTPConnection) -> t.Iterator[bytes]:
        headers = {"Accept": "application/json, text/event-stream", "Connection": "close"}
        if self._client._token:
            headers["Authorization"] = f"Bearer {self._client._token}"
        body = None
        if self._payload is not None:
            body = json.dumps(self._payload).encode()
            headers["Content-Type"] = "application/json"
        connection._create_connection = self._socket  # type: ignore[attr-defined]
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
        size = 0
        while True:
            piece = response.read1(READ_BYTES)
            if not piece:
                break
            size += len(piece)
            # A sender of many small pieces has filled buffers that outlast the end of the connection.
            if self.elapsed_s > self._limit:
                raise self._timeout()
            if size > MAX_BODY_BYTES:
                raise self.error("body", f"the answer is longer than {MAX_BODY_BYTES >> 20} MiB")
            yield piece
        if response.length and not self._expired.is_set():
            raise self.error("truncated", f"the connection ended {response.length} bytes before the end")

    def _status_error(self, response: http.client.HTTPResponse) -> HttpError:
        # To its end, which is more than is shown: a key must not be cut before it is found.
        body = bytearray()
        with contextlib.suppress(OSError, http.client.HTTPException):
            while len(body) < READ_BYTES and self.elapsed_s < self._limit:
                piece = response.read1(READ_BYTES)
                if not piece:
                    break
                body += piece
        return self.error("status", f"status {response.status} {response.reason}".rstrip(), bytes(body))
