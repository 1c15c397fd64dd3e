"""`QuantTensor`: a weight as its file stores it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.model.quant.format import Bytes, Floats, Format

_VALUES_PER_CHUNK = 1 << 18  # decoded at once, to stay in the processor's cache


class QuantTensor(Frozen, eq=False):
    """A weight as its file stores it: the bytes, their number format, and the shape.

    `shape` is row-major: (outputs, inputs) for a matrix, (values,) for a vector, (experts, outputs,
    inputs) for a stack. `data` is uint8 (rows, row_bytes), usually a read-only view into a
    memory-mapped file. The number of rows is the product of all dimensions but the last; a vector
    is one row.

    If there is an `order` (inputs,), column i of `data` belongs to input `order[i]`. Such a matrix
    was quantized with its inputs sorted ("act-order"), so that the inputs of a group are
    neighbours.
    """

    format: Format
    shape: tuple[int, ...]
    data: Bytes
    order: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        expected = (self.num_rows, self.format.num_bytes(self.shape[-1]))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise ValueError(
                f"{self.format.name} {self.shape} needs uint8 {expected}, "
                f"not {self.data.dtype} {self.data.shape}"
            )

    @classmethod
    def from_floats(cls, values: Floats, fmt: Format) -> QuantTensor:
        """Quantize float values to a format; their last dimension must fill whole blocks."""
        data = fmt.quantize(values).reshape(prod(values.shape[:-1]), -1)
        return cls(fmt, values.shape, data)

    @property
    def num_rows(self) -> int:
        """The number of rows of the tensor's stored bytes, `data`."""
        return prod(self.shape[:-1])

    @property
    def num_values(self) -> int:
        """The number of values of the tensor."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes in which the tensor is stored."""
        return self.data.nbytes

    @property
    def packed_bytes(self) -> int:
        """The approximate number of bytes that the cpu backend's kernels read for the tensor.

        It is `num_bytes` or more, since kernels may need a larger layout.
        """
        bits = self.format.packed_bits
        return self.num_bytes if bits is None else int(self.num_values * bits / 8)

    def part(self, first: int, end: int) -> QuantTensor:
        """Return outputs `first` to `end` of a matrix, or these values of a vector, as a view."""
        if len(self.shape) == 1:
            return self.columns(first, end)
        rows = self.num_rows // self.shape[0]
        data = self.data[first * rows : end * rows]
        return replace(self, shape=(end - first, *self.shape[1:]), data=data)

    def columns(self, first: int, end: int) -> QuantTensor:
        """Return inputs `first` to `end` of a matrix, without a copy.

        The range must consist of whole blocks, and the matrix must have no `order`.
        """
        assert self.order is None
        data = self.data[:, self.format.num_bytes(first) : self.format.num_bytes(end)]
        return QuantTensor(self.format, (*self.shape[:-1], end - first), data)

    def dequantize(self, rows: slice | None = None) -> Floats:
        """Return the values of the quantized tensor as float32, in its shape.

        With `rows`, only the selected rows are returned, as (rows, inputs).
        """
        data = self.data if rows is None else self.data[rows]
        out = np.empty((data.shape[0], self.shape[-1]), dtype=np.float32)
        columns = slice(None) if self.order is None else self.order
        step = max(1, _VALUES_PER_CHUNK // self.shape[-1])
        for start in range(0, data.shape[0], step):
            values = self.format.dequantize(data[start : start + step])
            out[start : start + step, columns] = values
        return out.reshape(self.shape) if rows is None else out
