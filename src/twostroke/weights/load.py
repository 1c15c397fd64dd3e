"""Loads a model from a path, and checks that it has the weights that its Program reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.core.files import read_json
from twostroke.models import ARCHITECTURES, MODEL_TYPES, build_program
from twostroke.models.fields import Fields
from twostroke.models.rope import ROPE_TABLES
from twostroke.quant import FORMATS
from twostroke.weights.gguf_model import gguf_eos_ids, gguf_spec
from twostroke.weights.gguf_split import first_part, model_stem, read_gguf_parts
from twostroke.weights.hf_model import (
    hf_chat_template,
    hf_fields,
    hf_spec,
    refuse_architecture,
)
from twostroke.weights.model import GgufTokenizer, JsonTokenizer, LoadedModel
from twostroke.weights.pooling import folder_pooling, gguf_pooling
from twostroke.weights.safetensors import read_safetensors, read_sharded
from twostroke.weights.stacks import cut_stacks
from twostroke.weights.tensor_names import canonical_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.models import Family, ModelSpec
    from twostroke.quant import QuantTensor

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


def load_path(path: Path, name: str | None = None, licence: str | None = None) -> LoadedModel:
    """Map and check the model at `path`: a .gguf or .safetensors file, or a folder with either.

    `name` is the model's name (default: the name of the file or folder).

    Raises:
        ModelNotFoundError: there is no such file, or a file of the model is missing.
        ModelFormatError: the model is damaged, its architecture or a number format is not
            supported, or its weights are not those of its architecture.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            return _load_folder(path, None, name, licence)
        path = _only_gguf(path)
    if not path.exists():
        raise ModelNotFoundError(f"There is no file or folder {str(path)!r}.")
    if path.suffix == ".safetensors":
        weights = None if _SHARD.fullmatch(path.name) else path
        return _load_folder(path.parent, weights, name or path.stem, licence)
    return _load_gguf(path, name, licence)


def _only_gguf(folder: Path) -> Path:
    found = sorted({first_part(path) for path in folder.glob("*.gguf")})
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found[:5])
        raise ModelNotFoundError(
            f"{str(folder)!r} has {len(found)} GGUF files ({names}): name one of them."
        )
    raise ModelNotFoundError(f"{str(folder)!r} has neither a config.json nor a .gguf file.")


