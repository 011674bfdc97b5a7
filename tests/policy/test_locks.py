# SPDX-License-Identifier: GPL-3.0-or-later
"""The requirement files name one hashed version of every package for every Python that they serve."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from repository import ROOT

LOCKS = [ROOT / "engine/locks" / f"{name}.txt" for name in ("cpu", "cuda")]
ALL = [*LOCKS, ROOT / "engine/locks/router.txt", ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
FEW = {"router": 10, "requirements": 10, "requirements-dev": 40}
PYTHONS = ("3.11", "3.12", "3.13")


def requirements(text: str) -> list[tuple[Requirement, list[str]]]:
    """Return every requirement of a file with its hashes."""
    lines = (
        line for line in text.replace("\\\n", "").splitlines() if line.strip() and not line.lstrip().startswith("#")
    )
    found = []
    for line in lines:
        words, *hashes = line.split("--hash=")
        found.append((Requirement(words.strip()), [one.strip() for one in hashes]))
    return found


def versions(text: str, python: str) -> dict[str, list[str]]:
    """Return package -> versions that a file gives to one Python on the platform that the locks are for."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    environment |= {"platform_machine": "x86_64", "platform_system": "Linux", "implementation_name": "cpython"}
    chosen: dict[str, list[str]] = {}
    for requirement, _hashes in requirements(text):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            chosen.setdefault(name, []).append(str(requirement.specifier))
    return chosen


@pytest.mark.parametrize("lock", ALL, ids=lambda lock: lock.stem)
def test_every_requirement_is_pinned_and_hashed(lock):
    found = requirements(lock.read_text())
    assert len(found) > FEW.get(lock.stem, 50)
    assert [str(one) for one, _ in found if not re.fullmatch(r"==[^*,]+", str(one.specifier))] == []
    assert [str(one) for one, hashes in found if not hashes] == []
    assert [one for _, hashes in found for one in hashes if not re.fullmatch(r"sha256:[0-9a-f]{64}", one)] == []
    assert "://" not in lock.read_text()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_each_python_gets_one_version_of_a_package(lock, python):
    chosen = versions(lock.read_text(), python)
    assert {name: found for name, found in chosen.items() if len(found) != 1} == {}
    assert {"sglang", "torch", "triton", "transformers", "prometheus-client"} <= set(chosen)


@pytest.mark.parametrize("python", PYTHONS)
def test_cpu_and_cuda_are_the_same_engine(python):
    cpu, cuda = (versions(lock.read_text(), python) for lock in LOCKS)
    for name in ("sglang", "triton", "prometheus-client", "transformers", "tokenizers"):
        assert cpu[name] == cuda[name], name


@pytest.mark.parametrize("python", PYTHONS)
def test_router_shares_its_versions_with_the_engine(python):
    """One wheelhouse serves both, and the tests have both in one environment."""
    router, cpu = (versions((ROOT / f"engine/locks/{name}.txt").read_text(), python) for name in ("router", "cpu"))
    assert len(router) > 10
    assert {name: found for name, found in router.items() if found != cpu.get(name, found)} == {}


@pytest.mark.parametrize(
    ("lock", "sources"), [("cpu", ["cpu", "cpu-pins"]), ("cuda", ["cuda", "cuda-pins"]), ("router", ["router"])]
)
def test_lock_holds_what_its_sources_ask_for(lock, sources):
    chosen = versions((ROOT / "engine/locks" / f"{lock}.txt").read_text(), "3.11")
    for source in sources:
        for requirement, _ in requirements((ROOT / "engine/locks" / f"{source}.in").read_text()):
            (version,) = chosen[re.sub(r"[-_.]+", "-", requirement.name).lower()]
            assert requirement.specifier.contains(version.removeprefix("==")), f"{requirement}, but {version}"
    if lock == "cpu":
        torch = (ROOT / "engine/locks/cpu-torch.txt").read_text()
        assert (ROOT / "engine/locks/cpu.txt").read_text().endswith(torch)


@pytest.mark.parametrize("name", ["requirements", "requirements-dev"])
def test_the_control_nodes_lock_holds_what_its_source_asks_for(name):
    """Each direct pin with its version, and no platform's wheels alone: a compiled package has many."""
    lock, source = ((ROOT / f"{name}.{suffix}").read_text() for suffix in ("txt", "in"))
    hashes = {one.name: found for one, found in requirements(lock)}
    assert min(len(hashes[compiled]) for compiled in ("cffi", "pyyaml")) > 20
    direct = requirements(re.sub(r"(?m)^-r .*", "", source))
    assert direct
    assert [str(one) for one, _ in direct if not re.fullmatch(r"==[^*,]+", str(one.specifier))] == []
    for python in PYTHONS:
        chosen = versions(lock, python)
        for requirement, _ in direct:
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                assert chosen[requirement.name] == [str(requirement.specifier)]


@pytest.mark.parametrize("python", PYTHONS)
def test_tests_run_with_the_ansible_of_the_control_node(python):
    """One environment is made from either file, or from both."""
    small, large = (
        versions((ROOT / f"{name}.txt").read_text(), python) for name in ("requirements", "requirements-dev")
    )
    assert {name: found for name, found in small.items() if large.get(name) != found} == {}
