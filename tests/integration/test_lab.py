# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's hosts behave as servers do, and a lab leaves nothing behind, however it ends.

Needs root and what `lab/lab image` needs. Uses labs of its own, beside any other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "lab"))

from hostlab import apt, cgroups, image  # noqa: E402  (the lab is a tool, not an installed package)
from hostlab.errors import LabError  # noqa: E402
from hostlab.settings import Settings, parse_hosts  # noqa: E402

pytestmark = pytest.mark.lab
NAME = f"t{os.getpid()}"
SPECS = ("one=10.77.0.11", "two=10.77.0.12")
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


class Bench:
    """A lab of one test run, used through its commands as a user does."""

    def __init__(self, name: str, checkout: Path = CHECKOUT, **variables: str) -> None:
        self.name, self.tool = name, checkout / "lab"
        self.environment = {**os.environ, "LAB_NAME": name, "LAB_MEMORY": "1g", **variables}
        self.state = Settings.from_environment(self.environment).state

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run lab/lab, require its exit code, and return stdout and stderr."""
        done = subprocess.run(
            [self.tool / "lab", *words],
            env=self.environment,
            text=True,
            timeout=150,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def ssh(self, host: str, command: str, code: int | None = 0) -> str:
        done = subprocess.run(
            [self.tool / "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", host, command],
            timeout=60,
            check=False,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout.strip()

    @property
    def status(self) -> dict:
        return json.loads(self("status", "--json"))

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self.tool / "lab", *words],
            env=self.environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def left(self) -> list[str]:
        """Whatever of this lab is on the machine: processes, mounts, cgroups, directories."""
        found = [str(self.state)] if self.state.exists() else []
        found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.state) in line]
        found += map(str, Path("/sys/fs/cgroup").glob(f"**/sglang-lab-{self.state.name}"))
        return found + processes(str(self.state))


def processes(text: str) -> list[str]:
    """Those with this text in their command line, in hosts too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended meanwhile
        if text in command:
            found.append(f"{path.parent.name}: {command}")
    return found


def eventually(happened: Callable[[], object], seconds: float = 30) -> object:
    end = time.monotonic() + seconds
    while not (value := happened()):
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.1)
    return value


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    shared = tmp_path_factory.mktemp("shared")
    (shared / "file").write_text("from the machine\n")
    bench, before = Bench(NAME, LAB_BIND_RO=f"{shared}:/srv/wheelhouse"), interfaces()
    try:
        bench("up", *SPECS)
        yield bench
    finally:
        bench("down")
    assert bench.left() == []
    assert interfaces() == before


@pytest.fixture
def other() -> Iterator[Bench]:
    bench = Bench(f"{NAME}b")
    yield bench
    bench("down")
    assert bench.left() == []


# ---- hosts as servers


@pytest.mark.parametrize("host", ["one", "two"])
def test_host_has_booted_as_a_server(lab: Bench, host: str) -> None:
    assert lab.ssh(host, "hostname; systemctl is-system-running; cat /proc/1/comm") == f"{host}\nrunning\nsystemd"


def test_hosts_reach_each_other_by_name(lab: Bench) -> None:
    assert (
        lab.ssh("one", "ssh-keyscan -t ed25519 two 2>/dev/null").split()[1:]
        == lab.ssh("two", "cat /etc/ssh/ssh_host_ed25519_key.pub").split()[:2]
    )


def test_second_up_leaves_hosts_alone(lab: Bench) -> None:
    boots = [lab.ssh(host, BOOT_ID) for host in ("one", "two")]
    output = lab("up", *SPECS)
    assert "one: already up" in output and "two: already up" in output
    assert [lab.ssh(host, BOOT_ID) for host in ("one", "two")] == boots


def test_up_refuses_to_change_a_running_host(lab: Bench) -> None:
    assert "up with another specification" in lab("up", "one=10.77.0.11", "--memory", "2g", code=1)
    assert "address of three is taken" in lab("up", "three=10.77.0.11", code=1)
    assert [host["name"] for host in lab.status["hosts"]] == ["one", "two"]


