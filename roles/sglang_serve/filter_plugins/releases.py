# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that put the difference between two releases into lines for a person."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Beyond this many packages, only their number is told.
MOST_PINS = 12
ABSENT = "none"


def pins(lock: str) -> dict[str, str]:
    """Return package -> version of a lock file, with the condition where there is one."""
    return dict(re.findall(r"^([\w.-]+)==([^\\\n]+?)\s*\\?$", lock, re.MULTILINE))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of everything that differs."""
    for name in sorted({*old, *new}):
        before, after = old.get(name, ABSENT), new.get(name, ABSENT)
        if before != after:
            yield name, before, after


def server_lines(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between the arguments and the environments of two servers of one name."""
    for name, before, after in differences(old.get("arguments", {}), new.get("arguments", {})):
        yield f"flag         --{name}: {before} -> {after}"
    for name, before, after in differences(old.get("environment", {}), new.get("environment", {})):
        yield f"environment  {name}: {before} -> {after}"


def release_difference(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Return one line for each thing in which a release differs from an older one.

    Both: notes (name -> value), pins (package -> version), packages (of this repository -> hash of the sources) and
    servers, a list of mappings with name, arguments and environment.
    """
    lines = [f"{name:<12} {before} -> {after}" for name, before, after in differences(old["notes"], new["notes"])]
    pins = list(differences(old["pins"], new["pins"]))
    lines += [f"pin          {name}: {before} -> {after}" for name, before, after in pins[:MOST_PINS]]
    lines += [f"pin          and {len(pins) - MOST_PINS} more"] if len(pins) > MOST_PINS else []
    packages = differences(old["packages"], new["packages"])
    lines += [f"package      {name}: {before[:12]} -> {after[:12]}" for name, before, after in packages]
    servers = {server["name"]: server for server in old["servers"]}
    for server in new["servers"]:
        lines += [f"{line} ({server['name']})" for line in server_lines(servers.get(server["name"], {}), server)]
    return lines


def release_obstacles(release: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return why a release can't take the place of the wanted one as long as everything around it stays as it is.

    Clients, router, firewall and Prometheus ask for the model at the places that the inventory names.
    """
    obstacles = []
    places, wanted_places = ([f"{one['unit']} at {one['url']}" for one in it["servers"]] for it in (release, wanted))
    if places != wanted_places:
        obstacles.append(f"it has {', '.join(places)}, and the inventory {', '.join(wanted_places)}")
    if release["model"] != wanted["model"]:
        obstacles.append(f"it serves {release['model']}, and the inventory {wanted['model']}")
    return obstacles


def release_behind(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return how the host went back to an older release than the wanted one, which it has too; "" when it did not.

    state: what files/look_at_releases.py says. wanted: as for release_difference; its notes are not compared, for they
    come with a plan of the memory.
    """
    releases = {name: {**release, "notes": wanted["notes"]} for name, release in state["releases"].items()}
    current = releases.get(state["current"])
    same = [release for release in releases.values() if not release_difference(wanted, release)]
    newer = [release for release in same if current and release["staged"] > current["staged"]]
    if not newer or current in same:
        return ""
    target = next((release for release in newer if release["proven"]), newer[0])
    asked = f"The release {target['id']}, which the inventory asks for, was"
    if target["proven"]:
        how, condition = f"{asked} proven at {target['proven']['at']} and rolled back", ""
    else:
        how, condition = f"{asked} staged and never proven", ", once the inventory is corrected"
    serves = f"proven at {current['proven']['at']}" if current["proven"] else "not proven"
    return "\n".join(
        [
            f"{how}; {current['id']}, {serves}, serves in its place.",
            *release_difference(wanted, current),
            f"next command: ansible-playbook playbooks/upgrade.yml, which goes forward again{condition}",
            f"or keep {current['id']}: put the inventory back to what it was made from",
        ]
    )


def release_unproven(state: Mapping[str, Any]) -> str:
    """Return that a release serves which was never proven, and what to do; "" when none does.

    state: what files/look_at_releases.py says. A release that waits for a deferred restart serves nobody yet.
    """
    current = state["releases"].get(state["current"])
    if not current or current["proven"] or not current["in_use"]:
        return ""
    return "\n".join(
        [
            f"The release {current['id']} serves and was never proven: the run that started it was ended, left the "
            "proof out (--tags), or has not come that far yet.",
            "next command: ansible-playbook site.yml, which proves it, or goes back to the one that was proven before",
        ]
    )


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {
            "pins": pins,
            "release_difference": release_difference,
            "release_obstacles": release_obstacles,
            "release_behind": release_behind,
            "release_unproven": release_unproven,
        }
