"""Weights in the kernels' layout: packed from the model's file, or mapped from an earlier start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.cpu.packed_store import MIN_CLOSE_WAIT_S
from twostroke.backends.cpu.records import WeightRecord
from twostroke.core.errors import BackendError, MemoryLimitError
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.cpu.lowered import CpuLowered, Vector
    from twostroke.backends.cpu.packed_store import MappedWeights, PackedStore, PackedWriter
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
        lowered: CpuLowered,
        store: PackedStore | None = None,
    ) -> None:
        """Map the packed weights from a file of `store`, or reserve memory that `pack` fills.

        Raises:
            BackendError: a format that the kernels do not support.
            MemoryLimitError: there is not enough address space.
        """
        self._library = library
        matrices = lowered.matrices
        self._tensors = {name: tensors[name] for name in matrices}
        with np.errstate(invalid="ignore"):  # a damaged file is found later, by the canary
            self.vectors: dict[Vector, NDArray[np.float32]] = {
                vector: vector.values(tensors) for vector in lowered.vectors
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
        self._store = store
        self._writer: PackedWriter | None = None
        self._packing_s = 0.0
        self._path = self._stored_path() if store else None
        self._mapped: MappedWeights | None = None
        self._memory: int | None = None
        self.is_ready = self._open_stored()
        if self._memory is None and self._mapped is None:
            self._memory = self._reserve()
        address = self._mapped.address if self._mapped else self._memory
        assert address is not None
        starts = np.cumsum([0, *sizes])[:-1]
        self.records = {
            name: WeightRecord(
                t.format.kernel_id,
                t.num_rows,
                t.shape[-1],
                address + int(start),
                self._orders[name].ctypes.data if name in self._orders else None,
            )
            for (name, t), start in zip(self._tensors.items(), starts, strict=True)
        }

    @property
    def num_shared_bytes(self) -> int:
        """Return the bytes of weights in a mapped file, which the system counts as available."""
        return 0 if self._mapped is None else self._size

    def pack(self, pool: int, release: Release | None, progress: Progress | None) -> None:
        """Pack all weight matrices for the kernels, unless they came from a file of the store.

        The threads of a native pool pack. `release(tensors)` is called with tensors that will not
        be read again, `progress(done, total)` after each tensor with numbers of bytes.
        """
        total = sum(tensor.num_bytes for tensor in self._tensors.values())
        if self.is_ready:
            if release is not None:
                release(list(self._tensors.values()))
            self._tensors = {}
            if progress is not None:
                progress(total, total)
            return
        start_s = time.monotonic()
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
        self.is_ready = True
        self._packing_s = time.monotonic() - start_s
        if self._store is not None and self._path is not None and self._memory is not None:
            self._writer = self._store.write_later(self._path, self._memory, self._size)

    def share(self) -> None:
        """Replace the packed weights in memory by the store's file, once it has been written.

        Other processes then use the same memory. No step may run meanwhile.
        """
        if self._writer is None or self._memory is None:
            return
        mapped = self._writer.take()
        if mapped is None:
            return
        try:
            mapped.move_to(self._memory)
        except OSError:  # the own memory stays as it was
            mapped.close()
            return
        self._mapped = mapped

    def close(self) -> None:
        """Free the memory of the packed weights; may be called twice.

        If the store's file is still being written, this waits at most as long as packing took:
        later starts save that time.
        """
        if self._writer is not None:
            self._writer.close(max(MIN_CLOSE_WAIT_S, self._packing_s))
            self._writer = None
        if self._memory is not None:
            self._library.ts_unmap_memory(self._memory, self._size)
            self._memory = None
        elif self._mapped is not None:
            self._mapped.close()

    def _stored_path(self) -> Path:
        """Return the path of the store's file for these matrices."""
        assert self._store is not None
        descriptions = [
            f"{name} {tensor.format.name} {tensor.shape}" for name, tensor in self._tensors.items()
        ]
        library_path = Path(self._library._name)  # noqa: SLF001 - ctypes has no other name for it
        return self._store.path_of(library_path, descriptions, weights_identity(self._tensors))

    def _open_stored(self) -> bool:
        """Map or copy the store's file with these matrices; return whether there is one."""
        if self._store is None or self._path is None:
            return False
        mapped = self._store.open(self._path, self._size)
        if mapped is None:
            return False
        if mapped.has_huge_pages:
            self._mapped = mapped
        else:
            self._memory = self._reserve()
            mapped.copy_to(self._memory)
            mapped.close()
        return True

    def _reserve(self) -> int:
        """Return the address of reserved memory for all packed weights, still untouched.

        Raises:
            MemoryLimitError: there is not enough address space.
        """
        memory: int | None = self._library.ts_map_memory(self._size)
        if memory is None:
            message = f"No memory for {self._size / 1e6:,.0f} MB of weights; use a smaller model."
            raise MemoryLimitError(message)
        return memory


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
