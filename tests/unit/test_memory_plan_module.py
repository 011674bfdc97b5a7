# SPDX-License-Identifier: GPL-3.0-or-later
"""The module sglang_memory_plan and playbooks/plan.yml as an operator runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import ansible.module_utils
import pytest
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CARD = {"model": "DeepSeek-V4-Flash", "memory_free_mib": 97_249, "tp_size": 4, "context_length": 524_288}
LAB = {
    "memory_plan_config": {
        "model_type": "llama",
        "_name_or_path": "SmolLM2-135M-Instruct",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "memory_plan_memory_free_mib": 16_384,
    "memory_plan_tp_size": 1,
    "memory_plan_context_length": 8192,
    "memory_plan_cuda_graph_max_bs": 0,
    "memory_plan_max_running_requests": 8,
    "memory_plan_max_total_tokens": 8192,
    "memory_plan_runtime_gib": 0.0,
}


def load_module():
    """The module with this repository's module_utils where Ansible puts them."""
    ansible.module_utils.__path__ = [*ansible.module_utils.__path__, str(ROOT / "module_utils")]
    spec = importlib.util.spec_from_file_location("sglang_memory_plan", ROOT / "library" / "sglang_memory_plan.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def main():
    return load_module().main


@pytest.fixture
def module(main, capsys):
    """Runs the module with options; returns (failed, result)."""

    def call(**options) -> tuple:
        with patch_module_args(options), pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code != 0, json.loads(capsys.readouterr().out)

    return call


# Without the key that a production inventory takes from its vault.
BLACKWELL = ("-i", "inventory/production.example")


def playbook(*arguments: str) -> subprocess.CompletedProcess:
    command = [str(BIN / "ansible-playbook"), "playbooks/plan.yml", *arguments]
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("check_mode", [False, True], ids=["run", "check"])
def test_module_plans_and_changes_nothing(module, check_mode):
    failed, result = module(**CARD, mem_fraction_static=0.85, mem_fractions=[0.8, 0.9], _ansible_check_mode=check_mode)
    assert not failed and result["changed"] is False
    assert result["plan"]["max_total_num_tokens"] == 5_937_664
    assert result["recommended_mem_fraction"] == 0.9
    assert result["capacity"].startswith("11 512k requests")


def test_module_fails_on_refusal_only_when_asked_to(module):
    refused = {**CARD, "mem_fraction_static": 0.3}
    failed, result = module(**refused)
    assert failed and "weights_exceed_budget" in result["msg"]
    failed, result = module(**refused, fail_on_refusal=False)
    assert not failed and result["refusals"][0]["id"] == "weights_exceed_budget"


def test_module_names_a_wrong_value(module):
    failed, result = module(**{**CARD, "tp_size": 3})
    assert failed
    assert result["msg"] == "No memory plan: tp_size is 3; accepted: a divisor of 64 query heads and 8 output groups"


def test_module_reads_config_json(module, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LAB["memory_plan_config"]))
    options = {"memory_free_mib": 16_384, "context_length": 8192, "max_total_tokens": 8192, "cuda_graph_max_bs": 0}
    _, result = module(config_json=str(path), **options)
    assert result["capacity"] == "one 8k request, or 16 of 512 tokens"
    path.write_text("{")
    failed, result = module(config_json=str(path), **options)
    assert failed and str(path) in result["msg"]


def test_module_warns_when_the_server_is_off_its_plan(module):
    failed, result = module(**CARD, mem_fraction_static=0.85, server={"max_total_num_tokens": 5_000_000})
    assert not failed
    assert result["drift"][0]["ok"] is False
    assert "planned 5,937,664, the server reports 5,000,000 (-15.8%)" in str(result["warnings"])
    assert 'ops_memory_plan_drift{quantity="max_total_num_tokens"} 1' in result["metrics"]


def test_playbook_prints_a_table_that_is_read_in_a_terminal():
    done = playbook(*BLACKWELL)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "\\n" not in done.stdout
    (head,) = [line for line in lines if line.lstrip().startswith("fraction ")]
    assert len(head) <= 120 and "[512k]" in head and "1M" in head
    (recommended,) = [line for line in lines if line.lstrip().startswith("> 0.")]
    assert recommended.split()[1] == "0.9"
    rows = [line for line in lines if line.split()[:1] and line.strip("> ").startswith(("0.6", "0.95"))]
    assert len(rows) == 3
    assert "full-context requests of 512k tokens at once" in done.stdout


def test_playbook_refuses_with_the_numbers_that_clash():
    # Values of -e are text: a text "0" is still no bound.
    done = playbook(*BLACKWELL, "-e", "memory_plan_model=DeepSeek-V4-Pro", "-e", "memory_plan_max_total_tokens=0")
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "Refused (weights_exceed_budget): weights and runtime take 213.8 GiB" in said
    assert "no fraction helps" in said


def test_playbook_plans_the_lab():
    done = playbook()
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.rpartition("TASK [")[2]
    assert last.startswith("memory_plan : Show the plan]")
    assert "smollm2-135m-instruct, tp 1, context 8,192, at most 8,192 tokens of KV" in last
    assert "8,192 tokens at 46,080.0 B" in last
    # A CPU has no fraction to recommend, no GPU, and room enough.
    assert [word for word in ("fraction", "recommended", "per GPU", "Warning") if word in last] == []


