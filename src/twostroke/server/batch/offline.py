"""Runs a file of requests for a command: results go to a file, and a second run goes on."""

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
from twostroke.server.batch.openai import ID, result
from twostroke.server.storage.folder import sync_folder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from twostroke.server.batch.lines import Line
    from twostroke.server.http.internal_requests import InternalResponse
    from twostroke.server.http.limits import RequestLimits

    Send = Callable[[Line], Awaitable[InternalResponse]]

# In a result's id: digests of the model and of the line, so that they are as durable as the result,
# and of the result itself, so that damage is noticed. Ids of earlier versions had 8 random digits
# instead of the last one.
_MODEL_LENGTH: Final = 8
_LINE_LENGTH: Final = 16
_RANDOM_LENGTH: Final = 8
_RESULT_LENGTH: Final = 16
_OLD_ID_LENGTH: Final = len(ID) + _MODEL_LENGTH + _LINE_LENGTH + _RANDOM_LENGTH
_ID_LENGTH: Final = len(ID) + _MODEL_LENGTH + _LINE_LENGTH + _RESULT_LENGTH
_MAX_NAMED_LINES: Final = 5  # damaged lines that the log names
_logger = logging.getLogger("twostroke.serve")
_SYNC_S: Final = 1.0  # a loss of power costs the lines of the last second, which are run again


class BatchProgress(msgspec.Struct):
    """How far a file is: lines that have ended, failures among them, and tokens written.

    `num_before` lines had results from an earlier run.
    """

    total: int
    num_before: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0


class _Id(msgspec.Struct):
    custom_id: str
    id: str = ""


class _LineUsage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Answered(msgspec.Struct):
    usage: _LineUsage | None = None


# Made before threads use them.
_id: Final = msgspec.json.Decoder(_Id)
_answered: Final = msgspec.json.Decoder(_Answered)


