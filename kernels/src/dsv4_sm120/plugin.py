"""SGLang plugin: puts the kernels of this package at SGLang's own seams, or refuses to start.

SGLang calls ``register`` in every process it starts (entry point group ``sglang.srt.plugins``). Nothing here touches a
GPU until the attention backend is built, which happens in the scheduler processes only. There, once per process: each
kernel is compared with its reference on the device, the kernels that pass become active, and one line starting with
``dsv4_sm120 `` and followed by a JSON object is written to stderr.

An inactive kernel leaves SGLang's stock function in place, call by call, so ``DSV4_SM120_<KERNEL>=0`` equals stock.
"""

import json
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from . import __version__, contract, settings
from .metrics import KernelMetrics

logger = logging.getLogger(__name__)

LINE = "dsv4_sm120"
"""First word of the lines that the deployment looks for."""


@dataclass
class Kernel:
    """State of one kernel in this process."""

    name: str
    active: bool = False
    reason: str = "the attention backend has not been built in this process"
    metrics: KernelMetrics | None = None

    def switch(self, active: bool, reason: str, tp_rank: int, pp_rank: int) -> None:
        self.active, self.reason = active, reason
        if self.metrics is None:
            self.metrics = KernelMetrics(self.name, tp_rank, pp_rank)
        self.metrics.set_active(active)


@dataclass
class Plugin:
    """What ``register`` installed in this process."""

    wanted: settings.Settings | None = None
    hooked: tuple[str, ...] = ()
    kernels: dict[str, Kernel] = field(default_factory=lambda: {name: Kernel(name) for name in settings.KERNELS})
    activated: bool = False


state = Plugin()


def register() -> None:
    """Entry point. Raises ``SystemExit``, which SGLang does not swallow, when the kernels cannot be trusted here."""
    try:
        state.wanted = settings.load()
    except ValueError as error:
        raise SystemExit(f"{LINE}: {error}") from None
    if not state.wanted.kernels:
        logger.info("%s: every kernel is switched off; SGLang stays stock", LINE)
        return
    if not has_cuda_gpu():
        logger.info("%s: no CUDA GPU in this process; SGLang stays stock", LINE)
        return
    install(state.wanted)


def say(text: str) -> None:
    """To stderr, not to a logger: SGLang configures logging after plugins load, and its level may hide the line."""
    print(text, file=sys.stderr, flush=True)


def has_cuda_gpu() -> bool:
    """Whether torch sees an NVIDIA GPU. Creates no CUDA context: SGLang asks the same in every process."""
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def install(wanted: settings.Settings) -> None:
    """Check SGLang, then hook it. Raises ``SystemExit`` on a mismatch unless ``DSV4_SM120_ON_MISMATCH=stock``."""
    mismatches = contract.check(wanted.kernels)
    if mismatches:
        text = f"{LINE} {__version__} does not fit this SGLang: " + "; ".join(map(str, mismatches))
        if wanted.on_mismatch == "stock":
            print(
                f"{text}. Staying with the stock kernels (DSV4_SM120_ON_MISMATCH=stock).", file=sys.stderr, flush=True
            )
            return
        raise SystemExit(
            f"{text}. Install the pinned versions, or set DSV4_SM120_ON_MISMATCH=stock to start without these kernels."
        )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {contract.BACKEND_INIT: build_backend}
    hooks |= {HOOKS[name][0]: HOOKS[name][1] for name in sorted(wanted.kernels)}
    originals = {target: contract.resolve(target) for target in hooks}
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    # SGLang applies hooks after all plugins ran, and only logs the ones that fail. Apply now, and look.
    HookRegistry.apply_hooks()
    missing = [target for target, original in originals.items() if contract.resolve(target) is original]
    if missing:
        raise SystemExit(f"{LINE} {__version__}: SGLang did not apply the hooks on {', '.join(missing)}")
    state.hooked = tuple(hooks)


def decode(original: Callable, **kwargs: object) -> tuple:
    """AROUND ``flash_mla_with_kvcache_sm120``."""
    kernel = state.kernels["decode"]
    if not kernel.active:
        return original(**kwargs)
    from .ops.decode import flash_mla_with_kvcache_sm120

    kernel.metrics.count()
    return flash_mla_with_kvcache_sm120(**kwargs)


def topk(original: Callable, scores: object, *args: object, **kwargs: object) -> None:
    """AROUND ``topk_transform_paged``: takes what our logits hook returned, and leaves real logits to SGLang."""
    from .ops.indexer import PendingLogits, topk_transform

    if not isinstance(scores, PendingLogits):
        return original(scores, *args, **kwargs)
    state.kernels["indexer"].metrics.count()
    return topk_transform(scores, *args, **kwargs)


def mhc(original: Callable, *args: object, **kwargs: object) -> tuple:
    """AROUND ``mhc_fused_post_pre``."""
    kernel = state.kernels["mhc"]
    if not kernel.active:
        return original(*args, **kwargs)
    from .ops.mhc import mhc_fused_post_pre, min_tokens

    x = args[0] if args else kwargs["x"]
    if x.numel() // x.shape[-1] < min_tokens(x.device):
        return original(*args, **kwargs)  # SGLang's is faster for so few tokens
    kernel.metrics.count()
    return mhc_fused_post_pre(*args, **kwargs)


HOOKS = {"decode": (contract.DECODE, decode), "indexer": (contract.TOPK, topk), "mhc": (contract.MHC, mhc)}


