# SPDX-License-Identifier: GPL-3.0-or-later
"""The last lines of site.yml name commands that can be pasted on the control node, in the lab and elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAB = {
    "ansible_host": "10.77.0.11",
    "ansible_user": "root",
    "ansible_ssh_executable": "{{ inventory_dir }}/../../lab/ssh",
}
MINE = {"ansible_host": "192.0.2.11", "ansible_user": "ops"}
# What earlier tasks of site.yml have left, and the wiring.
KNOWN = {
    "sglang_smoke_url": "http://address:30001",
    "__site_api_key_file": "/etc/sglang/credentials/api-key",
    "sglang_serve_served_model_name": "model",
    "sglang_serve_device": "cpu",
    "sglang_serve_topology": "unified",
    "__sglang_serve_servers": [{"name": "unified", "unit": "sglang-unified.service"}],
    "__sglang_serve_ready": {"results": [{"version": "0.5.23", "capacity": "8192 tokens of KV"}]},
    "memory_plan_result": {"capacity": "one 8k request"},
    "__sglang_smoke_result": {"summary": "19 of 19 checks passed in 3.8 s"},
    "sglang_smoke_prometheus_url": "http://127.0.0.1:9090",
    "sglang_serve_other_units": [],
}


def summary(directory: Path, inventory: str, host: dict[str, str], **environment: str) -> dict[str, str]:
    """Return the summary's lines, by the word that they begin with, of a host in inventory/NAME of a checkout."""
    for name in ("playbooks", "lab", f"inventory/{inventory}"):
        (directory / name).mkdir(parents=True)
    (directory / "lab/ssh").touch()
    (directory / f"inventory/{inventory}/hosts.json").write_text(json.dumps({"all": {"hosts": {"one": host}}}))
    tasks = [{"ansible.builtin.import_tasks": str(ROOT / "playbooks/tasks/summary.yml")}]
    play = directory / "playbooks/play.yml"
    play.write_text(json.dumps([{"hosts": "one", "gather_facts": False, "vars": KNOWN, "tasks": tasks}]))
    surroundings = {name: value for name, value in os.environ.items() if name != "LAB_NAME"}
    surroundings |= {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", **environment}
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", directory / "inventory" / inventory, play]
    done = subprocess.run(command, env=surroundings, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    block = done.stdout.partition("msg: |-\n")[2].partition("\n\n")[0]
    lines = [line.strip() for line in block.splitlines()]
    return {line[:11].strip(): line[12:] for line in lines}


ASK = "\"sed 's/^/Authorization: Bearer /' /etc/sglang/credentials/api-key | curl -sS -H @- http://address:30001/v1/models\""
WANTED = [
    ("lab", LAB, {}, "lab/ssh root@10.77.0.11", "ansible-playbook smoke.yml"),
    ("lab", LAB, {"LAB_NAME": "my"}, "LAB_NAME=my lab/ssh root@10.77.0.11", "LAB_NAME=my ansible-playbook smoke.yml"),
    ("mine", MINE, {}, "ssh ops@192.0.2.11", "ansible-playbook -i inventory/mine smoke.yml"),
]


@pytest.mark.parametrize(("inventory", "host", "environment", "ssh", "again"), WANTED, ids=["lab", "named", "mine"])
def test_summary_names_commands_of_this_inventory(tmp_path, inventory, host, environment, ssh, again):
    lines = summary(tmp_path, inventory, host, **environment)
    assert lines["try"] == f"{ssh} {ASK}"
    assert lines["Prometheus"] == f"{ssh} curl -sS http://127.0.0.1:9090/api/v1/alerts"
    assert lines["prove again"] == again
    assert lines["proven"] == "19 of 19 checks passed in 3.8 s"
