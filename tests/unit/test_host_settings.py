# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of a host, and the engine's files and configuration, as preflight judges them without starting anything."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from gpu_samples import WANTED, GpuHost
from ops import engine_checks, findings, system_checks
from ops.findings import ERROR, KINDS, Finding, Unchecked, found, judge
from ops.preflight import check_host

ROOT = Path(__file__).parents[2]
PACKAGES = "/opt/sglang/current/venv/lib/python3.11/site-packages"


@pytest.fixture
def gpus(tmp_path) -> GpuHost:
    return GpuHost(tmp_path)


def ids(found_ones) -> list[str]:
    return [finding.id for finding in found_ones]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((0, "yes\n"), []),
        ((0, "no\n"), ["host.clock"]),
        ((1, "Failed to connect to bus: Host is down\n"), Unchecked),
        ((127, "not there"), Unchecked),
        ((0, "ja\n"), Unchecked),
    ],
)
def test_clock(gpus, answer, expected):
    gpus.answers["timedatectl show --property=NTPSynchronized --value"] = answer
    result = system_checks.check_clock(gpus.host)
    assert isinstance(result, Unchecked) if expected is Unchecked else ids(result) == expected


@pytest.mark.parametrize(
    ("swaps", "swappiness", "expected"),
    [
        ("Filename Type Size Used Priority\n/swap.img file 8388604 0 -2\n", "60\n", ["host.swap"]),
        ("Filename Type Size Used Priority\n/swap.img file 8388604 0 -2\n", "10\n", []),
        ("Filename Type Size Used Priority\n", "60\n", []),
        ("", "", []),
    ],
)
def test_swap(gpus, swaps, swappiness, expected):
    gpus.write("/proc/swaps", swaps)
    gpus.write("/proc/sys/vm/swappiness", swappiness)
    assert ids(system_checks.check_swap(gpus.host)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[always] defer defer+madvise madvise never\n", ["host.thp_defrag"]),
        ("always defer defer+madvise [madvise] never\n", []),
        ("", []),
    ],
)
def test_huge_pages(gpus, text, expected):
    gpus.write("/sys/kernel/mm/transparent_hugepage/defrag", text)
    assert ids(system_checks.check_thp_defrag(gpus.host)) == expected


LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max open files            1024                 4096                 files     \n"
    "Max locked memory         8388608              8388608              bytes     \n"
)


def test_limits_bind_only_where_process_1_cannot_raise_them(gpus):
    gpus.write("/proc/1/limits", LIMITS)
    assert system_checks.check_limits(gpus.host) == []
    gpus.write("/proc/1/status", "CapEff:\t00000000a80425fb\n")
    memlock, nofile = system_checks.check_limits(gpus.host)
    assert (memlock.id, nofile.id) == ("host.memlock", "host.nofile")
    assert "8388608" in memlock.seen
    gpus.write("/proc/1/limits", LIMITS.replace("8388608 ", "unlimited ").replace("4096 ", "1048576 "))
    assert system_checks.check_limits(gpus.host) == []


def test_shared_memory(gpus):
    assert ids(system_checks.check_shm(gpus.host, 1)) == ["host.shm"]
    (gpus.root / "dev/shm").mkdir(parents=True)
    size = os.statvfs(gpus.root / "dev/shm")
    gib = size.f_blocks * size.f_frsize / system_checks.GIB
    assert system_checks.check_shm(gpus.host, gib) == []
    assert ids(system_checks.check_shm(gpus.host, gib + 1)) == ["host.shm"]
    assert ids(check_host(gpus.host, shm_gib=gib + 1).findings) == ["host.shm"]


