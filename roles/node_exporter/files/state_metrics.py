#!/usr/bin/python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write what this host knows about its engine for the node exporter's textfile collector, again and again.

    state_metrics.py CONFIG.json

It reads the state and trusts no event: which release serves, whether each engine says that it is ready and runs with
the configuration that its unit has by now, what the newest smoke report found, how full directories are. CONFIG.json:

    {"device": "cuda", "engines": [{"unit": "sglang-unified.service", "role": "unified", "url": "http://127.0.0.1:30001"}],
     "release": "/opt/sglang/current", "smoke_reports": ["/var/lib/sglang/reports/smoke.json"],
     "directories": ["/var/cache/sglang"], "output": "/var/lib/sglang/metrics/state.prom", "interval_seconds": 15}
"""

from __future__ import annotations

import calendar
import glob
import json
import os
import sys
import time
import typing as t
import urllib.error
import urllib.request

READY_TIMEOUT_S = 5.0
UNITS = "/etc/systemd/system"
PROC = "/proc"
# The package of our kernels, as it is called when it is installed.
KERNELS = "sglang_dsv4_sm120"
# The hash of a unit's configuration, in the unit and in the environment of what it has started.
CONFIG = b"OPS_CONFIG_SHA256="
# Families in the order of the page: name -> help. All are gauges.
FAMILIES = {
    "ops_state_timestamp_seconds": "When this page was written.",
    "ops_engine_device": "1 for the device that the engines compute on.",
    # It generates nothing: an engine that answers wrong, or not at all, can say so. ops_smoke_ok is of answers.
    "ops_engine_ready": "1 when /ready (a router's /readiness) is 200: it says that it takes requests; 0 otherwise.",
    "ops_release_info": "1 for the release that serves, with the versions of the engine and of our kernels in it.",
    "ops_unit_config_info": "1 for the configuration that a unit has by now, as the start of its sha256.",
    "ops_restart_pending": "1 when the unit's processes were started with another configuration than it has by now.",
    "ops_smoke_ok": "1 when every check of the last smoke test passed.",
    "ops_smoke_timestamp_seconds": "When the last smoke test began.",
    "ops_smoke_checks": "Checks of the last smoke test by result.",
    "ops_smoke_failed_tries": "Questions of the last smoke test that were answered wrong, also within a pass rate.",
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


def wanted_config(unit: str, units: str = UNITS) -> bytes | None:
    """The hash in a unit's file; None when there is no such file, or no hash in it."""
    try:
        with open(os.path.join(units, unit), "rb") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return None
    start = b"Environment=" + CONFIG
    return next((line[len(start) :] for line in lines if line.startswith(start)), None)


def running_configs(proc: str = PROC) -> dict[str, set[bytes]]:
    """Unit -> the hashes that its processes were started with, for the processes of this user."""
    found: dict[str, set[bytes]] = {}
    for process in os.listdir(proc):
        try:
            with open(os.path.join(proc, process, "environ"), "rb") as stream:
                variables = stream.read().split(b"\0")
            with open(os.path.join(proc, process, "cgroup"), encoding="utf-8") as stream:
                units = {part for line in stream for part in line.strip().split("/") if part.endswith(".service")}
        except OSError:
            continue  # no process, or not this user's, or it has ended
        for variable in variables:
            if variable.startswith(CONFIG):
                for unit in units:
                    found.setdefault(unit, set()).add(variable[len(CONFIG) :])
    return found


def release_samples(link: str) -> list[Sample]:
    """The release that a link leads to, "" for what is not in it; nothing when it leads nowhere."""
    release = os.path.realpath(link)
    if not os.path.isdir(release):
        return []
    packages = glob.glob(os.path.join(release, "venv", "lib", "python3*", "site-packages", "*.dist-info"))
    versions = dict(os.path.basename(path)[: -len(".dist-info")].split("-", 1) for path in packages)
    labels = {"sglang": versions.get("sglang", ""), "kernels": versions.get(KERNELS, "")}
    return [Sample("ops_release_info", {"release": os.path.basename(release), **labels}, 1.0)]


def config_samples(engines: t.Sequence[dict], units: str = UNITS) -> list[Sample]:
    """The configuration of each unit that has one."""
    found = [(engine, wanted_config(engine["unit"], units)) for engine in engines]
    return [
        Sample(
            "ops_unit_config_info", {"unit": engine["unit"], "role": engine["role"], "config": sha.decode()[:12]}, 1.0
        )
        for engine, sha in found
        if sha
    ]


def restart_samples(engines: t.Sequence[dict], units: str = UNITS, proc: str = PROC) -> list[Sample]:
    """Whether a restart was put off, or cut short; nothing for a unit that does not run."""
    running = running_configs(proc)
    samples = []
    for engine in engines:
        wanted, seen = wanted_config(engine["unit"], units), running.get(engine["unit"])
        if wanted and seen:
            labels = {"unit": engine["unit"], "role": engine["role"]}
            samples.append(Sample("ops_restart_pending", labels, float(seen != {wanted})))
    return samples


def read_report(path: str) -> tuple[int, dict] | None:
    """When a smoke test began (seconds since the epoch), and its report; None when there is none that can be read.

    A test that goes on has no result yet, so that of the one before counts; one that is over its time was killed.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            report = json.load(stream)
        if time.time() < report.get("ends_by", 0):
            report = report["before"]
        if report is None:
            return None
        report = {key: report[key] for key in ("ok", "model", "started", "passed", "failed")} | {
            "skipped": report.get("skipped", []),
            "failed_tries": int(report.get("failed_tries", 0)),
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
        Sample("ops_smoke_failed_tries", labels, float(report["failed_tries"])),
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
    samples += engine_samples(config) + release_samples(config["release"])
    samples += config_samples(config["engines"]) + restart_samples(config["engines"])
    samples += [sample for path in config["smoke_reports"] for sample in smoke_samples(path)]
    return page(samples + directory_samples(config["directories"]))


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as stream:
        config = json.load(stream)
    while True:
        try:
            write(config["output"], collect(config))
        except OSError as error:  # a full disk: the page grows old, and HostStateStale tells
            print(f"cannot write {config['output']}: {error.strerror}", file=sys.stderr, flush=True)
        time.sleep(config["interval_seconds"])


if __name__ == "__main__":
    main()
