# SPDX-License-Identifier: GPL-3.0-or-later
"""A soak: one client without a pause, and nothing grows. SOAK_MINUTES=20 for the full one; a minute without it.

Looks at the engine, Prometheus and the exporters on a host that serves, and notes what it saw in .cache/soak.json,
from which tests/bench/reliability makes a table of docs/reliability.md.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import pytest
from faults import SOAK_FILE
from performance import commit
from site_host import CHECKOUT, ENGINE, PROMETHEUS, Load, SiteHost, eventually

pytestmark = [pytest.mark.integration, pytest.mark.thorough]
MINUTES = float(os.environ.get("SOAK_MINUTES", "1"))
URL, MODEL, KEY_FILE = "http://10.77.0.11:30001", "smollm2-135m-instruct", CHECKOUT / ".cache" / "lab-api-key"
UNITS = [ENGINE, PROMETHEUS, "prometheus-node-exporter.service", "sglang-state-metrics.service"]
STORE = "/var/lib/prometheus/metrics2"
# From the first fifth of the soak to the last, medians: allocators and caches fill at first, and a leak goes on.
GROWTH_MIB, GROWTH_SHARE, FILES = 32, 0.05, 4
# One line for each lasting process of the units: unit, pid, anonymous memory in KiB, open files, command line.
LOOK = """
for unit in UNITS; do
  main=$(systemctl show -P MainPID $unit)
  for pid in $main $(pgrep -P $main -f 'sglang::|resource_tracker'); do
    name=$(tr '\\0' ' ' < /proc/$pid/cmdline)
    echo "$unit|$pid|$(awk '/^RssAnon/ {print $2}' /proc/$pid/status)|$(ls /proc/$pid/fd | wc -l)|$name"
  done
done
"""


@pytest.fixture(scope="module")
def host(site_host: SiteHost) -> SiteHost:
    return site_host


def name_of(unit: str, command: str) -> str:
    """Return a short name of a process: what SGLang has named it, or its unit."""
    unit = unit.removesuffix(".service")
    if "resource_tracker" in command:
        return f"{unit} resource tracker"
    return command.split()[0] if command.startswith("sglang::") else unit


def look(host: SiteHost) -> dict[str, tuple[int, float, int]]:
    """Return process -> pid, MiB of anonymous memory, open files."""
    found = {}
    for line in host.shell(LOOK.replace("UNITS", " ".join(UNITS))).splitlines():
        unit, pid, kib, files, command = line.split("|", 4)
        found[name_of(unit, command)] = (int(pid), int(kib) / 1024, int(files))
    return found


def test_nothing_grows_under_load(host: SiteHost, converged: None) -> None:
    eventually(host.at_rest, 60, "a KV cache at rest before the soak")
    stored = int(host.shell(f"du -sk {STORE} | cut -f 1"))
    looks, end = [], time.monotonic() + 60 * MINUTES
    with Load(host, URL, KEY_FILE, MODEL, clients=1) as load:
        while time.monotonic() < end:
            looks.append(look(host))
            time.sleep(max(1.0, MINUTES))
    eventually(host.at_rest, 60, "a KV cache at rest after the soak")
    part = max(1, len(looks) // 5)
    rows = []
    for name, (pid, _mib, _files) in looks[0].items():
        assert {one[name][0] for one in looks} == {pid}, f"{name} was restarted"
        spans = [[one[name] for one in span] for span in (looks[:part], looks[-part:])]
        mib, files = ([statistics.median(one[place] for one in span) for span in spans] for place in (1, 2))
        rows.append({"process": name, "mib": mib, "files": files})
    note = {
        "minutes": MINUTES,
        "commit": commit(),
        "requests": len(load.requests),
        "errors": sum(one["error"] != "" for one in load.requests),
        "stored_mib": [stored / 1024, int(host.shell(f"du -sk {STORE} | cut -f 1")) / 1024],
        "processes": rows,
    }
    SOAK_FILE.parent.mkdir(exist_ok=True)
    SOAK_FILE.write_text(json.dumps(note, indent=2) + "\n")
    assert note["requests"] and note["errors"] == 0
    grown = [
        row
        for row in rows
        if row["mib"][1] - row["mib"][0] > max(GROWTH_MIB, GROWTH_SHARE * row["mib"][0])
        or row["files"][1] - row["files"][0] > FILES
    ]
    assert grown == []
