"""Decodes JSON bodies into checked structs."""

from __future__ import annotations

import codecs
import re
import threading
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from msgspec import inspect

from twostroke.core.mismatch import extra_of, join, parts, type_of
from twostroke.server.body.explain import explain
from twostroke.server.body.field import Effect
from twostroke.server.body.lenient import drop_unknown
from twostroke.server.http.body_limits import MAX_CONTAINERS, nesting_of
from twostroke.server.http.errors import (
    BodySyntaxError,
    MissingFieldError,
    UnknownFieldError,
    UnsupportedFieldError,
)
from twostroke.server.http.ignored import MAX_IGNORED, Ignored
from twostroke.server.http.limits import body_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from mmap import mmap

    from twostroke.core.errors import RequestError

    # By struct: attribute and JSON name of a field, and its marks; None where marks are inside it.
    Marks = dict[type, list[tuple[str, str, dict[str, Any] | None]]]
    from starlette.requests import Request

    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.limits import RequestLimits

T = TypeVar("T", bound=msgspec.Struct)

_ANY = msgspec.json.Decoder()
_preparing = threading.Lock()

_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
_DECODED_BYTES = 1 << 20  # at a time
_MAX_REPAIRED_BYTES = 1 << 20  # of a text that is decoded once more to find the error's cause


class BodyDecoder(Generic[T]):
    """Decodes the bodies of one kind of request."""

    def __init__(self, kind: type[T], max_depth: int) -> None:
        """Make a decoder of `kind`; bodies nested deeper than `max_depth` are refused."""
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        self._marks = _marks_in(kind)
        self._max_depth = max_depth

    def decode(self, body: bytes) -> tuple[T, list[Ignored]]:
        """Return the struct, and the fields that it could not hold or that have no effect.

        Raises:
            RequestError: not JSON, too deep, or a field that is missing, not supported, out of
                bounds or of a wrong type; `field` names it.
        """
        if not body.strip():
            raise BodySyntaxError("The body is empty: send a JSON object of fields.")
        nesting = nesting_of(body, self._max_depth)
        if nesting.depth > self._max_depth:
            raise BodySyntaxError(
                f"The body is nested deeper than {self._max_depth} lists and objects."
            )
        if nesting.num_containers > MAX_CONTAINERS:
            raise BodySyntaxError(
                f"The body has {nesting.num_containers:,} lists and objects: at most "
                f"{MAX_CONTAINERS:,} are read."
            )
        ignored: list[Ignored] = []
        try:
            decoded = _parse(self._decoder, body)
        except msgspec.ValidationError as error:
            try:
                value = _parse(_ANY, body)
            except msgspec.ValidationError:  # a number that is too large for any field
                raise explain(str(error), self._kind, body) from None
            decoded, ignored = _convert_leniently(value, self._kind)
        return decoded, [*ignored, *_without_effect(decoded, "", self._marks)]


def convert(value: object, kind: Any, where: str) -> tuple[Any, list[Ignored]]:
    """Return a decoded part of a body as `kind`, which may be a union of structs.

    Fields that `kind` does not have are removed from `value`. Returns and raises as
    `BodyDecoder.decode`; `where` is the part's place in the body.
    """
    ignored: list[Ignored] = []
    _prepare(kind)
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        converted, ignored = _convert_leniently(value, kind, where)
    return converted, [*ignored, *_without_effect(converted, where, _marks_in(kind))]


@cache
def _prepare(kind: Any) -> None:
    """Have msgspec read a type's fields in one thread: two at once crash the process."""
    with _preparing:
        msgspec.json.Decoder(kind)


def not_json(
    error: Exception, text: bytes | mmap | msgspec.Raw, what: str = "body"
) -> BodySyntaxError:
    """Return the error about a text that msgspec cannot read; `what` it is."""
    why = str(error).removeprefix("JSON is malformed: ")
    if not _is_utf8(text):
        why = "it is not UTF-8"
    elif _is_json_without_half_pairs(text):
        why = "a string has half of a surrogate pair"
    return BodySyntaxError("The {what} is not valid JSON: {why}.", what=what, why=why)


