# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be said without a GPU of the test that runs the kernels in the real server (tests/gpu/server)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[1] / "gpu" / "server"
CONTEXTS = {
    "capacity": 131072,
    "context-8k": 8192,
    "context-128k": 131072,
    "context-512k": 524288,
    "context-1m": 1048576,
    "replicas replica-0": 131072,
    "replicas replica-1": 131072,
    "disaggregated prefill": 131072,
    "disaggregated decode": 131072,
}


@pytest.fixture(scope="module")
def launch() -> dict[str, dict]:
    """What launch.py prints."""
    done = subprocess.run([sys.executable, SERVER / "launch.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_engine_understands_the_launch_lines(launch, sglang):
    servers = {name: line for name, line in launch.items() if not name.endswith(" router")}
    assert servers.keys() == CONTEXTS.keys()
    for name, line in servers.items():
        command, *arguments = line["argv"]
        options = sglang.ask("parse", argv=arguments)["options"]
        assert command == "serve"
        assert options["--context-length"] == CONTEXTS[name]
        assert options["--load-format"] == "dummy"
        # The harness puts its own in their place.
        assert {"--model-path", "--port", "--nccl-port"} <= options.keys()


def test_the_routers_know_the_servers_of_their_topology(launch, router):
    def url(name: str) -> str:
        argv = launch[name]["argv"]
        return f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"

    replicas = router(launch["replicas router"]["argv"][1:])
    assert replicas["worker_urls"] == [url("replicas replica-0"), url("replicas replica-1")]
    apart = router(launch["disaggregated router"]["argv"][1:])
    assert [prefill for prefill, _ in apart["prefill_urls"]] == [url("disaggregated prefill")]
    assert apart["decode_urls"] == [url("disaggregated decode")]
    ports = [line["argv"][line["argv"].index("--port") + 1] for name, line in launch.items() if " " in name]
    assert len(set(ports)) == len(ports), "both topologies run at the same time"


def test_percentiles_of_the_load():
    sys.path.insert(0, str(SERVER))
    import load

    good = [load.Sample("chat", 0.0, first_token=n / 100, per_token=0.01, took=1.0) for n in range(1, 101)]
    lost = load.Sample("chat", 0.0, took=2.0, error="ReadTimeout: none")
    found = load.summary([*good, lost])["chat"]
    assert (found["requests"], found["failed"], found["errors"]) == (101, 1, ["ReadTimeout: none"])
    assert found["ttft_ms"] == pytest.approx({"p50": 505.0, "p99": 990.1, "max": 1000.0})
    assert found["tpot_ms"]["p50"] == pytest.approx(10.0)
