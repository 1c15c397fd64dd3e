"""Random weights of tiny models, in the forms of GGUF files and Hugging Face folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from support.tiny_kimi import channels_weights, folder_channels, gguf_channels
from support.tiny_mixers import (
    convolution_weights,
    folder_mixers,
    gguf_mamba,
    mamba_weights,
    plain_feed_forward,
)
from support.tiny_recurrent import (
    delta_weights,
    folder_recurrent,
    gated_attention,
    gguf_recurrent,
)

if TYPE_CHECKING:
    from support.tiny import Tiny
    from support.tiny_attention import Wide
    from support.tiny_recurrent import Delta

    Weights = dict[str, np.ndarray]

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


def random_weights(tiny: Tiny, vocab_size: int) -> Weights:
    """Return float32 weights by canonical name; rows of q and k in Hugging Face's order."""
    rng = np.random.default_rng(tiny.seed)
    weights = {"token_embd.weight": _matrix(rng, vocab_size, tiny.hidden_size)}
    wide = tiny.variant.wide
    if wide is not None and wide.inputs:
        width = wide.inputs * tiny.num_layers
        weights["per_layer_token_embd.weight"] = _matrix(rng, vocab_size, width)
        weights["per_layer_model_proj.weight"] = _matrix(rng, width, tiny.hidden_size)
        weights["per_layer_proj_norm.weight"] = _norm(rng, wide.inputs)
    for layer in range(tiny.num_layers):
        blocks = tiny.variant.blocks
        if blocks is not None and blocks[layer] in "-E":
            norm = {"attn_norm.weight": _norm(rng, tiny.hidden_size)}
            attention = norm | plain_feed_forward(rng, tiny, blocks[layer])
        elif wide is not None:
            attention = _wide_attention(rng, tiny, layer, wide)
        elif tiny.variant.convolution or tiny.variant.mamba:
            attention = _mixer(rng, tiny, layer)
        elif tiny.variant.delta is not None:
            attention = _hybrid_attention(rng, tiny, layer, tiny.variant.delta)
        elif tiny.variant.channels is not None and not tiny.variant.channels.attends[layer]:
            attention = {"attn_norm.weight": _norm(rng, tiny.hidden_size)}
            attention |= channels_weights(rng, tiny, tiny.variant.channels)
        else:
            make = _attention if tiny.variant.latent is None else _latent_attention
            attention = make(rng, tiny)
        part = attention | (_feed_forward(rng, tiny, layer) if blocks is None else {})
        weights |= {f"blk.{layer}.{name}": values for name, values in part.items()}
    weights["output_norm.weight"] = _norm(rng, tiny.hidden_size)
    if not tiny.tied:
        weights["output.weight"] = _matrix(rng, vocab_size, tiny.hidden_size)
    return weights


def gguf_weights(tiny: Tiny, weights: Weights) -> Weights:
    """Return `weights` as in a GGUF file: rows in its order, stacks, tables of factors."""
    stored_weights = dict(weights)
    for name, weight in weights.items():
        if tiny.variant.interleaves and name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = tiny.num_heads if "attn_q" in name else tiny.num_kv_heads
            stored_weights[name] = interleave_rows(weight, heads)
    stored_weights = _latent_stacks(tiny, _fused(tiny, stored_weights, tiny.variant.fused))
    if tiny.variant.delta is not None:
        stored_weights = gguf_recurrent(tiny, tiny.variant.delta, stored_weights)
    if tiny.variant.mamba is not None:
        stored_weights = gguf_mamba(tiny.variant.mamba, stored_weights)
    if tiny.variant.channels is not None:
        stored_weights = gguf_channels(stored_weights)
    has_experts = tiny.variant.num_experts > 0
    for layer in range(tiny.variant.first_with_experts, tiny.num_layers if has_experts else 0):
        for part in ("ffn_gate", "ffn_up", "ffn_down"):
            for kind in ("weight", "bias") if tiny.variant.has_expert_biases else ("weight",):
                names = [f"blk.{layer}.{part}.{e}.{kind}" for e in range(tiny.variant.num_experts)]
                if names[0] in stored_weights:
                    stack = np.stack([stored_weights.pop(name) for name in names])
                    stored_weights[f"blk.{layer}.{part}_exps.{kind}"] = stack
    if tiny.variant.query_norm_in_gguf is not None:
        for layer in range(tiny.num_layers):
            ones_array = np.ones(tiny.head_dim, np.float32)
            stored_weights[f"blk.{layer}.attn_q_norm.weight"] = (
                ones_array * tiny.variant.query_norm_in_gguf
            )
            stored_weights[f"blk.{layer}.attn_k_norm.weight"] = ones_array
    factors = tiny.variant.factors
    stored_weights = {
        tiny.variant.gguf_names.get(name, name): values for name, values in stored_weights.items()
    }
    return stored_weights | {name: np.array(values, np.float32) for name, values in factors.items()}


