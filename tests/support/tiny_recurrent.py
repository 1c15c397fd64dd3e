"""Layers of tiny models with the gated delta rule, in the forms of GGUF files and of folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from support.tiny import Tiny

    Weights = dict[str, np.ndarray]


class Delta(Frozen):
    """Sizes of the delta rule; every `interval`-th layer has attention instead.

    Several value heads share a key head, so that a wrong order of heads changes the logits.
    `is_tiled`: the GGUF file has value head h beside key head `h % num_key_heads`. `in_one`: the
    folder has the projections in two joined matrices (Qwen3-Next).
    """

    interval: int = 2
    num_key_heads: int = 2
    num_value_heads: int = 6
    key_dim: int = 16
    value_dim: int = 32
    kernel: int = 4
    is_tiled: bool = True
    in_one: bool = False

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        return (layer + 1) % self.interval == 0

    @property
    def width(self) -> int:
        """The width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """The width of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.width


DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def delta_metadata(delta: Delta) -> dict[str, Any]:
    return {
        "full_attention_interval": delta.interval,
        "ssm.conv_kernel": delta.kernel,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.num_key_heads,
        "ssm.time_step_rank": delta.num_value_heads,
        "ssm.inner_size": delta.width,
        "rope.dimension_count": 8,
    }


def delta_config(delta: Delta) -> dict[str, Any]:
    return {
        "full_attention_interval": delta.interval,
        "linear_conv_kernel_dim": delta.kernel,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "partial_rotary_factor": 0.25,
    }


def delta_weights(rng: np.random.Generator, tiny: Tiny, delta: Delta) -> Weights:
    """Return random weights of a layer's delta rule, with value heads grouped by key head."""
    hidden, heads = tiny.hidden_size, delta.num_value_heads
    return {
        "attn_qkv.weight": _matrix(rng, delta.mixed_width, hidden),
        "attn_gate.weight": _matrix(rng, delta.width, hidden),
        "ssm_alpha.weight": _matrix(rng, heads, hidden),
        "ssm_beta.weight": _matrix(rng, heads, hidden),
        "ssm_conv1d.weight": _matrix(rng, delta.mixed_width, delta.kernel),
        "ssm_a": -rng.uniform(0.05, 2, heads).astype(np.float32),
        "ssm_dt.bias": rng.standard_normal(heads).astype(np.float32),
        "ssm_norm.weight": (1 + 0.1 * rng.standard_normal(delta.value_dim)).astype(np.float32),
        "ssm_out.weight": _matrix(rng, hidden, delta.width),
    }


def gated_attention(rng: np.random.Generator, tiny: Tiny) -> Weights:
    """Return random weights of the gate of a layer's attention."""
    return {"attn_gate.weight": _matrix(rng, tiny.num_heads * tiny.head_dim, tiny.hidden_size)}


def gguf_recurrent(tiny: Tiny, delta: Delta, weights: Weights) -> Weights:
    """Return `weights` as in a GGUF file, perhaps with tiled value heads."""
    stored_weights = dict(weights)
    for layer in range(tiny.num_layers):
        name = f"blk.{layer}."
        if f"{name}ffn_gate_inp_shexp.weight" in stored_weights:
            stored_weights[f"{name}ffn_gate_inp_shexp.weight"] = stored_weights[
                f"{name}ffn_gate_inp_shexp.weight"
            ].reshape(-1)
        if delta.attends(layer):
            _join_gate(tiny, stored_weights, name)
        elif delta.is_tiled:
            _tile(delta, stored_weights, name)
        if delta.in_one and not delta.attends(layer):
            _join_strengths(delta, stored_weights, name)
    return stored_weights


def folder_recurrent(tiny: Tiny, delta: Delta, weights: Weights) -> Weights:
    """Return `weights`, without one in the norms, in the forms of a Hugging Face folder."""
    stored_weights = dict(weights)
    for layer in range(tiny.num_layers):
        name = f"blk.{layer}."
        if delta.attends(layer):
            _join_gate(tiny, stored_weights, name)
            continue
        stored_weights[f"{name}ssm_norm.weight"] = stored_weights[
            f"{name}ssm_norm.weight"
        ] + np.float32(1)
        stored_weights[f"{name}ssm_a"] = np.log(-stored_weights[f"{name}ssm_a"])
        stored_weights[f"{name}ssm_conv1d.weight"] = stored_weights[f"{name}ssm_conv1d.weight"][
            :, None
        ]
        if delta.in_one:
            _join_strengths(delta, stored_weights, name)
            _join_projections(delta, stored_weights, name)
    return stored_weights


def _join_gate(tiny: Tiny, stored_weights: Weights, name: str) -> None:
    """Join queries and gates, head after head."""
    shape = tiny.num_heads, tiny.head_dim, tiny.hidden_size
    parts = [stored_weights[f"{name}attn_q.weight"], stored_weights.pop(f"{name}attn_gate.weight")]
    both = np.stack([part.reshape(shape) for part in parts], axis=1)
    stored_weights[f"{name}attn_q.weight"] = both.reshape(-1, tiny.hidden_size)


def _join_strengths(delta: Delta, stored_weights: Weights, name: str) -> None:
    """Join strengths and decays, key head after key head."""
    parts = [stored_weights.pop(f"{name}{part}.weight") for part in ("ssm_beta", "ssm_alpha")]
    stored_weights[f"{name}ssm_ba.weight"] = _by_key_head(delta, parts)


def _join_projections(delta: Delta, stored_weights: Weights, name: str) -> None:
    """Join queries, keys, values and gates, key head after key head."""
    keys = delta.num_key_heads * delta.key_dim
    mixed, gates = (
        stored_weights.pop(f"{name}{part}.weight") for part in ("attn_qkv", "attn_gate")
    )
    stored_weights[f"{name}ssm_in.weight"] = _by_key_head(
        delta, [*np.split(mixed, [keys, 2 * keys]), gates]
    )


def _by_key_head(delta: Delta, parts: list[np.ndarray]) -> np.ndarray:
    width = parts[0].shape[1]
    heads = [part.reshape(delta.num_key_heads, -1, width) for part in parts]
    return np.concatenate(heads, axis=1).reshape(-1, width)


def _tile(delta: Delta, stored_weights: Weights, name: str) -> None:
    """Change the order of value heads from grouped by key head to tiled."""
    grouped = np.arange(delta.num_value_heads).reshape(delta.num_key_heads, -1)
    heads = grouped.T.ravel()
    values = (heads[:, None] * delta.value_dim + np.arange(delta.value_dim)).ravel()
    keys = 2 * delta.num_key_heads * delta.key_dim
    mixed = np.concatenate([np.arange(keys), keys + values])
    orders = {
        "attn_qkv.weight": mixed,
        "ssm_conv1d.weight": mixed,
        "attn_gate.weight": values,
        "ssm_alpha.weight": heads,
        "ssm_beta.weight": heads,
        "ssm_a": heads,
        "ssm_dt.bias": heads,
    }
    for weight, rows in orders.items():
        stored_weights[name + weight] = stored_weights[name + weight][rows]
    stored_weights[f"{name}ssm_out.weight"] = np.ascontiguousarray(
        stored_weights[f"{name}ssm_out.weight"][:, values]
    )


def _matrix(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    values = rng.standard_normal((outputs, inputs)) * inputs**-0.5
    return np.asarray(values, np.float32)