def build_backend(original: Callable, backend: object, model_runner: object, *args: object, **kwargs: object) -> None:
    """AROUND ``DeepseekV4AttnBackend.__init__``: build it, then activate the kernels once per process."""
    original(backend, model_runner, *args, **kwargs)
    if not state.activated:
        state.activated = True
        activate(model_runner)


def activate(model_runner: object) -> None:
    """Check each wanted kernel on this rank's device, switch on those that pass, and say so in one line."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    for kernel in state.kernels.values():
        reason = inactive_reason(kernel.name, model_runner)
        kernel.switch(reason is None, reason or "self-check passed", parallel.tp_rank, parallel.pp_rank)
    say(status_line(model_runner, parallel.tp_rank, parallel.pp_rank))


def inactive_reason(name: str, model_runner: object) -> str | None:
    """Why kernel ``name`` must stay off on this rank, or None once all of it, self-check included, is good."""
    if name not in state.wanted.kernels:
        return f"DSV4_SM120_{name.upper()}=0"
    try:
        unreachable = PREPARE[name](model_runner)
        if unreachable:
            return unreachable
        if state.wanted.self_check:
            self_check(name, model_runner)
        if name == "indexer":
            bind_logits()
    except Exception as error:
        # Whatever goes wrong in one kernel, compilation included, the stock one still serves.
        if not isinstance(error, AssertionError):  # a comparison that failed says all there is in its message
            traceback.print_exc()
        logger.error("%s: kernel %s is disabled, the stock one stays in place: %s", LINE, name, error)
        return f"{type(error).__name__}: {error}"
    return None


def self_check(name: str, model_runner: object) -> None:
    """Compare kernel ``name`` with its reference on the device of ``model_runner``; raises on a difference."""
    import importlib

    import torch

    device = torch.device(model_runner.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    module = importlib.import_module(f".ops.{name}", __package__)
    with torch.inference_mode():
        module.self_check(device, **dimensions(name, model_runner.model_config.hf_text_config))


def dimensions(name: str, text_config: object) -> dict[str, int]:
    """What the self-check of kernel ``name`` must know of the model, to check and compile what this rank will run."""
    from sglang.srt.runtime_context import get_parallel

    if name == "decode":
        return {"heads": text_config.num_attention_heads // get_parallel().attn_tp_size}
    return {"k": text_config.index_topk} if name == "indexer" else {"hidden_size": text_config.hidden_size}


def prepare_decode(model_runner: object) -> str | None:
    from sglang.srt.runtime_context import get_platform

    if not get_platform().is_sm120:
        return "SGLang calls this seam on sm_120 only"
    if is_v41(model_runner):
        return "the model is DeepSeek-V4.1, whose cache layout this kernel does not read"
    return None


def prepare_indexer(model_runner: object) -> str | None:
    from sglang.srt.environ import envs

    from .ops.indexer import TOPK

    if is_v41(model_runner):
        return "the model is DeepSeek-V4.1, whose indexer is another one"
    if not envs.SGLANG_OPT_USE_TILELANG_INDEXER.get():
        return "SGLANG_OPT_USE_TILELANG_INDEXER is off, so SGLang does not call this seam"
    width = model_runner.model_config.hf_text_config.index_topk
    if width not in TOPK:
        return f"index_topk is {width}; this kernel selects {' or '.join(map(str, TOPK))}"
    mismatches = contract.check_target(contract.LOGITS)
    if mismatches:
        raise RuntimeError("; ".join(map(str, mismatches)))
    return None


def prepare_mhc(model_runner: object) -> str | None:
    from .ops.mhc import HIDDEN_SIZES, set_layer_input_allocator

    hidden = model_runner.model_config.hf_text_config.hidden_size
    if hidden not in HIDDEN_SIZES:
        return f"hidden size is {hidden}; this kernel handles {' and '.join(map(str, HIDDEN_SIZES))}"
    set_layer_input_allocator(symmetric_layer_input)
    return None


PREPARE = {"decode": prepare_decode, "indexer": prepare_indexer, "mhc": prepare_mhc}
"""Per kernel: returns why SGLang would never call it, or None; raises when it cannot work."""


def is_v41(model_runner: object) -> bool:
    return getattr(model_runner.model_config.hf_text_config, "model_type", None) == "deepseek_v41"


def bind_logits() -> None:
    """Put our logits function where SGLang's indexer imports it on each call.

    Not an SGLang hook: applying one would import tilelang in every process. The other half of the pair is ``topk``,
    which is in place already and passes anything but our own object through.
    """
    import importlib

    from .ops.indexer import indexer_logits

    module, _, name = contract.LOGITS.rpartition(".")
    setattr(importlib.import_module(module), name, indexer_logits)


def symmetric_layer_input(tokens: int, hidden: int, device: object) -> object:
    """The layer input, from SGLang's symmetric memory pool when that is enabled, as its own MHC allocates it."""
    import torch
    from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
    from sglang.srt.layers.dp_attention import is_allocation_symmetric
    from sglang.srt.runtime_context import get_parallel

    with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
        return torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)


def status_line(model_runner: object, tp_rank: int, pp_rank: int) -> str:
    """The machine-readable line: ``dsv4_sm120 {...}`` with versions, and per kernel whether it is active and why."""
    import torch
    import triton
    from sglang.version import __version__ as sglang_version

    report = {
        "event": "activated",
        "tp_rank": tp_rank,
        "pp_rank": pp_rank,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "dsv4_sm120": __version__,
            "sglang": sglang_version,
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "active": [k.name for k in state.kernels.values() if k.active],
        "inactive": {k.name: k.reason for k in state.kernels.values() if not k.active},
    }
    return f"{LINE} {json.dumps(report, sort_keys=True)}"
