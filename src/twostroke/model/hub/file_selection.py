"""Selects the files of a hub repository that make up a requested model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.model.hub.names import HubName

INDEX: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
SAFETENSORS: Final = "safetensors"  # requests safetensors where there are GGUF files, too

# The best trade-off of size and quality first, as llama.cpp and the hub's own pages choose.
QUANTIZATION_PREFERENCE: Final = (
    *("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1"),
    *("Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
_SMALL_FILES = (
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
_COMPANION = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
_MAX_LISTED = 12


def is_companion(path: str) -> bool:
    """Whether a GGUF file only accompanies a model: an image projector or importance matrix."""
    return _COMPANION.search(path) is not None


class RepoFile(Frozen):
    """A file that a hub repository lists; `sha256` is known for large files only."""

    path: str
    num_bytes: int
    sha256: str | None = None


class FileSelection(Frozen):
    """The files of a hub repository that make up one model.

    `entry` is the file to load; None means that the folder is loaded. `number_format` is the
    quantization, if file names show it. `note` says which model was chosen if the name matches
    several.
    """

    files: tuple[RepoFile, ...]
    entry: str | None
    number_format: str | None
    note: str | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def choose_files(name: HubName, files: Sequence[RepoFile]) -> FileSelection:
    """Return the files of a hub repository to fetch for the model name `name`.

    For a safetensors model these are only the small files, such as the configuration and the
    tokenizer; `add_weights` adds the weight files.

    Raises:
        ModelNotFoundError: the repository has no model that matches the name.
        ModelFormatError: the repository has no weights in a supported format.
    """
    models = _gguf_models(files)
    requested = name.file.lower() if name.file else None
    if requested in {SAFETENSORS, SINGLE_FILE, INDEX} or (requested is None and not models):
        return _choose_folder(name, files)
    if requested is not None:
        return _select_gguf(_find_named(name, requested, models))
    if len(models) == 1:
        has_both = any(file.path in {SINGLE_FILE, INDEX} for file in files)
        note = f"{name.repo} has GGUF and safetensors: taking {models[0][0].path}."
        return _select_gguf(models[0], note if has_both else None)
    for tag in QUANTIZATION_PREFERENCE:
        matching = [model for model in models if _label(model) == tag and _is_complete(model)]
        if len(matching) == 1:
            other_labels = _list_labels([model for model in models if model is not matching[0]])
            note = (
                f"{name.repo} has {counted_noun(len(models), 'GGUF model')}: taking {tag}; others: "
                f"{other_labels}."
            )
            return _select_gguf(matching[0], note)
    raise ModelNotFoundError(
        f"{name.repo!r} has {counted_noun(len(models), 'GGUF model')}: {_list_labels(models)}. "
        f"Name one, such as 'hf:{name.repo}:{models[0][0].path}'."
    )


def add_weights(
    choice: FileSelection, index: Mapping[str, object] | None, files: Sequence[RepoFile]
) -> FileSelection:
    """Return the file selection of a safetensors model with the weight files added.

    `index` is the content of the repository's index file, which names the weight files. None: there
    is no index file, and therefore a single weight file.
    """
    weight_map = {"": SINGLE_FILE} if index is None else index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{INDEX!r} has no weight_map.")
    available = {file.path: file for file in files if file.path.endswith(".safetensors")}
    weight_paths = sorted({str(value) for value in weight_map.values()})
    if missing := [path for path in weight_paths if path not in available]:
        raise ModelFormatError(f"{INDEX!r} names {missing[0][:80]!r}, which does not exist.")
    return replace(choice, files=(*choice.files, *(available[path] for path in weight_paths)))


def gguf_selections(name: HubName, files: Sequence[RepoFile]) -> list[FileSelection]:
    """Return every whole GGUF model of a repository; only the named one if `name` has a file.

    The list is empty for a repository, or a name, of safetensors.

    Raises:
        ModelNotFoundError: the repository has no file of this name.
    """
    models = _gguf_models(files)
    if name.file is not None:
        selection = choose_files(name, files)
        return [] if selection.entry is None else [selection]
    return [_select_gguf(model) for model in models if _is_complete(model)]


def quantization(path: str) -> str | None:
    """Return the quantization at the end of a GGUF file's name, such as Q4_K_M, or None."""
    split = _SPLIT.fullmatch(path)
    stem = split["stem"] if split else path.rsplit(".", 1)[0]
    match = _QUANTIZATION.search(stem.rsplit("/", 1)[-1])
    return match[1].upper() if match else None


