# SPDX-License-Identifier: GPL-3.0-or-later
"""What joins roles, models and inventories refers only to what exists."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from jinja2 import Environment, nodes
from ops.answers import check_expectation
from repository import ROLES, ROOT, load, tasks_in, tracked

WIRING = load(ROOT / "playbooks/group_vars/all/wiring.yml")
MODELS = sorted((ROOT / "models").glob("*.yml"))
INVENTORIES = [path for path in tracked("inventory") if "group_vars" in path.parts or "host_vars" in path.parts]
OPTIONS = {name for role in ROLES for name in role.options} | {"site_model", "site_topology"}
PLAYBOOK_TASKS = sorted((ROOT / "playbooks/tasks").glob("*.yml"))
# Set by Ansible.
MAGIC = {"playbook_dir", "inventory_dir", "inventory_hostname", "ansible_host", "ansible_check_mode", "lookup", "query"}
MAGIC |= {"ansible_failed_result", "omit"}
MAGIC |= {"groups", "hostvars", "ansible_inventory_sources", "ansible_ssh_executable", "ansible_user"}


def expressions(value: Any) -> list[str]:
    """Return every text inside a value of YAML."""
    if isinstance(value, dict):
        return [text for one in value.values() for text in expressions(one)]
    if isinstance(value, list):
        return [text for one in value for text in expressions(one)]
    return [value] if isinstance(value, str) else []


def read_by(content: Any) -> set[str]:
    """Return the variables that the templates in a value of YAML read."""
    trees = [Environment().parse(text) for text in expressions(content) if "{{" in text]
    return {name.name for tree in trees for name in tree.find_all(nodes.Name) if name.ctx == "load"}


def known() -> set[str]:
    names = OPTIONS | MAGIC | set(WIRING)
    for task in (task for path in PLAYBOOK_TASKS for task in tasks_in(load(path))):
        names |= {*task.get("ansible.builtin.set_fact", {}), task.get("loop_control", {}).get("loop_var", "item")}
    for role in ROLES:
        names |= set(role.variables) | role.registered
    return names


def test_wiring_reads_variables_that_exist():
    assert read_by(WIRING) - known() == set()


def test_wiring_sets_variables_that_exist():
    assert {name for name in WIRING if not name.startswith("__site_")} - OPTIONS == set()


@pytest.mark.parametrize("path", PLAYBOOK_TASKS, ids=lambda path: path.name)
def test_tasks_of_playbooks_read_variables_that_exist(path):
    own = {name for task in load(path) for name in task.get("vars", {})}
    assert read_by(load(path)) - known() - own == set()


def test_no_playbook_passes_without_a_host():
    plays = {path.name: load(path) for path in sorted((ROOT / "playbooks").glob("*.yml"))}
    first = {
        name: one[0].get("ansible.builtin.import_playbook")
        for name, one in plays.items()
        if one[-1]["hosts"] == "sglang"
    }
    assert "site.yml" in first
    assert set(first.values()) == {"hosts.yml"}


# They take no lock: these only look, so they work while another play runs or hangs; the last two reach no host.
WITHOUT_LOCK = {"smoke.yml", "doctor.yml", "preflight.yml", "plan.yml", "mirror.yml"}


def test_every_playbook_that_changes_a_host_holds_it_first():
    plays = {path.name: load(path) for path in (ROOT / "playbooks").glob("*.yml")}
    tasks = {name: one[-1]["tasks"] for name, one in plays.items() if one[-1].get("hosts") == "sglang"}
    holding = {name: [task.get("ansible.builtin.import_tasks") for task in one] for name, one in tasks.items()}
    assert {name for name, files in holding.items() if "tasks/lock.yml" not in files} == WITHOUT_LOCK
    for name in set(holding) - WITHOUT_LOCK:
        before = tasks[name][: holding[name].index("tasks/lock.yml")]
        assert [task["name"] for task in before if not re.search("validate|ansible.builtin.assert", str(task))] == []
    assert "always" in next(task for task in tasks["site.yml"] if "lock.yml" in str(task))["tags"]


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_inventory_sets_and_reads_variables_that_exist(path):
    content = load(path) or {}
    assert {name for name in content if not name.startswith(("vault_", "ansible_"))} - OPTIONS == set()
    assert {name for name in read_by(content) if not name.startswith("vault_")} - known() == set()


@pytest.mark.parametrize(
    "path",
    [*INVENTORIES, *(role.path / "defaults/main.yml" for role in ROLES if role.name == "sglang_serve")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_variable_of_the_engine_has_its_reason(path):
    """Beside it: most of them are unknown to whoever reads the inventory at night."""
    within, bare = False, []
    for line in path.read_text().splitlines():
        if line[:1].strip():
            within = line.startswith("sglang_serve_environment_") and line.endswith(":")
        elif within and re.match(r"\s+[A-Z]", line) and " # " not in line:
            bare.append(line.strip())
    assert bare == []


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_has_what_the_wiring_asks_for(path):
    model = load(path)
    asked = re.findall(r"__site_model\.([a-z_.0-9]+)( \| default)?", str(WIRING))
    assert {"name", "store.source", "checks"} <= {key for key, _ in asked}
    for key, has_default in asked:
        value = model
        for part in key.split("."):
            assert has_default or part in value, f"{path.name} has no {key}"
            value = value.get(part, {})
    assert set(model) == {key.split(".")[0] for key, _ in asked}
    if model["store"]["source"] == "gguf_wheel":
        assert {"wheel", "wheel_sha256", "wheel_member"} <= set(model["store"])


def test_models_name_kernels_that_exist():
    settings = (ROOT / "kernels/src/dsv4_sm120/settings.py").read_text()
    kernels = ast.literal_eval(re.search(r"^KERNELS = (.*)$", settings, re.MULTILINE)[1])
    named = {name for path in MODELS for name in load(path).get("kernels", [])}
    assert named == set(kernels)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_asks_questions_with_checkable_answers(path):
    prompts = load(path)["checks"]["prompts"]
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) > 0
    assert [fault for prompt in prompts if (fault := check_expectation(prompt["expect"]))] == []


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_leaves_to_the_operator_what_has_a_variable(path):
    managed = next(role for role in ROLES if role.name == "sglang_serve").variables["__sglang_serve_managed_arguments"]
    assert set(load(path)["arguments"]) & set(managed) == set()
