# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang plugin of the tests: weights that make every part count, and sm_120's attention seam on another GPU.

SGLang's dummy weights are so small that a layer adds nothing to the residual streams: any kernel would look right. Here
every product keeps the magnitude of what it reads. Same seeds in every process.

``DSV4_SEAM_ATTENTION=sm_120`` calls the attention that SGLang calls on sm_120, where the decode kernel hooks in.
``DSV4_SEAM_BREAK=decode`` makes that kernel wrong by 5 %.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable

SM120_ARGUMENTS = (
    "q",
    "k_cache",
    "head_dim_v",
    "softmax_scale",
    "indices",
    "topk_length",
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "extra_topk_length",
)
FP8_BLOCK = 128
KERNEL_HEADS = 64
"""The fewest that FlashMLA takes."""
LOGIT_SCALE = 4.0
"""Standard deviation of the logits: wide enough that rounding seldom decides which token is the largest."""


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", initialize_weights, HookType.AROUND
    )
    if os.environ.get("DSV4_SEAM_SHADOW"):
        import dsv4_shadow

        for target, hook in dsv4_shadow.HOOKS.items():
            HookRegistry.register(target, hook, HookType.AROUND)
    if os.environ.get("DSV4_SEAM_ATTENTION") != "sm_120":
        pad_heads(HookRegistry, HookType)
        return
    HookRegistry.register(
        "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache", attention, HookType.AROUND
    )
    from dsv4_sm120 import plugin

    plugin.PREPARE["decode"] = lambda model_runner: None
    if os.environ.get("DSV4_SEAM_BREAK") == "decode":
        break_decode()


def pad_heads(registry: type, kind: type) -> None:
    """What SGLang does on this GPU at TP 2 and more, in a server of TP 1 with one rank's heads: 64 for the kernel."""
    attention = "sglang.srt.models.deepseek_v4.MqaAttentionBase"
    registry.register(f"{attention}._kernel_num_heads", lambda original, self, tokens: KERNEL_HEADS, kind.AROUND)
    registry.register(f"{attention}._local_attn_sink", padded_sink, kind.AROUND)


def padded_sink(original: Callable, self: object, heads: int | None = None) -> object:
    """AROUND the attention sink of a layer: [64], zeros behind its heads; made once, before any CUDA graph."""
    if self._attn_sink_local is None:
        sink = self.attn_sink.new_zeros(KERNEL_HEADS)
        sink[: self.attn_sink.numel()] = self.attn_sink
        self._attn_sink_local, self._attn_sink_local_slice = sink, slice(0, self.attn_sink.numel())
    return self._attn_sink_local[:heads]


def attention(original: Callable, **kwargs: object) -> tuple:
    """AROUND the attention of other GPUs: the call that SGLang makes on sm_120 instead."""
    from sglang.kernels.ops.attention import flash_mla_sm120

    return flash_mla_sm120.flash_mla_with_kvcache_sm120(**{name: kwargs.get(name) for name in SM120_ARGUMENTS})


def break_decode() -> None:
    """Make our decode kernel wrong by 5 %, the kind of error that no shape or NaN check sees."""
    from dsv4_sm120.ops import decode

    right = decode.sparse_mla_decode
    decode.sparse_mla_decode = lambda *args, **kwargs: right(*args, **kwargs) * 1.05


def initialize_weights(original: Callable, model: object, *args: object, **kwargs: object) -> None:
    """In place of SGLang's dummy initialisation; buffers keep what their constructors gave them."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Scales of the KV cache stay at the -1 that stands for "not in the checkpoint".
            if torch.is_floating_point(parameter) and not name.endswith((".k_scale", ".v_scale")):
                fill(name, parameter.data)


def fill(name: str, parameter: object) -> None:
    """Seeded by the name. Fan-in is the last dimension; FP8 weights have unit variance and carry it in their scales."""
    import torch

    shape = tuple(parameter.shape)
    if name.endswith(("weight_scale_inv", "weight_scale")):
        fan_in = shape[-1] * FP8_BLOCK
        scale = 2.0 ** round(math.log2(fan_in**-0.5))
        parameter.copy_(torch.full(shape, scale, device=parameter.device).to(parameter.dtype))
        return
    if parameter.dtype == torch.float8_e4m3fn:
        spread, mean = 1.0, 0.0
    elif "norm" in name and len(shape) == 1:
        spread, mean = 0.1, 1.0
    elif name.startswith("lm_head"):
        spread, mean = LOGIT_SCALE * shape[-1] ** -0.5, 0.0
    elif len(shape) > 1 and "embed" not in name:
        spread, mean = shape[-1] ** -0.5, 0.0
    else:
        spread, mean = 1.0, 0.0
    flat = parameter.view(-1)
    for start in range(0, flat.numel(), 2**27):
        part = flat[start : start + 2**27]
        generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(f"{name} {start}".encode()))
        values = torch.empty(part.shape, dtype=torch.float32, device=parameter.device).normal_(generator=generator)
        part.copy_((values.mul_(spread).add_(mean)).to(parameter.dtype))
