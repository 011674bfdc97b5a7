# SPDX-License-Identifier: GPL-3.0-or-later
"""Models as the memory plan sees them: dimensions from config.json or built in, and the weights they make.

Pure functions over dataclasses, standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

GIB = 1 << 30


class PlanInputError(ValueError):
    """An input that no plan can be made of: names the variable, the value seen and what is accepted."""

    def __init__(self, variable: str, value: Any, accepted: str) -> None:
        self.variable, self.value, self.accepted = variable, value, accepted
        super().__init__(f"{variable} is {value!r}; accepted: {accepted}")


@dataclass(frozen=True)
class ModelFacts:
    """Dimensions every plan needs; ``source`` says where they come from."""

    name: str
    source: str
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class DeepSeekV4Facts(ModelFacts):
    """DeepSeek-V4 dimensions that decide memory.

    ``compress_ratios`` holds one entry (0, 4 or 128) per layer, MTP excluded.
    """

    compress_ratios: tuple
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    moe_intermediate_size: int
    index_topk: int
    qk_nope_head_dim: int = 448
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    index_n_heads: int = 64
    n_shared_experts: int = 1
    sliding_window: int = 128
    hc_mult: int = 4
    expert_format: str = "nvfp4"

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_layers(self) -> int:
        return len(self.compress_ratios)

    def layers_of(self, ratio: int) -> int:
        return sum(1 for entry in self.compress_ratios if entry == ratio)


@dataclass(frozen=True)
class DenseFacts(ModelFacts):
    """A Llama-type model with plain multi-head or grouped-query attention."""

    num_layers: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"


def _alternating(first: tuple, num_layers: int) -> tuple:
    return first + tuple(4 if i % 2 == 0 else 128 for i in range(num_layers - len(first)))


BUILTIN_MODELS: dict = {
    "DeepSeek-V4-Flash": DeepSeekV4Facts(
        name="DeepSeek-V4-Flash",
        source="config.json of deepseek-ai/DeepSeek-V4-Flash; defaults of SGLang 0.5.23 srt/configs/deepseek_v4.py",
        compress_ratios=_alternating((0, 0), 43),
        hidden_size=4096,
        num_attention_heads=64,
        vocab_size=129_280,
        max_position_embeddings=1_048_576,
        q_lora_rank=1024,
        o_lora_rank=1024,
        o_groups=8,
        n_routed_experts=256,
        moe_intermediate_size=2048,
        index_topk=512,
    ),
    "DeepSeek-V4-Pro": DeepSeekV4Facts(
        name="DeepSeek-V4-Pro",
        source="config.json of deepseek-ai/DeepSeek-V4-Pro",
        compress_ratios=_alternating((128, 128), 61),
        hidden_size=7168,
        num_attention_heads=128,
        vocab_size=129_280,
        max_position_embeddings=1_048_576,
        q_lora_rank=1536,
        o_lora_rank=1024,
        o_groups=16,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        index_topk=1024,
    ),
}


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise PlanInputError("config.json", f"no {key}", f"a config.json of the model with {key}")
    return config[key]


def facts_from_config(config: Mapping[str, Any], name: str = "config.json") -> ModelFacts:
    """Reads model facts from a parsed ``config.json``.

    Raises PlanInputError for a model whose cache the plan does not know (MLA without V4's compression, hybrid, Mamba).
    """
    if config.get("model_type") == "deepseek_v4":
        return _v4_facts(config, name)
    if config.get("kv_lora_rank") or (config.get("sliding_window") and config.get("use_sliding_window", True)):
        raise PlanInputError(
            "config.json",
            f"model_type {config.get('model_type')!r}",
            "deepseek_v4, or a dense model with full attention",
        )
    heads = _required(config, "num_attention_heads")
    hidden = _required(config, "hidden_size")
    return DenseFacts(
        name=name,
        source="config.json",
        num_layers=_required(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate_size=_required(config, "intermediate_size"),
        vocab_size=_required(config, "vocab_size"),
        max_position_embeddings=_required(config, "max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
    )


def differing_facts(planned: ModelFacts, config: Mapping[str, Any]) -> tuple:
    """What a checkpoint's ``config.json`` says otherwise than the facts of a plan: (fact, planned, the checkpoint's).

    Name and source are no facts. A config that no facts can be read from differs as a whole.
    """
    try:
        found = facts_from_config(config)
    except PlanInputError as error:
        return (("config.json", planned.name, str(error)),)
    if type(found) is not type(planned):
        return (("model_type", planned.name, str(config.get("model_type"))),)
    facts = [field.name for field in fields(planned) if field.name not in ("name", "source")]
    return tuple(
        (fact, getattr(planned, fact), getattr(found, fact))
        for fact in facts
        if getattr(planned, fact) != getattr(found, fact)
    )


def _v4_facts(config: Mapping[str, Any], name: str) -> DeepSeekV4Facts:
    layers = _required(config, "num_hidden_layers")
    # The checkpoint lists one entry more for its MTP layer.
    ratios = tuple(_required(config, "compress_ratios"))[:layers]
    if len(ratios) != layers or set(ratios) - {0, 4, 128}:
        raise PlanInputError(
            "config.json compress_ratios", list(ratios), f"{layers} entries, one per layer, each 0, 4 or 128"
        )
    rope = config.get("qk_rope_head_dim") or 64
    nope = config.get("qk_nope_head_dim") or (config.get("head_dim") or 512) - rope
    return DeepSeekV4Facts(
        name=name,
        source="config.json",
        compress_ratios=ratios,
        hidden_size=_required(config, "hidden_size"),
        num_attention_heads=_required(config, "num_attention_heads"),
        q_lora_rank=_required(config, "q_lora_rank"),
        o_lora_rank=_required(config, "o_lora_rank"),
        o_groups=_required(config, "o_groups"),
        n_routed_experts=_required(config, "n_routed_experts"),
        moe_intermediate_size=_required(config, "moe_intermediate_size"),
        index_topk=_required(config, "index_topk"),
        max_position_embeddings=_required(config, "max_position_embeddings"),
        vocab_size=_required(config, "vocab_size"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        index_head_dim=config.get("index_head_dim") or 128,
        index_n_heads=config.get("index_n_heads") or 64,
        n_shared_experts=config.get("n_shared_experts", 1),
        sliding_window=config.get("sliding_window") or config.get("window_size") or 128,
        hc_mult=config.get("hc_mult") or 4,
        expert_format=_expert_format(config.get("quantization_config") or {}, config),
    )


def _expert_format(quantization: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    text = json.dumps(quantization).lower()
    if "nvfp4" in text:
        return "nvfp4"
    if "fp4" in text or str(config.get("expert_dtype", "")).startswith("fp4"):
        return "mxfp4"
    return "fp8" if "fp8" in text else "bfloat16"


# Bytes per parameter with scales: nvfp4 one e4m3 scale per 16 values, mxfp4 one byte per 32, fp8 one fp32 per 128x128
# block.
FORMAT_BYTES = {
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "fp8": 1 + 4 / 128**2,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
}


@dataclass(frozen=True)
class WeightGroup:
    """Parameters of one format, ``sharded`` over the tensor-parallel group or copied to each rank."""

    name: str
    parameters: int
    format: str
    sharded: bool

    def bytes_per_rank(self, tp_size: int) -> float:
        return self.parameters * FORMAT_BYTES[self.format] / (tp_size if self.sharded else 1)


def weight_groups(model: ModelFacts, *, mtp: bool = False) -> tuple:
    """Every parameter of the model, in the formats SGLang 0.5.23 loads on sm_120 (``wo_a`` stays bf16 there)."""
    if isinstance(model, DenseFacts):
        return _dense_weight_groups(model)
    hidden, heads, dim = model.hidden_size, model.num_attention_heads, model.head_dim
    layers, c4, c128 = model.num_layers, model.layers_of(4), model.layers_of(128)
    expert = 3 * hidden * model.moe_intermediate_size
    mix = (2 + model.hc_mult) * model.hc_mult
    compressors = c4 * (2 * 2 * (dim + model.index_head_dim) * hidden + 4 * 2 * (dim + model.index_head_dim))
    compressors += c128 * (2 * dim * hidden + 128 * dim)
    norms = layers * (2 * hidden + model.q_lora_rank + dim) + (c4 + c128) * dim + c4 * model.index_head_dim + hidden
    groups = [
        WeightGroup("routed experts", layers * model.n_routed_experts * expert, model.expert_format, True),
        WeightGroup("shared expert", layers * model.n_shared_experts * expert, "fp8", True),
        WeightGroup(
            "attention wq_b, wo_b",
            layers * (model.q_lora_rank * heads * dim + model.o_groups * model.o_lora_rank * hidden),
            "fp8",
            True,
        ),
        WeightGroup("attention wo_a", layers * heads * dim * model.o_lora_rank, "bfloat16", True),
        WeightGroup("attention wq_a, wkv", layers * hidden * (model.q_lora_rank + dim), "fp8", False),
        WeightGroup(
            "indexer", c4 * model.index_n_heads * (model.q_lora_rank * model.index_head_dim + hidden), "bfloat16", False
        ),
        WeightGroup("compressors", compressors, "bfloat16", False),
        WeightGroup("router", layers * hidden * model.n_routed_experts, "float32", False),
        WeightGroup(
            "hyper-connections, sinks, norms",
            layers * 2 * (mix * model.hc_mult * hidden + mix + 3)
            + model.hc_mult * model.hc_mult * hidden
            + model.hc_mult
            + 1
            + layers * heads
            + norms,
            "float32",
            False,
        ),
        WeightGroup("embedding, lm_head", 2 * model.vocab_size * hidden, "bfloat16", True),
    ]
    if mtp:
        # One more SWA-only layer plus the two projections that join hidden state and embedding.
        attention = (
            model.q_lora_rank * (hidden + heads * dim) + hidden * dim + 2 * model.o_groups * model.o_lora_rank * hidden
        )
        groups.append(WeightGroup("MTP experts", model.n_routed_experts * expert, model.expert_format, True))
        groups.append(
            WeightGroup("MTP attention and projections", attention + expert + 2 * hidden * hidden, "fp8", False)
        )
    return tuple(groups)


def _dense_weight_groups(model: DenseFacts) -> tuple:
    hidden = model.hidden_size
    attention = 2 * hidden * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return (
        WeightGroup("layers", model.num_layers * (attention + 3 * hidden * model.intermediate_size), model.dtype, True),
        WeightGroup("norms", (2 * model.num_layers + 1) * hidden, model.dtype, False),
        WeightGroup("embedding, lm_head", embeddings, model.dtype, True),
    )


def estimate_weights_gib(model: ModelFacts, tp_size: int, *, mtp: bool = False) -> float:
    """GiB of weights per rank; the engine's own figure is ``mem usage`` in its ``Load weight end`` line."""
    return sum(group.bytes_per_rank(tp_size) for group in weight_groups(model, mtp=mtp)) / GIB
