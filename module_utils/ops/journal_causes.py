# SPDX-License-Identifier: GPL-3.0-or-later
"""Journal lines of the engine and of systemd, and what they mean: cause, variable to change, next command.

One table. Each row carries a line of the real shape and where that text is made, so that an upgrade of SGLang can be
checked row by row. A line at error level that no row knows is reported as unknown, never dropped.
"""

from __future__ import annotations

import re
import typing as t
from dataclasses import asdict, dataclass, replace

from .redact import masked, printable, without_colours

FATAL = "fatal"
WARNING = "warning"
BENIGN = "benign"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    """One known kind of line.

    pattern is searched in the line without its prefix. What it finds is fatal only where nothing but _BEFORE_CAUSE
    stands in front of it: further inside a line it may be the text of a client. next_command may hold {unit}; source
    names the file that prints the text.
    """

    id: str
    severity: str
    pattern: t.Pattern[str]
    cause: str
    variable: str
    next_command: str
    sample: str
    source: str
    # A consequence is printed because something else failed first: it explains less than any other fatal line.
    consequence: bool = False


@dataclass(frozen=True)
class Finding:
    """A line and what it means."""

    id: str
    severity: str
    cause: str
    variable: str
    next_command: str
    line: str
    consequence: bool = False
    count: int = 1

    def as_dict(self) -> dict[str, t.Any]:
        """What a module returns."""
        values = asdict(self)
        del values["consequence"]
        return values


def _row(
    id: str,
    severity: str,
    pattern: str,
    cause: str,
    variable: str,
    next_command: str,
    sample: str,
    source: str,
    consequence: bool = False,
) -> Cause:
    return Cause(id, severity, re.compile(pattern), cause, variable, next_command, sample, source, consequence)


_JOURNAL = "journalctl -u {unit} -n 200 --no-pager"
_KERNEL_SWITCHES = "DSV4_SM120_DECODE, DSV4_SM120_INDEXER or DSV4_SM120_MHC: 0"
_GPU_OWNERS = "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv"

