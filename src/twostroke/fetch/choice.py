"""Chooses the files of a repository that make up the model a name asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.fetch.names import HubName

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
_TAG = re.compile(
    r"(?:^|[-_.])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))$",
    re.IGNORECASE,
)
# GGUF files that are not models: projectors of images, importance matrices.
_COMPANION = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository; `sha256` is known for large files only."""

    path: str
    num_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The files of one model; `entry` is the one to load, None for their folder.

    `number_format` is the quantization, as far as names tell it. `note` says which model was
    chosen where the name fits several.
    """

    files: tuple[RepoFile, ...]
    entry: str | None
    number_format: str | None
    note: str | None = None


def choose(name: HubName, files: Sequence[RepoFile]) -> Choice:
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
        note = f"{name.repo} has GGUF and safetensors: taking {models[0].path}."
        return _gguf(models[0], note if both else None)
    model = _preferred(name, models)
    others = _listed([one for one in models if one is not model])
    return _gguf(
        model, f"{name.repo} has {len(models)} GGUF models: taking {model.tag}; others: {others}."
    )


def add_weights(
    choice: Choice, index: Mapping[str, object] | None, files: Sequence[RepoFile]
) -> Choice:
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
    match = _TAG.search(stem.rsplit("/", 1)[-1])
    return match[1].upper() if match else None


@dataclass(frozen=True, slots=True)
class _GgufModel:
    """A GGUF file, or the parts of a split one; `complete` if all parts are there."""

    files: tuple[RepoFile, ...]
    complete: bool

    @property
    def path(self) -> str:
        return self.files[0].path

    @property
    def tag(self) -> str | None:
        return quantization(self.path)


def _gguf_models(files: Sequence[RepoFile]) -> list[_GgufModel]:
    models = []
    parts: dict[tuple[str, int], dict[int, RepoFile]] = {}
    for file in files:
        if not file.path.lower().endswith(".gguf") or _COMPANION.search(file.path):
            continue
        if split := _SPLIT.fullmatch(file.path):
            parts.setdefault((split["stem"], int(split["count"])), {})[int(split["part"])] = file
        else:
            models.append(_GgufModel((file,), complete=True))
    for (_, count), found in parts.items():
        ordered = tuple(found[number] for number in sorted(found))
        models.append(_GgufModel(ordered, complete=set(found) == set(range(1, count + 1))))
    return sorted(models, key=lambda model: model.path)


def _preferred(name: HubName, models: list[_GgufModel]) -> _GgufModel:
    for tag in PREFERENCE:
        found = [model for model in models if model.tag == tag and model.complete]
        if len(found) == 1:
            return found[0]
    raise ModelNotFoundError(
        f"{name.repo!r} has {len(models)} GGUF models: {_listed(models)}. Name one, such as "
        f"'hf:{name.repo}:{models[0].path}'."
    )


def _find_named(name: HubName, asked: str, models: list[_GgufModel]) -> _GgufModel:
    """Find a model by the path of one of its files, by its quantization, or by its file name."""
    for model in models:
        if asked in {file.path.lower() for file in model.files}:
            return model
    found = [model for model in models if (model.tag or "").lower() == asked]
    if not found:
        names = {asked, f"{asked}.gguf"}
        found = [model for model in models if model.path.rsplit("/", 1)[-1].lower() in names]
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(model.path for model in found[:_MAX_LISTED])
        raise ModelNotFoundError(
            f"{name.repo!r} has {len(found)} models called {name.file!r}. Name one of {paths}."
        )
    if not models:
        raise ModelNotFoundError(
            f"{name.repo!r} has no GGUF files, and so no {name.file!r}: use 'hf:{name.repo}'."
        )
    hint = nearest(name.file or "", [one for m in models for one in (m.tag, m.path) if one])
    raise ModelNotFoundError(f"{name.repo!r} has no {name.file!r}, but {_listed(models)}.{hint}")


def _gguf(model: _GgufModel, note: str | None = None) -> Choice:
    if not model.complete:
        raise ModelNotFoundError(f"The repository lacks some of the parts of {model.path!r}.")
    return Choice(model.files, model.path, model.tag or "GGUF", note)


def _listed(models: list[_GgufModel]) -> str:
    names = list(dict.fromkeys(model.tag or model.path for model in models))
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _choose_folder(name: HubName, files: Sequence[RepoFile]) -> Choice:
    known = {file.path: file for file in files}
    if WHOLE not in known and INDEX not in known:
        if any(path.endswith((".bin", ".pt", ".pth", ".ckpt")) for path in known):
            raise ModelFormatError(
                f"{name.repo!r} has PyTorch checkpoints only, which can run code when they are "
                "opened. Look for a version in safetensors or GGUF."
            )
        raise ModelFormatError(f"{name.repo!r} has neither a GGUF file nor {WHOLE}.")
    for needed in (CONFIG, TOKENIZER):
        if needed not in known:
            raise ModelFormatError(f"{name.repo!r} has no {needed}, which its weights need.")
    return Choice(tuple(known[path] for path in _SMALL if path in known), None, SAFETENSORS)
