#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fill a directory with the Debian packages of a lock file, and with the index that apt installs them from.

    debian.py DIRECTORY [--lock FILE]           fetch what is missing; refuse a file that is another one than the lock's
    debian.py DIRECTORY [--lock FILE] --update  write the lock: the packages of stack.lock.yml and what they depend on
    ... --source "deb ..."                      a line for sources.list, in place of this machine's own; for each of
                                                several once more
    ... --release NAME                          with --update: the hosts' release, where the first source has no name
    ... --package NAME=VERSION                  with --update: one to lock, in place of stack.lock.yml's; likewise
    ... --for PACKAGE.deb                       a package from elsewhere is installed, too: refuse a lock without what
                                                it depends on; with --update, lock that too

A lock has the lines of sha256sum, one for each package's file and one for the index, so a host proves its copy of the
directory with `sha256sum --check`, and a comment with the release of its hosts. Packages come
through this machine's apt, which checks the archive's signature; what is fetched for a lock from a --source is vouched
for by the lock's hashes alone, so that no keyring of another release is needed. apt's own state is not touched, and
root is not needed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
STACK = REPOSITORY / "stack.lock.yml"
LOCK = REPOSITORY / "engine/locks/debian-bookworm.sha256"
INDEX = "Packages"
HEADER = "# Written by engine/debian.py --update for x86_64. Check with: sha256sum --check\n"
OS_RELEASE = Path("/etc/os-release")
SOURCE = re.compile(r"deb (?:\[[^]]*\] )?\S+ (\S+)(?: \S+)*")
"""A line of sources.list; the suite is kept."""
MOVING = ("stable", "testing", "unstable", "oldstable", "devel")
"""Suites that are another release next year."""


