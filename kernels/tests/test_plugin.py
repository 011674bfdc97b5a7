"""The plugin against the real, installed SGLang. Each scenario runs in a process of its own: hooks are global state."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dsv4_sm120 import contract, settings

pytest.importorskip("sglang", reason="the contract is with SGLang itself")

SRC = Path(__file__).resolve().parents[1] / "src"
ENTRY_POINTS = "[sglang.srt.plugins]\ndsv4_sm120 = dsv4_sm120.plugin:register\n"
PRELUDE = """
import sys, types
import torch
from dsv4_sm120 import contract, plugin
from dsv4_sm120.ops import decode

def runner(**text_config):
    fields = {"hidden_size": 4096, "index_topk": 512, "num_attention_heads": 64, "model_type": "deepseek_v4"}
    fields |= text_config
    config = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(**fields))
    return types.SimpleNamespace(device="cpu", model_config=config)

def install():
    plugin.has_cuda_gpu = lambda: True  # the hooks themselves need no GPU
    plugin.register()
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for the import path in which the package's entry point is found, as after installing its wheel."""
    info = tmp_path / "sglang_dsv4_sm120-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-dsv4-sm120\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def run(code: str, *paths: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` after the prelude, with the interpreter for kernels, and return what it wrote."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, [*paths, SRC]))} | env
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(code)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def succeed(code: str, *paths: Path, **env: str) -> str:
    done = run(code, *paths, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_settings_default_to_everything() -> None:
    assert settings.load({}) == settings.Settings(frozenset(settings.KERNELS), "exit", True)


def test_settings_switch_single_kernels() -> None:
    loaded = settings.load({"DSV4_SM120_MHC": "0", "DSV4_SM120_ON_MISMATCH": "stock", "DSV4_SM120_SELF_CHECK": "0"})
    assert loaded == settings.Settings(frozenset({"decode", "indexer"}), "stock", False)


@pytest.mark.parametrize("name, value", [("DSV4_SM120_DECOED", "1"), ("DSV4_SM120_DECODE", "yes")])
def test_settings_refuse_what_they_do_not_know(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        settings.load({name: value})


def test_the_installed_sglang_fits() -> None:
    assert contract.check(frozenset(settings.KERNELS)) == []


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.PARAMETERS, contract.TOPK, "scores seq_lens")
    (mismatch,) = contract.check(frozenset({"indexer"}))
    assert contract.TOPK in str(mismatch) and "wanted (scores seq_lens)" in str(mismatch)


def test_a_missing_target_is_named() -> None:
    (mismatch,) = contract.check_target(contract.DECODE + "_gone")
    assert "missing (AttributeError" in str(mismatch)
    (mismatch,) = contract.check_target("sglang.kernels.no_such_module.function")
    assert "missing (" in str(mismatch)


def test_another_version_is_the_only_thing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SGLANG_VERSION", "0.5.99")
    (mismatch,) = contract.check(frozenset(settings.KERNELS))
    assert str(mismatch) == "sglang version is 0.5.23, wanted 0.5.99"


def test_without_a_gpu_sglang_stays_stock(installed: Path) -> None:
    """Loaded by SGLang's own loader through the entry point; no target is even imported, no CUDA context made."""
    output = succeed(
        """
        from sglang.srt.plugins import HookRegistry, load_plugins
        load_plugins()
        assert plugin.state.wanted is not None, "register() did not run"
        assert not HookRegistry._hooks and not plugin.state.hooked
        assert "sglang.srt.layers.attention.deepseek_v4_backend" not in sys.modules
        assert not torch.cuda.is_initialized()
        """,
        installed,
        SGLANG_PLUGINS="dsv4_sm120",
    )
    assert "Failed to" not in output


def test_a_mismatch_stops_the_process_with_one_line(installed: Path) -> None:
    """Through SGLang's loader, which swallows every ordinary exception of a plugin."""
    done = run(
        """
        from sglang.srt.plugins import load_plugins
        plugin.has_cuda_gpu = lambda: True
        contract.SGLANG_VERSION = "0.5.99"
        load_plugins()
        print("still alive")
        """,
        installed,
    )
    assert done.returncode == 1 and "still alive" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("dsv4_sm120 ")]
    assert "sglang version is 0.5.23, wanted 0.5.99" in line and "DSV4_SM120_ON_MISMATCH=stock" in line
    assert "Traceback" not in done.stderr


def test_a_mismatch_can_be_told_to_leave_stock_in_place() -> None:
    output = succeed(
        """
        contract.SGLANG_VERSION = "0.5.99"
        install()
        assert not plugin.state.hooked
        """,
        DSV4_SM120_ON_MISMATCH="stock",
    )
    assert "Staying with the stock kernels" in output


def test_an_unknown_variable_stops_the_process() -> None:
    done = run("install()", DSV4_SM120_DECOED="0")
    assert done.returncode == 1 and "unknown variable DSV4_SM120_DECOED" in done.stderr


