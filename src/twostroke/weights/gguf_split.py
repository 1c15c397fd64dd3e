"""Reads a GGUF model that is split into several files.

Source: llama.cpp's `gguf-split` and its loader. Parts are named `model-00001-of-00003.gguf`. Each
has its index from 0 in `split.no`, the number of parts in `split.count` (0 in a file that was
merged again), and the number of all tensors in `split.tensors.count`. All other metadata is in the
first part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelNotFoundError
from twostroke.models.fields import Fields
from twostroke.weights.gguf import MAX_TENSORS, read_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.quant import QuantTensor
    from twostroke.weights.gguf import GgufFile, Metadata
    from twostroke.weights.mapping import MappedFile

MAX_PARTS = 1 << 10

_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufModelFiles:
    """The metadata of a model's first or only file, and the tensors of all of them.

    `unsupported` names the type of each tensor that no format here can read.
    """

    mappings: tuple[MappedFile, ...]
    metadata: Metadata
    tensors: Mapping[str, QuantTensor]
    unsupported: Mapping[str, str]


def first_part(path: Path) -> Path:
    """Return the first part of a split model by the name of one of its parts, or `path` itself."""
    named = _PART.fullmatch(path.name)
    return (
        path if named is None else path.with_name(f"{named['stem']}-00001-of-{named['count']}.gguf")
    )


def model_stem(path: Path) -> str:
    """Return the model's name: the file's name without part number and suffix."""
    named = _PART.fullmatch(path.name)
    return path.stem if named is None else named["stem"]


def read_gguf_parts(path: Path) -> GgufModelFiles:
    """Map a GGUF file and, if it is the first of several, all the others next to it.

    Raises:
        ModelNotFoundError: one of the files is missing.
        ModelFormatError: a file is damaged, `path` is not the first part, or the parts do not
            belong together.
    """
    first = read_gguf(path)
    fields = Fields(path.name, first.metadata)
    count = fields.integer("split.count", MAX_PARTS, low=0, default=0)
    if count < 2:
        return GgufModelFiles((first.mapping,), first.metadata, first.tensors, first.unsupported)
    number = fields.integer("split.no", count - 1, low=0)
    named = _PART.fullmatch(path.name)
    stem = "model" if named is None else named["stem"]
    names = [f"{stem}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    if number != 0:
        fields.fault(f"is part {number + 1} of {count}: name the first part, {names[0]!r}")
    if path.name != names[0]:
        fields.fault(f"is the first of {count} parts: rename it to {names[0]!r}")
    parts = [first]
    for name in names[1:]:
        if not path.with_name(name).exists():
            raise ModelNotFoundError(
                f"{path.name!r} is the first of {count} parts, and {name!r} is missing."
            )
        parts.append(read_gguf(path.with_name(name)))
    for index, part in enumerate(parts):
        _check_place(part, index, count)
    return _joined(parts, fields)


def _check_place(part: GgufFile, index: int, count: int) -> None:
    fields = Fields(part.mapping.path.name, part.metadata)
    place = fields.integer("split.no", MAX_PARTS, low=0) + 1
    of = fields.integer("split.count", MAX_PARTS, low=0)
    if (place, of) != (index + 1, count):
        fields.fault(f"says that it is part {place} of {of}, not part {index + 1} of {count}")


def _joined(parts: list[GgufFile], fields: Fields) -> GgufModelFiles:
    """Join the parts' tensors; `fields` are the first part's."""
    tensors: dict[str, QuantTensor] = {}
    unsupported: dict[str, str] = {}
    owners: dict[str, str] = {}
    for part in parts:
        file = part.mapping.path.name
        for name in (*part.tensors, *part.unsupported):
            if name in owners:
                fields.fault(f"is damaged: tensor {name!r} is in {owners[name]!r} and in {file!r}")
            owners[name] = file
        tensors |= part.tensors
        unsupported |= part.unsupported
    expected = fields.integer("split.tensors.count", MAX_TENSORS, low=0)
    if expected != len(owners):
        fields.fault(f"should have {expected} tensors, its {len(parts)} parts have {len(owners)}")
    mappings = tuple(part.mapping for part in parts)
    return GgufModelFiles(mappings, parts[0].metadata, tensors, unsupported)