# The first row that matches a line names it, so a row whose lines quote other errors stands before theirs.
CAUSES: tuple[Cause, ...] = (
    # Harmless lines that quote another error.
    _row(
        "pcie_allreduce_off",
        WARNING,
        r"PCIe-IPC workspace .* failed|falling back to NCCL all-reduce|reductions stay on NCCL",
        "the PCIe all-reduce is not in use; NCCL does its work, decoding is slower",
        "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE in sglang_serve_environment_custom",
        _JOURNAL,
        "[2026-11-30 09:03:05 TP2] FlashInfer PCIe-IPC workspace (max_numel=262144) failed: CUDA error: out of "
        "reach; reductions stay on NCCL",
        "srt/distributed/device_communicators/pcie_ipc_ar.py",
    ),
    _row(
        "benign_optional_model",
        BENIGN,
        r"Ignore import error when loading sglang\.srt\.models\.",
        "a model family that this host does not serve lacks an optional package",
        "none",
        _JOURNAL,
        "[2026-11-30 00:09:25] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'",
        "srt/models/registry.py",
    ),
    # Lines that quote what a client sent; the engine refuses the request and goes on.
    _row(
        "request_failed",
        WARNING,
        r"^(Error in request|\[http_server\] Error|(Tool call|Reasoning) parsing error|DS32EncodingError): ",
        "a request failed, and the engine went on",
        "none; the client's request is refused or has met an error",
        _JOURNAL,
        "[2026-11-30 09:20:11] Error in request: Unexpected message role.",
        "srt/entrypoints/openai/serving_base.py, srt/entrypoints/openai/serving_chat.py",
    ),
    # Before the rows of memory: a failed graph capture quotes it.
    _row(
        "kernel_too_large",
        FATAL,
        r"out of resource: shared memory|(?<![\w.])[\w.]{0,99}OutOfResources: ",
        "a Triton kernel needs more shared memory than this GPU has",
        f"{_KERNEL_SWITCHES} in sglang_serve_environment_custom, where the traceback names dsv4_sm120",
        _JOURNAL,
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: "
        "101376. Reducing block sizes or `num_stages` may help.",
        "triton/runtime/errors.py",
    ),
    # Memory at start.
    _row(
        "graph_capture_failed",
        FATAL,
        r"Capture cuda graph failed: ",
        "capturing the decode CUDA graphs failed, most often for lack of GPU memory beside the KV pool",
        "sglang_serve_mem_fraction_static, or --cuda-graph-max-bs-decode in sglang_serve_arguments_custom",
        _JOURNAL,
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.19 GiB. GPU 2 has a total "
        "capacity of 94.97 GiB of which 706.75 MiB is free.",
        "srt/model_executor/runner/decode_cuda_graph_runner.py",
    ),
    _row(
        "weights_leave_no_kv",
        FATAL,
        r"Loaded weights leave no GPU memory for the KV cache",
        "the weights take the whole static share of GPU memory; no room is left for the KV pool",
        "sglang_serve_mem_fraction_static (raise) or sglang_serve_tp (raise)",
        _JOURNAL,
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.45. Raise "
        "--mem-fraction-static above 0.487 (minimum viable = 1 - available/pre = 0.4867). If using speculative "
        "decoding, draft weights are now counted.",
        "srt/mem_cache/kv_cache_configurator.py",
    ),
    _row(
        "kv_pool_empty",
        FATAL,
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the KV pool would hold no token with this share of GPU memory",
        "sglang_serve_mem_fraction_static",
        _JOURNAL,
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
        "mem_fraction_static=0.6",
        "srt/model_executor/pool_configurator.py",
    ),
    _row(
        "host_pool_empty",
        FATAL,
        r"No host memory is left for HiCache after the",
        "a pool in host memory, which a decode server keeps for requests that are pushed back, finds no room",
        "sglang_serve_arguments_custom: disaggregation-decode-retraction-backup: cpu_tensor, or hicache-size: GiB",
        "free --gibi",
        "ValueError: No host memory is left for HiCache after the 10 GiB reserve; set --hicache-ratio or --hicache-size"
        " explicitly.",
        "srt/mem_cache/hicache_auto_size.py",
    ),
    _row(
        "prefill_out_of_kv",
        FATAL,
        r"(Prefill|Decode) out of memory\. Try to lower your batch size",
        "the KV pool ran out while requests were running",
        "sglang_serve_max_running_requests (lower)",
        _JOURNAL,
        "[2026-11-30 09:14:02 TP0] Prefill out of memory. Try to lower your batch size.",
        "srt/mem_cache/allocation.py",
    ),
    _row(
        "gpu_memory_held",
        FATAL,
        r"not started: GPU \d+ \(.* held by ",
        "somebody else holds memory of the server's GPUs",
        "none; the line says who, and how to end it",
        _GPU_OWNERS,
        "not started: GPU 5 (0000:84:00.0): 90112 MiB held by process 4711 (python3), wanted: no memory held by "
        "others; end them if they are left over: kill 4711",
        "module_utils/ops/gpu_free.py",
    ),
    _row(
        "gpu_memory_unknown",
        FATAL,
        r"not started: not known whether the memory of GPU ",
        "nvidia-smi does not say whether the memory of the server's GPUs is free",
        "none; the line says why, and what to do",
        "nvidia-smi -q",
        "not started: not known whether the memory of GPU 4, 5, 6, 7 is free: nvidia-smi did not end within 20 s, "
        "wanted: nvidia-smi -q answers; journalctl -k -b",
        "module_utils/ops/gpu_free.py",
    ),
    _row(
        "gpu_out_of_memory",
        FATAL,
        r"(?<![\w.])[\w.]{0,99}OutOfMemoryError\b|CUDA out of memory|CUDA error: out of memory",
        "a GPU has no memory left: another process holds some, or the static share is too large",
        "sglang_serve_mem_fraction_static",
        _GPU_OWNERS,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.06 GiB. GPU 0 has a total capacity of "
        "94.97 GiB of which 2.11 GiB is free.",
        "torch/cuda (c10/cuda/CUDACachingAllocator.cpp)",
    ),
    _row(
        "host_out_of_memory",
        FATAL,
        r"Failed with result 'oom-kill'|A process of this unit has been killed by the OOM killer|"
        r"systemd-oomd killed |oom-kill:constraint=|(Memory cgroup o|O)ut of memory: Killed process|"
        r"(\[enforce fail at [^\]]*\] .{0,40})?DefaultCPUAllocator: can't allocate memory|MemoryError\b",
        "the host ran out of memory and a process of the unit was killed",
        "sglang_serve_max_total_tokens (lower), or free memory on the host",
        "journalctl -k -g 'oom|Out of memory' -n 20 --no-pager",
        "sglang-unified.service: A process of this unit has been killed by the OOM killer.",
        "systemd src/core/unit.c, kernel mm/oom_kill.c",
    ),
    # Files, ports, rights.
    _row(
        "port_waited_for",
        WARNING,
        r"the start waits: port \d+ is held by ",
        "another process listens on a port of this unit, and the start waits until it is gone",
        "sglang_serve_port",
        "ss -ltnp",
        "the start waits: port 30001 is held by process 4711 (python3), wanted: port 30001 free; stop it",
        "module_utils/ops/port_free.py",
    ),
    _row(
        "port_in_use",
        FATAL,
        r"(error while attempting to bind on address \([^()]*\): )?[aA]ddress already in use|EADDRINUSE|"
        r"Port is already in use",
        "another process listens on a port of this unit",
        "sglang_serve_port",
        "ss -ltnp",
        "[2026-11-30 09:02:11] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30001): "
        "address already in use",
        "uvicorn/server.py, srt/server_args.py",
    ),
    _row(
        "model_path_missing",
        FATAL,
        r"Can't load the configuration of|(?<!\S)\S{1,300} does not appear to have a file named config\.json|"
        r"Repo id must (be in the form|use alphanumeric)|Incorrect path_or_model_id|Unrecognized model in |"
        r"((?<!\S)\S{1,300} is not a local folder and )?is not a valid model identifier|"
        r"No such file or directory: '[^']*config\.json'|"
        r"Cannot find any model weights",
        "the model directory is missing or holds no model",
        "model_store_path",
        "ls -l /var/lib/sglang/models",
        "OSError: Can't load the configuration of '/var/lib/sglang/models/none'. If you were trying to load it from "
        "'https://huggingface.co/models', make sure you don't have a local directory with the same name.",
        "transformers/configuration_utils.py, transformers/utils/hub.py",
    ),
    _row(
        "weights_damaged",
        FATAL,
        r"(?<![\w.])[\w.]{0,99}SafetensorError\b|Error while deserializing header|"
        r"incomplete metadata, file not fully covered",
        "a weight file is damaged or was not copied to the end",
        "model_store_path",
        "ls -l /var/lib/sglang/models",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully "
        "covered",
        "safetensors",
    ),
    _row(
        "no_space_left",
        FATAL,
        r"No space left on device|\[Errno 28\]",
        "a file system is full (cache, state or /dev/shm)",
        "free space on the file system that the line names",
        "df -h /var/cache/sglang /var/lib/sglang /dev/shm /tmp",
        "OSError: [Errno 28] No space left on device: '/var/cache/sglang/triton/tmp.pid_8123'",
        "CPython OSError",
    ),
    _row(
        "no_temporary_directory",
        FATAL,
        r"No usable temporary directory found",
        "the unit has no writable /tmp (ProtectSystem=strict without PrivateTmp=yes)",
        "the unit's PrivateTmp=",
        "systemctl cat {unit}",
        "FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']",
        "CPython tempfile.py",
    ),
    _row(
        "permission_denied",
        FATAL,
        r"Permission denied|\[Errno 13\]|Operation not permitted: '",
        "the service user may not read or write what the line names",
        "owner and mode of the path in the line",
        "namei -l PATH",
        "PermissionError: [Errno 13] Permission denied: '/var/lib/sglang/models/model/config.json'",
        "CPython OSError",
    ),
    _row(
        "exec_failed",
        FATAL,
        r"Failed at step \w+ spawning|Failed to execute .*: No such file or directory|Unable to locate executable|"
        r"status=203/EXEC|cannot execute: required file not found",
        "systemd could not start the unit's command: missing file, wrong interpreter or not executable",
        "the release below sglang_venv_root (install it again)",
        "systemctl cat {unit}",
        "sglang-unified.service: Failed at step EXEC spawning /etc/sglang/sglang-unified.sh: No such file or directory",
        "systemd src/core/execute.c",
    ),
    _row(
        "bad_user",
        FATAL,
        r"status=217/USER|Failed to determine user credentials",
        "the unit's user does not exist",
        "sglang_host_user",
        "getent passwd sglang",
        "sglang-unified.service: Failed to determine user credentials: No such process",
        "systemd src/core/execute.c",
    ),
    # Arguments and software.
    _row(
        "unknown_argument",
        FATAL,
        r"error: (unrecognized arguments|argument --?[\w-]+: |ambiguous option|the following arguments are required)",
        "the engine's command line is refused: unknown, ambiguous or wrong argument",
        "sglang_serve_arguments_custom",
        "systemctl cat {unit}",
        "sglang serve: error: unrecognized arguments: --cuda-graph-max-batch 64",
        "CPython argparse.py",
    ),
    _row(
        "context_too_long",
        FATAL,
        r"(Warning: )?(User-specified )?context_length \(\d+\) is greater than the derived context_length",
        "the wanted context is longer than the model was made for",
        "sglang_serve_context_length",
        _JOURNAL,
        "ValueError: Warning: User-specified context_length (1048576) is greater than the derived context_length "
        "(8192). This may lead to incorrect model outputs or CUDA errors.",
        "srt/configs/model_config.py",
    ),
    _row(
        "plugin_failed",
        FATAL,
        r"Failed to load plugin|Failed to execute general plugin|Failed to apply hooks to",
        "a plugin of the engine did not load; the engine would go on with its stock kernels",
        "SGLANG_PLUGINS in sglang_serve_environment_custom, or install the release again",
        _JOURNAL,
        "[2026-11-30 09:00:41] Failed to load plugin dsv4_sm120 from group sglang.srt.plugins",
        "srt/plugins/__init__.py, srt/plugins/hook_registry.py",
    ),
    _row(
        "moe_backend_unsupported",
        FATAL,
        r"[Nn]o Nv[Ff]p4 MoE backend|(Assertion error \([\w./:]+\): )?[Uu]nsupported architecture|"
        r"(RuntimeError|ValueError|AssertionError): .{0,120}(only supported on|requires) (SM90a?(, | and | or |/))?"
        r"SM100",
        "a kernel was chosen that this GPU generation does not have",
        "--moe-runner-backend in sglang_serve_arguments_custom; for a kernel of attention, "
        "SGLANG_SM120_FLASHMLA_BACKEND in sglang_serve_environment_custom",
        _JOURNAL,
        "RuntimeError: Assertion error (csrc/apis/attention.hpp:211): Unsupported architecture",
        "DeepGEMM csrc/apis/attention.hpp",
    ),
    _row(
        "no_kernel_image",
        FATAL,
        r"(CUDA error: )?no kernel image is available for execution on the device|Value 'sm_12\w+' is not defined|"
        r"ptxas .*not defined for option 'gpu-name'|nvrtc: error: invalid value for --gpu-architecture",
        "the installed CUDA packages hold no code for this GPU",
        "sglang_venv_lock",
        "nvidia-smi",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "torch/cuda, triton",
    ),
    _row(
        "driver_mismatch",
        FATAL,
        r"(Failed to initialize NVML: )?Driver/library version mismatch|"
        r"(CUDA error: )?CUDA driver version is insufficient|Found no NVIDIA driver on your system",
        "the NVIDIA driver is missing, too old, or was upgraded without a reboot",
        "the host's driver; reboot after a driver upgrade",
        "nvidia-smi; cat /proc/driver/nvidia/version",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed "
        "a driver",
        "torch/cuda/__init__.py, NVML",
    ),
    _row(
        "device_hidden",
        FATAL,
        r"No CUDA GPUs are available|(CUDA error: )?(no CUDA-capable device is detected|invalid device ordinal)",
        "the process sees fewer GPUs than it was told to use",
        "sglang_serve_tp, or the unit's device access",
        "nvidia-smi -L",
        "RuntimeError: No CUDA GPUs are available",
        "torch/cuda",
    ),
    _row(
        "import_error",
        FATAL,
        r"(ModuleNotFoundError|ImportError): ",
        "a Python package is missing or does not fit the others",
        "sglang_venv_lock",
        "/opt/sglang/current/venv/bin/python -m pip check",
        "ModuleNotFoundError: No module named 'sgl_kernel'",
        "CPython import",
    ),
    _row(
        "compiler_crashed",
        FATAL,
        r"ninja exited with status \d+|ninja: build stopped|nvcc fatal",
        "compiling a kernel at start failed",
        "the CUDA toolkit on the host",
        _JOURNAL,
        "RuntimeError: ninja exited with status 139",
        "tvm-ffi / torch cpp_extension",
    ),
    # GPUs talking to each other.
    _row(
        "nccl_watchdog",
        FATAL,
        r"Watchdog caught collective operation timeout",
        "a collective operation never finished: a rank is stuck or gone",
        "sglang_serve_nccl_port, and the P2P settings of the GPUs",
        "dmesg -T | grep -iE 'xid|nvrm' | tail",
        "[rank3]:[E1130 09:31:22.101 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=4211, OpType=ALLGATHER) ran for 600021 milliseconds before timing out.",
        "torch ProcessGroupNCCL.cpp",
    ),
    _row(
        "nccl_error",
        FATAL,
        r"(?<![\w.])[\w.]{0,99}DistBackendError\b|NCCL error|nccl(UnhandledCuda|System|Internal|Remote)Error\b|"
        r"ncclInvalid(Usage|Argument)\b",
        "NCCL could not set up or lost the link between the GPUs",
        "the P2P settings of the GPUs (IOMMU, ACS)",
        "dmesg -T | grep -iE 'xid|nvrm|iommu' | tail",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.29.3",
        "torch ProcessGroupNCCL.cpp",
    ),
    _row(
        "gpu_lost",
        FATAL,
        r"NVRM: Xid \(PCI|(NVRM: GPU .{0,80}: )?GPU has fallen off the bus|"
        r"Unable to determine the device handle for GPU",
        "a GPU reported an error or left the bus",
        "the host's hardware; drain and reboot",
        "dmesg -T | grep -iE 'xid|nvrm' | tail",
        "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVIDIA kernel module",
    ),
    _row(
        "device_assert",
        FATAL,
        r"/[\w./+-]+:\d+: .{0,200}: block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion |"
        r"(CUDA error: )?device-side assert triggered",
        "a kernel was given a value out of its range, such as an index",
        "none known; keep the journal and the request",
        _JOURNAL,
        "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:111: operator(): block: [0,0,0], thread: [32,0,0] Assertion "
        '`-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.',
        "torch/cuda",
    ),
    _row(
        "cuda_error",
        FATAL,
        r"CUDA error: |cudaErrorIllegalAddress|(Triton Error \[CUDA\]: )?an illegal memory access was encountered",
        "a kernel failed on the GPU",
        "none known; keep the journal",
        _JOURNAL,
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "torch/cuda",
    ),
    # A process that ends without a Python traceback.
    _row(
        "native_crash",
        FATAL,
        r"^(Fatal Python error: (?!Aborted)|(free|malloc|realloc|munmap_chunk)\(\): |double free or corruption|"
        r"corrupted (size|double-linked list)|(/[\w./-]+: line \d+:\s+\d+ )?(Bus error|Segmentation [Ff]ault)\b|"
        r"terminated by signal SIG)|^!+ Segfault encountered",
        "native code of the engine crashed",
        "none known; keep the journal",
        "coredumpctl list --no-pager; journalctl -u {unit} -n 200 --no-pager",
        "Fatal Python error: Segmentation fault",
        "CPython faulthandler, glibc malloc, libstdc++",
    ),
    _row(
        "rust_panic",
        FATAL,
        r"^thread '[^']*' (\(\d+\) )?panicked at ",
        "a Rust part of the engine or the router gave up",
        "sglang_venv_lock, or none known; keep the journal",
        _JOURNAL,
        "thread 'main' panicked at src/main.rs:10:5:",
        "Rust std::panicking",
    ),
    # Consequences: printed after the cause.
    _row(
        "process_aborted",
        FATAL,
        r"^(terminate called |Fatal Python error: Aborted)",
        "a process of the engine gave up on an error that nothing handled",
        "see the lines before it",
        _JOURNAL,
        "terminate called without an active exception",
        "libstdc++, CPython faulthandler",
        consequence=True,
    ),
    _row(
        "scheduler_died_at_start",
        FATAL,
        r"^(RuntimeError: )?Rank \d+ scheduler died during initialization",
        "a scheduler process died while starting",
        "see the line before it",
        _JOURNAL,
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a "
        "common cause is the OS OOM killer.",
        "srt/entrypoints/engine.py",
        consequence=True,
    ),
    _row(
        "scheduler_exception",
        FATAL,
        r"^Scheduler hit an exception: Traceback",
        "a scheduler process stopped on an exception",
        "see the traceback after it",
        _JOURNAL,
        "[2026-11-30 09:10:30 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        "srt/managers/scheduler.py",
        consequence=True,
    ),
    _row(
        "subprocess_crashed",
        FATAL,
        r"^Subprocess \S+ \(pid=\d+\) crashed with exit code",
        "a process of the engine crashed and took the others with it",
        "see the lines before it",
        _JOURNAL,
        "[2026-11-30 09:44:10] Subprocess scheduler_0 (pid=4711) crashed with exit code -11. Triggering SIGQUIT for "
        "cleanup...",
        "srt/utils/watchdog.py",
        consequence=True,
    ),
    _row(
        "child_failed",
        FATAL,
        r"^(Received sigquit from a child process|SIGQUIT received\. signum=)",
        "a process of the engine failed; the main process stops all of them",
        "see the lines before it",
        _JOURNAL,
        "[2026-11-30 09:10:31] Received sigquit from a child process. It usually means the child failed.",
        "srt/entrypoints/engine.py, srt/managers/tokenizer_manager.py",
        consequence=True,
    ),
    _row(
        "warmup_failed",
        FATAL,
        r"^Initialization failed\. warmup error: ",
        "the server came up but did not answer its own warm-up request",
        "see the traceback after it",
        _JOURNAL,
        "[2026-11-30 09:12:02] Initialization failed. warmup error: Traceback (most recent call last):",
        "srt/entrypoints/http_server.py",
        consequence=True,
    ),
    _row(
        "scheduler_stuck",
        FATAL,
        r"(?<!\w)\w{1,40} watchdog timeout \(self\.watchdog_timeout=",
        "the scheduler made no progress within its watchdog time",
        "--watchdog-timeout in sglang_serve_arguments_custom",
        _JOURNAL,
        "[2026-11-30 10:05:12 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        "srt/utils/watchdog.py",
    ),
    _row(
        "main_process_exited",
        FATAL,
        r"^\S+\.service: Main process exited, code=(exited|killed|dumped), status=(?!0/)",
        "the unit's main process ended by itself",
        "see the lines before it",
        _JOURNAL,
        "sglang-unified.service: Main process exited, code=exited, status=1/FAILURE",
        "systemd src/core/service.c",
        consequence=True,
    ),
    _row(
        "stop_timeout",
        FATAL,
        r"^\S+\.service: State '(stop|final)-[\w-]+' timed out\. Killing",
        "the unit hung: it did not stop within TimeoutStopSec, and systemd killed it",
        "sglang_serve_drain_seconds, where long answers were still running",
        "systemctl start {unit}",
        "sglang-unified.service: State 'stop-sigterm' timed out. Killing.",
        "systemd src/core/service.c",
    ),
    _row(
        "start_timeout",
        FATAL,
        r"^\S+\.service: start(-post)? operation timed out",
        "the unit did not answer within TimeoutStartSec",
        "sglang_serve_start_timeout_seconds",
        _JOURNAL,
        "sglang-unified.service: start-post operation timed out. Terminating.",
        "systemd src/core/service.c",
        consequence=True,
    ),
    _row(
        "start_limit",
        FATAL,
        r"^\S+\.service: Start request repeated too quickly",
        "the unit failed too often in a row and systemd gave up",
        "see the first failure",
        "systemctl reset-failed {unit}",
        "sglang-unified.service: Start request repeated too quickly.",
        "systemd src/core/unit.c",
        consequence=True,
    ),
    # Worth knowing, not a reason to stop.
    _row(
        "health_check_failed",
        WARNING,
        r"Health check failed\. Server couldn't get a response from detokenizer",
        "the engine's own health request got no answer in time; a long prefill can cause it",
        "SGLANG_HEALTH_CHECK_TIMEOUT in sglang_serve_environment_custom",
        _JOURNAL,
        "[2026-11-30 09:50:44] Health check failed. Server couldn't get a response from detokenizer for last 20 "
        "seconds. tic start time: 09:50:24. last_heartbeat time: 09:49:58",
        "srt/entrypoints/http_server.py",
    ),
    _row(
        "request_retracted",
        WARNING,
        r"KV cache pool is full\. Retract requests|Retract requests\.",
        "running requests were pushed back to the queue for lack of KV pool",
        "sglang_serve_max_running_requests",
        _JOURNAL,
        "[2026-11-30 10:21:40 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: "
        "8192, #new_token_ratio: 0.612 -> 0.843",
        "srt/managers/scheduler.py",
    ),
    _row(
        "kernel_disabled",
        WARNING,
        r"^dsv4_sm120: kernel \w+ is disabled",
        "one of our kernels does not work on this GPU; SGLang's own serves in its place, slower",
        f"{_KERNEL_SWITCHES} in sglang_serve_environment_custom, once it is known why",
        "journalctl -u {unit} -g dsv4_sm120 --no-pager",
        "[2026-11-30 12:46:55] dsv4_sm120: kernel decode is disabled, the stock one stays in place: decode, 1 rows, "
        "16 heads, extra page 64: error 5.00e-02 > 8e-03",
        "kernels/src/dsv4_sm120/plugin.py",
    ),
    _row(
        "compiled_while_serving",
        WARNING,
        r"^Triton kernel '\w+' took [\d.]+ s to compile after serving started",
        "a kernel was compiled while requests waited; it happens once for each cache of /var/cache/sglang",
        "none; a new lock file, kernel package or GPU begins with an empty cache",
        _JOURNAL,
        "[2026-11-30 12:42:59] Triton kernel 'decode_fwd_kernel' took 1.97 s to compile after serving started. "
        "Serving-time compilation can stall the engine; pre-compile it during engine init.",
        "srt/utils/triton_load_watch.py",
    ),
    # Looks bad, is not.
    _row(
        "benign_nofile",
        BENIGN,
        r"Fail to set RLIMIT_(NOFILE|STACK)",
        "the unit's own limit stands; the engine wanted to raise it itself",
        "none",
        "systemctl show {unit} -p LimitNOFILE",
        "[2026-11-30 00:08:32] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
        "srt/utils/common.py",
    ),
    _row(
        "benign_platform_fallback",
        BENIGN,
        r"does not support Intel AMX, will fallback|Triton is not supported on current platform, roll back to CPU|"
        r"UserWarning: Only (CUDA|HIP)",
        "the CPU path of the engine is in use, as on any host without a GPU",
        "none",
        _JOURNAL,
        "[2026-11-30 00:08:28] The current platform does not support Intel AMX, will fallback to torch_native backend.",
        "srt/layers/attention, srt/layers/quantization",
    ),
    _row(
        "benign_launch_server",
        BENIGN,
        r"'python -m sglang\.launch_server' is still supported",
        "the engine recommends its newer command name",
        "none",
        _JOURNAL,
        "UserWarning: 'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended "
        "entrypoint.",
        "launch_server.py",
    ),
    _row(
        "benign_custom_allreduce",
        BENIGN,
        r"CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs",
        "expected on GPUs without NVLink; another all-reduce is used",
        "none",
        _JOURNAL,
        "[2026-11-30 09:00:58 TP1] CustomAllreduce is disabled because it's not supported on more than two PCIe-only "
        "GPUs. To silence this warning, specify disable_custom_all_reduce=True explicitly.",
        "srt/distributed/device_communicators/custom_all_reduce_utils.py",
    ),
)