def folder_weights(tiny: Tiny, weights: Weights) -> Weights:
    """Return `weights` as in a Hugging Face folder, by its names."""
    offset = np.float32(tiny.variant.norm_offset)
    stored_weights = {
        name: values - offset if _has_offset(tiny, name) else values
        for name, values in weights.items()
    }
    if tiny.variant.delta is not None:
        stored_weights = folder_recurrent(tiny, tiny.variant.delta, stored_weights)
    if tiny.variant.convolution or tiny.variant.mamba:
        stored_weights = folder_mixers(stored_weights)
    if tiny.variant.channels is not None:
        stored_weights = folder_channels(stored_weights)
    if tiny.variant.latent is not None:
        stored_weights = _in_one(tiny, stored_weights)
    stacks = {}
    stack_names = tiny.variant.expert_stacks
    if stack_names is not None:
        for layer in range(tiny.num_layers if tiny.variant.num_experts else 0):
            if f"blk.{layer}.ffn_up.0.weight" not in stored_weights:
                continue
            gates, ups, downs = (
                [
                    stored_weights.pop(f"blk.{layer}.{part}.{e}.weight")
                    for e in range(tiny.variant.num_experts)
                ]
                for part in ("ffn_gate", "ffn_up", "ffn_down")
            )
            both = [np.concatenate(pair) for pair in zip(gates, ups, strict=True)]
            for name, matrices in zip(stack_names, (both, downs), strict=True):
                stack = np.stack(matrices)
                stack = stack.swapaxes(1, 2) if tiny.variant.are_transposed else stack
                stacks[f"model.layers.{layer}.{name}"] = np.ascontiguousarray(stack)
    if tiny.variant.has_expert_biases:
        stacks = _alternating_stacks(tiny, stored_weights)
    stored_weights = _fused(tiny, stored_weights, tiny.variant.fused | tiny.variant.folder_fused)
    named = {_folder_name(tiny, name): values for name, values in stored_weights.items()}
    for name in [name for name in named if "moe_statics" in name]:
        named[name] = named[name][None]  # ERNIE's bias has two dimensions
    return named | stacks


def _alternating_stacks(tiny: Tiny, stored_weights: Weights) -> Weights:
    """Take the experts out of `stored_weights`; return them as gpt-oss folders have them.

    Matrices are (experts, inputs, outputs), and the outputs of gate and up projections alternate.
    """
    stacks: Weights = {}
    for layer in range(tiny.num_layers):
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            gates, ups, downs = (
                np.stack(
                    [
                        stored_weights.pop(f"blk.{layer}.ffn_{part}.{e}.{kind}").T
                        for e in range(tiny.variant.num_experts)
                    ]
                )
                for part in ("gate", "up", "down")
            )
            both = np.stack([gates, ups], axis=-1)
            name = f"model.layers.{layer}.mlp.experts"
            stacks[f"{name}.gate_up_proj{ending}"] = both.reshape(*both.shape[:-2], -1)
            stacks[f"{name}.down_proj{ending}"] = np.ascontiguousarray(downs)
    return stacks


