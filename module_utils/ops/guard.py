# SPDX-License-Identifier: GPL-3.0-or-later
"""Go back by itself to what served, when the play that switches to something else ends without a word.

    python3 -m ops.guard --lock /run/sglang-play.lock --link /opt/sglang/current --keep '/etc/systemd/system/sglang-*'

Runs as the transient unit sglang-guard from before a play's switch to after its proof; the play stops it then. Until
then it holds in memory, and nowhere else, what the switch will change: the link, the files that the patterns match, and
which units run as which invocation. The play's lock on the host ends with the play, however that ends. When nobody has
it at two looks, APART_S apart (a lost connection takes it again in between), the play is gone: files, link and units
are put back as they were, and what does not run as before is started again. Ends with status 0 when all of it serves.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import json
import os
import socket
import time
import typing as t
from dataclasses import dataclass, field

from .probe import say_line
from .systemd import Runner, SystemdError, UnitState, ask_command, checked, run_command, show

UNIT = "sglang-guard.service"
CANARY = "sglang-canary.service"
POLL_S, APART_S = 2.0, 15.0


@dataclass(frozen=True)
class KeptFile:
    """A file as it was."""

    content: bytes
    mode: int
    uid: int
    gid: int


@dataclass
class Kept:
    """What is put back: patterns and what they matched, the link's target, and the units that ran; since: of time()."""

    patterns: t.Sequence[str]
    link: str
    target: str
    since: float
    files: dict[str, KeptFile] = field(default_factory=dict)
    units: dict[str, UnitState] = field(default_factory=dict)


def matches(patterns: t.Iterable[str]) -> list[str]:
    """Return the files that the patterns match now."""
    return sorted({path for pattern in patterns for path in glob.glob(pattern) if os.path.isfile(path)})


def read_file(path: str) -> KeptFile:
    """Return what is there. Raises OSError."""
    with open(path, "rb") as stream:
        seen = os.fstat(stream.fileno())
        return KeptFile(stream.read(), seen.st_mode & 0o7777, seen.st_uid, seen.st_gid)


def units_of(paths: t.Iterable[str]) -> list[str]:
    """Return the names of the units among these files."""
    return [name for name in map(os.path.basename, paths) if name.endswith(".service")]


def keep(patterns: t.Sequence[str], link: str, runner: Runner = ask_command) -> Kept:
    """Return what there is before the switch. Raises OSError and SystemdError."""
    files = {path: read_file(path) for path in matches(patterns)}
    units = {unit: show(unit, runner) for unit in units_of(files)}
    return Kept(patterns, link, os.readlink(link), time.time(), files, units)


def write_file(path: str, file: KeptFile) -> None:
    """Write it as a whole or not at all. Raises OSError."""
    new = f"{path}.guard"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(file.content)
        os.fchown(stream.fileno(), file.uid, file.gid)
        os.fchmod(stream.fileno(), file.mode)
    os.replace(new, path)


