# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts' base file system, and a flat apt repository of what they can install offline.

<cache>/image-<key>/rootfs  a tree as a freshly provisioned server has it
<cache>/image-<key>/debs    the packages that roles install, with what they depend on (/srv/debs in a host)
The key covers this file, the release, the package lists and the apt sources; a finished image is never changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .apt import SUITE, machine_apt_options, machine_sources
from .errors import LabError

# What a freshly provisioned server has.
BASE = ("apt", "systemd", "systemd-sysv", "dbus", "libpam-systemd", "openssh-server", "sudo", "python3", "python3-apt",
        "curl", "ca-certificates", "iproute2", "iputils-ping", "netbase", "procps", "kmod", "pciutils",
        "less")  # fmt: skip
# What roles install inside the hosts, and what a test compiles with. LAB_DEBS adds to it.
INSTALLABLE = ("python3-venv", "python3-pip", "prometheus", "prometheus-node-exporter", "prometheus-alertmanager",
               "nftables", "numactl", "libnuma1", "tcc")  # fmt: skip
SUITES = (SUITE, "trixie")
APT_SOURCE = "deb [trusted=yes] file:/srv/debs ./\n"
STEPS = 6


def installable(env: Mapping[str, str] = os.environ) -> list[str]:
    packages = sorted({*INSTALLABLE, *env.get("LAB_DEBS", "").replace(",", " ").split()})
    for package in packages:
        if not re.fullmatch(r"[a-z0-9][a-z0-9+.:-]+", package):
            raise LabError(
                "LAB_DEBS names something that is no Debian package",
                seen=repr(package),
                wanted="package names with spaces between them",
            )
    return packages


def release(env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The hosts' release and where its packages come from (deb822): LAB_SOURCES, or the machine's own sources."""
    suite, file = env.get("LAB_SUITE") or SUITE, env.get("LAB_SOURCES")
    if file and not os.access(file, os.R_OK):
        raise LabError("LAB_SOURCES can't be read", seen=file, wanted="a file of apt sources in deb822 form")
    if not file and suite not in SUITES:
        raise LabError(
            "LAB_SUITE is not a release of Debian that the lab knows",
            seen=suite,
            wanted=" or ".join(SUITES),
            next=f"for another release, LAB_SOURCES=FILE with apt sources for {suite}",
        )
    return suite, Path(file).read_text() if file else machine_sources(suite=suite)


def ensure(cache: Path, say, rebuild: bool = False) -> Path:
    """The image's directory, built now if it is not there yet."""
    (suite, sources), packages = release(), installable()
    key = hashlib.sha256("\0".join([Path(__file__).read_text(), suite, sources, *packages]).encode()).hexdigest()[:12]
    image = cache / f"image-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with _one_builder(cache, say):
        if image.is_dir() and not rebuild:
            say(f"image: {image} is current")
            return image
        building = cache / f"building-{key}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            _build(building, suite, sources, packages, _Progress(say))
            if image.is_dir():
                shutil.rmtree(image)
            building.rename(image)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return image


@contextmanager
def _one_builder(cache: Path, say) -> Iterator[None]:
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("image: another build is running, waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Progress:
    """Prints what is done, how far it is and how long it took so far."""

    def __init__(self, say) -> None:
        self.say, self.begin, self.step = say, time.monotonic(), 0

    def next(self, what: str) -> None:
        self.step += 1
        self.note(what)

    def note(self, what: str) -> None:
        self.say(f"image: {self.step}/{STEPS} {what} ({time.monotonic() - self.begin:.0f} s)")


def _build(directory: Path, suite: str, sources: str, packages: Iterable[str], progress: _Progress) -> None:
    root, debs = directory / "rootfs", directory / "debs"
    root.mkdir()
    debs.mkdir()
    progress.next(f"{suite}: unpacking and configuring {len(BASE)} packages and what they need")
    _bootstrap(root, debs, suite, sources, packages, progress)
    progress.next(f"writing {len(list(debs.glob('*.deb')))} packages' index")
    (debs / "Packages").write_bytes(_output(["apt-ftparchive", "packages", "."], debs))
    (debs / "Release").write_bytes(_output(["apt-ftparchive", "release", "."], debs))
    progress.next("configuring")
    _configure(root, debs)
    progress.next(f"done: {_size(root)} MB tree, {_size(debs)} MB packages")


def _bootstrap(root: Path, debs: Path, suite: str, sources: str, packages: Iterable[str], progress: _Progress) -> None:
    """Fill root and debs: mmdebstrap packs the tree in memory where there is room, tar unpacks it."""
    apt = 'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get'
    # Run outside the tree with mmdebstrap's own configuration, so that the machine's network settings hold.
    download = (
        f'set -e; rm -f "$1"/var/cache/apt/archives/*.deb; {apt} -y -qq --download-only --no-install-recommends '
        f'install {shlex.join(packages)}; mv "$1"/var/cache/apt/archives/*.deb {shlex.quote(str(debs))}/'
    )
    options = [
        f"--include={','.join(BASE)}",
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "locale", "doc")),
        *(f"--aptopt={option}" for option in machine_apt_options()),
        f"--customize-hook={download}",
    ]
    pack = ["mmdebstrap", "--mode=root", "--format=tar", "--variant=minbase", *options, suite, "-", "-"]
    unpack = ["tar", "-x", "-C", root, "--numeric-owner", "--xattrs", "--xattrs-include=*"]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **_fast_tmpdir()}
    log = root.parent / "build.log"
    with tempfile.TemporaryFile() as stdin, log.open("wb") as written:
        stdin.write(sources.encode())
        stdin.seek(0)
        pipe = subprocess.PIPE
        packer = subprocess.Popen(pack, stdin=stdin, stdout=pipe, stderr=pipe, env=environment)
        unpacker = subprocess.Popen(unpack, stdin=packer.stdout, stderr=written)
        packer.stdout.close()
        for line in packer.stderr:
            written.write(line)
            _show(line.decode(errors="replace").strip(), progress)
        codes = packer.wait(), unpacker.wait()
    if any(codes):
        raise LabError(
            "the image could not be built",
            seen="\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]),
            wanted="mmdebstrap and tar end with 0",
            next="apt-get update, then lab/lab image again",
        )


