"""The open calls of an engine in another process, and the history of its crashes.

A call is one `Generate` or `EmbedTexts` message. `PendingCalls` keeps calls until their last
output and sends them to the process. After the death of the process, it sends them to the next
process, which continues their answers. `CrashHistory` finds requests that kill engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import secrets
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import (
    DeadlineError,
    EngineDiedError,
    EngineKillerError,
    OverloadedError,
)
from twostroke.core.message_text import counted_noun
from twostroke.core.request import FinishReason
from twostroke.engine.output import Output, Usage
from twostroke.engine.process import messages as wire
from twostroke.engine.process.served import UnreadOutputs
from twostroke.engine.resumption import DeliveredAnswer, ResumptionLimits, ResumptionTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.errors import TwostrokeError
    from twostroke.engine.client import Caller
    from twostroke.engine.resumption import AnswerProgress
    from twostroke.engine.scheduler.config import SchedulerConfig

_QUEUE_FULL_S: Final = 0.05  # a full queue is assumed to stay full for this time
_MAX_REFUSALS: Final = 1000  # that are remembered
_TIMEOUT_GRACE_S: Final = 0.25  # in which the engine ends a timed-out request itself
_SEED_BITS: Final = 62


class RemoteOutputs(UnreadOutputs):
    """The outputs of one call to an engine process, which the server reads in its event loop.

    Attributes:
        message: the message of the call.
        received_s: when the server got the call, on the monotonic clock.
        accepted: a future that is done when the engine has queued or refused the call.
        has_started: whether any engine process has started to compute the call.
        is_started: whether the present engine process has started to compute the call.
        has_output: whether the present engine process has sent an output of the call, since the
            call was sent to it last.
        died_s: when an engine process that computed the call died, until the call has another
            output; else None.
        num_deaths: deaths of engine processes that were computing the call.
        was_admitted: whether an engine process has queued the call.
        is_cancelled: whether the caller has cancelled the call.
        num_open: answers that have not ended.
        num_requests, num_tokens: the size of the call in the queue.
    """

    def __init__(
        self,
        message: wire.Generate | wire.EmbedTexts,
        num_open: int,
        cancel: Callable[[RemoteOutputs], None],
    ) -> None:
        """Read outputs in the running event loop; `cancel(self)` cancels the call.

        `num_open` is the number of answers that the call has.
        """
        self.message = message
        self.received_s = time.monotonic()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_started = self.is_started = self.has_output = False
        self.died_s: float | None = None
        self.num_deaths = 0
        self.is_cancelled = False
        self.num_open = num_open - sum(progress.has_ended for progress in message.progress)
        super().__init__(self.num_open)
        if isinstance(message, wire.EmbedTexts):  # its texts are submitted as the queue has room
            self.num_requests = 1
            self.num_tokens = sum(map(len, message.texts))
        else:
            self.num_requests = num_open
            self.num_tokens = sum(map(len, message.prompts)) * message.params.n
        self._cancel = cancel
        self._delivered = [DeliveredAnswer(progress) for progress in message.progress] or [
            DeliveredAnswer() for _ in range(num_open)
        ]
        self.was_admitted = bool(message.progress)  # by another server
        self._started_s = 0.0
        self._seed = secrets.randbits(_SEED_BITS)  # for a request without a seed

    def cancel(self) -> None:
        """Cancel the call's answers that have not ended."""
        self._cancel(self)

    def start(self) -> None:
        """Record that the engine process has started to compute the call."""
        self.is_started = self.was_admitted = True
        if not self.has_started:
            self.has_started = True
            self._started_s = time.monotonic()

    def put(self, output: Output) -> None:
        """Add an output that the engine process has sent for this call."""
        if not self.is_started:
            self.start()
        self.has_output = True
        if not self.accepted.done():  # the output of a quick step can arrive before `Accepted`
            self.accepted.set_result(None)
        self.num_open -= output.finish_reason is not None
        self._delivered[output.index].add(output, time.monotonic())
        self._deliver(output)

    def leave_process(self) -> None:
        """Record that the engine process stopped computing the call; another may continue it."""
        self.is_started = self.has_output = False

    def next_message(self) -> wire.Generate | wire.EmbedTexts:
        """Return the message that lets an engine process compute the call, or continue it."""
        message = self.message
        waited_s = time.monotonic() - self.received_s
        if isinstance(message, wire.Generate) and message.params.seed is None:
            message = replace(message, params=replace(message.params, seed=self._seed))
        if not self.was_admitted:
            return replace(message, waited_s=waited_s)
        progress: tuple[AnswerProgress, ...] = ()
        if self.has_started or message.progress:
            progress = tuple(answer.progress(self._started_s) for answer in self._delivered)
        return replace(
            message,
            waited_s=waited_s,
            caller=replace(message.caller, is_admitted=True, start_within_s=math.inf),
            progress=progress,
        )

    def fail(self, error: TwostrokeError) -> None:
        """End the call with an error, which its reader gets."""
        if self.accepted.done():
            self.end(FinishReason.ERROR, error)
        else:
            self.accepted.set_exception(error)

    def end(self, reason: FinishReason, error: TwostrokeError | None = None) -> None:
        """End the call's unfinished answers, with this finish reason and error."""
        usage = Usage(0, 0, 0)
        while self.num_open:
            self.put(Output(0, "", (), finish_reason=reason, usage=usage, error=error))


