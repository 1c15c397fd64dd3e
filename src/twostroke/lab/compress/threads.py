"""Threads for NumPy's products, in place of the threads of its BLAS library.

OpenBLAS's own threads wait for each other at the end of each small product: on a busy machine this
takes most of the time. Their number also changes the results. Here each product uses one thread,
and several products are computed at the same time.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.hardware import resolve_num_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY_MAPS = Path("/proc/self/maps")
# Function names of the OpenBLAS in NumPy's wheels (with and without 64-bit integers) and of a
# system's OpenBLAS.
_FUNCTION_NAMES = tuple(
    f"{name}_{{}}_num_threads{suffix}"
    for name in ("scipy_openblas", "openblas")
    for suffix in ("64_", "")
)


@contextmanager
def own_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of compute threads; meanwhile NumPy's BLAS library uses a single thread.

    The pool has as many threads as the environment allows.
    """
    libraries = [functions for path in _library_paths() if (functions := _thread_functions(path))]
    previous_counts = [get_count() for get_count, _ in libraries]
    try:
        for _, set_count in libraries:
            set_count(1)
        with ThreadPoolExecutor(resolve_num_threads(None)) as pool:
            yield pool
    finally:
        for (_, set_count), count in zip(libraries, previous_counts, strict=True):
            set_count(count)


def _library_paths() -> list[str]:
    """Return the paths of the OpenBLAS libraries that this process has loaded."""
    lines = _MEMORY_MAPS.read_text().splitlines() if _MEMORY_MAPS.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    return sorted(path for path in paths if Path(path).exists())


def _thread_functions(path: str) -> tuple[Any, Any] | None:
    """Return the functions of an OpenBLAS library that get and set its number of threads.

    Returns None if the library has no such functions.
    """
    library = ctypes.CDLL(path)
    for name in _FUNCTION_NAMES:
        if hasattr(library, name.format("set")):
            return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None
