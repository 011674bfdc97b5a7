# SPDX-License-Identifier: GPL-3.0-or-later
"""A small apt repository of packages of our own, signed with a throw-away key, and served on a lab's network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PORT = 8099


def run(*command: str | Path, directory: Path | None = None, env: dict[str, str] | None = None) -> bytes:
    """Run a program and return what it prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=directory, env={**os.environ, **(env or {})}, capture_output=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.decode()}"
    return done.stdout


class Key:
    """A signing key in a keyring of its own. The ring's path is short: its agent's socket lies in it."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="key"))
        self.env = {"GNUPGHOME": str(self.home)}
        quiet = ["gpg", "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        run(*quiet, "--quick-generate-key", "tests@example", "ed25519", "sign", "never", env=self.env)
        self.public = run("gpg", "--batch", "--armor", "--export", env=self.env).decode()

    def sign(self, release: Path) -> None:
        """Write InRelease beside a Release file."""
        signed = release.with_name("InRelease")
        signed.unlink(missing_ok=True)
        run("gpg", "--batch", "--clearsign", "--output", signed, release, env=self.env)

    def forget(self) -> None:
        """End the key's agent and remove the key."""
        subprocess.run(["gpgconf", "--kill", "all"], env={**os.environ, **self.env}, check=False)
        shutil.rmtree(self.home)


class Repository:
    """A directory of packages with a signed index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def add(self, name: str, version: str, depends: str = "", files: dict[str, str] | None = None) -> None:
        """Build a package of these files; a file in a bin directory can be run, and so can a script in /DEBIAN."""
        with tempfile.TemporaryDirectory() as tree:
            for path, text in (files or {}).items():
                file = Path(tree) / path.lstrip("/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
                file.chmod(0o755 if file.parent.name in ("bin", "DEBIAN") else 0o644)
            control = Path(tree) / "DEBIAN/control"
            control.parent.mkdir(exist_ok=True)
            control.write_text(
                f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: Tests <tests@example>\n"
                + (f"Depends: {depends}\n" if depends else "")
                + f"Description: stands for {name}\n"
            )
            Path(tree).chmod(0o755)
            run("dpkg-deb", "--root-owner-group", "--build", tree, self.directory / f"{name}_{version}_all.deb")

    def publish(self, key: Key) -> None:
        """Write the index anew and sign it."""
        (self.directory / "Packages").write_bytes(run("apt-ftparchive", "packages", ".", directory=self.directory))
        for name in ("Release", "InRelease"):
            (self.directory / name).unlink(missing_ok=True)
        release = run("apt-ftparchive", "-o", "APT::FTPArchive::Release::Origin=tests", "release", ".",
                      directory=self.directory)  # fmt: skip
        (self.directory / "Release").write_bytes(release)
        key.sign(self.directory / "Release")


class Server:
    """Serves a directory to the hosts of a lab from its control node's address."""

    def __init__(self, directory: Path, environment: dict[str, str], address: str) -> None:
        self.url = f"http://{address}:{PORT}"
        lab = [sys.executable, str(CHECKOUT / "lab/lab"), "exec", "--"]
        server = ["python3", "-m", "http.server", "--bind", address, "--directory", str(directory), str(PORT)]
        self.process = subprocess.Popen(
            [*lab, *server], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        probe = [*lab, "python3", "-c", f"import urllib.request as u; u.urlopen('{self.url}/InRelease', timeout=2)"]
        for _try in range(20):
            if subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.5)
        raise AssertionError(f"nothing answers at {self.url}")

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait(10)
