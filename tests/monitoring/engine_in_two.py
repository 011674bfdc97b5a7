# SPDX-License-Identifier: GPL-3.0-or-later
"""An engine as its monitoring sees it: one process computes, another one serves what the first has written down.

    engine_in_two.py compute FILE    one short request after the other; counts their tokens in FILE
    engine_in_two.py serve FILE      serves /metrics and prints its address

As in SGLang, the page is answered while the scheduler hangs, and the gauges say 0 although a request is always open.
"""

from __future__ import annotations

import itertools
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RANK = 'model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",moe_ep_rank="0"'
PAGE = f"""\
sglang:max_total_num_tokens{{{RANK}}} 8192
sglang:num_running_reqs{{{RANK}}} 0
sglang:num_queue_reqs{{{RANK}}} 0
sglang:http_requests_active{{endpoint="/v1/chat/completions",method="POST"}} 1
sglang:realtime_tokens_total{{{RANK},mode="decode"}} """


def compute(file: Path) -> None:
    """Count for ever."""
    new = file.with_suffix(".new")
    for tokens in itertools.count(1000):
        new.write_text(str(tokens))
        new.replace(file)
        time.sleep(0.1)


def serve(file: Path) -> None:
    """Answer every GET with the page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(f"{PAGE}{file.read_text()}\n".encode())

        def log_message(self, *_: object) -> None:
            """Keep the test's output for the test."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    print(f"127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    {"compute": compute, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
