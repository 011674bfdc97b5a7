# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a model on a host: what a manifest says they are, whether they are that, and how they get there.

    python3 -m ops.model_files DIRECTORY > manifest.json     writes down what a directory holds

A manifest is {"files": {"config.json": {"size": 1771, "sha256": "9f86..."}, ...}}; names are relative to the model's
directory. All progress is on disk: a fetch that was cut short goes on at the byte where it ended, and a file whose hash
was right is not read again before its size or its time of change differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import os
import re
import sys
import time
import typing as t
import urllib.parse
import urllib.request

PART = ".part"
CHUNK_BYTES = 1 << 20
ANSWER_SECONDS = 60.0
GIB = 1 << 30
COMPLETE, UNDER_WAY = "complete", "under way"

# No part of a path begins with a dot: nothing leads out of the directory, and nothing is hidden in it.
_NAME = re.compile(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*")


class ModelFilesError(Exception):
    """What is wrong with a manifest, a file or a source, in words for an operator."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a model. size: bytes; sha256: 64 hexadecimal digits."""

    name: str
    size: int
    sha256: str


def files_of(manifest: t.Any) -> list[File]:
    """Return the files of a manifest in its order. Raises ModelFilesError for anything else than a manifest."""
    entries = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise ModelFilesError('the manifest has no files; wanted: {"files": {NAME: {"size": BYTES, "sha256": HEX}}}')
    files = []
    for name, entry in entries.items():
        size, sha256 = (entry.get(key) if isinstance(entry, dict) else None for key in ("size", "sha256"))
        if not _NAME.fullmatch(name) or name.endswith(PART):
            raise ModelFilesError(f"the manifest has the file {name!r}; wanted: a name below the model's directory")
        is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        if not is_size or not re.fullmatch("[0-9a-f]{64}", str(sha256)):
            raise ModelFilesError(f"the manifest has {entry!r} for {name}; wanted: size in bytes and sha256")
        files.append(File(name, size, sha256))
    return files


def sha256_of(path: str) -> str:
    """Return the hash of a file in hexadecimal digits."""
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def describe(directory: str) -> dict[str, t.Any]:
    """Return the manifest of a directory; hidden files and what is half fetched are no part of a model."""
    entries = {}
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(parent, name)
            if not name.startswith(".") and not name.endswith(PART):
                entry = {"size": os.path.getsize(path), "sha256": sha256_of(path)}
                entries[os.path.relpath(path, directory)] = entry
    return {"files": entries}


class Seen:
    """Which files had the right hash when they were last read, in a file outside the model's directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, encoding="utf-8") as stream:
                self.entries = dict(json.load(stream))
        except (OSError, ValueError, TypeError):
            self.entries = {}

    @staticmethod
    def _now(path: str, file: File) -> list[t.Any]:
        found = os.stat(path)
        return [file.sha256, found.st_size, found.st_mtime_ns, found.st_ino]

    def has(self, path: str, file: File) -> bool:
        """Whether this very file was read and right."""
        return self.entries.get(path) == self._now(path, file)

    def add(self, path: str, file: File) -> None:
        """Write down that a file is right."""
        self.entries[path] = self._now(path, file)
        with open(self.path + ".new", "w", encoding="utf-8") as stream:
            json.dump(self.entries, stream)
        os.replace(self.path + ".new", self.path)


@dataclasses.dataclass(frozen=True)
class Look:
    """What one look found. done, total: bytes of files that are right, and of all; fetched: bytes that it brought."""

    status: str
    done: int
    total: int
    fetched: int
    seconds: float
    doing: str

    def line(self) -> str:
        """Return the progress in words."""
        words = f"{self.done / GIB:.2f} of {self.total / GIB:.2f} GiB"
        if self.fetched and self.seconds:
            rate = self.fetched / self.seconds
            left = int((self.total - self.done) / rate)
            words += f", {rate / 1e6:.0f} MB/s, {left // 60}m{left % 60:02d}s left"
        return f"{words}: {self.doing}" if self.doing else words


class Store:
    """A model's directory, its manifest, and where its files come from ("": from nowhere, they must be there)."""

    def __init__(self, directory: str, files: t.Sequence[File], seen: Seen, url: str = "") -> None:
        self.directory, self.files, self.seen, self.url = directory, files, seen, url.rstrip("/")

    def path(self, file: File) -> str:
        """Return where a file belongs."""
        return os.path.join(self.directory, file.name)

    def missing(self) -> list[File]:
        """Return the files that are not there with their size."""
        return [file for file in self.files if not self._has_size(file)]

    def unread(self) -> list[File]:
        """Return the files that are there with their size, and whose hash nobody has looked at."""
        return [file for file in self.files if self._has_size(file) and not self.seen.has(self.path(file), file)]

    def _has_size(self, file: File) -> bool:
        try:
            return os.path.getsize(self.path(file)) == file.size
        except OSError:
            return False

    def work(self, seconds: float) -> Look:
        """Read and fetch for about so many seconds; at least one file is read, and one chunk fetched.

        Raises ModelFilesError for a file that is other than the manifest says, and for a source that gives nothing.
        """
        started, fetched, doing = time.monotonic(), 0, ""
        deadline = started + seconds
        self._check_space()
        for file in self.files:
            if not self._has_size(file):
                if not self.url:
                    raise ModelFilesError(self._wrong_size(file))
                doing = f"fetching {file.name}"
                fetched += self._fetch(file, deadline)
            if self._has_size(file) and not self.seen.has(self.path(file), file):
                doing = f"reading {file.name}"
                self._read(file)
            if doing and time.monotonic() >= deadline:
                break
        return self._look(fetched, time.monotonic() - started, doing)

    def _check_space(self) -> None:
        """Raise ModelFilesError when the file system has no room for what is missing."""
        missing = self.missing() if self.url else []
        need = sum(file.size - min(file.size, self._part_size(file)) for file in missing)
        if not need:
            return
        os.makedirs(self.directory, exist_ok=True)
        seen = os.statvfs(self.directory)
        free = seen.f_bavail * seen.f_frsize
        if free < need:
            raise ModelFilesError(
                f"{self.directory} has {free / GIB:.1f} GiB free; wanted: {need / GIB:.1f} GiB for what is missing"
            )

    def _look(self, fetched: int, seconds: float, doing: str) -> Look:
        total = sum(file.size for file in self.files)
        right = [file for file in self.files if self._has_size(file) and self.seen.has(self.path(file), file)]
        half = sum(self._part_size(file) for file in self.files if not self._has_size(file))
        done = sum(file.size for file in right) + half
        whole = len(right) == len(self.files)
        return Look(COMPLETE if whole else UNDER_WAY, done, total, fetched, seconds, "" if whole else doing)

    def _wrong_size(self, file: File) -> str:
        path = self.path(file)
        size = f"has {os.path.getsize(path)} bytes" if os.path.exists(path) else "is not there"
        return f"{path} {size}; the manifest wants {file.size} bytes"

    def _read(self, file: File) -> None:
        found = sha256_of(self.path(file))
        if found != file.sha256:
            raise ModelFilesError(f"{self.path(file)}: sha256 is {found}; the manifest wants {file.sha256}")
        self.seen.add(self.path(file), file)

    def _part_size(self, file: File) -> int:
        try:
            return os.path.getsize(self.path(file) + PART)
        except OSError:
            return 0

    def _fetch(self, file: File, deadline: float) -> int:
        """Go on with a file until it is whole or time is up; return the bytes that came."""
        part, path = self.path(file) + PART, self.path(file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        have = self._part_size(file)
        if have > file.size:
            os.unlink(part)
            have = 0
        came = 0
        if have < file.size:
            came = self._receive(file, part, have, deadline)
        elif not os.path.exists(part):
            open(part, "wb").close()  # an empty file
        if self._part_size(file) == file.size:
            found = sha256_of(part)
            if found != file.sha256:
                os.unlink(part)
                raise ModelFilesError(f"{self._address(file)}: sha256 is {found}; the manifest wants {file.sha256}")
            os.chmod(part, 0o644)
            os.replace(part, path)
            self.seen.add(path, file)
        return came

    def _address(self, file: File) -> str:
        return f"{self.url}/{urllib.parse.quote(file.name)}"

    def _receive(self, file: File, part: str, have: int, deadline: float) -> int:
        """Append to a file what its source sends from a byte on. An end too early is no error when something came."""
        request = urllib.request.Request(self._address(file), headers={"Range": f"bytes={have}-"})
        came = 0
        try:
            with urllib.request.build_opener().open(request, timeout=ANSWER_SECONDS) as answer:
                # A source that knows no ranges sends the whole file again, and is not interrupted.
                ranged = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
                with open(part, "ab" if ranged else "wb") as stream:
                    left = file.size - (have if ranged else 0)
                    while left and (chunk := answer.read(min(CHUNK_BYTES, left))):
                        stream.write(chunk)
                        came += len(chunk)
                        left -= len(chunk)
                        if ranged and time.monotonic() >= deadline:
                            break
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not came:
                raise ModelFilesError(f"{self._address(file)}: {error}") from error
        if not came:
            raise ModelFilesError(f"{self._address(file)} sends nothing from byte {have} on; wanted: {file.size} bytes")
        return came


def main() -> None:
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        raise SystemExit(__doc__)
    sys.stdout.write(json.dumps(describe(sys.argv[1]), indent=2) + "\n")


if __name__ == "__main__":
    main()
