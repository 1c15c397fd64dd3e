"""Reads trained heads from a folder: `heads.json` describes the weights in `heads.safetensors`.

The JSON file has the shapes, the identity of the target model, the tokens that the heads can guess,
and the shares of right guesses on held-out text.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.core.files import read_json
from twostroke.models.fields import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from twostroke.models.heads import KINDS, NUMBERS, TABLE, HeadsSpec, build_heads
from twostroke.models.spec import ModelSpec, RopeSpec, WindowSpec
from twostroke.quant import FORMATS, QuantTensor
from twostroke.weights.safetensors import read_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEADS_JSON = "heads.json"
HEADS_WEIGHTS = "heads.safetensors"
SURENESS_KINDS = 10  # guesses are counted by how sure the head was, in tenths

_FORMAT = 1
_KEYS = (
    "format",
    "kind",
    "target",
    "target_id",
    "hidden_size",
    "ffn_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "context_length",
    "window",
    "norm_epsilon",
    "rope_base",
    "rope_interleaved",
    "depth",
    "accepted",
    "right_if_sure",
    "token_ids",
)
_MAX_DEPTH = 24
_FAR = 1e4  # the score of the block that a Medusa row takes, the others have 0


@dataclass(frozen=True, slots=True)
class HeadsFacts:
    """The content of `heads.json`.

    `target_id` is the `target_identity` of the model that the heads are for. `token_ids[i]` is the
    target's id of the i-th token that they can guess. On held-out text, `accepted[d]` is the share
    of right guesses at depth d where all before were right, and `right_if_sure[k]` the share where
    the head was sure by k to k + 1 tenths.
    """

    spec: HeadsSpec
    target_name: str
    target_id: str
    token_ids: tuple[int, ...]
    accepted: tuple[float, ...]
    right_if_sure: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Heads whose files are mapped and checked; `tensors` are without the target's weights."""

    path: Path
    facts: HeadsFacts
    tensors: Mapping[str, QuantTensor]


def target_identity(tensors: Mapping[str, QuantTensor]) -> str:
    """Return an identity of a model that does not depend on the number format of its matrices.

    It is the SHA-256 of its last norm, which every file stores without loss.
    """
    return hashlib.sha256(tensors["output_norm.weight"].dequantize().tobytes()).hexdigest()


def load_heads(folder: Path) -> LoadedHeads:
    """Map and check the heads in a folder.

    Raises:
        ModelNotFoundError: the folder has no heads.
        ModelFormatError: a file is damaged, or the weights do not fit `heads.json`.
    """
    for name in (HEADS_JSON, HEADS_WEIGHTS):
        if not (folder / name).is_file():
            fault = f"has no {name}" if folder.is_dir() else "is not a folder"
            raise ModelNotFoundError(
                f"{str(folder)!r} {fault}: heads are a folder that `twostroke train-heads` writes."
            )
    facts = _facts(Fields(HEADS_JSON, read_json(folder / HEADS_JSON)))
    tensors = dict(read_safetensors(folder / HEADS_WEIGHTS).tensors)
    shapes = stored_shapes(facts.spec)
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise ModelFormatError(
            f"{HEADS_WEIGHTS!r} does not fit {HEADS_JSON}: {facts.spec.kind} heads of depth "
            f"{facts.spec.depth} have no tensor {unknown[0][:60]!r}."
        )
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            fault = "is missing"
            if name in tensors:
                fault = f"has the shape {tensors[name].shape}, not {shape}"
            raise ModelFormatError(f"{HEADS_WEIGHTS!r} does not fit {HEADS_JSON}: {name} {fault}.")
        if not np.isfinite(tensors[name].dequantize()).all():
            raise ModelFormatError(
                f"{HEADS_WEIGHTS!r} is damaged: {name} has values that are not finite."
            )
    return LoadedHeads(folder, facts, {name: tensors[name] for name in shapes})


def stored_shapes(spec: HeadsSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that heads do not share with the target."""
    shapes = build_heads(spec).weight_shapes
    return {name: shape for name, shape in shapes.items() if name not in (TABLE, NUMBERS)}


def numbers_table(depth: int) -> QuantTensor:
    """Return the table that selects the Medusa block for each row's number."""
    table = np.eye(depth, dtype=np.float32) * np.float32(_FAR)
    return QuantTensor.from_floats(table, FORMATS["F32"])


def facts_json(facts: HeadsFacts) -> dict[str, object]:
    """Return the content of `heads.json`."""
    layer = facts.spec.layer
    assert layer.window is not None
    return {
        "format": _FORMAT,
        "kind": facts.spec.kind,
        "target": facts.target_name,
        "target_id": facts.target_id,
        "hidden_size": layer.hidden_size,
        "ffn_size": layer.ffn_size,
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": layer.vocab_size,
        "context_length": layer.context_length,
        "window": layer.window.size,
        "norm_epsilon": layer.norm_epsilon,
        "rope_base": layer.rope.base,
        "rope_interleaved": layer.rope.interleaved,
        "depth": facts.spec.depth,
        "accepted": list(facts.accepted),
        "right_if_sure": list(facts.right_if_sure),
        "token_ids": list(facts.token_ids),
    }


def _facts(fields: Fields) -> HeadsFacts:
    if fields.integer("format", 1 << 16) != _FORMAT:
        fields.refuse("format", f"this version of twostroke reads {_FORMAT}")
    fields.only(_KEYS)
    kind = fields.word("kind", KINDS)
    vocab_size = fields.integer("vocab_size", MAX_VOCAB)
    token_ids = _token_ids(fields, vocab_size)
    depth = fields.integer("depth", _MAX_DEPTH)
    return HeadsFacts(
        HeadsSpec(kind, _layer(fields, vocab_size), len(token_ids), depth),
        fields.text("target"),
        fields.text("target_id"),
        token_ids,
        _odds(fields, "accepted", depth),
        _odds(fields, "right_if_sure", SURENESS_KINDS),
    )


def _token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the tokens that heads can guess: at least one, each above the last."""
    if not isinstance(fields.value("token_ids"), list):
        fields.fault("has no list token_ids")
    ids = fields.token_ids("token_ids", vocab_size)
    if not ids:
        fields.fault("has an empty list token_ids")
    for place, (before, one) in enumerate(itertools.pairwise(ids), 1):
        if one <= before:
            fields.fault(
                f"has token_ids[{place}] = {one} after {before}: ids must be in ascending order"
            )
    return ids


def _layer(fields: Fields, vocab_size: int) -> ModelSpec:
    head_dim = fields.integer("head_dim", MAX_HEAD_DIM)
    if head_dim % 2:
        fields.refuse("head_dim", "which must be even")
    interleaved = fields.flag("rope_interleaved", default=False)
    return ModelSpec(
        architecture="llama",
        name=fields.text("target"),
        num_layers=1,
        hidden_size=fields.integer("hidden_size", MAX_WIDTH),
        ffn_size=fields.integer("ffn_size", MAX_WIDTH),
        num_heads=fields.integer("num_heads", MAX_WIDTH),
        num_kv_heads=fields.integer("num_kv_heads", MAX_WIDTH),
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=fields.integer("context_length", MAX_CONTEXT),
        norm_epsilon=fields.number("norm_epsilon"),
        rope=RopeSpec(fields.number("rope_base"), head_dim, interleaved),
        tied_embeddings=False,
        window=WindowSpec(fields.integer("window", MAX_CONTEXT), (True,)),
    )


def _odds(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    odds = fields.numbers(key, count)
    if max(odds) > 1:
        fields.refuse(key, "where a share is above 1")
    return odds
