"""Reads GGUF files (versions 2 and 3, little-endian), and checks them as hostile input.

Source: the GGUF specification (ggml repository, docs/gguf.md). For any bytes, the result is a
`WeightFiles` or a `ModelFormatError`, in time and memory linear in the file's size.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from twostroke.core.errors import ModelFormatError
from twostroke.quant import FORMATS_BY_GGUF_ID, UNSUPPORTED_GGUF_TYPES
from twostroke.weights.mapping import MappedFile
from twostroke.weights.strings import Strings
from twostroke.weights.tensors import TensorEntry, WeightFiles, map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the specification's own limit
MAX_NAME_BYTES = 256  # the specification says 64; some writers exceed it
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 24
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("|b1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9
_BOOL = 7

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

Stored: TypeAlias = "bool | int | float | str | Strings | NDArray[Any]"


class TruncatedError(ModelFormatError):
    """The file ends before its header does."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its data; the entries' `start` counts from byte `data_start`."""

    mapping: MappedFile
    metadata: Mapping[str, Any]
    entries: tuple[TensorEntry, ...]
    data_start: int


def read_gguf(path: Path) -> WeightFiles:
    """Map the file at `path` and read its metadata and its table of tensors.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it is not a whole and sound GGUF file.
    """
    header = read_header(path)
    alignment = _alignment(header)
    start = -(-header.data_start // alignment) * alignment
    for entry in header.entries:
        if entry.start % alignment:
            raise header.mapping.fault(
                f"is damaged: {entry.shown} is at offset {entry.start}, "
                f"not a multiple of {alignment}"
            )
    entries = [replace(entry, start=start + entry.start) for entry in header.entries]
    return replace(map_tensors(header.mapping, entries), metadata=header.metadata)


def read_header(path: Path) -> GgufHeader:
    """Map the file at `path` and read what comes before its data; errors as `read_gguf`.

    Raises TruncatedError if the file ends before that.
    """
    reader = _Reader(MappedFile(path))
    num_tensors, num_keys = reader.counts()
    metadata = Metadata(reader.metadata(num_keys))
    entries = reader.entries(num_tensors)
    return GgufHeader(reader.mapping, metadata, entries, reader.position)


class Metadata(Mapping[str, Any]):
    """A file's keys and values; an array of numbers becomes a list each time it is read."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Stored]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> bool | float | str | list[Any] | Strings:
        value = self._values[key]
        return value.tolist() if isinstance(value, np.ndarray) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Reader:
    """A position in the file that moves forward, never past the end."""

    def __init__(self, mapping: MappedFile) -> None:
        self.mapping = mapping
        self.position = 0
        self.where = "the header"

    def damaged(self, text: str) -> ModelFormatError:
        return self.mapping.fault(f"is damaged: {text}")

    def take(self, num_bytes: int) -> int:
        """Move ahead by `num_bytes` and return the old position."""
        start, size = self.position, self.mapping.size
        if num_bytes > size - start:
            raise TruncatedError(
                f"{self.mapping.path.name!r} is truncated or damaged: {self.where} needs "
                f"{num_bytes} bytes at offset {start}, the file has {size}."
            )
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.mapping.buffer, self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.mapping.buffer, self.take(8))[0]
        return value

    def count(self, what: str, limit: int) -> int:
        """Read a count; refuse one above `limit`."""
        value = self.u64()
        if value > limit:
            raise self.damaged(f"{what} is {value}, the limit is {limit}")
        return value

    def raw_string(self, what: str, limit: int) -> bytes:
        length = self.count(f"the length of {what}", limit)
        start = self.take(length)
        return self.mapping.buffer[start : start + length]

    def name(self, what: str, limit: int) -> str:
        raw = self.raw_string(what, limit)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8") from None

    def counts(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and of metadata keys."""
        magic = self.mapping.buffer[:4]
        if magic != MAGIC[: len(magic)]:
            raise self.mapping.fault(f"is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        self.take(4)
        version = self.u32()
        if version not in VERSIONS:
            raise self.mapping.fault(f"has GGUF version {version}; versions 2 and 3 are supported")
        num_tensors = self.count("the number of tensors", MAX_TENSORS)
        return num_tensors, self.count("the number of metadata keys", MAX_KEYS)

    def metadata(self, count: int) -> dict[str, Stored]:
        values: dict[str, Stored] = {}
        for index in range(count):
            self.where = f"metadata key {index} of {count}"
            key = self.name(self.where, MAX_KEY_BYTES)
            if key in values:
                raise self.damaged(f"metadata key {key[:80]!r} occurs twice")
            self.where = f"metadata key {key[:80]!r}"
            values[key] = self.value()
        return values

    def value(self) -> Stored:
        kind = self.u32()
        if kind == _STRING:
            return self.raw_string(self.where, MAX_STRING_BYTES).decode("utf-8", "replace")
        if kind != _ARRAY:
            single: bool | int | float = self.numbers(kind, 1).tolist()[0]
            return single
        kind = self.u32()
        count = self.count(f"the array length of {self.where}", MAX_ARRAY_ITEMS)
        return self.strings(count) if kind == _STRING else self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> NDArray[Any]:
        """Return a view of numbers; arrays of arrays are refused, as llama.cpp does."""
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise self.damaged(f"{self.where} has the unknown value type {kind}")
        raw = self.mapping.view(self.take(count * dtype.itemsize), count * dtype.itemsize)
        if kind == _BOOL and (raw > 1).any():
            raise self.damaged(f"{self.where} has a truth value other than 0 and 1")
        return raw.view(dtype)

    def strings(self, count: int) -> Strings:
        """Walk over an array of strings, and note the offset of each.

        A vocabulary has more than 100,000 of them, so the loop does nothing else: a length that
        leads out of the file fails at the next step or at the end.
        """
        first, size = self.position, self.mapping.size
        if count > (size - first) // 8:
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
            position = size + 9
        if position - 8 > size:
            raise TruncatedError(
                f"{self.mapping.path.name!r} is truncated or damaged: {self.where} has {count} "
                f"strings that lead past the end of the file at {size}."
            )
        self.position = position - 8
        return Strings(self.mapping, starts)

    def entries(self, count: int) -> tuple[TensorEntry, ...]:
        entries: dict[str, TensorEntry] = {}
        for index in range(count):
            self.where = f"the entry of tensor {index} of {count}"
            name = self.name(f"the name of tensor {index}", MAX_NAME_BYTES)
            if name in entries:
                raise self.damaged(f"tensor {name!r} occurs twice")
            num_dims = self.u32()
            if num_dims > MAX_DIMENSIONS:
                raise self.damaged(
                    f"tensor {name!r} has {num_dims} dimensions, the limit is {MAX_DIMENSIONS}"
                )
            shape = tuple([self.u64() for _ in range(num_dims)][::-1])  # GGUF's are column-major
            kind = self.u32()
            fmt = FORMATS_BY_GGUF_ID.get(kind)
            dtype = fmt.name if fmt else UNSUPPORTED_GGUF_TYPES.get(kind, f"type {kind}")
            entries[name] = TensorEntry(name, dtype, fmt, shape, self.u64())
        return tuple(entries.values())


def _alignment(header: GgufHeader) -> int:
    value = header.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0:
        return value
    shown = value if isinstance(value, int) else type(value).__name__
    raise header.mapping.fault(
        f"is damaged: general.alignment is {shown}, not a power of two from 8 to {MAX_ALIGNMENT}"
    )
