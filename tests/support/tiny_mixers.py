"""Layers of tiny models with short convolutions or Mamba-2, in the forms of both kinds of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from support.tiny import Tiny

    Weights = dict[str, np.ndarray]


class Convolution(Frozen):
    """Sizes of a gated short convolution, in layers that do not attend."""

    attends: tuple[bool, ...]
    kernel: int = 3


CONVOLUTION_NAMES = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv": "conv.{}",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}

CONVOLUTION_EXPERT_NAMES = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate": "feed_forward.experts.{}.w1",
    "ffn_up": "feed_forward.experts.{}.w3",
    "ffn_down": "feed_forward.experts.{}.w2",
    "exp_probs_b": "feed_forward.expert_",
}


def convolution_metadata(sizes: Convolution, num_kv_heads: int) -> dict[str, Any]:
    heads = [num_kv_heads if attends else 0 for attends in sizes.attends]
    return {"shortconv.l_cache": sizes.kernel, "attention.head_count_kv": heads}


def convolution_config(sizes: Convolution) -> dict[str, Any]:
    types = ["full_attention" if attends else "conv" for attends in sizes.attends]
    return {"layer_types": types, "conv_L_cache": sizes.kernel, "norm_eps": 1e-5}


def convolution_weights(rng: np.random.Generator, tiny: Tiny, sizes: Convolution) -> Weights:
    """Return random weights of a layer's short convolution."""
    hidden = tiny.hidden_size
    return {
        "shortconv.in_proj.weight": _matrix(rng, 3 * hidden, hidden) * np.float32(2),
        "shortconv.conv.weight": _matrix(rng, hidden, sizes.kernel),
        "shortconv.out_proj.weight": _matrix(rng, hidden, hidden),
    }


class Mamba(Frozen):
    """Sizes of Mamba-2, in layers that have it; others attend or have only a feed-forward.

    Several heads share the keys and queries of a group, so that a wrong order changes the logits.
    """

    attends: tuple[bool, ...]
    recurs: tuple[bool, ...]
    num_heads: int = 8
    num_groups: int = 2
    state_size: int = 16
    head_dim: int = 16
    kernel: int = 4

    @property
    def width(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def mixed_width(self) -> int:
        """The width of values, keys and queries."""
        return self.width + 2 * self.num_groups * self.state_size


def mamba_names(block: str) -> dict[str, str]:
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {weight: f"{block}.{name}" for weight, name in names.items()}


def mamba_state_names(block: str) -> dict[str, str]:
    names = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {weight: f"{block}.{name}" for weight, name in names.items()}


def mamba_metadata(sizes: Mamba, num_kv_heads: int) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [num_kv_heads if attends else 0 for attends in sizes.attends],
        "ssm.conv_kernel": sizes.kernel,
        "ssm.state_size": sizes.state_size,
        "ssm.group_count": sizes.num_groups,
        "ssm.time_step_rank": sizes.num_heads,
        "ssm.inner_size": sizes.width,
    }


def granite_config(sizes: Mamba) -> dict[str, Any]:
    return {
        "layer_types": ["attention" if attends else "mamba" for attends in sizes.attends],
        "mamba_n_heads": sizes.num_heads,
        "mamba_n_groups": sizes.num_groups,
        "mamba_d_state": sizes.state_size,
        "mamba_d_head": sizes.head_dim,
        "mamba_d_conv": sizes.kernel,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "shared_intermediate_size": 128,
    }