def _has_offset(tiny: Tiny, name: str) -> bool:
    is_last = name == "output_norm.weight"
    return name.endswith("norm.weight") and (tiny.variant.last_norm_has_offset or not is_last)


def interleave_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder a head's rows from halves (i, i + dim/2) to neighbours (2i, 2i + 1), as GGUF does."""
    outputs, inputs = weight.shape
    halves = weight.reshape(num_heads, 2, outputs // num_heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(outputs, inputs)


def _attention(rng: np.random.Generator, tiny: Tiny) -> Weights:
    hidden, variant = tiny.hidden_size, tiny.variant
    queries, keys = tiny.num_heads * tiny.head_dim, tiny.num_kv_heads * tiny.head_dim
    part: Weights = {}
    if variant.pre_norms:
        part["attn_norm.weight"] = _norm(rng, hidden)
    part["attn_q.weight"] = _matrix(rng, queries, hidden) * np.float32(2)
    part["attn_k.weight"] = _matrix(rng, keys, hidden) * np.float32(2)
    part["attn_v.weight"] = _matrix(rng, keys, hidden)
    part["attn_output.weight"] = _matrix(rng, hidden, queries)
    if variant.qkv_bias:
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            bias = 0.5 * rng.standard_normal(width)
            part[f"attn_{name}.bias"] = bias.astype(np.float32)
    if variant.output_bias:
        part["attn_output.bias"] = (0.1 * rng.standard_normal(hidden)).astype(np.float32)
    if variant.has_sinks:
        part["attn_sinks.weight"] = rng.standard_normal(tiny.num_heads).astype(np.float32)
    if variant.query_key_norm is not None:
        has_row_norms = variant.query_key_norm == "row"
        part["attn_q_norm.weight"] = _norm(rng, queries if has_row_norms else tiny.head_dim)
        part["attn_k_norm.weight"] = _norm(rng, keys if has_row_norms else tiny.head_dim)
    if variant.gates_attention:
        part["attn_gate.weight"] = _matrix(rng, queries, hidden)
    if variant.post_norms:
        part["post_attention_norm.weight"] = _norm(rng, hidden)
    return part


def _hybrid_attention(rng: np.random.Generator, tiny: Tiny, layer: int, delta: Delta) -> Weights:
    """Return the weights of a layer's delta rule, or of its attention with a gate."""
    if delta.attends(layer):
        part = _attention(rng, tiny)
        return part | gated_attention(rng, tiny)
    return {"attn_norm.weight": _norm(rng, tiny.hidden_size)} | delta_weights(rng, tiny, delta)


def _mixer(rng: np.random.Generator, tiny: Tiny, layer: int) -> Weights:
    """Return the weights of a layer's gated short convolution or Mamba-2, or of its attention."""
    convolution, mamba = tiny.variant.convolution, tiny.variant.mamba
    norm = {"attn_norm.weight": _norm(rng, tiny.hidden_size)}
    if mamba is not None and mamba.recurs[layer]:
        return norm | mamba_weights(rng, tiny, mamba)
    if convolution is not None and not convolution.attends[layer]:
        return norm | convolution_weights(rng, tiny, convolution)
    return _attention(rng, tiny)


def _wide_attention(rng: np.random.Generator, tiny: Tiny, layer: int, wide: Wide) -> Weights:
    """Return the weights of a layer's attention, of its input and of its factor."""
    dim, kv_heads = wide.head_dim if wide.slides[layer] else tiny.head_dim, wide.kv_heads[layer]
    part = _attention(rng, replace(tiny, head_dim=dim, num_kv_heads=kv_heads))
    if layer >= tiny.num_layers - wide.num_shared_kv:
        for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            del part[name]
    if wide.one_matrix and not wide.slides[layer]:
        del part["attn_v.weight"]
    if wide.inputs:
        part["inp_gate.weight"] = _matrix(rng, wide.inputs, tiny.hidden_size)
        part["proj.weight"] = _matrix(rng, tiny.hidden_size, wide.inputs)
        part["post_norm.weight"] = _norm(rng, tiny.hidden_size)
    part["attn_q_norm.weight"] *= np.float32(dim**-0.5)  # scores have no other scale
    part["layer_output_scale.weight"] = np.array([rng.uniform(0.5, 1)], np.float32)
    return part


def _latent_attention(rng: np.random.Generator, tiny: Tiny) -> Weights:
    hidden, heads, sizes = tiny.hidden_size, tiny.num_heads, tiny.variant.latent
    assert sizes is not None
    queries = heads * (sizes.key + sizes.rotated)
    part: Weights = {"attn_norm.weight": _norm(rng, hidden)}
    if sizes.query_rank:
        part["attn_q_a.weight"] = _matrix(rng, sizes.query_rank, hidden)
        part["attn_q_a_norm.weight"] = _norm(rng, sizes.query_rank)
        part["attn_q_b.weight"] = _matrix(rng, queries, sizes.query_rank) * np.float32(2)
    else:
        part["attn_q.weight"] = _matrix(rng, queries, hidden) * np.float32(2)
    part["attn_kv_a.weight"] = _matrix(rng, sizes.rank, hidden)
    part["attn_k_pe.weight"] = _matrix(rng, sizes.rotated, hidden) * np.float32(2)
    part["attn_kv_a_norm.weight"] = _norm(rng, sizes.rank)
    for head in range(heads):
        keys = _matrix(rng, sizes.key, sizes.rank) * np.float32(2)
        part[f"attn_k_b.{head}.weight"] = np.ascontiguousarray(keys.T)
        part[f"attn_v_b.{head}.weight"] = _matrix(rng, sizes.value, sizes.rank)
    part["attn_output.weight"] = _matrix(rng, hidden, heads * sizes.value)
    return part


def _feed_forward(rng: np.random.Generator, tiny: Tiny, layer: int) -> Weights:
    hidden, variant = tiny.hidden_size, tiny.variant
    has_experts = layer >= variant.first_with_experts and (layer + 1) % variant.expert_step == 0
    num_experts = variant.num_experts if has_experts else 0
    part: Weights = {}
    if variant.pre_norms:
        part[f"{variant.ffn_norm}.weight"] = _norm(rng, hidden)
    if num_experts:
        part["ffn_gate_inp.weight"] = _matrix(rng, num_experts, hidden)
    if num_experts and variant.has_choice_bias:
        part["exp_probs_b.bias"] = (0.1 * rng.standard_normal(num_experts)).astype(np.float32)
    width = tiny.ffn_size
    if variant.wide is not None and layer >= tiny.num_layers - variant.wide.num_shared_kv:
        width *= 2
    endings = {f".{e}": width for e in range(num_experts)} or {"": width}
    if num_experts and variant.wide is not None:  # beside a feed-forward
        endings[""] = width
        part["ffn_gate_inp.scale"] = 8 * _norm(rng, hidden)
        part["ffn_down_exps.scale"] = _norm(rng, num_experts)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            part[f"{name}.weight"] = _norm(rng, hidden)
    if num_experts and variant.num_shared:
        endings["_shexp"] = variant.num_shared * width
    if num_experts and variant.delta is not None:
        part["ffn_gate_inp_shexp.weight"] = _matrix(rng, 1, hidden)
    for ending, size in endings.items():
        part[f"ffn_gate{ending}.weight"] = _matrix(rng, size, hidden)
        part[f"ffn_up{ending}.weight"] = _matrix(rng, size, hidden)
        part[f"ffn_down{ending}.weight"] = _matrix(rng, hidden, size)
    if variant.post_norms:
        part["post_ffw_norm.weight"] = _norm(rng, hidden)
    return part | _expert_biases(rng, tiny) if variant.has_expert_biases else part


def _expert_biases(rng: np.random.Generator, tiny: Tiny) -> Weights:
    """Return the biases of a layer's router and experts."""
    part = {"ffn_gate_inp.bias": _bias(rng, tiny.variant.num_experts, 0.1)}
    widths = {"gate": tiny.ffn_size, "up": tiny.ffn_size, "down": tiny.hidden_size}
    for expert in range(tiny.variant.num_experts):
        for name, outputs in widths.items():
            part[f"ffn_{name}.{expert}.bias"] = _bias(rng, outputs, 0.5)
    return part


def _matrix(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    values = rng.standard_normal((outputs, inputs)) * inputs**-0.5
    return np.asarray(values, np.float32)


def _bias(rng: np.random.Generator, width: int, scale: float) -> np.ndarray:
    return (scale * rng.standard_normal(width)).astype(np.float32)


def _norm(rng: np.random.Generator, width: int) -> np.ndarray:
    return (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)


def _latent_stacks(tiny: Tiny, weights: Weights) -> Weights:
    """Stack the matrices of heads as in a GGUF file; an older file has them in one matrix."""
    sizes = tiny.variant.latent
    if sizes is None:
        return weights
    if sizes.in_one:
        return _in_one(tiny, weights)
    stored_weights = dict(weights)
    for layer in range(tiny.num_layers):
        for part in ("attn_k_b", "attn_v_b"):
            names = [f"blk.{layer}.{part}.{head}.weight" for head in range(tiny.num_heads)]
            if names[0] not in stored_weights:
                continue
            stored_weights[f"blk.{layer}.{part}.weight"] = np.stack(
                [stored_weights.pop(name) for name in names]
            )
    return stored_weights


def _in_one(tiny: Tiny, weights: Weights) -> Weights:
    """Join the keys and values of heads, one head after another, into one matrix."""
    stored_weights = dict(weights)
    for layer in range(tiny.num_layers):
        rows: list[np.ndarray] = []
        if f"blk.{layer}.attn_k_b.0.weight" not in stored_weights:
            continue
        for head in range(tiny.num_heads):
            rows.append(stored_weights.pop(f"blk.{layer}.attn_k_b.{head}.weight").T)
            rows.append(stored_weights.pop(f"blk.{layer}.attn_v_b.{head}.weight"))
        stored_weights[f"blk.{layer}.attn_kv_b.weight"] = np.concatenate(rows)
    return stored_weights


def _fused(tiny: Tiny, weights: Weights, fused: dict[str, tuple[str, ...]]) -> Weights:
    """Join the rows of matrices that the family's files store as one."""
    stored_weights = dict(weights)
    for layer in range(tiny.num_layers):
        for fused_name, parts in fused.items():
            if f"blk.{layer}.{parts[0]}.weight" not in stored_weights:
                continue
            rows = [stored_weights.pop(f"blk.{layer}.{part}.weight") for part in parts]
            stored_weights[f"blk.{layer}.{fused_name}.weight"] = np.concatenate(rows)
    return stored_weights


def _folder_name(tiny: Tiny, name: str) -> str:
    if name in WHOLE_MODEL:
        return tiny.variant.model_names.get(name) or WHOLE_MODEL[name]
    prefix = tiny.variant.layer_prefix
    _, layer, part, *rest = name.split(".")  # rest: the expert's number, if any, and the kind
    unlike = {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "attn_sinks.weight": "self_attn.sinks",
        **tiny.variant.state_names,
    }
    if unlike_name := unlike.get(".".join([part, *rest])):
        return f"{prefix}.layers.{layer}.{unlike_name}"
    theirs = tiny.variant.layer_names.get(part) or LAYER_NAMES[part]
    if rest[:-1] == [] and "{}" in theirs:  # of a layer without experts
        theirs = tiny.variant.dense_names.get(part) or LAYER_NAMES[part]
    if part == "exp_probs_b":
        return f"{prefix}.layers.{layer}.{theirs}{rest[-1]}"
    return f"{prefix}.layers.{layer}.{theirs.format(rest[0])}.{rest[-1]}"
