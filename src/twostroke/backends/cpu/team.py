"""Thread pools of a native library, and the machine's speed with a number of threads."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from ctypes import c_int32
from typing import TYPE_CHECKING, Final

from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.records import NodeRecord
from twostroke.core.errors import BackendError
from twostroke.core.hardware import memory_nodes, threads_by_node
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

_LOG_AFTER_S: Final = 2.0  # total time of steps with fewer threads
_logger = logging.getLogger("twostroke.engine")


@contextmanager
def thread_pool(library: ctypes.CDLL, num_threads: int) -> Iterator[int]:
    """Yield the address of a native thread pool; the threads end with the context.

    With several NUMA nodes, each thread stays on its node.

    Raises:
        BackendError: the operating system refuses the number of threads.
    """
    placed = threads_by_node(memory_nodes(), num_threads)
    nodes = (NodeRecord * len(placed))(
        *(
            NodeRecord((c_int32 * len(node.cores))(*node.cores), len(node.cores), node.number, n)
            for node, n in placed.items()
        )
    )
    pool: int | None = library.ts_pool_create(num_threads, nodes, len(nodes))
    if pool is None:
        raise BackendError(
            f"The operating system refuses {counted_noun(num_threads, 'thread')}; ask for fewer."
        )
    try:
        yield pool
    finally:
        library.ts_pool_destroy(pool)


class ActiveThreads:
    """Watches for steps in which some threads pause, because other programs keep cores busy.

    If threads wait for a thread whose core is busy, steps take many times as long. `Crowding` in
    native/pool.h then uses fewer threads. If that lasts, it is logged once.
    """

    def __init__(self, library: ctypes.CDLL, pool: int, num_threads: int) -> None:
        """Watch a native pool of `num_threads` threads."""
        self._library, self._pool, self._num_threads = library, pool, num_threads
        self._crowded_s = 0.0
        self._was_logged = False

    def after_step(self, elapsed_s: float) -> bool:
        """Return whether the last step, which took `elapsed_s`, was computed by fewer threads."""
        num_active = self._library.ts_pool_num_active(self._pool)
        if num_active >= self._num_threads:
            return False
        self._crowded_s += elapsed_s
        if self._crowded_s >= _LOG_AFTER_S and not self._was_logged:
            self._was_logged = True
            _logger.info(
                "Other programs keep cores busy: %d of %d threads compute, which is faster now. "
                "More compute as soon as cores are free; --threads %d keeps it so.",
                num_active,
                self._num_threads,
                num_active,
            )
        return True


def measure_bandwidth(level: str, num_threads: int, num_bytes: int) -> float:
    """Measure the bytes/s at which `num_threads` threads read `num_bytes` of memory.

    The result is the best of several passes, with huge pages and prefetching, within about 0.3 s.
    """
    library = load_library(level)
    with thread_pool(library, num_threads) as pool:
        return float(library.ts_measure_bandwidth(pool, num_bytes))


def measure_peak(level: str, num_threads: int) -> tuple[float, str]:
    """Measure the peak FLOP/s of an instruction-set level.

    Returns (FLOP/s, kind of arithmetic).
    """
    library = load_library(level)
    with thread_pool(library, num_threads) as pool:
        return float(library.ts_measure_peak(pool)), library.ts_peak_kind().decode()