COMPARE = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {{name: "{root}/roles/memory_plan", tasks_from: compare}}
"""


def compare(play: Path, variables: dict, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "ansible-playbook"), "-i", "localhost,", str(play), *options]
    command += ["-e", json.dumps(variables), "-e", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(("reported", "shown"), [({}, False), ({"max_total_num_tokens": 8192}, True)])
def test_check_mode_shows_no_numbers_that_a_restarting_server_has_not_reported(tmp_path, reported, shown):
    (tmp_path / "play.yml").write_text(COMPARE.format(root=ROOT))
    release = tmp_path / "release"
    release.mkdir()
    (release / "memory-plan-unified.prom").write_text('ops_memory_plan_actual{quantity="context_len"} 8192\n')
    (tmp_path / "memory-plan-unified.prom").symlink_to(release / "memory-plan-unified.prom")
    given = {"max_running_requests": 8, "context_length": 8192, **reported}
    variables = LAB | {
        "memory_plan_servers": ["unified"],
        "memory_plan_reported": [given if reported else {}],
        "memory_plan_metrics_directory": str(tmp_path),
        "memory_plan_release": str(release),
    }
    done = compare(tmp_path / "play.yml", variables, "--check", "--diff")
    assert "changed=1" in done.stdout
    assert ("ops_memory_plan_actual" in done.stdout) is shown


def test_module_warns_of_a_checkpoint_that_is_not_the_plans(module):
    options = {"config": LAB["memory_plan_config"], "memory_free_mib": 16_384, "context_length": 8192}
    failed, result = module(**options, checkpoint=LAB["memory_plan_config"])
    assert not failed and result["differing_facts"] == []
    assert "another model" not in str(result.get("warnings"))
    failed, result = module(**options, checkpoint={**LAB["memory_plan_config"], "vocab_size": 50_000})
    assert not failed
    assert result["differing_facts"] == [{"fact": "vocab_size", "planned": 49_152, "checkpoint": 50_000}]
    assert "vocab_size is 50000 in the checkpoint's config.json, the plan takes 49152" in str(result["warnings"])


@pytest.mark.parametrize("there", [True, False])
def test_checkpoint_of_the_host_is_compared_when_it_is_there(tmp_path, there):
    (tmp_path / "play.yml").write_text(COMPARE.format(root=ROOT).replace("compare}", "checkpoint}"))
    path = tmp_path / "config.json"
    if there:
        path.write_text(json.dumps(LAB["memory_plan_config"] | {"num_hidden_layers": 31}))
    done = compare(tmp_path / "play.yml", LAB | {"memory_plan_checkpoint": str(path)})
    said = " ".join((done.stdout + done.stderr).split())
    assert ("num_layers is 31 in the checkpoint's config.json, the plan takes 30" in said) is there
    assert "changed=0" in done.stdout


@pytest.mark.parametrize("with_weights", [True, False])
def test_window_and_weights_are_compared_where_they_are_reported(tmp_path, with_weights):
    (tmp_path / "play.yml").write_text(COMPARE.format(root=ROOT))
    (tmp_path / "release").mkdir()
    reported = {"max_total_num_tokens": 5_937_664, "max_total_num_tokens_swa": 500_000, "weight_memory_usage_gb": 45.0}
    variables = {
        "memory_plan_servers": ["unified"],
        "memory_plan_reported": [{"max_running_requests": 64, "context_length": 524_288, **reported}],
        "memory_plan_compare_weights": with_weights,
        "memory_plan_metrics_directory": str(tmp_path),
        "memory_plan_release": str(tmp_path / "release"),
    }
    done = compare(tmp_path / "play.yml", variables, "--check", "--diff")
    said = " ".join(done.stdout.split()) + " ".join(done.stderr.split())
    assert "max_total_num_tokens_swa: planned 593,664, the server reports 500,000 (-15.8%)" in said
    assert ("weight_memory_usage_gb: planned 39.83, the server reports 45 (+13.0%)" in said) is with_weights
    assert ('quantity="weight_memory_usage_gb"} 45' in done.stdout) is with_weights


def test_the_plan_that_is_exported_is_that_of_the_release_that_serves(tmp_path):
    """Also after the link is put back by a run that knows nothing of plans; a server that is gone has none."""
    (tmp_path / "play.yml").write_text(COMPARE.format(root=ROOT))
    current, metrics = tmp_path / "current", tmp_path / "metrics"
    metrics.mkdir()
    (metrics / "memory-plan-replica-0.prom").symlink_to(tmp_path / "nowhere")
    (metrics / "state.prom").write_text("")
    for tokens in (8192, 4096):
        (tmp_path / str(tokens)).mkdir()
        current.unlink(missing_ok=True)
        current.symlink_to(str(tokens))
        reported = {"max_running_requests": 8, "context_length": tokens, "max_total_num_tokens": tokens}
        variables = LAB | {
            "memory_plan_servers": ["unified"],
            "memory_plan_reported": [reported],
            "memory_plan_metrics_directory": str(metrics),
            "memory_plan_release": str(current),
            "memory_plan_context_length": tokens,
            "memory_plan_max_total_tokens": tokens,
        }
        compare(tmp_path / "play.yml", variables)
        assert "changed=0" in compare(tmp_path / "play.yml", variables).stdout
        assert f'pool="full"}} {tokens}\n' in (metrics / "memory-plan-unified.prom").read_text()
    assert sorted(path.name for path in metrics.iterdir()) == ["memory-plan-unified.prom", "state.prom"]
    current.unlink()
    current.symlink_to("8192")
    assert 'pool="full"} 8192\n' in (metrics / "memory-plan-unified.prom").read_text()
