"""UCX (openucx.org): a link over TCP, InfiniBand and other networks, by the library `libucp`.

UCX needs no launcher, reports broken connections, and can be opened again with other ranks.
Collectives run in native code, without Python.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int8,
    c_int32,
    c_size_t,
    c_uint64,
    c_void_p,
)
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.records import (
    AllGatherFunction,
    LinkRecord,
    ReceiveFunction,
    SendFunction,
)
from twostroke.core import env
from twostroke.core.env import install_command
from twostroke.core.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIN_API_VERSION: Final = (1, 10)  # the oldest version with all functions used here
_RESERVED_WORDS: Final = 256  # of 8 bytes, for fields that later versions have
_FEATURES: Final = 1  # bits of the masks that say which fields are used
_TAGS_AND_WAKE_UP: Final = 1 | 16
_THREAD_MODE: Final = 1
_ONE_AT_A_TIME: Final = 1
_ADDRESS_AND_ERRORS: Final = 1 | 2 | 4
_TELL_ERRORS: Final = 1
_FORCE: Final = 1 << 0  # ucp_ep_close_nbx: do not wait for the peer
_FLAGS: Final = 1 << 4
# Functions that native code calls, in the order of native/links/ucx.h.
_NATIVE_FUNCTIONS: Final = (
    "ucp_tag_send_nbx",
    "ucp_tag_recv_nbx",
    "ucp_worker_flush_nbx",
    "ucp_worker_progress",
    "ucp_request_check_status",
    "ucp_request_free",
    "ucp_request_cancel",
    "ucp_worker_arm",
)


class _ContextParameters(Structure):  # ucp_params_t
    _fields_: ClassVar = [
        ("mask", c_uint64),
        ("features", c_uint64),
        ("room", c_uint64 * _RESERVED_WORDS),
    ]


class _WorkerParameters(Structure):  # ucp_worker_params_t
    _fields_: ClassVar = [
        ("mask", c_uint64),
        ("thread_mode", c_int),
        ("room", c_uint64 * _RESERVED_WORDS),
    ]


class _EndpointParameters(Structure):  # ucp_ep_params_t
    _fields_: ClassVar = [
        ("mask", c_uint64),
        ("address", c_char_p),
        ("error_mode", c_int),
        ("on_error", c_void_p),
        ("on_error_argument", c_void_p),
        ("room", c_uint64 * _RESERVED_WORDS),
    ]


class _RequestParameters(Structure):  # ucp_request_param_t
    _fields_: ClassVar = [
        ("mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("room", c_uint64 * _RESERVED_WORDS),
    ]


def obstacle() -> str | None:
    """Return why the UCX link cannot be used on this machine; None if it can."""
    try:
        _library()
    except BackendError as error:
        return str(error)
    return None


def version() -> str:
    """Return the version of the UCX library."""
    text: bytes = _library().ucp_get_version_string()
    return f"UCX {text.decode()}"


class UcxConnections:
    """One rank's UCX worker, and its endpoints to the other ranks."""

    def __init__(self, rank: int, num_ranks: int, on_error: c_void_p) -> None:
        """Open this rank's UCX worker.

        If a connection breaks, UCX calls `on_error` with the address of the other rank's entry in
        `lost`.

        Raises:
            BackendError: UCX is not installed, or returns an error.
        """
        self._library = _library()
        self._rank, self._num_ranks, self._on_error = rank, num_ranks, on_error
        self._lost = (ctypes.c_int32 * num_ranks)()
        self._endpoints = (c_void_p * num_ranks)()
        self._context, self._worker = c_void_p(), c_void_p()
        context = _ContextParameters(_FEATURES, _TAGS_AND_WAKE_UP)
        worker = _WorkerParameters(_THREAD_MODE, _ONE_AT_A_TIME)
        call = self._library
        _check(call.ucp_init_version(*_MIN_API_VERSION, byref(context), None, byref(self._context)))
        _check(call.ucp_worker_create(self._context, byref(worker), byref(self._worker)))

    def address(self) -> bytes:
        """Return the bytes by which other ranks connect to this rank's UCX worker."""
        address, length = c_void_p(), c_size_t()
        call = self._library
        _check(call.ucp_worker_get_address(self._worker, byref(address), byref(length)))
        try:
            return ctypes.string_at(address, length.value)
        finally:
            call.ucp_worker_release_address(self._worker, address)

    def connect(self, addresses: Sequence[bytes]) -> UcxRecord:
        """Create UCX endpoints to all other ranks; UCX connects with the first collective."""
        for rank, address in enumerate(addresses):
            if rank == self._rank:
                continue
            entry = ctypes.addressof(self._lost) + rank * ctypes.sizeof(ctypes.c_int32)
            parameters = _EndpointParameters(
                _ADDRESS_AND_ERRORS, address, _TELL_ERRORS, self._on_error, entry
            )
            endpoint = c_void_p()
            _check(self._library.ucp_ep_create(self._worker, byref(parameters), byref(endpoint)))
            self._endpoints[rank] = endpoint.value
        event = c_int(-1)
        _check(self._library.ucp_worker_get_efd(self._worker, byref(event)))
        record = UcxRecord(self._rank, self._num_ranks, event.value)
        record.worker = self._worker
        record.endpoints = ctypes.addressof(self._endpoints)
        record.lost = ctypes.addressof(self._lost)
        for i, name in enumerate(_NATIVE_FUNCTIONS):
            record.functions[i] = ctypes.cast(getattr(self._library, name), c_void_p)
        return record

    def lost_ranks(self) -> list[int]:
        """Return the ranks to which the UCX connection broke."""
        return [rank for rank, status in enumerate(self._lost) if status]

    def close(self) -> None:
        """Close the connections to all ranks without waiting; may be called twice."""
        call, forced = self._library, _RequestParameters(_FLAGS, _FORCE)
        for rank, endpoint in enumerate(self._endpoints):
            if endpoint:
                self._finish(call.ucp_ep_close_nbx(endpoint, byref(forced)))
                self._endpoints[rank] = None
        if self._worker.value:
            call.ucp_worker_destroy(self._worker)
            self._worker = c_void_p()
        if self._context.value:
            call.ucp_cleanup(self._context)
            self._context = c_void_p()

    def _finish(self, request: int | None) -> None:
        """Wait until a UCX request has ended.

        `request`: the result of a UCX call: None, or a pointer. Pointers from 2^64 - 100 on are
        error codes.
        """
        if not request or request > 2**64 - 101:
            return
        while self._library.ucp_request_check_status(request) == 1:
            self._library.ucp_worker_progress(self._worker)
        self._library.ucp_request_free(request)


