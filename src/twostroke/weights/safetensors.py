"""safetensors files, single or sharded, read as hostile input.

Source: the safetensors format description (safetensors repository, README "Format"): 8 bytes of
header length, a JSON header of name to dtype, shape and offsets, then the data without holes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError
from twostroke.core.files import parse_json, read_json
from twostroke.quant import FORMATS, QuantTensor
from twostroke.weights.mapping import MappedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from twostroke.quant import Format

MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_SHARDS = 1 << 10

_DTYPES = {name: FORMATS[name] for name in ("F32", "F16", "BF16")}


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """The tensors of one file, or of all shards, under their own names.

    `unsupported` names the dtype of each tensor that no format here can read.
    """

    mappings: tuple[MappedFile, ...]
    tensors: Mapping[str, QuantTensor]
    unsupported: Mapping[str, str]


def read_safetensors(path: Path) -> SafetensorsFiles:
    """Map one file and read its header.

    Raises ModelNotFoundError if there is no such file, and ModelFormatError, naming the file and
    the fault, if it is not a whole and sound safetensors file.
    """
    mapping = MappedFile(path)
    header, start = _header(mapping)
    tensors: dict[str, QuantTensor] = {}
    unsupported: dict[str, str] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(mapping, name, entry)
        spans.append((begin, end, name))
        fmt = _DTYPES.get(dtype)
        if fmt is None:
            unsupported[name] = dtype
        else:
            tensors[name] = _tensor(mapping, name, fmt, shape, (start + begin, start + end))
    _check_spans(mapping, sorted(spans), mapping.size - start)
    return SafetensorsFiles((mapping,), tensors, unsupported)


def read_sharded(index: Path) -> SafetensorsFiles:
    """Read all files that a `model.safetensors.index.json` names; errors as `read_safetensors`."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise _fault(index.name, "is damaged: weight_map does not map names to files")
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise _fault(index.name, f"names {len(names)} files, the limit is {MAX_SHARDS}")
    shards: dict[str, SafetensorsFiles] = {}
    for name in names:
        # An index must not lead out of its folder.
        if not name.endswith(".safetensors") or "/" in name or "\\" in name or "\0" in name:
            raise _fault(index.name, f"is damaged: {name[:80]!r} is not a .safetensors file name")
        path = index.with_name(name)
        if not path.is_file():
            raise _fault(index.name, f"names the file {name!r}, which is missing")
        shards[name] = read_safetensors(path)
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors and tensor not in shards[name].unsupported:
            raise _fault(name, f"lacks tensor {tensor[:80]!r}, which {index.name!r} promises")
    return SafetensorsFiles(
        tuple(mapping for shard in shards.values() for mapping in shard.mappings),
        _merged(shard.tensors for shard in shards.values()),
        _merged(shard.unsupported for shard in shards.values()),
    )


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in merged:
                raise ModelFormatError(f"Tensor {name[:80]!r} lies in more than one shard.")
            merged[name] = value
    return merged


def _fault(name: str, text: str) -> ModelFormatError:
    return ModelFormatError(f"{name!r} {text}.")


def _header(mapping: MappedFile) -> tuple[dict[str, Any], int]:
    """Return the header without its free-form part, and where the data starts."""
    name = mapping.path.name
    if mapping.size < 8:
        raise _fault(name, f"is truncated: it has {mapping.size} bytes, the header length needs 8")
    (length,) = struct.unpack_from("<Q", mapping.buffer)
    if length > MAX_HEADER_BYTES:
        raise _fault(
            name,
            f"is not a safetensors file or is damaged: its header would have {length} bytes, "
            f"the limit is {MAX_HEADER_BYTES}",
        )
    if length > mapping.size - 8:
        raise _fault(
            name, f"is truncated: its header needs {length} bytes, the file has {mapping.size}"
        )
    header = parse_json(mapping.buffer[8 : 8 + length], name)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _fault(name, f"has {len(header)} tensors, the limit is {MAX_TENSORS}")
    return header, 8 + length


def _entry(mapping: MappedFile, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Check an entry's form and return dtype, shape, and begin and end within the data."""
    file = mapping.path.name
    if not isinstance(entry, dict):
        raise _fault(file, f"is damaged: the entry of tensor {name[:80]!r} is not an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets)):
        raise _fault(
            file, f"is damaged: tensor {name[:80]!r} lacks a proper dtype, shape or data_offsets"
        )
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _fault(file, f"is damaged: tensor {name[:80]!r} has data_offsets out of order")
    return dtype[:16], tuple(shape), offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _tensor(
    mapping: MappedFile, name: str, fmt: Format, shape: tuple[int, ...], span: tuple[int, int]
) -> QuantTensor:
    file, shown = mapping.path.name, name[:80]
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not 0 < prod(shape) < 1 << 63:
        raise _fault(file, f"is damaged: tensor {shown!r} has the shape {list(shape[:8])}")
    begin, end = span
    needed = fmt.num_bytes(prod(shape))
    if needed != end - begin:
        raise _fault(
            file,
            f"is damaged: tensor {shown!r} needs {needed} bytes for its shape, "
            f"its data_offsets hold {end - begin}",
        )
    if end > mapping.size:
        raise _fault(
            file,
            f"is truncated: tensor {shown!r} needs {needed} bytes at offset {begin}, "
            f"the file has {mapping.size}",
        )
    data = mapping.view(begin, needed).reshape(prod(shape[:-1]), -1)
    return QuantTensor(fmt, shape, data)


def _check_spans(mapping: MappedFile, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The data must be covered once: a hole could hide something, an overlap alias two weights."""
    covered, previous = 0, ""
    for begin, end, name in spans:
        if begin < covered:
            raise _fault(
                mapping.path.name,
                f"is damaged: tensors {previous[:80]!r} and {name[:80]!r} overlap",
            )
        if begin > covered:
            raise _fault(
                mapping.path.name, f"is damaged: bytes {covered} to {begin} belong to no tensor"
            )
        covered, previous = end, name
    if covered > data_bytes:
        raise _fault(
            mapping.path.name,
            f"is truncated: its tensors need {covered} bytes, it holds {data_bytes}",
        )
    if covered < data_bytes:
        raise _fault(
            mapping.path.name, f"is damaged: {data_bytes - covered} bytes follow the last tensor"
        )
