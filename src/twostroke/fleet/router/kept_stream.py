"""Keeps the records of a stream, with which another replica can continue the stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import EngineDiedError
from twostroke.fleet.router.response import ReplicaError
from twostroke.server.auth.usage_header import STREAMS
from twostroke.server.http.router_messages import LOST_MARK, NEW_STREAM, RECORD_MARK, RESUME_HEADER

if TYPE_CHECKING:
    from twostroke.fleet.router.replica_registry import Replica
    from twostroke.fleet.router.response import Head

MAX_MEMORY_BYTES: Final = 256 << 20  # of bodies and records of all streams
_MAX_HELD_BYTES: Final = 8 << 20  # of events whose record has not come
_MAX_FIRST_BYTES: Final = 4096
PRIVATE_LINE: Final = b": twostroke-"
_HEARTBEATS: Final = re.compile(rb"(?::[^\r\n]*[\r\n]|\s)+")
_NEXT_LINE: Final = re.compile(rb"\n(?=" + RECORD_MARK + b"|" + LOST_MARK + b")")


class StoppedReplicaError(ReplicaError):
    """A replica reports, in the last line of a stream, that it could not finish the stream.

    Attributes:
        has_died: whether the replica's engine has died.
    """

    def __init__(self, code: bytes) -> None:
        """Create the error for the code that the replica has sent."""
        super().__init__("The replica has stopped before the end of the stream.")
        self.has_died = code == EngineDiedError.code.encode()


class StreamMemory:
    """Limits the memory of all streams that are kept.

    Attributes:
        num_bytes: the bytes of request bodies and records that are kept now.
    """

    def __init__(self, max_bytes: int = MAX_MEMORY_BYTES) -> None:
        """Start without a stream."""
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def take(self, num_bytes: int) -> bool:
        """Add bytes; return False, and add nothing, if there is no room."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True


class KeptStream:
    """The parts of a request and its stream that another replica needs to continue the stream.

    A record is a line of engine outputs that a Twostroke server adds to its stream for the router
    (`server/generation/stream_records.py`).

    Attributes:
        first_bytes: the beginning of the stream, which has the id of the response.
        origin: the version and the numerics (`ReplicaFacts`) of the replica that began the stream;
            None before its response has begun.
        has_progress: whether a record has arrived since the request was last sent to a replica.
        lost_code: the error's code, if the replica could not finish the stream.
    """

    def __init__(self, body: bytes, memory: StreamMemory) -> None:
        """Keep the body of a request, if `memory` has room."""
        self.first_bytes = b""
        self.origin: tuple[str, str] | None = None
        self.has_progress = False
        self.lost_code = b""
        self._body = body
        self._memory = memory
        self._num_bytes = len(body)
        self._is_kept = memory.take(len(body))
        self._has_content = False  # of a stream without records, or of another response
        self._records: list[bytes] = []
        self._line_end: bytes | None = None  # of a stream with records
        self._held_bytes = b""

    @property
    def can_continue(self) -> bool:
        """Whether another replica can continue the response, or start it again."""
        return self._is_kept and not self._has_content

    def message(self, replica: Replica) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """Return the body for a replica, with the records so far, and the headers to add."""
        self._held_bytes = self.lost_code = b""
        self._line_end = None
        self.has_progress = False
        if replica.is_foreign:
            return self._body, []
        if not self._records:
            return self._body, [(RESUME_HEADER, NEW_STREAM)]
        length = b"%d" % len(self._body)
        return b"\n".join([self._body, *self._records]), [(RESUME_HEADER, length)]

    def begin(self, head: Head, replica: Replica, model: str) -> None:
        """Start to read the response of a replica; `head` is the head of this response.

        Raises:
            ReplicaError: the replica begins a new stream instead of continuing this stream.
        """
        if head.value(RESUME_HEADER) and head.media_type in STREAMS:
            self._line_end = STREAMS[head.media_type][0]
            facts = replica.facts
            self.origin = facts.shared_fact("version", model), facts.shared_fact("numerics", model)
        elif self._records:
            raise ReplicaError(f"{replica.url} has begun a stream that it was to continue.")

    def suits(self, replica: Replica, model: str) -> bool:
        """Return whether a replica has the version and numerics of the stream's first replica."""
        if not self._records:
            return True
        facts = replica.facts
        arithmetic = facts.shared_fact("version", model), facts.shared_fact("numerics", model)
        return not replica.is_foreign and arithmetic == self.origin

    def take(self, data: bytes, *, is_last: bool) -> bytes:
        """Take received bytes, keep their records, and return the bytes for the client.

        Events are held back until the record that follows them has arrived, or `is_last` is set.
        """
        if self._line_end is None:
            self._has_content |= bool(data) and not _is_heartbeat(data)
            return data
        data, self._held_bytes = self._held_bytes + data, b""
        parts: list[bytes] = []
        start = 0
        while not self.lost_code:
            position = start
            if not data.startswith((RECORD_MARK, LOST_MARK), start):
                match = _NEXT_LINE.search(data, start)
                if match is None:
                    break
                position = match.end()
            end = data.find(self._line_end, position)
            if end < 0:
                break
            if data.startswith(LOST_MARK, position):
                self.lost_code = data[position + len(LOST_MARK) : end]
                return b"".join(parts)
            parts.append(data[start:position])
            self._keep(data[position + len(RECORD_MARK) : end])
            start = end + len(self._line_end)
        rest = data[start:]
        if is_last or _is_heartbeat(rest):
            parts.append(rest if not self.lost_code else b"")
        elif len(rest) > _MAX_HELD_BYTES and not rest.startswith(PRIVATE_LINE):
            self.release()  # later records are still removed
            start = rest.rfind(b"\n") + 1
            if not PRIVATE_LINE.startswith(rest[start : start + len(PRIVATE_LINE)]):
                start = len(rest)
            parts.append(rest[:start])
            self._held_bytes = rest[start:]
        else:
            self._held_bytes = rest
        client_data = b"".join(parts)
        if len(self.first_bytes) < _MAX_FIRST_BYTES:
            self.first_bytes += client_data[:_MAX_FIRST_BYTES]
        return client_data

    def release(self) -> None:
        """Forget the body and the records."""
        if self._is_kept:
            self._memory.num_bytes -= self._num_bytes
        self._is_kept = False
        self._body = b""
        self._records.clear()

    def _keep(self, record: bytes) -> None:
        if self._is_kept and self._memory.take(len(record)):
            self._num_bytes += len(record)
            self._records.append(record)
        else:
            self.release()
        self.has_progress = self._is_kept


def _is_heartbeat(data: bytes) -> bool:
    """Return whether bytes are only comments and white space, which keep a connection alive."""
    return PRIVATE_LINE not in data and _HEARTBEATS.fullmatch(data) is not None