class FullQueue:
    """Refuses requests in the server shortly after the engine's queue was full for similar ones.

    Similar requests have the same tenant and priority. So a flood of requests of one tenant costs
    the engine little time.
    """

    def __init__(self) -> None:
        """Start without a recent refusal by the engine."""
        self._refused: dict[tuple[str, int], tuple[float, str, dict[str, Any]]] = {}

    def record_error(self, caller: Caller, error: TwostrokeError) -> None:
        """Remember that the engine refused a caller's request, if its queue was full."""
        if isinstance(error, OverloadedError) and error.facts.get("is_full"):
            if len(self._refused) >= _MAX_REFUSALS:
                self._refused.clear()
            refusal = (time.monotonic(), error.reason, dict(error.facts))
            self._refused[caller.tenant, caller.priority] = refusal

    def check(self, caller: Caller) -> None:
        """Refuse a request if the engine's queue was full for its tenant and priority just now.

        Raises:
            OverloadedError: the error that the engine gave then.
        """
        refusal = self._refused.get((caller.tenant, caller.priority))
        if refusal is None:
            return
        refused_s, reason, facts = refusal
        if time.monotonic() - refused_s < _QUEUE_FULL_S:
            raise OverloadedError(reason, **facts)


class PendingCalls:
    """The open calls of an engine process, in the order of their arrival.

    Attributes:
        open: calls that have not ended, by message id.
        unsent: open calls that were not sent to the process yet, by message id.
        crash_history: finds calls that must run alone or are refused.
        is_up: whether calls may be sent to the process.
        ids: new ids for messages to the process.
        limits: how long calls continue after deaths of the process.
        totals: counts the calls that continued after a death.
    """

    def __init__(self, send: Callable[[wire.ServerMessage], None]) -> None:
        """Use `send` to send messages to the engine process while `is_up`."""
        self.open: dict[int, RemoteOutputs] = {}
        self.unsent: dict[int, RemoteOutputs] = {}
        self.crash_history = CrashHistory()
        self.is_up = True
        self.ids = itertools.count(1)
        self.limits = ResumptionLimits()
        self.totals = ResumptionTotals()
        self._send = send
        # Unsent calls during which engine processes died. Each runs alone for a while, one by one.
        self._suspected: dict[int, RemoteOutputs] = {}
        # A suspected call that was sent; other calls wait until its first output, or its end.
        self._running_alone: RemoteOutputs | None = None

    def check_room(self, new: RemoteOutputs, config: SchedulerConfig, room_s: float) -> None:
        """Refuse a call if too many calls wait for the engine process.

        The error says that the call may be sent again in `room_s` seconds. Calls wait while the
        process starts, or while a suspected call runs alone. The limits are the same as in the
        scheduler's queue. Calls of the same tenant that would run before the new call must fit into
        one queue, and all waiting calls into two.

        Raises:
            OverloadedError: too many requests or tokens wait.
        """
        caller = new.message.caller
        requests = [0, 0]  # that would run before the new call, and in all
        tokens = [0, 0]
        for waiting in self.unsent.values():
            other = waiting.message.caller
            is_before = other.tenant == caller.tenant and other.priority <= caller.priority
            for i in range(0 if is_before else 1, 2):
                requests[i] += waiting.num_requests
                tokens[i] += waiting.num_tokens
        for i in range(2):
            max_requests = config.max_waiting_requests << i
            max_tokens = config.max_waiting_tokens << i
            if requests[i] >= max_requests:
                queue_text = counted_noun(requests[i], "request waits", "requests wait")
                reason = f"{queue_text} until the engine has room."
                raise OverloadedError(reason, room_s=room_s)
            if tokens[i] and tokens[i] + new.num_tokens > max_tokens:
                queue_text = counted_noun(tokens[i], "token waits", "tokens wait")
                reason = f"{queue_text} until the engine has room."
                raise OverloadedError(reason, room_s=room_s)

    def add(self, outputs: RemoteOutputs) -> None:
        """Add a call, and send it to the engine process as soon as it may run."""
        id_ = outputs.message.id
        self.open[id_] = outputs
        self.unsent[id_] = outputs
        if self.crash_history.must_run_alone(outputs.message):
            self._suspected[id_] = outputs
        self.send_waiting()

    def remove(self, outputs: RemoteOutputs) -> None:
        """Remove a call that has ended; calls that waited for it are sent."""
        id_ = outputs.message.id
        del self.open[id_]
        self.unsent.pop(id_, None)
        self._suspected.pop(id_, None)
        self._let_others_join(outputs)

    def on_output(self, outputs: RemoteOutputs) -> None:
        """Send calls that waited while a suspected call ran alone, if they may join it now.

        Call this at each output of a call. A suspected call may have killed engine processes.
        """
        if outputs.died_s is not None:
            self.totals.add_pause(time.monotonic() - outputs.died_s)
            outputs.died_s = None
        if outputs is self._running_alone and not self.crash_history.must_run_alone_to_its_end(
            outputs.message
        ):
            self._let_others_join(outputs)

    def _let_others_join(self, outputs: RemoteOutputs) -> None:
        if outputs is self._running_alone:
            self._running_alone = None
        if self.unsent:
            self.send_waiting()

    def send_waiting(self) -> None:
        """Send the calls that may run now to the engine process.

        A suspected call, during which engine processes died, runs alone until its first output. The
        calls that run are paused meanwhile; they continue afterwards.
        """
        while self.unsent and self.is_up and self._running_alone is None:
            outputs = next(iter((self._suspected or self.unsent).values()))
            id_ = outputs.message.id
            if self._suspected.pop(id_, None) and self.crash_history.must_run_alone(
                outputs.message
            ):
                if self.crash_history.must_run_alone_to_its_end(outputs.message):
                    if len(self.open) > len(self.unsent):
                        self._suspected = {id_: outputs, **self._suspected}
                        return
                else:
                    self._pause_running()
                self._running_alone = outputs
            del self.unsent[id_]
            self._send(outputs.next_message())

    def _pause_running(self) -> None:
        """Cancel the running calls in the engine process, and let them wait to continue.

        The calls get new ids, since the process may have sent outputs that are not delivered any
        more.
        """
        for id_, outputs in list(self.open.items()):
            if id_ in self.unsent:
                continue
            del self.open[id_]
            if outputs.is_cancelled:
                outputs.end(FinishReason.CANCEL)
                continue
            self._send(wire.Cancel(id_))
            outputs.message = replace(outputs.message, id=next(self.ids))
            outputs.leave_process()
            self.open[outputs.message.id] = self.unsent[outputs.message.id] = outputs

    def take_back(self, error: EngineDiedError, compiled: Sequence[wire.Compile]) -> bool:
        """After the death of the engine process, let its calls wait for the next process.

        A call that the process had started continues in the next process. A call fails with `error`
        if the limits of resumption are reached, and with `EngineKillerError` if it probably has
        killed the process. `compiled` are the constraints that the process was compiling. Returns
        whether any call had started or any constraint was being compiled.
        """
        self.is_up = False
        self._running_alone = None
        started = [outputs for outputs in self.open.values() if outputs.is_started]
        running = [*(outputs.message for outputs in started), *compiled]
        has_output = all(outputs.has_output for outputs in started) and not compiled
        self.crash_history.record_death(running, has_output=has_output)
        now_s = time.monotonic()
        for outputs in list(self.open.values()):
            if outputs.is_cancelled:
                del self.open[outputs.message.id]
                outputs.end(FinishReason.CANCEL)
                continue
            if outputs.is_started:
                outputs.num_deaths += 1
                outputs.died_s = outputs.died_s or now_s
            is_refused = self.crash_history.is_refused(outputs.message)
            continues_elsewhere = outputs.message.caller.continues_elsewhere
            max_attempts = 0 if continues_elsewhere else self.limits.max_attempts
            if is_refused or outputs.num_deaths > max_attempts:
                del self.open[outputs.message.id]
                outputs.fail(killer_error() if is_refused else error)
            outputs.leave_process()
        self.unsent = dict(self.open)
        self._suspected = {
            id_: outputs
            for id_, outputs in self.unsent.items()
            if self.crash_history.must_run_alone(outputs.message)
        }
        return bool(running)

    def fail_started(self, error: EngineDiedError) -> None:
        """Fail the calls that wait to continue, because the new process has another model."""
        for outputs in [outputs for outputs in self.unsent.values() if outputs.has_started]:
            self.remove(outputs)
            outputs.fail(error)

    def end_late(self, error: EngineDiedError) -> None:
        """Fail calls that have waited too long for another engine process, or are past a timeout.

        Calls get `error` if the process that computed them died, and no other process has continued
        them in time.
        """
        self._end_timed_out()
        limit_s = time.monotonic() - self.limits.max_wait_s
        for outputs in list(self.unsent.values()):
            if outputs.died_s is not None and outputs.died_s < limit_s:
                self.remove(outputs)
                outputs.fail(error)

    def _end_timed_out(self) -> None:
        """Fail calls after their timeout, if the engine process has not ended them itself."""
        limit_s = time.monotonic() - _TIMEOUT_GRACE_S
        for id_, outputs in list(self.open.items()):
            caller = outputs.message.caller
            if outputs.received_s + caller.timeout_s - caller.spent_s < limit_s:
                if id_ not in self.unsent:
                    self._send(wire.Cancel(id_))
                self.remove(outputs)
                error = DeadlineError.of_timeout(caller.timeout_s)
                error.facts["is_unrun"] = not outputs.has_started
                outputs.fail(error)

    def end_all(self, error: TwostrokeError) -> None:
        """Fail all calls, because no other engine process will be started."""
        for outputs in self.open.values():
            outputs.fail(error)
        self.open.clear()
        self.unsent.clear()
        self._suspected.clear()


