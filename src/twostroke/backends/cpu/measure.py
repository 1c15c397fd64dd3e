"""What this machine's memory and arithmetic can do at best: what figures stand beside."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.team import create_pool

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator


def measure_bandwidth(level: str, num_threads: int, num_bytes: int) -> float:
    """Return the bytes/s at which `num_threads` threads read a stream of `num_bytes`.

    The best of several passes over it, with huge pages and prefetching, within some 0.3 s.
    """
    with _pool(level, num_threads) as (library, pool):
        return float(library.ts_measure_bandwidth(pool, num_bytes))


def measure_peak(level: str, num_threads: int) -> tuple[float, str]:
    """Return operations/s (a multiply-add is two) of the level's best arithmetic, and its name."""
    with _pool(level, num_threads) as (library, pool):
        return float(library.ts_measure_peak(pool)), library.ts_peak_kind().decode()


@contextmanager
def _pool(level: str, num_threads: int) -> Iterator[tuple[ctypes.CDLL, int]]:
    library = load_library(level)
    pool = create_pool(library, num_threads)
    try:
        yield library, pool
    finally:
        library.ts_pool_destroy(pool)
