"""Decodes JSON request bodies into checked structs, and reports fields without effect."""

from __future__ import annotations

import codecs
import re
import threading
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from msgspec import inspect

from twostroke.core.message_text import counted_noun
from twostroke.core.mismatch import extra_of, join_path, type_of, union_members
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

    from starlette.requests import Request

    from twostroke.core.errors import RequestError
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.limits import RequestLimits

    # By struct: the attribute, the JSON name and the mark of each field to check. The mark is None
    # for a field that has marked fields inside.
    Marks = dict[type, list[tuple[str, str, dict[str, Any] | None]]]

T = TypeVar("T", bound=msgspec.Struct)

_UNTYPED_DECODER = msgspec.json.Decoder()
_type_lock = threading.Lock()

_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
_UTF8_CHUNK_BYTES = 1 << 20
_MAX_REPAIRED_BYTES = 1 << 20  # longer texts are not decoded again to find the error's cause

# Longer bodies are decoded, rendered and tokenized in a thread, so that other streams do not wait;
# for shorter bodies, starting work in a thread would take longer than the work.
LARGE_BODY_BYTES: Final = 16 * 1024


class BodyDecoder(Generic[T]):
    """Decodes the JSON bodies of one endpoint's requests into a struct, and checks their fields."""

    def __init__(self, struct_type: type[T], max_depth: int) -> None:
        """Create the decoder of bodies that become a `struct_type`.

        `max_depth` limits how many lists and objects may be inside each other.
        """
        self._decoder = msgspec.json.Decoder(struct_type)
        self._struct_type = struct_type
        self._marks = _marked_fields(struct_type)
        self._max_depth = max_depth

    def decode(self, body: bytes) -> tuple[T, list[Ignored]]:
        """Decode a request's JSON body; return its struct, and the fields that have no effect.

        Raises:
            RequestError: the body is not JSON or nested too deeply, or a field is missing, not
                supported, out of bounds or of a wrong type; the error's `field` names the
                field.
        """
        if not body.strip():
            raise BodySyntaxError("The body is empty: send a JSON object of fields.")
        nesting = nesting_of(body, self._max_depth)
        if nesting.depth > self._max_depth:
            raise BodySyntaxError(
                "The body is nested too deeply: at most "
                f"{counted_noun(self._max_depth, 'list or object', 'lists and objects')} may be "
                "inside each other."
            )
        if nesting.num_containers > MAX_CONTAINERS:
            raise BodySyntaxError(
                f"The body has {nesting.num_containers:,} lists and objects: at most "
                f"{MAX_CONTAINERS:,} are allowed. Send fewer of them."
            )
        ignored: list[Ignored] = []
        try:
            decoded = _parse(self._decoder, body)
        except msgspec.ValidationError as error:
            try:
                value = _parse(_UNTYPED_DECODER, body)
            except msgspec.ValidationError:  # a number is too large for any field
                raise explain(str(error), self._struct_type, body=body) from None
            decoded, ignored = _convert_leniently(value, self._struct_type)
        return decoded, [*ignored, *_fields_without_effect(decoded, "", self._marks)]


def convert(value: object, kind: Any, where: str) -> tuple[Any, list[Ignored]]:
    """Convert a decoded part of a JSON body to a struct; return it and the fields without effect.

    Endpoints use it for parts that `BodyDecoder` leaves as dictionaries, such as conversation
    items.

    Args:
        value: the decoded JSON. Fields that `kind` does not have are removed from it.
        kind: the type, which may be a union of structs.
        where: the path of the part in the body, for errors.

    Raises:
        RequestError: a field is missing, not supported, out of bounds or of a wrong type.
    """
    ignored: list[Ignored] = []
    _load_type(kind)
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        converted, ignored = _convert_leniently(value, kind, where)
    return converted, [*ignored, *_fields_without_effect(converted, where, _marked_fields(kind))]


@cache
def _load_type(kind: Any) -> None:
    """Make msgspec inspect a type before threads use it, under a lock.

    If two threads inspect the same type at once, the process crashes.
    """
    with _type_lock:
        msgspec.json.Decoder(kind)


def json_syntax_error(
    error: Exception, text: bytes | mmap | msgspec.Raw, noun: str = "body"
) -> BodySyntaxError:
    """Return the error for a text that is not JSON, with the reason that the client can see.

    `error` is msgspec's. `noun` names the text in the message, such as "body" or "line".
    """
    why = str(error).removeprefix("JSON is malformed: ")
    if not _is_utf8(text):
        why = "it is not UTF-8"
    elif _is_json_without_lone_surrogates(text):
        why = "a string has half of a surrogate pair"
    return BodySyntaxError("The {what} is not valid JSON: {why}.", what=noun, why=why)


