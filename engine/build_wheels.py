#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build wheels from Python packages of this repository and print what was built as JSON.

    build_wheels.py DIRECTORY [DIRECTORY ...]

Each DIRECTORY (relative to the repository) holds a pyproject.toml. A wheel is built once for each content of its
directory and kept in .cache/wheels/<sha256>/. Prints a list of {"source", "sha256", "wheel", "path"}: sha256 is that of
the sources, wheel the file name. Build backends come from the running interpreter (requirements.txt), so nothing is
downloaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / ".cache" / "wheels"
# Products of running or building a package are not its sources; neither are its tests and benchmarks.
IGNORED = {"__pycache__", "build", "dist", "tests", "benchmarks", ".pytest_cache", ".ruff_cache", ".hypothesis"}


def sources(package: Path) -> list[Path]:
    """Return the files that a wheel of `package` depends on, in a stable order."""

    def ignored(path: Path) -> bool:
        parts = path.relative_to(package).parts
        return path.suffix == ".pyc" or any(part in IGNORED or part.endswith(".egg-info") for part in parts)

    return sorted(path for path in package.rglob("*") if path.is_file() and not ignored(path))


def content_hash(package: Path) -> str:
    """Return the sha256 over names and contents of the package's sources."""
    digest = hashlib.sha256()
    for path in sources(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def build(package: Path, target: Path) -> Path:
    """Return the wheel of `package` in `target`, building it when it is not there yet."""
    found = list(target.glob("*.whl"))
    if found:
        return found[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # From a copy of the sources alone: a build directory left in the checkout adds files that are gone.
        copy = Path(scratch, "source")
        for file in sources(package):
            copied = copy / file.relative_to(package)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copied)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        command += ["--wheel-dir", scratch, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            seen = f"{package}: no wheel was built.\n{done.stdout}{done.stderr}"
            sys.exit(f"{seen}\nNext: {sys.executable} -m pip install -r requirements.txt")
        wheel = next(Path(scratch).glob("*.whl"))
        target.mkdir(exist_ok=True)
        return wheel.replace(target / wheel.name)


def main() -> None:
    """Build every package named on the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    built = []
    for source in sys.argv[1:]:
        package = REPOSITORY / source
        if not (package / "pyproject.toml").is_file():
            wanted = "a directory of this repository that holds a Python package"
            sys.exit(f"{source}: no pyproject.toml in {package}; wanted: {wanted}")
        digest = content_hash(package)
        wheel = build(package, CACHE / digest)
        built.append({"source": source, "sha256": digest, "wheel": wheel.name, "path": str(wheel)})
    print(json.dumps(built))


if __name__ == "__main__":
    main()