class Results:
    """A file of results that grows by whole lines, and gets its name when all are there.

    Until then it is called `NAME.partial`. Lines that it has from an earlier run stay.

    Attributes:
        was_begun: an earlier run did not end.
    """

    def __init__(self, path: Path, *, goes_on: bool, replaces: bool = False) -> None:
        """Open it; with `goes_on`, keep the lines of an earlier run, but not cut or damaged ones.

        With `replaces`, a file with the name is of an earlier run that ended before its last step.

        Raises:
            UsageError: a file with the name is there, or the partial one has other lines or is
                another's.
            OSError: it cannot be written.
        """
        if replaces:
            path.unlink(missing_ok=True)
        if not path.parent.is_dir():
            raise UsageError(f"There is no folder {path.parent}.")
        if path.exists():
            raise UsageError(f"{path} is there already: remove it, or choose another file.")
        self.path, self.partial = path, path.with_name(f"{path.name}.partial")
        self.places: dict[str, tuple[int, int]] = {}  # by custom_id: where its line is
        self.ids: dict[str, str] = {}  # by custom_id: of results from an earlier run
        self.was_begun = self.partial.exists()
        if self.was_begun and not self.partial.is_file():
            raise UsageError(f"{self.partial} is not a file: remove it, or choose another file.")
        self._file = self.partial.open("r+b" if self.was_begun else "x+b", 0)
        try:
            flock(self._file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            self._file.close()
            message = "is being written: by another run, or because --errors names it, too."
            raise UsageError(f"{self.partial} {message}") from None
        if not goes_on:
            self._file.truncate()
        self._end = 0
        self._read()
        self._file.truncate(self._end)
        self._file.seek(self._end)
        self._synced_s = time.monotonic()

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it; what it has stays, and an empty file goes."""
        if not self._end:
            self.partial.unlink(missing_ok=True)
        self._file.close()

    def add(self, id_: str, body: bytes) -> None:
        """Append a result; raises OSError."""
        line = body + b"\n"
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) or 0 :]
        self._note(id_, line)
        if time.monotonic() - self._synced_s > _SYNC_S:
            os.fsync(self._file.fileno())
            self._synced_s = time.monotonic()

    def finish(self, ids: Iterator[str]) -> None:
        """Give the file its name, with its lines in the order of `ids`; remove an empty one."""
        if self.places:
            ordered = self.path.with_name(f"{self.path.name}.ordered")
            with ordered.open("wb") as file:
                for place, size in (self.places[id_] for id_ in ids if id_ in self.places):
                    self._file.seek(place)
                    file.write(self._file.read(size) or b"")
                file.flush()
                os.fsync(file.fileno())
            ordered.replace(self.path)
            sync_folder(self.path.absolute().parent)
        self.partial.unlink()

    def _read(self) -> None:
        """Note the lines of an earlier run; damaged ones are left out, so that they run again."""
        damaged: list[int] = []
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                result_id = _id.decode(line)
                is_intact = _is_intact(result_id.id, line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                is_intact = False
            if is_intact and not (result_id.id == "" and any(self.ids.values())):
                self.ids[result_id.custom_id] = result_id.id
                self._note(result_id.custom_id, line)
            else:
                damaged.append(number)
                self._end += len(line)
        if damaged and not self.places:
            self._file.close()
            message = f"{self.partial} is not a file of results: remove it to begin again."
            raise UsageError(message)
        if damaged:
            numbers = ", ".join(map(str, damaged[:_MAX_NAMED_LINES]))
            others = " and others" if len(damaged) > _MAX_NAMED_LINES else ""
            _logger.warning(
                "Damaged results in %s run again: line %s%s.", self.partial, numbers, others
            )

    def _note(self, id_: str, line: bytes) -> None:
        self.places[id_] = (self._end, len(line))
        self._end += len(line)


class Files(msgspec.Struct):
    """The input, and where results with and without success go.

    `model` answers all lines; without it a server answers each with the model that it names.
    `check` sets `digests`, one for each line.
    """

    input: Path
    output: Results
    errors: Results
    model: str | None = None
    digests: array[int] | None = None

    def lines(self, limits: RequestLimits) -> Iterator[Line]:
        """Yield the lines of the input that were checked.

        Raises:
            UsageError: the input has changed since the check.
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
        """Raise a UsageError if the output has results of another input, or of another model.

        Results whose ids have no digests, as other programs write them, are taken as they are.
        """
        known = set[str]()
        self.digests = line_digests(self.input, limits.max_body_bytes, sys.maxsize)
        for line in self.lines(limits):
            known.add(line.custom_id)
            id_ = self.output.ids.get(line.custom_id, "")
            has_digests = len(id_) in {_ID_LENGTH, _OLD_ID_LENGTH}
            if has_digests and not id_.startswith(self._begin_id(line)):
                is_line = id_.startswith(ID + _digest(_MODEL_LENGTH, self.model or ""))
                what = f"The line '{line.custom_id[:40]}'" if is_line else "--model"
                raise UsageError(
                    f"{what} has changed since {self.output.partial} was begun: "
                    "choose another output, or remove it."
                )
        strange = next((id_ for id_ in self.output.places if id_ not in known), None)
        if strange is not None:
            raise UsageError(
                f"{self.output.partial} has a result of '{strange[:40]}', which {self.input} does "
                f"not have: remove it to begin again, or choose another output."
            )

    def result(self, line: Line, answer: InternalResponse) -> bytes:
        """Return the result of a line."""
        id_ = self._begin_id(line) + "0" * _RESULT_LENGTH
        body = result(line.custom_id, answer, id_)
        return body.replace(id_.encode(), _with_digest(id_, body), 1)

    def _begin_id(self, line: Line) -> str:
        model = _digest(_MODEL_LENGTH, self.model or "")
        return f"{ID}{model}{_digest(_LINE_LENGTH, line.url, line.body)}"


async def run(
    files: Files,
    send: Send,
    most: int,
    limits: RequestLimits,
    progress: BatchProgress,
    show: Callable[[BatchProgress], None],
) -> None:
    """Run the lines that have no result, at most `most` at once; `show` is called after each.

    Raises:
        OSError: a file cannot be written.
        TwostrokeError: from `send`; results so far are kept.
    """
    room = asyncio.Semaphore(most)
    show(progress)

    async def one(line: Line) -> None:
        try:
            answer = await send(line)
        finally:
            room.release()
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
                if line.custom_id not in files.output.places:
                    await room.acquire()
                    group.create_task(one(line))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    for results in (files.errors, files.output):  # the output last: then all is there
        results.finish(line.custom_id for line in files.lines(limits))


def _digest(length: int, *parts: str | bytes) -> str:
    hashed = hashlib.blake2b(digest_size=length // 2)
    for part in parts:
        hashed.update(part.encode() if isinstance(part, str) else part)
        hashed.update(b"\0")
    return hashed.hexdigest()


def _with_digest(id_: str, body: bytes) -> bytes:
    """Return the id of a result; its last digits are the digest of a result where they are 0."""
    return (id_[:-_RESULT_LENGTH] + _digest(_RESULT_LENGTH, body)).encode()


def _is_intact(id_: str, line: bytes) -> bool:
    """Return whether a line of results has the digest that its id ends with."""
    if len(id_) != _ID_LENGTH:
        return True  # of an earlier version, or of another program
    zeros = id_[:-_RESULT_LENGTH] + "0" * _RESULT_LENGTH
    body = line.removesuffix(b"\n").replace(id_.encode(), zeros.encode(), 1)
    return _with_digest(id_, body) == id_.encode()


def _num_tokens(answer: InternalResponse) -> int:
    try:
        usage = _answered.decode(answer.body).usage
    except msgspec.ValidationError:  # another server's form
        return 0
    return 0 if usage is None else usage.completion_tokens + usage.output_tokens
