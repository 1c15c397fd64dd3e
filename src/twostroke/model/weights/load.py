"""Loads a model from a path, or checks whether it can run here.

A loaded model has exactly the weights that its Program reads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, notice
from twostroke.core.files import is_there, read_small_file
from twostroke.core.json_io import read_json
from twostroke.core.message_text import counted_noun
from twostroke.model.families import ARCHITECTURES, MODEL_TYPES, build_program
from twostroke.model.families.fields import MAX_LAYERS, Fields
from twostroke.model.families.rope import ROPE_TABLES
from twostroke.model.hub.file_selection import is_companion
from twostroke.model.weights.file_names import (
    FileNames,
    by_canonical_name,
    must_be_read,
    report_left_out,
)
from twostroke.model.weights.generation_config import folder_sampling, gguf_sampling
from twostroke.model.weights.gguf import TruncatedError, read_header
from twostroke.model.weights.gguf_model import gguf_eos_ids, gguf_spec
from twostroke.model.weights.gguf_split import first_part, model_stem, read_gguf_parts
from twostroke.model.weights.hf_model import (
    hf_chat_template,
    hf_fields,
    hf_spec,
    refuse_architecture,
)
from twostroke.model.weights.model import GgufTokenizer, JsonTokenizer, LoadedModel, MtpWeights
from twostroke.model.weights.pooling import folder_pooling, gguf_pooling
from twostroke.model.weights.program_form import in_program_form
from twostroke.model.weights.published import assemble_published, published_layout
from twostroke.model.weights.safetensors import read_safetensors, read_sharded
from twostroke.model.weights.tensor_names import is_derived, is_mtp_name
from twostroke.model.weights.tensors import check_shapes, join_files, refuse_unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.model.families import Family, ModelSpec
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights.tensors import WeightFiles

T = TypeVar("T")

_INDEX_NAME = "model.safetensors.index.json"
_GENERATION_NAME = "generation_config.json"
_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_LAYER = re.compile(r"(?:blk|model\.layers)\.(\d{1,4})\.")


def load_path(path: Path, name: str | None = None, licence: str | None = None) -> LoadedModel:
    """Map a model's weight files into memory, and check the model.

    `path` is a .gguf or .safetensors file, or a folder that contains such files. `name` is the
    model's name (default: the name of the file or folder).

    Raises:
        ModelNotFoundError: there is no such file, or a file of the model is missing.
        ModelFormatError: the model is damaged, its architecture or a number format is not
            supported, or its weights do not match its architecture.
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


def peek_family(path: Path, name: str) -> str | None:
    """Return a model's family, such as "llama", before the whole model is downloaded.

    The beginning of a GGUF file, or a config.json, is enough. Returns None if the file is too short
    to tell. Errors call the file `name`.

    Raises:
        ModelFormatError: the family or a number format is not supported, or the file is
            damaged.
    """
    if not name.endswith(".gguf"):
        return hf_spec(hf_fields(name, read_json(path)), name).architecture
    try:
        header = read_header(path, name)
    except TruncatedError:
        return None
    unsupported = {entry.name: entry.dtype for entry in header.entries if not entry.format}
    return _gguf_family(Fields(name, header.metadata), unsupported)


def _only_gguf(folder: Path) -> Path:
    all_files = sorted({first_part(path) for path in folder.glob("*.gguf")})
    gguf_files = [path for path in all_files if not is_companion(path.name)] or all_files
    if len(gguf_files) == 1:
        return gguf_files[0]
    if gguf_files:
        names = ", ".join(path.name for path in gguf_files[:5])
        raise ModelNotFoundError(
            f"{str(folder)!r} has {counted_noun(len(gguf_files), 'GGUF file')} ({names}): name one "
            "of them."
        )
    if (folder / "adapter_config.json").is_file():
        raise ModelNotFoundError(
            f"{str(folder)!r} is an adapter (LoRA), not a model: merge it into its model first, as "
            "peft's merge_and_unload does."
        )
    raise ModelNotFoundError(f"{str(folder)!r} has neither a config.json nor a .gguf file.")


