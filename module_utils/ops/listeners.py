# SPDX-License-Identifier: GPL-3.0-or-later
"""Does the process that listens on a port belong to this unit?

An engine whose port is taken loads the whole model, fails to bind, and its own warm-up request is answered by the other
server; it even logs that it is ready. Only the owner of the listening socket tells the two apart.
"""

from __future__ import annotations

import os

from .preflight import Host, listening_inodes, socket_owners


def foreign_listener(port: int, main_pid: int, host: Host | None = None) -> str | None:
    """Who holds the port, in words, when it is nobody of the main process's unit; None when it is ours or unknown."""
    host = host or Host()
    inodes = listening_inodes(host.read("/proc/net/tcp"), port) | listening_inodes(host.read("/proc/net/tcp6"), port)
    if not inodes:
        return None
    unit = host.unit_of(main_pid)
    owners = socket_owners(host, inodes)
    if any(pid == main_pid or (unit and owner_unit == unit) for pid, _name, owner_unit in owners):
        return None
    if not owners and not _readable(main_pid, host):
        return None  # the unit's own sockets could not be seen either
    who = ", ".join(f"process {pid} ({name}{', ' + unit if unit else ''})" for pid, name, unit in owners)
    return f"port {port} is held by {who or 'a process of another user'}, not by this unit"


def _readable(pid: int, host: Host) -> bool:
    try:
        return bool(os.listdir(host.path(f"/proc/{pid}/fd")))
    except OSError:
        return False
