"""Results as lines of JSON, in the form of the batch's protocol, and the files made of them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.server.batch import batch as kept
from twostroke.server.batch import files
from twostroke.server.batch.lines import (
    WrongLineError,
    line_digests,
    parse,
    read_lines,
    whole_digest,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from sqlite3 import Connection

    from twostroke.server.batch.batch import Batch
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.internal_requests import InternalResponse
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.storage import Records, Temporary

_TURN_S: Final = 0.02  # of a batch, after which another tenant's has one
_OK, _FAILED, _UNRUN = range(3)  # what became of a line


class Form(Frozen):
    """How a protocol writes results, each without the end of its line.

    Attributes:
        result: from a custom_id and the response.
        unrun: from a custom_id and the batch, which expired, failed or was cancelled.
        has_error_file: whether failures are in a file of their own.
        purpose: of the files.
    """

    result: Callable[[str, InternalResponse], bytes]
    unrun: Callable[[str, Batch], bytes]
    has_error_file: bool
    purpose: str


class Endings:
    """Ends batches: one of a tenant at a time. It belongs to the event loop."""

    def __init__(self, records: Records, readers: Readers, limits: RequestLimits) -> None:
        """Have `readers` write the files, in turns of tenants."""
        self._records, self._readers, self._limits = records, readers, limits
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by tenant
        self._ended = asyncio.Event()

    async def finish(self, batch: Batch, form: Form) -> Batch:
        """As `finish`, below."""
        async with self._locks[batch.tenant]:
            ended = await finish(self._records, self._readers, batch, form, self._limits)
        self._ended.set()
        return ended

    async def drop(self, write: Callable[[Callable[[Connection], bool]], Awaitable[bool]]) -> None:
        """Drop the results of all batches that end, few at once: others write in between.

        What a stop or a crash leaves is dropped by the next server.
        """
        while True:
            self._ended.clear()
            for work in (kept.drop_results, self._records.shrink):
                while await write(work):
                    pass
            await self._ended.wait()


async def finish(
    records: Records, readers: Readers, batch: Batch, form: Form, limits: RequestLimits
) -> Batch:
    """Write the files of a batch whose lines are over, and return its last state.

    `readers` write, in the turns of tenants. Safe to do again after a crash: the files replace
    those of an earlier try. The results stay in the database until `kept.drop_results`.

    Raises:
        RecordsError: a file or the database cannot be read or written.
    """
    ends_as, now_s = batch.ends_as, time.time()
    assert ends_as is not None
    with records.files.begin() as output, records.files.begin() as failures:
        outcomes = _outcomes(records, batch, form, limits)
        counts = [0, 0, 0]
        write = partial(
            _write, outcomes, counts, output, failures if form.has_error_file else output
        )
        while await readers.run(batch.tenant, write):
            pass
        num_lost = max(0, batch.total - sum(counts))  # with the input
        written = ((output, batch.output_file, "output"), (failures, batch.error_file, "errors"))
        bodies = []  # with the digests of their contents
        for file, id_, word in written:
            if file.num_bytes and id_ is not None:
                await readers.run(batch.tenant, file.keep, id_)
                name = f"{batch.id}_{word}.jsonl"
                expiry_s = batch.output_expires_after_s
                body = files.new_file(
                    id_, file.num_bytes, name, form.purpose, expires_after_s=expiry_s
                )
                bodies.append((body, file.digest))
        ids = {body.id for body, _ in bodies}
        ended = replace(
            batch,
            status=ends_as,
            since={**batch.since, ends_as: now_s},
            completed=counts[_OK],
            failed=counts[_FAILED] + num_lost + counts[_UNRUN],
            unrun=counts[_UNRUN],
            output_file=batch.output_file if batch.output_file in ids else None,
            error_file=batch.error_file if batch.error_file in ids else None,
        )

        def keep(db: Connection) -> None:
            for body, digest in bodies:
                files.insert(db, body, batch.tenant, digest)
            kept.end(db, ended)

        await records.write(keep)
    return ended


def _write(
    outcomes: Iterator[tuple[int, bytes]],
    counts: list[int],
    output: Temporary,
    failures: Temporary,
) -> bool:
    """Write results for a short while, and count what became of lines; return whether more come."""
    until_s = time.monotonic() + _TURN_S
    for kind, body in outcomes:
        (output if kind == _OK else failures).write(body + b"\n")
        counts[kind] += 1
        if time.monotonic() >= until_s:
            return True
    return False


def _outcomes(
    records: Records, batch: Batch, form: Form, limits: RequestLimits
) -> Iterator[tuple[int, bytes]]:
    """Yield the outcome and result of each line; without the input, only of finished lines."""
    with records.open_reader() as db:
        num_unrun = batch.total - kept.num_results(db, batch.id)
        results = kept.results(db, batch.id)
        following = next(results, None)
        for number, body in _unrun(records, batch, form, limits) if num_unrun else ():
            while following is not None and following[0] < number:
                yield _OK if following[1] else _FAILED, following[2]
                following = next(results, None)
            if following is not None and following[0] == number:
                continue
            yield _UNRUN, body
            num_unrun -= 1
            if num_unrun <= 0:
                break
        while following is not None:
            yield _OK if following[1] else _FAILED, following[2]
            following = next(results, None)


def _unrun(
    records: Records, batch: Batch, form: Form, limits: RequestLimits
) -> Iterator[tuple[int, bytes]]:
    """Yield the number and result of each line that was not run; stop where the input changed."""
    path = records.files.path(batch.input_file)
    try:
        digests = line_digests(path, limits.max_body_bytes, batch.total)
        if batch.input_digest not in {"", whole_digest(digests)}:
            return
        for number, text in read_lines(path, limits.max_body_bytes):
            yield number, form.unrun(parse(number, text, limits).custom_id, batch)
    except (OSError, WrongLineError):
        return