def _load_gguf(path: Path, name: str | None, licence: str | None) -> LoadedModel:
    files = read_gguf_parts(path)
    fields = Fields(path.name, files.metadata)
    _gguf_family(fields, files.unsupported)
    spec = gguf_spec(fields, name or model_stem(path), files.tensors)
    blocks = range(fields.integer(f"{spec.architecture}.block_count", MAX_LAYERS))
    family = ARCHITECTURES[spec.architecture]
    stored = {
        family.gguf_names.get(weight_name) or _with_suffix(weight_name): tensor
        for weight_name, tensor in files.tensors.items()
        if weight_name not in ROPE_TABLES and not is_derived(weight_name)
    }
    weights, extra = _without_layers(stored, blocks[spec.num_layers :])
    bos = fields.token_ids("tokenizer.ggml.bos_token_id", spec.vocab_size)
    return LoadedModel(
        name=spec.name,
        path=path,
        spec=spec,
        tensors=_program_weights(path.name, spec, weights),
        tokenizer_source=GgufTokenizer(files.metadata),
        chat_template=fields.optional_text("tokenizer.chat_template"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=gguf_eos_ids(fields, spec.vocab_size),
        licence=licence or fields.optional_text("general.license"),
        mappings=files.mappings,
        pooling=gguf_pooling(fields),
        sampling=gguf_sampling(fields),
        mtp=_mtp_weights(path.name, extra, spec),
    )


# What GGUF files of other types hold (llama.cpp, gguf-py/gguf/constants.py, GGUFType).
_OTHER_FILES: Final = {
    "adapter": "an adapter",
    "imatrix": "an importance matrix",
    "mmproj": "the part of a model that reads pictures or sound",
}


def _refuse_other_files(fields: Fields) -> None:
    """Raise ModelFormatError if a GGUF file holds no language model; the error names its kind."""
    kind = "mmproj" if fields.value("general.architecture") == "clip" else None
    kind = kind or fields.value("general.type")
    if isinstance(kind, str) and kind in _OTHER_FILES:
        fields.fault(f"is {_OTHER_FILES[kind]}, not a language model: give the model's own file")


def _gguf_family(fields: Fields, unsupported: Mapping[str, str]) -> str:
    """Return the architecture that a GGUF file names, such as "llama".

    Raises ModelFormatError if the architecture or a number format is not supported.
    """
    _refuse_other_files(fields)
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        refuse_architecture(fields, architecture, ARCHITECTURES)
    needed = {name: dtype for name, dtype in unsupported.items() if must_be_read(name)}
    refuse_unsupported(fields.name, needed)
    return architecture


def _load_folder(
    folder: Path, weights: Path | None, name: str | None, licence: str | None
) -> LoadedModel:
    """Load the model in a Hugging Face folder.

    `weights`: the weight file to read; None: all weight files.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelNotFoundError(f"{str(folder)!r} has no config.json next to the weights.")
    fields = hf_fields(config.name, read_json(config))
    family = ARCHITECTURES[MODEL_TYPES[fields.text("model_type")]]
    source, files = _folder_weights(folder, weights)
    spec = hf_spec(fields, name or folder.resolve().name)
    if spec.experts is None:
        family = replace(family, layer_names={**family.layer_names, **family.dense_names})
    layout = published_layout(fields)
    if layout is not None:
        files = assemble_published(source, files, layout)
    num_extra = _num_extra_layers(fields, family, files)
    extra_layers = range(spec.num_layers, spec.num_layers + num_extra)
    stored, names = by_canonical_name(source, files.tensors, family, spec.num_layers)
    tensors, extra = _without_layers(stored, extra_layers)
    unsupported = _unsupported(source, files, family, extra_layers)
    spec = _with_embedding_rows(spec, source, tensors, names)
    if spec.tied_embeddings:
        tensors.pop("output.weight", None)
    elif "output.weight" not in tensors and "token_embd.weight" in tensors and not unsupported:
        spec = replace(spec, tied_embeddings=True)
        notice(
            f"{source!r} has no {names.quoted('output.weight')}: "
            f"{names.quoted('token_embd.weight')} is used in its place."
        )
    if layout is None and unsupported and files.arrays:
        raise ModelFormatError(
            f"{source!r} has parts of quantized weights, such as {min(files.arrays)[:80]!r}, and "
            "config.json has no quantization_config that says how they are stored."
        )
    refuse_unsupported(source, unsupported)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise _missing_tokenizer(folder)
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    generation_config = Fields(_GENERATION_NAME, _read_generation_config(folder))
    bos = fields.token_ids("bos_token_id", spec.vocab_size)
    return LoadedModel(
        name=spec.name,
        path=folder,
        spec=spec,
        tensors=_program_weights(source, spec, tensors, names),
        tokenizer_source=JsonTokenizer(tokenizer, tokenizer_config),
        chat_template=hf_chat_template(folder, tokenizer_config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_folder_eos_ids(fields, generation_config, spec.vocab_size),
        licence=licence,
        mappings=files.mappings,
        pooling=folder_pooling(folder),
        sampling=folder_sampling(generation_config),
        mtp=_mtp_weights(source, extra, spec, names),
    )


def _folder_weights(folder: Path, weights: Path | None) -> tuple[str, WeightFiles]:
    """Return the tensors of a Hugging Face folder, and a name of its weight files for errors.

    A folder without an index must have one weight file, or all shards of one model.
    """
    single_file = folder / "model.safetensors"  # as in transformers, it hides an index
    if weights is None and is_there(folder / _INDEX_NAME) and not single_file.is_file():
        return _INDEX_NAME, read_sharded(folder / _INDEX_NAME)
    weights = weights or single_file
    candidates = sorted(path for path in folder.glob("*.safetensors") if "adapter" not in path.name)
    if weights.exists() or not candidates:
        if not weights.exists() and any(folder.glob("*.bin")):
            raise ModelNotFoundError(
                f"{str(folder)!r} has its weights in PyTorch's files (.bin), and only safetensors "
                "and GGUF are read: convert them, or fetch the model's safetensors."
            )
        return weights.name, read_safetensors(weights)
    shards = [path for path in candidates if _SHARD.fullmatch(path.name)]
    if len(candidates) == 1 and not shards:
        return candidates[0].name, read_safetensors(candidates[0])
    expected = {int(path.stem.rsplit("-", 1)[1]) for path in shards}
    if len(shards) < len(candidates) or expected != {len(shards)}:
        names = ", ".join(path.name for path in candidates[:5])
        raise ModelNotFoundError(
            f"{str(folder)!r} has no {_INDEX_NAME}, and its weight files are not all the shards of "
            f"one model: {names}."
        )
    return shards[0].name, join_files([read_safetensors(path) for path in shards])


def _with_embedding_rows(
    spec: ModelSpec, file: str, tensors: Mapping[str, QuantTensor], names: FileNames
) -> ModelSpec:
    """Return the model spec with the number of rows that the embedding has in the file.

    The table may have more rows than the vocabulary has tokens.
    """
    embedding = tensors.get("token_embd.weight")
    if embedding is None or embedding.shape[0] == spec.vocab_size or len(embedding.shape) != 2:
        return spec
    notice(
        f"{file!r} has tensor {names.quoted('token_embd.weight')} with "
        f"{counted_noun(embedding.shape[0], 'row')}, config.json a vocab_size of "
        f"{spec.vocab_size}: the rows count."
    )
    return replace(spec, vocab_size=embedding.shape[0])


def _folder_eos_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence token ids of a Hugging Face folder.

    The ids of both configuration files are joined, because config.json often lacks the end-of-turn
    tokens.
    """
    ids = [fields.token_ids("eos_token_id", vocab_size) for fields in (config, generation)]
    return tuple(dict.fromkeys(ids[0] + ids[1]))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """Return a folder's `generation_config.json`; empty if it is missing or damaged.

    Raises ModelFormatError if it is there and cannot be read, such as a link to a missing file.
    """
    path = folder / _GENERATION_NAME
    if not is_there(path):
        return {}
    read_small_file(path)
    try:
        return read_json(path)
    except ModelFormatError as error:
        notice(f"{str(error).rstrip('.')}, so it is left out: defaults replace its values.")
        return {}


def _missing_tokenizer(folder: Path) -> ModelNotFoundError:
    """Return the error for a folder without tokenizer.json.

    It names a tokenizer of another kind in the folder, if there is one: a file of SentencePiece,
    Mistral or tiktoken, or the older files of GPT-2.
    """
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).is_file()]
    if not others:
        return ModelNotFoundError(f"{str(folder)!r} has no tokenizer.json.")
    return ModelNotFoundError(
        f"{str(folder)!r} has no tokenizer.json, and {others[0]} is not read: write one with "
        "save_pretrained of transformers' AutoTokenizer, or use a GGUF file of the model."
    )


