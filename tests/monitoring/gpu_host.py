# SPDX-License-Identifier: GPL-3.0-or-later
"""The pages of a host that cannot be had here: disaggregated DeepSeek-V4 on eight GPUs, in some trouble.

Names and labels are the recorded ones (the metric contract checks them), values are made up and stand for nothing.
"""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RANK = 'model_name="m",engine_type="{role}",tp_rank="0",pp_rank="0",moe_ep_rank="0"'
MODEL = 'model_name="m",engine_type="{role}"'
POOL = 1_600_000
# Name -> (labels, value); a value with "/s" grows with time.
ENGINE: list[tuple[str, str, str]] = [
    ("sglang:max_total_num_tokens", RANK, f"{POOL}"),
    ("sglang:max_total_num_tokens_swa", RANK, f"{POOL // 10}"),
    ("sglang:full_token_usage", RANK, "0.62"),
    ("sglang:swa_token_usage", RANK, "0.93"),
    ("sglang:kv_used_tokens", RANK, "992000"),
    ("sglang:kv_evictable_tokens", RANK, "500000"),
    ("sglang:kv_available_tokens", RANK, "108000"),
    ("sglang:swa_used_tokens", RANK, "148800"),
    ("sglang:swa_evictable_tokens", RANK, "8000"),
    ("sglang:swa_available_tokens", RANK, "3200"),
    ("sglang:num_running_reqs", RANK, "12"),
    ("sglang:num_queue_reqs", RANK, "3"),
    ("sglang:num_grammar_queue_reqs", RANK, "0"),
    ("sglang:num_prefill_bootstrap_queue_reqs", RANK, "1"),
    ("sglang:num_prefill_inflight_queue_reqs", RANK, "2"),
    ("sglang:num_decode_prealloc_queue_reqs", RANK, "4"),
    ("sglang:num_decode_transfer_queue_reqs", RANK, "5"),
    ("sglang:is_cuda_graph", RANK, "1"),
    ("sglang:realtime_tokens_total", RANK + ',mode="decode"', "900/s"),
    ("sglang:prefill_effective_tokens_total", RANK + ',mode="input"', "2000/s"),
    ("sglang:prefill_effective_tokens_total", RANK + ',mode="device_hit"', "3000/s"),
    ("sglang:evicted_tokens_total", 'cache_type="radix",tp_rank="0",pp_rank="0",dp_rank="0"', "400/s"),
    ("sglang:num_retracted_requests_total", RANK, "0.1/s"),
    ("sglang:num_transfer_failed_reqs_total", RANK, "0.02/s"),
    ("sglang:kv_transfer_latency_ms_bucket", RANK + ',le="50"', "4/s"),
    ("sglang:kv_transfer_latency_ms_bucket", RANK + ',le="200"', "9/s"),
    ("sglang:kv_transfer_latency_ms_bucket", RANK + ',le="+Inf"', "10/s"),
    ("sglang:generation_tokens_total", MODEL + ',is_streaming="true"', "900/s"),
    ("sglang:prompt_tokens_total", MODEL + ',is_streaming="true"', "5000/s"),
    ("dsv4_sm120_kernel_active", 'kernel="decode",tp_rank="0",pp_rank="0"', "1"),
    ("dsv4_sm120_kernel_active", 'kernel="indexer",tp_rank="0",pp_rank="0"', "0"),
]
for metric, bounds in {
    "sglang:time_to_first_token_seconds": ("1.0", "4.0"),
    "sglang:inter_token_latency_seconds": ("0.02", "0.1"),
    "sglang:e2e_request_latency_seconds": ("20.0", "60.0"),
}.items():
    ENGINE += [(f"{metric}_bucket", f'{MODEL},le="{bound}"', f"{n}/s") for bound, n in zip(bounds, (6, 9), strict=True)]
    ENGINE += [(f"{metric}_bucket", f'{MODEL},le="+Inf"', "10/s"), (f"{metric}_count", MODEL, "10/s")]
NODE: list[tuple[str, str, str]] = [
    ("ops_engine_device", 'device="cuda"', "1"),
    ("ops_engine_ready", 'unit="sglang-prefill.service",role="prefill"', "1"),
    ("ops_engine_ready", 'unit="sglang-decode.service",role="decode"', "0"),
    ("ops_smoke_ok", 'model="m",report="smoke.json"', "0"),
    ("ops_smoke_timestamp_seconds", 'model="m",report="smoke.json"', "now"),
    ("ops_state_timestamp_seconds", "", "now"),
    *(("ops_memory_plan_pool_tokens", f'role="{role}",pool="full"', "2000000") for role in ("prefill", "decode")),
]
GPU: list[tuple[str, str, str]] = [
    ("gpu_xid_errors_total", 'gpu="3",xid="79"', "0.01/s"),
    ("gpu_xid_watched", "", "8"),
]
for number in range(8):
    labels = f'gpu="{number}",pci="00000000:0{number}:00.0"'
    GPU += [
        ("gpu_up", labels, "1"),
        ("gpu_memory_used_bytes", labels, "9.1e10"),
        ("gpu_memory_total_bytes", labels, "1.0e11"),
        ("gpu_temperature_celsius", labels, f"{78 + number}"),
        ("gpu_power_watts", labels, "493.7"),
        ("gpu_power_limit_watts", labels, "500"),
        ("gpu_throttled", f'{labels},reason="hw_thermal"', f"{number // 6}"),
        ("gpu_throttled", f'{labels},reason="sw_power_cap"', "1"),
    ]
PAGES = {"/prefill": ENGINE, "/decode": ENGINE, "/node": NODE, "/gpu": GPU}


def page(path: str, seconds: float) -> str:
    """Return a page as it is so many seconds after the start."""
    role = path.removeprefix("/")
    lines = []
    for name, labels, text in PAGES[path]:
        if text == "now":
            value = time.time() - 120
        else:
            value = float(text.removesuffix("/s")) * (seconds if text.endswith("/s") else 1)
        lines.append(f"{name}{{{labels.replace('{role}', role)}}} {value:.6f}")
    return "\n".join(lines) + "\n"


class Host(ThreadingHTTPServer):
    """Serves the pages at a free port of loopback."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Pages)
        self.start = time.time()
        self.address = f"127.0.0.1:{self.server_address[1]}"


class Pages(BaseHTTPRequestHandler):
    """One page for each exporter."""

    server: Host

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(page(self.path, time.time() - self.server.start).encode())

    def log_message(self, *_: object) -> None:
        """Keep the test's output for the test."""
