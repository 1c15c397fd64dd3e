"""The tensors of weight files: checks a file's table of tensors and maps them as views."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import field

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.model.quant import Format
    from twostroke.model.weights.mapping import MappedFile

_MAX_VALUES = 1 << 63


class TensorEntry(Frozen):
    """A tensor's entry in a weight file's table: name, type, shape and position of its values.

    The values begin at byte `start` of the file. `dtype` is the file's name of the number format;
    `format` is None if it is not supported. The shape is row-major.
    """

    name: str
    dtype: str
    format: Format | None
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int | None:
        """Return the size of the tensor's values in bytes; None if its format is not supported."""
        if self.format is None:
            return None
        return self.format.block_bytes * prod(self.shape) // self.format.block_size

    @property
    def quoted_name(self) -> str:
        """Return the tensor's name in quotes, for error messages."""
        return f"tensor {self.name[:80]!r}"


class StoredArray(Frozen, eq=False):
    """A tensor of integers, or of 8-bit floats as uint8, in a safetensors file.

    `dtype` is the file's name of the type.
    """

    dtype: str
    values: NDArray[Any]


class WeightFiles(Frozen):
    """The tensors of a weight file, or of all files of a model, by their names in the files.

    Tensors are views into `mappings`. `unsupported` maps each tensor whose format is not supported
    to its type. Some of these are parts of quantized weights in safetensors files; they are also in
    `arrays`. `metadata` is the metadata of a GGUF file, and empty for safetensors.
    """

    mappings: tuple[MappedFile, ...]
    tensors: Mapping[str, QuantTensor]
    unsupported: Mapping[str, str]
    metadata: Mapping[str, Any]
    arrays: Mapping[str, StoredArray] = field(default_factory=dict)

    @property
    def num_tensors(self) -> int:
        """Return the number of tensors in the files, supported or not."""
        return len(self.tensors) + len(self.unsupported)


def map_tensors(
    mapping: MappedFile, entries: Sequence[TensorEntry], metadata: Mapping[str, Any]
) -> WeightFiles:
    """Check a weight file's table of tensors, and return the tensors as views of the file.

    Raises ModelFormatError if a tensor has incomplete blocks, leads out of the file or overlaps
    another tensor.
    """
    tensors: dict[str, QuantTensor] = {}
    spans = []
    for entry in entries:
        num_bytes = entry.num_bytes
        if entry.format is None or num_bytes is None:
            continue
        if not entry.shape or not 0 < prod(entry.shape) < _MAX_VALUES:
            raise mapping.fault(
                f"is damaged: {entry.quoted_name} has the shape {list(entry.shape)}"
            )
        if entry.shape[-1] % entry.format.block_size:
            raise mapping.fault(
                f"is damaged: {entry.quoted_name} has rows of "
                f"{counted_noun(entry.shape[-1], 'value')}, not a multiple of "
                f"{entry.format.name}'s {entry.format.block_size}"
            )
        if num_bytes > mapping.size - entry.start:
            raise mapping.fault(
                f"is truncated: {entry.quoted_name} needs {counted_noun(num_bytes, 'byte')} at "
                f"offset {entry.start}, the file has {mapping.size}"
            )
        data = mapping.view(entry.start, num_bytes).reshape(prod(entry.shape[:-1]), -1)
        tensors[entry.name] = QuantTensor(entry.format, entry.shape, data)
        spans.append((entry.start, entry.start + num_bytes, entry.quoted_name))
    for (_, end, first_name), (start, _, second_name) in pairwise(sorted(spans)):
        if start < end:
            raise mapping.fault(f"is damaged: {first_name} and {second_name} overlap")
    unsupported = {entry.name: entry.dtype for entry in entries if entry.format is None}
    return WeightFiles((mapping,), tensors, unsupported, metadata)


def join_files(parts: Sequence[WeightFiles]) -> WeightFiles:
    """Join the tensors of all files of a model, with the metadata of the first file.

    Raises ModelFormatError if two files have the same tensor.
    """
    tensors: dict[str, QuantTensor] = {}
    unsupported: dict[str, str] = {}
    arrays: dict[str, StoredArray] = {}
    for part in parts:
        for name in (*part.tensors, *part.unsupported):
            if name in tensors or name in unsupported:
                raise part.mappings[0].fault(
                    f"is damaged: tensor {name[:80]!r} is in another file, too"
                )
        tensors |= part.tensors
        unsupported |= part.unsupported
        arrays |= part.arrays
    mappings = tuple(mapping for part in parts for mapping in part.mappings)
    return WeightFiles(mappings, tensors, unsupported, parts[0].metadata, arrays)


def check_shapes(
    file: str,
    tensors: Mapping[str, QuantTensor],
    shapes: Mapping[str, tuple[int, ...]],
    reader: str,
    quote: Callable[[str], str] = repr,
) -> None:
    """Check that a file has exactly the tensors that a model reads, with the right shapes.

    `shapes` are these shapes by name. `reader` names the model or its family in the errors, and
    `quote` formats a tensor's name. An unknown tensor is refused because results without it would
    be wrong. Raises ModelFormatError.
    """
    unknown = sorted(tensors.keys() - shapes.keys())
    for name, shape in shapes.items():
        if name not in tensors:
            advice = f"; it has {quote(unknown[0])}, which is not one of them" if unknown else ""
            raise ModelFormatError(
                f"{file!r} lacks tensor {quote(name)} with shape {shape}, which {reader} "
                f"reads{advice}."
            )
        if tensors[name].shape != shape:
            raise ModelFormatError(
                f"{file!r} has tensor {quote(name)} with shape {tensors[name].shape}; {reader} "
                f"reads {shape}."
            )
    if unknown:
        raise ModelFormatError(
            f"{file!r} has tensor {quote(unknown[0])}, which {reader} does not "
            "read: results without it would be wrong."
        )


def refuse_unsupported(file: str, unsupported: Mapping[str, str]) -> None:
    """Raise ModelFormatError if a model file has a tensor in an unsupported number format."""
    for name, dtype in unsupported.items():
        raise ModelFormatError(
            f"{file!r} has tensor {name[:80]!r} of type {dtype}, which is not supported yet; "
            f"supported: {', '.join(FORMATS)}."
        )
