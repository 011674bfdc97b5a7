# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be said without a GPU of the test that runs the kernels in the real server (tests/gpu/server)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[1] / "gpu" / "server"
sys.path.insert(0, str(SERVER))

import disaggregated  # noqa: E402  # after the import path
import load  # noqa: E402  # after the import path
import speed  # noqa: E402  # after the import path
from server import replaced  # noqa: E402  # after the import path

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


def test_a_second_prefill_server_stands_beside_the_pair(launch, router):
    """Ports of its own, and a router that leads to it and to the pair's decode server."""
    deployed = launch["disaggregated prefill"]
    assert deployed["environment"][disaggregated.EARLY_SEND] == "0"
    early = replaced(deployed["argv"], disaggregated.EARLY_PORTS)
    ports = {early[early.index(option) + 1] for option in disaggregated.EARLY_PORTS}
    taken = {word for line in launch.values() for word in line["argv"] if word.isdigit()}
    assert len(ports) == len(disaggregated.EARLY_PORTS)
    assert not ports & taken
    apart = router(replaced(launch["disaggregated router"]["argv"], disaggregated.EARLY_ROUTER)[1:])
    port, bootstrap = (disaggregated.EARLY_PORTS[name] for name in ("--port", "--disaggregation-bootstrap-port"))
    assert apart["prefill_urls"] == [[f"http://127.0.0.1:{port}", int(bootstrap)]]
    assert len(apart["decode_urls"]) == 1


def test_a_step_is_timed_by_whole_blocks_but_the_first():
    size = speed.BLOCK
    events = [(0.0, 1), (2.0, 1 + size), (3.0, 1 + 2 * size), (4.5, 1 + 3 * size), (4.6, 2 + 3 * size)]
    assert speed.blocks(events) == [1000 / size, 1500 / size]


def test_flat_is_said_of_medians_over_all_rounds():
    rounds = {"8k": [[1.0, 1.0, 9.0], [1.0, 1.02, 1.0]], "1m": [[1.01, 1.01, 1.01], [1.01, 7.0, 1.01]]}
    found = speed.flatness(rounds)
    assert found["median_ms"] == {"8k": 1.0, "1m": 1.01}
    assert found["spread"] == pytest.approx(0.01)
    assert speed.against(rounds["1m"], rounds["8k"])["ratio"] == pytest.approx(1.01)


def test_percentiles_of_the_load():
    good = [load.Sample("chat", 0.0, first_token=n / 100, per_token=0.01, took=1.0) for n in range(1, 101)]
    lost = load.Sample("chat", 0.0, took=2.0, error="ReadTimeout: none")
    found = load.summary([*good, lost])["chat"]
    assert (found["requests"], found["failed"], found["errors"]) == (101, 1, ["ReadTimeout: none"])
    assert found["ttft_ms"] == pytest.approx({"p50": 505.0, "p99": 990.1, "max": 1000.0})
    assert found["tpot_ms"]["p50"] == pytest.approx(10.0)