def read_lock(text: str) -> dict[str, str]:
    """Return file -> sha256 of the lines of sha256sum; comments are left out."""
    return {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", text, re.MULTILINE)}


def write_lock(hashes: dict[str, str], release: str) -> str:
    """Return the text of a lock for hosts of a release, such as bookworm."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(hashes.items())]
    return f"{HEADER}# Release: {release}\n{''.join(lines)}"


def release_of(sources: list[str]) -> str:
    """Return the release that the first source is of, this machine's without any; "" when neither says.

    Exits when a source is no line for sources.list.
    """
    for line in sources:
        if not SOURCE.fullmatch(line):
            sys.exit(f"--source is {line!r}; wanted: deb [OPTIONS] URL SUITE COMPONENT ... Nothing was written.")
    if not sources:
        codename = re.search(r"^VERSION_CODENAME=\"?([a-z]+)\"?$", OS_RELEASE.read_text(), re.MULTILINE)
        return codename[1] if codename else ""
    suite = re.sub(r"-(updates|security|backports)$", "", SOURCE.fullmatch(sources[0])[1])
    return suite if re.fullmatch("[a-z]+", suite) and suite not in MOVING else ""


def refuse_another_release(lock: Path, release: str) -> None:
    """End when a lock that is there is for another release than the packages would come from."""
    named = re.search(r"^# Release: (\w+)$", lock.read_text(), re.MULTILINE) if lock.is_file() else None
    if named and release and named[1] != release:
        sys.exit(
            f"{lock} is for {named[1]}, and the packages would come from {release}; wanted: --source lines of "
            f"{named[1]} (mirror_debian_sources or mirror_driver_sources in an inventory), or another --lock. "
            "Nothing was changed."
        )


def pinned(file: str) -> str:
    """Return what apt calls the package in a file: name=version."""
    name, version, _architecture = file.removesuffix(".deb").split("_")
    return f"{name}={unquote(version)}"


def sha256(file: Path) -> str:
    """Return the hash of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def index(directory: Path, hashes: dict[str, str]) -> str:
    """Return apt's index of package files in a directory; equal files give equal text."""
    entries = []
    for name, digest in sorted(hashes.items()):
        control = subprocess.run(["dpkg-deb", "--field", directory / name], check=True, capture_output=True, text=True)
        size = (directory / name).stat().st_size
        entries.append(f"{control.stdout.rstrip()}\nFilename: ./{name}\nSize: {size}\nSHA256: {digest}\n")
    return "\n".join(entries)


def field(file: Path, name: str) -> str:
    """Return a field of a package file, "" for one that it does not have. Exits when it is no package."""
    done = subprocess.run(["dpkg-deb", "--field", file, name], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{file} is no Debian package ({done.stderr.strip()}); wanted: one. Next: fetch it again.")
    return done.stdout.strip()


def alternatives(depends: str) -> list[list[str]]:
    """Return the names in a field like Depends: for each that is needed those that will do, without versions."""
    clauses = [clause.split("|") for clause in depends.split(",") if clause.strip()]
    return [[re.split(r"[ (:]", one.strip(), maxsplit=1)[0] for one in clause] for clause in clauses]


def needs(file: Path) -> list[list[str]]:
    """Return what a package file depends on, as alternatives()."""
    return alternatives(", ".join(filter(None, (field(file, "Pre-Depends"), field(file, "Depends")))))


def lacking(needed: list[list[str]], index_text: str) -> list[list[str]]:
    """Return what of the needed an index of packages has neither by a package's name nor by what it provides."""
    there = set(re.findall(r"^Package: (\S+)$", index_text, re.MULTILINE))
    for provides in re.findall(r"^Provides: (.+)$", index_text, re.MULTILINE):
        there |= {name for (name,) in alternatives(provides)}
    return [names for names in needed if not there & set(names)]


class Apt:
    """This machine's apt, with lists, a cache and a list of installed packages (none) of its own.

    sources: lines for sources.list in place of this machine's. signed: whether an archive's signature is asked for.
    """

    def __init__(self, scratch: Path, sources: Iterable[str] = (), signed: bool = True) -> None:
        for part in ("lists/partial", "cache/archives/partial", "none"):
            (scratch / part).mkdir(parents=True)
        self.options = [f"-o=Dir::State::Lists={scratch}/lists", f"-o=Dir::Cache={scratch}/cache"]
        self.options += ["-o=Dir::State::status=/dev/null", "-o=Debug::NoLocking=1", "-o=APT::Get::List-Cleanup=0"]
        if sources:
            (scratch / "sources.list").write_text("".join(f"{line}\n" for line in sources))
            self.options += [
                f"-o=Dir::Etc::SourceList={scratch}/sources.list",
                f"-o=Dir::Etc::SourceParts={scratch}/none",
            ]
        if not signed:
            self.options += ["-o=Acquire::AllowInsecureRepositories=1", "-o=APT::Get::AllowUnauthenticated=1"]
        # A source of somebody else's that is away is not this program's business: what is missing shows below.
        self.run("update")

    def run(self, *words: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run apt-get."""
        command = ["apt-get", "-qq", *self.options, *words]
        return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)

    def files_of(self, packages: Iterable[str]) -> list[str]:
        """Return the files of packages and of all that they depend on, down to the C library."""
        done = self.run("--print-uris", "--yes", "--no-install-recommends", "install", *packages)
        if done.returncode:
            sys.exit(f"apt-get can't resolve {' '.join(packages)}:\n{done.stderr}Nothing was written.")
        return re.findall(r"^'\S+' (\S+_\S+\.deb) ", done.stdout, re.MULTILINE)


def fetch(apt: Apt, directory: Path, files: list[str], wanted: dict[str, str], lock: Path) -> None:
    """Fetch package files; each comes to its place whole, and only with the hash that is wanted of it, if one is."""
    print(f"debian: fetching {len(files)} packages into {directory}", flush=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as place:
        done = apt.run("download", *map(pinned, files), directory=Path(place))
        for name in files:
            file = Path(place) / name
            if file.is_file() and wanted.get(name, sha256(file)) == sha256(file):
                file.rename(directory / name)
    if missing := [name for name in files if not (directory / name).is_file()]:
        sys.exit(
            f"{directory}: {len(missing)} packages could not be had, first {missing[0]}; wanted: all of {lock}.\n"
            f"{done.stderr}\nAn archive drops a version when a newer one takes its place. Next: a --source that "
            f"still has it, or {sys.argv[0]} {directory} --lock {lock} --update, and review the lock."
        )


def refuse_others(directory: Path, wanted: dict[str, str]) -> None:
    """End when a file that is there is another one than the lock's."""
    for name, digest in wanted.items():
        file = directory / name
        if file.is_file() and (seen := sha256(file)) != digest:
            sys.exit(
                f"{file}: sha256 is {seen}, wanted {digest}. It was changed or cut after it was fetched. "
                f"Next: rm {file}, then the same command again."
            )


def main() -> None:
    """Fetch what is missing, or write the lock anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lock", type=Path, default=LOCK)
    parser.add_argument("--update", action="store_true", help="write the lock anew")
    parser.add_argument("--source", action="append", dest="sources", default=[], metavar='"deb ..."')
    parser.add_argument("--release", default="", metavar="NAME", help="with --update")
    parser.add_argument("--package", action="append", dest="packages", metavar="NAME=VERSION", help="with --update")
    parser.add_argument("--for", type=Path, dest="elsewhere", metavar="PACKAGE.deb", help="a package from elsewhere")
    options = parser.parse_args()
    if (options.packages or options.release) and not options.update:
        parser.error("--package and --release go with --update; without it the lock says what is fetched")
    needed = needs(options.elsewhere) if options.elsewhere else []
    directory, lock, started = options.directory.resolve(), options.lock.resolve(), time.monotonic()
    sources, release = options.sources, options.release or release_of(options.sources)
    refuse_another_release(lock, release)
    if options.update and not release:
        sys.exit(
            "the first --source does not name the hosts' release; wanted: as the first one a line with its name, such "
            "as bookworm or noble, or --release NAME. Nothing was written."
        )
    for path in (directory, lock.parent):
        path.mkdir(parents=True, exist_ok=True)
    wanted = read_lock(lock.read_text()) if lock.is_file() else {}
    if not wanted and not options.update:
        sys.exit(f"{lock} has no package; wanted: a lock. Next: the same command with --update.")
    index_hash = wanted.pop(INDEX, "")
    refuse_others(directory, wanted)
    with tempfile.TemporaryDirectory() as scratch:
        missing = [name for name in wanted if not (directory / name).is_file()]
        apt = Apt(Path(scratch), sources, options.update or not sources) if missing or options.update else None
        if apt and options.update:
            named = options.packages or yaml.safe_load(STACK.read_text())["debian"]["packages"]
            files = apt.files_of([*named, *(one[0] for one in needed)])
            wanted = {name: wanted.get(name, "") for name in files}
            missing = [name for name in files if not (directory / name).is_file()]
        if missing:
            fetch(apt, directory, missing, {name: digest for name, digest in wanted.items() if digest}, lock)
    if options.update:
        wanted = {name: sha256(directory / name) for name in wanted}
    text = index(directory, wanted)
    seen = hashlib.sha256(text.encode()).hexdigest()
    if options.update:
        lock.write_text(write_lock({**wanted, INDEX: seen}, release))
    elif seen != index_hash:
        sys.exit(
            f"{directory}/{INDEX}: sha256 would be {seen}, wanted {index_hash} ({lock}). Next: --update, and review."
        )
    if not (directory / INDEX).is_file() or (directory / INDEX).read_text() != text:
        (directory / INDEX).write_text(text)
    if missed := lacking(needed, text):
        sys.exit(
            f"{options.elsewhere} depends on {', '.join(' or '.join(names) for names in missed)}, which {lock} does "
            f"not have; wanted: all of it, or a host without a network can't install the package. Next: {sys.argv[0]} "
            f"{directory} --lock FILE --update --for {options.elsewhere}, review FILE, "
            "set sglang_host_debian_lock: FILE."
        )
    size = sum((directory / name).stat().st_size for name in wanted)
    print(
        f"debian: {len(wanted)} packages, {size / 1e6:.0f} MB, in {directory}; "
        f"{len(missing)} fetched, {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
