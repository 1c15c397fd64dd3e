"""Reads safetensors files, single or sharded, as hostile input; writes single ones.

Source: the safetensors format description (safetensors repository, README "Format"): 8 bytes of
header length, a JSON header of name to dtype, shape and offsets, then the data without holes.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import msgspec

from twostroke.core.errors import ModelFormatError
from twostroke.core.files import read_small_file
from twostroke.quant import FORMATS, QuantTensor
from twostroke.weights.mapping import MappedFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.quant import Format

    T = TypeVar("T")

MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_SHARDS = 1 << 10
_ALIGNMENT = 8  # bytes of a header that is written

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

_DTYPES = {name: FORMATS[name] for name in ("F32", "F16", "BF16")}


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """The tensors of one file, or of all shards, under their own names.

    `unsupported` names the dtype of each tensor that no format here can read.
    """

    mappings: tuple[MappedFile, ...]
    tensors: Mapping[str, QuantTensor]
    unsupported: Mapping[str, str]


class _Entry(msgspec.Struct, frozen=True):
    """An entry of a header; msgspec checks its types and bounds."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


class _Index(msgspec.Struct, frozen=True):
    """The file that tells in which file each tensor of a sharded model is."""

    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


def read_safetensors(path: Path) -> SafetensorsFiles:
    """Map one file and read its header.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it is not a whole and sound safetensors file.
    """
    mapping = MappedFile(path)
    entries, start = _read_header(mapping)
    _check_cover(mapping, entries, mapping.size - start)
    tensors: dict[str, QuantTensor] = {}
    unsupported: dict[str, str] = {}
    for name, entry in entries.items():
        fmt = _DTYPES.get(entry.dtype)
        if fmt is None:
            unsupported[name] = entry.dtype
        else:
            tensors[name] = _tensor(mapping, name, fmt, entry, start)
    return SafetensorsFiles((mapping,), tensors, unsupported)


def read_sharded(index: Path) -> SafetensorsFiles:
    """Read all files that a `model.safetensors.index.json` names; errors as `read_safetensors`."""
    weight_map = _decode(read_small_file(index), _Index, index.name).weight_map
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise _damaged(index.name, f"it names {len(names)} files, the limit is {MAX_SHARDS}")
    shards: dict[str, SafetensorsFiles] = {}
    for name in names:
        # An index must not lead out of its folder.
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise _damaged(index.name, f"{name[:80]!r} is not the name of a .safetensors file")
        if not index.with_name(name).is_file():
            raise ModelFormatError(f"{index.name!r} names {name!r}, which does not exist.")
        shards[name] = read_safetensors(index.with_name(name))
    tensors: dict[str, QuantTensor] = {}
    unsupported: dict[str, str] = {}
    for name, shard in shards.items():
        for tensor in (*shard.tensors, *shard.unsupported):
            if tensor in tensors or tensor in unsupported:
                raise _damaged(name, f"tensor {tensor[:80]!r} is in another file, too")
        tensors |= shard.tensors
        unsupported |= shard.unsupported
    if missing := sorted(weight_map.keys() - tensors.keys() - unsupported.keys()):
        raise _damaged(weight_map[missing[0]], f"it lacks tensor {missing[0][:80]!r}")
    mappings = tuple(mapping for shard in shards.values() for mapping in shard.mappings)
    return SafetensorsFiles(mappings, tensors, unsupported)


def write_safetensors(path: Path, tensors: Mapping[str, QuantTensor]) -> None:
    """Write tensors in float32, float16 or bfloat16; OSError if they cannot be written."""
    entries: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.num_bytes
        entries[name] = {
            "dtype": tensor.format.name,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for tensor in tensors.values():
                file.write(tensor.data.tobytes())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _damaged(name: str, fault: str) -> ModelFormatError:
    return ModelFormatError(f"{name!r} is damaged: {fault}.")


def _decode(raw: bytes, kind: type[T], name: str) -> T:
    """Decode JSON of the type `kind`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _damaged(name, f"its JSON is wrong ({reason})") from None


def _read_header(mapping: MappedFile) -> tuple[dict[str, _Entry], int]:
    """Return the entries of the header, and where the data starts."""
    name = mapping.path.name
    length = int.from_bytes(mapping.buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelFormatError(
            f"{name!r} is damaged or not a safetensors file: its header would have {length} bytes, "
            f"the limit is {MAX_HEADER_BYTES}."
        )
    start = 8 + length
    if start > mapping.size:
        raise ModelFormatError(
            f"{name!r} is truncated: its header ends at {start}, the file at {mapping.size}."
        )
    header = _decode(mapping.buffer[8:start], dict[str, msgspec.Raw], name)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _damaged(name, f"it has {len(header)} tensors, the limit is {MAX_TENSORS}")
    return {key: _decode(bytes(raw), _Entry, name) for key, raw in header.items()}, start


def _tensor(mapping: MappedFile, name: str, fmt: Format, entry: _Entry, start: int) -> QuantTensor:
    """Return a view of the tensor's data; data starts at `start` in the file."""
    num_values = prod(entry.shape)
    begin, end = entry.data_offsets
    if not entry.shape or not num_values or fmt.num_bytes(num_values) != end - begin:
        raise _damaged(
            mapping.path.name,
            f"tensor {name[:80]!r} has the shape {list(entry.shape)} and {end - begin} bytes",
        )
    data = mapping.view(start + begin, end - begin).reshape(prod(entry.shape[:-1]), -1)
    return QuantTensor(fmt, entry.shape, data)


def _check_cover(mapping: MappedFile, entries: Mapping[str, _Entry], num_bytes: int) -> None:
    """Check that tensors cover the data once: a gap could hide data, an overlap share it."""
    covered = 0
    for begin, end in sorted(entry.data_offsets for entry in entries.values()):
        if begin != covered or end < begin:
            raise _damaged(mapping.path.name, f"its tensors overlap or leave a gap at {covered}")
        covered = end
    if covered > num_bytes:
        raise ModelFormatError(
            f"{mapping.path.name!r} is truncated: its tensors need {covered} bytes, it has "
            f"{num_bytes}."
        )
    if covered < num_bytes:
        raise _damaged(mapping.path.name, f"{num_bytes - covered} bytes follow the last tensor")
