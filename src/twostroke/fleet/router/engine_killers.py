"""Finds requests that kill the engines that compute them, and refuses such requests.

A replica knows which request killed its own engine (`engine/process/pending.py`). The router knows
it for the whole fleet. So a request that kills engines before its answer begins ends at most
`MAX_TRIES` engines, however often, by whom and on which path it is sent.

When an engine dies, all its running requests fail, so a death alone does not show which request was
the cause. A request during which `_DEATHS_TO_ISOLATE` engines have died is therefore sent to a
replica that computes nothing else (`attempts.py`). Requests are recognized by a hash of their
content, and a content is refused only if the latest death happened while the replica computed no
other content. So a harmless request is answered, however many killers run beside it, and a killer
is refused after its third death.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import EngineKillerError
from twostroke.fleet.router.content_hash import content_hash

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TRIES: Final = 3  # that a request may lose: it may be what kills
MAX_LOST_ATTEMPTS: Final = 8  # of one request; a killer is known earlier
FORGET_DEATHS_S: Final = 3600.0  # after the last death of an engine
FORGET_LOSSES_S: Final = 60.0  # after the last lost connection, which says less
_MAX_RECORDS: Final = 4096
_LARGE_BODY_BYTES: Final = 64 * 1024  # hashed in a thread
_DEATHS_TO_ISOLATE: Final = 2


class _DeathRecord:
    """The engine deaths during requests with the same content.

    Attributes:
        num_deaths, num_losses: deaths that replicas have reported, and connections that replicas
            have closed without an answer (losses).
        died_s, lost_s: when the last death and the last loss happened.
        ended_at_s: when the last death or loss happened at a replica, by the replica's URL.
        was_alone: whether the replica computed no other content at the last death or loss.
        has_progress: whether a part of an answer had arrived before the last death or loss, and
            another replica can continue that answer.
        turn: the lock that a request with this content holds while it runs.
    """

    def __init__(self) -> None:
        self.num_deaths = self.num_losses = 0
        self.died_s = self.lost_s = 0.0
        self.ended_at_s: dict[str, float] = {}
        self.was_alone = False
        self.has_progress = False
        self.turn = asyncio.Lock()


class Killers:
    """Counts engine deaths by the content of the requests that the engines were computing.

    A content is given by its hash (`content_hash`), which is empty if no engine computes the
    request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the counts, without any engine death; `clock` returns monotonic seconds."""
        self._clock = clock
        self._records: OrderedDict[bytes, _DeathRecord] = OrderedDict()  # the latest death last

    def note_death(
        self, content: bytes, url: str, sent_s: float, *, is_alone: bool, has_progress: bool = False
    ) -> None:
        """Count the death of an engine while it computed a request with this content.

        If several requests with the same content ran when the engine died, the death counts once.

        Args:
            content: the hash of the request's content.
            url: the URL of the replica.
            sent_s: when the request was sent to the replica.
            is_alone: whether the replica computed no other content since `sent_s`.
            has_progress: whether the replica has sent a part of an answer that another replica can
                continue.
        """
        record = self._record_end(content, url, sent_s, is_alone=is_alone)
        self._note_progress(content, record, has_progress=has_progress)
        if record is not None:
            record.num_deaths += 1
            record.died_s = self._clock()

    def note_loss(
        self, content: bytes, url: str, sent_s: float, *, is_alone: bool, has_progress: bool = False
    ) -> None:
        """Count that a replica closed the connection of a request while it computed the request.

        The arguments are as for `note_death`. Such a loss is forgotten sooner than a death.
        """
        record = self._record_end(content, url, sent_s, is_alone=is_alone)
        self._note_progress(content, record, has_progress=has_progress)
        if record is not None:
            record.num_losses += 1
            record.lost_s = self._clock()

    def clear(self, content: bytes) -> None:
        """Forget the engine deaths of a content, since a request with it was answered."""
        if self._records:
            self._records.pop(content, None)

    async def check_body(self, body: bytes, model: str) -> bytes:
        """Return the content hash of a request's body; raise if the content kills engines.

        `model` is the name under which replicas list the request's model.

        Raises:
            EngineKillerError: the router refuses requests with this content.
        """
        if len(body) <= _LARGE_BODY_BYTES:
            content = content_hash(body, model)
        else:  # other requests continue meanwhile
            content = await asyncio.to_thread(content_hash, body, model)
        self.check(content)
        return content

    def check(self, content: bytes) -> None:
        """Raise EngineKillerError if requests with this content are known to kill engines."""
        if self.is_refused(content):
            raise refused(self.count(content))

    def is_refused(self, content: bytes) -> bool:
        """Return whether requests with this content are known to kill engines.

        True after `MAX_TRIES` deaths, if the replica computed no other content at the last death.
        """
        return (
            self.is_suspected(content)
            and self.count(content) >= MAX_TRIES
            and self._records[content].was_alone
        )

    def is_suspected(self, content: bytes) -> bool:
        """Return whether engines died during requests with this content before any progress.

        A request that always kills its engine at the same token makes no progress when another
        replica continues it. If it did make progress, something else has probably ended the engine.
        """
        return self.count(content) > 0 and not self._records[content].has_progress

    def must_isolate(self, content: bytes) -> bool:
        """Return whether a request with this content needs a replica that computes nothing else.

        True after two deaths: the request may be their cause, or may have run beside the cause.
        """
        return self.is_suspected(content) and self.count(content) >= _DEATHS_TO_ISOLATE

    def count(self, content: bytes) -> int:
        """Return how many recent engine deaths and losses happened during this content."""
        record = self._records.get(content)
        if record is None:
            return 0
        now_s = self._clock()
        if now_s - record.died_s > FORGET_DEATHS_S:
            record.num_deaths = 0
        if now_s - record.lost_s > FORGET_LOSSES_S:
            record.num_losses = 0
        count = record.num_deaths + record.num_losses
        if not count and not record.turn.locked():
            del self._records[content]
        return count

    async def take_turn(self, content: bytes) -> asyncio.Lock | None:
        """Wait until no other request with this content runs, if an engine died during one.

        Copies of a request that kills engines then run one after another, so they are refused
        before they end more than `MAX_TRIES` engines.

        Returns:
            A lock that the caller releases when its attempt has ended; None if no engine died, or
            if another request with this content was answered meanwhile.
        """
        while self.count(content):
            record = self._records[content]
            await record.turn.acquire()
            if self._records.get(content) is record and self.count(content):
                return record.turn
            record.turn.release()
        return None

    def _note_progress(
        self, content: bytes, new_record: _DeathRecord | None, *, has_progress: bool
    ) -> None:
        """Note whether a request had made progress before a death or loss.

        `new_record` is the record of the content; None if a request with the same content has
        already reported the same death. If several requests report the same death, progress of any
        of them counts.
        """
        if new_record is not None:
            new_record.has_progress = has_progress
        elif has_progress and content in self._records:
            self._records[content].has_progress = True

    def _record_end(
        self, content: bytes, url: str, sent_s: float, *, is_alone: bool
    ) -> _DeathRecord | None:
        """Return the record of a content, to which the caller adds a death or a loss.

        None if the content is empty, or if a request with the same content has already reported the
        same death.
        """
        if not content:
            return None
        record = self._records.setdefault(content, _DeathRecord())
        self._records.move_to_end(content)
        while len(self._records) > _MAX_RECORDS:
            self._records.popitem(last=False)
        if record.ended_at_s.get(url, -1.0) >= sent_s:
            return None
        record.ended_at_s[url] = self._clock()
        record.was_alone = is_alone
        return record


class ComputedContents:
    """The contents of the requests that one replica computes for this router.

    They show whether a request was the only one at the replica when the engine died.

    Attributes:
        num_requests: requests that the replica computes now.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self.num_requests = 0
        self._counts: dict[bytes, int] = {}
        self._num_begun = 0
        self._last_shared = 0  # all requests up to this number had another content beside them

    def add(self, content: bytes) -> int:
        """Add a request that is sent to the replica; return its number for `was_alone`."""
        self.num_requests += 1
        self._counts[content] = self._counts.get(content, 0) + 1
        self._num_begun += 1
        if len(self._counts) > 1:
            self._last_shared = self._num_begun
        return self._num_begun

    def remove(self, content: bytes) -> None:
        """Remove a request that has ended."""
        self.num_requests -= 1
        if self._counts[content] > 1:
            self._counts[content] -= 1
        else:
            del self._counts[content]

    def was_alone(self, number: int) -> bool:
        """Return whether the replica has computed no other content since a request was added.

        `number` is the request's number, which `add` has returned.
        """
        return number > self._last_shared


def refused(count: int) -> EngineKillerError:
    """Return the error for a request whose content has killed `count` engines."""
    return EngineKillerError(
        "{count} engines died while they computed this request, so this router refuses it for up "
        "to an hour. Change the request, or report it with the logs of the servers.",
        count=count,
    )
