"""Threads of a native library on their memory nodes, and the speed they reach."""

from __future__ import annotations

from contextlib import contextmanager
from ctypes import c_int32
from typing import TYPE_CHECKING

from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.records import NodeRecord
from twostroke.core.errors import BackendError
from twostroke.core.hardware import memory_nodes, place_threads

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator


@contextmanager
def thread_pool(library: ctypes.CDLL, num_threads: int) -> Iterator[int]:
    """Yield a pool of threads, each kept to a memory node if there are several.

    Raises:
        BackendError: the operating system refuses that many threads.
    """
    placed = place_threads(memory_nodes(), num_threads)
    nodes = (NodeRecord * len(placed))(
        *(
            NodeRecord((c_int32 * len(node.cores))(*node.cores), len(node.cores), node.number, n)
            for node, n in placed.items()
        )
    )
    pool: int | None = library.ts_pool_create(num_threads, nodes, len(nodes))
    if pool is None:
        raise BackendError(f"The operating system refuses {num_threads} threads; ask for fewer.")
    try:
        yield pool
    finally:
        library.ts_pool_destroy(pool)


def measure_bandwidth(level: str, num_threads: int, num_bytes: int) -> float:
    """Return the bytes/s at which `num_threads` threads read a stream of `num_bytes`.

    The best of several passes over it, with huge pages and prefetching, within some 0.3 s.
    """
    library = load_library(level)
    with thread_pool(library, num_threads) as pool:
        return float(library.ts_measure_bandwidth(pool, num_bytes))


def measure_peak(level: str, num_threads: int) -> tuple[float, str]:
    """Return operations/s (a multiply-add is two) of the level's best arithmetic, and its name."""
    library = load_library(level)
    with thread_pool(library, num_threads) as pool:
        return float(library.ts_measure_peak(pool)), library.ts_peak_kind().decode()