def _load_gguf(path: Path, name: str | None, licence: str | None) -> LoadedModel:
    file = read_gguf_parts(path)
    fields = Fields(path.name, file.metadata)
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        refuse_architecture(fields, architecture, ARCHITECTURES)
    if "token_embd.weight" in file.unsupported:
        _refuse_type(path.name, "token_embd.weight", file.unsupported)
    spec = gguf_spec(fields, name or model_stem(path), file.tensors)
    weights = {key: tensor for key, tensor in file.tensors.items() if key not in ROPE_TABLES}
    tensors = _checked(_Files(path.name), spec, weights, file.unsupported)
    bos = fields.token_ids("tokenizer.ggml.bos_token_id", spec.vocab_size)
    return LoadedModel(
        name=spec.name,
        path=path,
        spec=spec,
        tensors=tensors,
        tokenizer_source=GgufTokenizer(file.metadata),
        chat_template=fields.optional_text("tokenizer.chat_template"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=gguf_eos_ids(fields, spec.vocab_size),
        licence=licence or fields.optional_text("general.license"),
        mappings=file.mappings,
        pooling=gguf_pooling(fields),
    )


def _load_folder(
    folder: Path, weights: Path | None, name: str | None, licence: str | None
) -> LoadedModel:
    """Load a Hugging Face folder, with `weights` or else whatever the folder holds."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelNotFoundError(f"{str(folder)!r} has no config.json next to the weights.")
    fields = hf_fields(config.name, read_json(config))
    family = ARCHITECTURES[MODEL_TYPES[fields.text("model_type")]]
    if weights is None and (folder / _INDEX).is_file():
        source, files = _INDEX, read_sharded(folder / _INDEX)
    else:
        weights = weights or folder / "model.safetensors"
        source, files = weights.name, read_safetensors(weights)
    tensors = _canonical(files.tensors, family)
    spec = hf_spec(fields, name or folder.resolve().name)
    if spec.tied_embeddings:
        tensors.pop("output.weight", None)
    unsupported = _canonical(files.unsupported, family)
    tensors = _checked(_Files(source, config.name), spec, tensors, unsupported)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelNotFoundError(f"{str(folder)!r} has no tokenizer.json.")
    extra = folder / "tokenizer_config.json"
    tokenizer_config = read_json(extra) if extra.is_file() else {}
    bos = fields.token_ids("bos_token_id", spec.vocab_size)
    return LoadedModel(
        name=spec.name,
        path=folder,
        spec=spec,
        tensors=tensors,
        tokenizer_source=JsonTokenizer(tokenizer, tokenizer_config),
        chat_template=hf_chat_template(folder, tokenizer_config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_folder_eos_ids(folder, fields, spec.vocab_size),
        licence=licence,
        mappings=files.mappings,
        pooling=folder_pooling(folder),
    )


def _folder_eos_ids(folder: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end an answer: config.json often lacks those that end a turn."""
    ids = dict.fromkeys(config.token_ids("eos_token_id", vocab_size))
    generation = folder / "generation_config.json"
    if generation.is_file():
        fields = Fields(generation.name, read_json(generation))
        ids |= dict.fromkeys(fields.token_ids("eos_token_id", vocab_size))
    return tuple(ids)


def _canonical(tensors: Mapping[str, Any], family: Family) -> dict[str, Any]:
    named = ((canonical_name(name, family.layer_names), tensor) for name, tensor in tensors.items())
    return {name: tensor for name, tensor in named if name is not None}


@dataclass(frozen=True, slots=True)
class _Files:
    """The names of the file with the weights and of the file that describes the model."""

    weights: str
    config: str | None = None

    @property
    def facts(self) -> str:
        """The file that describes the model."""
        return self.config or self.weights

    @property
    def needs(self) -> str:
        """The words for what the weights must be."""
        return f"{self.config!r} asks for" if self.config else "the model needs"


def _checked(
    files: _Files,
    spec: ModelSpec,
    tensors: Mapping[str, QuantTensor],
    unsupported: Mapping[str, str],
) -> dict[str, QuantTensor]:
    """Return the weights that the model's Program reads; refuse if one is missing or left over."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelFormatError(
            f"{files.facts!r} has {spec.num_heads} heads, not a multiple of its "
            f"{spec.num_kv_heads} key-value heads."
        )
    if spec.num_layers > len(tensors) + len(unsupported):
        raise ModelFormatError(
            f"{files.weights!r} has {len(tensors)} tensors, too few for the {spec.num_layers} "
            f"layers that {files.needs}."
        )
    shapes = build_program(spec).weight_shapes
    cut = cut_stacks(tensors, shapes, ARCHITECTURES[spec.architecture].fused)
    for name, shape in shapes.items():
        if name in unsupported:
            _refuse_type(files.weights, name, unsupported)
        if name not in cut:
            if unsupported:  # it is probably part of that one
                _refuse_type(files.weights, next(iter(unsupported)), unsupported)
            raise ModelFormatError(f"{files.weights!r} lacks tensor {name!r}, which {files.needs}.")
        if cut[name].shape != shape:
            raise ModelFormatError(
                f"{files.weights!r} has tensor {name!r} with shape {cut[name].shape}, "
                f"{files.needs} {shape}."
            )
    for name in (*cut, *unsupported):
        if name not in shapes:
            raise ModelFormatError(
                f"{files.weights!r} has tensor {name[:80]!r}, which the family "
                f"{spec.architecture!r} does not use: answers without it would be wrong."
            )
    return cut


def _refuse_type(file: str, name: str, unsupported: Mapping[str, str]) -> None:
    raise ModelFormatError(
        f"{file!r} has tensor {name!r} of type {unsupported[name]}, which is not supported yet; "
        f"supported: {', '.join(FORMATS)}."
    )
