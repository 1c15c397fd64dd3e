"""Reads GGUF files (versions 2 and 3, little-endian) and checks them as untrusted input.

Source: the GGUF specification (ggml repository, docs/gguf.md). Whatever bytes a file has, reading
it returns a `WeightFiles` or raises a `ModelFormatError`, in time and memory linear in the file's
size: a count is checked against the file's size before memory is allocated.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.model.quant import FORMATS_BY_GGUF_ID, UNSUPPORTED_GGUF_TYPES
from twostroke.model.weights.mapping import MappedFile
from twostroke.model.weights.tensors import TensorEntry, WeightFiles, map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.model.quant import Bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_STRING_BYTES = MAX_ARRAY_ITEMS = 1 << 24
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_NUMBER_TYPES: dict[int, np.dtype[Any]] = {
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
_LENGTH_BYTES = 8  # of the length before each string
_ARRAY_HEAD_BYTES = 12  # of the type and count before each array's items

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

Stored: TypeAlias = "bool | int | float | str | Strings | NDArray[Any] | list[Any]"


class TruncatedError(ModelFormatError):
    """A GGUF file ends inside its header."""


class GgufHeader(Frozen):
    """The header of a GGUF file: its metadata and its table of tensors."""

    mapping: MappedFile
    metadata: Metadata
    entries: tuple[TensorEntry, ...]


def read_gguf(path: Path) -> WeightFiles:
    """Map a GGUF file into memory, and read its metadata and its tensors.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: the file is not a complete and valid GGUF file.
    """
    header = read_header(path)
    return map_tensors(header.mapping, header.entries, header.metadata)


def read_header(path: Path, name: str | None = None) -> GgufHeader:
    """Map a GGUF file, or its beginning, into memory and read its header.

    Raises the errors of `read_gguf`, in which the file is called `name`, and TruncatedError if the
    file ends within its header.
    """
    reader = _Reader(MappedFile(path, name))
    num_tensors, num_keys = reader.counts()
    metadata = reader.metadata(num_keys)
    entries = reader.entries(num_tensors, reader.alignment(metadata))
    return GgufHeader(reader.mapping, metadata, entries)


class Metadata(Mapping[str, Any]):
    """The metadata of a GGUF file by key.

    An array of numbers is left in the mapped file, and is converted to a list on each access.
    """

    __slots__ = ("_raw", "_values")

    def __init__(self, values: dict[str, Stored], raw: dict[str, Bytes]) -> None:
        self._values = values
        self._raw = raw

    def __getitem__(self, key: str) -> bool | float | str | list[Any] | Strings:
        value = self._values[key]
        return value.tolist() if isinstance(value, np.ndarray) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def raw(self, key: str) -> bytes:
        """Return a metadata value's bytes as the GGUF file stores them, beginning with the type."""
        return self._raw[key].tobytes()


class Strings:
    """The strings of a GGUF array, such as a vocabulary, decoded on access to save memory.

    250,000 Python strings would take 15 MB.

    `offsets` has the file offset at which each string (its length, then its bytes) begins, and the
    end of the last string. Bytes that are not UTF-8 become lone surrogates (`surrogateescape`), so
    that different strings stay different.
    """

    __slots__ = ("_mapping", "_offsets")

    def __init__(self, mapping: MappedFile, offsets: array[int]) -> None:
        self._mapping = mapping
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        start, end = self._offsets[index : index + 2]
        raw = self._mapping.buffer[start + _LENGTH_BYTES : end]
        return raw.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        raw, starts, ends = self.spans()
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return (raw[begin:end].decode("utf-8", "surrogateescape") for begin, end in spans)

    def spans(self) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
        """Return where the strings of the array are, for readers that do not decode them.

        Returns (the bytes of a range of the GGUF file, the offset in this range at which each
        string begins, the offset at which each string ends).
        """
        offsets = np.frombuffer(self._offsets, np.uint64).astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        offsets -= first
        return self._mapping.buffer[first:last], offsets[:-1] + _LENGTH_BYTES, offsets[1:]


