"""Reads GGUF files (versions 2 and 3, little-endian), and checks them as hostile input.

Source: the GGUF specification (ggml repository, docs/gguf.md). For any bytes, the result is a
`GgufFile` or a `ModelFormatError`, in time and memory linear in the file's size.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from twostroke.core.errors import ModelFormatError
from twostroke.quant import FORMATS_BY_GGUF_ID, UNSUPPORTED_GGUF_TYPES, QuantTensor
from twostroke.weights.mapping import MappedFile
from twostroke.weights.strings import Strings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the specification's own limit
MAX_NAME_BYTES = 256  # the specification says 64; some writers exceed it
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 24
MAX_NESTED_ITEMS = 1 << 16
MAX_NESTING = 3
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9
_BOOL = 7

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

Value: TypeAlias = "bool | int | float | str | list[Value] | Strings"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The content of a GGUF file.

    `tensors` are views into the mapped file, their shapes row-major (GGUF's own order reversed).
    `unsupported` names the type of each tensor that no format here can read.
    """

    mapping: MappedFile
    metadata: Metadata
    tensors: Mapping[str, QuantTensor]
    unsupported: Mapping[str, str]


def read_gguf(path: Path) -> GgufFile:
    """Map the file at `path` and read its metadata and its table of tensors.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it is not a whole and sound GGUF file.
    """
    mapping = MappedFile(path)
    reader = _Reader(mapping)
    num_tensors, num_keys = reader.header()
    metadata = Metadata(mapping, reader.keys(num_keys))
    infos = reader.tensor_infos(num_tensors)
    tensors, unsupported = _tensors(reader, infos, _alignment(reader, metadata))
    return GgufFile(mapping, metadata, MappingProxyType(tensors), MappingProxyType(unsupported))


@dataclass(frozen=True, slots=True)
class GgufPeek:
    """The family of a GGUF file, and the number formats in it that are not supported."""

    architecture: str
    unsupported: tuple[str, ...]


def peek_gguf(path: Path) -> GgufPeek | None:
    """Read the beginning of a file; None if it is too short to tell.

    Raises ModelFormatError if it is not the beginning of a GGUF file.
    """
    mapping = MappedFile(path)
    reader = _Reader(mapping)
    try:
        num_tensors, num_keys = reader.header()
        metadata = Metadata(mapping, reader.keys(num_keys))
        kinds = {info.kind for info in reader.tensor_infos(num_tensors)}
    except ModelFormatError:
        if reader.position < 8:  # magic number and version are wrong
            raise
        return None
    unknown = sorted(kinds - FORMATS_BY_GGUF_ID.keys())
    names = tuple(UNSUPPORTED_GGUF_TYPES.get(kind, f"type {kind}") for kind in unknown)
    return GgufPeek(str(metadata.get("general.architecture", "")), names)


class Metadata(Mapping[str, Value]):
    """A file's keys and values; an array is decoded each time it is read."""

    __slots__ = ("_mapping", "_values")

    def __init__(self, mapping: MappedFile, values: dict[str, Value | _Items]) -> None:
        self._mapping = mapping
        self._values = values

    def __getitem__(self, key: str) -> Value:
        value = self._values[key]
        return value.decode(self._mapping) if isinstance(value, _Items) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True)
