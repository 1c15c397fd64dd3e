"""JSON bodies to checked structs; what is wrong with one is said in a sentence."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.serve.http.errors import BodySyntaxError, MissingFieldError, UnknownFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T", bound=msgspec.Struct)

MAX_NAME_LENGTH = 100  # of a client's own words that are searched and sent back

_PLACE = re.compile(r"(`key` in )?`\$\.?(.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(.*)`, got `(.*)`", re.DOTALL)
_WORD = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
# The field with what the model is to read, and the endpoint that it is mixed up with.
_TEXT_FIELDS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
_STEP = re.compile(r"\[[^][]*]|[^.[\]]+")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}

# A string is consumed whole, also one without an end, so that the scan is linear.
_BRACKET_OR_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes the bodies of one kind of request."""

    def __init__(self, kind: type[T], max_depth: int) -> None:
        """Make a decoder of `kind`; bodies nested deeper than `max_depth` are refused."""
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        self._max_depth = max_depth

    def decode(self, body: bytes) -> T:
        """Return the struct.

        Raises:
            RequestError: not JSON, too deep, or a field that is unknown, missing or of a wrong
                type; `field` names it.
        """
        if not body.strip():
            raise BodySyntaxError("The body is empty: send a JSON object of fields.")
        if depth_exceeds(body, self._max_depth):
            raise BodySyntaxError(
                f"The body is nested deeper than {self._max_depth} lists and objects."
            )
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explain(str(error), self._kind) from None
        except msgspec.DecodeError as error:
            raise BodySyntaxError("The body is not valid JSON: {why}.", why=error) from None
        except UnicodeDecodeError:
            raise BodySyntaxError("The body is not valid UTF-8.") from None


def convert(value: object, kind: type[T], where: str) -> T:
    """Return a part of a body, which was decoded before its kind was known, as a struct.

    Raises:
        RequestError: as of `BodyDecoder`; `where` is the part's place in the body.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, where) from None


def depth_exceeds(body: bytes, limit: int) -> bool:
    """Return whether lists and objects in a JSON text are nested deeper than `limit`.

    Takes time in proportion to the body, whatever it contains.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(body):
        first = match[0][:1]
        if first in b"[{":
            depth += 1
            if depth > limit:
                return True
        elif first in b"]}":
            depth -= 1
    return False


def _explain(text: str, kind: type[msgspec.Struct], where: str = "") -> RequestError:
    what, inner, is_of_key = _split(text)
    path = _join(where, inner) if inner else where
    if found := _UNKNOWN.fullmatch(what):
        word = found[1][:MAX_NAME_LENGTH]
        known = _fields_at(kind, inner)
        hint = nearest(word, known) if path else _elsewhere(word, known) or nearest(word, known)
        return UnknownFieldError("is not a known field.{hint}", field=_join(path, word), hint=hint)
    if found := _MISSING.fullmatch(what):
        return MissingFieldError("is missing.", field=_join(path, found[1]))
    facts: dict[str, object] = {}
    if found := _EXPECTED.fullmatch(what):
        reason = f"must be {_in_words(found[1])}, got {_in_words(found[2])}."
    elif found := _WORD.fullmatch(what):
        word, known = found[1][:MAX_NAME_LENGTH], _words_at(kind, inner)
        reason = "must be one of {known}, got '{value}'.{hint}"
        facts = {
            "known": ", ".join(dict.fromkeys(known)),
            "value": word,
            "hint": nearest(word, known),
        }
    else:
        reason, facts = "is not valid: {why}.", {"why": what}
    subject = "A key of {field} " if is_of_key else "" if path else "The body "
    return RequestError(subject + reason, field=path or None, **facts)


def _elsewhere(word: str, known: list[str]) -> str:
    """Return what to send instead of a field that another endpoint takes; empty for others."""
    own = next((name for name in _TEXT_FIELDS if name in known), None)
    if word not in _TEXT_FIELDS or own is None:
        return ""
    return f" Send '{own}' here; '{word}' is for {_TEXT_FIELDS[word]}."


def _split(text: str) -> tuple[str, str, bool]:
    """Return what msgspec found wrong, the path where, and whether a key there is at fault.

    Takes time linear in the text.
    """
    what, _, place = text.rpartition(" - at ")
    found = _PLACE.fullmatch(place)
    return (what, found[2], found[1] is not None) if what and found else (text, "", False)


def _words_at(kind: type[msgspec.Struct], path: str) -> list[str]:
    """Return the words that may stand at a place inside a struct that takes no others."""
    literals = (it for it in _types_at(kind, path) if isinstance(it, msgspec.inspect.LiteralType))
    return [str(word) for it in literals for word in it.values]


def _fields_at(kind: type[msgspec.Struct], path: str) -> list[str]:
    """Return the names of fields that an object at a place inside a struct may have."""
    structs = (it for it in _types_at(kind, path) if isinstance(it, msgspec.inspect.StructType))
    return sorted({field.encode_name for it in structs for field in it.fields})


def _types_at(kind: type[msgspec.Struct], path: str) -> list[msgspec.inspect.Type]:
    """Return what may stand at a place inside a struct.

    Takes time linear in the path, which a client's own word may look like.
    """
    here: list[msgspec.inspect.Type] = [_type_of(kind)]
    for step in _STEP.finditer(path):
        here = [inner for part in _parts(here) for inner in _into(part, step[0])]
        if not here:
            break
    return list(_parts(here))


@cache
def _type_of(kind: type[msgspec.Struct]) -> msgspec.inspect.Type:
    """Return what msgspec knows of a struct, which takes it a millisecond to find out."""
    return msgspec.inspect.type_info(kind)


def _into(kind: msgspec.inspect.Type, step: str) -> Iterator[msgspec.inspect.Type]:
    """Yield the types of what stands one step inside: a field, an item, or a struct's tag."""
    if isinstance(kind, msgspec.inspect.ListType) and step.startswith("["):
        yield kind.item_type
    elif isinstance(kind, msgspec.inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
        if kind.tag_field == step:
            yield msgspec.inspect.LiteralType((str(kind.tag),))


def _parts(kinds: Iterable[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    for kind in kinds:
        yield from kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _in_words(types: str) -> str:
    words = [_WORDS.get(word, word) for word in types.split(" | ") if word != "null"]
    return " or ".join(words) or "null"
