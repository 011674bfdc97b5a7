#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Say what of a model's files is damaged: gone, cut, or of another content than when they were made.

    look_at_model.py DIRECTORY

Prints a JSON list, one sentence for each file. manifest.json, which gguf_to_hf.py writes, has sizes and sha256. Without
one, the files of a checkpoint are measured by what they say of themselves: the index names every file of weights, and
the header of a safetensors file (8 bytes of length, then JSON with the offsets of every tensor) says where it ends.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

INDEX, MANIFEST = "model.safetensors.index.json", "manifest.json"


def read_json(path: Path) -> dict:
    """Return the object in a file. Raises OSError, and ValueError for anything else."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    return content


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file that may be larger than the memory."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def wanted_size(path: Path) -> int:
    """Return the size that a safetensors file says it has. Raises OSError and ValueError."""
    with path.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise ValueError(f"has {len(head)} bytes")
        (length,) = struct.unpack("<Q", head)
        if length > path.stat().st_size - 8:
            raise ValueError("ends within its header")
        tensors = json.loads(stream.read(length))
    return 8 + length + max(tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__")


def against_manifest(directory: Path, files: dict) -> Iterator[str]:
    """Yield what differs from the manifest."""
    for name, wanted in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != wanted["size"]:
            yield f"{path} has {path.stat().st_size} bytes instead of {wanted['size']}"
        elif sha256_of(path) != wanted["sha256"]:
            yield f"{path} has another content than when it was made"


def against_themselves(directory: Path) -> Iterator[str]:
    """Yield what is damaged in a checkpoint without a manifest."""
    for name in ("config.json", INDEX):
        try:
            content = read_json(directory / name)
        except FileNotFoundError:
            continue
        except ValueError as error:
            yield f"{directory / name} can't be read: {error}"
            continue
        for shard in sorted(set(content.get("weight_map", {}).values())):
            if not (directory / shard).is_file():
                yield f"{directory / shard} is missing, and {INDEX} names it"
    for path in sorted(directory.glob("*.safetensors")):
        try:
            size, wanted = path.stat().st_size, wanted_size(path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{path} has a damaged header: {error}"
            continue
        if size != wanted:
            yield f"{path} has {size} bytes instead of {wanted}"


def look(directory: Path) -> list[str]:
    """Return what is damaged."""
    try:
        manifest = read_json(directory / MANIFEST)
    except FileNotFoundError:
        return list(against_themselves(directory))
    except ValueError as error:
        return [f"{directory / MANIFEST} can't be read: {error}"]
    try:
        return list(against_manifest(directory, manifest["files"]))
    except (KeyError, TypeError, AttributeError):
        return [f"{directory / MANIFEST} has no sizes and sha256"]


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
