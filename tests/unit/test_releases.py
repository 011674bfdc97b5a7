# SPDX-License-Identifier: GPL-3.0-or-later
"""What is on disk says which release serves, which one may take its place, and what nobody needs any more."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROLES = Path(__file__).parents[2] / "roles"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


looking = load("sglang_serve/files/look_at_releases.py")
copying = load("sglang_venv/files/copy_environment.py")
filters = load("sglang_serve/filter_plugins/releases.py")

SERVER = {"name": "unified", "unit": "sglang-unified.service", "url": "http://127.0.0.1:30001"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three releases of two environments, proven in the order b, a; c was never, and serves."""
    root = tmp_path / "root"
    for name in ("one", "two", "left"):
        (root / "environments" / name / "venv").mkdir(parents=True)
    for name, environment, proven in (("a", "one", "T2"), ("b", "two", "T1"), ("c", "one", None)):
        directory = root / "releases" / name
        directory.mkdir(parents=True)
        (directory / "venv").symlink_to(root / "environments" / environment / "venv")
        (directory / "sglang-unified.service").write_text(f"unit of {name}")
        (directory / "launch-unified.sh").write_text(f"launch of {name}")
        (directory / "release.json").write_text(json.dumps({"model": "m", "servers": [SERVER]}))
        if proven:
            (directory / "proven").write_text(json.dumps({"at": proven, "start_seconds": 5}))
    (root / "environment").symlink_to("environments/one")
    (root / "current").symlink_to("releases/c")
    (tmp_path / "proc").mkdir()
    return root


def look(root: Path, keep: int = 2) -> dict:
    seen = looking.look(root, keep, root.parent / "proc")
    return seen | {"removable": [str(Path(path).relative_to(root)) for path in seen["removable"]]}


