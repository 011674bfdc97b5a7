# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests here share: every scenario as it is rendered, and the router's own parser."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendering import JOBS, render

PARSE = """
import dataclasses, json, sys
from sglang_router.launch_router import parse_router_args
print(json.dumps(dataclasses.asdict(parse_router_args(sys.argv[1:])), default=str))
"""


@pytest.fixture(scope="session")
def router(engine_python: str) -> Callable[[list[str]], dict]:
    """Return what the installed router's own parser makes of a command line."""

    def parse(arguments: list[str]) -> dict:
        done = subprocess.run(
            [engine_python, "-c", PARSE, *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return parse


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Return scenario -> {"texts": file name -> text, and the values that the end of render.yml lists}."""
    directories = [tmp_path_factory.mktemp(inventory.name) for inventory, _settings, _prefix in JOBS]
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda job, directory: render(*job[:2], directory), JOBS, directories))
    prefixes = [prefix for _inventory, _settings, prefix in JOBS]
    return {
        prefix + host: values
        for prefix, result in zip(prefixes, results, strict=True)
        for host, values in result.items()
    }
