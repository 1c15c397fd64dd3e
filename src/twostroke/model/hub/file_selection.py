"""Chooses the files of a repository that make up the model a name asks for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, nearest
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.model.hub.names import HubName

INDEX: Final = "model.safetensors.index.json"
WHOLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
SAFETENSORS: Final = "safetensors"  # asks for these where a repository also has GGUF files

# A good size for its quality first, as llama.cpp and the hub's own pages choose.
PREFERENCE: Final = (
    *("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1"),
    *("Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
_SMALL = (
    *(CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("modules.json", "1_Pooling/config.json", INDEX),
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANTIZATION = re.compile(
    r"(?:^|[-_.])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))$",
    re.IGNORECASE,
)
_TEMPLATE = re.compile(r"(?:additional_)?chat_templates/[^/]+\.jinja")
# GGUF files that are not models: projectors of images, importance matrices.
_COMPANION = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
_MAX_LISTED = 12


class RepoFile(Frozen):
    """A file of a repository; `sha256` is known for large files only."""

    path: str
    num_bytes: int
    sha256: str | None = None


class FileSelection(Frozen):
    """The files of one model; `entry` is the one to load, None for their folder.

    `number_format` is the quantization, if file names show it. `note` says which model was chosen
    where the name fits several.
    """

    files: tuple[RepoFile, ...]
    entry: str | None
    number_format: str | None
    note: str | None = None


def choose(name: HubName, files: Sequence[RepoFile]) -> FileSelection:
    """Return the files to fetch for `name` from a repository with `files`.

    For safetensors these are the small files; `add_weights` adds the others.

    Raises:
        ModelNotFoundError: the repository has nothing that fits the name.
        ModelFormatError: the repository has no weights that can be read.
    """
    models = _gguf_models(files)
    asked = name.file.lower() if name.file else None
    if asked in {SAFETENSORS, WHOLE, INDEX} or (asked is None and not models):
        return _choose_folder(name, files)
    if asked is not None:
        return _gguf(_find_named(name, asked, models))
    if len(models) == 1:
        both = any(file.path in {WHOLE, INDEX} for file in files)
        note = f"{name.repo} has GGUF and safetensors: taking {models[0][0].path}."
        return _gguf(models[0], note if both else None)
    for tag in PREFERENCE:
        found = [model for model in models if _label(model) == tag and _is_complete(model)]
        if len(found) == 1:
            others = _listed([model for model in models if model is not found[0]])
            note = f"{name.repo} has {len(models)} GGUF models: taking {tag}; others: {others}."
            return _gguf(found[0], note)
    raise ModelNotFoundError(
        f"{name.repo!r} has {len(models)} GGUF models: {_listed(models)}. Name one, such as "
        f"'hf:{name.repo}:{models[0][0].path}'."
    )


def add_weights(
    choice: FileSelection, index: Mapping[str, object] | None, files: Sequence[RepoFile]
) -> FileSelection:
    """Return the choice of a safetensors repository with its weights.

    `index` is the content of its index file, None if it has none.
    """
    weight_map = {"": WHOLE} if index is None else index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{INDEX!r} has no weight_map.")
    known = {file.path: file for file in files if file.path.endswith(".safetensors")}
    wanted = sorted({str(value) for value in weight_map.values()})
    if missing := [path for path in wanted if path not in known]:
        raise ModelFormatError(f"{INDEX!r} names {missing[0][:80]!r}, which does not exist.")
    return replace(choice, files=(*choice.files, *(known[path] for path in wanted)))


def quantization(path: str) -> str | None:
    """Return the quantization that a GGUF file's name ends with, in capitals, or None."""
    split = _SPLIT.fullmatch(path)
    stem = split["stem"] if split else path.rsplit(".", 1)[0]
    match = _QUANTIZATION.search(stem.rsplit("/", 1)[-1])
    return match[1].upper() if match else None


# The files of one GGUF model in order: one, or the parts of a split one that the repository has.
_Model = tuple[RepoFile, ...]


def _gguf_models(files: Sequence[RepoFile]) -> list[_Model]:
    models: dict[str, _Model] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf") and not _COMPANION.search(file.path):
            split = _SPLIT.fullmatch(file.path)
            key = f"{split['stem']} {split['count']}" if split else file.path
            models[key] = (*models.get(key, ()), file)
    return list(models.values())


def _is_complete(model: _Model) -> bool:
    split = _SPLIT.fullmatch(model[0].path)
    return split is None or len(model) == int(split["count"])


def _label(model: _Model) -> str:
    return quantization(model[0].path) or model[0].path


def _find_named(name: HubName, asked: str, models: list[_Model]) -> _Model:
    """Find a model by the path of one of its files, by its quantization, or by its file name."""
    for model in models:
        if asked in {file.path.lower() for file in model}:
            return model
    found = [model for model in models if _label(model).lower() == asked]
    if not found:
        names = {asked, f"{asked}.gguf"}
        found = [model for model in models if model[0].path.rsplit("/", 1)[-1].lower() in names]
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(model[0].path for model in found[:_MAX_LISTED])
        raise ModelNotFoundError(
            f"{name.repo!r} has {len(found)} models called {name.file!r}. Name one of {paths}."
        )
    hint = nearest(name.file or "", map(_label, models))
    has = _listed(models) or "no GGUF files at all"
    raise ModelNotFoundError(f"{name.repo!r} has no {name.file!r}, but {has}.{hint}")


def _gguf(model: _Model, note: str | None = None) -> FileSelection:
    entry = model[0].path
    if not _is_complete(model):
        raise ModelNotFoundError(f"The repository lacks some of the parts of {entry!r}.")
    return FileSelection(model, entry, quantization(entry) or "GGUF", note)


def _listed(models: list[_Model]) -> str:
    labels = list(dict.fromkeys(map(_label, models)))
    more = f" and {len(labels) - _MAX_LISTED} more" if len(labels) > _MAX_LISTED else ""
    return ", ".join(labels[:_MAX_LISTED]) + more


def _choose_folder(name: HubName, files: Sequence[RepoFile]) -> FileSelection:
    known = {file.path: file for file in files}
    if WHOLE not in known and INDEX not in known:
        pickled = any(path.endswith((".bin", ".pt", ".pth", ".ckpt")) for path in known)
        hint = " PyTorch checkpoints are not read: they can run code." if pickled else ""
        raise ModelFormatError(f"{name.repo!r} has neither a GGUF file nor {WHOLE}.{hint}")
    for needed in (CONFIG, TOKENIZER):
        if needed not in known:
            raise ModelFormatError(f"{name.repo!r} has no {needed}, which its weights need.")
    small = [known[path] for path in _SMALL if path in known]
    small += [file for path, file in known.items() if _TEMPLATE.fullmatch(path)]
    return FileSelection(tuple(small), None, SAFETENSORS)
