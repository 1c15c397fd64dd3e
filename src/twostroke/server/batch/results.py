"""Writes the result files of batches, with a JSON line for each request."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.server.batch import files, stored_batches
from twostroke.server.batch.lines import (
    WrongLineError,
    digest_of_all,
    line_digests,
    parse,
    read_lines,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from sqlite3 import Connection

    from twostroke.server.batch.stored_batches import Batch
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.internal_requests import InternalResponse
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.storage import Records, Temporary

_WRITE_SLICE_S: Final = 0.02  # of one batch; then another tenant's batch may write
_OK, _FAILED, _UNRUN = range(3)  # outcomes of a line


class ResultFormat(Frozen):
    """How a protocol writes the results of a batch: as JSON lines, here without line ends.

    Attributes:
        result: returns the result of a request, from its custom_id and its response.
        unrun: returns the result of a request that was not run, from its custom_id and the
            batch.
        has_error_file: whether failures go to a separate file.
        purpose: the purpose of the files with results.
    """

    result: Callable[[str, InternalResponse], bytes]
    unrun: Callable[[str, Batch], bytes]
    has_error_file: bool
    purpose: str


class ResultFileWriter:
    """Writes the result files of batches that end, one batch of each tenant at a time.

    Call the methods only in the event loop's thread.
    """

    def __init__(self, records: Records, readers: Readers, limits: RequestLimits) -> None:
        """Prepare to write in the threads of `readers`, in which tenants take turns."""
        self._records = records
        self._readers = readers
        self._limits = limits
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by tenant
        self._batch_ended = asyncio.Event()

    async def finish(self, batch: Batch, form: ResultFormat) -> Batch:
        """Write the result files of a batch that sends no more requests; return its final state.

        Calls `write_result_files`, but for one batch of each tenant at a time.
        """
        async with self._locks[batch.tenant]:
            ended_batch = await write_result_files(
                self._records, self._readers, batch, form, self._limits
            )
        self._batch_ended.set()
        return ended_batch

    async def delete_stored_results(
        self, write: Callable[[Callable[[Connection], bool]], Awaitable[bool]]
    ) -> None:
        """Delete the results of ended batches from the database, where files have replaced them.

        This runs until it is cancelled. `write` runs a function that deletes some rows; between two
        calls, other writers have their turn. Results that remain at a stop or a crash are deleted
        by the next server process.
        """
        while True:
            self._batch_ended.clear()
            for work in (stored_batches.drop_results, self._records.shrink):
                while await write(work):
                    pass
            await self._batch_ended.wait()


async def write_result_files(
    records: Records, readers: Readers, batch: Batch, form: ResultFormat, limits: RequestLimits
) -> Batch:
    """Write the result files of a batch that sends no more requests; return its final state.

    The threads of `readers`, in which tenants take turns, write the files. After a crash it is safe
    to call this again: the new files replace the earlier files. The results stay in the database
    until `stored_batches.drop_results` deletes them.

    Raises:
        RecordsError: a file or the database cannot be read or written.
    """
    ends_as = batch.ends_as
    now_s = time.time()
    assert ends_as is not None
    with records.files.begin() as output, records.files.begin() as failures:
        outcomes = _outcomes(records, batch, form, limits)
        counts = [0, 0, 0]
        write = partial(
            _write, outcomes, counts, output, failures if form.has_error_file else output
        )
        while await readers.run(batch.tenant, write):
            pass
        num_lost = max(0, batch.total - sum(counts))  # their lines are missing from the input
        result_files = (
            (output, batch.output_file, "output"),
            (failures, batch.error_file, "errors"),
        )
        bodies = []  # and the digests of the files' contents
        for file, id_, suffix in result_files:
            if file.num_bytes and id_ is not None:
                await readers.run(batch.tenant, file.keep, id_)
                name = f"{batch.id}_{suffix}.jsonl"
                expiry_s = batch.output_expires_after_s
                body = files.new_file(
                    id_, file.num_bytes, name, form.purpose, expires_after_s=expiry_s
                )
                bodies.append((body, file.digest))
        ids = {body.id for body, _ in bodies}
        ended_batch = replace(
            batch,
            status=ends_as,
            since={**batch.since, ends_as: now_s},
            completed=counts[_OK],
            failed=counts[_FAILED] + num_lost + counts[_UNRUN],
            unrun=counts[_UNRUN],
            output_file=batch.output_file if batch.output_file in ids else None,
            error_file=batch.error_file if batch.error_file in ids else None,
        )

        def store(db: Connection) -> None:
            for body, digest in bodies:
                files.insert(db, body, batch.tenant, digest)
            stored_batches.end(db, ended_batch)

        await records.write(store)
    return ended_batch


def _write(
    outcomes: Iterator[tuple[int, bytes]],
    counts: list[int],
    output: Temporary,
    failures: Temporary,
) -> bool:
    """Write results from `outcomes` to files for a short time, and count them in `counts`.

    `outcomes` are as from `_outcomes`, and `counts` has a number for each outcome. Successful
    results go to `output`, all others to `failures`. Returns whether more results remain; the
    caller then calls this function again, so that the batches of other tenants can write in
    between.
    """
    until_s = time.monotonic() + _WRITE_SLICE_S
    for kind, body in outcomes:
        (output if kind == _OK else failures).write(body + b"\n")
        counts[kind] += 1
        if time.monotonic() >= until_s:
            return True
    return False


def _outcomes(
    records: Records, batch: Batch, form: ResultFormat, limits: RequestLimits
) -> Iterator[tuple[int, bytes]]:
    """Yield the outcome and the result of each request of a batch, in the order of the input.

    The outcome is `_OK`, `_FAILED` or `_UNRUN`; the result is a JSON line without line end. If the
    input file is missing or has changed, only requests with stored results are yielded.
    """
    with records.open_reader() as db:
        num_unrun = batch.total - stored_batches.num_results(db, batch.id)
        results = stored_batches.results(db, batch.id)
        next_result = next(results, None)
        for number, body in _unrun_results(records, batch, form, limits) if num_unrun else ():
            while next_result is not None and next_result[0] < number:
                yield _OK if next_result[1] else _FAILED, next_result[2]
                next_result = next(results, None)
            if next_result is not None and next_result[0] == number:
                continue
            yield _UNRUN, body
            num_unrun -= 1
            if num_unrun <= 0:
                break
        while next_result is not None:
            yield _OK if next_result[1] else _FAILED, next_result[2]
            next_result = next(results, None)


def _unrun_results(
    records: Records, batch: Batch, form: ResultFormat, limits: RequestLimits
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each input line, and the result for the case that it was not run.

    Nothing is yielded if the input file has changed, and nothing after a line that is not valid.
    """
    path = records.files.path(batch.input_file)
    try:
        digests = line_digests(path, limits.max_body_bytes, batch.total)
        if batch.input_digest not in {"", digest_of_all(digests)}:
            return
        for number, text in read_lines(path, limits.max_body_bytes):
            yield number, form.unrun(parse(number, text, limits).custom_id, batch)
    except (OSError, WrongLineError):
        return
