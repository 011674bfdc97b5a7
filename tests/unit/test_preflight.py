# SPDX-License-Identifier: GPL-3.0-or-later
"""What preflight sees on a host, on file trees that look like hosts, and how it names misspelt variables."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from ops import preflight
from ops.host import Host, run_program
from ops.preflight import GIB, check_host

ROOT = Path(__file__).parents[2]
DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\nVERSION="12 (bookworm)"\nID=debian\n'
TCP_HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# 0.0.0.0:30001 (hexadecimal 7531) listens, inode 4711; what 127.0.0.1:29501 (733D) has is a connection.
TCP = TCP_HEADER + (
    "   0: 00000000:7531 00000000:0000 0A 00000000:00000000 00:00000000 00000000   998        0 4711 1 0 100 0 0 10 0\n"
    "   1: 0100007F:733D 0100007F:7531 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 0 10 -1\n"
)
TCP6 = TCP_HEADER + (
    "   0: 00000000000000000000000000000000:2382 00000000000000000000000000000000:0000 0A 00000000:00000000 "
    "00:00000000 00000000   105        0 5150 1 0 100 0 0 10 0\n"
)


class Tree:
    """A host made of files and of the answers of its programs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers: dict[str, tuple[int, str]] = {"systemd-run": (0, "")}
        self.asked: list[list[str]] = []
        self.write("/etc/os-release", DEBIAN)
        self.write("/proc/1/comm", "systemd\n")
        self.write("/proc/net/tcp", TCP)
        self.write("/proc/net/tcp6", TCP6)
        self.write("/proc/meminfo", "MemTotal:       65536000 kB\nMemAvailable:   33554432 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def process(self, pid: int, name: str, inode: str, unit: str) -> None:
        """Add a process that holds a socket."""
        self.write(f"/proc/{pid}/comm", f"{name}\n")
        self.write(f"/proc/{pid}/cgroup", f"0::/system.slice/{unit}\n")
        (self.root / f"proc/{pid}/fd").mkdir()
        os.symlink("/dev/null", self.root / f"proc/{pid}/fd/0")
        os.symlink(f"socket:[{inode}]", self.root / f"proc/{pid}/fd/3")

    @property
    def host(self) -> Host:
        def run(command: list[str], _timeout: float = 0) -> tuple[int, str]:
            self.asked.append(command)
            return self.answers.get(command[0], (127, f"{command[0]}: not found"))

        return Host(root=str(self.root), run=run)

    def check(self, **arguments) -> list[dict]:
        return [dataclasses.asdict(finding) for finding in check_host(self.host, **arguments).findings]


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path)


def test_a_fit_host_has_no_findings(tree, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100 * GIB, 60 * GIB, 40 * GIB))
    tree.answers["/usr/bin/python3"] = (0, "3.11\n")
    tree.write("/srv/model/config.json", "{}")
    findings = tree.check(
        python={"interpreter": "/usr/bin/python3", "variable": "sglang_venv_python"},
        ports=[{"port": 9091, "variable": "prometheus_port", "units": []}],
        disks=[{"path": "/opt/sglang", "need_gib": 40, "variable": "sglang_venv_root"}],
        memory={"need_gib": 32, "variable": "site_model", "units": []},
        files=[{"path": "/srv/model/config.json", "variable": "model_store_path"}],
    )
    assert findings == []


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (DEBIAN, None),
        (DEBIAN.replace('"12"', '"13"'), None),
        ('ID=ubuntu\nVERSION_ID="24.04"\nID_LIKE=debian\n', None),
        ("ID=debian\nVERSION_ID=12\n", None),
        ('ID=ubuntu\nVERSION_ID="22.04"\nID_LIKE=debian\n', "ubuntu 22.04"),
        ('ID="rocky"\nVERSION_ID="9.5"\nID_LIKE="rhel centos fedora"\n', "rocky 9.5"),
        ("PRETTY_NAME=sid\nID=debian\n", "debian unknown"),
        ("", "unknown unknown"),
    ],
)
def test_system(tree, text, seen):
    tree.write("/etc/os-release", text)
    findings = tree.check()
    assert [finding["seen"] for finding in findings] == ([seen] if seen else [])
    assert all(finding["id"] == "host.system" and "Debian 12" in finding["wanted"] for finding in findings)


