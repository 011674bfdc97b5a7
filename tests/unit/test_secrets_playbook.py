# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/secrets.yml makes what is missing, changes nothing that is there, and shows no secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
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

    def play(self) -> subprocess.CompletedProcess[str]:
        return self.run("ansible-playbook", "-vvv", "--diff", "-i", str(self.inventory), "playbooks/secrets.yml")

    def read(self) -> dict[str, str]:
        return yaml.safe_load(self.run("ansible-vault", "view", str(self.file)).stdout)

    def write(self, text: str) -> None:
        self.file.parent.mkdir(parents=True)
        self.file.write_text(text)


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
    before = vault.file.read_bytes()
    again = vault.play()
    assert "changed=0" in again.stdout
    assert vault.file.read_bytes() == before


def test_keeps_what_is_there(vault):
    vault.write("# ours\nvault_sglang_serve_api_key: chosen-by-the-operator\nvault_other: 7\n")
    assert vault.run("ansible-vault", "encrypt", str(vault.file)).returncode == 0
    assert vault.play().returncode == 0
    made = vault.read()
    assert made.pop("vault_grafana_admin_password")
    assert made == {"vault_sglang_serve_api_key": "chosen-by-the-operator", "vault_other": 7}
    assert vault.run("ansible-vault", "view", str(vault.file)).stdout.startswith("# ours\n")


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
