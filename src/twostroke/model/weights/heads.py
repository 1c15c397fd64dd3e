"""Reads and writes trained heads: `heads.json` describes the weights in `heads.safetensors`.

The JSON file has the shapes, the identity of the target model, the tokens that the heads can
propose, and their acceptance rates on held-out text.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, TwostrokeError
from twostroke.core.files import read_small_file
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import write_json
from twostroke.core.message_text import counted_noun
from twostroke.model.families.fields import MAX_CONTEXT, MAX_HEAD_DIM, MAX_VOCAB, MAX_WIDTH
from twostroke.model.families.heads import (
    KINDS,
    LAYER_SIZES,
    NUMBERS,
    TABLE,
    HeadsSpec,
    build_heads,
    heads_layer,
)
from twostroke.model.families.spec import RopeSpec
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.safetensors import decode_json, read_safetensors, write_safetensors
from twostroke.model.weights.tensors import check_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEADS_JSON = "heads.json"
HEADS_WEIGHTS = "heads.safetensors"
SURENESS_KINDS = 10  # drafts are counted by the head's probability, in tenths

_MAX_DEPTH = 24
_SELECTED_SCORE = 1e4  # of the block that a Medusa row uses; other blocks have 0

_Width: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
_Context: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
_Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]


class HeadsFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `heads.json`, which describes trained draft heads (such as Medusa).

    msgspec checks types and bounds.

    `target_id` is the `target_identity` of the target model, for which the heads were trained.
    `token_ids[i]` is the target's id of the i-th token that the heads can propose.

    The acceptance rates were measured on held-out text. `accepted[d]` is the share of correct
    drafts at depth d, after drafts that were all correct. `right_if_sure[k]` is the share of
    correct drafts among the drafts to which the head gave a probability from k / 10 to (k + 1) /
    10.
    """

    format: Literal[1] = 1
    kind: Annotated[str, Meta(pattern=f"^({'|'.join(KINDS)})$")]
    target: str
    target_id: str
    hidden_size: _Width
    ffn_size: _Width
    num_heads: _Width
    num_kv_heads: _Width
    head_dim: Annotated[int, Meta(ge=2, le=MAX_HEAD_DIM, multiple_of=2)]
    vocab_size: Annotated[int, Meta(ge=1, le=MAX_VOCAB)]
    context_length: _Context
    window: _Context
    norm_epsilon: Annotated[float, Meta(ge=1e-30, le=1)]
    rope_base: Annotated[float, Meta(ge=1, le=1e30)]
    rope_interleaved: bool = False
    depth: Annotated[int, Meta(ge=1, le=_MAX_DEPTH)]
    accepted: tuple[_Share, ...]
    right_if_sure: Annotated[
        tuple[_Share, ...], Meta(min_length=SURENESS_KINDS, max_length=SURENESS_KINDS)
    ]
    token_ids: Annotated[tuple[int, ...], Meta(min_length=1)]

    @classmethod
    def of(cls, spec: HeadsSpec, **other_facts: Any) -> Self:
        """Return the facts to store about draft heads that have the shapes `spec`.

        `other_facts`: all further fields.
        """
        layer = spec.layer
        assert layer.window is not None
        return cls(
            **{name: getattr(layer, name) for name in LAYER_SIZES},
            kind=spec.kind,
            target=layer.name,
            window=layer.window.size,
            rope_base=layer.rope.base,
            rope_interleaved=layer.rope.interleaved,
            depth=spec.depth,
            **other_facts,
        )

    @property
    def spec(self) -> HeadsSpec:
        """Return the shapes of the draft heads."""
        sizes = {name: getattr(self, name) for name in LAYER_SIZES}
        rope = RopeSpec(self.rope_base, self.head_dim, self.rope_interleaved)
        layer = heads_layer(self.target, rope, self.window, sizes)
        return HeadsSpec(self.kind, layer, len(self.token_ids), self.depth)


