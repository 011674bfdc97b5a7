# SPDX-License-Identifier: GPL-3.0-or-later
"""Fresh lab hosts for a module of tests, whose INVENTORY and HOSTS say which."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from site_host import SiteHost


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[SiteHost]:
    """Booted hosts with the wheelhouse; LAB_KEEP=1 leaves them there afterwards."""
    module = request.module
    name = f"{module.__name__.removeprefix('test_')[0]}{os.getpid() % 100000}"
    host = SiteHost(name, getattr(module, "INVENTORY", "inventory/lab"), getattr(module, "HOSTS", ()))
    host.up()
    yield host
    if os.environ.get("LAB_KEEP") != "1":
        host.down()


@pytest.fixture(scope="module")
def fresh(host: SiteHost) -> dict[str, list[str]]:
    """What the host has before anything is done to it."""
    return host.snapshot()
