"""A tiny random model of each family, made and saved by transformers, against our readers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from support.tiny import tiny_config, tiny_of, tokenizer_json
from support.tiny_families import FAMILIES, WINDOW
from support.transformers_models import logits, text_model
from twostroke.backends.reference import ReferenceBackend
from twostroke.lab.measure.divergence import compare
from twostroke.model.families import MODEL_TYPES, build_program
from twostroke.model.weights import load_path
from twostroke.model.weights.hf_model import hf_fields, hf_spec

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = [(7 * i * i + 3 * i) % 285 for i in range(200)]
assert len(TOKENS) > 2 * WINDOW


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_equals_transformers(family: str, tmp_path: Path) -> None:
    _check(_random_model(tiny_config(tiny_of(family))), tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3-moe", {"norm_topk_prob": False}),
        ("qwen3.5", {"full_attention_interval": 4, "tie_word_embeddings": False}),
        ("qwen3.5", {"layer_types": ["full_attention"] + ["linear_attention"] * 3}),
        ("qwen3.5", {"linear_num_key_heads": 3, "linear_key_head_dim": 8,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3}),
        ("qwen3.5-moe", {"shared_expert_intermediate_size": 48, "num_experts_per_tok": 2}),
        ("qwen3-next", {"norm_topk_prob": False, "partial_rotary_factor": 0.5,
            "linear_num_value_heads": 4}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("mixtral", {"sliding_window": WINDOW}),
        ("qwen2-yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7,
            "mscale_all_dim": 1.3, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False,
            "original_max_position_embeddings": 64}}),
        ("qwen2-yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0,
            "attention_factor": 1.4, "original_max_position_embeddings": 256}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
        ("gemma3", {"final_logit_softcapping": 3.0}),
        ("gemma3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("deepseek-v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 3.0}),
        ("deepseek-v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1,
            "scoring_func": "sigmoid"}),
        ("deepseek-v3", {"norm_topk_prob": False, "first_k_dense_replace": 0,
            "n_shared_experts": 1}),
        ("deepseek-v3", {"rope_interleave": False, "rope_scaling": {"rope_type": "yarn",
            "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64}}),
        ("glm4-lite", {"mlp_layer_types": ["dense", "dense", "sparse"]}),
        ("youtu", {"tie_word_embeddings": False, "q_lora_rank": None}),
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("olmo3", {"rope_scaling": None, "rope_theta": None, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 2e4, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        ("olmo3", {"rope_scaling": None, "rope_theta": None, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
        ("exaone4", {"sliding_window_pattern": 2}),
        ("exaone4", {"layer_types": ["full_attention", "sliding_attention"] * 2,
            "sliding_window_pattern": "GL"}),
        ("exaone4", {"layer_types": ["full_attention"] * 4}),
        ("exaone4", {"rope_scaling": {"rope_type": "llama3", "factor": 16.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}}),
        ("seed-oss", {"attention_bias": False, "attention_out_bias": True,
            "tie_word_embeddings": False}),
        ("ernie4.5", {"tie_word_embeddings": False, "head_dim": 32}),
        ("ernie4.5-experts", {"moe_k": 2, "moe_num_shared_experts": 0, "moe_layer_start_index": 0,
            "moe_layer_end_index": 1}),
        ("smollm3", {"no_rope_layers": [0, 1, 0, 1], "attention_bias": True}),
        ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True,
            "sliding_window": WINDOW}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW,
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}),
        ("glm4", {"attention_bias": False, "norm_topk_prob": False, "n_shared_experts": 1}),
        ("glm4", {"partial_rotary_factor": 0.75, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 0}),
        ("granite", {"attention_multiplier": 0.2, "embedding_multiplier": 3, "logits_scaling": 0.5,
            "residual_multiplier": 1.5, "attention_bias": True, "tie_word_embeddings": False}),
        ("minimax-m2", {"rotary_dim": None, "num_experts_per_tok": 2, "head_dim": 32}),
        ("minimax-m2", {"rotary_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 1}),
        ("minimax-m2", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4,
            "partial_rotary_factor": 0.25}}),
        ("hy3", {"mlp_layer_types": ["dense", "dense", "sparse"], "num_shared_experts": 1,
            "router_scaling_factor": 0.6, "tie_word_embeddings": False}),
        ("hy3", {"mlp_layer_types": ["sparse"] * 3, "num_experts_per_tok": 1}),
        ("ministral3", {"sliding_window": WINDOW, "rope_parameters": {"rope_type": "yarn",
            "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
            "mscale": 0.7, "mscale_all_dim": 1.3, "llama_4_scaling_beta": 0.8}}),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
            "original_max_position_embeddings": 70, "llama_4_scaling_beta": 2}}),
        ("muse-glimmer", {"qk_scale_factor": 0.6, "output_multiplier": 1.4, "post_norm_eps": 0.3,
            "final_logit_softcapping": 2.0, "sliding_window": 40, "tie_word_embeddings": False}),
        ("muse-glimmer", {"layer_rope_theta": [0, 1.0, 0, 5], "rope_theta": 3e4,
            "layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("llama4", {"attention_chunk_size": WINDOW, "floor_scale": 20, "attn_scale": 0.7}),
        ("llama4", {"num_experts_per_tok": 3, "interleave_moe_layer_step": 1, "use_qk_norm": False,
            "intermediate_size": 96, "intermediate_size_mlp": 80, "attention_bias": True}),
        ("llama4", {"no_rope_layers": [0, 1, 1, 0], "moe_layers": [0, 3], "floor_scale": 9,
            "attention_chunk_size": 40, "tie_word_embeddings": False}),
        ("llama4", {"layer_types": ["full_attention", "chunked_attention"] * 2,
            "attention_chunk_size": 16, "attn_temperature_tuning": False, "rope_scaling": {
                "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0,
                "high_freq_factor": 1.0, "original_max_position_embeddings": 128}}),
        ("kimi-linear", {"q_lora_rank": 32, "first_k_dense_replace": 2}),
        ("kimi-linear", {"num_expert_group": 4, "topk_group": 2, "moe_renormalize": False,
            "routed_scaling_factor": 0.7, "num_experts_per_token": 2}),
        ("kimi-linear", {"linear_attn_config": {"num_heads": 3, "head_dim": 16,
            "short_conv_kernel_size": 3, "full_attn_layers": [1, 4], "kda_layers": [2, 3]}}),
        ("mellum", {"norm_topk_prob": False, "sliding_window": 40, "tie_word_embeddings": False,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3}),
        ("mellum", {"layer_types": ["full_attention", "sliding_attention"] * 2, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 3e4},
            "sliding_attention": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}}}),
    ],
)  # fmt: skip
def test_what_a_configuration_changes_is_honoured(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    _check(_random_model(tiny_config(tiny_of(family)) | changes), tmp_path)


_SOME_SLIDE = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *[
            (family, {"partial_rotary_factor": 0.5})
            for family in (
                *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "olmo2", "smollm3"),
                *("exaone4", "seed-oss", "ernie4.5", "ernie4.5-experts"),
            )
        ],
        ("qwen3-moe", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("mixtral", {"sliding_window": WINDOW, "layer_types": _SOME_SLIDE}),
        ("phi3", {"layer_types": _SOME_SLIDE}),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": WINDOW,
            "layer_types": _SOME_SLIDE}),
    ],
)  # fmt: skip
def test_what_transformers_ignores_changes_nothing(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = _random_model(tiny_config(tiny_of(family)) | changes)
    _save(model, tmp_path)
    _change_config(tmp_path, **changes)
    _compare(model, tmp_path)


def test_a_mistral_with_types_of_layers_is_read_as_a_ministral(tmp_path: Path) -> None:
    changes = {"model_type": "ministral", "layer_types": _SOME_SLIDE}
    model = _random_model(tiny_config(tiny_of("mistral")) | changes)
    _save(model, tmp_path)
    _change_config(tmp_path, model_type="mistral")
    _compare(model, tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES.keys() - {"kimi_k2"}))
def test_keys_that_are_left_out_mean_what_they_mean_to_transformers(model_type: str) -> None:
    # DeepSeek V2 has no number of used experts unless the file says one.
    required_keys = {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}
    theirs = AutoConfig.for_model(model_type, **required_keys).to_dict()
    explicit_spec, silent = (
        hf_spec(hf_fields("config.json", config), "a")
        for config in (theirs, {"model_type": model_type, **required_keys})
    )
    assert silent == explicit_spec


def test_shards_of_bf16_are_read(tmp_path: Path) -> None:
    model = _random_model(tiny_config(tiny_of("gemma3"))).to(torch.bfloat16)
    _save(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _compare(model.float(), tmp_path)


def _random_model(config: dict[str, Any]) -> Any:
    """Return transformers' model with weights that make something of every part of it."""
    model = text_model(config)
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            weight.data += 0.1 * noise
        elif weight.ndim == 1:
            weight.data = 0.5 * noise
        else:
            weight.data = noise * weight.shape[-1] ** -0.5
    return model


def _check(model: Any, folder: Path) -> None:
    _save(model, folder)
    _compare(model, folder)


def _save(model: Any, folder: Path, **options: Any) -> None:
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _compare(model: Any, folder: Path) -> None:
    loaded = load_path(folder)
    ours = ReferenceBackend(build_program(loaded.spec), loaded.tensors, num_pages=1, page_size=16)
    theirs = logits(model, TOKENS)
    assert np.std(theirs) > 0.5
    assert compare([(theirs, ours.score(TOKENS), TOKENS)]).mean_kl < 1e-6
