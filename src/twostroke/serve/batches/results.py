"""Results as lines of JSON, in the form of the batch's protocol, and the files made of them."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.records import RecordsError
from twostroke.serve.batches import batch as kept
from twostroke.serve.batches import files
from twostroke.serve.batches.lines import parse, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from sqlite3 import Connection

    from twostroke.http.inside import Answer
    from twostroke.http.limits import Limits
    from twostroke.records import Records, Temporary
    from twostroke.serve.batches.batch import Batch, Status

_OK, _FAILED, _UNRUN = range(3)  # what became of a line


class Form(Frozen):
    """How a protocol writes results, each without the end of its line.

    Attributes:
        result: from a custom_id and the response.
        unrun: from a custom_id and how the batch ended: expired or cancelled.
        has_error_file: whether failures are in a file of their own.
        purpose: of the files.
    """

    result: Callable[[str, Answer], bytes]
    unrun: Callable[[str, Status], bytes]
    has_error_file: bool
    purpose: str


async def finish(records: Records, batch: Batch, form: Form, limits: Limits) -> Batch:
    """Write the files of a batch whose lines are over, and return its last state.

    Safe to do again after a crash: the files replace those of an earlier try.

    Raises:
        RecordsError: a file or the database cannot be read or written.
    """
    ends_as, now_s = batch.ends_as, time.time()
    assert ends_as is not None
    with records.files.begin() as output, records.files.begin() as failures:
        num_ok, num_failed, num_unrun = await records.read_long(
            partial(
                _write,
                batch=batch,
                form=form,
                output=output,
                failures=failures,
                path=records.files.path(batch.input_file),
                limits=limits,
            )
        )
        written = ((output, batch.output_file, "output"), (failures, batch.error_file, "errors"))
        bodies = []
        for file, id_, word in written:
            if file.num_bytes and id_ is not None:
                await asyncio.to_thread(file.keep, id_)
                name = f"{batch.id}_{word}.jsonl"
                bodies.append(files.new_file(id_, file.num_bytes, name, form.purpose))
        ids = {body.id for body in bodies}
        ended = replace(
            batch,
            status=ends_as,
            since={**batch.since, ends_as: now_s},
            completed=num_ok,
            failed=num_failed + num_unrun,
            unrun=num_unrun,
            output_file=batch.output_file if batch.output_file in ids else None,
            error_file=batch.error_file if batch.error_file in ids else None,
        )

        def keep(db: Connection) -> None:
            for body in bodies:
                files.insert(db, body, batch.tenant)
            kept.update(db, ended)
            kept.drop_results(db, batch.id)

        await records.write(keep)
    return ended


def _write(
    db: Connection,
    *,
    batch: Batch,
    form: Form,
    output: Temporary,
    failures: Temporary,
    path: Path,
    limits: Limits,
) -> tuple[int, int, int]:
    """Write a result for each line, in order; return how many succeeded, failed, were not run."""
    counts = [0, 0, 0]
    try:
        for kind, body in _outcomes(db, batch, form, path, limits):
            is_output = kind == _OK or not form.has_error_file
            (output if is_output else failures).write(body + b"\n")
            counts[kind] += 1
    except OSError as error:
        message = f"The input of {batch.id} cannot be read: {error.strerror}."
        raise RecordsError(message) from None
    num_lost = batch.total - sum(counts)  # with the input
    return counts[_OK], counts[_FAILED] + num_lost, counts[_UNRUN]


def _outcomes(
    db: Connection, batch: Batch, form: Form, path: Path, limits: Limits
) -> Iterator[tuple[int, bytes]]:
    """Yield what became of each line, and its result; without the input, of those that ended."""
    results, ends_as = kept.results(db, batch.id), batch.ends_as
    assert ends_as is not None
    if not path.is_file():
        yield from ((_OK if is_ok else _FAILED, body) for _, is_ok, body in results)
        return
    following = next(results, None)
    for number, text in read_lines(path, limits.max_body_bytes):
        if following is not None and following[0] == number:
            _, is_ok, body = following
            following = next(results, None)
            yield _OK if is_ok else _FAILED, body
        else:
            yield _UNRUN, form.unrun(parse(number, text, limits).custom_id, ends_as)
