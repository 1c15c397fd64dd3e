"""What was asked of an engine in another process, until its last output."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import DeadlineError, OverloadedError
from twostroke.core.request import FinishReason
from twostroke.engine.output import Output, Usage
from twostroke.engine.process import messages as wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from twostroke.core.errors import TwostrokeError
    from twostroke.engine.client import Caller
    from twostroke.engine.scheduler.config import SchedulerConfig

_FULL_S: Final = 0.05  # that a full queue is taken to stay so
_MOST_FULL: Final = 1000
_GRACE_S: Final = 0.25  # for the engine's own answer to a timeout


class RemoteOutputs:
    """The outputs of what one message asked for; `num_open` of its answers have not ended."""

    def __init__(
        self,
        message: wire.Generate | wire.EmbedTexts,
        num_open: int,
        cancel: Callable[[RemoteOutputs], None],
    ) -> None:
        """Wait in the running event loop for outputs; `cancel` ends what still runs."""
        self.message = message
        self.asked_s = time.monotonic()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = False  # some of it holds pages, or did
        self.is_cancelled = False
        self.num_open = num_open
        if isinstance(message, wire.EmbedTexts):  # its texts are queued as there is room
            self.num_requests, self.num_tokens = 1, sum(map(len, message.texts))
        else:
            self.num_requests = num_open
            self.num_tokens = sum(map(len, message.prompts)) * message.params.n
        self._cancel = cancel
        self._unread: asyncio.Queue[Output] = asyncio.Queue()
        self._num_unread_ends = num_open

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs as they come, until every answer has had its last.

        Raises:
            RequestError: a constraint could not be followed further.
            EngineStoppedError: the engine died meanwhile.
            TwostrokeError: the engine failed on an answer.
        """
        while self._num_unread_ends:
            output = await self._unread.get()
            self._num_unread_ends -= output.finish_reason is not None
            if output.error is not None:
                raise output.error
            yield output

    @property
    def num_unread(self) -> int:
        """How many outputs have come and were not read yet."""
        return self._unread.qsize()

    def cancel(self) -> None:
        """Stop all that still runs."""
        self._cancel(self)

    def put(self, output: Output) -> None:
        """Take an output."""
        self.has_begun = True
        if not self.accepted.done():  # a quick step's output overtakes the word that it was queued
            self.accepted.set_result(None)
        self.num_open -= output.finish_reason is not None
        self._unread.put_nowait(output)

    def fail(self, error: TwostrokeError) -> None:
        """End with an error."""
        if self.accepted.done():
            self.end(FinishReason.ERROR, error)
        else:
            self.accepted.set_exception(error)

    def end(self, reason: FinishReason, error: TwostrokeError | None = None) -> None:
        """End all answers that have not ended."""
        usage = Usage(0, 0, 0)
        while self.num_open:
            self.put(Output(0, "", (), finish_reason=reason, usage=usage, error=error))


class FullQueue:
    """Knows for a moment whose requests found the queue full, and refuses more of them at once.

    So a flood costs the engine little of the time that it has for others.
    """

    def __init__(self) -> None:
        """Know of nothing."""
        self._refused: dict[tuple[str, int], tuple[float, str, dict[str, Any]]] = {}

    def note(self, caller: Caller, error: TwostrokeError) -> None:
        """Take in an error of the engine."""
        if isinstance(error, OverloadedError) and error.facts.get("is_full"):
            if len(self._refused) >= _MOST_FULL:
                self._refused.clear()
            found = time.monotonic(), error.reason, dict(error.facts)
            self._refused[caller.tenant, caller.priority] = found

    def check(self, caller: Caller) -> None:
        """Raise the OverloadedError of a moment ago."""
        found = self._refused.get((caller.tenant, caller.priority))
        if found is not None and time.monotonic() - found[0] < _FULL_S:
            _, reason, facts = found
            raise OverloadedError(reason, **facts)


