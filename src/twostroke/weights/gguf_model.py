"""From a GGUF file's metadata to a `ModelSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.models import ARCHITECTURES, ModelSpec, RopeSpec
from twostroke.models.fields import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.quant import QuantTensor

# Keys that end an answer: end of text, end of turn, end of message.
_EOS_KEYS = ("eos", "eot", "eom")


def gguf_spec(fields: Fields, name: str, tensors: Mapping[str, QuantTensor]) -> ModelSpec:
    """Translate metadata into a ModelSpec; ModelFormatError for what is missing or not sound."""
    arch = fields.text("general.architecture")
    heads = fields.integer(f"{arch}.attention.head_count", MAX_WIDTH)
    hidden = fields.integer(f"{arch}.embedding_length", MAX_WIDTH)
    if not fields.has(f"{arch}.attention.key_length") and hidden % heads:
        fields.fault(f"has {heads} heads that do not divide its width of {hidden}")
    head_dim = fields.integer(
        f"{arch}.attention.key_length", MAX_HEAD_DIM, default=max(1, hidden // heads)
    )
    fields.expect(f"{arch}.attention.value_length", head_dim)
    fields.expect(f"{arch}.expert_count", 0)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        fields.fault("has no tensor 'token_embd.weight'")
    spec = ModelSpec(
        architecture=arch,
        name=name,
        num_layers=fields.integer(f"{arch}.block_count", MAX_LAYERS),
        hidden_size=hidden,
        ffn_size=fields.integer(f"{arch}.feed_forward_length", MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", MAX_WIDTH, default=heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        context_length=fields.integer(f"{arch}.context_length", MAX_CONTEXT),
        norm_epsilon=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, arch, head_dim, tensors),
        tied_embeddings="output.weight" not in tensors,
    )
    _check_tokens(fields, spec)
    return ARCHITECTURES[arch].from_gguf(fields, spec, tensors)


def gguf_eos_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, without repeats."""
    ids: dict[int, None] = {}
    for key in _EOS_KEYS:
        ids |= dict.fromkeys(fields.token_ids(f"tokenizer.ggml.{key}_token_id", vocab_size))
    return tuple(ids)


def _rope(fields: Fields, arch: str, head_dim: int, tensors: Mapping[str, QuantTensor]) -> RopeSpec:
    fields.expect(f"{arch}.rope.scaling.type", "none")
    fields.expect(f"{arch}.rope.scale_linear", 1.0)
    if "rope_freqs.weight" in tensors:
        fields.fault("scales its rope by a table (rope_freqs.weight), which is not supported yet")
    return RopeSpec(
        base=fields.number(f"{arch}.rope.freq_base", default=10000.0),
        dim=fields.integer(f"{arch}.rope.dimension_count", head_dim, low=2, default=head_dim),
        interleaved=ARCHITECTURES[arch].interleaves,
    )


def _check_tokens(fields: Fields, spec: ModelSpec) -> None:
    """A token without a row of the embedding table must not exist."""
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        fields.fault("has no tokenizer (tokenizer.ggml.tokens)")
    if len(tokens) > min(spec.vocab_size, MAX_VOCAB):
        fields.fault(f"has {len(tokens)} tokens, its embedding table {spec.vocab_size} rows")
