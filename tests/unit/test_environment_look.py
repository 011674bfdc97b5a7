# SPDX-License-Identifier: GPL-3.0-or-later
"""A damaged environment is seen, and what is taken out of it is what the next installation brings back."""

from __future__ import annotations

import subprocess
import typing as t
from pathlib import Path

import pytest
from ops import packages, venv_damage

LOCKS = Path(__file__).parents[2] / "engine/locks"
PACKAGES = "venv/lib/python3.11/site-packages"
# Package -> its files with their sizes. Two of them bring share/x, and the last one has it.
FILES = {
    "alpha-1.0": {"alpha/__init__.py": 3, "alpha/b,c.so": 5, "share/x": 9, "../../../bin/alpha": 2},
    "be_ta-2.0": {"be_ta.py": 4, "share/x": 7},
    "del_ta-1.0": {"delta.py": 4},
    "pip-23.0": {"pip/__init__.py": 1},
}
LOCK = """\
alpha==1.0 \\
    --hash=sha256:00
Del.ta==1.0 ; python_full_version >= '3.9' \\
    --hash=sha256:00
be-ta==2.0 \\
gamma==1.0 ; python_full_version < '3.9' \\
    --hash=sha256:00
"""
ALPHA, BETA, *_ = (f"{PACKAGES}/{name}.dist-info" for name in FILES)
RECORDS = ["complete", "kernels.json"]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    packages = tmp_path / PACKAGES
    for package, files in FILES.items():
        for name, size in files.items():
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).write_bytes(b"x" * size)
        lines = [
            f'"{name}",sha256=00,{size}' if "," in name else f"{name},sha256=00,{size}" for name, size in files.items()
        ]
        lines += [f"{package}.dist-info/RECORD,,", "__pycache__/gone.pyc,,", "__pycache__/remade.pyc,sha256=00,1"]
        (packages / f"{package}.dist-info").mkdir()
        (packages / f"{package}.dist-info/RECORD").write_text("\n".join(lines) + "\n")
    for name in ("python", "pip"):
        (tmp_path / "venv/bin" / name).touch(mode=0o755)
    (tmp_path / "requirements.txt").write_text(LOCK)
    for name in RECORDS:
        (tmp_path / name).write_text("x")
    return tmp_path


def look(environment: Path) -> dict[str, t.Any]:
    """What is to say about an environment, with what would be removed below it."""
    seen = venv_damage.look(str(environment))._asdict()
    return {**seen, "remove": [str(Path(path).relative_to(environment)) for path in seen["remove"]]}


def test_a_whole_environment(environment: Path) -> None:
    assert look(environment) == {"complete": True, "damaged": [], "remove": []}


def test_an_environment_that_was_not_finished(environment: Path) -> None:
    (environment / "complete").unlink()
    assert look(environment) == {"complete": False, "damaged": [], "remove": []}


@pytest.mark.parametrize(
    ("damage", "said", "removed"),
    [
        (f"rm {PACKAGES}/alpha/b,c.so", "alpha-1.0: alpha/b,c.so is missing", [ALPHA]),
        (f"truncate -s 0 {PACKAGES}/be_ta.py", "be_ta-2.0: be_ta.py has 0 bytes instead of 4", [BETA]),
        ("rm venv/bin/alpha", "alpha-1.0: ../../../bin/alpha is missing", [ALPHA]),
        (f"rm -r {PACKAGES}/alpha", "alpha-1.0: alpha/__init__.py is missing and 1 more", [ALPHA]),
        (f"rm {ALPHA}/RECORD", "alpha-1.0: its RECORD can't be read", [ALPHA]),
        (f"echo x > {ALPHA}/RECORD", "alpha-1.0: its RECORD can't be read", [ALPHA]),
        (f"rm -r {PACKAGES}/del*", "del_ta: not installed", []),
        (f"rm {PACKAGES}/pip/__init__.py", "pip-23.0: pip/__init__.py is missing", ["venv"]),
        ("rm venv/bin/python", "the virtual environment: no Python, no pip or no packages", ["venv"]),
        (f"rm -r {PACKAGES}", "the virtual environment: no Python, no pip or no packages", ["venv"]),
    ],
)
def test_damage(environment: Path, damage: str, said: str, removed: list[str]) -> None:
    subprocess.run(["sh", "-c", damage], cwd=environment, check=True)
    assert look(environment) == {"complete": False, "damaged": [said], "remove": [*removed, *RECORDS]}


def test_a_file_of_two_packages_is_damaged_for_both(environment: Path) -> None:
    (environment / PACKAGES / "share/x").write_text("")
    assert look(environment)["remove"] == [ALPHA, BETA, *RECORDS]


@pytest.mark.parametrize("lock", ["cpu", "cuda", "router"])
def test_locks_have_the_markers_that_are_understood(lock: str) -> None:
    text = (LOCKS / f"{lock}.txt").read_text()
    markers = {line.split(";")[1].strip(" \\") for line in text.splitlines() if "==" in line and ";" in line}
    assert {one.split()[0] for one in markers} <= {"python_full_version", "implementation_name"}
    assert {one for one in markers if one.startswith("implementation_name")} <= {"implementation_name != 'PyPy'"}
    assert all(len(one.split()) == 3 for one in markers)
    assert {"scipy", "numpy"} <= set(packages.locked(text, "python3.11")) or lock == "router"


def test_the_module_says_the_same_and_changes_nothing(environment: Path, run_module: t.Callable[..., dict]) -> None:
    (environment / PACKAGES / "be_ta.py").write_text("")
    for check in (False, True):
        result = run_module("venv_info", {"path": str(environment)}, check=check)
        assert (result["changed"], result["complete"]) == (False, False)
        assert result["damaged"] == ["be_ta-2.0: be_ta.py has 0 bytes instead of 4"]
    (environment / "requirements.txt").unlink()
    result = run_module("venv_info", {"path": str(environment)})
    assert result["msg"].endswith(f"No such file or directory\nnext command: ls -l {environment}")
