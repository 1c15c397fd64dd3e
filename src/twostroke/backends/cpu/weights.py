"""Weights in the kernels' layout, packed once at load from the memory-mapped file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.cpu.records import WeightRecord
from twostroke.core.errors import BackendError, MemoryLimitError

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.cpu.lowered import Vector
    from twostroke.model.quant import QuantTensor

    Progress = Callable[[int, int], None]
    Release = Callable[[Sequence[QuantTensor]], None]

_LINE_BYTES = 64  # packed matrices start at multiples of a cache line
_RELEASE_BYTES = 16 << 20  # tensors are released in groups of this size
_CONVERTED_VALUES = 1 << 18  # converted at once, so that intermediate arrays fit into the cache


class PackedWeights:
    """A model's weights for native kernels: packed matrices in one memory block, float32 vectors.

    `records` has the address and sizes of each matrix, by name; `vectors` the values of each
    vector. All together take `num_bytes`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        tensors: Mapping[str, QuantTensor],
        matrices: Sequence[str],
        vectors: Sequence[Vector],
    ) -> None:
        """Reserve memory for the packed weights; `pack` fills it.

        Raises:
            BackendError: a format that the kernels do not support.
            MemoryLimitError: there is not enough address space.
        """
        self._library = library
        self._tensors = {name: tensors[name] for name in matrices}
        with np.errstate(invalid="ignore"):  # a damaged file is found later, by the canary
            self.vectors: dict[Vector, NDArray[np.float32]] = {
                vector: vector.values(tensors) for vector in vectors
            }
        # Equal column orders are one array: matrices with the same order share their sorted inputs.
        orders = {name: tensors[name].order for name in matrices}
        shared = {order.tobytes(): order for order in orders.values() if order is not None}
        self._orders = {
            name: shared[order.tobytes()] for name, order in orders.items() if order is not None
        }
        sizes = [_packed_bytes(library, name, tensors[name]) for name in matrices]
        self._size = sum(sizes)
        self.num_bytes = self._size + sum(values.nbytes for values in self.vectors.values())
        self._memory: int | None = library.ts_map_memory(self._size)
        if self._memory is None:
            message = f"No memory for {self._size / 1e6:,.0f} MB of weights; use a smaller model."
            raise MemoryLimitError(message)
        starts = np.cumsum([0, *sizes])[:-1]
        self.records = {
            name: WeightRecord(
                t.format.kernel_id,
                t.num_rows,
                t.shape[-1],
                self._memory + int(start),
                self._orders[name].ctypes.data if name in self._orders else None,
            )
            for (name, t), start in zip(self._tensors.items(), starts, strict=True)
        }

    def pack(self, pool: int, release: Release | None, progress: Progress | None) -> None:
        """Pack all weight matrices for the kernels, with the threads of a pool.

        `release(tensors)` is called with tensors that will not be read again, `progress(done,
        total)` after each tensor with numbers of bytes.
        """
        total = sum(tensor.num_bytes for tensor in self._tensors.values())
        done = released = 0
        packed: list[QuantTensor] = []
        for tensor, record in zip(self._tensors.values(), self.records.values(), strict=True):
            source = kernel_rows(tensor)
            self._library.ts_pack(
                pool,
                record.type,
                record.num_outputs,
                record.num_inputs,
                source.ctypes.data,
                record.data,
            )
            packed.append(tensor)
            done += tensor.num_bytes
            if release is not None and (done - released >= _RELEASE_BYTES or done == total):
                release(packed)
                packed, released = [], done
            if progress is not None:
                progress(done, total)
        self._tensors = {}

    def close(self) -> None:
        """Free the memory of the packed weights; may be called twice."""
        if self._memory is not None:
            self._library.ts_unmap_memory(self._memory, self._size)
            self._memory = None


def kernel_rows(tensor: QuantTensor) -> NDArray[np.uint8]:
    """Return a weight tensor's rows as bytes in the format that native packing reads."""
    to_kernel, data = tensor.format.to_kernel, tensor.data
    if to_kernel is None:
        return np.ascontiguousarray(data)
    step = max(1, _CONVERTED_VALUES // tensor.shape[-1])
    rows = np.empty((len(data), to_kernel(data[:1]).shape[1]), np.uint8)
    for first in range(0, len(data), step):
        rows[first : first + step] = to_kernel(data[first : first + step])
    return rows


def _packed_bytes(library: ctypes.CDLL, name: str, tensor: QuantTensor) -> int:
    size: int = library.ts_linear_packed_bytes(
        tensor.format.kernel_id, tensor.num_rows, tensor.shape[-1]
    )
    if size < 0:
        message = f"{name}: the cpu backend has no kernel for {tensor.format.name} {tensor.shape}"
        raise BackendError(f"{message}; `--backend reference` runs it, slowly.")
    assert size % _LINE_BYTES == 0
    return size
