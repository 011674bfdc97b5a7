# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator may set, and what is refused; and an inventory that is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("operator_input", ROOT / "filter_plugins/operator_input.py")
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
MANAGED = yaml.safe_load((ROOT / "roles/sglang_serve/vars/main.yml").read_text())["__sglang_serve_managed_arguments"]


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::", "::1", "2001:db8::7", "localhost", "gpu-1.example"])
def test_hosts(host):
    assert plugin.host_fault(host) == ""


@pytest.mark.parametrize("host", ["", "127.evil.example; x", "gpu1\n", "a b", "-a", "fe80::1%a b", "::1]", "$(id)"])
def test_what_is_no_host(host):
    assert "wanted: one IP address or host name" in plugin.host_fault(host)


def test_only_loopback_is_not_public():
    loopback = ["127.0.0.1", "127.9.8.7", "::1", "localhost"]
    public = ["0.0.0.0", "::", "10.0.0.7", "127.evil.example", "localhost.example", "127.1", "gpu1"]
    assert plugin.public_hosts(loopback + public) == public


@pytest.mark.parametrize("value", [0, 64, -1, "64", [], [0, "1"]])
def test_whole_numbers(value):
    assert plugin.number_faults({"tp": value}) == []


@pytest.mark.parametrize(
    "value", ["1e5", "262144.0", 64.0, "\uff13\uff10", "6_4", " 64 ", "30001\n", True, "True", "", "+1", None, {}]
)
def test_what_is_no_whole_number(value):
    assert plugin.number_faults({"tp": value}) == [f"tp is {value!r}; wanted: a whole number, digits only"]
    assert plugin.number_faults({"gpus": [1, value]}) == [f"gpus has {value!r}; wanted: a whole number, digits only"]


@pytest.mark.parametrize(
    "name",
    [
        "max-prefill-tokens", "tokenizer-path", "chunked-prefill-size", "tool-call-parser", "prefill-max-requests",
        "speculative-token-map", "skip-tokenizer-init", "ssl-keyfile", "no-such-flag", "tokenizer-mode",
    ],
)  # fmt: skip
def test_arguments(name):
    assert plugin.argument_faults({name: 1}, MANAGED, "custom") == []


@pytest.mark.parametrize("value", [True, False, 0, "", "text", [1, 2], {"a": 1}])
def test_values_of_arguments(value):
    assert plugin.argument_faults({"some-flag": value}, MANAGED, "custom") == []


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("port", 1, "custom sets port; wanted: sglang_serve_port instead"),
        ("por", 1, "custom sets por; wanted: sglang_serve_port instead"),
        ("api-ke", "hidden", "custom sets api-ke; wanted: sglang_serve_api_key instead"),
        ("model", "hidden", "custom sets model; wanted: sglang_serve_model_path instead"),
        ("admin-api-key", "hidden", "custom sets admin-api-key; wanted: no secrets"),
        ("admin-api", "hidden", "custom sets admin-api; wanted: no secrets"),
        ("ssl-keyfile-pass", "hidden", "custom sets ssl-keyfile-pass; wanted: no secrets"),
        ("some-secret", "hidden", "custom sets some-secret; wanted: no secrets"),
        ("max_prefill_tokens", 1, "custom has the name 'max_prefill_tokens'; wanted: lower-case letters"),
        ("--log-level", 1, "custom has the name '--log-level'"),
        ("log-level\n", 1, r"custom has the name 'log-level\n'"),
        ("a; reboot", 1, "custom has the name 'a; reboot'"),
        ("", 1, "custom has the name ''"),
        ("log-level", None, "custom has log-level without a value"),
        ("log-level", [], "custom has log-level without a value"),
        ("log-level", [None], "custom has log-level without a value"),
        ("log-level", "a@CONFIG_SHA256@", "custom has @CONFIG_SHA256@ in log-level"),
    ],
)
def test_argument_that_is_refused(name, value, wanted):
    faults = plugin.argument_faults({"log-requests": True, name: value}, MANAGED, "custom")
    assert len(faults) == 1
    assert faults[0].startswith(wanted)
    assert "hidden" not in faults[0]


@pytest.mark.parametrize(
    "name",
    ["SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_INIT_NEW_TOKEN_RATIO", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "_x1"],
)
def test_environment(name):
    assert plugin.environment_faults({name: 1, "EMPTY": "", "LINES": "one\ntwo"}, "custom") == []


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *((name, "hidden", f"custom has {name}; wanted: no secrets") for name in (
            "HF_TOKEN", "HF_TOKEN_X", "hf_token", "MY_SECRET_VALUE", "PGPASSWORD", "MYSQL_PASSWD", "X_CREDENTIALS",
            "OPENAI_API_KEY", "API_KEY_FILE", "SGLANG_API_KEY",
        )),
        ("A-B", 1, "custom has the name 'A-B'"),
        ("A\n", 1, r"custom has the name 'A\n'"),
        ("1A", 1, "custom has the name '1A'"),
        ("NCCL_DEBUG", None, "custom has NCCL_DEBUG without a value"),
        ("NCCL_DEBUG", {"hidden": 1}, "custom has a mapping or a list in NCCL_DEBUG; wanted: a text or a number"),
        ("NCCL_DEBUG", ["hidden"], "custom has a mapping or a list in NCCL_DEBUG"),
        ("NCCL_DEBUG", [], "custom has a mapping or a list in NCCL_DEBUG"),
        ("NCCL_DEBUG", "hidden\0", "custom has NCCL_DEBUG with a NUL in it; wanted: a text"),
        ("NCCL_DEBUG", "@CONFIG_SHA256@", "custom has @CONFIG_SHA256@ in NCCL_DEBUG"),
    ],
)  # fmt: skip
def test_environment_that_is_refused(name, value, wanted):
    faults = plugin.environment_faults({name: value}, "custom")
    assert len(faults) == 1
    assert faults[0].startswith(wanted)
    assert "hidden" not in faults[0]


