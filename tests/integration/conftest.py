# SPDX-License-Identifier: GPL-3.0-or-later
"""Lab hosts: fresh ones for a module of tests, whose INVENTORY and HOSTS say which, and one that modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from faults import Seen
from site_host import SiteHost

# They share a host, which goes through them in this order.
ONE_HOST = (
    "test_site.py",
    "test_upgrade.py",
    "test_faults.py",
    "test_soak.py",
    "test_bench.py",
    "test_dashboard_live.py",
    "test_operations.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the modules that share a host last, in their order."""
    items.sort(key=lambda item: ONE_HOST.index(item.path.name) if item.path.name in ONE_HOST else -1)


def booted(letter: str, *which: object) -> Iterator[SiteHost]:
    """Booted hosts with the wheelhouse; LAB_KEEP=1 leaves them there afterwards."""
    host = SiteHost(f"{letter}{os.getpid() % 100000}", *which)
    host.up()
    yield host
    if os.environ.get("LAB_KEEP") != "1":
        host.down()


@pytest.fixture(scope="session")
def site_host() -> Iterator[SiteHost]:
    """The host of the modules in ONE_HOST, all together or one alone."""
    yield from booted("s")


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[SiteHost]:
    """The hosts of one module."""
    module = request.module
    letter = module.__name__.removeprefix("test_")[0]
    yield from booted(letter, getattr(module, "INVENTORY", "inventory/lab"), getattr(module, "HOSTS", ()))


@pytest.fixture(scope="module")
def fresh(host: SiteHost) -> dict[str, list[str]]:
    """What the host had before anything was done to it."""
    return host.fresh


@pytest.fixture(scope="module")
def converged(host: SiteHost) -> None:
    """The host as the module before left it; converged when there was none."""
    if host.shell("test -e /opt/sglang/current || echo nothing"):
        host.play("site.yml")


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Seen:
    """Notes what became of the test's fault (faults.py)."""
    return Seen(*request.node.get_closest_marker("fault").args)
