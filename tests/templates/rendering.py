# SPDX-License-Identifier: GPL-3.0-or-later
"""Renders every scenario with Ansible itself: the roles' templates, with the playbooks' wiring and the roles' checks.

Scenarios are the hosts of every inventory in inventory/ and of scenarios/, the production example's in each topology.
Nothing is written but into a temporary directory, and no host is reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ANSIBLE_PLAYBOOK = str(Path(sys.executable).with_name("ansible-playbook"))
TOPOLOGIES = ("unified", "replicas", "disaggregated")
# In place of the keys of real inventories, which may be kept outside the repository.
KEY = {"sglang_serve_api_key": "0123456789abcdef-of-an-inventory"}
# Inventory, variables of the command line, what stands before the names of its hosts.
JOBS = [
    (HERE / "scenarios", {}, ""),
    (ROOT / "inventory/lab", KEY, ""),
    (ROOT / "inventory/lab-replicas", KEY, "replicas-"),
    *((ROOT / "inventory/production.example", KEY | {"site_topology": it}, f"production-{it}-") for it in TOPOLOGIES),
]


def build_tree(parent: Path) -> Path:
    """Return the play in a tree where Ansible finds what a playbook in playbooks/ and a task in a role find."""
    play = parent / "tests" / "templates"
    (play / "templates").mkdir(parents=True)
    (parent / "playbooks").symlink_to(ROOT / "playbooks")
    for name in ("engine", "models", "roles"):
        (parent / "tests" / name).symlink_to(ROOT / name)
    (play / "group_vars").symlink_to(ROOT / "playbooks" / "group_vars")
    for template in sorted((ROOT / "roles").glob("*/templates/*.j2")):
        (play / "templates" / template.name).symlink_to(template)
    (play / "render.yml").symlink_to(HERE / "render.yml")
    return play / "render.yml"


def play(inventory: Path, settings: dict, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run render.yml for the hosts of an inventory with some variables set otherwise; it writes into directory/out."""
    out = directory / "out"
    out.mkdir(parents=True)
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    variables |= {"render_directory": str(out), **settings}
    # The playbook's path is not resolved: the variables beside it are the tree's.
    command = [ANSIBLE_PLAYBOOK, "--inventory", str(inventory)]
    command += [str(build_tree(directory)), "--extra-vars", json.dumps(variables)]
    environment |= {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_LOCAL_TEMP": str(directory / "tmp")}
    return subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=False)


def render(inventory: Path, settings: dict, directory: Path) -> dict[str, dict]:
    """Return host -> what render.yml writes."""
    done = play(inventory, settings, directory)
    assert done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout}\n{done.stderr}"
    return {file.stem: json.loads(file.read_text()) for file in (directory / "out").iterdir()}
