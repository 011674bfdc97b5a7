# SPDX-License-Identifier: GPL-3.0-or-later
"""A model directory with DeepSeek-V4-Flash's dimensions per layer, fewer layers and experts, and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def compress_ratios(layers: int) -> list[int]:
    """Two layers with a sliding window only, then c4 and c128 in turn, as in DeepSeek-V4-Flash; one more for MTP."""
    compressed = [4 if index % 2 == 0 else 128 for index in range(layers)]
    return [*[0, 0, *compressed][:layers], 0]


def config(layers: int, experts: int, heads: int = 64) -> dict[str, Any]:
    """config.json, in FP8 with blocks of 128 x 128 throughout (the real checkpoint's experts are NVFP4).

    Fewer than DeepSeek-V4-Flash's 64 heads make the attention of one rank of 64 / ``heads``; the indexer's heads
    are not shared out among ranks.
    """
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": 129280,
        "hidden_size": 4096,
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        # attention
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "v_head_dim": 512,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": heads // 8,
        "sliding_window": 128,
        "compress_ratios": compress_ratios(layers),
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        # experts
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "moe_intermediate_size": 2048,
        "intermediate_size": 2048,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        # residual streams
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
    }


def write(directory: Path, layers: int, experts: int, heads: int = 64) -> Path:
    """Write the model directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(layers, experts, heads), indent=1), encoding="utf-8")
    (directory / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}', encoding="utf-8")
    return directory
