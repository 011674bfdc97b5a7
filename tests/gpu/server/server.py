# SPDX-License-Identifier: GPL-3.0-or-later
"""An SGLang server or router: started from a rendered launch line, watched until ready or dead, asked, stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "module_utils"))

from ops.journal_causes import FATAL, Finding, classify, root_cause  # after the import path
from ops.readiness import phase_of  # after the import path

START_ROUTER = Path(__file__).resolve().parents[3] / "roles/sglang_router/files/start_router.py"
READY = phase_of(["The server is fired up and ready to roll!"])
NO_VALUES: Mapping[str, str] = {}


@dataclass(frozen=True)
class Variant:
    """What is run: a name of launch.json, what is set in its environment, what is added to and replaced in its line."""

    name: str
    host: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)


def replaced(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The launch line with other values behind some of its options; several, separated by spaces, behind one."""
    words = list(argv)
    for option, value in values.items():
        at = words.index(option) + 1
        words[at : at + len(value.split())] = value.split()
    return words


def greedy(new_tokens: int) -> dict[str, Any]:
    """Sampling parameters: always as many tokens."""
    return {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}


VOCABULARY = 120_000


def random_ids(length: int, seed: int | str) -> list[int]:
    """Token ids of a prompt, the same for a seed in every run."""
    source = random.Random(seed)
    return [source.randrange(5, VOCABULARY) for _ in range(length)]


class Program:
    """A program in a process session of its own, with its log in a file; ``url`` is where it answers."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
        self.log = directory / f"{name}.log"
        self.started = time.monotonic()
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, timeout: float = 300, **options: Any) -> Any:
        """Greedy tokens of ``/generate`` for prompts of token ids; raises ``requests.RequestException``."""
        body = {"input_ids": [list(ids) for ids in prompts], "sampling_params": greedy(new_tokens), **options}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=timeout)
        answer.raise_for_status()
        return answer.json()

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=30)

    def stop(self) -> None:
        """Kill the whole session: a test's program has nothing to drain."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Router(Program):
    """The router in front of a topology, as the deployment starts it."""

    def __init__(
        self,
        name: str,
        launch: Mapping[str, Any],
        directory: Path,
        host: str = "",
        values: Mapping[str, str] = NO_VALUES,
    ) -> None:
        """``host``: its name in launch.json, where it goes by another one here."""
        arguments = replaced(launch[host or name]["argv"][1:], values)
        super().__init__(name, [sys.executable, str(START_ROUTER), *arguments], {}, directory)

    def wait(self, timeout: float) -> None:
        """Return once it has servers; ``TimeoutError`` with the end of its log after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if self.get("/readiness").ok:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"{self.name} is not ready: {self.log.read_text(errors='replace')[-2000:]}")


class Server(Program):
    """A running server. ``ready_s``: seconds since its start. Without a slot it keeps the ports of its launch line."""

    def __init__(
        self,
        variant: Variant,
        launch: Mapping[str, Any],
        model: Path,
        plugins: Sequence[Path],
        directory: Path,
        slot: int | None = None,
    ) -> None:
        self.variant = variant
        self.ready_s: float | None = None
        line = launch[variant.host]
        own = {"--model-path": str(model), **variant.values}
        if slot is not None:
            own |= {"--port": str(31000 + slot), "--nccl-port": str(32000 + slot)}
        arguments = [*replaced(line["argv"][1:], own), *variant.arguments]
        path = os.pathsep.join(filter(None, [*map(str, plugins), os.environ.get("PYTHONPATH")]))
        environment = line["environment"] | variant.environment | {"PYTHONPATH": path}
        command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        super().__init__(variant.name, command, environment, directory)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def look(self) -> bool | None:
        """True once it is ready, False once it is dead or dying, None while it starts."""
        if self.ready_s is not None:
            return True
        if phase_of(self.text().splitlines()) == READY:
            self.ready_s = time.monotonic() - self.started
            return True
        cause = self.cause()
        dying = cause is not None and cause.severity == FATAL
        return False if dying or self.process.poll() is not None else None

    def cause(self) -> Finding | None:
        """What the project's own table of causes says of the log."""
        return root_cause(classify((line, 6) for line in self.text().splitlines()))

    def gpu_memory_mib(self) -> int:
        """GPU memory of the server's processes, as the driver counts it."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
        rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        pairs = [tuple(map(int, row.split(","))) for row in rows]
        return sum(used for pid, used in pairs if session(pid) == self.process.pid)


def session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def wait(servers: Sequence[Server], timeout: float) -> list[Server]:
    """Wait until each server is ready or dead, or ``timeout`` seconds have passed; return the ready ones."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and any(server.look() is None for server in servers):
        time.sleep(1)
    for server in servers:
        alive = server.look()
        state = f"ready after {server.ready_s:.0f} s" if server.ready_s is not None else "NOT READY"
        state = "DEAD" if alive is False else state
        cause = server.cause()
        print(f"{server.variant.name}: {state}{f'; {cause.cause}: {cause.line}' if cause else ''}", flush=True)
    return [server for server in servers if server.look()]