def _is_utf8(text: bytes | mmap | msgspec.Raw) -> bool:
    """Whether a text is valid UTF-8. Large texts are checked in chunks, to use little memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with memoryview(text) as view:
            for start in range(0, len(view), _UTF8_CHUNK_BYTES):
                decoder.decode(bytes(view[start : start + _UTF8_CHUNK_BYTES]))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _is_json_without_lone_surrogates(text: bytes | mmap | msgspec.Raw) -> bool:
    """Whether a text is valid JSON except for escapes of lone surrogates (half a pair).

    False for texts of more than 1 MiB, which are not decoded again.
    """
    head = bytes(memoryview(text)[: _MAX_REPAIRED_BYTES + 1])
    repaired, num_surrogates = _LONE_SURROGATE.subn(rb"?", head)
    if not num_surrogates or len(head) > _MAX_REPAIRED_BYTES:
        return False
    try:
        _UNTYPED_DECODER.decode(repaired)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def misspelt_field_error(error: MissingFieldError, ignored: Iterable[Ignored]) -> RequestError:
    """Return the error for a required field that the client has perhaps misspelt.

    If an unknown field of the body has a similar name, the error is about that field; otherwise
    `error`, about the missing field, is returned.
    """
    parent, _, name = (error.field or "").rpartition(".")
    for field in ignored:
        if field.is_known or field.refusal is None or field.path.rpartition(".")[0] != parent:
            continue
        refusal = field.refusal()
        if f"'{name}'" in str(refusal.facts.get("hint", "")):
            return refusal
    return error


def _parse(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json_syntax_error(error, body) from None


def _convert_leniently(value: Any, kind: Any, where: str = "") -> tuple[Any, list[Ignored]]:
    """Remove unknown fields from a decoded body, and convert the body to the struct `kind`.

    Returns the struct, and the removed fields.

    Raises:
        RequestError: a field is missing, out of bounds or of a wrong type.
    """
    ignored = drop_unknown(value, kind, where)
    try:
        return msgspec.convert(value, kind, str_keys=True), ignored
    except msgspec.ValidationError as error:
        refusal = explain(str(error), kind, body=value, where=where)
    if isinstance(refusal, MissingFieldError):
        raise misspelt_field_error(refusal, ignored)
    raise refusal


def _fields_without_effect(value: object, where: str, marks: Marks) -> Iterator[Ignored]:
    """Yield the fields of a body that this server ignores.

    `value` is the decoded body, or a part at the path `where`; `marks` has the annotated fields of
    its structs.

    Fields with a neutral value, such as false for an optional feature, are left out, since they
    mean the same as no field.

    Raises:
        UnsupportedFieldError: the answer would mean something else without the field.
        UnknownFieldError: this API has another name for the field.
    """
    seen = set[tuple[int, str]]()
    for inner_path, extra in _find_marked_fields(value, marks):
        refusal = partial(_unsupported, join_path(where, inner_path), extra)
        if extra["effect"] is Effect.REFUSED:
            raise refusal()
        key = (id(extra), inner_path.rpartition(".")[2])
        if key not in seen and len(seen) < MAX_IGNORED:
            seen.add(key)
            is_hint = extra["effect"] is Effect.HINT
            yield Ignored(join_path(where, inner_path), refusal if is_hint else None, is_known=True)


def _unsupported(field: str, extra: dict[str, Any]) -> RequestError:
    if "new_name" in extra:
        reason = f"is not a known field. Did you mean '{extra['new_name']}'?"
        return UnknownFieldError(reason, field=field)
    return UnsupportedFieldError("is not supported yet: leave it out.", field=field)


def _find_marked_fields(value: object, marks: Marks) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the mark of each field of a decoded body that its struct marks.

    Marks come from annotations such as `field.unsupported` and `field.ignored`. A field is left out
    if its value is null or neutral, which means the same as no field.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            for inner_path, mark in _find_marked_fields(item, marks):
                yield join_path(f"[{index}]", inner_path), mark
    for attribute, name, extra in marks.get(type(value), ()):
        item = getattr(value, attribute)
        if item is None:
            continue
        if extra is None:
            for inner_path, mark in _find_marked_fields(item, marks):
                yield join_path(name, inner_path), mark
        elif not any(_is_same_json(item, neutral) for neutral in extra["neutral"]):
            yield name, extra


@cache
def _marked_fields(kind: Any) -> Marks:
    """Return the fields with marks, such as `field.unsupported`, of each struct in a body's type.

    Fields that contain such structs are included.
    """
    marks: Marks = {}
    _collect_marked_fields(type_of(kind), marks)
    return marks


def _collect_marked_fields(kind: inspect.Type, marks: Marks) -> bool:
    """Add the fields with marks, such as `field.unsupported`, of a body's type to `marks`.

    All structs inside the type are searched. Returns whether the type has any marked fields.
    """
    has_any = False
    for alternative in union_members([kind]):
        if isinstance(alternative, inspect.ListType):
            has_any |= _collect_marked_fields(alternative.item_type, marks)
        elif isinstance(alternative, inspect.StructType):
            if alternative.cls not in marks:
                fields = marks[alternative.cls] = []
                for field in alternative.fields:
                    extra = extra_of(field.type)
                    if "neutral" in extra:
                        fields.append((field.name, field.encode_name, extra))
                    elif _collect_marked_fields(field.type, marks):
                        fields.append((field.name, field.encode_name, None))
            has_any |= bool(marks[alternative.cls])
    return has_any


def _is_same_json(value: object, neutral: object) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


async def receive_fields(
    request: Request, decoder: BodyDecoder[T], limits: RequestLimits, readers: Readers
) -> tuple[T, list[Ignored]]:
    """Receive and decode a request's body; return its struct, and the ignored fields.

    Long bodies are decoded in a thread of `readers`, in fair turns between tenants.

    Raises:
        RequestError: the body is not JSON, or a field is wrong.
        BodySizeError: the body is too long.
        BodyTimeoutError: the body arrived too slowly.
        ClientGoneError: the client disconnected.
    """
    async with body_of(request, limits) as body:
        if len(body) <= LARGE_BODY_BYTES:
            return decoder.decode(body)
        return await readers.run_for(request, decoder.decode, body)
