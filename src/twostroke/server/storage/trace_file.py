"""The file of a recorded trace: requests are appended to it, without their text."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.errors import UsageError
from twostroke.core.recorded_trace import TracedRequest, TraceHeader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.core.recorded_trace import ServerSettings

_TENANT_DIGITS: Final = 6
_NUM_COMPARED_BYTES: Final = len('{"recorded_trace":')  # of a header, before its version
_logger = logging.getLogger("twostroke.serve")


def check_trace_file(path: Path) -> None:
    """Check that a trace can be recorded to `path`, before a model is loaded.

    Raises:
        UsageError: the file cannot be written or is no trace, or another server records to it.
    """
    os.close(_open_trace(path))


class TraceFile:
    """The file of `--record-trace`, a workload that `twostroke simulate` can replay.

    It has JSON lines: a header with the server's settings, and a line for each answer, or for each
    request of a router. Whole lines are appended.

    Attributes:
        is_open: whether lines are still recorded.
    """

    def __init__(self, path: Path, settings: ServerSettings | None = None) -> None:
        """Open the trace at `path`, which may have the requests of earlier runs.

        The header has the `settings` of the server.

        Raises:
            UsageError: the file cannot be written or is no trace, or another server records to
                it.
        """
        self._path = path
        self._descriptor: int | None = _open_trace(path)
        self._epoch_s = time.time() - time.monotonic()  # a clock that is set has no effect
        self._tenant_key = secrets.token_bytes(16)
        self._append(msgspec.json.encode(TraceHeader(settings=settings)) + b"\n")

    @property
    def is_open(self) -> bool:
        """Whether lines are recorded: the file was not closed, and no write has failed."""
        return self._descriptor is not None

    def change_settings(self, settings: ServerSettings) -> None:
        """Note that later requests are served with other settings."""
        if self.is_open:
            header = TraceHeader(settings=settings, continues=True)
            self._append(msgspec.json.encode(header) + b"\n")

    def unix_s(self, monotonic_s: float) -> float:
        """Convert a time of the monotonic clock to Unix time."""
        return round(self._epoch_s + monotonic_s, 3)

    def tenant_hash(self, name: str) -> str:
        """Return a short keyed hash of a tenant's name; the key of the hash is never stored."""
        if not name:
            return ""
        import hashlib

        digest = hashlib.blake2b(name.encode(), key=self._tenant_key, digest_size=8)
        return digest.hexdigest()[:_TENANT_DIGITS]

    def write(self, requests: Sequence[TracedRequest]) -> None:
        """Append a line for each request; stop recording if the disk is full, for example."""
        if self.is_open:
            self._append(b"".join([msgspec.json.encode(request) + b"\n" for request in requests]))

    def close(self) -> None:
        """Close the file; every line is already written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, text: bytes) -> None:
        assert self._descriptor is not None
        try:
            file = os.fstat(self._descriptor)
            if os.write(self._descriptor, text) < len(text):
                if not stat.S_ISREG(file.st_mode):
                    raise OSError("its reader is too slow")  # noqa: TRY301 - as below
                os.ftruncate(self._descriptor, file.st_size)  # without half a line
                raise OSError("the disk is full")  # noqa: TRY301 - one place stops the recording
        except OSError as error:
            reason = error.strerror or error
            _logger.warning("The trace %s is not recorded any further: %s.", self._path, reason)
            self.close()


def _open_trace(path: Path) -> int:
    """Open a trace for this process alone, and return its file descriptor."""
    # A pipe whose reader is slow ends the recording instead of blocking the server.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}."
        raise UsageError(reason, field="record_trace") from None
    reason = ""
    if not _is_trace_or_empty(descriptor):
        reason = f"must be a new file or a recorded trace, which {path.name} is not."
    with suppress(OSError):  # a file system without locks
        try:
            # Lines name earlier lines by their distance, so two servers cannot share a file.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = f"must be another file: another server records to {path.name}."
    if reason:
        os.close(descriptor)
        raise UsageError(reason, field="record_trace")
    return descriptor


def _is_trace_or_empty(descriptor: int) -> bool:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return True
    begin = msgspec.json.encode(TraceHeader())[:_NUM_COMPARED_BYTES]
    return os.pread(descriptor, len(begin), 0) in (b"", begin)
