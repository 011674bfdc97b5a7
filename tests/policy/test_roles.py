# SPDX-License-Identifier: GPL-3.0-or-later
"""A role's interface is what its argument_specs.yml says, and roles know nothing of each other."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROLES, ROOT, Role, load, tasks_in, tracked

TYPES = {
    "str": (str,),
    "path": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
}


# A play calls these, an operator sets their variables. preflight and memory_plan are checks themselves.
def roles_in(tasks: list[dict]) -> Iterator[dict]:
    """Yield the roles that tasks import, and those that the files of tasks import that they import."""
    for task in tasks_in(tasks):
        if role := task.get("ansible.builtin.import_role"):
            yield role
        if file := task.get("ansible.builtin.import_tasks"):
            yield from roles_in(load(ROOT / "playbooks/tasks" / Path(file).name))


SITE = [
    role
    for role in roles_in(load(ROOT / "playbooks/site.yml")[-1]["tasks"])
    if role.get("tasks_from") not in ("validate", "variables")
]
# What every play begins with: checks of roles and, between them, facts; nothing else.
CHECKS = [
    task["ansible.builtin.import_role"]
    for task in tasks_in(load(ROOT / "playbooks/tasks/validate.yml"))
    if "ansible.builtin.set_fact" not in task
]
PUBLIC = [role for role in ROLES if role.name in {one["name"] for one in SITE} - {"preflight", "memory_plan"}]
# Modules that create files take the umask's word for their mode when none is given.
WITH_MODE = ("copy", "file", "template", "lineinfile", "blockinfile", "get_url", "assemble", "unarchive")

each_role = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)


def is_template(value: Any) -> bool:
    return isinstance(value, str) and "{{" in value


def fits(value: Any, spec: dict) -> bool:
    """Whether a default is of its declared type; a template is of any."""
    if is_template(value):
        return True
    if isinstance(value, bool) and spec["type"] != "bool":
        return False
    if not isinstance(value, TYPES[spec["type"]]):
        return False
    if spec["type"] == "list" and "elements" in spec:
        return all(fits(element, {"type": spec["elements"]}) for element in value)
    return "choices" not in spec or value in spec["choices"]


def test_the_checks_come_before_everything_else():
    assert [role["name"] for role in SITE[:2]] == ["memory_plan", "preflight"]


def test_arguments_that_are_not_read_again_were_read_before():
    checked = {arguments["name"] for arguments in CHECKS}
    assert {role["name"] for role in SITE if role.get("rolespec_validate") is False} <= checked
    for role in ROLES:
        if role.name in checked and role.name != "preflight":
            assert role.specs["validate"]["options"] == role.specs["main"]["options"], role.name


def test_there_are_public_roles():
    assert {"sglang_serve", "sglang_venv", "model_store", "prometheus"} <= {role.name for role in PUBLIC}


@each_role
def test_role_says_what_it_is(role: Role):
    meta = load(role.path / "meta/main.yml")["galaxy_info"]
    assert meta["role_name"] == role.name
    assert meta["license"] == "GPL-3.0-or-later"
    assert {name: spec for name, spec in role.specs.items() if not spec.get("short_description")} == {}
    assert [name for name, option in role.options.items() if not option.get("description")] == []


@each_role
def test_argument_specs_are_the_defaults(role: Role):
    declared = {name: option["default"] for name, option in role.options.items() if "default" in option}
    assert declared == role.defaults
    # 1 == True and 1 == 1.0, so types are looked at as well.
    assert {name: type(value) for name, value in declared.items()} == {
        name: type(value) for name, value in role.defaults.items()
    }
    without = {name for name, option in role.options.items() if "default" not in option}
    assert {name for name, option in role.options.items() if option.get("required")} == without


@each_role
def test_defaults_are_of_the_declared_type(role: Role):
    unfit = {name: value for name, value in role.defaults.items() if not fits(value, role.options[name])}
    assert unfit == {}


@pytest.mark.parametrize("role", PUBLIC, ids=lambda role: role.name)
def test_public_role_refuses_bad_values_before_anything_is_changed(role: Role):
    assert role.specs["validate"]["options"] == role.options
    called = [(arguments["name"], arguments.get("tasks_from", "main")) for arguments in CHECKS]
    assert called[0] == ("preflight", "variables")
    assert (role.name, "validate") in called
    modules = {key for task in role.tasks["validate.yml"] for key in task if key.startswith("ansible.")}
    assert modules == {"ansible.builtin.assert"}


# "$" also matches before a line's end, so a value with one would pass and break the file that it is written into.
ENDS_BEFORE_A_LINES_END = re.compile(r"""^(?!.*(\(\?m\)|MULTILINE)).*[^'"(]\$\)?['"]""", re.MULTILINE)