def mamba_weights(rng: np.random.Generator, tiny: Tiny, sizes: Mamba) -> Weights:
    """Return random weights of a layer's Mamba-2."""
    hidden, heads, mixed = tiny.hidden_size, sizes.num_heads, sizes.mixed_width
    return {
        "ssm_in.weight": _matrix(rng, sizes.width + mixed + heads, hidden),
        "ssm_conv1d.weight": _matrix(rng, mixed, sizes.kernel) * np.float32(0.6),
        "ssm_conv1d.bias": (0.2 * rng.standard_normal(mixed)).astype(np.float32),
        "ssm_a": -rng.uniform(0.05, 2, heads).astype(np.float32),
        "ssm_dt.bias": rng.standard_normal(heads).astype(np.float32),
        "ssm_d": rng.standard_normal(heads).astype(np.float32),
        "ssm_norm.weight": (1 + 0.1 * rng.standard_normal(sizes.width)).astype(np.float32),
        "ssm_out.weight": _matrix(rng, hidden, sizes.width),
    }


def nemotron_metadata(sizes: Mamba, num_kv_heads: int, ffn_sizes: list[int]) -> dict[str, Any]:
    return mamba_metadata(sizes, num_kv_heads) | {
        "feed_forward_length": ffn_sizes,
        "attention.layer_norm_epsilon": 1e-5,
    }


def nemotron_config(sizes: Mamba, blocks: str) -> dict[str, Any]:
    return {
        "hybrid_override_pattern": blocks,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},  # which nothing reads
        "mamba_num_heads": sizes.num_heads,
        "mamba_head_dim": sizes.head_dim,
        "n_groups": sizes.num_groups,
        "ssm_state_size": sizes.state_size,
        "conv_kernel": sizes.kernel,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "time_step_min": 1e-6,  # below which transformers limits the time steps of prompts
    }


def nemotron_names(*, has_experts: bool) -> dict[str, str]:
    names = mamba_names("mixer") | {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    }
    if not has_experts:
        return names
    return names | {
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction_",
        "ffn_up": "mixer.experts.{}.up_proj",
        "ffn_down": "mixer.experts.{}.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    }


def plain_feed_forward(rng: np.random.Generator, tiny: Tiny, kind: str) -> Weights:
    """Return random weights of a layer's feed-forward without a gate, or of such experts."""
    hidden, width, variant = tiny.hidden_size, tiny.ffn_size, tiny.variant
    if kind == "-":
        return _plain_products(rng, "", hidden, width)
    latent, count = variant.expert_width or hidden, variant.num_experts
    part = {
        "ffn_gate_inp.weight": _matrix(rng, count, hidden),
        "exp_probs_b.bias": (0.1 * rng.standard_normal(count)).astype(np.float32),
        **_plain_products(rng, "_shexp", hidden, variant.num_shared * width),
    }
    if latent != hidden:
        part["ffn_latent_down.weight"] = _matrix(rng, latent, hidden)
        part["ffn_latent_up.weight"] = _matrix(rng, hidden, latent)
    for expert in range(count):
        part |= _plain_products(rng, f".{expert}", latent, width)
    return part


def _plain_products(rng: np.random.Generator, ending: str, hidden: int, width: int) -> Weights:
    up, down = _matrix(rng, width, hidden), _matrix(rng, hidden, width)
    return {f"ffn_up{ending}.weight": up, f"ffn_down{ending}.weight": down}


def gguf_mamba(sizes: Mamba, weights: Weights) -> Weights:
    """Return `weights` with the shapes of a GGUF file."""
    stored_weights = dict(weights)
    for name, values in weights.items():
        if name.endswith((".ssm_a", ".ssm_d")):
            stored_weights[name] = values[:, None]
        elif name.endswith(".ssm_norm.weight"):
            stored_weights[name] = values.reshape(sizes.num_groups, -1)
    return stored_weights


def folder_mixers(weights: Weights) -> Weights:
    """Return `weights` with the kernels' shapes of a Hugging Face folder, and logarithmic rates."""
    stored_weights = dict(weights)
    for name, values in weights.items():
        if name.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")):
            stored_weights[name] = values[:, None]
        elif name.endswith(".ssm_a"):
            stored_weights[name] = np.log(-values)
    return stored_weights


def _matrix(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    values = rng.standard_normal((outputs, inputs)) * inputs**-0.5
    return np.asarray(values, np.float32)