class PendingCalls:
    """What is open at an engine, in the order in which it was asked for.

    Attributes:
        open: what has not ended, by the message's id.
        unsent: what of it waits for the process.
    """

    def __init__(self, send: Callable[[wire.Request], None]) -> None:
        """Give messages to `send` while `is_up`."""
        self.open: dict[int, RemoteOutputs] = {}
        self.unsent: dict[int, RemoteOutputs] = {}
        self.suspects = CrashHistory()
        self.is_up = True
        self._send = send
        self._alone: RemoteOutputs | None = None  # a suspect that was sent and has no output

    def check_room(self, new: RemoteOutputs, config: SchedulerConfig, room_s: float) -> None:
        """Refuse what finds too much waiting for the process; its caller may come in `room_s`.

        As in the scheduler's queue, what would be computed later does not count, up to another
        queue of the same size.

        Raises:
            OverloadedError: too many requests or tokens wait.
        """
        caller, requests, tokens = new.message.caller, [0, 0], [0, 0]  # before it, and in all
        for waits in self.unsent.values():
            other = waits.message.caller
            is_before = other.tenant == caller.tenant and other.priority <= caller.priority
            for i in range(0 if is_before else 1, 2):
                requests[i] += waits.num_requests
                tokens[i] += waits.num_tokens
        for i in range(2):
            most, most_tokens = config.max_waiting_requests << i, config.max_waiting_tokens << i
            if requests[i] >= most:
                reason = f"{requests[i]} requests wait until the engine can take them."
                raise OverloadedError(reason, room_s=room_s)
            if tokens[i] and tokens[i] + new.num_tokens > most_tokens:
                reason = f"{tokens[i]} tokens wait until the engine can take them."
                raise OverloadedError(reason, room_s=room_s)

    def add(self, outputs: RemoteOutputs) -> None:
        """Open what was asked for, and send it as soon as it may go."""
        id_ = outputs.message.id
        self.open[id_] = self.unsent[id_] = outputs
        self.send_waiting()

    def drop(self, outputs: RemoteOutputs) -> None:
        """Forget what has ended; others may then go."""
        id_ = outputs.message.id
        del self.open[id_]
        self.unsent.pop(id_, None)
        self.speaks(outputs)

    def speaks(self, outputs: RemoteOutputs) -> None:
        """Note an output, or the end: others need not wait for it."""
        if outputs is self._alone:
            self._alone = None
        if self.unsent:
            self.send_waiting()

    def send_waiting(self) -> None:
        """Send what may go now.

        A suspect goes when nothing else is computed; the rest goes after its first output.
        """
        while self.unsent and self.is_up and self._alone is None:
            id_, outputs = next(iter(self.unsent.items()))
            if self.suspects.must_run_alone(outputs.message):
                if len(self.open) > len(self.unsent):
                    return
                self._alone = outputs
            del self.unsent[id_]
            self._send(replace(outputs.message, waited_s=time.monotonic() - outputs.asked_s))

    def end_begun(self, error: TwostrokeError, compiled: Sequence[wire.Compile]) -> bool:
        """End what a process has begun that died; the rest waits for the next.

        Constraints in `compiled` were compiled meanwhile. Returns whether there was any of both.
        """
        self.is_up, self._alone = False, None
        begun = [outputs for outputs in self.open.values() if outputs.has_begun]
        running: list[wire.Request] = [*(outputs.message for outputs in begun), *compiled]
        self.suspects.note(running)
        for outputs in list(self.open.values()):
            if outputs.is_cancelled or outputs.has_begun:
                del self.open[outputs.message.id]
            if outputs.is_cancelled:
                outputs.end(FinishReason.CANCEL)
            elif outputs.has_begun:
                outputs.fail(error)
        self.unsent = dict(self.open)
        return bool(running)

    def end_late(self) -> None:
        """End what is past its timeout, though the engine has not done so."""
        now_s = time.monotonic() - _GRACE_S
        for id_, outputs in list(self.open.items()):
            caller = outputs.message.caller
            if outputs.asked_s + caller.timeout_s - caller.spent_s < now_s:
                if id_ not in self.unsent:
                    self._send(wire.Cancel(id_))
                self.drop(outputs)
                error = DeadlineError.of_timeout(caller.timeout_s)
                error.facts["is_unrun"] = not outputs.has_begun
                outputs.fail(error)

    def end_all(self, error: TwostrokeError) -> None:
        """End everything: no process follows."""
        for outputs in self.open.values():
            outputs.fail(error)
        self.open.clear()
        self.unsent.clear()


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
