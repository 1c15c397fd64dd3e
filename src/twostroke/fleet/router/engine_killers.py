"""Finds requests that end the engines that compute them, and refuses them.

A replica knows what killed its own engine (`engine/process/pending.py`). The router knows it of
the whole fleet, so that a request which kills engines ends at most `MAX_TRIES` of them, however
often, by whom and on which path it is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import EngineKillerError
from twostroke.fleet.router.content_hash import content_hash

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MAX_TRIES: Final = 3  # that a request may lose: it may be what kills
FORGET_DEATHS_S: Final = 3600.0  # after the last death of an engine
FORGET_LOSSES_S: Final = 60.0  # after the last lost connection, which says less
_MAX_RECORDS: Final = 4096
_LARGE_BODY_BYTES: Final = 64 * 1024  # hashed in a thread
_DEATHS_TO_RUN_ALONE: Final = 2


class _KillerRecord:
    """The deaths of engines that computed requests with the same content."""

    def __init__(self) -> None:
        self.num_deaths = self.num_losses = 0
        self.died_s = self.lost_s = 0.0
        self.died_at_s: dict[str, float] = {}  # the last death, by the replica's URL
        self.turn = asyncio.Lock()


class Killers:
    """Counts engine deaths by the content of the requests that the engines computed.

    A content is a hash of `content_hash`; empty for a request that no engine computes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the counts, without any engine death; `clock` returns monotonic seconds."""
        self._clock = clock
        self._records: OrderedDict[bytes, _KillerRecord] = OrderedDict()  # the latest death last
        self._alone = asyncio.Lock()

    def note_death(self, content: bytes, url: str, sent_s: float) -> None:
        """Count the death of an engine that computed a request, which was sent at `sent_s`.

        `url` is the replica's. Several requests with the same content that were there at one death
        count once.
        """
        if not content:
            return
        record = self._record(content)
        if record.died_at_s.get(url, -1.0) >= sent_s:
            return
        now_s = self._clock()
        record.died_at_s[url] = record.died_s = now_s
        record.num_deaths += 1

    def note_loss(self, content: bytes) -> None:
        """Count that a replica closed a connection while it computed a request."""
        if not content:
            return
        record = self._record(content)
        record.num_losses += 1
        record.lost_s = self._clock()

    def clear(self, content: bytes) -> None:
        """Forget the engine deaths of a content, since a request with it was answered."""
        if self._records:
            self._records.pop(content, None)

    async def check_body(self, body: bytes, model: str) -> bytes:
        """Return the content of a request to a model, by its listed name; raise as `check`."""
        if len(body) <= _LARGE_BODY_BYTES:
            content = content_hash(body, model)
        else:  # other requests continue meanwhile
            content = await asyncio.to_thread(content_hash, body, model)
        self.check(content)
        return content

    def check(self, content: bytes) -> None:
        """Raise EngineKillerError if requests with this content have ended too many engines."""
        count = self.count(content)
        if count >= MAX_TRIES:
            raise refused(count)

    def count(self, content: bytes) -> int:
        """Return how many engines recently died or were lost with requests of this content."""
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

    @asynccontextmanager
    async def turn(self, content: bytes) -> AsyncIterator[None]:
        """Run a `with` block for a request that may kill engines, in its turn.

        After one death, requests with the same content are sent one after another. After two
        deaths, a request is sent alone among all requests with two deaths. If another request
        killed the engines, this one is then answered, and its deaths are forgotten.

        Raises:
            EngineKillerError: the content has ended too many engines.
        """
        async with AsyncExitStack() as turns:
            if self.count(content):
                await turns.enter_async_context(self._record(content).turn)
            if self.count(content) >= _DEATHS_TO_RUN_ALONE:
                await turns.enter_async_context(self._alone)
            self.check(content)
            if not self.count(content):  # another request with this content was answered
                await turns.aclose()
            yield

    def _record(self, content: bytes) -> _KillerRecord:
        record = self._records.setdefault(content, _KillerRecord())
        self._records.move_to_end(content)
        while len(self._records) > _MAX_RECORDS:
            self._records.popitem(last=False)
        return record


def refused(count: int) -> EngineKillerError:
    """Return the error for a request whose content has ended `count` engines."""
    return EngineKillerError(
        "{count} engines died while they computed this request, so this router refuses it for up "
        "to an hour. Change the request, or report it with the logs of the servers.",
        count=count,
    )