class LoadedHeads(Frozen):
    """Draft heads whose files are mapped and checked.

    `tensors` does not include weights that are shared with the target model.
    """

    path: Path
    facts: HeadsFacts
    tensors: Mapping[str, QuantTensor]


def target_identity(tensors: Mapping[str, QuantTensor]) -> str:
    """Return a hash that identifies a target model, and that draft heads store.

    It is the SHA-256 of the last norm, which every number format stores exactly, so quantized
    versions of a model have the same identity.
    """
    return hashlib.sha256(tensors["output_norm.weight"].dequantize().tobytes()).hexdigest()


def load_heads(folder: Path) -> LoadedHeads:
    """Map and check the trained draft heads in a folder.

    Raises:
        ModelNotFoundError: the folder has no heads.
        ModelFormatError: a file is damaged, or the weights do not match `heads.json`.
    """
    for name in (HEADS_JSON, HEADS_WEIGHTS):
        if not (folder / name).is_file():
            fault = f"has no {name}" if folder.is_dir() else "is not a folder"
            raise ModelNotFoundError(
                f"{str(folder)!r} {fault}: heads are a folder that `twostroke train-heads` writes."
            )
    facts = _read_facts(folder / HEADS_JSON)
    tensors = dict(read_safetensors(folder / HEADS_WEIGHTS).tensors)
    reader = f"{facts.spec.kind} heads of depth {facts.spec.depth}"
    check_shapes(HEADS_WEIGHTS, tensors, stored_shapes(facts.spec), reader)
    for name, tensor in tensors.items():
        if not np.isfinite(tensor.dequantize()).all():
            raise ModelFormatError(
                f"{HEADS_WEIGHTS!r} is damaged: {name} has values that are not finite."
            )
    return LoadedHeads(folder, facts, tensors)


def save_heads(folder: Path, facts: HeadsFacts, tensors: Mapping[str, QuantTensor]) -> None:
    """Write trained draft heads to a folder: `heads.safetensors` and `heads.json`.

    Each file is written atomically. Tensors are float32, float16 or bfloat16.

    Raises:
        TwostrokeError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored_tensors = {name: tensors[name] for name in stored_shapes(facts.spec)}
        write_safetensors(folder / HEADS_WEIGHTS, stored_tensors)
        write_json(folder / HEADS_JSON, msgspec.to_builtins(facts))
    except OSError as error:
        message = f"Heads cannot be written to {str(folder)!r}: {error.strerror}."
        raise TwostrokeError(message) from None


def stored_shapes(spec: HeadsSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a file of draft heads has, by name.

    Weights that the heads share with the target model are not in the file.
    """
    shapes = build_heads(spec).weight_shapes
    return {name: shape for name, shape in shapes.items() if name not in (TABLE, NUMBERS)}


def numbers_table(depth: int) -> QuantTensor:
    """Return the table (depth, depth) by which a Medusa Program selects a head for each row.

    A row's draft depth d says how many drafts precede the token to draft. The Program looks up d in
    the table, whose row d has scores of experts: expert d (the head for depth d) has the largest.
    """
    table = np.eye(depth, dtype=np.float32) * np.float32(_SELECTED_SCORE)
    return QuantTensor.from_floats(table, FORMATS["F32"])


def _read_facts(path: Path) -> HeadsFacts:
    facts = decode_json(read_small_file(path), HeadsFacts, path.name)
    bounds = (-1, *facts.token_ids, facts.vocab_size)
    if any(before >= after for before, after in pairwise(bounds)):
        raise ModelFormatError(
            f"{path.name!r} is damaged: token_ids must ascend from 0 to {facts.vocab_size - 1}."
        )
    if len(facts.accepted) != facts.depth:
        raise ModelFormatError(
            f"{path.name!r} is damaged: accepted must have {counted_noun(facts.depth, 'share')}."
        )
    return facts
