# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients that are no good: many at once, clients that leave, and requests that are none. Prints what they got.

    python3 tests/integration/storm.py URL API_KEY_FILE MODEL rapid COUNT ABORTED
    python3 tests/integration/storm.py URL API_KEY_FILE MODEL malformed COUNT

rapid: COUNT requests from 50 clients, of which the share ABORTED (0 to 1) is left by its client before the answer.
malformed: COUNT requests, each wrong in one of the ways below. The JSON object that is printed has how often each
status came ("aborted" for a client that left, else the error's name), and the seconds of the slowest request.
"""

from __future__ import annotations

import collections
import http.client
import itertools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

CLIENTS, TIMEOUT_S = 50, 300
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
# Bodies of chat requests; "MODEL" is replaced. Every one of them has to be refused.
MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe\x00\x01",
    b'{"model": "MODEL"}',
    b'{"messages": 5, "model": "MODEL"}',
    b"[" * 5000,
    *(
        json.dumps({"model": "MODEL", "messages": HI, "max_tokens": 8} | wrong).encode()
        for wrong in (
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "nobody", "content": "Hi"}]},
            {"messages": "Hi"},
            {"max_tokens": -1},
            {"max_tokens": "many"},
            {"max_tokens": 10**9},
            {"temperature": "hot"},
            {"temperature": -1},
            {"top_p": 7},
            {"n": 0},
            {"stop": 5},
            {"messages": [{"role": "user", "content": "word " * 20000}]},
            {"response_format": {"type": "json_schema"}},
            {"tools": "none"},
        )
    ),
]


def ask(address: tuple[str, int], key: str, body: bytes, leave: bool = False) -> tuple[str, float]:
    """Return what a request got, and the seconds until then; with leave, the client hangs up without reading."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", CHAT, body, headers)
        if leave:
            time.sleep(0.05)
            return "aborted", time.monotonic() - started
        answer = connection.getresponse()
        answer.read()
        return str(answer.status), time.monotonic() - started
    except OSError as error:
        return type(error).__name__, time.monotonic() - started
    finally:
        connection.close()


def main() -> None:
    url, key_file, model, kind, count, *share = sys.argv[1:]
    parts, key = urlsplit(url), Path(key_file).read_text().strip()
    address = (parts.hostname or "", parts.port or 80)
    if kind == "rapid":
        every = round(1 / float(share[0]))
        payload = {"model": model, "max_tokens": 2, "stream": True}
        bodies = [json.dumps(payload | {"messages": [{"role": "user", "content": f"{n}?"}]}) for n in range(int(count))]
        requests = [(body.encode(), number % every == 0) for number, body in enumerate(bodies)]
    else:
        bodies = [body.replace(b"MODEL", model.encode()) for body in MALFORMED]
        requests = [(body, False) for body in itertools.islice(itertools.cycle(bodies), int(count))]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda request: ask(address, key, *request), requests))
    statuses = collections.Counter(status for status, _seconds in answers)
    print(json.dumps({"statuses": statuses, "slowest_s": max(seconds for _status, seconds in answers)}))


if __name__ == "__main__":
    main()
