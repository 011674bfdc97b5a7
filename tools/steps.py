# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tools here share: numbered steps with their times, and the virtual environment of the control node."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

REPOSITORY = Path(__file__).resolve().parent.parent
VENV = REPOSITORY / ".venv"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-lab"


def minutes(seconds: float) -> str:
    """Return a duration as 3m07s."""
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


class Steps:
    """Runs programs one after the other, says what runs and how long it took, and ends at the first failure."""

    def __init__(self, total: int) -> None:
        self.total, self.started, self.taken = total, time.monotonic(), []

    def call(self, name: str, function: Callable[[], int | None], check: bool = True) -> int:
        """Run one step; a function that returns nothing, or 0, has done its work."""
        so_far = minutes(time.monotonic() - self.started)
        print(f"\n==> {len(self.taken) + 1}/{self.total} {name} ({so_far} so far)", flush=True)
        began = time.monotonic()
        status = function() or 0
        self.taken.append((name, time.monotonic() - began, status))
        if status and check:
            self.report()
            sys.exit(f"\n{name}: exit status {status}")
        return status

    def run(
        self,
        name: str,
        command: Sequence[str | Path],
        environment: dict[str, str] | None = None,
        check: bool = True,
    ) -> int:
        """Run a program as one step; its output goes to the terminal."""
        words, surroundings = [str(word) for word in command], {**os.environ, **(environment or {})}

        def program() -> int:
            status = subprocess.run(words, cwd=REPOSITORY, env=surroundings, check=False).returncode
            if status:
                print(f"exit status {status} of: {' '.join(words)}", flush=True)
            return status

        return self.call(name, program, check)

    def start(
        self, name: str, command: Sequence[str | Path], environment: dict[str, str] | None = None
    ) -> Callable[[], int]:
        """Start a program beside the steps that follow, and return the step that waits for it and prints its output."""
        words, surroundings = [str(word) for word in command], {**os.environ, **(environment or {})}
        log = REPOSITORY / ".cache" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        print(f"\n==> beside the next steps: {name}, output in {log}", flush=True)
        with log.open("wb") as output:
            process = subprocess.Popen(words, cwd=REPOSITORY, env=surroundings, stdout=output, stderr=subprocess.STDOUT)

        def program() -> int:
            status = process.wait()
            print(log.read_text(errors="replace"), end="")
            if status:
                print(f"exit status {status} of: {' '.join(words)}", flush=True)
            return status

        return lambda: self.call(f"{name} (the rest)", program, check=False)

    def report(self) -> None:
        """Print the steps with their times."""
        print("\nstep                                            time   result")
        for name, seconds, status in self.taken:
            print(f"{name:<45} {minutes(seconds):>7}   {'ok' if status == 0 else f'exit status {status}'}")
        print(f"{'all':<45} {minutes(time.monotonic() - self.started):>7}", flush=True)


def machine_packages(more: Mapping[str, str]) -> list[str]:
    """Return the Debian packages that the lab and the virtual environment need and this machine lacks.

    more: program -> package, of further ones.
    """
    sys.path.insert(0, str(REPOSITORY / "lab"))
    from hostlab.machine import PACKAGE_OF

    missing = {package for tool, package in {**PACKAGE_OF, **more}.items() if not shutil.which(tool)}
    return sorted(missing if importlib.util.find_spec("ensurepip") else missing | {"python3-venv"})


def install_packages(more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Install missing Debian packages as root on Debian; else say what is missing."""
    missing = machine_packages(more)
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit(f"Missing on this machine: {' '.join(missing)}.\nNext: sudo {' '.join(command)}")
    print(f"installing {' '.join(missing)}", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "--quiet", "--quiet"], env=quiet, check=True)
    subprocess.run([*command, "--quiet", "--quiet"], env=quiet, check=True, stdout=subprocess.DEVNULL)


def make_venv(requirements: str) -> None:
    """Make .venv from a requirements file, unless it was made from the same text before."""
    text = "".join((REPOSITORY / name).read_text() for name in ("requirements.txt", requirements))
    key = hashlib.sha256(f"{text}{sys.version}".encode()).hexdigest()
    marker = VENV / "complete"
    known = marker.read_text().split() if marker.exists() else []
    if key in known:
        return
    print(f"making {VENV.name} from {requirements}", flush=True)
    if not known:
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    pip = [
        VENV / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--require-hashes",
        "--requirement",
        REPOSITORY / requirements,
    ]
    subprocess.run(pip, check=True)
    marker.write_text("\n".join([*known, key]) + "\n")