class _Items:
    """An array that is checked but not decoded.

    For strings, `starts` has the offset of each, and of the one that would come next.
    """

    kind: int
    start: int
    count: int
    starts: array[int] | None = None

    def decode(self, mapping: MappedFile) -> list[Value] | Strings:
        if self.starts is not None:
            return Strings(mapping, self.starts)
        dtype = np.dtype(_SCALARS[self.kind])
        items = mapping.view(self.start, self.count * dtype.itemsize).view(dtype)
        values: list[Value] = items.tolist()
        return values


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Reader:
    """A position in the file that moves forward, never past the end."""

    def __init__(self, mapping: MappedFile) -> None:
        self.mapping = mapping
        self.size = mapping.size
        self.position = 0
        self.where = "the header"

    def fault(self, text: str) -> ModelFormatError:
        return ModelFormatError(f"{self.mapping.path.name!r} {text}.")

    def take(self, num_bytes: int) -> int:
        """Move ahead by `num_bytes` and return the old position."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.fault(
                f"is truncated or damaged: {self.where} needs {num_bytes} bytes at offset {start}, "
                f"the file has {self.size}"
            )
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.mapping.buffer, self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.mapping.buffer, self.take(8))[0]
        return value

    def capped(self, what: str, value: int, limit: int) -> int:
        if value > limit:
            raise self.fault(f"is damaged: {what} is {value}, the limit is {limit}")
        return value

    def raw_string(self, what: str, limit: int) -> bytes:
        length = self.capped(f"the length of {what}", self.u64(), limit)
        start = self.take(length)
        return self.mapping.buffer[start : start + length]

    def name(self, what: str, limit: int) -> str:
        raw = self.raw_string(what, limit)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"is damaged: {what} is not UTF-8") from None

    def header(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and of metadata keys."""
        magic = self.mapping.buffer[:4]
        if magic != MAGIC[: len(magic)]:
            raise self.fault(f"is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        self.take(4)
        version = self.u32()
        if version not in VERSIONS:
            raise self.fault(f"has GGUF version {version}; versions 2 and 3 are supported")
        num_tensors = self.capped("the number of tensors", self.u64(), MAX_TENSORS)
        return num_tensors, self.capped("the number of metadata keys", self.u64(), MAX_KEYS)

    def keys(self, count: int) -> dict[str, Value | _Items]:
        values: dict[str, Value | _Items] = {}
        for index in range(count):
            self.where = f"metadata key {index} of {count}"
            key = self.name(self.where, MAX_KEY_BYTES)
            if key in values:
                raise self.fault(f"is damaged: metadata key {key[:80]!r} occurs twice")
            self.where = f"metadata key {key[:80]!r}"
            values[key] = self.value(self.u32())
        return values

    def value(self, kind: int) -> Value | _Items:
        if kind == _STRING:
            return self.raw_string(self.where, MAX_STRING_BYTES).decode("utf-8", "replace")
        if kind == _ARRAY:
            return self.items(nesting=1)
        if kind not in _SCALARS:
            raise self.fault(f"is damaged: {self.where} has the unknown value type {kind}")
        return self.scalars(kind, 1).decode(self.mapping)[0]

    def items(self, nesting: int) -> list[Value] | _Items:
        kind = self.u32()
        count = self.capped(f"the array length of {self.where}", self.u64(), MAX_ARRAY_ITEMS)
        if kind == _STRING:
            return self.strings(count)
        if kind in _SCALARS:
            return self.scalars(kind, count)
        if kind != _ARRAY:
            raise self.fault(f"is damaged: {self.where} has the unknown array type {kind}")
        self.capped(f"the nesting of {self.where}", nesting + 1, MAX_NESTING)
        self.capped(f"the array length of {self.where}", count, MAX_NESTED_ITEMS)
        inner = (self.items(nesting + 1) for _ in range(count))
        return [i.decode(self.mapping) if isinstance(i, _Items) else i for i in inner]

    def scalars(self, kind: int, count: int) -> _Items:
        num_bytes = count * np.dtype(_SCALARS[kind]).itemsize
        start = self.take(num_bytes)
        if kind == _BOOL and (self.mapping.view(start, num_bytes) > 1).any():
            raise self.fault(f"is damaged: {self.where} has a truth value other than 0 and 1")
        return _Items(kind, start, count)

    def strings(self, count: int) -> _Items:
        """Walk over an array of strings, and note the offset of each.

        A vocabulary has more than 100,000 of them, so the loop does nothing else: a length that
        leads out of the file fails at the next step or at the end.
        """
        first = self.position
        if count > (self.size - first) // 8:
            self.take(8 * count)
        unpack, buffer = _U64.unpack_from, self.mapping.buffer
        starts = array("Q")
        append = starts.append
        position = first + 8
        try:
            for _ in range(count):
                append(position)
                position += unpack(buffer, position - 8)[0] + 8
            append(position)
        except (struct.error, OverflowError):
            position = self.size + 9
        if position - 8 > self.size:
            raise self.fault(
                f"is truncated or damaged: {self.where} has {count} strings "
                f"that lead past the end of the file at {self.size}"
            )
        self.position = position - 8
        return _Items(_STRING, first + 8, count, starts)

    def tensor_infos(self, count: int) -> list[_TensorInfo]:
        infos = []
        seen: set[str] = set()
        for index in range(count):
            self.where = f"the entry of tensor {index} of {count}"
            name = self.name(f"the name of tensor {index}", MAX_NAME_BYTES)
            if name in seen:
                raise self.fault(f"is damaged: tensor {name!r} occurs twice")
            seen.add(name)
            num_dims = self.u32()
            if not 1 <= num_dims <= MAX_DIMENSIONS:
                raise self.fault(
                    f"is damaged: tensor {name!r} has {num_dims} dimensions, "
                    f"the limit is {MAX_DIMENSIONS}"
                )
            dims = [self.u64() for _ in range(num_dims)]
            if not 0 < prod(dims) < 1 << 63:
                raise self.fault(f"is damaged: tensor {name!r} has the dimensions {dims}")
            kind = self.u32()
            infos.append(_TensorInfo(name, tuple(reversed(dims)), kind, self.u64()))
        return infos


def _alignment(reader: _Reader, metadata: Metadata) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0:
        return value
    shown = value if isinstance(value, int) else type(value).__name__
    raise reader.fault(
        f"is damaged: general.alignment is {shown}, not a power of two from 8 to {MAX_ALIGNMENT}"
    )


def _tensors(
    reader: _Reader, infos: list[_TensorInfo], alignment: int
) -> tuple[dict[str, QuantTensor], dict[str, str]]:
    """Turn table entries into views that are inside the file and do not overlap."""
    base = -(-reader.position // alignment) * alignment
    tensors: dict[str, QuantTensor] = {}
    unsupported: dict[str, str] = {}
    end, previous = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        fmt = FORMATS_BY_GGUF_ID.get(info.kind)
        if info.offset % alignment:
            raise reader.fault(
                f"is damaged: tensor {info.name!r} is at offset {info.offset}, "
                f"not a multiple of {alignment}"
            )
        if fmt is None:
            unsupported[info.name] = UNSUPPORTED_GGUF_TYPES.get(info.kind, f"type {info.kind}")
            continue
        if info.shape[-1] % fmt.block_size:
            raise reader.fault(
                f"is damaged: tensor {info.name!r} has rows of {info.shape[-1]} values, "
                f"not a multiple of {fmt.name}'s {fmt.block_size}"
            )
        num_bytes = fmt.num_bytes(prod(info.shape))
        start = base + info.offset
        if num_bytes > reader.size - start:
            raise reader.fault(
                f"is truncated: tensor {info.name!r} needs {num_bytes} bytes at offset {start}, "
                f"the file has {reader.size}"
            )
        if info.offset < end:
            raise reader.fault(f"is damaged: tensors {previous!r} and {info.name!r} overlap")
        end, previous = info.offset + num_bytes, info.name
        data = reader.mapping.view(start, num_bytes).reshape(prod(info.shape[:-1]), -1)
        tensors[info.name] = QuantTensor(fmt, info.shape, data)
    # In the order of the file's entries.
    ordered = {info.name: tensors[info.name] for info in infos if info.name in tensors}
    return ordered, unsupported
