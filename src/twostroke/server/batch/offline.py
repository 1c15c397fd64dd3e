"""Runs a file of requests for the command `batch`, and resumes a run that was interrupted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
from array import array
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from twostroke.core.errors import UsageError
from twostroke.server.batch.lines import (
    InputChangedError,
    ReadOffset,
    WrongLineError,
    line_digests,
    next_lines,
)
from twostroke.server.batch.openai import RESULT_ID_PREFIX, result
from twostroke.server.storage.folder import sync_folder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from twostroke.server.batch.lines import BatchLine
    from twostroke.server.http.internal_requests import InternalResponse
    from twostroke.server.http.limits import RequestLimits

    Send = Callable[[BatchLine], Awaitable[InternalResponse]]

# A result's id has digests of the model and of the line, so that they are stored with the result,
# and of the result itself, which reveals damage. Ids of earlier versions have 8 random digits
# instead of the last digest.
_MODEL_LENGTH: Final = 8
_LINE_LENGTH: Final = 16
_RANDOM_LENGTH: Final = 8
_RESULT_LENGTH: Final = 16
_OLD_ID_LENGTH: Final = len(RESULT_ID_PREFIX) + _MODEL_LENGTH + _LINE_LENGTH + _RANDOM_LENGTH
_ID_LENGTH: Final = len(RESULT_ID_PREFIX) + _MODEL_LENGTH + _LINE_LENGTH + _RESULT_LENGTH
_MAX_NAMED_LINES: Final = 5  # damaged lines that the log names
_logger = logging.getLogger("twostroke.serve")
_SYNC_INTERVAL_S: Final = 1.0  # after a power failure, the requests of the last second run again


class BatchProgress(msgspec.Struct):
    """The progress of an offline batch run, which the command line shows.

    Attributes:
        total: the number of requests in the input file.
        num_before: requests whose results an earlier run has written.
        num_done: requests that have ended.
        num_failed: ended requests that failed.
        num_tokens: tokens that were generated.
    """

    total: int
    num_before: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0


class _ResultIds(msgspec.Struct):
    custom_id: str
    id: str = ""


class _LineUsage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _AnswerUsage(msgspec.Struct):
    usage: _LineUsage | None = None


# Created before threads use them.
_ids_decoder: Final = msgspec.json.Decoder(_ResultIds)
_answer_decoder: Final = msgspec.json.Decoder(_AnswerUsage)


class ResultFile:
    """A file of an offline batch run's results, which gets its final name when it is complete.

    It grows line by line. Until it is complete, its name is `NAME.partial`.

    Attributes:
        path: the final path of the file.
        partial: the path until the file is complete.
        extents: the offset and the length of each result's line, by custom_id.
        ids: the ids of results from an earlier run, by custom_id.
        is_resumed: whether an earlier run did not end.
    """

    def __init__(self, path: Path, *, resumes: bool, replaces: bool = False) -> None:
        """Open `PATH.partial` for results, and read the results of an earlier run.

        Args:
            path: the final path of the file.
            resumes: whether to keep the intact results of an earlier run.
            replaces: whether to remove a file that already has the final name. An interrupted
                run can leave such a file of errors, which gets its final name before the file
                of results does.

        Raises:
            UsageError: a file with the final name exists and `replaces` is false, or the
                partial file is no file of results or is in use.
            OSError: the file cannot be written.
        """
        if replaces:
            path.unlink(missing_ok=True)
        if not path.parent.is_dir():
            raise UsageError(f"There is no folder {path.parent}.")
        if path.exists():
            raise UsageError(f"{path} exists already: remove it, or choose another file.")
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.extents: dict[str, tuple[int, int]] = {}
        self.ids: dict[str, str] = {}
        self.is_resumed = self.partial.exists()
        if self.is_resumed and not self.partial.is_file():
            raise UsageError(f"{self.partial} is not a file: remove it, or choose another file.")
        self._file = self.partial.open("r+b" if self.is_resumed else "x+b", 0)
        try:
            flock(self._file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            self._file.close()
            message = "is being written: by another run, or because --errors names it, too."
            raise UsageError(f"{self.partial} {message}") from None
        if not resumes:
            self._file.truncate()
        self._end = 0
        self._read()
        self._file.truncate(self._end)
        self._file.seek(self._end)
        self._synced_s = time.monotonic()

    def __enter__(self) -> Self:
        """Return this object, whose file is already open."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file of results; an empty file is removed."""
        if not self._end:
            self.partial.unlink(missing_ok=True)
        self._file.close()

    def add(self, id_: str, body: bytes) -> None:
        """Append the result of the request with the custom_id `id_`.

        Raises:
            OSError: the file cannot be written.
        """
        line = body + b"\n"
        unwritten = memoryview(line)
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) or 0 :]
        self._add_extent(id_, line)
        if time.monotonic() - self._synced_s > _SYNC_INTERVAL_S:
            os.fsync(self._file.fileno())
            self._synced_s = time.monotonic()

    def finish(self, ids: Iterator[str]) -> None:
        """Give the file its final name, with the results in the order of `ids` (custom_ids).

        A file without results is removed.
        """
        if self.extents:
            ordered = self.path.with_name(f"{self.path.name}.ordered")
            with ordered.open("wb") as file:
                for offset, size in (self.extents[id_] for id_ in ids if id_ in self.extents):
                    self._file.seek(offset)
                    file.write(self._file.read(size) or b"")
                file.flush()
                os.fsync(file.fileno())
            ordered.replace(self.path)
            sync_folder(self.path.absolute().parent)
        self.partial.unlink()

    def _read(self) -> None:
        """Index the results of an earlier run by custom_id.

        Damaged lines are left out, so their requests run again.
        """
        damaged: list[int] = []
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                result_id = _ids_decoder.decode(line)
                is_intact = _is_intact(result_id.id, line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                is_intact = False
            if is_intact and not (result_id.id == "" and any(self.ids.values())):
                self.ids[result_id.custom_id] = result_id.id
                self._add_extent(result_id.custom_id, line)
            else:
                damaged.append(number)
                self._end += len(line)
        if damaged and not self.extents:
            self._file.close()
            message = f"{self.partial} is not a file of results: remove it to begin again."
            raise UsageError(message)
        if damaged:
            numbers = ", ".join(map(str, damaged[:_MAX_NAMED_LINES]))
            others = " and others" if len(damaged) > _MAX_NAMED_LINES else ""
            _logger.warning(
                "Damaged results in %s run again: line %s%s.", self.partial, numbers, others
            )

    def _add_extent(self, id_: str, line: bytes) -> None:
        self.extents[id_] = (self._end, len(line))
        self._end += len(line)


class OfflineFiles(msgspec.Struct):
    """The files of an offline batch run: the requests, the results, and the failures.

    Attributes:
        input: the input file, with a request in each line.
        output: the file for results of successful requests.
        errors: the file for results of failed requests.
        model: the model that answers all requests; None if a server answers each request with
            the model that the request names.
        digests: the digest of each line of the input; None before `check`.
    """

    input: Path
    output: ResultFile
    errors: ResultFile
    model: str | None = None
    digests: array[int] | None = None

    def lines(self, limits: RequestLimits) -> Iterator[BatchLine]:
        """Yield the requests of the validated input file.

        Raises:
            UsageError: the input has changed since its validation.
        """
        start: ReadOffset | None = ReadOffset()
        while start is not None:
            try:
                lines, start = next_lines(self.input, start, (), limits, self.digests)
            except (InputChangedError, WrongLineError, OSError):
                raise UsageError(
                    f"{self.input} was changed or damaged while its lines ran; results so far are "
                    f"in {self.output.partial}. Restore the input, and run the same command again."
                ) from None
            yield from lines

    def check(self, limits: RequestLimits) -> None:
        """Check that results of an earlier run belong to this input file and this model.

        Results of other programs have ids without digests, and are accepted.

        Raises:
            UsageError: a result belongs to another input file or to another model.
        """
        custom_ids = set[str]()
        self.digests = line_digests(self.input, limits.max_body_bytes, sys.maxsize)
        for line in self.lines(limits):
            custom_ids.add(line.custom_id)
            id_ = self.output.ids.get(line.custom_id, "")
            has_digests = len(id_) in {_ID_LENGTH, _OLD_ID_LENGTH}
            if has_digests and not id_.startswith(self._id_prefix(line)):
                is_line = id_.startswith(
                    RESULT_ID_PREFIX + _digest(_MODEL_LENGTH, self.model or "")
                )
                subject = f"The line '{line.custom_id[:40]}'" if is_line else "--model"
                raise UsageError(
                    f"{subject} has changed since {self.output.partial} was started: "
                    "choose another output, or remove it."
                )
        unknown_id = next((id_ for id_ in self.output.extents if id_ not in custom_ids), None)
        if unknown_id is not None:
            raise UsageError(
                f"{self.output.partial} has a result of '{unknown_id[:40]}', which {self.input} "
                f"does not have: remove it to begin again, or choose another output."
            )

    def result(self, line: BatchLine, answer: InternalResponse) -> bytes:
        """Return the result line of a request, whose id contains digests of request and result.

        A later run checks the digests before it keeps the result.
        """
        id_ = self._id_prefix(line) + "0" * _RESULT_LENGTH
        body = result(line.custom_id, answer, id_)
        return body.replace(id_.encode(), _with_digest(id_, body), 1)

    def _id_prefix(self, line: BatchLine) -> str:
        model = _digest(_MODEL_LENGTH, self.model or "")
        return f"{RESULT_ID_PREFIX}{model}{_digest(_LINE_LENGTH, line.url, line.body)}"


async def run(
    files: OfflineFiles,
    send: Send,
    max_running: int,
    limits: RequestLimits,
    progress: BatchProgress,
    show: Callable[[BatchProgress], None],
) -> None:
    """Run the requests of an input file that have no result yet, and write their results.

    Args:
        files: the input, and the files for results.
        send: sends a request, and returns its response.
        max_running: the maximum number of requests at a time.
        limits: the limits of a request.
        progress: the counts, which are updated.
        show: called with `progress` at the start and after each request.

    Raises:
        OSError: a file cannot be written.
        TwostrokeError: from `send`; results that are already written stay.
    """
    slots = asyncio.Semaphore(max_running)
    show(progress)

    async def run_line(line: BatchLine) -> None:
        try:
            answer = await send(line)
        finally:
            slots.release()
        is_ok = answer.status < 400
        target = files.output if is_ok else files.errors
        target.add(line.custom_id, files.result(line, answer))
        progress.num_done += 1
        progress.num_failed += not is_ok
        progress.num_tokens += _num_tokens(answer) if is_ok else 0
        show(progress)

    try:
        async with asyncio.TaskGroup() as group:
            for line in files.lines(limits):
                if line.custom_id not in files.output.extents:
                    await slots.acquire()
                    group.create_task(run_line(line))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    for results in (files.errors, files.output):  # the output last: its final name ends the run
        results.finish(line.custom_id for line in files.lines(limits))


def _digest(length: int, *parts: str | bytes) -> str:
    hashed = hashlib.blake2b(digest_size=length // 2)
    for part in parts:
        hashed.update(part.encode() if isinstance(part, str) else part)
        hashed.update(b"\0")
    return hashed.hexdigest()


def _with_digest(id_: str, body: bytes) -> bytes:
    """Return the result id `id_` with the digest of the result line `body` as its last digits.

    To compute the digest, `body` must have zeros in place of the digest's digits.
    """
    return (id_[:-_RESULT_LENGTH] + _digest(_RESULT_LENGTH, body)).encode()


def _is_intact(id_: str, line: bytes) -> bool:
    """Return whether a result line matches the digest at the end of its id.

    Ids without a digest, from other programs, always match.
    """
    if len(id_) != _ID_LENGTH:
        return True  # from an earlier version, or from another program
    id_with_zeros = id_[:-_RESULT_LENGTH] + "0" * _RESULT_LENGTH
    body = line.removesuffix(b"\n").replace(id_.encode(), id_with_zeros.encode(), 1)
    return _with_digest(id_, body) == id_.encode()


def _num_tokens(answer: InternalResponse) -> int:
    try:
        usage = _answer_decoder.decode(answer.body).usage
    except msgspec.ValidationError:  # another server's format
        return 0
    return 0 if usage is None else usage.completion_tokens + usage.output_tokens
