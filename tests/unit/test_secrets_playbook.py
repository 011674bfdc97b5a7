# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/secrets.yml makes what is missing, changes nothing that is there, and shows no secret."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("vault", ROOT / "filter_plugins/vault.py")
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
NAMES = {"vault_sglang_serve_api_key", "vault_grafana_admin_password"}


class Vault:
    """An inventory with a vault file."""

    def __init__(self, directory: Path) -> None:
        self.inventory = directory / "inventory"
        self.file = self.inventory / "group_vars/all/vault.yml"
        self.inventory.mkdir()
        (self.inventory / "hosts.yml").write_text("sglang: {hosts: {gpu1: {}}}\n")
        (directory / "password").write_text("a password\n")
        self.environment = {**os.environ, "ANSIBLE_VAULT_PASSWORD_FILE": str(directory / "password")}

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name(program)), *words]
        return subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)

    def play(self, *words: str) -> subprocess.CompletedProcess[str]:
        options = ("-vvv", "--diff", "-i", str(self.inventory), *words)
        return self.run("ansible-playbook", *options, "playbooks/secrets.yml")

    def read(self) -> dict[str, str]:
        return yaml.safe_load(self.run("ansible-vault", "view", str(self.file)).stdout)

    def write(self, text: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(text.encode())

    def encrypt(self, text: str) -> bytes:
        """Write an encrypted file, and return what is in it then."""
        self.write(text)
        assert self.run("ansible-vault", "encrypt", str(self.file)).returncode == 0
        return self.file.read_bytes()


@pytest.fixture
def vault(tmp_path) -> Vault:
    return Vault(tmp_path)


def test_makes_all_and_then_nothing(vault):
    done = vault.play()
    assert done.returncode == 0, done.stdout
    made = vault.read()
    assert set(made) == NAMES
    assert all(len(value) == 40 and value.isalnum() for value in made.values())
    assert len(set(made.values())) == len(made)
    assert vault.file.read_text().startswith("$ANSIBLE_VAULT;")
    assert not any(value in done.stdout + done.stderr for value in made.values())
    before = vault.encrypt("{vault_sglang_serve_api_key: a, vault_grafana_admin_password: b, vault_other: ''}")
    again = vault.play()
    assert "changed=0" in again.stdout
    assert vault.file.read_bytes() == before


def test_keeps_what_is_there(vault):
    vault.encrypt("# ours\nvault_sglang_serve_api_key: chosen-by-the-operator\nvault_other: 7\n")
    assert vault.play().returncode == 0
    made = vault.read()
    assert made.pop("vault_grafana_admin_password")
    assert made == {"vault_sglang_serve_api_key": "chosen-by-the-operator", "vault_other": 7}
    assert vault.run("ansible-vault", "view", str(vault.file)).stdout.startswith("# ours\n")


# Files that end as they should not, or hold what YAML and Jinja might take for something else.
ENDS = {
    "no end": ("a: 1", {"a": 1}),
    "comment": ("a: 1\n# ours", {"a": 1}),
    "comment alone": ("# ours", {}),
    "block": ("a: |-\n  {{ b }}\n  c", {"a": "{{ b }}\nc"}),
    "carriage return": ("a: 1\r\n", {"a": 1}),
    "empty": ("", {}),
    "empty line": ("\n", {}),
    "tag": ("a: !unsafe 1\n", {"a": "1"}),
}


@pytest.mark.parametrize("case", ENDS)
def test_adds_to_the_end(case):
    text, before = ENDS[case]
    new = plugin.whole_lines(text) + "b: c\n"
    assert plugin.missing_secrets(text, ["b"]) == ["b"]
    assert plugin.vault_fault(text, new, ["b"]) == ""
    assert plugin.read(new) == ({**before, "b": "c"}, "")


# What can't be added to in this way, or has a name without a text.
REFUSED = {
    "flow": ("{a: hidden,\n b: c}\n", "can't be added to: with new lines at its end it would be no YAML (line 3);"),
    "indented": ("  a: hidden\n", "it would be no YAML (line 2);"),
    "ended": ("a: hidden\n...\n", "it would be no YAML (line 3);"),
    "block": ("a: |\n  hidden", "it would be another value of a;"),
    "list": ("- hidden\n", "is a list; wanted: lines NAME: VALUE"),
    "text": ("hidden", "is a str; wanted: lines NAME: VALUE"),
    "broken": ("a: 'hidden\n", "is no YAML (line 2); wanted: lines NAME: VALUE"),
    "no date": ("a: 2001-99-99\n", "is no YAML; wanted: lines NAME: VALUE"),
    "nothing": ("made:\n", "has no text for made; wanted: a text, in quotes, or no such line"),
    "number": ("made: 7\n", "has no text for made;"),
    "no characters": ("made: ''\n", "has no text for made;"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_added_to(case):
    text, wanted = REFUSED[case]
    lines = [f"{name}: new\n" for name in plugin.missing_secrets(text, ["made", "other"])]
    new = plugin.whole_lines(text) + "".join(lines)
    fault = plugin.vault_fault(text, new, ["made", "other"])
    assert wanted in fault
    assert "hidden" not in fault


def test_adds_to_a_file_whose_last_line_has_no_end(vault):
    vault.encrypt("vault_other: 'it is {{ 1 + 1 }}'")
    assert vault.play().returncode == 0
    made = vault.read()
    assert made.pop("vault_other") == "it is {{ 1 + 1 }}"
    assert set(made) == NAMES


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{vault_other: sesame}\n", "can't be added to: with new lines at its end it would be no YAML (line 2); "),
        (
            "vault_sglang_serve_api_key:\nvault_grafana_admin_password: sesame\n",
            "has no text for vault_sglang_serve_api_key; wanted:",
        ),
    ],
)
def test_refuses_a_file_that_would_not_say_what_it_said(vault, text, wanted):
    before = vault.encrypt(text)
    done = vault.play()
    assert done.returncode == 2
    told = " ".join(done.stdout.split()).replace("''", "'")
    assert f"{vault.file} {wanted}" in told
    assert f"Nothing was changed. Next: ansible-vault edit {vault.file}" in told
    assert "sesame" not in told + done.stderr
    assert vault.file.read_bytes() == before
    assert [file.name for file in vault.file.parent.iterdir()] == ["vault.yml"]


@pytest.mark.parametrize("names", ["secrets_names=vault_x", '{"secrets_names": []}', '{"secrets_names": ["a b"]}'])
def test_refuses_what_is_no_list_of_names(vault, names):
    done = vault.play("-e", names)
    assert done.returncode == 2
    told = " ".join(done.stdout.split()).replace("''", "'")
    assert "wanted: a list of variables' names. Nothing was changed." in told
    assert not vault.file.exists()


def test_refuses_a_file_that_is_not_encrypted(vault):
    vault.write("vault_other: 7\n")
    done = vault.play()
    assert done.returncode == 2
    assert "is not encrypted" in done.stdout
    assert vault.file.read_text() == "vault_other: 7\n"


def test_asks_for_the_vaults_password(vault):
    del vault.environment["ANSIBLE_VAULT_PASSWORD_FILE"]
    done = vault.play()
    assert done.returncode == 2
    assert "ANSIBLE_VAULT_PASSWORD_FILE" in done.stdout
    assert not vault.file.exists()


def test_a_production_inventory_without_its_key_names_this_playbook(vault):
    done = vault.run("ansible-playbook", "-i", "inventory/production.example", "playbooks/preflight.yml")
    assert done.returncode == 2
    told = " ".join(done.stdout.split())
    assert f"not set; next: ansible-playbook -i {ROOT}/inventory/production.example playbooks/secrets.yml" in told


def test_the_production_inventory_uses_what_is_made(vault):
    """Each of the secrets is some variable's value there; one that nothing reads would be made for nobody."""
    assert vault.play().returncode == 0
    example = ROOT / "inventory/production.example/group_vars/all/main.yml"
    (vault.inventory / "group_vars/all/main.yml").write_text(example.read_text())
    assert set(re.findall(r"\bvault_\w+", example.read_text())) == NAMES
    lengths = "msg={{ [sglang_serve_api_key, grafana_admin_password] | map('length') }}"
    words = ("-m", "ansible.builtin.debug", "-a", lengths)
    told = vault.run("ansible", "-i", str(vault.inventory), "gpu1", *words)
    assert " ".join(told.stdout.split()).endswith("msg: - 40 - 40"), told.stdout + told.stderr