def test_values_are_matched_to_their_end():
    texts = tracked("roles/*.yml", "playbooks/*.yml", "roles/*.py", "filter_plugins/*.py", "library/*.py")
    found = [f"{path}: {match[0]}" for path in texts for match in ENDS_BEFORE_A_LINES_END.finditer(path.read_text())]
    assert found == []
    assert ENDS_BEFORE_A_LINES_END.search("that: item is match('^[a-z]+$')")


@each_role
def test_variables_carry_the_name_of_their_role(role: Role):
    assert [name for name in role.options if not name.startswith(f"{role.name}_")] == []
    assert [name for name in role.variables if not name.startswith(f"__{role.name}_")] == []
    assert [name for name in role.registered if not name.startswith((f"__{role.name}_", f"{role.name}_"))] == []


@each_role
def test_role_reads_no_variable_of_another(role: Role):
    """But those that it hands to a role that it calls itself, and what that role has registered."""
    called = {role.name}
    for task in (task for tasks in role.tasks.values() for task in tasks):
        called |= {task[key]["name"] for key in task if key.endswith((".include_role", ".import_role"))}
    strangers = [other for other in ROLES if other.name not in called]
    theirs = {name for other in strangers for name in (*other.options, *other.variables, *other.registered)}
    texts = {file: file.read_text() for file in role.path.rglob("*") if file.suffix in (".yml", ".j2")}
    read = {
        f"{file.relative_to(role.path)}: {name}"
        for file, text in texts.items()
        for name in theirs & set(re.findall(r"\b\w+\b", text))
    }
    assert read == set()


@each_role
def test_what_creates_a_file_gives_its_mode(role: Role):
    without = []
    for file, tasks in role.tasks.items():
        for task in tasks:
            for module in WITH_MODE:
                arguments = task.get(f"ansible.builtin.{module}", {"mode": ""})
                creates = arguments.get("state") not in ("absent", "link")
                if (
                    creates
                    and "mode" not in arguments
                    and not (module.endswith("infile") and not arguments.get("create"))
                ):
                    without.append(f"{file}: {task['name']}")
    assert without == []


@each_role
def test_what_writes_a_secret_neither_logs_nor_shows_it(role: Role):
    secrets = {name for name, option in role.options.items() if option.get("no_log")}
    for task in (task for tasks in role.tasks.values() for task in tasks):
        arguments = str({key: value for key, value in task.items() if key.endswith((".copy", ".template"))})
        arguments += str(task.get("loop", "")) if arguments != "{}" else ""
        if any(re.search(rf"\b{name}\b", arguments) for name in secrets):
            assert (task.get("no_log"), task.get("diff")) == (True, False), task["name"]


def test_names_that_sound_secret_are_declared_so():
    options = {name: option for role in ROLES for name, option in role.options.items() if option["type"] == "str"}
    sounding = {name for name in options if re.search(r"(api_key|password|secret|token)$", name)}
    assert "sglang_serve_api_key" in sounding
    assert {name for name in sounding if not options[name].get("no_log")} == set()


LOADED_BY_FILTERS = """
import runpy, sys
for file in sys.argv[1:]:
    runpy.run_path(file)
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("ops", "requests")))
"""


def test_filters_load_nothing_that_takes_time() -> None:
    """Ansible loads every filter anew in the process of every task that uses one."""
    files = tracked("filter_plugins/*.py", "roles/*/filter_plugins/*.py")
    command = [sys.executable, "-c", LOADED_BY_FILTERS, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(files) > 5
    assert done.stdout.split() == []