def shm_file(gpus: GpuHost, name: str, size: int) -> None:
    (gpus.root / "dev/shm").mkdir(parents=True, exist_ok=True)
    with open(gpus.root / "dev/shm" / name, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def test_files_of_dead_runs_in_shared_memory(gpus):
    shm_file(gpus, "nccl-small", 4096)
    shm_file(gpus, "offload_0.mmap", system_checks.SHM_FILE_BYTES)
    shm_file(gpus, "offload_1.mmap", system_checks.SHM_FILE_BYTES)
    gpus.process(900, "system.slice/sglang-unified.service")
    gpus.write("/proc/900/maps", "7f00-7f10 rw-s 00000000 00:18 42   /dev/shm/offload_0.mmap\n")
    (finding,) = system_checks.check_shm_files(gpus.host)
    assert (finding.id, finding.fix) == ("host.shm_files", "rm /dev/shm/offload_1.mmap")
    gpus.open_file(900, "/dev/shm/offload_1.mmap")
    assert system_checks.check_shm_files(gpus.host) == []


def test_processors(gpus):
    gpus.write("/sys/devices/system/cpu/offline", "\n")
    assert system_checks.check_processors(gpus.host) == []
    gpus.write("/sys/devices/system/cpu/offline", "17\n")
    gpus.write("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       0 kB\n")
    offline, memory = system_checks.check_processors(gpus.host)
    assert (offline.id, offline.seen) == ("host.cpus_offline", "processors [17] are offline")
    assert (memory.id, memory.seen) == ("host.numa_memory", "node [1] has no memory")


# The engine's files.


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("flashinfer_python-0.7.2", "flashinfer_cubin-0.7.2", "flashinfer_jit_cache-0.7.2+cu130"), []),
        (("flashinfer_python-0.7.2", "flashinfer_cubin-0.7.1"), ["engine.flashinfer"]),
        (("flashinfer_python-0.7.2", "torch-2.13.0"), []),
        ((), []),
    ],
)
def test_flashinfer(gpus, versions, expected):
    for name in versions:
        gpus.write(f"{PACKAGES}/{name}.dist-info/METADATA", "")
    assert ids(engine_checks.check_engine(gpus.host, "/opt/sglang/current/venv", "", [])) == expected


PTXAS = f"{PACKAGES}/triton/backends/nvidia/bin/ptxas"