def _is_utf8(text: bytes | mmap | msgspec.Raw) -> bool:
    """Whether a text is UTF-8; it is decoded in parts, since it may be large."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with memoryview(text) as view:
            for start in range(0, len(view), _DECODED_BYTES):
                decoder.decode(bytes(view[start : start + _DECODED_BYTES]))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _is_json_without_half_pairs(text: bytes | mmap | msgspec.Raw) -> bool:
    """Whether a small text would be valid JSON without its lone surrogates."""
    head = bytes(memoryview(text)[: _MAX_REPAIRED_BYTES + 1])
    repaired, num_halves = _HALF_A_PAIR.subn(rb"?", head)
    if not num_halves or len(head) > _MAX_REPAIRED_BYTES:
        return False
    try:
        _ANY.decode(repaired)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def meant(error: MissingFieldError, ignored: Iterable[Ignored]) -> RequestError:
    """Return the error about an ignored field that is the missing one misspelt, else `error`."""
    place, _, name = (error.field or "").rpartition(".")
    for one in ignored:
        if one.is_known or one.refusal is None or one.path.rpartition(".")[0] != place:
            continue
        refusal = one.refusal()
        if f"'{name}'" in str(refusal.facts.get("hint", "")):
            return refusal
    return error


def _parse(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise not_json(error, body) from None


def _convert_leniently(value: Any, kind: Any, where: str = "") -> tuple[Any, list[Ignored]]:
    """Return a decoded body as `kind`, and the fields that were left out for it."""
    ignored = drop_unknown(value, kind, where)
    try:
        return msgspec.convert(value, kind, str_keys=True), ignored
    except msgspec.ValidationError as error:
        refusal = explain(str(error), kind, value, where)
    raise meant(refusal, ignored) if isinstance(refusal, MissingFieldError) else refusal


def _without_effect(value: object, where: str, marks: Marks) -> Iterator[Ignored]:
    """Yield the fields with values that are not neutral and have no effect.

    Raises:
        UnsupportedFieldError: a field whose lack would change the answer; it is named.
        UnknownFieldError: the protocol calls the field otherwise.
    """
    seen = set[tuple[int, str]]()
    for inner, extra in _find_marked(value, marks):
        refusal = partial(_unsupported, join(where, inner), extra)
        if extra["effect"] is Effect.REFUSED:
            raise refusal()
        key = (id(extra), inner.rpartition(".")[2])
        if key not in seen and len(seen) < MAX_IGNORED:
            seen.add(key)
            is_hint = extra["effect"] is Effect.HINT
            yield Ignored(join(where, inner), refusal if is_hint else None, is_known=True)


def _unsupported(field: str, extra: dict[str, Any]) -> RequestError:
    if "new_name" in extra:
        reason = f"is not a known field. Did you mean '{extra['new_name']}'?"
        return UnknownFieldError(reason, field=field)
    return UnsupportedFieldError("is not supported yet: leave it out.", field=field)


def _find_marked(value: object, marks: Marks) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the places inside a value and the marks of fields with values that are not neutral."""
    if isinstance(value, list):
        for place, part in enumerate(value):
            for inner, found in _find_marked(part, marks):
                yield join(f"[{place}]", inner), found
    for attribute, name, extra in marks.get(type(value), ()):
        part = getattr(value, attribute)
        if part is None:
            continue
        if extra is None:
            for inner, found in _find_marked(part, marks):
                yield join(name, inner), found
        elif not any(_is_same(part, neutral) for neutral in extra["neutral"]):
            yield name, extra


@cache
def _marks_in(kind: Any) -> Marks:
    """Return the fields to check, for each struct inside a type."""
    found: Marks = {}
    _collect_marks(type_of(kind), found)
    return found


def _collect_marks(kind: inspect.Type, found: Marks) -> bool:
    """Add the fields to check of the structs inside a type; return whether there are any."""
    has_any = False
    for part in parts([kind]):
        if isinstance(part, inspect.ListType):
            has_any |= _collect_marks(part.item_type, found)
        elif isinstance(part, inspect.StructType):
            if part.cls not in found:
                fields = found[part.cls] = []
                for field in part.fields:
                    extra = extra_of(field.type)
                    if "neutral" in extra:
                        fields.append((field.name, field.encode_name, extra))
                    elif _collect_marks(field.type, found):
                        fields.append((field.name, field.encode_name, None))
            has_any |= bool(found[part.cls])
    return has_any


def _is_same(value: object, neutral: object) -> bool:
    """Whether both are the same value in JSON, where true is not 1."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


# Longer bodies are decoded, rendered and tokenized in a thread, so that other streams do not wait;
# for shorter ones the hand-over would take longer than the work.
LARGE_BODY_BYTES: Final = 16 * 1024


async def receive_fields(
    request: Request, decoder: BodyDecoder[T], limits: RequestLimits, readers: Readers
) -> tuple[T, list[Ignored]]:
    """Return the fields of a request's body, as `decoder` does; long bodies take turns.

    Raises:
        TwostrokeError: as `body_of` and `BodyDecoder.decode`, and if the client left.
    """
    async with body_of(request, limits) as body:
        if len(body) <= LARGE_BODY_BYTES:
            return decoder.decode(body)
        return await readers.run_for(request, decoder.decode, body)