_MAX_RECORDS: Final = 4096
_RECORD_TTL_S: Final = 3600.0  # from the last death
_DEATHS_TO_SUSPECT: Final = 2
_DEATHS_TO_STAY_ALONE: Final = 4  # the request may kill engines after its first output


class _CrashRecord(msgspec.Struct):
    num_deaths: int = 0
    was_alone: bool = False  # at the last death
    died_s: float = 0.0


class CrashHistory:
    """Counts, for each request, how often an engine process died while the request ran.

    Requests with the same content count as one, also from different callers. A request that saw two
    deaths must run alone until its first output, and after two more deaths to its end. It is
    refused only after a death at which it ran alone, because otherwise another request may be the
    cause. A death after the request's first output counts only if the request had to run alone to
    its end: during a long answer, something outside the engine may have killed the process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a death of an engine process."""
        self._clock = clock
        self._records: OrderedDict[bytes, _CrashRecord] = OrderedDict()  # the latest death last

    def record_death(
        self, running: Sequence[wire.ServerMessage], *, has_output: bool = False
    ) -> None:
        """Count a death of the engine process for the requests that were running.

        `running` are the messages of these requests. `has_output` says whether the process had sent
        an output of each of these requests.
        """
        keys = set(map(_content_hash, running))  # several calls may have the same content
        for key in keys:
            record = self._recent_record(key) or _CrashRecord()
            record.num_deaths += 1
            stayed_alone = record.num_deaths > _DEATHS_TO_STAY_ALONE
            record.was_alone = len(keys) == 1 and (stayed_alone or not has_output)
            record.died_s = self._clock()
            self._records[key] = record
            self._records.move_to_end(key)
        while len(self._records) > _MAX_RECORDS:
            self._records.popitem(last=False)

    def clear(self, message: wire.ServerMessage) -> None:
        """Forget the deaths counted for a request that was answered: it does not kill engines."""
        if self._records:
            self._records.pop(_content_hash(message), None)

    def num_deaths(self, message: wire.ServerMessage) -> int:
        """Return how often an engine process died while a request with this content was running."""
        record = self._recent_record(_content_hash(message)) if self._records else None
        return record.num_deaths if record is not None else 0

    def must_run_alone(self, message: wire.ServerMessage) -> bool:
        """Whether no other request may run beside this one before its first output."""
        return self.num_deaths(message) >= _DEATHS_TO_SUSPECT

    def must_run_alone_to_its_end(self, message: wire.ServerMessage) -> bool:
        """Whether no other request may run beside this one, even after its first output."""
        return self.num_deaths(message) >= _DEATHS_TO_STAY_ALONE

    def is_refused(self, message: wire.ServerMessage) -> bool:
        """Whether a request is refused, because engine processes died of it."""
        if self.num_deaths(message) <= _DEATHS_TO_SUSPECT:
            return False
        return self._records[_content_hash(message)].was_alone

    def _recent_record(self, key: bytes) -> _CrashRecord | None:
        record = self._records.get(key)
        if record is not None and self._clock() - record.died_s > _RECORD_TTL_S:
            del self._records[key]
            return None
        return record


def killer_error() -> EngineKillerError:
    """Return the error for a request that is refused, because engine processes died of it."""
    return EngineKillerError(
        "The engine died each time that it computed this request, so it is refused for an hour. "
        "Please report it, with the server's log."
    )


def _content_hash(message: wire.ServerMessage) -> bytes:
    """Return a hash of a request message that messages with the same content share."""
    match message:
        case wire.Generate():
            content: object = (message.prompts, message.params)
        case wire.EmbedTexts():
            content = (message.texts, message.params)
        case wire.Compile():
            content = message.constraint
        case _:
            raise AssertionError(message)
    return hashlib.sha256(wire.encode(content)).digest()