def test_reboot_keeps_the_disk_and_the_journal(lab: Bench) -> None:
    before = lab.ssh("one", f"echo kept > /root/kept; sync; logger before-the-reboot; journalctl --sync; {BOOT_ID}")
    lab.ssh("one", "systemctl reboot", code=None)
    eventually(lambda: lab.ssh("one", BOOT_ID, code=None) not in ("", before))
    assert lab.ssh("one", "cat /root/kept") == "kept"
    assert "before-the-reboot" in lab.ssh("one", "journalctl --no-pager -b -1 -t root")


def test_power_cut_and_on(lab: Bench) -> None:
    before = lab.ssh("two", BOOT_ID)
    lab("power", "two", "cut")
    assert [host["on"] for host in lab.status["hosts"]] == [True, False]
    lab.ssh("two", "true", code=255)
    lab("power", "two", "on")
    assert lab.ssh("two", BOOT_ID) != before


def test_clean_power_off_stops_services(lab: Bench) -> None:
    lab.ssh("two", "systemd-run --quiet --unit=marker -p ExecStop='/bin/touch /root/stopped' sleep infinity")
    lab("power", "two", "off")
    assert "two: was off, switching on" in lab("up", *SPECS)
    assert lab.ssh("two", "ls /root/stopped") == "/root/stopped"


def test_memory_limits_bind(lab: Bench) -> None:
    allocate = "python3 -c 'print(len(bytearray({} << 20)))'"
    unit = "systemd-run --quiet --wait --pipe -p MemoryMax=100M " + allocate
    assert lab.ssh("one", unit.format(50)) == str(50 << 20)
    assert lab.ssh("one", unit.format(200), code=None) == ""
    assert lab.ssh("one", allocate.format(200)) == str(200 << 20)
    assert lab.ssh("one", allocate.format(1200), code=None) == ""  # the host's own limit is 1g


def test_packages_install_offline(lab: Bench) -> None:
    lab.ssh("one", "apt-get -s install prometheus python3-venv")  # the lists are there before any update
    lab.ssh("one", "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -y -qq install numactl")
    assert "policy: default" in lab.ssh("one", "numactl --show")


def test_there_is_no_way_out(lab: Bench) -> None:
    fetch = "curl -sS --connect-timeout 5 -o /dev/null -w '%{time_total}' http://192.0.2.1/ 2>/dev/null"
    assert float(lab.ssh("one", fetch, code=7)) < 1
    assert float(lab("exec", "--", "sh", "-c", fetch, code=7)) < 1


def test_bind_is_there_and_read_only(lab: Bench) -> None:
    assert lab.ssh("two", "cat /srv/wheelhouse/file") == "from the machine"
    lab.ssh("two", "touch /srv/wheelhouse/new", code=1)


# ---- the machine's side


def test_exec_runs_as_the_control_node(lab: Bench, tmp_path: Path) -> None:
    assert "10.77.0.1/24" in lab("exec", "--", "ip", "-o", "-4", "address", "show", "lab0")
    assert lab("exec", "--", "pwd").strip() == os.getcwd()
    lab("exec", "--", "sh", "-c", "exit 7", code=7)
    assert (
        lab("exec", "--", str(CHECKOUT / "lab/ssh"), "one", "hostname").strip() == "one"
    )  # the wrapper works from inside, too


def test_shell_enters_a_host_past_ssh(lab: Bench) -> None:
    lab.ssh("two", "systemctl stop ssh")
    assert lab("shell", "two", "--", "hostname").strip() == "two"
    lab("shell", "two", "systemctl", "start", "ssh")


def test_ssh_refuses_a_changed_host_key(lab: Bench) -> None:
    known = lab.state / "known_hosts"
    text = known.read_text()
    lab.ssh("one", "true")
    subprocess.run([CHECKOUT / "lab/ssh", "-O", "exit", "one"], env=lab.environment, check=True, capture_output=True)
    key_of = {line.split()[0].split(",")[1]: line.split(maxsplit=1)[1] for line in text.splitlines()}
    try:
        known.write_text(f"10.77.0.11,one {key_of['two']}\n")
        lab.ssh("one", "true", code=255)
    finally:
        known.write_text(text)
    lab.ssh("one", "true")


