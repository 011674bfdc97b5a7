#!/usr/bin/python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write what this host knows about its engine for the node exporter's textfile collector, again and again.

    state_metrics.py CONFIG.json

It reads the state and trusts no event: whether each engine says that it is ready and runs what its unit has, what the
newest smoke report found, how full the directories are that the engine needs. CONFIG.json:

    {"device": "cuda", "engines": [{"unit": "sglang-unified.service", "role": "unified", "url": "http://127.0.0.1:30001"}],
     "smoke_reports": ["/var/lib/sglang/reports/smoke.json"], "directories": ["/var/cache/sglang"],
     "output": "/var/lib/sglang/metrics/state.prom", "interval_seconds": 15}
"""

from __future__ import annotations

import calendar
import json
import os
import re
import sys
import time
import typing as t
import urllib.error
import urllib.request
from pathlib import Path

READY_TIMEOUT_S = 5.0
# Families in the order of the page: name -> help. All are gauges.
FAMILIES = {
    "ops_state_timestamp_seconds": "When this page was written.",
    "ops_engine_device": "1 for the device that the engines compute on.",
    "ops_engine_ready": "1 when the engine's /ready says 200, 0 when it says anything else or nothing.",
    "ops_restart_pending": "1 when the unit's process was started with another configuration than its file has by now.",
    "ops_smoke_ok": "1 when every check of the last smoke test passed.",
    "ops_smoke_timestamp_seconds": "When the last smoke test began.",
    "ops_smoke_checks": "Checks of the last smoke test by result.",
    "ops_smoke_check_ok": "1 when this check of the last smoke test passed, 0 when it failed, absent when not judged.",
    "ops_directory_avail_bytes": "Bytes that the service user can still write on the directory's file system.",
    "ops_directory_size_bytes": "Size of the directory's file system.",
}


class Sample(t.NamedTuple):
    """One line of the page. A family without a sample is left out, so that its absence can be seen."""

    name: str
    labels: dict[str, str]
    value: float


def engine_ready(url: str, timeout: float = READY_TIMEOUT_S) -> bool:
    """Whether the engine, or the router, says that it takes requests."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def hash_in(path: Path) -> str | None:
    """The sha256 of a configuration in a unit's file or a process's environment; None where there is none to read."""
    try:
        found = re.search(rb"OPS_CONFIG_SHA256=([0-9a-f]{64})", path.read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


def restart_pending(unit: str, root: Path = Path("/")) -> bool | None:
    """Whether a unit waits for a restart that was put off, or not come to. None when it does not run."""
    try:
        group = (root / "sys/fs/cgroup/system.slice" / unit / "cgroup.procs").read_text().split()
    except OSError:
        return None
    # The first of them is the main process; those that have renamed themselves have written over their environment.
    running = [found for pid in sorted(group, key=int) if (found := hash_in(root / "proc" / pid / "environ"))]
    wanted = hash_in(root / "etc/systemd/system" / unit)
    return running[0] != wanted if running and wanted else None


def pending_samples(config: dict) -> list[Sample]:
    """Which units wait for a restart."""
    seen = [(engine, restart_pending(engine["unit"])) for engine in config["engines"]]
    return [
        Sample("ops_restart_pending", {"unit": engine["unit"], "role": engine["role"]}, float(pending))
        for engine, pending in seen
        if pending is not None
    ]


def engine_samples(config: dict) -> list[Sample]:
    """Device and readiness of the engines."""
    ready = [
        Sample(
            "ops_engine_ready",
            {"unit": engine["unit"], "role": engine["role"]},
            float(engine_ready(engine["url"] + engine.get("ready_path", "/ready"))),
        )
        for engine in config["engines"]
    ]
    return [Sample("ops_engine_device", {"device": config["device"]}, 1.0), *ready]


def read_report(path: str) -> tuple[int, dict] | None:
    """When a smoke test began (seconds since the epoch), and its report; None when it cannot be read."""
    try:
        with open(path, encoding="utf-8") as stream:
            report = json.load(stream)
        report = {key: report[key] for key in ("ok", "model", "started", "passed", "failed")} | {
            "skipped": report.get("skipped", []),
            "verdicts": {row["id"]: row["ok"] is True for row in report.get("checks", []) if not row["skipped"]},
        }
        return calendar.timegm(time.strptime(report["started"], "%Y-%m-%dT%H:%M:%SZ")), report
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not isinstance(error, FileNotFoundError):
            print(f"cannot read {path}: {error!r}", file=sys.stderr, flush=True)
        return None


def smoke_samples(path: str) -> list[Sample]:
    """A report of a smoke test, whoever ran it; nothing when there is none."""
    found = read_report(path)
    if not found:
        return []
    started, report = found
    labels = {"model": str(report["model"]), "report": os.path.basename(path)}
    counts = {
        "passed": report["passed"],
        "failed": len(report["failed"]),
        "skipped": len(report["skipped"]),
    }
    return [
        Sample("ops_smoke_ok", labels, float(report["ok"] is True)),
        Sample("ops_smoke_timestamp_seconds", labels, float(started)),
        *(Sample("ops_smoke_checks", {**labels, "result": name}, float(count)) for name, count in counts.items()),
        *(Sample("ops_smoke_check_ok", {**labels, "check": id}, float(ok)) for id, ok in report["verdicts"].items()),
    ]


def directory_samples(paths: t.Sequence[str]) -> list[Sample]:
    """Free and whole size of the file systems of directories that exist."""
    samples = []
    for path in paths:
        try:
            seen = os.statvfs(path)
        except OSError:
            continue
        samples.append(Sample("ops_directory_avail_bytes", {"path": path}, float(seen.f_bavail * seen.f_frsize)))
        samples.append(Sample("ops_directory_size_bytes", {"path": path}, float(seen.f_blocks * seen.f_frsize)))
    return samples


def page(samples: t.Sequence[Sample]) -> str:
    """The samples in Prometheus's text format."""
    lines = []
    for name, text in FAMILIES.items():
        found = [sample for sample in samples if sample.name == name]
        if found:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        for sample in found:
            pairs = ",".join(f'{key}="{_escape(value)}"' for key, value in sample.labels.items())
            lines.append(f"{name}{{{pairs}}} {sample.value:.15g}" if pairs else f"{name} {sample.value:.15g}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write(path: str, text: str) -> None:
    """Replace the page as a whole; the collector must never see a half."""
    with open(path + ".new", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(path + ".new", path)


def collect(config: dict) -> str:
    """Look at everything once and return the page."""
    samples = [Sample("ops_state_timestamp_seconds", {}, float(int(time.time())))]
    samples += engine_samples(config) + pending_samples(config)
    samples += [sample for path in config["smoke_reports"] for sample in smoke_samples(path)]
    return page(samples + directory_samples(config["directories"]))


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as stream:
        config = json.load(stream)
    while True:
        write(config["output"], collect(config))
        time.sleep(config["interval_seconds"])


if __name__ == "__main__":
    main()