def test_machine_and_init(tree, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.1", "#1", "aarch64")))
    tree.write("/proc/1/comm", "tini\n")
    assert [(finding["id"], finding["seen"]) for finding in tree.check()] == [
        ("host.machine", "aarch64"),
        ("host.init", "init system is 'tini'"),
    ]
    (tree.root / "proc/1/comm").unlink()
    assert tree.check()[-1]["seen"] == "init system is 'unknown'"


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        ((0, "3.11\n"), None),
        ((0, "3.13\n"), None),
        ((0, "3.9\n"), "/opt/python is Python 3.9"),
        ((0, "3.14\n"), "/opt/python is Python 3.14"),
        ((1, "Traceback: no encodings\n"), "/opt/python does not run: Traceback: no encodings"),
        ((0, "hello\n"), "/opt/python does not run: hello"),
    ],
)
def test_python(tree, answer, seen):
    tree.answers["/opt/python"] = answer
    findings = tree.check(python={"interpreter": "/opt/python", "variable": "sglang_venv_python"})
    assert [finding["seen"] for finding in findings] == ([seen] if seen else [])
    assert all(finding["variable"] == "sglang_venv_python" in finding["fix"] for finding in findings)


def test_a_python_that_services_do_not_see(tree):
    """What pyenv and uv install for root lies below /root."""
    python = "/root/.pyenv/bin/python"
    tree.answers |= {python: (0, "3.12\n"), "systemd-run": (203, "")}
    (finding,) = tree.check(python={"interpreter": python, "variable": "sglang_venv_python"})
    assert finding["seen"] == f"{python} does not run as a service: systemd-run ended with 203"
    assert "sglang_venv_python" in finding["fix"]


