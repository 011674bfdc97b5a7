# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of the installed engine, its caches and its configuration, without starting it."""

from __future__ import annotations

import os
import re
import typing as t
from collections.abc import Iterable, Mapping

from .findings import Finding, found
from .gpu_facts import version
from .host import Host

# sm_120 came with CUDA 12.8; its a-variant with 12.9.
PTXAS_MIN = "12.9"
FLASHINFER = ("flashinfer_python", "flashinfer_cubin", "flashinfer_jit_cache")
ARGUMENTS = "sglang_serve_arguments_custom"
ENVIRONMENT = "sglang_serve_environment_custom"
LONG_CONTEXT = 131072
# The only backend for NVFP4 experts that is fast and runs on sm_120.
MOE_BACKEND = "flashinfer_cutlass"


def site_packages(host: Host, venv: str) -> str:
    """Return the directory of a virtual environment's packages, "" when there is none."""
    python = next((name for name in host.names(f"{venv}/lib") if name.startswith("python3.")), "")
    return f"{venv}/lib/{python}/site-packages" if python else ""


def check_flashinfer(host: Host, packages: str) -> list[Finding]:
    """FlashInfer's Python, its binaries and its prebuilt kernels fit together only with equal versions."""
    names = (re.match(r"(\w+)-([^-]+)\.dist-info$", name) for name in host.names(packages))
    versions = {match[1].lower(): match[2].split("+")[0] for match in names if match and match[1].lower() in FLASHINFER}
    if len(set(versions.values())) < 2:
        return []
    seen = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    fix = "make the release anew from its lock file: ansible-playbook site.yml --tags sglang_venv"
    return [found("engine.flashinfer", seen, "one version", fix, "sglang_venv_lock")]


def check_ptxas(host: Host, packages: str, environment: Mapping[str, t.Any]) -> list[Finding]:
    """The assembler that Triton calls must know sm_120a; it comes with Triton, or is named in the environment."""
    own = f"{packages}/triton/backends/nvidia/bin"
    names = [environment.get("TRITON_PTXAS_BLACKWELL_PATH") or environment.get("TRITON_PTXAS_PATH")]
    names += [f"{own}/ptxas-blackwell", f"{own}/ptxas"]
    path = next((str(name) for name in names if name and os.path.exists(host.path(str(name)))), "")
    if not path:
        return []
    match = re.search(r"release (\d+\.\d+)", host.run([path, "--version"])[1])
    if match and version(match[1]) >= version(PTXAS_MIN):
        return []
    fix = f"TRITON_PTXAS_PATH: /usr/local/cuda/bin/ptxas in {ENVIRONMENT}"
    seen = f"{path} is of release {match[1] if match else 'unknown'}"
    return [found("engine.ptxas", seen, f"{PTXAS_MIN} or newer", fix, ENVIRONMENT)]


def check_stale_locks(host: Host, cache: str) -> list[Finding]:
    """Lock files of PyTorch's extension builder that no process holds open.

    Its lock is the file itself: whoever finds it waits until it is gone, for ever if its maker was killed. The `lock`
    files of other builders are taken with flock, which ends with the process, so they are left alone.
    """
    locks = []
    for directory, _directories, files in os.walk(host.path(cache)):
        if "lock" in files and "torch_extensions" in directory.split(os.sep):
            locks.append(os.path.join(directory, "lock"))
    held = {target for pid in host.pids() for target in host.open_files(pid)} if locks else set()
    stale = [path for path in locks if path not in held and os.path.realpath(path) not in held]
    if not stale:
        return []
    fix = f"no process holds them: rm {' '.join(stale)}"
    return [found("engine.stale_lock", ", ".join(stale), "no lock without its maker", fix)]


