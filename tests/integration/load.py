# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep a service busy until stdin ends, then print what became of every request as one JSON list.

    python3 tests/integration/load.py URL API_KEY_FILE MODEL CLIENTS

Every second client streams. A request: started and ended (seconds since the epoch), stream, and error, "" for none.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "module_utils"))

from ops.http import Client, HttpError, read_token
from ops.openai import chat


def main() -> None:
    url, key_file, model, clients = sys.argv[1:]
    client = Client(url, read_token(token_file=key_file), timeout=120)
    stop, numbers, requests = threading.Event(), itertools.count(), []

    def ask(stream: bool) -> None:
        while not stop.is_set():
            # No two prompts begin the same, so the router has no reason to prefer a server.
            prompt = f"{next(numbers)} is a number. Write a sentence about it."
            payload = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
            started, error = time.time(), ""
            try:
                chat(client, payload, stream=stream)
            except HttpError as failed:
                error = str(failed)
            requests.append({"started": started, "ended": time.time(), "stream": stream, "error": error})
            time.sleep(0.2 if error else 0)  # nobody there is no reason to ask as fast as one can

    threads = [threading.Thread(target=ask, args=(number % 2 == 1,)) for number in range(int(clients))]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps(requests))


if __name__ == "__main__":
    main()
