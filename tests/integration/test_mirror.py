# SPDX-License-Identifier: GPL-3.0-or-later
"""A host that reaches nothing but its control node converges from what playbooks/mirror.yml fetched.

The host's way out is cut by the lab's network, and its only apt source is an address that does not exist. Packets for
the outside and questions for a name are written down, so that a converge that would only have tried shows too.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Seen, fault
from site_host import CACHE, CHECKOUT, SiteHost

pytestmark = pytest.mark.integration
DIRECTORY = CACHE / "mirror"
# What the archive has today: a lock of last month would need an archive that keeps what it has replaced.
LOCK = DIRECTORY / "debian.sha256"
LOCKED = ["-e", f"sglang_host_debian_lock={LOCK}"]
FROM_MIRROR = [*LOCKED, "-e", "sglang_venv_wheelhouse=/srv/mirror/wheels"]
FROM_MIRROR += ["-e", "sglang_host_debian_mirror=/srv/mirror/debian"]
SOURCE = "deb http://archive.invalid/debian bookworm main"
# Writes down the names that the host asks for, and knows none of them.
RESOLVER = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
while True:
    question, client = server.recvfrom(2000)
    labels, place = [], 12
    while question[place]:
        labels.append(question[place + 1:place + 1 + question[place]].decode())
        place += 1 + question[place]
    print(".".join(labels), flush=True)
    answer = question[:2] + bytes.fromhex("81830001000000000000") + question[12:place + 5]
    server.sendto(answer, client)
"""


@pytest.fixture(scope="module")
def control() -> SiteHost:
    """The control node with the wheels at hand: links to those of the lab, but for one that is left to fetch."""
    (DIRECTORY / "wheels").mkdir(parents=True, exist_ok=True)
    for wheel in (CACHE / "wheelhouse").glob("*.whl"):
        link = DIRECTORY / "wheels" / wheel.name
        link.unlink(missing_ok=True)
        if not wheel.name.startswith("idna-"):
            os.link(wheel, link)
    (DIRECTORY / "wheels/complete").unlink(missing_ok=True)
    command = [sys.executable, "engine/debian.py", DIRECTORY / "debian", "--lock", LOCK, "--update"]
    subprocess.run(command, cwd=CHECKOUT, check=True)
    control = SiteHost(f"m{os.getpid() % 100000}")
    control.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(CACHE / "wheelhouse")}
    return control


@pytest.fixture(scope="module")
def host(control: SiteHost) -> Iterator[SiteHost]:
    """A booted host with the mirror, and with a source for apt as a server in a data centre has it."""
    control.lab("up", "--bind-ro", f"{DIRECTORY}:/srv/mirror")
    control.shell(f"echo '{SOURCE}' > /etc/apt/sources.list; rm -rf /var/lib/apt/lists/*")
    control.shell(f"systemd-run --quiet --unit=resolver python3 -c {shlex.quote(RESOLVER)}")
    yield control
    if os.environ.get("LAB_KEEP") != "1":
        control.down()


def attempts(host: SiteHost) -> tuple[int, set[str]]:
    """Return how many packets for the outside the lab has sent back, and which names the host has asked for.

    The engine asks at its start what 0.0.0.0 and 127.0.0.1 are called, which is nobody else's business.
    """
    titles, counts = host.lab("exec", "--", "grep", "^Icmp:", "/proc/net/snmp").splitlines()
    asked = set(host.shell("journalctl --unit resolver --output cat --grep '^[^ ]+$' --quiet || true").splitlines())
    sent_back = int(counts.split()[titles.split().index("OutDestUnreachs")])
    return sent_back, {name for name in asked if not name.endswith(".in-addr.arpa")}


def test_the_mirror_is_filled_once(control: SiteHost) -> None:
    mirror = ["playbooks/mirror.yml", "-e", f"mirror_directory={DIRECTORY}", *LOCKED]
    first, second = control.play(*mirror), control.play(*mirror)
    assert first.changed_tasks() == ["mirror : Fetch the wheels (minutes) of cpu"]
    assert list((DIRECTORY / "wheels").glob("idna-*.whl")) != []
    assert (second.changed, second.changed_tasks()) == (0, [])
    for text in (
        " wheels, ",
        " MB, in ",
        " packages, ",
        "; 0 fetched",
        "sglang_host_debian_mirror: /srv/mirror/debian",
    ):
        assert text in " ".join(second.output.split())


def test_the_host_has_no_way_out_and_an_attempt_is_seen(host: SiteHost) -> None:
    sent_back, names = attempts(host)
    assert names == set()
    refused = host.shell("timeout 5 bash -c '</dev/tcp/192.0.2.1/443' 2>&1", status=1)
    assert "No route to host" in refused
    assert host.shell("getent hosts archive.invalid; echo $?") == "2"
    after = attempts(host)
    assert after[0] > sent_back and after[1] == {"archive.invalid"}


def test_a_package_that_is_not_the_locks_is_refused(host: SiteHost, tmp_path: Path) -> None:
    digest, name = next(line.split() for line in LOCK.read_text().splitlines() if "  nftables_" in line)
    other = tmp_path / "debian.sha256"
    other.write_text(LOCK.read_text().replace(digest, "0" * 64))
    run = host.play("site.yml", *FROM_MIRROR, "-e", f"sglang_host_debian_lock={other}", status=2)
    message = " ".join(run.output.split())
    for text in (f"/srv/mirror/debian on the host is not what {other} says: {name}: FAILED", "Next: where there is"):
        assert text in message
    assert run.changed == 0


def test_the_packages_of_another_release_are_refused(host: SiteHost, tmp_path: Path) -> None:
    other = tmp_path / "debian.sha256"
    other.write_text(LOCK.read_text().replace("# Release: bookworm", "# Release: trixie"))
    run = host.play("site.yml", *FROM_MIRROR, "-e", f"sglang_host_debian_lock={other}", status=2)
    assert f"The host is bookworm, and {other} is for trixie; wanted: the lock of" in " ".join(run.output.split())
    assert run.changed == 0


@fault("two plays at once", "the second one is told who holds the host, and changes nothing; the first goes on")
def test_it_converges_from_the_mirror_alone_and_a_second_play_meanwhile_is_refused(host: SiteHost, seen: Seen) -> None:
    before = attempts(host)
    first = subprocess.Popen(
        host.command("site.yml", *FROM_MIRROR),
        cwd=CHECKOUT,
        env=host.environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed = ""
    for line in first.stdout:
        printed += line
        if "TASK [sglang_venv : Create the environment's directory]" in line:
            break
    second = host.play("site.yml", *FROM_MIRROR, status=2)
    printed += first.communicate(timeout=1800)[0]
    assert first.returncode == 0, printed[-6000:]

    message = " ".join(second.output.split())
    for text in (
        "lab1 is held by another play: ",
        f"with site.yml, process {first.pid}, since 20",
        f"Wait until the other one ends, or end it: kill {first.pid}, there",
    ):
        assert text in message
    assert second.changed == 0
    seen("told by name, process and time; the first one served and proved")

    assert host.answers()
    assert "checks passed" in printed
    assert attempts(host) == before
    assert host.shell("cat /etc/apt/sources.list; ls /var/lib/apt/lists") == SOURCE


def test_a_killed_play_holds_nothing(host: SiteHost) -> None:
    host.play_until("TASK [sglang_host : See who has the user's name]", "site.yml", *FROM_MIRROR)
    time.sleep(2)
    run = host.play("site.yml", *FROM_MIRROR, "--tags=sglang_host")
    assert run.changed == 0
