# SPDX-License-Identifier: GPL-3.0-or-later
"""The installed engine as a witness: one process that answers questions with SGLang's own code."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WITNESS = Path(__file__).with_name("engine_witness.py")
NO_ENGINE = """\
ENGINE_PYTHON is not set; it names the Python of a virtual environment with the engine. `make unit` makes one in
.cache/engine and runs these tests; with that one there, run
  ENGINE_PYTHON=.cache/engine/bin/python pytest"""


class Engine:
    """Asks a program that runs under the engine's Python. Its start takes many seconds: start early, ask late."""

    def __init__(self, python: str, program: Path = WITNESS) -> None:
        # A file, not a pipe: nobody reads the engine's chatter until it fails.
        self.chatter = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        self.process = subprocess.Popen(
            [python, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.chatter, text=True
        )

    def ask(self, question: str, **arguments: Any) -> Any:
        """Return the answer to a question of the program."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"ask": question, "with": arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.chatter.seek(0)
            pytest.fail(f"the engine's process ended:\n{self.chatter.read()[-2000:]}")
        answer = json.loads(line)
        assert "error" not in answer, f"{question} {arguments}: {answer['error']}"
        return answer["ok"]

    def close(self) -> None:
        """End the process, which has nothing to tidy up."""
        self.process.kill()
        self.process.communicate()
        self.chatter.close()


ENGINE = pytest.StashKey[Engine]()


@pytest.fixture(scope="session")
def engine_python() -> str:
    """The Python of a virtual environment with the engine."""
    return os.environ.get("ENGINE_PYTHON") or pytest.fail(NO_ENGINE)


@pytest.fixture(scope="session")
def start_engine(engine_python: str) -> Iterator[Callable[[Path], Engine]]:
    """Starts further programs under the engine's Python, and ends them."""
    started: list[Engine] = []

    def start(program: Path) -> Engine:
        started.append(Engine(engine_python, program))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the engine's process as soon as it is known that a test will ask it."""
    python = os.environ.get("ENGINE_PYTHON")
    wanted = any("sglang" in getattr(item, "fixturenames", ()) for item in session.items)
    if python and wanted and not session.config.option.collectonly:
        session.config.stash[ENGINE] = Engine(python)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the engine's process."""
    if ENGINE in session.config.stash:
        session.config.stash[ENGINE].close()


@pytest.fixture(scope="session")
def sglang(engine_python: str, pytestconfig: pytest.Config) -> Engine:
    """The engine that ENGINE_PYTHON has."""
    return pytestconfig.stash[ENGINE]