def _num_extra_layers(fields: Fields, family: Family, files: WeightFiles) -> int:
    """Return how many layers of a folder come after the layers that compute the next token.

    Qwen's MTP layer (multi-token prediction) is not counted in config.json, and is found by its
    names.
    """
    key = family.extra_layers
    if key is not None:
        return fields.integer(key, MAX_LAYERS, low=0, default=0)
    return int(family.mtp is not None and any(is_mtp_name(name) for name in files.tensors))


def _without_layers(tensors: Mapping[str, T], layers: range) -> tuple[dict[str, T], dict[str, T]]:
    """Return (tensors that are not of these layers, tensors of these layers), by canonical name.

    It separates MTP layers, which only draft tokens, from the model.
    """
    needed = {name: tensor for name, tensor in tensors.items() if not _is_of_layers(name, layers)}
    return needed, {name: tensors[name] for name in tensors.keys() - needed.keys()}


def _unsupported(
    file: str, files: WeightFiles, family: Family, extra_layers: range
) -> dict[str, str]:
    """Return the needed tensors with unsupported types: their types, by name in the file."""
    stored, names = by_canonical_name(file, files.unsupported, family, extra_layers.start)
    needed, _ = _without_layers(stored, extra_layers)
    return {names.published[n]: dtype for n, dtype in needed.items() if must_be_read(n)}


