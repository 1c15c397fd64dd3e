"""The threads of a native library, each at home on a memory node where there are several."""

from __future__ import annotations

from ctypes import c_int32
from typing import TYPE_CHECKING

from twostroke.backends.cpu.records import NodeRecord
from twostroke.core.errors import BackendError
from twostroke.core.nodes import memory_nodes, place_threads

if TYPE_CHECKING:
    import ctypes


def create_pool(library: ctypes.CDLL, num_threads: int) -> int:
    """Return a pool of threads; `ts_pool_destroy` ends it.

    Raises:
        BackendError: the operating system refuses so many.
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
    return pool
