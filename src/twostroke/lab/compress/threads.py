"""Threads of our own over NumPy's products, each of which then uses one thread.

OpenBLAS's own threads wait for each other at the end of each small product: on a busy machine that
takes most of the time, and what one of them computes depends on their number.
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

_MAPS = Path("/proc/self/maps")
# The names of NumPy's own OpenBLAS, with and without 64-bit integers, and of a system's.
_NAMES = tuple(
    f"{name}_{{}}_num_threads{suffix}"
    for name in ("scipy_openblas", "openblas")
    for suffix in ("64_", "")
)


@contextmanager
def own_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield as many threads as the environment allows; meanwhile BLAS uses no others."""
    found = [functions for path in _libraries() if (functions := _functions(path))]
    before = [get() for get, _ in found]
    try:
        for _, set_number in found:
            set_number(1)
        with ThreadPoolExecutor(resolve_num_threads(None)) as pool:
            yield pool
    finally:
        for (_, set_number), number in zip(found, before, strict=True):
            set_number(number)


def _libraries() -> list[str]:
    """Return the paths of the OpenBLAS libraries of this process."""
    lines = _MAPS.read_text().splitlines() if _MAPS.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    return sorted(path for path in paths if Path(path).exists())


def _functions(path: str) -> tuple[Any, Any] | None:
    """Return a library's functions that get and set its number of threads."""
    library = ctypes.CDLL(path)
    for name in _NAMES:
        if hasattr(library, name.format("set")):
            return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None