@cache
def _library() -> ctypes.CDLL:
    """Load libucp, from the package `libucx-cu12` (or -cu13), else from the system.

    Raises:
        BackendError: the library is not installed, or cannot be used.
    """
    # UCX must change neither signal handlers nor memory mappings. Unknown settings are no error.
    for name, value in {"HANDLE_ERRORS": "none", "MEM_EVENTS": "n", "LOG_LEVEL": "fatal"}.items():
        env.set_default(f"UCX_{name}", value)
    spec = find_spec("libucx")
    folders = [Path(folder) / "lib" for folder in (spec and spec.submodule_search_locations) or ()]
    paths = [str(folder / "libucp.so.0") for folder in folders]
    if installed := ctypes.util.find_library("ucp"):
        paths.append(installed)
    for path in paths:
        try:
            return _declare_types(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:
            raise BackendError(f"UCX at {path} cannot be used: {error}.") from None
    raise BackendError(f"UCX is not installed ({install_command('cluster')}).")


def _declare_types(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument and result types of libucp's functions for ctypes."""
    status, handle = c_int8, c_void_p
    signatures = {
        "ucp_get_version_string": (c_char_p, ()),
        "ucp_init_version": (status, (c_int, c_int, c_void_p, c_void_p, POINTER(handle))),
        "ucp_worker_create": (status, (handle, c_void_p, POINTER(handle))),
        "ucp_worker_get_address": (status, (handle, POINTER(handle), POINTER(c_size_t))),
        "ucp_worker_release_address": (None, (handle, handle)),
        "ucp_worker_get_efd": (status, (handle, POINTER(c_int))),
        "ucp_ep_create": (status, (handle, c_void_p, POINTER(handle))),
        "ucp_ep_close_nbx": (handle, (handle, c_void_p)),
        "ucp_request_check_status": (status, (handle,)),
        "ucp_request_free": (None, (handle,)),
        "ucp_worker_progress": (ctypes.c_uint, (handle,)),
        "ucp_worker_destroy": (None, (handle,)),
        "ucp_cleanup": (None, (handle,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name in _NATIVE_FUNCTIONS:
        getattr(library, name)
    return library


def _check(status: int) -> None:
    if status != 0:
        raise BackendError(f"UCX refuses (status {status}).")


_NUM_FUNCTIONS: Final = 8


class UcxRecord(Structure):
    """An open UCX worker for native code; mirrors the struct of native/links/ucx.h."""

    _fields_: ClassVar = [
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("event_fd", c_int32),
        ("worker", c_void_p),
        ("endpoints", c_void_p),
        ("lost", c_void_p),
        ("functions", c_void_p * _NUM_FUNCTIONS),
    ]


class UcxEngine:
    """One rank's connections by UCX, whose collectives run in native code; a `LinkEngine`."""

    def __init__(self, rank: int, num_ranks: int, level: str) -> None:
        """Create the native UCX context, in the kernel library of an instruction-set level."""
        self._library = call = load_library(level)
        self._rank, self._num_ranks = rank, num_ranks
        self._connections: UcxConnections | None = None
        self._in_use = threading.Lock()  # held while another thread uses the context
        self._context: int = call.ts_messages_create()
        self.record = LinkRecord(
            context=self._context,
            rank=rank,
            num_ranks=num_ranks,
            all_gather=ctypes.cast(call.ts_messages_all_gather, AllGatherFunction),
            send=ctypes.cast(call.ts_messages_send, SendFunction),
            receive=ctypes.cast(call.ts_messages_receive, ReceiveFunction),
        )

    def open(self, host: str) -> bytes:
        """Open a UCX worker and return its address; UCX finds this machine's addresses itself."""
        del host
        on_error = ctypes.cast(self._library.ts_messages_lose, ctypes.c_void_p)
        self._connections = UcxConnections(self._rank, self._num_ranks, on_error)
        return self._connections.address()

    def connect(self, parts: Sequence[bytes]) -> None:
        """Connect to the other ranks' UCX workers; collectives can run afterwards."""
        assert self._connections is not None
        record = self._connections.connect(parts)
        self._library.ts_messages_connect(self._context, ctypes.byref(record))

    def interrupt(self) -> None:
        """End a rank's wait in a collective, and make all later collectives fail."""
        with self._in_use:
            if self._context:
                self._library.ts_messages_abort(self._context)

    def progress(self) -> int:
        """Return a counter that changes when UCX moves bytes; odd inside a collective."""
        with self._in_use:
            count = self._library.ts_messages_progress(self._context) if self._context else 0
        return int(count)

    def leave(self) -> None:
        """Close the connections to all ranks, without waiting for the ranks."""
        if self._connections is not None:
            self.interrupt()
            self._connections.close()
            self._connections = None

    def close(self) -> None:
        """Free the native UCX context; may be called twice."""
        with self._in_use:
            context, self._context = self._context, 0
        if context:
            self._library.ts_messages_destroy(context)