def _mtp_weights(
    file: str,
    extra: Mapping[str, QuantTensor],
    spec: ModelSpec,
    names: FileNames = FileNames(),  # noqa: B008 - frozen
) -> MtpWeights | None:
    """Return the tensors of a model's first MTP layer; None if it has none.

    `extra` has the tensors of all layers that do not compute the next token.
    """
    first_extra = range(spec.num_layers, spec.num_layers + 1)
    _, tensors = _without_layers(extra, first_extra)
    is_read = ARCHITECTURES[spec.architecture].mtp is not None
    return MtpWeights(file, tensors, names) if tensors and is_read else None


def _with_suffix(name: str) -> str:
    """Return the canonical name of a GGUF file's tensor.

    Files of Hy3 lack the suffix ".bias" of a router's bias; it is added.
    """
    return f"{name}.bias" if name.endswith(".exp_probs_b") else name


def _is_of_layers(name: str, layers: range) -> bool:
    """Return whether a canonical tensor name belongs to a layer in this range."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) in layers


def _program_weights(
    file: str,
    spec: ModelSpec,
    tensors: Mapping[str, QuantTensor],
    names: FileNames = FileNames(),  # noqa: B008 - frozen
) -> dict[str, QuantTensor]:
    """Return exactly the weights that the model's Program reads, by canonical name.

    Raises ModelFormatError if a weight is missing, or if the file has a weight of the text model
    that the Program does not read. Other tensors are left out.
    """
    if not tensors:
        raise ModelFormatError(f"{file!r} has no weights of a text model.")
    if spec.num_layers > len(tensors):
        # Before the Program is built: a damaged number of layers must not cost memory.
        raise ModelFormatError(
            f"{file!r} has {counted_noun(len(tensors), 'tensor')}, too few for "
            f"{counted_noun(spec.num_layers, 'layer')}."
        )
    shapes = build_program(spec).weight_shapes
    separate = in_program_form(file, tensors, spec, shapes, names)
    left_out = {name for name in separate.keys() - shapes.keys() if not must_be_read(name)}
    needed = {name: tensor for name, tensor in separate.items() if name not in left_out}
    check_shapes(file, needed, shapes, f"the family {spec.architecture!r}", names.quoted)
    names_in_file = (names.published.get(name, name) for name in left_out)
    report_left_out(file, names_in_file, spec.architecture)
    return needed