def _show(line: str, progress: _Progress) -> None:
    """A line of mmdebstrap's as progress, where it is the beginning of a stage."""
    if line.startswith("I: running --customize-hook"):
        progress.next("downloading the packages that hosts can install")
    elif line.startswith("I: extracting"):
        progress.next(line.removeprefix("I: ").rstrip("."))
    elif line.startswith(("I: downloading", "I: installing", "I: creating tarball")):
        progress.note(line.removeprefix("I: ").rstrip("."))


def _configure(root: Path, debs: Path) -> None:
    for path in [
        *root.glob("etc/ssh/ssh_host_*"),
        *root.glob("etc/apt/sources.list.d/*"),
        *root.glob("etc/apt/apt.conf.d/99mm*"),
    ]:
        path.unlink()
    (root / "etc/apt/sources.list").write_text(APT_SOURCE)
    (root / "etc/machine-id").write_text("")  # each host makes its own at its first boot
    (root / "etc/default/locale").write_text("LANG=C.UTF-8\n")
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "var/log/journal").mkdir(exist_ok=True)  # keeps the journal over a reboot
    (root / "srv/debs").mkdir()
    units = {
        "enable": ["systemd-networkd.service", "ssh.service"],
        "mask": ["systemd-networkd-wait-online.service", "apt-daily.timer", "apt-daily-upgrade.timer"],
    }
    for verb, names in units.items():
        _output(["systemctl", f"--root={root}", "--quiet", verb, *names], root)
    # A server's apt lists are filled, so that `apt` finds packages in check mode; and old, so that cache_valid_time
    # refreshes them.
    update = 'mount --bind "$1" "$2/srv/debs" && chroot "$2" apt-get -qq update'
    _output(["unshare", "--mount", "sh", "-c", update, "sh", debs, root], root)
    os.utime(root / "var/lib/apt/lists", (946684800, 946684800))


def _fast_tmpdir() -> dict[str, str]:
    """dpkg syncs thousands of times, which halves its speed on a disk: use memory where it holds the tree."""
    if not os.path.isdir("/dev/shm"):
        return {}
    shm = os.statvfs("/dev/shm")
    usable = shm.f_bavail * shm.f_frsize > 2 << 30 and not shm.f_flag & (os.ST_NODEV | os.ST_NOEXEC)
    return {"TMPDIR": "/dev/shm"} if usable else {}


def _output(command: list, directory: Path) -> bytes:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    if done.returncode:
        raise LabError(
            f"{command[0]} failed while the image was built",
            seen=done.stderr.decode(errors="replace").strip(),
            wanted="exit code 0",
            next="lab/lab image",
        )
    return done.stdout


def _size(directory: Path) -> int:
    return int(subprocess.run(["du", "-sm", directory], capture_output=True, text=True, check=True).stdout.split()[0])
