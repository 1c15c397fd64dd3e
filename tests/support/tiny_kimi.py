"""Layers of tiny models with a decay for each channel (Kimi Linear), in both kinds of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from support.tiny_attention import (
    LATENT_FUSED,
    LATENT_NAMES,
    Latent,
    latent_config,
    latent_metadata,
)
from support.tiny_variant import Variant
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from support.tiny import Tiny

    Weights = dict[str, np.ndarray]


class Channels(Frozen):
    """Sizes of the delta rule with decays of channels, in layers that do not attend."""

    attends: tuple[bool, ...]
    num_heads: int = 4
    head_dim: int = 32
    kernel: int = 4

    @property
    def width(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim


CHANNEL_NAMES = {
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate": "block_sparse_moe.experts.{}.w1",
    "ffn_up": "block_sparse_moe.experts.{}.w3",
    "ffn_down": "block_sparse_moe.experts.{}.w2",
    "exp_probs_b": "block_sparse_moe.gate.e_score_correction_",
    "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
}
CHANNEL_STATE_NAMES = {"ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias"}


def channels_metadata(sizes: Channels) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [int(attends) for attends in sizes.attends],
        "ssm.conv_kernel": sizes.kernel,
        "kda.head_dim": sizes.head_dim,
    }


def channels_config(sizes: Channels) -> dict[str, Any]:
    numbers: dict[bool, list[int]] = {True: [], False: []}
    for number, attends in enumerate(sizes.attends, 1):
        numbers[attends].append(number)
    return {
        "linear_attn_config": {
            "full_attn_layers": numbers[True],
            "kda_layers": numbers[False],
            "num_heads": sizes.num_heads,
            "head_dim": sizes.head_dim,
            "short_conv_kernel_size": sizes.kernel,
        },
        "mla_use_nope": True,
    }


def channels_weights(rng: np.random.Generator, tiny: Tiny, sizes: Channels) -> Weights:
    """Return random weights of a layer's delta rule with decays of channels."""
    hidden, width, rank = tiny.hidden_size, sizes.width, sizes.head_dim
    heads = sizes.num_heads
    part = {f"attn_{name}.weight": _matrix(rng, width, hidden) for name in "qkv"}
    part |= {f"ssm_conv1d_{name}.weight": _matrix(rng, width, sizes.kernel) for name in "qkv"}
    return part | {
        "ssm_f_a.weight": _matrix(rng, rank, hidden),
        "ssm_f_b.weight": _matrix(rng, width, rank) * np.float32(2),
        "ssm_g_a.weight": _matrix(rng, rank, hidden),
        "ssm_g_b.weight": _matrix(rng, width, rank) * np.float32(2),
        "ssm_beta.weight": _matrix(rng, heads, hidden),
        "ssm_a": -rng.uniform(0.05, 2, heads).astype(np.float32),
        "ssm_dt.bias": rng.standard_normal(width).astype(np.float32),
        "ssm_norm.weight": (1 + 0.1 * rng.standard_normal(sizes.head_dim)).astype(np.float32),
        "attn_output.weight": _matrix(rng, hidden, width),
    }


def gguf_channels(weights: Weights) -> Weights:
    """Return `weights` with the shapes of a GGUF file."""
    return _with_shapes(weights, rates=lambda values: values[:, None])


def folder_channels(weights: Weights) -> Weights:
    """Return `weights` with the shapes of a folder, and logarithmic rates."""
    return _with_shapes(weights, rates=lambda values: np.log(-values)[None, None, :, None])


def _with_shapes(weights: Weights, rates: Any) -> Weights:
    stored_weights = dict(weights)
    for name, values in weights.items():
        if name.rpartition("_")[0].endswith(".ssm_conv1d"):
            stored_weights[name] = values[:, None]
        elif name.endswith(".ssm_a"):
            stored_weights[name] = rates(values)
    return stored_weights


def _matrix(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    values = rng.standard_normal((outputs, inputs)) * inputs**-0.5
    return np.asarray(values, np.float32)


_CHANNELS = Channels((False, False, True, False))

# The first layer is dense.
KIMI_LINEAR = Variant(
    "kimi-linear",
    "kimi_linear",
    sizes={"num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "tied": False},
    num_experts=8,
    num_shared=1,
    first_with_experts=1,
    has_choice_bias=True,
    metadata={
        **latent_metadata(Latent()),
        **channels_metadata(_CHANNELS),
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 128,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.446,
        "leading_dense_block_count": 1,
    },
    config={
        **latent_config(Latent()),
        **channels_config(_CHANNELS),
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "moe_renormalize": True,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},  # which nothing reads
    },
    layer_names=LATENT_NAMES | CHANNEL_NAMES,
    dense_names={"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    state_names=CHANNEL_STATE_NAMES,
    fused=LATENT_FUSED,
    latent=Latent(),
    channels=_CHANNELS,
)
