# SPDX-License-Identifier: GPL-3.0-or-later
"""A start waits for ports that somebody holds, says who every 30 s, and goes on when they are free; a real one, too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ops import port_free
from ops.host import Host
from ops.journal_causes import WARNING, classify_line

MODULE_UTILS = Path(__file__).parents[2] / "module_utils"
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
PORTS = {"sglang_serve_port": 30001, "sglang_serve_nccl_port": 29501}


def listening(root: Path, *ports: int) -> Host:
    """A host where process 41 listens on these ports."""
    rows = "".join(
        f"   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {port} 1\n"
        for port in ports
    )
    process = root / "proc" / "41"
    (root / "proc" / "net").mkdir(parents=True, exist_ok=True)
    (process / "fd").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "net" / "tcp").write_text(HEAD + rows)
    (process / "comm").write_text("python3\n")
    (process / "cgroup").write_text("0::/user.slice/session-1.scope\n")
    for port in ports:
        link = process / "fd" / str(port)
        link.unlink(missing_ok=True)
        link.symlink_to(f"socket:[{port}]")
    return Host(str(root))


def waited(root: Path, seconds: int, *ports: int) -> tuple[list[str], int]:
    """Wait while somebody holds ports for some seconds; return what was said and how long it took."""
    host, said, now = listening(root, *ports), [], [0]

    def sleep(_seconds: float) -> None:
        now[0] += 1
        if now[0] == seconds:
            listening(root)

    port_free.wait_until_free(host, PORTS, said.append, lambda: now[0], sleep)
    return said, now[0]


def test_free_ports_are_not_waited_for(tmp_path: Path) -> None:
    assert waited(tmp_path, 1) == ([], 0)
    assert waited(tmp_path, 1, 30002) == ([], 0), "another port"


def test_a_taken_port_is_waited_for_and_its_holder_told(tmp_path: Path) -> None:
    said, took = waited(tmp_path, 65, 29501)
    assert took == 65
    assert said[:-1] == 3 * [
        "the start waits: port 29501 is held by process 41 (python3), wanted: port 29501 free; stop it, or set "
        "sglang_serve_nccl_port to another port; ss -ltnp 'sport = :29501' shows the owner"
    ]
    assert said[-1] == "port 30001, 29501: free after 65 s, the start goes on"


def test_the_playbook_reads_it_as_a_warning(tmp_path: Path) -> None:
    """The start goes on by itself, so it is no failure; the run that waits for it shows the line."""
    finding = classify_line(waited(tmp_path, 1, 30001)[0][0], 6, "sglang-unified.service")
    assert finding
    assert (finding.id, finding.severity) == ("port_waited_for", WARNING)


def test_a_real_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        command = [sys.executable, "-m", "ops.port_free", "--port", f"sglang_serve_port={port}"]
        environment = {**os.environ, "PYTHONPATH": str(MODULE_UTILS)}
        program = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
        assert f"port {port} is held by process {os.getpid()} (" in program.stdout.readline()
    rest, _ = program.communicate(timeout=30)
    assert (program.returncode, "the start goes on" in rest) == (0, True)


@pytest.mark.parametrize("words", [[], ["--port", "30001"], ["--port", "sglang_serve_port=http"]])
def test_wrong_arguments(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        port_free.main(words)
    assert end.value.code == 2
    assert "--port" in capsys.readouterr().err