def test_forward_reaches_a_host_from_this_machine(lab: Bench) -> None:
    serve = "-p WorkingDirectory=/etc python3 -m http.server"
    lab.ssh("one", f"systemd-run --quiet --unit=web {serve} 8000")
    lab.ssh("one", f"systemd-run --quiet --unit=inside {serve} 8001 --bind 127.0.0.1")
    lab.ssh("one", "until curl -sf -o /dev/null localhost:8000 localhost:8001; do sleep 0.1; done")
    port = 20000 + os.getpid() % 10000
    for near, far in ((port, "one:8000"), (port + 1, "one:127.0.0.1:8001")):
        lab("forward", f"{near}={far}")
        with urllib.request.urlopen(f"http://127.0.0.1:{near}/hostname", timeout=5) as answer:
            assert answer.read() == b"one\n"
    assert "already there" in lab("forward", f"{port}=one:8000")
    assert "cannot be opened" in lab("forward", f"{port}=two:22", code=1)
    assert lab.status["forwards"] == {f"127.0.0.1:{port}": "one:8000", f"127.0.0.1:{port + 1}": "one:127.0.0.1:8001"}
    with pytest.raises(urllib.error.URLError):  # the host's network is not this machine's
        urllib.request.urlopen("http://10.77.0.11:8000/", timeout=1)


def test_labs_with_equal_addresses_run_side_by_side(lab: Bench, other: Bench) -> None:
    other("up", "else=10.77.0.11")
    assert (lab.ssh("10.77.0.11", "hostname"), other.ssh("10.77.0.11", "hostname")) == ("one", "else")
    other("down")
    assert other.left() == []
    assert lab.ssh("10.77.0.11", "hostname") == "one"


def test_killed_lab_ends_wholly_and_down_clears_the_rest(other: Bench) -> None:
    other("up", "one=10.77.0.11")
    marker = f"86400.{os.getpid()}"
    other.ssh("one", f"systemd-run --quiet sleep {marker}")
    assert eventually(lambda: processes(f"sleep {marker}"))
    os.kill(other.status["pid"], signal.SIGKILL)
    eventually(lambda: not processes(f"sleep {marker}"), 10)
    assert other("status", code=3).strip().endswith("down")
    other("down")
    assert other.left() == []


# ---- lab run