@pytest.mark.parametrize(
    ("files", "environment", "asked", "release", "expected"),
    [
        ([PTXAS], {}, PTXAS, "12.8", ["engine.ptxas"]),
        ([PTXAS], {}, PTXAS, "13.0", []),
        ([PTXAS, PTXAS + "-blackwell"], {}, PTXAS + "-blackwell", "12.9", []),
        ([PTXAS, "/usr/local/cuda/bin/ptxas"], {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"},
         "/usr/local/cuda/bin/ptxas", "13.0", []),
        ([PTXAS], {}, PTXAS, "", ["engine.ptxas"]),
        ([], {}, "", "", []),
    ],
)  # fmt: skip
def test_ptxas(gpus, files, environment, asked, release, expected):
    gpus.write(f"{PACKAGES}/x", "")
    for file in files:
        gpus.write(file, "")
    answer = f"Cuda compilation tools, release {release}, V{release}.1\n" if release else "Segmentation fault\n"
    gpus.answers[f"{asked} --version"] = (0, answer)
    engines = [{"arguments": {}, "environment": environment}]
    found_ones = engine_checks.check_engine(gpus.host, "/opt/sglang/current/venv", "", engines)
    assert ids(found_ones) == expected
    cpu = [{"arguments": {"device": "cpu"}, "environment": environment}]
    assert engine_checks.check_engine(gpus.host, "/opt/sglang/current/venv", "", cpu) == []


def test_stale_locks(gpus):
    cache = "/var/cache/sglang"
    extension = f"{cache}/torch_extensions/py311_cu130/topk/lock"
    gpus.write(f"{cache}/tvm-ffi/abc/lock", "")
    gpus.write(f"{cache}/torch_extensions/py311_cu130/topk/build.ninja", "")
    assert engine_checks.check_stale_locks(gpus.host, cache) == []
    gpus.write(extension, "")
    (finding,) = engine_checks.check_stale_locks(gpus.host, cache)
    assert finding.fix.endswith(f"rm {gpus.root}{extension}")
    gpus.process(77, "system.slice/sglang-unified.service")
    gpus.open_file(77, f"{gpus.root}{extension}")
    assert engine_checks.check_stale_locks(gpus.host, cache) == []
    assert engine_checks.check_stale_locks(gpus.host, "/no/cache") == []


def test_pytorch_locks_with_a_file_that_outlives_it(gpus, engine_python, tmp_path):
    """The check rests on this: PyTorch's lock stays when its maker is killed, and is open while the maker lives."""
    path = tmp_path / "var/cache/sglang/torch_extensions/py311/topk/lock"
    path.parent.mkdir(parents=True)
    baton = subprocess.run(
        [engine_python, "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    source = Path(baton.stdout.strip()).parent / "utils/file_baton.py"
    program = (
        f"import time, runpy; b = runpy.run_path({str(source)!r})['FileBaton']({str(path)!r}); "
        "assert b.try_acquire(); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([engine_python, "-c", program], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout
        assert maker.stdout.readline() == "held\n"
        links = [os.readlink(f"/proc/{maker.pid}/fd/{name}") for name in os.listdir(f"/proc/{maker.pid}/fd")]
        maker.kill()
    assert str(path) in links
    assert ids(engine_checks.check_stale_locks(gpus.host, "/var/cache/sglang")) == ["engine.stale_lock"]


# The engine's configuration.


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ({}, {}, []),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["engine.allocator"]),
        ({}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: true"}, ["engine.allocator"]),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, []),
        ({}, {"NCCL_P2P_DISABLE": 1, "NCCL_P2P_LEVEL": "SYS"}, ["engine.nccl"]),
        ({}, {"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}, []),
        ({"tokenizer-worker-num": 2, "max-queued-requests": 64}, {}, ["engine.tokenizer_workers"]),
        ({"tokenizer-worker-num": 2}, {}, []),
        ({"tokenizer-worker-num": 1, "max-queued-requests": 64}, {}, []),
        ({"dp-size": 4, "chunked-prefill-size": 4096, "enable-dp-attention": True}, {}, ["engine.chunk"]),
        ({"dp-size": 4, "chunked-prefill-size": 4096}, {}, []),
        ({"dp-size": 4, "chunked-prefill-size": -1, "enable-dp-attention": True}, {}, []),
        ({"enable-hierarchical-cache": True, "hicache-ratio": 10}, {}, ["engine.host_cache"]),
        ({"enable-hierarchical-cache": True, "hicache-size": 30}, {}, []),
        ({"context-length": 524288}, {}, ["engine.answer_cap"]),
        ({"context-length": 524288}, {"SGLANG_MAX_NEW_TOKENS_LIMIT": "0"}, ["engine.answer_cap"]),
        ({"context-length": 524288}, {"SGLANG_MAX_NEW_TOKENS_LIMIT": "65536"}, []),
        ({"context-length": 131072}, {}, []),
        ({"moe-runner-backend": "flashinfer_trtllm"}, {}, ["engine.moe_backend"]),
        ({"moe-runner-backend": "flashinfer_trtllm_routed"}, {}, ["engine.moe_backend"]),
        ({"moe-runner-backend": "flashinfer_cutlass"}, {}, []),
        ({"moe-runner-backend": "marlin"}, {}, []),
        ({"quantization": "fp8", "served-model-name": "DeepSeek-V4-Flash-NVFP4"}, {}, ["engine.moe_backend"]),
        ({"quantization": "modelopt_fp4", "model-path": "/srv/models/x-nvfp4"}, {}, ["engine.moe_backend"]),
        ({"quantization": False, "served-model-name": "DeepSeek-V4-Flash-NVFP4"}, {}, []),
        ({"quantization": "fp8", "served-model-name": "another"}, {}, []),
        (
            {"moe-runner-backend": "flashinfer_trtllm", "quantization": "fp8", "model-path": "/srv/NVFP4"},
            {},
            ["engine.moe_backend", "engine.moe_backend"],
        ),
    ],
)
def test_configuration(arguments, environment, expected):
    assert ids(engine_checks.check_configuration(arguments, environment)) == expected


def test_a_chunk_is_named_for_one_rank():
    arguments = {"dp-size": 4, "chunked-prefill-size": 4096, "enable-dp-attention": True}
    (finding,) = engine_checks.check_configuration(arguments, {})
    assert "so 1024 each" in finding.seen
    assert "chunked-prefill-size: 16384" in finding.fix


def test_pinned_host_cache_counts_as_memory(gpus):
    gpus.write("/proc/meminfo", "MemAvailable:   104857600 kB\n")  # 100 GiB
    memory = {"need_gib": 64, "variable": "site_model", "units": []}
    engine = {"arguments": {"enable-hierarchical-cache": True, "hicache-size": 10, "tp-size": 4}, "environment": {}}
    assert engine_checks.host_cache_gib([engine]) == pytest.approx(37.25, abs=0.01)
    assert check_host(gpus.host, memory=memory).findings == []
    (finding,) = check_host(gpus.host, memory=memory, engines=[engine]).findings
    assert finding.id == "host.memory"


# What becomes of findings.


def test_a_warning_can_be_accepted_and_an_error_cannot():
    warning, error = found("host.clock", "a", "b", "c"), found("host.port", "a", "b", "c")
    report = judge([warning, error], [], {"host.clock": "the hypervisor keeps it", "host.port": "why not"})
    assert (report.findings, report.accepted, report.errors) == ([error], [warning], [error])


def test_what_the_run_repairs_is_put_off():
    report = judge(
        [found("gpu.driver", "none", "b", "c"), found("gpu.count", "7", "8", "c"), found("host.clock", "a", "b", "c")],
        [],
        {},
        ["gpu.driver*"],
        "gpu_host installs it",
    )
    assert ids(report.findings) == ["gpu.count", "host.clock"]
    assert report.unchecked == [Unchecked("gpu.driver", "gpu_host installs it (none)")]


def test_errors_come_first():
    report = judge([found("host.swap", "", "", ""), found("host.port", "", "", "")], [], {})
    assert ids(report.findings) == ["host.port", "host.swap"]


def literal_ids(path: Path) -> set[str]:
    """Return the ids that a file hands to found() or add()."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    words = [call.args[0] for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    texts = {word.value for word in words if isinstance(word.value, str)}
    texts |= {call.args[1].value for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
              and isinstance(call.args[1].value, str)}  # fmt: skip
    return {text for text in texts if text in KINDS}


def test_every_kind_is_found_somewhere():
    files = [ROOT / "module_utils/ops" / f"{name}.py" for name in ("preflight", "system_checks", "gpu_checks",
             "engine_checks")] + [ROOT / "roles/preflight/files/p2p_bandwidth.py"]  # fmt: skip
    assert set().union(*(literal_ids(file) for file in files)) == set(KINDS)
    assert {severity for severity, _meaning in KINDS.values()} == {ERROR, findings.WARNING}


def test_no_gpus_wanted_none_asked(gpus):
    inspection = check_host(gpus.host, gpus_reason="sglang_serve_device is cpu")
    assert inspection.facts == {}
    assert Unchecked("gpu.*", "sglang_serve_device is cpu") in inspection.unchecked
    assert not any(command.startswith(("nvidia-smi", "lspci", "journalctl")) for command in gpus.asked)


def test_all_at_once(gpus):
    inspection = check_host(gpus.host, gpus=WANTED, units=["sglang-*.service"])
    assert inspection.findings == []
    assert inspection.facts["islands"][0] == {"gpus": [0, 1, 2, 3], "numa": 0}
    assert inspection.facts["gpus"][0]["name"].endswith("Server Edition")


def test_the_module_reports_and_lets_the_operator_accept(run_module, gpus):
    gpus.answers["timedatectl show --property=NTPSynchronized --value"] = (0, "no\n")

    def look_at_the_tree(module):
        module.Host = lambda: gpus.host

    result = run_module("host_preflight", {"gpus": WANTED, "units": ["sglang-*"]}, before=look_at_the_tree)
    assert not result.get("failed"), result
    assert [finding["id"] for finding in result["findings"]] == ["host.clock"]
    assert len(result["warnings"]) == 1
    assert result["facts"]["islands"][1] == {"gpus": [4, 5, 6, 7], "numa": 1}
    accepted = {"accept": {"host.clock": "kept by the hypervisor"}, "gpus_reason": "no GPUs here"}
    result = run_module("host_preflight", accepted, before=look_at_the_tree)
    assert (result["findings"], result["accepted"][0]["id"]) == ([], "host.clock")
    assert {"id": "gpu.*", "reason": "no GPUs here"} in result["unchecked"]
    gpus.smi()
    defer = {"gpus": {"count": 8}, "defer": ["gpu.*"], "defer_reason": "gpu_host comes next"}
    result = run_module("host_preflight", defer, before=look_at_the_tree)
    assert not result.get("failed")
    assert result["unchecked"][-1]["reason"].startswith("gpu_host comes next (0 GPUs")
    result = run_module("host_preflight", {"gpus": {"count": 8}}, before=look_at_the_tree)
    assert result["failed"]
    assert "gpu.count: 0 GPUs" in result["msg"]


@pytest.mark.parametrize("id", ["host.port", "host.clok"])
def test_what_cannot_be_accepted_is_refused(run_module, gpus, id):
    result = run_module("host_preflight", {"accept": {id: "because"}})
    assert result["failed"]
    assert result["msg"].startswith(f"accept has {id}; wanted: ids of warnings: engine.answer_cap, ")


def test_findings_are_values():
    assert found("host.port", "a", "b", "c", "d") == Finding("host.port", "error", "a", "b", "c", "d")


def test_the_module_compares_the_islands(run_module, gpus):
    def look_at_the_tree(module):
        module.Host = lambda: gpus.host

    islands = [{"gpus": [0, 1, 2, 3], "numa": 0}, {"gpus": [4, 5, 6, 7], "numa": 0}]
    engines = [{"arguments": {"tp-size": 8, "base-gpu-id": 0}}]
    arguments = {"gpus": WANTED, "islands": islands, "engines": engines}
    result = run_module("host_preflight", arguments, before=look_at_the_tree)
    assert sorted(finding["id"] for finding in result["findings"]) == ["gpu.islands", "host.numactl"]
