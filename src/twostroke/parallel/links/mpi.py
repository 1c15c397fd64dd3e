"""MPI: messages by the library that `mpi4py` finds, for ranks that `mpirun` or `srun` started.

MPI connects processes once, at their start: a rank that was lost cannot be replaced.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import BackendError, RanksLostError
from twostroke.parallel.links.record import EngineKind, EngineRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_TAG: Final = 32767  # what every MPI allows
_STATUS_BYTES: Final = 256  # no MPI has a larger MPI_Status
# Functions that native code calls, in the order of native/links/mpi.cpp.
_CALLED: Final = (
    "MPI_Isend",
    "MPI_Issend",
    "MPI_Irecv",
    "MPI_Test",
    "MPI_Cancel",
    "MPI_Request_free",
)


def obstacle() -> str | None:
    """Return why MPI cannot be used here, or None."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    try:
        size = _mpi().COMM_WORLD.size
    except (ImportError, RuntimeError) as error:
        return f"mpi4py finds no MPI library: {error}"
    return None if size > 1 else "this process was not started by mpirun or srun"


def version() -> str:
    """Return the MPI library's name and version."""
    name, numbers = _mpi().get_vendor()
    return f"{name} {'.'.join(map(str, numbers))}"


class MpiConnections:
    """MPI_COMM_WORLD, whose ranks are ours."""

    kind = EngineKind.MPI
    _num_opened = 0  # each connection has its own tag

    def __init__(self, rank: int, num_ranks: int, on_error: ctypes.c_void_p) -> None:
        """Use the world that MPI has made.

        Raises:
            BackendError: its ranks are not these.
        """
        del on_error  # MPI tells nobody that a process is gone
        mpi = _mpi()
        self._world = mpi.COMM_WORLD
        if (self._world.rank, self._world.size) != (rank, num_ranks):
            raise BackendError(
                f"MPI says that this is rank {self._world.rank} of {self._world.size}, but it is "
                f"rank {rank} of {num_ranks}. Start one process for each rank with mpirun."
            )
        for world in (self._world, mpi.COMM_SELF):
            world.Set_errhandler(mpi.ERRORS_RETURN)
        self._rank, self._num_ranks = rank, num_ranks
        self._lost = (ctypes.c_int32 * num_ranks)()
        self._status = (ctypes.c_uint8 * _STATUS_BYTES)()

    def address(self) -> bytes:
        """Return how often this process has connected, which tells apart new ones."""
        return str(MpiConnections._num_opened).encode()

    def connect(self, addresses: Sequence[bytes]) -> EngineRecord:
        """Check that all ranks are those of the beginning.

        Raises:
            RanksLostError: one is new.
        """
        if len(set(addresses)) != 1:
            raise RanksLostError("MPI cannot replace a lost rank: start all ranks again.")
        MpiConnections._num_opened += 1
        mpi, tag = _mpi(), MpiConnections._num_opened % _MAX_TAG
        record = EngineRecord(self.kind, self._rank, self._num_ranks, tag, -1)
        record.world, record.byte_type = (
            mpi._handleof(value)  # noqa: SLF001 - mpi4py's interface for native code
            for value in (self._world, mpi.BYTE)
        )
        record.lost = ctypes.addressof(self._lost)
        record.ignored_status = ctypes.addressof(self._status)
        library = ctypes.CDLL(mpi.__file__)  # finds the functions of the MPI library as well
        for i, name in enumerate(_CALLED):
            record.functions[i] = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        return record

    def close(self) -> None:
        """Do nothing: MPI's connections end with the process."""


def _mpi() -> Any:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"  # any thread, one at a time
    mpi4py.rc.finalize = False  # would wait for ranks that are gone
    from mpi4py import MPI

    return MPI
