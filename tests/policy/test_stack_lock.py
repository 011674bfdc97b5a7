# SPDX-License-Identifier: GPL-3.0-or-later
"""stack.lock.yml names everything that comes onto a host, and says of it what the files say that pin it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version
from repository import ROLES, ROOT, Role, load, tasks_in, tracked
from test_locks import versions

STACK = load(ROOT / "stack.lock.yml")
ROLE = {role.name: role for role in ROLES}
# Every role that can bring something onto a host from somewhere else, with the places of the lock that pin it.
FETCHES = {
    "debian_packages": {"debian"},
    "sglang_venv": {"wheels"},
    "grafana": {"inventory"},
    "gpu_host": {"inventory"},
    "mirror": {"wheels", "debian", "inventory"},
}
MODULES = {
    "apt",
    "apt_key",
    "apt_repository",
    "deb822_repository",
    "dnf",
    "get_url",
    "git",
    "package",
    "pip",
    "unarchive",
    "yum",
}
# What a command line that fetches has in it.
WORDS = re.compile(
    r"\b(wget|git|rsync|wheelhouse\.py|debian\.py|huggingface\w*)\b|pip'?, 'install'|'apt-get', 'install'"
)
FROM_HERE = re.compile("'--no-index', '--force-reinstall'|--simulate")


def fetches(role: Role) -> list[str]:
    """Return the tasks of a role that fetch something, or install something that is not of this repository."""
    found = []
    for file, tasks in role.tasks.items():
        for task in tasks:
            modules = {key.removeprefix("ansible.builtin."): value for key, value in task.items()}
            command = str(modules.get("command", "")) + str(modules.get("shell", ""))
            arguments = next((value for key, value in modules.items() if key in MODULES), None)
            installs = (
                arguments is not None and arguments.get("state") != "absent" and not arguments.get("update_cache")
            )
            if installs or (WORDS.search(command) and not FROM_HERE.search(command)):
                found.append(f"{file}: {task['name']}")
    return found


def test_every_role_that_fetches_is_known_and_has_its_place():
    assert {role.name for role in ROLES if fetches(role)} == set(FETCHES)
    assert {place for places in FETCHES.values() for place in places} <= set(STACK)


def test_no_playbook_fetches_by_itself():
    plays = [task for path in tracked("playbooks/*.yml", "*.yml") for play in load(path) or [] if isinstance(play, dict)
             for task in tasks_in(play.get("tasks"))]  # fmt: skip
    assert len(plays) > 20
    assert [task["name"] for task in plays if {key.removeprefix("ansible.builtin.") for key in task} & MODULES] == []


@pytest.mark.parametrize("name", STACK["wheels"])
def test_a_pin_is_the_one_of_its_lock_file(name):
    lock = STACK["wheels"][name]
    chosen = versions((ROOT / lock["file"]).read_text(), "3.11")
    told = {package: str(pin["version"]) for package, pin in lock["pins"].items()}
    assert told == {package: chosen[package][0].removeprefix("==") for package in told}
    assert [package for package, pin in lock["pins"].items() if len(pin["reason"]) < 10] == []


def test_every_choice_of_a_lock_is_told():
    sources = {"cuda": ["cuda", "cuda-pins"], "cpu": ["cpu-pins"], "router": ["router"]}
    for lock, files in sources.items():
        text = "".join((ROOT / f"engine/locks/{file}.in").read_text() for file in files)
        chosen = set(re.findall(r"^([a-z][\w.-]*)==", text, re.MULTILINE))
        assert chosen
        assert chosen - set(STACK["wheels"][lock]["pins"]) == set()


def test_every_lock_file_is_told_and_is_what_the_roles_read():
    debian = [STACK["debian"]["file"], *STACK["debian"]["other_releases"]]
    told = {lock["file"] for lock in STACK["wheels"].values()} | set(debian)
    there = {path.relative_to(ROOT).as_posix() for path in tracked("engine/locks/*.txt", "engine/locks/*.sha256")}
    assert there - told == {"engine/locks/cpu-torch.txt"}  # a part of cpu.txt
    assert told <= there
    assert set(ROLE["sglang_venv"].options["sglang_venv_lock"]["choices"]) == set(STACK["wheels"])
    for name, lock in STACK["wheels"].items():
        assert lock["file"] == ROLE["sglang_venv"].variables["__sglang_venv_lock_file"].replace(
            "{{ role_path }}/../../", ""
        ).replace("{{ sglang_venv_lock }}", name)
    assert STACK["debian"]["file"] in load(ROOT / "playbooks/group_vars/all/wiring.yml")["debian_packages_lock"]


def test_every_debian_package_of_a_role_is_told_and_locked():
    asked = set(ROLE["sglang_host"].defaults["sglang_host_packages_default"])
    for role in ROLES:
        for task in (task for tasks in role.tasks.values() for task in tasks):
            names = task.get("vars", {}).get("debian_packages_names", [])
            asked |= set(names) if isinstance(names, list) else set()
    assert asked == set(STACK["debian"]["packages"])


@pytest.mark.parametrize("lock", [STACK["debian"]["file"], *STACK["debian"]["other_releases"]])
def test_a_debian_lock_names_its_release_and_has_every_package(lock):
    asked, lines = set(STACK["debian"]["packages"]), (ROOT / lock).read_text().splitlines()
    assert lines[1] == f"# Release: {Path(lock).stem.partition('-')[2]}"
    files = [line.split("  ") for line in lines if not line.startswith("#")]
    assert [line for line in files if not re.fullmatch(r"[0-9a-f]{64}", line[0])] == []
    names = [name for _digest, name in files]
    assert asked <= {name.partition("_")[0] for name in names}
    assert len(names) == len(set(names)) and "Packages" in names
    assert [
        name
        for name in names
        if name != "Packages" and not re.fullmatch(r"[a-z0-9.+-]+_[\w.+~%-]+_(amd64|all)\.deb", name)
    ] == []


def test_every_model_is_told_and_what_says_hash_has_one():
    models = {path.stem: load(path)["store"] for path in (ROOT / "models").glob("*.yml")}
    assert set(STACK["models"]) == set(models)
    with_hash = {name for name, store in models.items() if re.fullmatch("[0-9a-f]{64}", store.get("wheel_sha256", ""))}
    assert {name for name, model in STACK["models"].items() if "hash" in model["by"]} == with_hash
    assert {name for name, store in models.items() if store["source"] != "directory"} == with_hash


def test_what_an_inventory_pins_is_a_variable_that_is_empty_until_then():
    for name, pinned in STACK["inventory"].items():
        assert [variable for variable in pinned["by"] if ROLE[name].defaults[variable]] == []


def test_the_engine_is_one_version():
    found = {Version(str(STACK["wheels"][lock]["pins"]["sglang"]["version"])) for lock in ("cuda", "cpu")}
    assert len(found) == 1


def test_the_control_nodes_requirements_are_told():
    assert [name for name in STACK["control_node"] if not (ROOT / name).is_file()] == []


def test_a_task_that_fetches_is_seen(tmp_path):
    for number, task in enumerate(
        (
            {"ansible.builtin.get_url": {"url": "x"}},
            {"ansible.builtin.apt": {"name": "x"}},
            {"ansible.builtin.command": {"argv": "{{ ['pip', 'install'] }}"}},
            {"ansible.builtin.shell": {"cmd": "wget x"}},
        )
    ):
        role = Role(tmp_path / f"role{number}")
        (role.path / "tasks").mkdir(parents=True)
        (role.path / "tasks/main.yml").write_text(str([{"name": "x", **task}]))
        assert len(fetches(role)) == 1, task
