"""Reads and validates the lines of a batch's input file, and finds lines that have changed."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.files import BYTE_ORDER_MARK, open_regular_file
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.mismatch import find_mismatch
from twostroke.server.batch.stored_batches import LineError
from twostroke.server.body.decode import json_syntax_error
from twostroke.server.http.body_limits import MAX_CONTAINERS, nesting_of
from twostroke.server.http.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from pathlib import Path

    from twostroke.server.http.limits import RequestLimits

_MAX_ID_LENGTH: Final = 512
_MAX_ERRORS: Final = 100  # in a batch's list of errors
_MAX_CHUNK_LINES: Final = 64  # returned by one call of `next_lines`
_MAX_CHUNK_BYTES: Final = 1 << 20


class ReadOffset(Frozen):
    """A position between two lines of a batch's input file, where reading can continue.

    Attributes:
        number: the number of lines before the position.
        num_bytes: the number of bytes before the position.
        num_requests: the number of lines before the position that are not blank.
    """

    number: int = 0
    num_bytes: int = 0
    num_requests: int = 0


class BatchLine(Frozen):
    """One request of a batch, from line `number` (from 1) of the batch's input file."""

    number: int
    custom_id: str
    url: str
    body: bytes


class _LineFields(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _LineBody(msgspec.Struct):
    stream: Any = None


# Created before threads use them.
_fields: Final = msgspec.json.Decoder(_LineFields)
_body: Final = msgspec.json.Decoder(_LineBody)


class WrongLineError(Exception):
    """A line of a batch's input file is not valid; the exception's argument is a `LineError`."""


class InputChangedError(Exception):
    """The input file of a batch has changed since it was validated."""


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the text of each line of a batch's input file, without blank lines.

    A line longer than `max_bytes` is cut, so that it does not fill the memory.

    Raises:
        OSError: the file cannot be read.
    """
    for end, text in _read(path, max_bytes, ReadOffset()):
        yield end.number, text


def next_lines(
    path: Path,
    start: ReadOffset,
    done_lines: Container[int],
    limits: RequestLimits,
    digests: array[int] | None = None,
) -> tuple[list[BatchLine], ReadOffset | None]:
    """Read the next requests of a validated input file, a few at a time.

    Returns the requests, and the position at which to continue; None at the end of the file.

    Args:
        path: the input file of a batch.
        start: the position of the first line to read.
        done_lines: the numbers of lines to leave out, since they have results.
        limits: the limits of a request.
        digests: the digests of the validated lines, with which changed lines are found; lines that
            were appended after the validation are left out. None if changes need not be found.

    Raises:
        InputChangedError: a line differs from its digest, or is missing.
        WrongLineError: a line is not valid.
        OSError: the file cannot be read.
    """
    lines: list[BatchLine] = []
    num_bytes = 0
    num_requests = start.num_requests
    for end, text in _read(path, limits.max_body_bytes, start):
        num_requests = end.num_requests
        if digests is not None and num_requests > len(digests):
            return lines, None
        if end.number in done_lines:
            continue
        if digests is not None and _line_digest(text) != digests[num_requests - 1]:
            raise InputChangedError
        lines.append(parse(end.number, text, limits))
        num_bytes += len(text)
        if num_bytes > _MAX_CHUNK_BYTES or len(lines) == _MAX_CHUNK_LINES:
            return lines, end
    if digests is not None and num_requests < len(digests):
        raise InputChangedError
    return lines, None


def line_digests(path: Path, max_bytes: int, num_requests: int) -> array[int]:
    """Return a 64-bit digest for each of the first `num_requests` lines of an input file.

    Blank lines are left out, and longer lines are cut at `max_bytes`. The digests show later
    whether a line has changed.

    Raises:
        OSError: the file cannot be read.
    """
    digests = array("Q")
    if num_requests:
        for _, text in read_lines(path, max_bytes):
            digests.append(_line_digest(text))
            if len(digests) == num_requests:
                break
    return digests


def digest_of_all(digests: array[int]) -> str:
    """Return one digest of a batch's whole input file, from the digests of its lines."""
    return blake2b(digests.tobytes(), digest_size=16).hexdigest()


def _line_digest(text: bytes) -> int:
    return int.from_bytes(blake2b(text.strip(), digest_size=8).digest())


def _read(path: Path, max_bytes: int, start: ReadOffset) -> Iterator[tuple[ReadOffset, bytes]]:
    """Yield each line of a batch's input file with the position after it, without blank lines."""
    with open_regular_file(path) as file:
        file.seek(start.num_bytes)
        number = start.number
        num_requests = start.num_requests
        is_rest = False  # of a line that was cut
        while text := file.readline(max_bytes + 2):
            number += not is_rest
            if not is_rest and text.removeprefix(BYTE_ORDER_MARK).strip():
                num_requests += 1
                yield ReadOffset(number, file.tell(), num_requests), text
            is_rest = not text.endswith(b"\n")


def parse(number: int, text: bytes, limits: RequestLimits) -> BatchLine:
    """Decode and check one line of a batch's input file, and return its request.

    Raises:
        WrongLineError: the line is not a valid request.
    """

    def line_error(code: str, message: str, param: str | None = None) -> WrongLineError:
        return WrongLineError(LineError(code, message, number, param))

    fields = _decode_fields(text, limits, line_error)
    id_ = fields.custom_id
    raw_body = bytes(fields.body)
    if not isinstance(id_, str) or not 0 < len(id_) <= _MAX_ID_LENGTH:
        code = "missing_required_parameter" if id_ is None else "invalid_value"
        message = f"'custom_id' must be a text of 1 to {_MAX_ID_LENGTH} characters."
        raise line_error(code, message, "custom_id")
    if fields.method != "POST":
        raise line_error("invalid_method", "'method' must be 'POST'.", "method")
    if not isinstance(fields.url, str):
        raise line_error(
            "invalid_url", "'url' must be a path such as '/v1/chat/completions'.", "url"
        )
    if not raw_body:
        raise line_error("missing_required_parameter", "'body' is missing.", "body")
    try:
        body = _body.decode(raw_body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = _huge_number_message(_LineBody, raw_body, "body")
        message = message or "'body' is not a JSON object."
        raise line_error("invalid_value", message, "body") from None
    if body.stream:
        raise line_error("invalid_value", "'stream' is not possible in a batch.", "body.stream")
    return BatchLine(number, id_, fields.url, raw_body)


def _decode_fields(
    text: bytes, limits: RequestLimits, line_error: Callable[[str, str], WrongLineError]
) -> _LineFields:
    """Decode a line's JSON within its limits; raise the `line_error` with a code and a message."""
    if len(text.rstrip(b"\r\n")) > limits.max_body_bytes:
        raise line_error(
            "line_too_large",
            f"The line is larger than {counted_noun(limits.max_body_bytes, 'byte')}.",
        )
    nesting = nesting_of(text, limits.max_json_depth)
    if nesting.depth > limits.max_json_depth:
        raise line_error("invalid_json_line", "The line is nested too deeply.")
    if nesting.num_containers > MAX_CONTAINERS:
        message = f"The line has more than {MAX_CONTAINERS:,} lists and objects."
        raise line_error("invalid_json_line", message)
    line = text.removeprefix(BYTE_ORDER_MARK)
    try:
        return _fields.decode(line)
    except msgspec.ValidationError:
        if message := _huge_number_message(_LineFields, line):
            raise line_error("invalid_value", message) from None
        raise line_error("invalid_json_line", "The line is not a JSON object.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = str(json_syntax_error(error, text, "line"))
        raise line_error("invalid_json_line", message) from None


def _huge_number_message(kind: type, text: bytes, path: str = "") -> str:
    """Return the error message about a number that is too large for a float, such as 1e999.

    Returns "" if the text has no such number.


    `kind` is the struct that the JSON `text` becomes, and `path` its path in the line.
    """
    mismatch = find_mismatch(kind, text, path)
    is_number = mismatch is not None and mismatch.problem == "limits"
    return f"'{mismatch.path}' must {mismatch.limits}." if mismatch and is_number else ""


def check(
    path: Path, endpoint: str | None, limits: RequestLimits
) -> tuple[int, list[LineError], int]:
    """Validate all lines of a batch's input file, before any request is sent.

    Args:
        path: the input file.
        endpoint: the URL path that all lines must have; None for the path of the first line.
        limits: the limits of a batch and of a request.

    Returns:
        The number of lines, the first errors, and the number of all errors.
    """
    first_lines: dict[str, int] = {}  # by custom_id
    errors: list[LineError] = []
    num_lines = num_errors = 0
    for number, text in read_lines(path, limits.max_body_bytes):
        num_lines += 1
        if num_lines > limits.max_batch_lines:
            message = f"The file has more than {counted_noun(limits.max_batch_lines, 'line')}."
            return num_lines, [LineError("too_many_tasks", message), *errors], num_errors + 1
        try:
            line = parse(number, text, limits)
        except WrongLineError as line_error:
            error: LineError | None = line_error.args[0]
        else:
            endpoint = endpoint or line.url
            first_line = first_lines.setdefault(line.custom_id, number)
            error = _consistency_error(line, endpoint, first_line)
        if error is not None:
            num_errors += 1
            if len(errors) < _MAX_ERRORS:
                errors.append(error)
    if not num_lines:
        return 0, [LineError("empty_file", "The file has no request: each line must be one.")], 1
    return num_lines, errors, num_errors


def _consistency_error(line: BatchLine, endpoint: str, first_line: int) -> LineError | None:
    """Return the error of a line that conflicts with earlier lines; None if it has no conflict.

    All lines must have the URL path `endpoint` and different custom_ids. `first_line` is the number
    of the first line with the same custom_id.
    """
    if line.url != endpoint:
        message = f"'url' must be '{endpoint}', as in the whole batch."
        return LineError("mismatched_url", message, line.number, "url")
    if first_line != line.number:
        custom_id = one_line(line.custom_id[:40])
        message = f"The custom_id '{custom_id}' is in line {first_line}, too."
        return LineError("duplicate_custom_id", message, line.number, "custom_id")
    return None
