"""Converts a GGUF file's metadata into a `ModelSpec`."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.core.message_text import counted_noun
from twostroke.model.families import ARCHITECTURES, ModelSpec
from twostroke.model.families.common_fields import read_sizes
from twostroke.model.families.fields import MAX_HEAD_DIM, MAX_VOCAB, Fields
from twostroke.model.families.rope import NO_ROTATION_DIVISOR, ROPE_TABLES, gguf_rope
from twostroke.model.weights.gguf import Strings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.quant import QuantTensor

# Tokens that end a completion: end of text, end of turn, end of message.
_EOS_KEYS = ("eos", "eot", "eom")

# Features that are not supported, with the value that turns each off.
_UNSUPPORTED_FEATURES: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.output_scale": 0.0,
    "attention.temperature_length": 0,
    "attention.shared_kv_layers": 0,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "nextn_predict_layers": 0,
    "residual_scale": 1.0,
    "router_logit_softcapping": 0.0,
    "use_parallel_residual": False,
}


_SIZE_KEYS = {
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "num_layers": "block_count",
    "ffn_size": "feed_forward_length",
    "context_length": "context_length",
}


def gguf_spec(fields: Fields, name: str, tensors: Mapping[str, QuantTensor]) -> ModelSpec:
    """Convert a GGUF file's metadata into a ModelSpec.

    Raises ModelFormatError for a missing or impossible value.
    """
    architecture = fields.text("general.architecture")
    family = ARCHITECTURES[architecture]
    stored_fields = fields.with_prefix(f"{architecture}.")
    shared_fields = stored_fields.changed(family.gguf_values(stored_fields))
    sizes = read_sizes(shared_fields, _SIZE_KEYS)
    shared_fields.expect("attention.value_length", sizes["head_dim"])
    for key, supported_value in _UNSUPPORTED_FEATURES.items():
        shared_fields.expect(key, supported_value)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        fields.fault("has no tensor 'token_embd.weight'")
    tables = {
        key: _read_rope_table(fields, key, tensors[key]) for key in ROPE_TABLES if key in tensors
    }
    rope, sizes["context_length"] = gguf_rope(
        shared_fields,
        sizes["head_dim"],
        sizes["context_length"],
        tables,
        interleaved=family.interleaves,
    )
    spec = ModelSpec(
        **sizes,
        architecture=architecture,
        name=name,
        vocab_size=embedding.shape[0],
        norm_epsilon=shared_fields.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        keys_give_values=family.may_lack_values and _lacks_values(tensors),
        norms_heads=family.may_norm_heads and "blk.0.attn_q_norm.weight" in tensors,
    )
    _check_tokens(fields, spec)
    return family.from_gguf(stored_fields, spec)


def gguf_eos_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence token ids in a GGUF file's metadata, without duplicates."""
    ids: dict[int, None] = {}
    for key in _EOS_KEYS:
        ids |= dict.fromkeys(fields.token_ids(f"tokenizer.ggml.{key}_token_id", vocab_size))
    return tuple(ids)


def _read_rope_table(fields: Fields, name: str, tensor: QuantTensor) -> list[float]:
    if len(tensor.shape) != 1 or tensor.num_values > MAX_HEAD_DIM:
        fields.fault(f"has tensor {name!r} with shape {tensor.shape}, not one factor for each pair")
    values = [float(value) for value in tensor.dequantize()]
    # The constant stored as float32 is slightly larger.
    return [
        NO_ROTATION_DIVISOR if value == np.float32(NO_ROTATION_DIVISOR) else value
        for value in values
    ]


def _lacks_values(tensors: Mapping[str, QuantTensor]) -> bool:
    """Return whether a GGUF model's first attention layers have no matrix that computes values.

    In Gemma 4 the keys of such layers are also the values. `tensors`: the model's tensors by name.
    """
    first_layers = takewhile(lambda layer: f"blk.{layer}.attn_k.weight" in tensors, count())
    return any(f"blk.{layer}.attn_v.weight" not in tensors for layer in first_layers)


def _check_tokens(fields: Fields, spec: ModelSpec) -> None:
    """Check that each token of a GGUF file's tokenizer has a row in the embedding table."""
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, (list, Strings)):
        fields.fault("has no tokenizer (tokenizer.ggml.tokens)")
    if len(tokens) > min(spec.vocab_size, MAX_VOCAB):
        fields.fault(
            f"has {counted_noun(len(tokens), 'token')}, its embedding table "
            f"{counted_noun(spec.vocab_size, 'row')}"
        )