@pytest.mark.parametrize(
    "path",
    ["/opt/sglang", "/opt/sglang/", "/srv/models", "/data/llm/models", "/var/lib/sglang/models", "/usr/local/sglang"],
)
def test_directories(path):
    assert plugin.directory_fault(path) == ""


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "//", "opt/sglang", "/opt", "/opt/", "/opt//sglang", "/opt/sglang\n", "/opt/sg lang", "/opt/x/..",
        "/opt/./x", "/usr/lib", "/usr/lib/python3", "/usr/local", "/usr/local/bin", "/var/lib", "/var/lib/dpkg",
        "/var/lib/dpkg/info", "/var/log/journal", "/etc/systemd",
        "/srv", "/bin/x", "/boot/efi", *(f"/{top}/llm/models" for top in ("home", "root", "tmp")),
    ],
)  # fmt: skip
def test_directory_that_is_refused(path):
    assert plugin.directory_fault(path).startswith("wanted: ")


def test_accounts():
    assert [name for name in ("sglang", "llm-serve", "a1_b") if plugin.account_fault(name)] == []
    here = [line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines() if ":/nonexistent:" not in line]
    base = [name for name in here if name in ("root", "daemon", "www-data", "backup", "sync")]
    refused = [
        *base,
        "root",
        "sshd",
        "nobody",
        "systemd-network",
        "_apt",
        "Sglang",
        "1a",
        "a" * 32,
        "sglang\n",
        "a b",
        "",
    ]
    assert [name for name in refused if not plugin.account_fault(name)] == []


def test_accounts_that_are_there():
    ours = ["x", "998", "998", "", "/nonexistent", "/usr/sbin/nologin"]
    assert plugin.account_entry_fault(None) == ""
    assert plugin.account_entry_fault(ours) == ""
    assert plugin.account_entry_fault([*ours[:5], "/bin/bash"]) == "an account with the uid 998 and the shell /bin/bash"
    assert "uid 0 " in plugin.account_entry_fault(["x", "0", *ours[2:]])
    assert "uid 13 " in plugin.account_entry_fault(["x", "13", *ours[2:]])
    assert "/bin/sh" in plugin.account_entry_fault([*ours[:5], ""])
    assert plugin.group_entry_fault(None) == plugin.group_entry_fault(["x", "998", ""]) == ""
    assert plugin.group_entry_fault(["x", "27", "me"]) == "a group with the gid 27"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


ANSIBLE_PLAYBOOK = str(Path(sys.executable).with_name("ansible-playbook"))


def test_inventory_that_is_not_there():
    done = run(ANSIBLE_PLAYBOOK, "--inventory", "inventory/typo", "site.yml")
    assert done.returncode != 0
    assert "inventory/typo" in done.stderr


def test_make_site_with_an_inventory_that_is_not_there():
    done = run(sys.executable, "tools/site", "inventory/typo")
    assert done.returncode != 0
    assert "inventory/typo does not exist; wanted: an inventory, such as inventory/lab" in done.stderr
    assert "Next: make site INVENTORY=" in done.stderr


def role(directory: Path, name: str, tasks_from: str, *words: str, **variables) -> str:
    """Run a role's tasks on this machine, see them fail, and return what is said."""
    task = {"ansible.builtin.import_role": {"name": name, "tasks_from": tasks_from}}
    (directory / "play.yml").write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": [task]}]))
    variables |= {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    words += ("--inventory", "localhost,", "--extra-vars", json.dumps(variables))
    done = run(ANSIBLE_PLAYBOOK, str(directory / "play.yml"), *words)
    assert done.returncode != 0
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("name", ["sglang_host", "uninstall"])
def test_an_account_of_somebody_else_is_not_touched(tmp_path, name):
    said = role(tmp_path, name, "main", "--check", **{f"{name}_user": "root", f"{name}_group": "daemon"})
    assert f"{name}_user is 'root', which is an account with the uid 0 and the shell " in said
    assert f"{name}_group is 'daemon', which is a group with the gid 1 on this host; wanted: " in said
    assert "changed=0" in said


def test_a_host_without_the_key_file_is_explained(tmp_path):
    """The module fails before it has a status; what it says is what is shown."""
    server = {"name": "unified", "unit": "sglang-unified.service", "url": "http://127.0.0.1:9", "side": False}
    said = role(tmp_path, "sglang_serve", "ready", __sglang_serve_these=[server], sglang_serve_api_key="k" * 20)
    assert "sglang-unified.service was not looked at: cannot read the API key" in said, said
    assert "/etc/sglang/credentials/api-key" in said
    assert "no attribute" not in said
