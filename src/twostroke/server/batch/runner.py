"""Runs open batches: their lines take what interactive requests leave of the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec.structs import replace

from twostroke.core.errors import EngineDiedError, EngineKillerError, OverloadedError
from twostroke.core.files import IrregularFileError
from twostroke.core.request import BATCH_SERVICE_TIER
from twostroke.server.batch import batch as kept
from twostroke.server.batch import files
from twostroke.server.batch.lines import (
    InputChangedError,
    ReadOffset,
    WrongLineError,
    check,
    line_digests,
    next_lines,
    whole_digest,
)
from twostroke.server.batch.queueing import (
    AdaptiveLimit,
    BatchPace,
    BatchSlots,
    anchored,
    seconds_left,
)
from twostroke.server.batch.results import Endings
from twostroke.server.http import internal_requests as inside
from twostroke.server.http.errors import BodySizeError, ServerStoppingError
from twostroke.server.http.fair_queue import Readers
from twostroke.server.http.request_context import LATER
from twostroke.server.storage import RecordsError
from twostroke.server.storage.folder import has_digest

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from pathlib import Path

    from starlette.types import ASGIApp

    from twostroke.server.batch.batch import Batch, Status
    from twostroke.server.batch.files import FileBody
    from twostroke.server.batch.lines import Line
    from twostroke.server.batch.results import Form
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.storage import Records

_MOST_DEATHS: Final = 3  # of engines that computed a line, which is then not run again
_LOOK_AGAIN_S: Final = 1.0  # at the tenant's key, and at the time left: timers miss a sleep
_DISK_PAUSE_S: Final = 10.0  # after records could not be written
_START_S: Final = 1.0  # for records that can be read
_logger = logging.getLogger("twostroke.serve")
T = TypeVar("T")


class _NoKeyError(Exception):
    """The tenant of a batch has no valid key any more."""


class BatchRunner:
    """Runs the batches of all tenants. It belongs to the event loop of the server.

    A line goes through the server's own layers, as its tenant's request in the class `batch`. Its
    result is on the disk before it counts; a line without one is run again after a restart.
    """

    def __init__(
        self,
        records: Records,
        forms: Mapping[str, Form],
        limits: RequestLimits,
        room: Callable[[], int],
        may_run: Callable[[str], bool],
    ) -> None:
        """Run batches in `forms` by protocol.

        `room` is how many lines may be in the engine; `may_run` returns whether a tenant's batches
        may go on, and is asked before each line.
        """
        self._records = records
        self._forms = forms
        self._limits = limits
        self._room = BatchSlots(room)
        self._may_run = may_run
        self._app: ASGIApp | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._paces: dict[str, BatchPace] = {}
        self._valves: dict[str, AdaptiveLimit] = {}
        self._shares: dict[str, files.QuotaReservation] = {}
        self.rooms = files.StorageQuota(limits)
        self._disk_said_s = -_DISK_PAUSE_S  # when the log said last that a disk fails
        self._dropping: asyncio.Task[None] | None = None
        self.readers = Readers(1)  # of whole files
        self._endings = Endings(records, self.readers, limits)
        self._starting: asyncio.Task[None] | None = None
        self._has_stopped = False

    async def start(self, app: ASGIApp) -> None:
        """Go on with all open batches, through `app`."""
        self._app = app
        self._dropping = asyncio.create_task(self._endings.drop(self._write))
        self._starting = asyncio.create_task(self._go_on())
        await asyncio.wait((self._starting,), timeout=_START_S)

    async def _go_on(self) -> None:
        batches: Iterable[Batch] | None = None
        while batches is None:
            try:
                batches = await self._records.read(kept.open_batches)
            except RecordsError as error:
                await self._wait_for_disk(error)
        for batch in batches:
            self._begin(batch)

    async def stop(self) -> None:
        """Stop at once; the next server runs the lines that have no result."""
        self._has_stopped = True
        tasks = [*self._tasks.values(), *filter(None, (self._dropping, self._starting))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, batch: Batch, file: FileBody | None = None, digest: str = "") -> None:
        """Keep a new batch, with its input if that is new, and run it.

        Raises:
            NoSuchFileError: the tenant has no such input.
            BodySizeError: files of the tenant have taken its room.
            OverloadedError: too many of its batches have not ended.
            ServerStoppingError: the server drains.
            RecordsError: the batch could not be kept.
        """
        if self._has_stopped:
            raise ServerStoppingError("The server is stopping and takes no new batches.")
        batch = anchored(batch)

        def keep(db: Any) -> None:
            if (count := kept.count_open(db, batch.tenant)) >= self._limits.max_open_batches:
                raise OverloadedError(
                    f"{count} of your batches have not ended, which is the limit."
                )
            if file is None:
                files.find(db, batch.input_file, batch.tenant)
                files.check_room(db, batch.tenant, self._limits)
                most = self._limits.max_batches - 1  # and this one
                kept.forget_oldest(db, batch.tenant, batch.protocol, most)
            else:
                files.insert_new(db, file, batch.tenant, self._limits, digest)
            kept.insert(db, batch)

        await self._records.write(keep)
        if not self._has_stopped:  # else the next server runs it
            self._begin(batch)

    async def cancel(self, batch: Batch) -> Batch:
        """Stop a batch whose lines may still run, here or later, and return its new state."""
        if not batch.is_open:
            return batch

        def change(db: Any) -> kept.Batch:
            now = kept.find(db, batch.id, batch.tenant, batch.protocol)
            assert now is not None
            if now.status not in {"validating", "in_progress"}:
                return now
            now = _moved(now, "cancelling", ends_as="cancelled")
            kept.update(db, now)
            return now

        found = await self._records.write(change)
        if (event := self._cancelled.get(batch.id)) is not None:  # else nothing runs it now
            event.set()
        return found

    def pace(self, batch: Batch) -> BatchPace | None:
        """Return how far a batch is; None if no line of it runs."""
        return self._paces.get(batch.id)

    def _begin(self, batch: Batch) -> None:
        if batch.id in self._tasks:  # it was made while those before it were read
            return
        self._cancelled[batch.id] = asyncio.Event()
        self._tasks[batch.id] = asyncio.create_task(self._run(batch))

    async def _run(self, batch: Batch) -> None:
        """Take a batch from status to status until it has ended."""
        steps: dict[Status, Callable[[Batch], Coroutine[Any, Any, Batch]]] = {
            "validating": self._validate,
            "in_progress": self._run_lines,
            "finalizing": self._finish,
            "cancelling": self._finish,
        }
        try:
            while batch.is_open:
                try:
                    batch = await steps[batch.status](batch)
                except RecordsError as error:
                    await self._wait_for_disk(error)
                except FileNotFoundError:
                    _logger.error("Batch %s ends: its input file is missing.", batch.id)  # noqa: TRY400
                    batch = await self._fail(batch, kept.NO_INPUT)
                except (InputChangedError, WrongLineError):
                    _logger.error("Batch %s is ended because its input file has changed.", batch.id)  # noqa: TRY400
                    batch = await self._fail(batch, kept.CHANGED_INPUT)
                except Exception:  # else it would stay open, which nobody could change
                    _logger.exception("Batch %s ends.", batch.id)
                    batch = await self._fail(batch, kept.BROKEN)
        finally:
            self._end_share(batch.id)
            for table in (self._tasks, self._cancelled, self._paces, self._valves):
                table.pop(batch.id, None)

    async def _fail(self, batch: Batch, why: kept.LineError) -> Batch:
        """End a batch with the results that are there; without, if these were being written."""
        changes: dict[str, Any] = {"ends_as": "failed", "errors": (why,), "num_errors": 1}
        status: Status = "finalizing"
        if why is kept.BROKEN and batch.status in {"finalizing", "cancelling"}:
            status, total = "failed", batch.total
            changes |= {"failed": total, "unrun": total, "output_file": None, "error_file": None}
        while True:
            try:
                return await self._move(batch, status, **changes)
            except RecordsError as error:
                await self._wait_for_disk(error)

    async def _validate(self, batch: Batch) -> Batch:
        path = self._records.files.path(batch.input_file)
        facts = partial(files.size_and_digest, id_=batch.input_file)
        _, digest = await self._records.read(facts)
        try:
            if not await self.readers.run(batch.tenant, has_digest, path, digest):
                raise InputChangedError
            total, errors, num_errors = await self.readers.run(
                batch.tenant, check, path, batch.endpoint, self._limits
            )
        except OSError as error:
            raise _unreadable(path, error) from None
        changes = {"total": total, "errors": tuple(errors), "num_errors": num_errors}
        return await self._move(batch, "failed" if num_errors else "in_progress", **changes)

    async def _run_lines(self, batch: Batch) -> Batch:
        digests = await self._digests(batch)
        placed = anchored(batch)
        when = {"boot": placed.boot, "deadline_s": placed.deadline_s}
        input_digest = whole_digest(digests)
        batch = await self._move(batch, batch.status, **when, input_digest=input_digest)
        if batch.status == "cancelling":  # since it was read
            return batch
        count = partial(kept.count_results, id_=batch.id)
        done, num_failed, num_bytes = await self._records.read_long(count)
        self._end_share(batch.id)
        self._shares[batch.id] = self.rooms.share(batch.tenant, num_bytes)
        self._paces[batch.id] = BatchPace(len(done), num_failed, batch.total)
        self._valves[batch.id] = AdaptiveLimit(batch.id)
        cancelled = asyncio.create_task(self._cancelled[batch.id].wait())
        running = asyncio.create_task(self._send_all(batch, done, digests))
        is_open, faults = True, list[Exception]()
        try:
            while is_open and (left_s := seconds_left(batch)) > 0:
                self._check_key(batch)
                ended, _ = await asyncio.wait(
                    (running, cancelled),
                    timeout=min(left_s, _LOOK_AGAIN_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                is_open = not ended
            if running.done():
                await running
        except* (_NoKeyError, OSError, BodySizeError, InputChangedError, WrongLineError) as errors:
            faults = list(errors.exceptions)
        finally:
            for task in (running, cancelled):
                task.cancel()
            await asyncio.gather(running, cancelled, return_exceptions=True)
        if faults and isinstance(faults[0], (InputChangedError, WrongLineError)):
            raise faults[0]
        if faults and isinstance(fault := faults[0], OSError):
            raise _unreadable(self._records.files.path(batch.input_file), fault) from None
        if faults and isinstance(faults[0], BodySizeError):
            why = {"errors": (kept.NO_ROOM,), "num_errors": 1}
            return await self._move(batch, "finalizing", ends_as="failed", **why)
        if faults:
            why = {"errors": (kept.NO_KEY,), "num_errors": 1}
            return await self._move(batch, "cancelling", ends_as="cancelled", **why)
        if self._cancelled[batch.id].is_set():
            return await self._move(batch, "cancelling", ends_as="cancelled")
        is_complete = not running.cancelled() and running.exception() is None
        ends_as = "completed" if is_complete else "expired"
        return await self._move(batch, "finalizing", ends_as=ends_as)

    async def _finish(self, batch: Batch) -> Batch:
        if batch.output_file is None:
            batch = await self._move(batch, batch.status, output_file=files.new_id())
        if batch.error_file is None and self._forms[batch.protocol].has_error_file:
            batch = await self._move(batch, batch.status, error_file=files.new_id())
        return await self._endings.finish(batch, self._forms[batch.protocol])

    async def _move(self, batch: Batch, status: Status, **changes: Any) -> Batch:
        """Keep a new state; a batch that a client has cancelled meanwhile can only fail or end."""

        def change(db: Any) -> Batch:
            now = kept.find(db, batch.id, batch.tenant, batch.protocol)
            assert now is not None
            if now.status == "cancelling" and status != "failed":
                changes["ends_as"] = "cancelled"
                now = _moved(now, "cancelling", **changes)
            else:
                now = _moved(now, status, **changes)
            kept.update(db, now)
            return now

        return await self._records.write(change)

    async def _digests(self, batch: Batch) -> array[int]:
        """Return the digests of the lines of a batch.

        Raises:
            InputChangedError: the lines have changed since they were checked.
            FileNotFoundError: the input is missing.
            RecordsError: the input cannot be read now.
        """
        path = self._records.files.path(batch.input_file)
        most_bytes = self._limits.max_body_bytes
        try:
            digests = await self.readers.run(
                batch.tenant, line_digests, path, most_bytes, batch.total
            )
        except OSError as error:
            raise _unreadable(path, error) from None
        is_known = batch.input_digest in {"", whole_digest(digests)}
        if len(digests) < batch.total or not is_known:
            raise InputChangedError
        return digests

    async def _send_all(self, batch: Batch, done: set[int], digests: array[int]) -> None:
        """Run the lines that have no result."""
        path = self._records.files.path(batch.input_file)
        start: ReadOffset | None = ReadOffset()
        async with asyncio.TaskGroup() as group:
            while start is not None:
                read = partial(
                    next_lines, path, start=start, done=done, limits=self._limits, digests=digests
                )
                lines, start = await asyncio.to_thread(read)
                for line in lines:
                    has_room = asyncio.Event()
                    group.create_task(self._send(batch, line, has_room))
                    await has_room.wait()

    async def _send(self, batch: Batch, line: Line, has_room: asyncio.Event) -> None:
        """Run a line and keep its result, however often the engine or the disk must be asked.

        A line that pauses leaves its room to other batches.
        """
        answer: inside.InternalResponse | None = None
        valve = self._valves[batch.id]
        while answer is None:
            await valve.wait()
            await self._room.enter(batch.tenant)
            try:
                if not valve.is_open:  # others were refused while this one waited for room
                    continue
                has_room.set()
                answer = await self._try(batch, line, valve.send())
                if answer is not None:
                    await self._keep(batch, line, answer)
            finally:
                self._room.leave()

    async def _try(self, batch: Batch, line: Line, sent_s: float) -> inside.InternalResponse | None:
        """Return the answer to a line; None if it has to be tried again."""
        assert self._app is not None
        sender = inside.Sender(batch.tenant, BATCH_SERVICE_TIER, batch.key)
        valve, answer, is_refused = self._valves[batch.id], None, False
        try:
            self._check_key(batch)
            answer = await inside.post(self._app, line.url, line.body, sender)
            is_refused = answer.status in LATER
        finally:
            valve.leave(sent_s, answer, is_refused=is_refused)
        if answer.error == EngineDiedError.code:
            count = partial(kept.count_death, id_=batch.id, line=line.number)
            if await self._write(count) >= _MOST_DEATHS:
                message = f"The engine died {_MOST_DEATHS} times while it computed this request."
                request_id = answer.headers["x-request-id"]
                return inside.refused(line.url, EngineKillerError(message), request_id)
        return None if is_refused else answer

    def _check_key(self, batch: Batch) -> None:
        if not self._may_run(batch.tenant):
            raise _NoKeyError

    async def _keep(self, batch: Batch, line: Line, answer: inside.InternalResponse) -> None:
        """Keep the result of a line; raises BodySizeError if there is no room for it."""
        is_ok = answer.status < 400
        body = self._forms[batch.protocol].result(line.custom_id, answer)
        share, has_room = self._shares[batch.id], False
        while not has_room:
            try:
                await self.rooms.grow(self._records, share, len(body) + 1)
                has_room = True
            except RecordsError as error:
                await self._wait_for_disk(error)
        keep = partial(kept.keep_result, id_=batch.id, line=line.number, body=body, is_ok=is_ok)
        await self._write(keep)
        pace = self._paces[batch.id]
        pace.num_done += 1
        pace.num_failed += not is_ok

    def _end_share(self, id_: str) -> None:
        if (share := self._shares.pop(id_, None)) is not None:
            self.rooms.end(share)

    async def _write(self, work: Callable[[Any], T]) -> T:
        """Return what `work` returns, and try until the disk takes its changes."""
        while True:
            try:
                return await self._records.write(work)
            except RecordsError as error:
                await self._wait_for_disk(error)

    async def _wait_for_disk(self, error: RecordsError) -> None:
        """Pause; the log says so once for all that wait."""
        now_s = time.monotonic()
        if now_s - self._disk_said_s >= _DISK_PAUSE_S:
            self._disk_said_s = now_s
            _logger.error("Batches wait: %s", error)
        await asyncio.sleep(_DISK_PAUSE_S)


def _unreadable(path: Path, error: OSError) -> Exception:
    """Return the error about an input that is missing, is not a file, or cannot be read now."""
    if isinstance(error, FileNotFoundError):
        return error
    if isinstance(error, (IrregularFileError, NotADirectoryError)):
        return InputChangedError()
    return RecordsError(f"{path} cannot be read: {error.strerror}.")


def _moved(batch: Batch, status: Status, **changes: Any) -> Batch:
    since = batch.since if batch.status == status else {**batch.since, status: time.time()}
    return replace(batch, status=status, since=since, **changes)