def write_link(link: str, target: str) -> None:
    """Let it lead there, with one rename. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{link}.guard")
    os.symlink(target, f"{link}.guard")
    os.replace(f"{link}.guard", link)


def put_back(kept: Kept, run: Runner, say: t.Callable[[str], None]) -> None:
    """Put the files and the link back; what the play has added is stopped first. Raises OSError and SystemdError."""
    added = [path for path in matches(kept.patterns) if path not in kept.files]
    for unit in units_of(added):
        say(f"{unit} was not there before the switch: stopped and removed")
        checked(run, ["systemctl", "disable", "--now", unit])
    for path in added:
        os.unlink(path)
    for path, file in kept.files.items():
        if not os.path.isfile(path) or read_file(path) != file:
            say(f"{path}: as it was before the switch")
            write_file(path, file)
    if os.readlink(kept.link) != kept.target:
        say(f"{kept.link} leads to {kept.target} again")
        write_link(kept.link, kept.target)
    checked(run, ["systemctl", "daemon-reload"])


def start_again(kept: Kept, run: Runner, ask: Runner, say: t.Callable[[str], None]) -> bool:
    """Start what ran and does not run as it did, all of it at once; return whether all of it runs."""
    away = []
    for unit, before in kept.units.items():
        if not before.up:
            continue
        if before.unit_file_state == "enabled":
            checked(run, ["systemctl", "enable", unit])
        now = show(unit, ask)
        if now.up and now.invocation_id == before.invocation_id:
            say(f"{unit} still runs as before the switch")
        else:
            say(f"{unit}: starting what served before the switch")
            away.append(unit)
    if not away:
        return True
    # Starts of the release that failed count towards the start limit; where there were none this fails.
    run(["systemctl", "reset-failed", *away])
    started = time.monotonic()
    fine = run(["systemctl", "restart", *away]).rc == 0
    for unit in away:
        now = show(unit, ask)
        if now.active_state == "active":
            say(f"{unit} serves again after {time.monotonic() - started:.0f} s")
        else:
            say(f"{unit} does not start: {now.words()}. Next: journalctl -u {unit} -n 50")
    return fine


def proven(kept: Kept) -> bool:
    """Whether the play has written, after its switch, that what it switched to is proven."""
    try:
        return os.stat(os.path.join(kept.link, "proven")).st_mtime >= kept.since
    except OSError:
        return False


def go_back(
    kept: Kept, run: Runner = run_command, ask: Runner = ask_command, say: t.Callable[[str], None] = say_line
) -> bool:
    """Put everything back, start it and ask it; return whether it serves. Raises OSError and SystemdError."""
    if proven(kept):
        say("the play ended after it had proven what it switched to, which stays")
        return True
    say(f"the play that switched from {kept.target} ended without proving what it switched to: going back")
    put_back(kept, run, say)
    fine = start_again(kept, run, ask, say)
    if show(CANARY, ask).exists:
        # Its report is what smoke.yml, the metrics and the alerts go by.
        fine = run(["systemctl", "start", CANARY]).rc == 0 and fine
    say("gone back; what the play was for has not happened. Next: run it again" if fine else "gone back, not healthy")
    return fine


def record() -> str:
    """Return what the lock says to a play that finds it taken."""
    return json.dumps(
        {
            "id": UNIT,
            "user": f"root@{socket.gethostname()}",
            "pid": os.getpid(),
            "playbook": f"{UNIT}, which goes back to what served",
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        }
    )


def taken(lock: int) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_the_end(lock: int, sleep: t.Callable[[float], None] = time.sleep) -> None:
    """Return, with the lock, when the play has ended."""
    while True:
        if taken(lock):
            fcntl.flock(lock, fcntl.LOCK_UN)
            sleep(APART_S)
            if taken(lock):
                return
        sleep(POLL_S)


def notify_ready() -> None:
    """Tell systemd that everything is kept (man 3 sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(b"READY=1", address.replace("@", "\0", 1) if address[0] == "@" else address)


def main(argv: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops.guard", description="Go back when the play that switches ends untold.")
    parser.add_argument("--lock", required=True, help="the play's lock on this host")
    parser.add_argument("--link", required=True, help="the link to the release that serves")
    parser.add_argument("--keep", action="append", required=True, help="a pattern of files that are put back")
    arguments = parser.parse_args(argv)
    kept = keep(arguments.keep, arguments.link)
    lock = os.open(arguments.lock, os.O_RDWR | os.O_CREAT, 0o600)
    notify_ready()
    wait_for_the_end(lock)
    os.ftruncate(lock, 0)
    os.pwrite(lock, record().encode(), 0)
    try:
        return 0 if go_back(kept) else 1
    except (OSError, SystemdError) as error:
        say_line(f"cannot go back: {error}. Next: ansible-playbook site.yml, from the control node")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
