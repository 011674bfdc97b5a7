# SPDX-License-Identifier: GPL-3.0-or-later
"""Damage to a model's files is named, by its manifest or by what the files of a checkpoint say of themselves."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "roles/model_store/files/look_at_model.py"
INDEX = "model.safetensors.index.json"


def safetensors(*sizes: int) -> bytes:
    """A file of tensors with these sizes in bytes."""
    tensors, end = {"__metadata__": {"format": "pt"}}, 0
    for number, size in enumerate(sizes):
        tensors[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(end)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, sizes in {"model-1.safetensors": (5, 7), "model-2.safetensors": (3,)}.items():
        (tmp_path / name).write_bytes(safetensors(*sizes))
    (tmp_path / "config.json").write_text("{}")
    weights = {"t0": "model-1.safetensors", "t1": "model-1.safetensors", "u0": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    return tmp_path


@pytest.fixture
def made(checkpoint: Path) -> Path:
    """The same files with a manifest."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in checkpoint.iterdir()
    }
    (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    return checkpoint


def look(directory: Path) -> list[str]:
    """Run the program as the role does."""
    command = [sys.executable, "-I", "-", str(directory)]
    done = subprocess.run(command, stdin=PROGRAM.open(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_nothing_to_say(checkpoint: Path, tmp_path: Path) -> None:
    assert look(checkpoint) == []
    assert look(tmp_path / "none") == []


def test_a_whole_manifest(made: Path) -> None:
    assert look(made) == []


@pytest.mark.parametrize(
    ("size", "said"),
    [(-1, "bytes instead of"), (20, "has a damaged header: ends within its header"), (0, "has 0 bytes")],
)
def test_a_shard_that_was_cut(checkpoint: Path, size: int, said: str) -> None:
    path = checkpoint / "model-1.safetensors"
    cut(path, size)
    (line,) = look(checkpoint)
    assert str(path) in line and said in line


def test_a_shard_that_is_missing_or_no_file_of_tensors(checkpoint: Path) -> None:
    (checkpoint / "model-1.safetensors").unlink()
    (checkpoint / "model-2.safetensors").write_bytes(struct.pack("<Q", 4) + b"nono")
    missing, damaged = look(checkpoint)
    assert missing == f"{checkpoint}/model-1.safetensors is missing, and {INDEX} names it"
    assert f"{checkpoint}/model-2.safetensors has a damaged header" in damaged


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_of_json_that_was_cut(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text('{"a')
    (line,) = look(checkpoint)
    assert line.startswith(f"{checkpoint / name} can't be read")


def test_what_differs_from_the_manifest(made: Path) -> None:
    (made / "config.json").unlink()
    whole = (made / INDEX).stat().st_size
    cut(made / INDEX, 9)
    content = bytearray((made / "model-2.safetensors").read_bytes())
    content[-1] ^= 1
    (made / "model-2.safetensors").write_bytes(content)
    assert look(made) == [
        f"{made}/config.json is missing",
        f"{made}/model-2.safetensors has another content than when it was made",
        f"{made / INDEX} has 9 bytes instead of {whole}",
    ]


@pytest.mark.parametrize(("content", "said"), [("{", "can't be read"), ('{"files": {"config.json": 2}}', "no sizes")])
def test_a_manifest_that_is_none(made: Path, content: str, said: str) -> None:
    (made / "manifest.json").write_text(content)
    (line,) = look(made)
    assert said in line