# The files of one GGUF model in order: one file, or the existing parts of a split model.
_Model = tuple[RepoFile, ...]


def _gguf_models(files: Sequence[RepoFile]) -> list[_Model]:
    models: dict[str, _Model] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf") and not is_companion(file.path):
            split = _SPLIT.fullmatch(file.path)
            key = f"{split['stem']} {split['count']}" if split else file.path
            models[key] = (*models.get(key, ()), file)
    return list(models.values())


def _is_complete(model: _Model) -> bool:
    split = _SPLIT.fullmatch(model[0].path)
    return split is None or len(model) == int(split["count"])


def _label(model: _Model) -> str:
    return quantization(model[0].path) or model[0].path


def _find_named(name: HubName, requested: str, models: list[_Model]) -> _Model:
    """Return the GGUF model of a repository that the user's model name asks for.

    `requested` is the end of the name: the path of a file, a quantization, or a file name.
    """
    for model in models:
        if requested in {file.path.lower() for file in model}:
            return model
    matching = [model for model in models if _label(model).lower() == requested]
    if not matching:
        names = {requested, f"{requested}.gguf"}
        matching = [model for model in models if model[0].path.rsplit("/", 1)[-1].lower() in names]
    if len(matching) == 1:
        return matching[0]
    if matching:
        paths = ", ".join(model[0].path for model in matching[:_MAX_LISTED])
        raise ModelNotFoundError(
            f"{name.repo!r} has {counted_noun(len(matching), 'model')} called {name.file!r}. Name "
            f"one of {paths}."
        )
    hint = nearest(name.file or "", map(_label, models))
    available = _list_labels(models) or "no GGUF files at all"
    raise ModelNotFoundError(f"{name.repo!r} has no {name.file!r}, but {available}.{hint}")


def _select_gguf(model: _Model, note: str | None = None) -> FileSelection:
    entry = model[0].path
    if not _is_complete(model):
        raise ModelNotFoundError(f"The repository lacks some of the parts of {entry!r}.")
    return FileSelection(model, entry, quantization(entry) or "GGUF", note)


def _list_labels(models: list[_Model]) -> str:
    labels = list(dict.fromkeys(map(_label, models)))
    remainder = f" and {len(labels) - _MAX_LISTED} more" if len(labels) > _MAX_LISTED else ""
    return ", ".join(labels[:_MAX_LISTED]) + remainder


def _choose_folder(name: HubName, files: Sequence[RepoFile]) -> FileSelection:
    available = {file.path: file for file in files}
    if SINGLE_FILE not in available and INDEX not in available:
        has_pickles = any(path.endswith((".bin", ".pt", ".pth", ".ckpt")) for path in available)
        hint = " PyTorch checkpoints are not read: they can run code." if has_pickles else ""
        raise ModelFormatError(f"{name.repo!r} has neither a GGUF file nor {SINGLE_FILE}.{hint}")
    for needed in (CONFIG, TOKENIZER):
        if needed not in available:
            raise ModelFormatError(f"{name.repo!r} has no {needed}, which its weights need.")
    small_files = [available[path] for path in _SMALL_FILES if path in available]
    small_files += [file for path, file in available.items() if _TEMPLATE.fullmatch(path)]
    return FileSelection(tuple(small_files), None, SAFETENSORS)
