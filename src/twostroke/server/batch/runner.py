"""Runs open batches: their requests use the capacity that interactive requests leave."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec.structs import replace

from twostroke.core.errors import EngineDiedError, EngineKillerError, OverloadedError
from twostroke.core.files import IrregularFileError
from twostroke.core.message_text import counted_noun
from twostroke.core.request import BATCH_SERVICE_TIER
from twostroke.server.batch import files, stored_batches
from twostroke.server.batch.lines import (
    InputChangedError,
    ReadOffset,
    WrongLineError,
    check,
    digest_of_all,
    line_digests,
    next_lines,
)
from twostroke.server.batch.queueing import (
    AdaptiveLimit,
    BatchPace,
    BatchSlots,
    seconds_left,
    with_boot_deadline,
)
from twostroke.server.batch.results import ResultFileWriter
from twostroke.server.http import internal_requests
from twostroke.server.http.errors import BodySizeError, ServerStoppingError
from twostroke.server.http.fair_queue import Readers
from twostroke.server.http.request_context import RETRYABLE_STATUSES
from twostroke.server.storage import RecordsError
from twostroke.server.storage.folder import has_digest

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from pathlib import Path

    from starlette.types import ASGIApp

    from twostroke.server.batch.files import FileBody
    from twostroke.server.batch.lines import BatchLine
    from twostroke.server.batch.results import ResultFormat
    from twostroke.server.batch.stored_batches import Batch, Status
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.storage import Records

_MAX_DEATHS: Final = 3  # a request is given up after this number of engine deaths
_CHECK_INTERVAL_S: Final = 1.0  # checks the key and the deadline, as timers stop in a suspend
_DISK_PAUSE_S: Final = 10.0  # before another try to use the database
_START_TIMEOUT_S: Final = 1.0  # to read open batches before the server answers requests
_logger = logging.getLogger("twostroke.serve")
T = TypeVar("T")


class _NoKeyError(Exception):
    """The tenant of a batch has no valid API key any more, so the batch must end."""


class BatchRunner:
    """Runs the batches of all tenants, in the server's event loop.

    Each request of a batch is sent through the server's own HTTP layers, as an internal request of
    its tenant in the service tier `batch`. A result counts once it is on the disk; a request
    without a result runs again after a restart.
    """

    def __init__(
        self,
        records: Records,
        forms: Mapping[str, ResultFormat],
        limits: RequestLimits,
        max_running: Callable[[], int],
        may_run: Callable[[str], bool],
    ) -> None:
        """Create a runner, which runs nothing before `start`.

        Args:
            records: the server's database and file folder, with the batches and their results.
            forms: how each protocol writes results, by the protocol's name.
            limits: the limits of requests and batches.
            max_running: returns how many batch requests may be in the engine now.
            may_run: returns whether a tenant may still send requests; called before each
                request.
        """
        self._records = records
        self._forms = forms
        self._limits = limits
        self._slots = BatchSlots(max_running)
        self._may_run = may_run
        self._app: ASGIApp | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._paces: dict[str, BatchPace] = {}
        self._adaptive_limits: dict[str, AdaptiveLimit] = {}
        self._reservations: dict[str, files.QuotaReservation] = {}
        self.quota = files.StorageQuota(limits)
        self._disk_logged_s = -_DISK_PAUSE_S
        self._dropping: asyncio.Task[None] | None = None
        self.readers = Readers(1)  # for work on whole files
        self._finalizer = ResultFileWriter(records, self.readers, limits)
        self._starting: asyncio.Task[None] | None = None
        self._has_stopped = False

    async def start(self, app: ASGIApp) -> None:
        """Continue all batches that have not ended; `app` answers their requests."""
        self._app = app
        self._dropping = asyncio.create_task(self._finalizer.delete_stored_results(self._write))
        self._starting = asyncio.create_task(self._resume())
        await asyncio.wait((self._starting,), timeout=_START_TIMEOUT_S)

    async def _resume(self) -> None:
        """Read the batches that have not ended from the database, and start them.

        Retries until the disk works.
        """
        batches: Iterable[Batch] | None = None
        while batches is None:
            try:
                batches = await self._records.read(stored_batches.open_batches)
            except RecordsError as error:
                await self._wait_for_disk(error)
        for batch in batches:
            self._start_task(batch)

    async def stop(self) -> None:
        """Stop all batches at once; the next server process runs the requests without results."""
        self._has_stopped = True
        tasks = list(self._tasks.values())
        tasks += filter(None, (self._dropping, self._starting))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, batch: Batch, file: FileBody | None = None, digest: str = "") -> None:
        """Store a new batch, and start to run it.

        Args:
            batch: the batch.
            file: the metadata of an input file that is new as well; None for an uploaded file.
            digest: the digest of the new input file.

        Raises:
            NoSuchFileError: the tenant has no such input file.
            BodySizeError: the tenant's files use its whole quota.
            OverloadedError: the tenant has too many open batches.
            ServerStoppingError: the server is stopping.
            RecordsError: the batch could not be stored.
        """
        if self._has_stopped:
            raise ServerStoppingError("The server is stopping and takes no new batches.")
        batch = with_boot_deadline(batch)

        def store(db: Any) -> None:
            if (
                count := stored_batches.count_open(db, batch.tenant)
            ) >= self._limits.max_open_batches:
                batches = counted_noun(count, "of your batches has", "of your batches have")
                raise OverloadedError(f"{batches} not ended, which is the limit.")
            if file is None:
                files.find(db, batch.input_file, batch.tenant)
                files.check_quota(db, batch.tenant, self._limits)
                max_ended = self._limits.max_batches - 1  # besides the new batch
                stored_batches.delete_oldest_ended(db, batch.tenant, batch.protocol, max_ended)
            else:
                files.insert_new(db, file, batch.tenant, self._limits, digest)
            stored_batches.insert(db, batch)

        await self._records.write(store)
        if not self._has_stopped:  # otherwise the next server runs it
            self._start_task(batch)

    async def cancel(self, batch: Batch) -> Batch:
        """Cancel a batch on a client's request, unless it is already ending.

        Returns the batch's new state.
        """
        if not batch.is_open:
            return batch

        def change(db: Any) -> stored_batches.Batch:
            current = stored_batches.find(db, batch.id, batch.tenant, batch.protocol)
            assert current is not None
            if current.status not in {"validating", "in_progress"}:
                return current
            current = _with_status(current, "cancelling", ends_as="cancelled")
            stored_batches.update(db, current)
            return current

        changed = await self._records.write(change)
        if (event := self._cancelled.get(batch.id)) is not None:  # otherwise it is not running
            event.set()
        return changed

    def pace(self, batch: Batch) -> BatchPace | None:
        """Return the progress of a batch; None if none of its requests are being sent."""
        return self._paces.get(batch.id)

    def _start_task(self, batch: Batch) -> None:
        if batch.id in self._tasks:  # `add` started it while `_resume` was reading
            return
        self._cancelled[batch.id] = asyncio.Event()
        self._tasks[batch.id] = asyncio.create_task(self._run(batch))

    async def _run(self, batch: Batch) -> None:
        """Run a batch to its end, with one step for each status, such as `validating`."""
        steps: dict[Status, Callable[[Batch], Coroutine[Any, Any, Batch]]] = {
            "validating": self._validate,
            "in_progress": self._run_requests,
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
                    batch = await self._fail(batch, stored_batches.NO_INPUT)
                except (InputChangedError, WrongLineError):
                    _logger.error("Batch %s is ended because its input file has changed.", batch.id)  # noqa: TRY400
                    batch = await self._fail(batch, stored_batches.CHANGED_INPUT)
                except Exception:  # otherwise the batch would stay open forever
                    _logger.exception("Batch %s ends.", batch.id)
                    batch = await self._fail(batch, stored_batches.BROKEN)
        finally:
            self._release_reservation(batch.id)
            for table in (self._tasks, self._cancelled, self._paces, self._adaptive_limits):
                table.pop(batch.id, None)

    async def _fail(self, batch: Batch, reason: stored_batches.LineError) -> Batch:
        """Store that a batch will end as failed because of `reason`; return the batch.

        The results that it already has are still written to files if possible.
        """
        changes: dict[str, Any] = {"ends_as": "failed", "errors": (reason,), "num_errors": 1}
        status: Status = "finalizing"
        if reason is stored_batches.BROKEN and batch.status in {"finalizing", "cancelling"}:
            status = "failed"
            total = batch.total
            changes |= {"failed": total, "unrun": total, "output_file": None, "error_file": None}
        while True:
            try:
                return await self._set_status(batch, status, **changes)
            except RecordsError as error:
                await self._wait_for_disk(error)

    async def _validate(self, batch: Batch) -> Batch:
        """Check a batch's input file, and set the batch to `in_progress` or `failed`."""
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
            raise _input_file_error(path, error) from None
        changes = {"total": total, "errors": tuple(errors), "num_errors": num_errors}
        return await self._set_status(batch, "failed" if num_errors else "in_progress", **changes)

    async def _run_requests(self, batch: Batch) -> Batch:
        """Send a batch's requests that have no result, until all have ended or the batch must end.

        The batch must end at its deadline, when it is cancelled, or after some errors.


        Returns the batch with its next status.
        """
        digests = await self._digests(batch)
        anchored = with_boot_deadline(batch)
        batch = await self._set_status(
            batch,
            batch.status,
            boot=anchored.boot,
            deadline_s=anchored.deadline_s,
            input_digest=digest_of_all(digests),
        )
        if batch.status == "cancelling":  # a client cancelled it meanwhile
            return batch
        count = partial(stored_batches.count_results, id_=batch.id)
        done_lines, num_failed, num_bytes = await self._records.read_long(count)
        self._release_reservation(batch.id)
        self._reservations[batch.id] = self.quota.reserve(batch.tenant, num_bytes)
        self._paces[batch.id] = BatchPace(len(done_lines), num_failed, batch.total)
        self._adaptive_limits[batch.id] = AdaptiveLimit(batch.id)
        cancelled = asyncio.create_task(self._cancelled[batch.id].wait())
        running = asyncio.create_task(self._send_all(batch, done_lines, digests))
        is_running = True
        faults: list[Exception] = []
        try:
            while is_running and (left_s := seconds_left(batch)) > 0:
                self._check_key(batch)
                finished_tasks, _ = await asyncio.wait(
                    (running, cancelled),
                    timeout=min(left_s, _CHECK_INTERVAL_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                is_running = not finished_tasks
            if running.done():
                await running
        except* (_NoKeyError, OSError, BodySizeError, InputChangedError, WrongLineError) as errors:
            faults = list(errors.exceptions)
        finally:
            for task in (running, cancelled):
                task.cancel()
            await asyncio.gather(running, cancelled, return_exceptions=True)
        if faults:
            return await self._stop_after_fault(batch, faults[0])
        if self._cancelled[batch.id].is_set():
            return await self._set_status(batch, "cancelling", ends_as="cancelled")
        is_complete = not running.cancelled() and running.exception() is None
        ends_as = "completed" if is_complete else "expired"
        return await self._set_status(batch, "finalizing", ends_as=ends_as)

    async def _stop_after_fault(self, batch: Batch, fault: Exception) -> Batch:
        """Choose the next status of a batch whose requests were stopped by the exception `fault`.

        Raises:
            InputChangedError: the input file has changed.
            FileNotFoundError: the input file is missing.
            RecordsError: the input file cannot be read now.
        """
        if isinstance(fault, (InputChangedError, WrongLineError)):
            raise fault
        if isinstance(fault, OSError):
            raise _input_file_error(self._records.files.path(batch.input_file), fault) from None
        if isinstance(fault, BodySizeError):
            return await self._set_status(
                batch,
                "finalizing",
                ends_as="failed",
                errors=(stored_batches.NO_ROOM,),
                num_errors=1,
            )
        return await self._set_status(
            batch,
            "cancelling",
            ends_as="cancelled",
            errors=(stored_batches.NO_KEY,),
            num_errors=1,
        )

    async def _finish(self, batch: Batch) -> Batch:
        """Choose the ids of a batch's result files, write the files, and end the batch.

        The ids are stored first, so that a crash does not leave two sets of files.
        """
        if batch.output_file is None:
            batch = await self._set_status(batch, batch.status, output_file=files.new_id())
        if batch.error_file is None and self._forms[batch.protocol].has_error_file:
            batch = await self._set_status(batch, batch.status, error_file=files.new_id())
        return await self._finalizer.finish(batch, self._forms[batch.protocol])

    async def _set_status(self, batch: Batch, status: Status, **changes: Any) -> Batch:
        """Store a batch's new status and other changes, and return the batch.

        A batch that a client has cancelled meanwhile stays cancelled.
        """

        def change(db: Any) -> Batch:
            current = stored_batches.find(db, batch.id, batch.tenant, batch.protocol)
            assert current is not None
            if current.status == "cancelling" and status != "failed":
                changes["ends_as"] = "cancelled"
                current = _with_status(current, "cancelling", **changes)
            else:
                current = _with_status(current, status, **changes)
            stored_batches.update(db, current)
            return current

        return await self._records.write(change)

    async def _digests(self, batch: Batch) -> array[int]:
        """Return the digests of a batch's input lines, after checking that they have not changed.

        Raises:
            InputChangedError: the lines have changed since they were validated.
            FileNotFoundError: the input file is missing.
            RecordsError: the input file cannot be read now.
        """
        path = self._records.files.path(batch.input_file)
        max_bytes = self._limits.max_body_bytes
        try:
            digests = await self.readers.run(
                batch.tenant, line_digests, path, max_bytes, batch.total
            )
        except OSError as error:
            raise _input_file_error(path, error) from None
        is_known = batch.input_digest in {"", digest_of_all(digests)}
        if len(digests) < batch.total or not is_known:
            raise InputChangedError
        return digests

    async def _send_all(self, batch: Batch, done_lines: set[int], digests: array[int]) -> None:
        """Send all requests of a batch that have no result, as slots in the engine become free.

        `done_lines` has the numbers of input lines with results. `digests` show whether lines have
        changed.
        """
        path = self._records.files.path(batch.input_file)
        start: ReadOffset | None = ReadOffset()
        async with asyncio.TaskGroup() as group:
            while start is not None:
                read = partial(
                    next_lines,
                    path,
                    start=start,
                    done_lines=done_lines,
                    limits=self._limits,
                    digests=digests,
                )
                lines, start = await asyncio.to_thread(read)
                for line in lines:
                    has_slot = asyncio.Event()
                    group.create_task(self._send(batch, line, has_slot))
                    await has_slot.wait()

    async def _send(self, batch: Batch, line: BatchLine, has_slot: asyncio.Event) -> None:
        """Send one batch request, and retry until the engine answers it; store the result.

        While the batch pauses, other batches use its slots. `has_slot` is set once the request has
        a slot in the engine.
        """
        answer: internal_requests.InternalResponse | None = None
        limit = self._adaptive_limits[batch.id]
        while answer is None:
            await limit.wait()
            await self._slots.enter(batch.tenant)
            try:
                if not limit.is_open:  # a pause began while this line waited for a slot
                    continue
                has_slot.set()
                answer = await self._send_once(batch, line, limit.send())
                if answer is not None:
                    await self._store_result(batch, line, answer)
            finally:
                self._slots.leave()

    async def _send_once(
        self, batch: Batch, line: BatchLine, sent_s: float
    ) -> internal_requests.InternalResponse | None:
        """Send a batch request once, and return the response; None if it must be sent again.

        If the engine has died several times while it computed this request, the result is an error
        response.
        """
        assert self._app is not None
        sender = internal_requests.Sender(batch.tenant, BATCH_SERVICE_TIER, batch.key)
        limit = self._adaptive_limits[batch.id]
        answer = None
        is_refused = False
        try:
            self._check_key(batch)
            answer = await internal_requests.post(self._app, line.url, line.body, sender)
            is_refused = answer.status in RETRYABLE_STATUSES
        finally:
            limit.leave(sent_s, answer, is_refused=is_refused)
        if answer.error == EngineDiedError.code:
            count = partial(stored_batches.count_death, id_=batch.id, line=line.number)
            if await self._write(count) >= _MAX_DEATHS:
                message = f"The engine died {_MAX_DEATHS} times while it computed this request."
                request_id = answer.headers["x-request-id"]
                return internal_requests.refused(line.url, EngineKillerError(message), request_id)
        return None if is_refused else answer

    def _check_key(self, batch: Batch) -> None:
        if not self._may_run(batch.tenant):
            raise _NoKeyError

    async def _store_result(
        self, batch: Batch, line: BatchLine, answer: internal_requests.InternalResponse
    ) -> None:
        """Store a batch request's result in the database.

        Raises:
            BodySizeError: the tenant's disk quota is used up.
        """
        is_ok = answer.status < 400
        body = self._forms[batch.protocol].result(line.custom_id, answer)
        reservation = self._reservations[batch.id]
        is_reserved = False
        while not is_reserved:
            try:
                await self.quota.use(self._records, reservation, len(body) + 1)
                is_reserved = True
            except RecordsError as error:
                await self._wait_for_disk(error)
        await self._write(
            partial(
                stored_batches.insert_result,
                id_=batch.id,
                line=line.number,
                body=body,
                is_ok=is_ok,
            )
        )
        pace = self._paces[batch.id]
        pace.num_done += 1
        pace.num_failed += not is_ok

    def _release_reservation(self, id_: str) -> None:
        if (reservation := self._reservations.pop(id_, None)) is not None:
            self.quota.release(reservation)

    async def _write(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a database transaction, and return its result; retry after disk errors."""
        while True:
            try:
                return await self._records.write(work)
            except RecordsError as error:
                await self._wait_for_disk(error)

    async def _wait_for_disk(self, error: RecordsError) -> None:
        """Pause before the next try to use the disk; log the error once for all batches."""
        now_s = time.monotonic()
        if now_s - self._disk_logged_s >= _DISK_PAUSE_S:
            self._disk_logged_s = now_s
            _logger.error("Batches wait: %s", error)
        await asyncio.sleep(_DISK_PAUSE_S)


def _input_file_error(path: Path, error: OSError) -> Exception:
    """Convert an error of reading a batch's input file to the exception that the runner handles.

    The exception for a missing or replaced file ends the batch. Any other error becomes a
    `RecordsError`, after which the runner tries to read the file again.
    """
    if isinstance(error, FileNotFoundError):
        return error
    if isinstance(error, (IrregularFileError, NotADirectoryError)):
        return InputChangedError()
    return RecordsError(f"{path} cannot be read: {error.strerror}.")


def _with_status(batch: Batch, status: Status, **changes: Any) -> Batch:
    """Return a copy of a batch with a new status, its start time, and other changes."""
    since = batch.since if batch.status == status else {**batch.since, status: time.time()}
    return replace(batch, status=status, since=since, **changes)