def test_run_passes_the_exit_code_and_removes_the_lab_under_a_long_path(tmp_path: Path) -> None:
    checkout = tmp_path / ("long-" * 20) / ("path-" * 20)
    shutil.copytree(CHECKOUT / "lab", checkout / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    bench = Bench(f"{NAME}c", checkout)
    output = bench("run", "one=10.77.0.11", "--", "sh", "-c", f"{checkout}/lab/ssh one hostname && exit 5", code=5)
    assert output.splitlines()[-1] == "one"
    assert "down" in bench("status", code=3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_takes_the_lab_with_it(other: Bench, number: signal.Signals) -> None:
    process = other.start("run", "one=10.77.0.11", "--", "sleep", "1000")
    try:
        eventually((other.state / "control").exists, 60)
        first = other.status["pid"]
    finally:
        process.send_signal(number)
        process.wait(30)
    eventually(lambda: not Path(f"/proc/{first}").exists(), 10)
    if number == signal.SIGTERM:  # after SIGKILL the empty rest waits for the next up or down
        assert other.left() == []


# ---- what the user is told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up", "verylongname12=10.77.0.11"], "1 to 11 of a-z"),
        (["up", "one"], "NAME=IP"),
        (["up", "one=10.77.0.256"], "an IPv4 address"),
        (["up", "one=8.8.8.8"], "a private IPv4 address"),
        (["up", "one=10.77.0.11", "one=10.77.0.12"], "the same name"),
        (["up", "one=10.77.0.11", "two=10.77.1.11"], "addresses in one /24"),
        (["up", "--memory", "12 parsecs"], "such as 12g"),
        (["up", "--bind-ro", "/does/not/exist:/srv"], "is not there"),
        (["exec", "--", "true"], f"LAB_NAME={NAME}d make site"),
        (["power", "one", "on"], f"LAB_NAME={NAME}d lab/lab up"),
        (["forward", "9090=one:x"], "[LISTEN:]PORT=NAME:PORT"),
        (["forward", "9090=one:10.0.0.1:9090"], "[LISTEN:]PORT=NAME:127.0.0.1:PORT"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(words: list[str], told: str) -> None:
    bench = Bench(f"{NAME}d")
    assert told in bench(*words, code=1)
    assert bench.left() == []


def test_ssh_without_a_lab_names_the_command_that_makes_one() -> None:
    bench = Bench(f"{NAME}d")
    command = [bench.tool / "ssh", "one"]
    done = subprocess.run(command, env=bench.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 255
    assert f"LAB_NAME={NAME}d make -C {CHECKOUT} site" in done.stderr


def test_down_without_a_lab_says_so() -> None:
    assert "nothing to remove" in Bench(f"{NAME}d")("down")


def test_missing_tools_are_named_with_their_packages(tmp_path: Path) -> None:
    for tool in ("python3", "ssh", "stat"):
        (tmp_path / tool).symlink_to(shutil.which(tool, path="/usr/bin"))
    output = Bench(f"{NAME}d", PATH=str(tmp_path))("up", code=1)
    assert "apt-get install -y --no-install-recommends apt-utils iproute2 mmdebstrap" in output


# ---- pure parts


def test_specs_carry_memory_in_bytes_and_sorted_binds() -> None:
    (host,) = parse_hosts(["one=10.77.0.11"], "2g", ["/usr:/b", "/etc:/a"])
    assert (host.memory, host.binds) == (2 << 30, (("/etc", "/a"), ("/usr", "/b")))


ONE_LINE = """\
# deb http://archive.example/debian trixie main
deb [arch=amd64 signed-by=/k.gpg] http://archive.example/debian bookworm main contrib  # comment
deb http://vendor.example/debian bookworm stable
deb-src http://archive.example/debian bookworm main
"""
DEB822 = """\
Types: deb deb-src
URIs: http://archive.example/debian-security
Suites: bookworm-security
Components: main non-free-firmware
Signed-By: /k.gpg

Enabled: no
Types: deb
URIs: http://archive.example/debian
Suites: bookworm-backports
Components: main
"""


def test_only_debians_own_sources_are_taken(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(ONE_LINE)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/security.sources").write_text(DEB822)
    assert apt.machine_sources(tmp_path) == (
        "Types: deb\nURIs: http://archive.example/debian\nSuites: bookworm\nComponents: main\nSigned-By: /k.gpg\n\n"
        "Types: deb\nURIs: http://archive.example/debian-security\nSuites: bookworm-security\nComponents: main\n"
        "Signed-By: /k.gpg\n"
    )


def test_another_release_comes_from_the_same_archives(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(ONE_LINE)
    assert "Suites: trixie\n" in apt.machine_sources(tmp_path, "trixie")


def test_the_hosts_release_is_the_one_asked_for(tmp_path: Path) -> None:
    (tmp_path / "noble.sources").write_text("Types: deb\n")
    file = str(tmp_path / "noble.sources")
    assert image.release({"LAB_SUITE": "noble", "LAB_SOURCES": file}) == ("noble", "Types: deb\n")
    assert image.release({})[0] == "bookworm"
    with pytest.raises(LabError, match="not a release") as refused:
        image.release({"LAB_SUITE": "noble"})
    assert "LAB_SOURCES" in str(refused.value)
    with pytest.raises(LabError, match="LAB_SOURCES can't be read"):
        image.release({"LAB_SUITE": "noble", "LAB_SOURCES": file + "x"})


def test_a_machine_without_debian_12_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://archive.example/debian trixie main\n")
    with pytest.raises(LabError, match="no apt source for Debian 12"):
        apt.machine_sources(tmp_path)


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        (
            ["31 24 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate"],
            {("/sys/fs/cgroup", 2, ("cpu", "cpuset", "io", "memory", "pids"))},
        ),
        (
            [
                "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
                "32 24 0:28 / /sys/fs/cgroup/systemd rw - cgroup c rw,xattr,name=systemd",
                "33 24 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
                "34 24 0:30 / /elsewhere rw - cgroup cgroup rw,memory",
            ],
            {("/sys/fs/cgroup/cpu,cpuacct", 1, ("cpu", "cpuacct")), ("/sys/fs/cgroup/systemd", 1, ("name=systemd",))},
        ),
    ],
)
def test_hierarchies_of_v1_and_v2_machines(mounts: list[str], expected: set) -> None:
    found = {
        (str(hierarchy.mount), hierarchy.version, tuple(sorted(hierarchy.controllers)))
        for hierarchy in cgroups.hierarchies("\n".join(mounts))
    }
    assert found == expected
