# SPDX-License-Identifier: GPL-3.0-or-later
"""What tests/bench/smoke writes of real reports; its runs need a lab."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path

import pytest
from confusion import suite
from openai_server import MODEL, FakeServer
from ops.http import Client
from ops.smoke import main, run

FILE = str(Path(__file__).parents[1] / "bench" / "smoke")
loader = importlib.machinery.SourceFileLoader("bench_smoke", FILE)
spec = importlib.util.spec_from_loader("bench_smoke", loader)
assert spec
bench = importlib.util.module_from_spec(spec)
loader.exec_module(bench)


def test_the_paragraph_says_what_the_reports_say() -> None:
    with FakeServer() as fake:
        right = run(Client(fake.base_url), MODEL, suite(timeout=20.0), "quick")
    with FakeServer("more_digits") as fake:
        wrong = run(Client(fake.base_url), MODEL, suite(timeout=20.0), "quick")
    text = " ".join(bench.paragraph([right, right], [0.5, 2.0]))
    assert f"({len(right['checks'])} checks), passed 2 of 2 runs in " in text
    assert "load of 0.5 to 2.0; 0 tries failed, 0 checks were not judged" in text
    assert re.search(r"no GET took more than \d\.\d\d s, no stream was silent for more than \d\.\d\d s\.$", text), text
    text = " ".join(bench.paragraph([right, wrong], [0.5, 2.0]))
    assert "passed 1 of 2 runs" in text
    assert text.endswith("Failed: prompt.product in 1, answer.expected in 1.")


def test_its_command_is_one_that_the_runner_takes(tmp_path: Path) -> None:
    words = bench.COMMAND.split(" -m ops.smoke ")[1].split()
    words[words.index("--report") + 1] = str(tmp_path / "report.json")
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "/etc/sglang/canary-checks.json" in (tmp_path / "report.json").read_text()


def test_the_page_has_the_place_for_it() -> None:
    page = bench.PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- quick runs: begin -->") == page.count("<!-- quick runs: end -->") == 1