def test_a_host_without_releases(tmp_path: Path) -> None:
    program = ROLES / "sglang_serve/files/look_at_releases.py"
    done = subprocess.run(
        [sys.executable, "-I", "-", tmp_path, "2"],
        input=program.read_text(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "current": None,
        "previous": None,
        "environment": str(tmp_path / "environment"),
        "releases": {},
        "removable": [],
    }


def test_the_release_proven_last_beside_the_current_is_the_previous(root: Path) -> None:
    seen = look(root)
    assert (seen["current"], seen["previous"]) == ("c", "a")
    assert seen["releases"]["b"]["servers"][0]["unit_text"] == "unit of b"
    assert seen["releases"]["b"]["servers"][0]["launch_text"] == "launch of b"
    (root / "current").unlink()
    (root / "current").symlink_to("releases/a")
    assert look(root)["previous"] == "b"


def test_a_release_that_was_not_staged_to_the_end_is_none(root: Path) -> None:
    (root / "releases/a/launch-unified.sh").unlink()
    (root / "releases/b/release.json").write_text("{")
    seen = look(root)
    assert (list(seen["releases"]), seen["previous"]) == (["c"], None)


def test_a_link_to_nothing_is_no_release(root: Path) -> None:
    (root / "current").unlink()
    (root / "current").symlink_to("releases/gone")
    assert (look(root)["current"], look(root)["removable"]) == (None, [])


@pytest.mark.parametrize(
    ("keep", "removable"),
    [(3, ["environments/left"]), (2, ["releases/b", "environments/left", "environments/two"])],
)
def test_what_is_kept(root: Path, keep: int, removable: list[str]) -> None:
    assert look(root, keep)["removable"] == removable


def test_a_release_in_use_is_never_removed(root: Path) -> None:
    (root.parent / "proc/17").mkdir()
    words = ["/usr/bin/python3", f"{root}/releases/b/venv/bin/sglang", "serve"]
    (root.parent / "proc/17/cmdline").write_text("\0".join(words) + "\0")
    seen = look(root)
    assert [name for name, release in seen["releases"].items() if release["in_use"]] == ["b"]
    assert seen["removable"] == ["environments/left"]


def test_the_environment_that_was_staged_is_never_removed(root: Path) -> None:
    (root / "environment").unlink()
    (root / "environment").symlink_to("environments/left")
    assert look(root)["removable"] == ["releases/b", "environments/two"]


OLD = {
    "model": "m",
    "notes": {"KV tokens": 8192},
    "pins": {"sglang": "0.5.22", "torch": "2.13.0", "gone": "1"},
    "packages": {"kernels": 64 * "a", "module_utils": 64 * "b"},
    "servers": [SERVER | {"arguments": {"tp-size": 4, "dtype": "auto"}, "environment": {"A": "1"}}],
}
NEW = OLD | {
    "notes": {"KV tokens": 4096},
    "pins": {"sglang": "0.5.23", "torch": "2.13.0"},
    "packages": {"kernels": 64 * "c", "module_utils": 64 * "b"},
    "servers": [SERVER | {"arguments": {"tp-size": 8, "dtype": "auto"}, "environment": {"A": "1", "B": "2"}}],
}


def test_the_difference_in_lines() -> None:
    assert filters.release_difference(NEW, OLD) == [
        "KV tokens    8192 -> 4096",
        "pin          gone: 1 -> none",
        "pin          sglang: 0.5.22 -> 0.5.23",
        "package      kernels: aaaaaaaaaaaa -> cccccccccccc",
        "flag         --tp-size: 4 -> 8 (unified)",
        "environment  B: none -> 2 (unified)",
    ]
    assert filters.release_difference(OLD, OLD) == []


def behind(current: str, **releases: dict) -> str:
    """What is said while one of the releases serves and the inventory asks for NEW. They were staged in this order."""
    known = {name: {**it, "id": name, "staged": place} for place, (name, it) in enumerate(releases.items())}
    return filters.release_behind(
        {"current": current, "releases": known}, NEW | {"notes": {"KV tokens": "not planned"}}
    )


def test_a_release_that_was_rolled_back_is_named() -> None:
    old, new = OLD | {"proven": {"at": "T3"}}, NEW | {"proven": {"at": "T2"}}
    lines = behind("b-old", **{"b-old": old, "a-new": new}).splitlines()
    assert lines[0] == (
        "The release a-new, which the inventory asks for, was proven at T2 and rolled back; b-old, proven at T3, "
        "serves in its place."
    )
    assert "flag         --tp-size: 4 -> 8 (unified)" in lines
    assert lines[-2:] == [
        "next command: ansible-playbook playbooks/upgrade.yml, which goes forward again",
        "or keep b-old: put the inventory back to what it was made from",
    ]
    failed = behind("b-old", **{"b-old": old, "a-new": new | {"proven": None}})
    assert "a-new, which the inventory asks for, was staged and never proven; b-old" in failed
    assert "goes forward again, once the inventory is corrected" in failed


def test_what_was_not_rolled_back_is_not_called_so() -> None:
    old, new = OLD | {"proven": {"at": "T1"}}, NEW | {"proven": {"at": "T2"}}
    assert behind("new", old=old, new=new) == "", "it serves"
    assert behind("other", new=new, other=old) == "", "an earlier run asked for something newer"
    assert behind("old", old=old) == "", "the host has no such release yet"
    assert behind("gone", new=new) == ""


def test_a_release_that_serves_unproven_is_named() -> None:
    """After a run that was killed between the restart and the proof. One that nobody has started yet serves nobody."""

    def said(current: str | None, proven: dict | None, in_use: bool) -> str:
        return filters.release_unproven(
            {"current": current, "releases": {"new": {"id": "new", "proven": proven, "in_use": in_use}}}
        )

    lines = said("new", None, True).splitlines()
    assert lines[0].startswith("The release new serves and was never proven: ")
    assert lines[1].startswith("next command: ansible-playbook site.yml")
    assert said("new", {"at": "T1"}, True) == ""
    assert said("new", None, False) == "", "its restart was put off"
    assert said(None, None, True) == "", "a bare host"


def test_many_pins_are_counted() -> None:
    many = OLD | {"pins": {f"package-{number:02}": "1" for number in range(20)}}
    lines = filters.release_difference(OLD, many)
    assert lines[-1] == "pin          and 11 more"
    assert len(lines) == 13


def test_pins_of_a_lock_file() -> None:
    lock = "alpha==1.0 \\\n    --hash=sha256:00\nbe.ta==2.0 ; python_full_version >= '3.9' \\\n    --hash=sha256:00\n"
    assert filters.pins(lock) == {"alpha": "1.0", "be.ta": "2.0 ; python_full_version >= '3.9'"}


def test_what_keeps_a_release_from_taking_the_place_of_another() -> None:
    assert filters.release_obstacles(OLD, NEW) == []
    elsewhere = OLD | {"servers": [SERVER | {"url": "http://127.0.0.1:30002"}]}
    assert filters.release_obstacles(elsewhere, NEW) == [
        "it has sglang-unified.service at http://127.0.0.1:30002, "
        "and the inventory sglang-unified.service at http://127.0.0.1:30001"
    ]
    assert filters.release_obstacles(OLD | {"model": "n"}, NEW) == ["it serves n, and the inventory m"]


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete environment with pip, and with a package that was installed after those of its lock file."""
    donor = tmp_path_factory.mktemp("environments") / "cpu-0-a"
    subprocess.run([sys.executable, "-m", "venv", donor / "venv"], check=True)
    packages = next((donor / "venv/lib").glob("python3*")) / "site-packages"
    (packages / "later.py").write_text("VALUE = 1\n")
    (packages / "later-1.0.dist-info").mkdir()
    files = {"METADATA": "Metadata-Version: 2.1\nName: later\nVersion: 1.0\n", "INSTALLER": "pip\n"}
    files["RECORD"] = "later.py,,\n" + "".join(f"later-1.0.dist-info/{name},,\n" for name in (*files, "RECORD"))
    for name, text in files.items():
        (packages / "later-1.0.dist-info" / name).write_text(text)
    (donor / "packages.json").write_text(json.dumps([{"source": "later", "wheel": "later-1.0-py3-none-any.whl"}]))
    (donor / "complete").touch()
    return donor


def run_copy(target: Path) -> str:
    """Run the program as the role does."""
    program = ROLES / "sglang_venv/files/copy_environment.py"
    command = [sys.executable, "-I", "-", target, "cpu-0"]
    return subprocess.run(command, input=program.read_text(), capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_begins_with_another_one(donor: Path) -> None:
    target = donor.with_name("cpu-0-b")
    (target / "venv.part/half").mkdir(parents=True)
    assert run_copy(target) == donor.name
    run = [target / "venv/bin/pip", "--version"]
    assert str(target) in subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert not list(target.glob("venv/lib/python3*/site-packages/later*"))
    assert list(donor.glob("venv/lib/python3*/site-packages/later*"))
    assert str(donor) not in (target / "venv/pyvenv.cfg").read_text() + (target / "venv/bin/pip").read_text()
    same = "venv/lib/python3*/site-packages/pip/__init__.py"
    assert next(target.glob(same)).samefile(next(donor.glob(same)))


def test_an_environment_of_another_lock_file_is_no_beginning(donor: Path) -> None:
    target = donor.with_name("cuda-1-a")
    target.mkdir()
    (target.parent / "cuda-1-b").mkdir()  # not complete
    command = [sys.executable, ROLES / "sglang_venv/files/copy_environment.py", target, "cuda-1"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    assert list(target.iterdir()) == []