# What may stand in front of a fatal text: a logger's level, the name of an exception, torch's or systemd's or a shell's
# own beginning. What a client wrote stands behind other words.
_BEFORE_CAUSE = re.compile(
    r"(?:(?:ERROR|CRITICAL|FATAL):?\s+)?"
    r"(?:\S+\.service: |(?:\[rank\d+\]:)?\[[EF]\d{4} [\d:.]+ [\w./]+:\d+\] (?:\[[\w ]+\] )*"
    r"|(?:/[\w./-]+|(?:ba|da)?sh): (?:(?:line )?\d+: )?(?:exec: )?(?:/[\w./-]+: )?"
    r"|(?:sglang(?: serve)?|[\w-]+\.py): |ptxas fatal\s*: )?"
    r"(?:[\w.]*(?:Error|Exception|OutOfResources)\s?: ){0,3}(?:Capture cuda graph failed: )?(?:\[Errno \d+\] )?"
)

# What an error looks like when no row knows it: the last line of a traceback, or a C++ logger's level.
_ERROR_SHAPE = re.compile(
    r"^[\w.]*(?:Error|Exception|TimeoutExpired|BrokenProcessPool|SystemExit)\s?(?::|$)|"
    r"^(?:\w+\.){0,8}(?:exc|errors?)\.(?:\w+\.){0,4}[A-Z]\w*(?::|$)|"
    r"^(?:error|fatal)(?:\[\w+\])?: |^nvrtc: error|^(?:Killed|Aborted)$|"
    r"^(?:\[rank\d+\]:)?\[?[EF]\d{4} \d\d:\d\d:|core dumped|"
    r"^\{.{0,200}\"level\":\s?\"(?:error|critical|fatal)\""
)
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
# What stands before the level of a logger's line: a time, a name, a bracket.
_BEFORE_LEVEL = re.compile(r"(?!\d+ )[\d\s:T.,Z/+|()\[\]-]*(?:[\w.-]+ [-|:] )?\[?")
_LEVEL_WITHIN = 120
_ERROR_PRIORITY = 3
# Of everything that a unit's processes print; systemd and the kernel choose their own.
_OUTPUT_PRIORITY = 6
_REQUEST_FAILED = "request_failed"
_HAS_TIME = re.compile(r"\s*\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_WARNING_PRIORITY = 4
_FALLBACK = re.compile(r"\bfall(?:ing|s)? ?back\b", re.IGNORECASE)

# Prints the whole configuration, which holds the API key, at every start.
_CONFIGURATION = re.compile(r"server_args=")
# What a client sent stands in these lines: requests as SGLang logs them, and uvicorn's access log.
_OF_A_CLIENT = re.compile(
    r"(?:Receive(?: OpenAI)?|Finish): |\{\"timestamp\": \"[^\"]*\", \"event\": \"request\.|INFO:\s+(?:\S+ - )?\"[A-Z]+ "
)
# The engine's time and ranks, a rank of torch, a process of a pool, the frame of an exception group.
_PREFIX = re.compile(
    r"(?:\s|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?(?: [A-Z_]+\d+)*\] |\[rank\d+\]: |\(\w+ pid=\d+\) |\| )+"
)
_MAX_LINE = 400
# A longer message is looked at from both ends.
_MAX_MESSAGE = 20_000


def strip_prefix(message: str) -> str:
    """The message without colours and without the engine's own time and rank prefix."""
    text = without_colours(message).strip()
    prefix = _PREFIX.match(text)
    return text[prefix.end() :] if prefix else text


def quotable(message: str) -> str:
    """The line as it may be shown: bounded, printable, without secrets."""
    if _CONFIGURATION.match(strip_prefix(message)):
        return "(a line that may hold secrets is not shown)"
    return printable(masked(without_colours(message).strip()), _MAX_LINE)


def level_of(text: str) -> str:
    """The level that a logger put before its message; empty when there is none."""
    found = _LEVEL.search(text, 0, _LEVEL_WITHIN)
    return found[0] if found and _BEFORE_LEVEL.fullmatch(text, 0, found.start()) else ""


def classify_line(message: str, priority: int = 6, unit: str = "{unit}") -> Finding | None:
    """What one journal line means; None for an ordinary line. priority is syslog's.

    A fatal text in a line that is only a warning, or that says what is used instead, is a warning: the engine went on.
    So is one inside a line, where anybody may have written it; at error level such a line is unknown.
    """
    text = strip_prefix(message)
    if _CONFIGURATION.match(text) or _OF_A_CLIENT.match(text):
        return None
    level, error = level_of(text), bool(_ERROR_SHAPE.search(text))
    survived = level[:1] in ("D", "I", "W") or (not error and bool(_FALLBACK.search(text)))
    loud = priority <= _ERROR_PRIORITY or error or level[:1] in ("E", "C", "F")
    row, quoted = _row_of(text)
    if row and not (quoted and loud and not survived):
        command = row.next_command.replace("{unit}", unit)
        # systemd says at the level of a warning that a unit failed.
        mild = survived or quoted or (priority == _WARNING_PRIORITY and "systemd" not in row.source)
        severity = WARNING if mild and row.severity == FATAL else row.severity
        consequence = row.consequence and severity == FATAL
        return Finding(row.id, severity, row.cause, row.variable, command, quotable(message), consequence)
    if loud:
        command = f"journalctl -u {unit} -n 200 --no-pager"
        return Finding(
            UNKNOWN, UNKNOWN, "an error that is not in the table of known causes", "unknown", command, quotable(message)
        )
    return None


def _row_of(text: str) -> tuple[Cause | None, bool]:
    """The row that knows a line, and whether the line only quotes what would be fatal."""
    quoted = None
    for row in CAUSES:
        match = row.pattern.search(text)
        if match and (row.severity != FATAL or _BEFORE_CAUSE.fullmatch(text, 0, match.start())):
            return row, False
        quoted = quoted or (row if match else None)
    return quoted, quoted is not None


def lines_of(message: str) -> list[str]:
    """The lines of a message. Of a client's text there is one only; the middle of a very long message is left out."""
    if _OF_A_CLIENT.match(strip_prefix(message[:_LEVEL_WITHIN])):
        return [message[:_MAX_MESSAGE]]
    half = _MAX_MESSAGE // 2
    bounded = message if len(message) <= _MAX_MESSAGE else f"{message[:half]}\n{message[-half:]}"
    return [line for line in bounded.split("\n") if line.strip()]


def classify(lines: t.Iterable[tuple[str, int]], unit: str = "{unit}") -> list[Finding]:
    """All findings of a journal in order of first appearance, equal ones counted. lines are (message, priority)."""
    found: dict[tuple[str, ...], Finding] = {}
    counts: dict[tuple[str, ...], int] = {}
    of_a_client = False
    for line, priority in ((line, priority) for message, priority in lines for line in lines_of(message)):
        finding = classify_line(line, priority, unit)
        # What follows a request's error up to the next line with a time is its text and its traceback.
        follows = of_a_client and priority == _OUTPUT_PRIORITY and not _HAS_TIME.match(without_colours(line))
        of_a_client = follows or (finding is not None and finding.id == _REQUEST_FAILED)
        if finding is None or (follows and finding.severity == UNKNOWN):
            continue
        if follows and finding.severity == FATAL:
            finding = replace(finding, severity=WARNING, consequence=False)
        key = (finding.id, finding.severity, finding.line if finding.severity == UNKNOWN else "")
        found.setdefault(key, finding)
        counts[key] = counts.get(key, 0) + 1
    return [replace(finding, count=counts[key]) for key, finding in found.items()]


def root_cause(findings: t.Sequence[Finding]) -> Finding | None:
    """The finding that explains a failure best: a fatal cause, else an unknown error, else a fatal consequence."""
    fatal = [finding for finding in findings if finding.severity == FATAL]
    causes = [finding for finding in fatal if not finding.consequence]
    unknown = [finding for finding in findings if finding.severity == UNKNOWN]
    for group in (causes, unknown[-1:], fatal):
        if group:
            return group[0]
    return None
