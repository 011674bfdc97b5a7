# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics are named in texts, programs and playbooks as well as in rules and panels: all these names exist, too."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import generate
import known
import pytest
import yaml

ROOT = Path(__file__).parents[2]
KNOWN = known.everything()
# Names that SGLang and our recording rules give have a colon, and nothing else here looks like them.
WITH_COLON = re.compile(r"(?<![\w:/])(?:sglang:[a-z_0-9]+(?![\w:])|instance:\w+:\w+)")
# A name of a program or file goes on with a parenthesis, a point or a slash.
WITHOUT_COLON = re.compile(r"(?<![\w./-])(?:ops|gpu|smg|dsv4_sm120)_[a-z0-9_]+(?![\w(]|[./-]\w)")
# These name things that only tests of other programs know.
APART = ("tests/unit/", "tests/templates/", "tests/gpu/", "engine/locks/", "dashboard/package-lock.json")
# Names that must not exist, and beginnings of names.
MADE_UP = {
    "tests/monitoring/test_metrics.py": {"sglang:num_running_requests", "sglang:num_running_reqs_bucket"},
    "tests/monitoring/test_state_metrics.py": {"ops_release", "ops_smoke"},
    "stack.lock.yml": {"sglang:x"},
}
WRONG = ("sglang:num_runing_reqs", "instance:sglang_pool_token:sum", "ops_engine_redy", "gpu_temperature", "smg_health")
MADE_UP["tests/monitoring/test_names.py"] = set(WRONG).union(*MADE_UP.values())
# What has such a prefix and is no metric.
OTHER = {
    "gpu_exporter",  # roles
    "gpu_host",
    "gpu_bus_id",  # what nvidia-smi says, and what is made of it
    "gpu_free_mib",
    "gpu_node",
    "gpu_row",
    "gpu_checks",
    "gpu_lost",  # causes that the journal shows
    "gpu_memory_held",
    "gpu_memory_unknown",
    "gpu_out_of_memory",
    "gpu_xid_errors",  # the client libraries add _total
    "dsv4_sm120_kernel_calls",
    "ops_secrets",  # a package
}


def texts() -> dict[str, str]:
    """Return path -> text of every file of the repository that is one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {}
    for name in listed.splitlines():
        if not name.startswith(APART) and (ROOT / name).is_file():
            try:
                found[name] = (ROOT / name).read_text()
            except UnicodeDecodeError:
                continue  # a picture
    return found


def exists(name: str) -> bool:
    """Whether a name is a metric's, or one that a pattern begins with: sglang:num_(a|b)."""
    return bool(known.family(name, KNOWN)) or (name.endswith("_") and any(one.startswith(name) for one in KNOWN))


@functools.cache
def variables() -> set[str]:
    """Return the variables of all roles and the thresholds, which have prefixes of metrics."""
    specs = [yaml.safe_load(path.read_text()) for path in ROOT.glob("roles/*/meta/argument_specs.yml")]
    options = {name for spec in specs for entry in spec["argument_specs"].values() for name in entry["options"]}
    return options | set(generate.load_thresholds())


def strangers(text: str) -> set[str]:
    """Return what looks like a metric's name and is none."""
    found = set(WITH_COLON.findall(text)) | set(WITHOUT_COLON.findall(text)) - OTHER - variables()
    return {name for name in found if not exists(name)}


def test_every_name_of_a_metric_exists():
    found = {path: strangers(text) - MADE_UP.get(path, set()) for path, text in texts().items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("around", ["look at `{}`.", 'ask(host, "max({}) > 1")', "{}{{job='x'}} 1", "- {}\n"])
def test_a_wrong_name_is_noticed(name, around):
    assert strangers(around.format(name)) == {name}


def test_what_is_no_metric_is_no_metric():
    assert {name for name in OTHER if exists(name)} == set()