class _Reader:
    """Reads a GGUF file from front to back, and refuses to read past its end."""

    def __init__(self, mapping: MappedFile) -> None:
        self.mapping = mapping
        self.position = 0
        self.where = "the header"

    def damaged(self, text: str) -> ModelFormatError:
        return self.mapping.fault(f"is damaged: {text}")

    def take(self, num_bytes: int) -> int:
        """Move the read position forward by `num_bytes`, and return the old position."""
        start = self.position
        size = self.mapping.size
        if num_bytes > size - start:
            raise TruncatedError(
                f"{self.mapping.name!r} is truncated or damaged: {self.where} needs "
                f"{counted_noun(num_bytes, 'byte')} at offset {start}, the file has {size}."
            )
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.mapping.buffer, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.mapping.buffer, self.take(8))[0])

    def check_limit(self, value: int, unit: str, limit: int) -> int:
        if value > limit:
            raise self.damaged(f"{self.where} has {value} {unit}, the limit is {limit}")
        return value

    def string(self) -> bytes:
        start = self.take(self.check_limit(self.u64(), "bytes of text", MAX_STRING_BYTES))
        return self.mapping.buffer[start : self.position]

    def name(self) -> str:
        try:
            return self.string().decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"the name in {self.where} is not UTF-8") from None

    def counts(self) -> tuple[int, int]:
        """Check a GGUF file's magic number and version, and read the two counts after them.

        Returns (number of tensors, number of metadata keys).
        """
        magic = self.mapping.buffer[:4]
        if magic != MAGIC[: len(magic)]:
            raise self.mapping.wrong_kind("GGUF", f"it starts with {magic!r}, not {MAGIC!r}")
        self.take(4)
        version = self.u32()
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise self.mapping.fault(
                "is a big-endian GGUF file, for other processors than those supported here: fetch "
                "the little-endian file, or convert it (gguf-convert-endian FILE little)"
            )
        if version not in VERSIONS:
            raise self.mapping.fault(f"has GGUF version {version}; versions 2 and 3 are supported")
        num_tensors = self.check_limit(self.u64(), "tensors", MAX_TENSORS)
        return num_tensors, self.check_limit(self.u64(), "metadata keys", MAX_KEYS)

    def metadata(self, count: int) -> Metadata:
        values: dict[str, Stored] = {}
        raw: dict[str, Bytes] = {}
        for index in range(count):
            self.where = f"metadata key {index} of {count}"
            key = self.name()
            if key in values:
                raise self.damaged(f"metadata key {key[:80]!r} occurs twice")
            self.where = f"metadata key {key[:80]!r}"
            start = self.position
            values[key] = self.value()
            raw[key] = self.mapping.view(start, self.position - start)
        return Metadata(values, raw)

    def value(self) -> Stored:
        type_id = self.u32()
        if type_id == _STRING:
            return self.string().decode("utf-8", "replace")
        if type_id != _ARRAY:
            number: bool | int | float = self.numbers(type_id, 1).tolist()[0]
            return number
        return self.array()

    def array(self, depth: int = 1) -> Strings | NDArray[Any] | list[Any]:
        """Read an array of GGUF metadata, whose items may be arrays, too.

        `depth` is the nesting level of this array; the outermost array has 1.
        """
        type_id = self.u32()
        count = self.check_limit(self.u64(), "array items", MAX_ARRAY_ITEMS)
        if type_id != _ARRAY:
            return self.strings(count) if type_id == _STRING else self.numbers(type_id, count)
        self.check_limit(depth, "levels of arrays", MAX_ARRAY_DEPTH)
        if count > (self.mapping.size - self.position) // _ARRAY_HEAD_BYTES:
            self.take(_ARRAY_HEAD_BYTES * count)
        return [self.array(depth + 1) for _ in range(count)]

    def numbers(self, type_id: int, count: int) -> NDArray[Any]:
        """Read `count` numbers of GGUF metadata as a view of the file."""
        dtype = _NUMBER_TYPES.get(type_id)
        if dtype is None:
            raise self.damaged(f"{self.where} has the unknown value type {type_id}")
        raw = self.mapping.view(self.take(count * dtype.itemsize), count * dtype.itemsize)
        if type_id == _BOOL and (raw > 1).any():
            raise self.damaged(f"{self.where} has a truth value other than 0 and 1")
        return raw.view(dtype)

    def strings(self, count: int) -> Strings:
        """Read the offsets of an array of `count` strings of GGUF metadata.

        A vocabulary has more than 100,000 strings, so the loop does nothing else: a length that
        leads out of the file is noticed at the next string or at the end.
        """
        position = self.position
        size = self.mapping.size
        if count > (size - position) // _LENGTH_BYTES:
            self.take(_LENGTH_BYTES * count)
        unpack = _U64.unpack_from
        buffer = self.mapping.buffer
        offsets = array("Q", [position])
        append = offsets.append
        try:
            for _ in range(count):
                position += unpack(buffer, position)[0] + _LENGTH_BYTES
                append(position)
        except (struct.error, OverflowError):
            position = size + 1
        if position > size:
            raise TruncatedError(
                f"{self.mapping.name!r} is truncated or damaged: {self.where} has "
                f"{counted_noun(count, 'string that leads', 'strings that lead')} past the end of "
                f"the file at {size}."
            )
        self.position = position
        return Strings(self.mapping, offsets)

    def entries(self, count: int, alignment: int) -> tuple[TensorEntry, ...]:
        table: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            self.where = f"the entry of tensor {index} of {count}"
            name = self.name()
            if name in table:
                raise self.damaged(f"tensor {name[:80]!r} occurs twice")
            num_dims = self.check_limit(self.u32(), "dimensions", MAX_DIMENSIONS)
            columns_first = [self.u64() for _ in range(num_dims)]
            table[name] = tuple(reversed(columns_first)), self.u32(), self.u64()
        data_start = -(-self.position // alignment) * alignment
        entries = []
        for name, (shape, type_id, offset) in table.items():
            if offset % alignment:
                raise self.damaged(
                    f"tensor {name[:80]!r} is at offset {offset}, not a multiple of {alignment}"
                )
            fmt = FORMATS_BY_GGUF_ID.get(type_id)
            dtype = fmt.name if fmt else UNSUPPORTED_GGUF_TYPES.get(type_id, f"type {type_id}")
            entries.append(TensorEntry(name, dtype, fmt, shape, data_start + offset))
        return tuple(entries)

    def alignment(self, metadata: Metadata) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0:
            return value
        value_text = value if isinstance(value, int) else type(value).__name__
        raise self.damaged(
            f"general.alignment is {value_text}, not a power of two from 8 to {MAX_ALIGNMENT}"
        )
