"""A quantized module (one linear layer) of a model: the tensors that make one matrix.

Also unpacks codes of a few bits from the 32-bit words of such tensors.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.model.weights.published.groups import Scales

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from typing import Any

    from numpy.typing import NDArray

    from twostroke.model.quant import Bytes, QuantTensor
    from twostroke.model.weights.tensors import StoredArray

_SCALE_TYPES = {"F16": ("f16", np.uint16), "BF16": ("bf16", np.uint16), "F32": ("f32", np.uint32)}
_MAX_NAME_CHARS = 120  # characters of a tensor's name in an error


class Module(Frozen):
    """A quantized module (one linear layer) of a model: its tensors by their short names.

    Short names are the ends of the full names, such as `qweight` and `scales`.
    """

    file: str
    name: str
    tensors: Mapping[str, QuantTensor]
    arrays: Mapping[str, StoredArray]

    @property
    def parts(self) -> AbstractSet[str]:
        """Return the short names of the quantized module's tensors."""
        return self.tensors.keys() | self.arrays.keys()

    def dtype(self, part: str) -> str | None:
        """Return the type of one of the module's tensors, as the file names it; None if missing.

        `part`: the tensor's short name, such as `qweight`.
        """
        if part in self.arrays:
            return self.arrays[part].dtype
        return self.tensors[part].format.name if part in self.tensors else None

    def has(self, part: str) -> bool:
        """Return whether the quantized module has this tensor, of any type."""
        return self.dtype(part) is not None

    def array(self, part: str, dtypes: Sequence[str], dimensions: int = 2) -> NDArray[Any]:
        """Return one of the module's tensors as an array with this number of dimensions.

        `part`: the tensor's short name. `dtypes`: the types that are allowed. Raises
        ModelFormatError if the tensor is missing, or has another type or number of dimensions.
        """
        dtype = self.dtype(part)
        if dtype is None:
            raise self.lacks(part)
        if dtype not in dtypes:
            raise self.fault(part, f"has the type {dtype}, not {' or '.join(dtypes)}")
        values = self.arrays[part].values
        if values.ndim != dimensions:
            raise self.fault(
                part,
                f"has the shape {[*values.shape]}, not {counted_noun(dimensions, 'dimension')}",
            )
        return values

    def e4m3_codes(self, part: str) -> Bytes:
        """Return the codes of an E4M3 (8-bit float) matrix; raise ModelFormatError for a NaN."""
        codes: Bytes = self.array(part, ("F8_E4M3",))
        if ((codes & np.uint8(0x7F)) == 0x7F).any():
            raise self.fault(part, "has a value that is not a number")
        return codes

    def scales(self, part: str, shape: tuple[int, int]) -> Scales:
        """Return one of the module's tensors as float scales of this shape.

        The file may leave out dimensions of 1.
        """
        tensor = self._floats(part)
        if prod(tensor.shape) != prod(shape) or tensor.shape not in _equivalent_shapes(shape):
            raise self.wrong_shape(part, shape)
        kind, raw = _SCALE_TYPES[tensor.format.name]
        return Scales(kind, np.ascontiguousarray(tensor.data).view(raw).reshape(shape))

    def scale(self, part: str) -> np.float32:
        """Return the single scale in one of the module's tensors.

        Raises ModelFormatError if the scale is not positive.
        """
        tensor = self._floats(part)
        if tensor.num_values != 1:
            raise self.wrong_shape(part, (1, 1))
        value = np.float32(tensor.dequantize().reshape(())[()])
        if not 0 < value < np.inf:
            raise self.fault(part, "is not a number above zero")
        return value

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of one of the module's tensors; ModelFormatError if it is missing."""
        if part in self.arrays:
            return self.arrays[part].values.shape
        return self._floats(part).shape

    def lacks(self, part: str) -> ModelFormatError:
        """Return the error that the quantized module lacks a tensor."""
        name = f"{self.name}.{part}"[:_MAX_NAME_CHARS]
        return ModelFormatError(
            f"{self.file!r} lacks tensor {name!r}, which its quantization_config asks for."
        )

    def wrong_shape(self, part: str, shape: tuple[int, ...]) -> ModelFormatError:
        """Return the error that a tensor's shape contradicts the quantization settings."""
        actual_shape = [*self.shape(part)]
        return self.fault(
            part, f"has the shape {actual_shape}, its quantization_config asks for {[*shape]}"
        )

    def fault(self, part: str, text: str) -> ModelFormatError:
        """Return an error that says `text` about one of the module's tensors."""
        name = f"{self.name}.{part}"[:_MAX_NAME_CHARS]
        return ModelFormatError(f"{self.file!r} contradicts itself: tensor {name!r} {text}.")

    def _floats(self, part: str) -> QuantTensor:
        if not self.has(part):
            raise self.lacks(part)
        if part not in self.tensors:
            raise self.fault(part, f"has the type {self.dtype(part)}, not F16, BF16 or F32")
        return self.tensors[part]


def _equivalent_shapes(shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the shapes that a file may use for a matrix of this shape.

    For example, (n, 1) may also be (n,).
    """
    return [shape, (shape[0],)] if shape[1] == 1 else [shape]


def num_words(count: int, bits: int) -> int:
    """Return how many 32-bit words `count` codes of `bits` bits fill without gaps."""
    return -(-count * bits // 32)


def unpack_words(words: NDArray[Any], bits: int, count: int) -> Bytes:
    """Unpack quantization codes from int32 (rows, words) to uint8 (rows, count), without gaps.

    Code i begins at bit `i * bits` of its row.
    """
    packed = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return packed[:, :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = packed[:, :, None] >> shifts
        codes &= np.uint8((1 << bits) - 1)
        return codes.reshape(len(packed), -1)[:, :count]
    bit_rows = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * bits]
    return np.packbits(bit_rows.reshape(-1, bits), axis=1, bitorder="little").reshape(-1, count)


def unpack_padded_words(words: NDArray[Any], bits: int, count: int) -> Bytes:
    """Unpack quantization codes from 32-bit words that hold only complete codes.

    A word has `32 // bits` codes, from the lowest bit on.
    """
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts
    codes &= np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]
