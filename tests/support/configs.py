"""Models that have only a config.json, for plans."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "intermediate_size", "vocab_size",
)  # fmt: skip
SIZES = {
    "7B": (4096, 32, 32, 32, 11008, 32000),
    "8B": (4096, 32, 8, 32, 14336, 128256),
    "13B": (5120, 40, 40, 40, 13824, 32000),
    "34B": (8192, 64, 8, 48, 22016, 32000),
    "70B": (8192, 64, 8, 80, 28672, 128256),
    "405B": (16384, 128, 8, 126, 53248, 128256),
}

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "moe_layer_freq": 1,
}  # fmt: skip
# Models of which there is no file here, as in those that their makers publish.
UNKNOWN_HERE: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": _LATENT | {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "DeepSeek-V2": _LATENT | {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60,
        "num_attention_heads": 128, "n_shared_experts": 2, "n_routed_experts": 160,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    },
    "DeepSeek-V2-Lite": _LATENT | {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "use_qk_norm": True, "n_routed_experts": 160,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "attention_bias": True, "max_position_embeddings": 131072,
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632,
        "max_position_embeddings": 8192,
    },
    "Hunyuan-Large": {
        "model_type": "hunyuan", "vocab_size": 128512, "hidden_size": 6400,
        "intermediate_size": 18304, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "num_experts": 16, "num_shared_expert": [1] * 64,
        "moe_topk": 1, "use_cla": True, "cla_share_factor": 2, "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "Gemma-3n-E4B": {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
}  # fmt: skip
for _name, _layers, _experts in (("gpt-oss-120b", 36, 128), ("gpt-oss-20b", 24, 32)):
    UNKNOWN_HERE[_name] = {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": _layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_local_experts": _experts, "num_experts_per_tok": 4,
        "max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


def write_config(path: Path, sizes: str | tuple[int, ...], **fields: Any) -> str:
    """Write a config.json with these sizes, a key of `SIZES` or values of `KEYS`; return its path.

    `fields` are other fields of the configuration.
    """
    values = dict(zip(KEYS, SIZES[sizes] if isinstance(sizes, str) else sizes, strict=True))
    config = {"model_type": "llama", "max_position_embeddings": 1 << 17, **values, **fields}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)
