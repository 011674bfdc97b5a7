# SPDX-License-Identifier: GPL-3.0-or-later
"""A misspelt variable of SGLang's own is seen in the files of an environment, before an engine ignores it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "roles/sglang_serve/files/look_for_variables.py"
SOURCE = """\
class Envs:
    SGLANG_ENABLE_PCIE_IPC_ALLREDUCE = EnvBool(False)
    SGLANG_MAX_NEW_TOKENS_LIMIT = EnvInt(0)
bucket = os.getenv(f"SGLANG_S3_{name}")
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    packages = tmp_path / "lib/python3.12/site-packages"
    for name, text in {
        "sglang/__init__.py": "",
        "sglang/srt/environ.py": SOURCE,
        "sglang/srt/table.csv": "SGLANG_IN_NO_CODE",
        "sglang/srt/rust/server.so": "...SGLANG_WARMUP_TIMEOUTThe SGLANG_MAX_NEW_TOKENS_LIMIT",
        "sglang/srt/rust/empty.so": "",
        "sgl_kernel/common.abi3.so": "\0SGL_KERNEL_TRACE\0",
        "other/variables.py": "SGLANG_OF_OTHERS",
    }.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    return tmp_path


def look(venv: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-", str(venv), *names]
    return subprocess.run(command, input=PROGRAM.read_text(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name",
    ["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "SGLANG_S3_BUCKET_NAME", "SGLANG_WARMUP_TIMEOUT", "SGL_KERNEL_TRACE"],
)
def test_what_is_known(venv, name):
    assert json.loads(look(venv, name).stdout) == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        # The beginning of a name, as a whole word, is another name: in source and in what is compiled.
        ("SGLANG_ENABLE_PCIE_IPC_ALLREDUC", " (did you mean SGLANG_ENABLE_PCIE_IPC_ALLREDUCE?)"),
        ("SGLANG_MAX_NEW_TOKEN", " (did you mean SGLANG_MAX_NEW_TOKENS_LIMIT?)"),
        ("SGLANG_MAX_NEW_TOKENS_LIMITS", " (did you mean SGLANG_MAX_NEW_TOKENS_LIMIT?)"),
        ("SGL_MAX_NEW_TOKENS_LIMIT", " (did you mean SGLANG_MAX_NEW_TOKENS_LIMIT?)"),
        ("SGLANG_IN_NO_CODE", ""),
        ("SGLANG_OF_OTHERS", ""),
    ],
)
def test_what_is_not(venv, name, meant):
    assert json.loads(look(venv, "SGLANG_MAX_NEW_TOKENS_LIMIT", name).stdout) == {name: meant}


def test_an_environment_without_the_engine_is_no_answer(tmp_path):
    done = look(tmp_path, "SGLANG_X")
    assert done.returncode == 1
    assert done.stderr == f"no package sglang in {tmp_path}; wanted: the engine's environment\n"
