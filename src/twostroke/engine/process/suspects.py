"""What was being computed when engines died: a request that kills them is found and refused.

A death does not say which of the running requests caused it. What was there at two deaths is
computed alone the next time; if that ends in another death, it is refused.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.engine.process import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_KNOWN: Final = 4096
_FORGET_S: Final = 3600.0  # after the last death
_DEATHS_TO_SUSPECT: Final = 2
_DEATHS_TO_REFUSE: Final = 4  # even if there were always others


class _Record(msgspec.Struct):
    num_deaths: int = 0
    was_alone: bool = False  # at the last one
    died_s: float = 0.0


class CrashHistory:
    """Counts deaths by what was asked for, whoever asks and however often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of no death."""
        self._clock = clock
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # the latest death last

    def note(self, running: Sequence[wire.Request]) -> None:
        """Note a death while `running` were computed."""
        keys = set(map(_key, running))  # the same may have been asked several times
        for key in keys:
            record = self._known(key) or _Record()
            record.num_deaths += 1
            record.was_alone = len(keys) == 1
            record.died_s = self._clock()
            self._records[key] = record
            self._records.move_to_end(key)
        while len(self._records) > _MOST_KNOWN:
            self._records.popitem(last=False)

    def clear(self, message: wire.Request) -> None:
        """Note that a request was answered: it is not what kills."""
        if self._records:
            self._records.pop(_key(message), None)

    def num_deaths(self, message: wire.Request) -> int:
        """Return how many deaths a request has seen."""
        record = self._known(_key(message)) if self._records else None
        return record.num_deaths if record is not None else 0

    def must_run_alone(self, message: wire.Request) -> bool:
        """Return whether nothing else may be computed beside a request."""
        return self.num_deaths(message) >= _DEATHS_TO_SUSPECT

    def is_refused(self, message: wire.Request) -> bool:
        """Return whether a request has killed engines."""
        deaths = self.num_deaths(message)
        if deaths <= _DEATHS_TO_SUSPECT:
            return False
        return deaths >= _DEATHS_TO_REFUSE or self._records[_key(message)].was_alone

    def _known(self, key: bytes) -> _Record | None:
        record = self._records.get(key)
        if record is not None and self._clock() - record.died_s > _FORGET_S:
            del self._records[key]
            return None
        return record


def _key(message: wire.Request) -> bytes:
    """Return what is the same whenever the same is asked for."""
    match message:
        case wire.Generate():
            asked: object = (message.prompts, message.params)
        case wire.EmbedTexts():
            asked = (message.texts, message.params)
        case wire.Compile():
            asked = message.constraint
        case _:
            raise AssertionError(message)
    return hashlib.sha256(wire.encode(asked)).digest()
