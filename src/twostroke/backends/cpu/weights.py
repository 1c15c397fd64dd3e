"""Weights in the kernels' layout: packed once at load, straight from the file."""

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

_LINE = 64  # bytes; packed matrices start on one
_RELEASED_TOGETHER = 16 << 20  # bytes
_CONVERTED_TOGETHER = 1 << 18  # values: intermediate arrays stay within the cache


class PackedWeights:
    """Matrices packed for one level, in one piece of memory, and vectors as float32.

    `records` says where each matrix lies, by name; `vectors` has the values of each vector. Both
    together take `num_bytes`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        tensors: Mapping[str, QuantTensor],
        matrices: Sequence[str],
        vectors: Sequence[Vector],
    ) -> None:
        """Reserve the memory; nothing is read yet.

        Raises:
            BackendError: a format that the kernels do not know.
            MemoryLimitError: there is not enough address space.
        """
        self._library = library
        self._tensors = {name: tensors[name] for name in matrices}
        with np.errstate(invalid="ignore"):  # of a damaged file; its canary says so
            self.vectors: dict[Vector, NDArray[np.float32]] = {
                vector: vector.values(tensors) for vector in vectors
            }
        # Equal orders are one array: matrices that read the same gathered rows share them.
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
        """Pack all matrices with the pool's threads.

        `release(tensors)` is called with tensors that will not be read again, `progress(done,
        total)` with bytes of tensors after each of them.
        """
        total = sum(tensor.num_bytes for tensor in self._tensors.values())
        done = released = 0
        packed: list[QuantTensor] = []
        for tensor, record in zip(self._tensors.values(), self.records.values(), strict=True):
            source = kernel_rows(tensor)
            shape = record.num_outputs, record.num_inputs
            self._library.ts_pack(pool, record.type, *shape, source.ctypes.data, record.data)
            packed.append(tensor)
            done += tensor.num_bytes
            if release is not None and (done - released >= _RELEASED_TOGETHER or done == total):
                release(packed)
                packed, released = [], done
            if progress is not None:
                progress(done, total)
        self._tensors = {}

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._library.ts_unmap_memory(self._memory, self._size)
            self._memory = None


def kernel_rows(tensor: QuantTensor) -> NDArray[np.uint8]:
    """Return a tensor's rows of bytes in the form that kernels pack."""
    to_kernel, data = tensor.format.to_kernel, tensor.data
    if to_kernel is None:
        return np.ascontiguousarray(data)
    step = max(1, _CONVERTED_TOGETHER // tensor.shape[-1])
    found = np.empty((len(data), to_kernel(data[:1]).shape[1]), np.uint8)
    for first in range(0, len(data), step):
        found[first : first + step] = to_kernel(data[first : first + step])
    return found


def _packed_bytes(library: ctypes.CDLL, name: str, tensor: QuantTensor) -> int:
    shape = tensor.num_rows, tensor.shape[-1]
    size: int = library.ts_linear_packed_bytes(tensor.format.kernel_id, *shape)
    if size < 0:
        message = f"{name}: the cpu backend has no kernel for {tensor.format.name} {tensor.shape}"
        raise BackendError(f"{message}; `--backend reference` runs it, slowly.")
    assert size % _LINE == 0
    return size
