"""Reads a GGUF model that is split into several files.

Source: llama.cpp's `gguf-split` and its loader. Parts are named `model-00001-of-00003.gguf`. Each
part has its index from 0 in `split.no`, the number of parts in `split.count` (0 in a file that was
merged from parts), and the number of tensors of all parts in `split.tensors.count`. All other
metadata is in the first part.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelNotFoundError
from twostroke.core.message_text import counted_noun
from twostroke.model.families.fields import Fields
from twostroke.model.weights.gguf import read_gguf
from twostroke.model.weights.tensors import join_files

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.weights.tensors import WeightFiles

MAX_PARTS = 1 << 10

_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def first_part(path: Path) -> Path:
    """Return the path of the first file of a split GGUF model, given any of its files.

    Other paths are returned unchanged.
    """
    part = _PART.fullmatch(path.name)
    return path if part is None else path.with_name(_part_name(part["stem"], 0, int(part["count"])))


def model_stem(path: Path) -> str:
    """Return a GGUF model's name: the file's name without part number and suffix."""
    part = _PART.fullmatch(path.name)
    return path.stem if part is None else part["stem"]


def read_gguf_parts(path: Path) -> WeightFiles:
    """Map a GGUF file and, if it is the first of several parts, the other parts next to it.

    Raises:
        ModelNotFoundError: one of the files is missing.
        ModelFormatError: a file is damaged, `path` is not the first part, or the parts do not
            belong together.
    """
    first = read_gguf(path)
    fields = Fields(path.name, first.metadata)
    count = fields.integer("split.count", MAX_PARTS, low=0, default=0)
    if count < 2:
        return first
    names = [_part_name(model_stem(path), index, count) for index in range(count)]
    if path.name != names[0]:
        index = fields.integer("split.no", count - 1, low=0)
        advice = f"name the first part, {names[0]!r}"
        if path.name != names[index]:
            advice = f"it needs its original name, which ends with {_part_name('', index, count)!r}"
        fields.fault(f"is part {index + 1} of {count}: {advice}")
    parts = [first]
    for name in names[1:]:
        if not path.with_name(name).exists():
            raise ModelNotFoundError(
                f"{path.name!r} is the first of {counted_noun(count, 'part')}, and {name!r} is "
                "missing."
            )
        parts.append(read_gguf(path.with_name(name)))
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        part_fields = Fields(name, part.metadata)
        stored_index = part_fields.integer("split.no", MAX_PARTS, low=0)
        stored_count = part_fields.integer("split.count", MAX_PARTS)
        if (stored_index, stored_count) != (index, count):
            part_fields.fault(
                f"says that it is part {stored_index + 1} of {stored_count}, not {index + 1}"
            )
    model_files = join_files(parts)
    if fields.value("split.tensors.count") != model_files.num_tensors:
        problem = (
            f"but its {counted_noun(count, 'part has', 'parts have')} "
            f"{counted_noun(model_files.num_tensors, 'tensor')}"
        )
        fields.refuse("split.tensors.count", problem)
    return model_files


def _part_name(stem: str, index: int, count: int) -> str:
    return f"{stem}-{index + 1:05}-of-{count:05}.gguf"
