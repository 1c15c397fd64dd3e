"""Reads safetensors files, single or sharded, as untrusted input; writes single files.

Source: the safetensors format description (safetensors repository, README "Format"): 8 bytes with
the header's length, a JSON header that maps a name to dtype, shape and offsets, then the data
without gaps.
"""

from __future__ import annotations

import json
import struct
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError
from twostroke.core.files import read_small_file
from twostroke.core.message_text import counted_noun
from twostroke.model.quant import FORMATS
from twostroke.model.weights.mapping import MappedFile
from twostroke.model.weights.tensors import (
    StoredArray,
    TensorEntry,
    WeightFiles,
    join_files,
    map_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.model.quant import QuantTensor

    T = TypeVar("T")

MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
_ALIGNMENT = 8  # of a written header's length, in bytes

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# An index must not name files outside of its folder.
_ShardName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^/\\\0]+\.safetensors\Z")]

_DTYPES = {name: FORMATS[name] for name in ("F32", "F16", "BF16")}
# NumPy types for parts of quantized weights.
_ARRAYS: dict[str, type[np.generic]] = {
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}


class _Entry(msgspec.Struct, frozen=True):
    """A tensor's entry in a safetensors header; msgspec checks its types and bounds."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


class _ShardIndex(msgspec.Struct, frozen=True):
    """The index of a sharded safetensors model: the file of each tensor."""

    weight_map: Annotated[dict[str, _ShardName], msgspec.Meta(min_length=1)]


def read_safetensors(path: Path) -> WeightFiles:
    """Map a safetensors file into memory and read its header.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: the file is not a complete and valid safetensors file.
    """
    mapping = MappedFile(path)
    header, start = _read_header(mapping)
    _check_cover(mapping, header, mapping.size - start)
    entries = []
    for name, header_entry in header.items():
        begin, end = header_entry.data_offsets
        shape = header_entry.shape or (1,)  # a single value
        entry = TensorEntry(
            name, header_entry.dtype, _DTYPES.get(header_entry.dtype), shape, start + begin
        )
        if entry.num_bytes not in {None, end - begin}:
            raise mapping.fault(
                f"is damaged: {entry.quoted_name} has the shape {[*entry.shape]} and "
                f"{counted_noun(end - begin, 'byte')}"
            )
        entries.append(entry)
    files = map_tensors(mapping, entries, {})
    arrays = {
        entry.name: _stored_array(mapping, entry, header[entry.name])
        for entry in entries
        if entry.dtype in _ARRAYS
    }
    return replace(files, arrays=arrays)


def read_sharded(index: Path) -> WeightFiles:
    """Read all safetensors files that a `model.safetensors.index.json` names.

    Raises the errors of `read_safetensors`.
    """
    weight_map = decode_json(read_small_file(index), _ShardIndex, index.name).weight_map
    names = sorted(set(weight_map.values()))
    files = join_files([read_safetensors(index.with_name(name)) for name in names])
    if missing := sorted(weight_map.keys() - files.tensors.keys() - files.unsupported.keys()):
        raise ModelFormatError(
            f"{weight_map[missing[0]]!r} lacks tensor {missing[0][:80]!r}, which {index.name!r} "
            "says it has."
        )
    return files


def write_safetensors(path: Path, tensors: Mapping[str, QuantTensor | StoredArray]) -> None:
    """Write tensors to a safetensors file, atomically.

    The tensors must be float32, float16, bfloat16 or integers. Raises OSError on failure.
    """
    entries: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        values, dtype, shape = _values_type_shape(tensor)
        end = begin + values.nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    unfinished_path = path.with_name(f".{path.name}.part")
    try:
        with unfinished_path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for tensor in tensors.values():
                file.write(_values_type_shape(tensor)[0].tobytes())
        unfinished_path.replace(path)
    finally:
        unfinished_path.unlink(missing_ok=True)


def _values_type_shape(tensor: QuantTensor | StoredArray) -> tuple[NDArray[Any], str, list[int]]:
    """Return a tensor's values (or bytes), type name and shape, as safetensors stores them."""
    if isinstance(tensor, StoredArray):
        return tensor.values, tensor.dtype, list(tensor.values.shape)
    return tensor.data, tensor.format.name, list(tensor.shape)


def decode_json(raw: bytes | msgspec.Raw, kind: type[T], name: str) -> T:
    """Decode JSON to a value of type `kind`, which declares its bounds with `msgspec.Meta`.

    Raises ModelFormatError about the file `name` if the JSON has other types or is out of bounds.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelFormatError(f"{name!r} is damaged: its JSON is wrong ({reason}).") from None


def _stored_array(mapping: MappedFile, entry: TensorEntry, header_entry: _Entry) -> StoredArray:
    """Return a view of a safetensors tensor of integers or 8-bit floats."""
    begin, end = header_entry.data_offsets
    dtype = np.dtype(_ARRAYS[entry.dtype])
    if prod(entry.shape) * dtype.itemsize != end - begin:
        raise mapping.fault(
            f"is damaged: {entry.quoted_name} has the shape {[*header_entry.shape]} and "
            f"{counted_noun(end - begin, 'byte')}"
        )
    view = mapping.view(entry.start, end - begin)
    if entry.start % dtype.itemsize:  # data may begin at any offset
        view = view.copy()
    return StoredArray(entry.dtype, view.view(dtype).reshape(entry.shape))


def _read_header(mapping: MappedFile) -> tuple[dict[str, _Entry], int]:
    """Return the entries of a safetensors header by tensor name, and the offset of the data."""
    start = 8 + int.from_bytes(mapping.buffer[:8], "little")
    if start > mapping.size and start - 8 <= MAX_HEADER_BYTES:
        raise mapping.fault(f"is truncated: its header ends at {start}, the file at {mapping.size}")
    if start > mapping.size:
        reason = f"its header would end at {start}, the file ends at {mapping.size}"
        raise mapping.wrong_kind("safetensors", reason)
    if start - 8 > MAX_HEADER_BYTES:
        raise mapping.fault(
            f"has a header of {counted_noun(start - 8, 'byte')}, the limit is {MAX_HEADER_BYTES}"
        )
    header = decode_json(mapping.buffer[8:start], dict[str, msgspec.Raw], mapping.name)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise mapping.fault(
            f"has {counted_noun(len(header), 'tensor')}, the limit is {MAX_TENSORS}"
        )
    return {key: decode_json(raw, _Entry, mapping.name) for key, raw in header.items()}, start


def _check_cover(mapping: MappedFile, header: Mapping[str, _Entry], num_bytes: int) -> None:
    """Check that a safetensors file's tensors cover its data without overlaps and gaps.

    Gaps could hide data.
    """
    covered = 0
    for begin, end in sorted(entry.data_offsets for entry in header.values()):
        if begin != covered or end < begin:
            raise mapping.fault(f"is damaged: its tensors overlap or leave a gap at {covered}")
        covered = end
    if covered != num_bytes:
        kind = "truncated" if covered > num_bytes else "damaged"
        raise mapping.fault(
            f"is {kind}: its tensors have {counted_noun(covered, 'byte')}, its data {num_bytes}"
        )