def test_a_missing_program_is_an_answer():
    status, output = run_program(["/no/such/python", "-c", ""])
    assert status == 127
    assert "/no/such/python" in output
    (finding,) = preflight.check_python(Host(), "/no/such/python", "sglang_venv_python")
    assert finding.seen.startswith("/no/such/python does not run: ")
    assert run_program(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\nerr\n")


@pytest.mark.parametrize(
    ("table", "port", "inodes"),
    [(TCP, 30001, {"4711"}), (TCP, 29501, set()), (TCP6, 9090, {"5150"}), (TCP, 9090, set()), ("", 9090, set())],
)
def test_listening_sockets(table, port, inodes):
    assert preflight.listening_inodes(table, port) == inodes


def port_findings(tree: Tree, port: int, *units: str) -> list[dict]:
    return tree.check(ports=[{"port": port, "variable": "sglang_serve_port", "units": list(units)}])


def test_a_port_that_a_stranger_holds(tree):
    tree.process(812, "nginx", "4711", "nginx.service")
    (finding,) = port_findings(tree, 30001, "sglang-unified.service")
    assert finding["seen"] == "port 30001 is held by process 812 (nginx, nginx.service)"
    assert finding["variable"] == "sglang_serve_port"
    assert "sport = :30001" in finding["fix"]


def test_a_port_that_our_own_unit_holds(tree):
    tree.process(900, "sglang", "4711", "sglang-unified.service")
    assert port_findings(tree, 30001, "sglang-unified.service") == []
    # Two processes share the socket, one of them is not ours.
    tree.process(901, "socat", "4711", "user@0.service")
    (finding,) = port_findings(tree, 30001, "sglang-unified.service")
    assert "process 900 (sglang, sglang-unified.service), process 901 (socat, user@0.service)" in finding["seen"]


@pytest.mark.parametrize(
    ("bounds", "reserved", "seen", "kept"),
    [
        ("32768\t60999\n", "\n", None, ""),
        (
            "10000\t60999\n",
            "\n",
            "ports 29501, 30001 are among those of outgoing connections, 10000 to 60999",
            "29501,30001",
        ),
        ("30000\t60999\n", "8998,31000-31001\n", "ports 30001 are among", "8998,30001,31000,31001"),
        ("10000\t60999\n", "29501,30000-30010\n", None, ""),
        ("", "", None, ""),
    ],
)
def test_ports_of_outgoing_connections(tree, bounds, reserved, seen, kept):
    tree.write("/proc/net/tcp", TCP_HEADER)
    tree.write("/proc/sys/net/ipv4/ip_local_port_range", bounds)
    tree.write("/proc/sys/net/ipv4/ip_local_reserved_ports", reserved)
    ports = [{"port": port, "variable": "p", "units": []} for port in (30001, 29501)]
    findings = tree.check(ports=ports)
    assert len(findings) == bool(seen)
    for finding in findings:
        assert (finding["id"], finding["severity"]) == ("host.port_range", "warning")
        assert finding["seen"].startswith(seen)
        assert f"ip_local_reserved_ports={kept} " in finding["fix"]


def test_a_port_that_nobody_admits_to(tree):
    (finding,) = port_findings(tree, 9090, "prometheus.service")
    assert finding["seen"] == "port 9090 is held by an unknown process"


def test_a_port_of_this_machine(unused_listener):
    (finding,) = preflight.check_port(Host(), unused_listener, "some_port", [])
    assert f"process {os.getpid()} (" in finding.seen


@pytest.fixture
def unused_listener():
    """A port that this very process listens on."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_disk_is_measured_where_the_directory_will_be(tree, monkeypatch):
    (tree.root / "srv/models").mkdir(parents=True)
    measured = []

    def usage(path):
        measured.append(path)
        return shutil._ntuple_diskusage(100 * GIB, 98 * GIB, 2 * GIB)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    disk = {"path": "/srv/models/flash/v1", "need_gib": 3, "variable": "model_store_root"}
    (finding,) = tree.check(disks=[disk])
    assert measured == [str(tree.root / "srv/models")]
    assert finding["seen"] == "2.0 GiB free for /srv/models/flash/v1"
    assert finding["wanted"] == "3 GiB"
    assert tree.check(disks=[{**disk, "need_gib": 2}]) == []


def test_what_is_fetched_already_needs_no_room(tree, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100 * GIB, 98 * GIB, 2 * GIB))
    disk = {"path": "/srv/models/flash", "holds": "/srv/models/flash", "need_gib": 3, "variable": "model_store_path"}
    (finding,) = tree.check(disks=[disk])
    assert (finding["id"], finding["wanted"]) == ("host.disk", "3.0 GiB")
    (tree.root / "srv/models/flash/part").mkdir(parents=True)
    with open(tree.root / "srv/models/flash/part/model.safetensors", "wb") as file:
        file.truncate(GIB // 2)
    (finding,) = tree.check(disks=[disk])
    assert finding["wanted"] == "2.5 GiB"
    with open(tree.root / "srv/models/flash/part/other.safetensors.part", "wb") as file:
        file.truncate(GIB // 2)
    assert tree.check(disks=[disk]) == []


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 32),
        # A group without a limit, in both versions.
        ({"memory.max": "max", "memory.current": "1024"}, 32),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "4096"}, 32),
        ({"memory.max": str(24 * GIB), "memory.current": str(20 * GIB)}, 4),
        ({"memory/memory.limit_in_bytes": str(8 * GIB), "memory/memory.usage_in_bytes": str(2 * GIB)}, 6),
        # A limit that the host itself can't give.
        ({"memory.max": str(64 * GIB), "memory.current": "0"}, 32),
    ],
)
def test_memory_within_the_control_group(tree, files, gib):
    for name, text in files.items():
        tree.write(f"/sys/fs/cgroup/{name}", f"{text}\n")
    assert preflight.available_memory_gib(tree.host) == gib
    memory = {"variable": "site_model", "units": []}
    assert tree.check(memory={"need_gib": gib, **memory}) == []
    (finding,) = tree.check(memory={"need_gib": gib + 0.5, **memory})
    assert finding["seen"] == f"{gib}.0 GiB available"


def test_memory_is_not_asked_for_twice(tree):
    memory = {"need_gib": 64, "variable": "site_model", "units": ["sglang-unified.service"]}
    tree.answers["systemctl"] = (3, "")
    assert [finding["id"] for finding in tree.check(memory=memory)] == ["host.memory"]
    tree.answers["systemctl"] = (0, "")
    assert tree.check(memory=memory) == []
    assert ["systemctl", "is-active", "--quiet", "sglang-unified.service"] in tree.asked


def test_a_file_that_is_missing(tree):
    (tree.root / "srv/model/config.json").mkdir(parents=True)
    (finding,) = tree.check(files=[{"path": "/srv/model/config.json", "variable": "model_store_path"}])
    assert finding["seen"] == "no file /srv/model/config.json"
    assert finding["variable"] == "model_store_path"


def test_the_module_says_everything_at_once(run_module, tree):
    tree.write("/etc/os-release", "ID=rocky\nVERSION_ID=9.5\n")
    arguments = {
        "python": {"interpreter": "/no/python", "variable": "sglang_venv_python"},
        "ports": [{"port": 30001, "variable": "sglang_serve_port"}],
        "files": [{"path": "/srv/none", "variable": "model_store_path"}],
    }

    def look_at_the_tree(module):
        module.Host = lambda: tree.host

    for check in (False, True):
        result = run_module("host_preflight", arguments, check=check, before=look_at_the_tree)
        assert result["failed"]
        assert result["msg"].splitlines()[0] == "The host can't take this configuration; nothing was changed."
        wanted = ["host.system", "host.python", "host.port", "host.file"]
        assert [finding["id"] for finding in result["findings"]] == wanted
        for line, finding in zip(result["msg"].splitlines()[1:], result["findings"], strict=True):
            assert line == "{id}: {seen}; wanted: {wanted}. Next: {fix}".format(**finding)


@pytest.fixture(scope="module")
def variables() -> ModuleType:
    """The filter plugin of the role preflight."""
    path = ROOT / "roles/preflight/filter_plugins/variables.py"
    spec = importlib.util.spec_from_file_location("variables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KNOWN = {
    "sglang": ["sglang_thing"],
    "sglang_serve": ["sglang_serve_port", "sglang_serve_context_length"],
    "prometheus": ["prometheus_retention_days"],
    "site": ["site_model"],
}


def unknown(variables: ModuleType, *names: str) -> list[str]:
    return variables.unknown_variables(list(names), KNOWN, ["sglang_", "site_"])


def test_known_variables_and_an_operators_own_are_left_alone(variables):
    assert unknown(variables) == []
    assert unknown(variables, "sglang_serve_port", "prometheus_retention_days", "site_model") == []
    assert unknown(variables, "rack", "ansible_host", "vault_sglang_serve_api_key", "sglangs") == []


@pytest.mark.parametrize(
    ("name", "owner", "closest"),
    [
        ("sglang_serve_prot", "role sglang_serve", "sglang_serve_port"),
        ("sglang_serve_context_lenght", "role sglang_serve", "sglang_serve_context_length"),
        ("sglang_server_port", "role sglang", "sglang_serve_port"),
        ("prometheus_retention_day", "role prometheus", "prometheus_retention_days"),
        ("site_modle", "role site", "site_model"),
    ],
)
def test_a_misspelt_variable(variables, name, owner, closest):
    (sentence,) = unknown(variables, name, name)
    assert sentence.startswith(f"{name} is not a variable of {owner}; did you mean {closest}")


def test_a_variable_like_no_other(variables):
    assert unknown(variables, "site_xyzxyz") == ["site_xyzxyz is not a variable of role site; known: site_model"]
    known = {"prometheus": ["prometheus_port"], "site": ["site_model"]}
    assert variables.unknown_variables(["sglang_prot", "grafana_prot"], known, ["sglang_"]) == [
        "sglang_prot is not a variable of any role; known: prometheus_port, site_model"
    ]


def test_the_longest_prefix_owns_a_variable(variables):
    assert variables.owning_role("sglang_serve_port", ["sglang", "sglang_serve", "serve"]) == "sglang_serve"
    assert variables.owning_role("sglang_servers", ["sglang", "sglang_serve"]) == "sglang"
    assert variables.owning_role("servers", ["sglang"]) == ""


def test_variables_of_the_real_roles(variables):
    found = variables.FilterModule().filters()["role_variables"](str(ROOT / "roles"))
    assert "sglang_serve_port" in found["sglang_serve"]
    assert all(name.startswith(role + "_") for role, names in found.items() for name in names)