def check_configuration(arguments: Mapping[str, t.Any], environment: Mapping[str, t.Any]) -> list[Finding]:
    """Arguments and environment that are accepted by the engine and are known to go wrong."""
    findings = []

    def add(id: str, seen: str, wanted: str, fix: str, variable: str) -> None:
        findings.append(found(id, seen, wanted, fix, variable))

    def whole(name: str) -> int:
        value = str(arguments.get(name) or "")
        return int(value) if value.isdigit() else 0

    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments:\s*true", str(environment.get(name, "")), re.IGNORECASE):
            seen = f"{name}={environment[name]}"
            add(
                "engine.allocator",
                seen,
                "no expandable segments: with CUDA graphs they give wrong answers under a green health check",
                f"take it out of {ENVIRONMENT}",
                ENVIRONMENT,
            )
    if str(environment.get("NCCL_P2P_DISABLE", "0")) == "1" and environment.get("NCCL_P2P_LEVEL"):
        seen = f"NCCL_P2P_DISABLE=1 and NCCL_P2P_LEVEL={environment['NCCL_P2P_LEVEL']}"
        add("engine.nccl", seen, "one of them", f"take one out of {ENVIRONMENT}", ENVIRONMENT)
    if whole("tokenizer-worker-num") > 1 and whole("max-queued-requests"):
        seen = f"tokenizer-worker-num {whole('tokenizer-worker-num')} and max-queued-requests"
        fix = f"tokenizer-worker-num: 1 in {ARGUMENTS}"
        add("engine.tokenizer_workers", seen, "one worker, or no limit: else clients hang", fix, ARGUMENTS)
    ranks, chunk = max(whole("dp-size"), whole("dp"), whole("data-parallel-size")), whole("chunked-prefill-size")
    if ranks > 1 and chunk > 0 and arguments.get("enable-dp-attention"):
        seen = f"chunked-prefill-size {chunk} over {ranks} ranks, so {chunk // ranks} each"
        fix = f"chunked-prefill-size: {chunk * ranks} in {ARGUMENTS} for {chunk} each"
        add("engine.chunk", seen, "the chunk of one rank times the ranks", fix, ARGUMENTS)
    if arguments.get("enable-hierarchical-cache") and not whole("hicache-size"):
        seen = f"enable-hierarchical-cache with hicache-ratio {arguments.get('hicache-ratio', 'of the engine')}"
        fix = f"hicache-size: GB for each rank in {ARGUMENTS}; that much is pinned and counted in host.memory"
        add("engine.host_cache", seen, "a size in GB", fix, ARGUMENTS)
    backend, quantization = str(arguments.get("moe-runner-backend") or ""), str(arguments.get("quantization") or "")
    if backend.startswith("flashinfer_trtllm"):
        fix = f"take moe-runner-backend out of {ARGUMENTS}: the model's file sets {MOE_BACKEND}"
        add(
            "engine.moe_backend",
            f"moe-runner-backend {backend}",
            "a backend that is not for SM100 alone",
            fix,
            ARGUMENTS,
        )
    if quantization and any(
        "nvfp4" in str(arguments.get(name)).lower() for name in ("served-model-name", "model-path")
    ):
        fix = f"take quantization out of {ARGUMENTS}"
        seen = f"quantization {quantization} with an NVFP4 checkpoint"
        add("engine.moe_backend", seen, "none: the checkpoint says itself how it is quantized", fix, ARGUMENTS)
    limit = str(environment.get("SGLANG_MAX_NEW_TOKENS_LIMIT") or "0")
    if whole("context-length") > LONG_CONTEXT and limit == "0":
        seen = f"context-length {whole('context-length')}, SGLANG_MAX_NEW_TOKENS_LIMIT not set"
        fix = f'SGLANG_MAX_NEW_TOKENS_LIMIT: "{LONG_CONTEXT}" in {ENVIRONMENT}'
        add("engine.answer_cap", seen, "a bound for answers", fix, ENVIRONMENT)
    return findings


def host_cache_gib(engines: Iterable[Mapping[str, t.Any]]) -> float:
    """Memory that the engines pin for their host caches: hicache-size, in GB for each rank, times the ranks."""
    total = 0.0
    for engine in engines:
        arguments = engine.get("arguments") or {}
        if arguments.get("enable-hierarchical-cache"):
            total += float(arguments.get("hicache-size") or 0) * int(arguments.get("tp-size") or 1) * 1e9 / (1 << 30)
    return total


def check_engine(host: Host, venv: str, cache: str, engines: Iterable[Mapping[str, t.Any]]) -> list[Finding]:
    """Run every check of the engine; what is not installed yet has nothing to find."""
    engines = list(engines)
    findings = check_stale_locks(host, cache) if cache else []
    packages = site_packages(host, venv) if venv else ""
    if packages:
        findings += check_flashinfer(host, packages)
    for engine in engines:
        arguments, environment = engine.get("arguments") or {}, engine.get("environment") or {}
        findings += check_configuration(arguments, environment)
        if packages and arguments.get("device", "cuda") == "cuda":
            findings += check_ptxas(host, packages, environment)
    return list(dict.fromkeys(findings))