@pytest.mark.parametrize("order", ["targets first", "plugin first"])
def test_hooks_reach_every_alias(order: str) -> None:
    """The names through which SGLang calls the seams, in both import orders; inactive kernels call the original."""
    imports = """
from sglang.srt.layers.attention.dsv4 import indexer as ix
from sglang.srt.layers.attention import deepseek_v4_backend as be
from sglang.kernels.ops.attention.dsv4 import topk as tk
from sglang.kernels.ops.attention import flash_mla_sm120 as fm
from sglang.kernels.ops.layernorm import mhc
from sglang.srt.models import deepseek_v4 as dm
"""
    steps = [imports, "install()\n"] if order == "targets first" else ["install()\n", imports]
    check = """
from dsv4_sm120.ops.indexer import PendingLogits
for function in (ix.topk_transform_paged, tk.topk_transform_paged, fm.flash_mla_with_kvcache_sm120,
                 mhc.mhc_fused_post_pre, dm.get_mhc_ops().mhc_fused_post_pre, be.DeepseekV4AttnBackend.__init__):
    assert hasattr(function, "__wrapped__"), function
assert set(plugin.state.hooked) == {contract.BACKEND_INIT, contract.DECODE, contract.TOPK, contract.MHC}
kwargs = decode.example("cpu", 2, 8, 64, 64, 64)
kernel = plugin.state.kernels["decode"]
stock = fm.flash_mla_with_kvcache_sm120(**kwargs)[0]
assert kernel.metrics is None, "an inactive kernel was called"
kernel.switch(True, "test", 0, 0)
ours = fm.flash_mla_with_kvcache_sm120(**kwargs)[0]
assert kernel.metrics.calls == 1
assert 0 < (ours.float() - stock.float()).norm() / stock.float().norm() < 1.2e-2
"""
    succeed("".join(steps) + check, SGLANG_SM120_FLASHMLA_BACKEND="torch")


ACTIVATE = """
import json
from sglang.srt.runtime_context import get_parallel, override_platform
install()
with get_parallel().override(tp_rank=3, tp_size=4, attn_tp_size=4, pp_rank=0), override_platform(is_sm120=True):
    for _ in range(2):  # SGLang builds a second backend for the draft model
        plugin.build_backend(lambda backend, model_runner, **rest: None, object(), runner(), skip_prefill=True)
"""


def test_activation_writes_one_line_and_exports_metrics(tmp_path: Path) -> None:
    output = succeed(
        ACTIVATE
        + """
plugin.state.kernels["decode"].metrics.count()
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
""",
        DSV4_SM120_SELF_CHECK="0",
        DSV4_SM120_MHC="0",
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
    )

    (line,) = [line for line in output.splitlines() if line.startswith("dsv4_sm120 {")]
    report = json.loads(line.removeprefix("dsv4_sm120 "))
    assert report["event"] == "activated" and report["tp_rank"] == 3 and report["active"] == ["decode"]
    assert report["inactive"]["mhc"] == "DSV4_SM120_MHC=0"
    assert "SGLANG_OPT_USE_TILELANG_INDEXER" in report["inactive"]["indexer"]
    assert report["versions"]["sglang"] == contract.SGLANG_VERSION
    labels = 'kernel="{}",pp_rank="0",tp_rank="3"'
    assert f"dsv4_sm120_kernel_active{{{labels.format('decode')}}} 1.0" in output
    assert f"dsv4_sm120_kernel_active{{{labels.format('indexer')}}} 0.0" in output
    assert f"dsv4_sm120_kernel_calls_total{{{labels.format('decode')}}} 1.0" in output


def test_a_failed_self_check_disables_the_kernel_and_says_so(tmp_path: Path) -> None:
    """The real self-check, with a tolerance that nothing meets."""
    output = succeed(
        "decode.TOLERANCE = 0.0\n"
        + ACTIVATE
        + """
assert not plugin.state.kernels["decode"].active
from sglang.kernels.ops.attention import flash_mla_sm120 as fm
fm.flash_mla_with_kvcache_sm120(**decode.example("cpu", 1, 8, None, 64, 64))
assert plugin.state.kernels["decode"].metrics.calls == 0
""",
        DSV4_SM120_INDEXER="0",
        DSV4_SM120_MHC="0",
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
        SGLANG_SM120_FLASHMLA_BACKEND="torch",
    )
    assert "kernel decode is disabled, the stock one stays in place: decode, 2 rows, 16 heads" in output


def test_the_pair_is_bound_only_as_a_pair() -> None:
    """Real logits pass through the top-k hook to SGLang; ours never reach SGLang's top-k."""
    succeed(
        """
        install()
        from sglang.kernels.ops.attention.dsv4 import topk as tk
        from dsv4_sm120.ops.indexer import PendingLogits
        seen = []
        tk.topk_transform_paged.__wrapped__  # the original is still reachable
        plugin.topk(lambda scores, *rest: seen.append(scores), "real logits", 1, 2)
        assert seen == ["real logits"]
        kernel = plugin.state.kernels["indexer"]
        reason = plugin.inactive_reason("indexer", runner())
        assert reason and not kernel.active
        assert plugin.inactive_reason("decode", runner(model_type="deepseek_v41")).startswith(("SGLang", "the model"))
        """
    )


def test_env_report_says_why() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "dsv4_sm120.env_report"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert "kernel decode" in done.stdout and "sglang" in done.stdout, done.stderr
