"""Which files of a repository make up the model that a name asks for; nothing else is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.fetch.hub.names import HubName

INDEX: Final = "model.safetensors.index.json"
WHOLE: Final = "model.safetensors"
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
SAFETENSORS: Final = "safetensors"  # what a name says to get these of a repository with both

# A good size for its quality first, as llama.cpp and the hub's own pages choose.
PREFERENCE: Final = (
    *("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1"),
    *("Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
_SMALL = (
    *(CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("modules.json", "1_Pooling/config.json"),
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_TAG = re.compile(
    r"(?:^|[-_.])(?P<tag>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))$",
    re.IGNORECASE,
)
# GGUF files beside a model that are none themselves: projectors of images, importance matrices.
_COMPANION = re.compile(r"(^|[-_./])(mmproj|imatrix)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository; `digest` is the SHA-256 of a large file, git's SHA-1 of a small."""

    path: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The files of one model, `entry` (None: their folder) being what is loaded.

    `number_format` is the quantization, as far as the names tell. `note` says what was chosen
    where the name left a choice.
    """

    files: tuple[RepoFile, ...]
    entry: str | None
    number_format: str | None
    note: str | None = None


def choose(name: HubName, files: Sequence[RepoFile]) -> Choice:
    """Return what to fetch for `name` of a repository with `files`.

    Of safetensors repositories these are the small files; `shards` adds the weights.

    Raises:
        ModelNotFoundError: nothing there fits the name.
        ModelFormatError: the repository holds no weights that can be read.
    """
    groups = _gguf_groups(files)
    readable = any(file.path in {WHOLE, INDEX} for file in files)
    asked = name.file.lower() if name.file else None
    if asked in {SAFETENSORS, WHOLE, INDEX} or (asked is None and not groups):
        return _folder(name, files)
    if asked is None:
        return _preferred(name, groups, has_safetensors=readable)
    return _named(name, asked, groups)


def shards(choice: Choice, index: Mapping[str, object] | None, files: Sequence[RepoFile]) -> Choice:
    """Add the weights to the small files of a safetensors repository.

    `index` is the content of its index, or None where there is none.
    """
    if index is None:
        wanted = {WHOLE}
    else:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFormatError(f"{INDEX!r} has no weight_map.")
        wanted = {str(value) for value in weight_map.values()}
    known = {file.path: file for file in files if file.path.endswith(".safetensors")}
    if missing := sorted(wanted - known.keys()):
        raise ModelFormatError(f"{INDEX!r} names {missing[0][:80]!r}, which is not there.")
    weights = tuple(known[path] for path in sorted(wanted))
    return Choice((*choice.files, *weights), None, choice.number_format, choice.note)


def quantization(path: str) -> str | None:
    """Return the quantization that a GGUF file's name ends with, in capitals, or None."""
    split = _SPLIT.fullmatch(path)
    stem = split["stem"] if split else path.rsplit(".", 1)[0]
    match = _TAG.search(stem.rsplit("/", 1)[-1])
    return match["tag"].upper() if match else None


@dataclass(frozen=True, slots=True)
class _Group:
    """One GGUF model: a file, or all the parts of a split one."""

    files: tuple[RepoFile, ...]
    whole: bool

    @property
    def path(self) -> str:
        return self.files[0].path

    @property
    def tag(self) -> str | None:
        return quantization(self.path)


def _gguf_groups(files: Sequence[RepoFile]) -> list[_Group]:
    singles, parts = [], dict[tuple[str, str], dict[int, RepoFile]]()
    for file in files:
        if not file.path.lower().endswith(".gguf") or _COMPANION.search(file.path):
            continue
        if split := _SPLIT.fullmatch(file.path):
            parts.setdefault((split["stem"], split["count"]), {})[int(split["part"])] = file
        else:
            singles.append(_Group((file,), whole=True))
    for (_, count), found in parts.items():
        whole = set(found) == set(range(1, int(count) + 1))
        singles.append(_Group(tuple(found[n] for n in sorted(found)), whole))
    return sorted(singles, key=lambda group: group.path)


def _preferred(name: HubName, groups: list[_Group], *, has_safetensors: bool) -> Choice:
    """Of several quantizations take the first that is preferred, and say so."""
    if len(groups) == 1:
        note = f"{name.repo} holds GGUF and safetensors: taking {groups[0].path}."
        return _gguf(groups[0], note if has_safetensors else None)
    for tag in PREFERENCE:
        found = [group for group in groups if group.tag == tag and group.whole]
        if len(found) == 1:
            note = (
                f"{name.repo} holds {len(groups)} GGUF models: taking {tag}; others: "
                f"{_listed(groups, found[0])}."
            )
            return _gguf(found[0], note)
    raise ModelNotFoundError(
        f"{name.repo!r} holds {len(groups)} GGUF models: name one, such as "
        f"'hf:{name.repo}:{groups[0].path}'; others: {_listed(groups, groups[0])}."
    )


def _named(name: HubName, asked: str, groups: list[_Group]) -> Choice:
    for group in groups:
        if asked in {file.path.lower() for file in group.files}:
            return _gguf(group, None)
    exact = [group for group in groups if (group.tag or "").lower() == asked]
    by_stem = [g for g in groups if g.path.rsplit("/", 1)[-1].lower() in {asked, f"{asked}.gguf"}]
    found = exact or by_stem
    if len(found) == 1:
        return _gguf(found[0], None)
    if found:
        raise ModelNotFoundError(
            f"{name.file!r} fits {len(found)} models of {name.repo!r}: name one of "
            f"{', '.join(group.path for group in found[:6])}."
        )
    if not groups:
        raise ModelNotFoundError(
            f"{name.repo!r} holds no GGUF file, and so no {name.file!r}: name it 'hf:{name.repo}'."
        )
    known = [tag for group in groups for tag in (group.tag, group.path) if tag]
    raise ModelNotFoundError(
        f"{name.repo!r} holds no {name.file!r}: there are {_listed(groups)}."
        f"{nearest(name.file or '', known)}"
    )


def _gguf(group: _Group, note: str | None) -> Choice:
    if not group.whole:
        raise ModelNotFoundError(
            f"{group.path!r} is one of several parts, and not all of them are in the repository."
        )
    return Choice(group.files, group.path, group.tag or "GGUF", note)


def _listed(groups: list[_Group], but: _Group | None = None) -> str:
    names = dict.fromkeys(group.tag or group.path for group in groups if group is not but)
    shown = ", ".join(list(names)[:12])
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown


def _folder(name: HubName, files: Sequence[RepoFile]) -> Choice:
    known = {file.path: file for file in files}
    if WHOLE not in known and INDEX not in known:
        raise ModelFormatError(f"{name.repo!r} {_why_unreadable(known)}. Nothing was fetched.")
    for needed in (CONFIG, TOKENIZER):
        if needed not in known:
            raise ModelFormatError(
                f"{name.repo!r} holds no {needed}, without which its weights cannot be used. "
                "Nothing was fetched."
            )
    small = [known[path] for path in _SMALL if path in known]
    if INDEX in known:
        small.append(known[INDEX])
    return Choice(tuple(small), None, SAFETENSORS)


def _why_unreadable(known: Mapping[str, RepoFile]) -> str:
    if "adapter_config.json" in known:
        return "holds an adapter to another model, not a model"
    if any(path.endswith((".bin", ".pt", ".pth", ".ckpt")) for path in known):
        return (
            "holds only PyTorch checkpoints, which can run code when they are opened: look for "
            "a version in safetensors or GGUF"
        )
    return "holds neither a GGUF file nor model.safetensors"
