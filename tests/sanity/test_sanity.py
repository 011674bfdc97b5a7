# SPDX-License-Identifier: GPL-3.0-or-later
"""Run ansible-test sanity on our modules and module_utils. Any finding fails; there are no ignore files.

ansible-test works on collections, so the files are copied into a throw-away one, with their imports rewritten. It makes
a virtual environment for each test that has requirements and keeps it under .cache/ansible-test: the first run needs a
package index, later runs do not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".cache" / "ansible-test"
NAMESPACE, NAME = "local", "ops"
PACKAGE = f"ansible_collections.{NAMESPACE}.{NAME}.plugins.module_utils.ops"

# Not run: changelog, runtime-metadata and ignores (they look at the throw-away collection's own files), pslint,
# shellcheck, integration-aliases, obsolete-files and action-plugin-docs (no such files here).
TESTS = (
    "ansible-doc",
    "compile",
    "empty-init",
    "import",
    "line-endings",
    "no-assert",
    "no-get-exception",
    "no-illegal-filenames",
    "no-smart-quotes",
    "pep8",
    "pylint",
    "replace-urlopen",
    "shebang",
    "symlinks",
    "use-argspec-type-path",
    "use-compat-six",
    "validate-modules",
    "yamllint",
)
# ansible-test downloads a bootstrap script for pip of this version; Python's own copy of pip does as well.
PIP_BOOTSTRAP = "get_pip_24_2.py"


def build_collection(parent: Path) -> Path:
    """Copy library/ and module_utils/ops into a collection under parent."""
    collection = parent / "ansible_collections" / NAMESPACE / NAME
    modules = collection / "plugins" / "modules"
    modules.mkdir(parents=True)
    for source in sorted((ROOT / "library").glob("*.py")):
        text = source.read_text(encoding="utf-8")
        (modules / source.name).write_text(re.sub(r"\bansible\.module_utils\.ops\b", PACKAGE, text), encoding="utf-8")
    shutil.copytree(
        ROOT / "module_utils" / "ops",
        collection / "plugins" / "module_utils" / "ops",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (collection / "galaxy.yml").write_text(
        f"namespace: {NAMESPACE}\nname: {NAME}\nversion: 1.0.0\nreadme: README.md\nauthors: [local]\n",
        encoding="utf-8",
    )
    (collection / "meta").mkdir()
    (collection / "meta" / "runtime.yml").write_text("requires_ansible: '>=2.19.0'\n", encoding="utf-8")
    return collection


def ansible_test(collection: Path, name: str) -> subprocess.CompletedProcess[str]:
    bootstrap = HOME / ".ansible" / "test" / "cache" / PIP_BOOTSTRAP
    bootstrap.parent.mkdir(parents=True, exist_ok=True)
    bootstrap.write_text("import ensurepip\n\nensurepip.bootstrap()\n", encoding="utf-8")
    tools = Path(sys.executable).parent
    env = {**os.environ, "HOME": str(HOME), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return subprocess.run(
        [str(tools / "ansible-test"), "sanity", "--color", "no", "--python", python, "--test", name],
        cwd=collection,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_collection(tmp_path_factory.mktemp("sanity"))


def test_the_modules_are_in_the_collection(collection: Path) -> None:
    modules = {path.stem for path in (collection / "plugins" / "modules").glob("*.py")}
    assert modules == {path.stem for path in (ROOT / "library").glob("*.py")}
    assert modules >= {"sglang_ready", "sglang_smoke", "service_state", "prometheus_query_info"}


@pytest.mark.parametrize("name", TESTS)
def test_sanity(collection: Path, name: str) -> None:
    done = ansible_test(collection, name)
    assert f'Running sanity test "{name}"' in done.stdout + done.stderr, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_finding_fails(tmp_path: Path) -> None:
    """The runner is able to fail: a module whose documentation misses an option is found."""
    collection = build_collection(tmp_path)
    module = collection / "plugins" / "modules" / "service_state.py"
    text = module.read_text(encoding="utf-8")
    module.write_text(text.replace('"wait": {"type": "bool", "default": True}', '"wait": {"type": "int"}'))
    done = ansible_test(collection, "validate-modules")
    assert done.returncode != 0
    finding = "plugins/modules/service_state.py:0:0: doc-type-does-not-match-spec: Argument 'wait'"
    assert finding in done.stdout + done.stderr, done.stdout + done.stderr
