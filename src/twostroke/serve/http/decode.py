"""Decodes JSON bodies into checked structs, with one sentence for each kind of mistake."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from twostroke.core.errors import RequestError, nearest
from twostroke.serve.http.errors import (
    BodySyntaxError,
    MissingFieldError,
    UnknownFieldError,
    UnsupportedFieldError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    # By struct: attribute and JSON name of a field, and its marks; None where marks are inside it.
    Marks = dict[type, list[tuple[str, str, dict[str, Any] | None]]]

T = TypeVar("T", bound=msgspec.Struct)

MAX_NAME_LENGTH = 100  # of a client's own words that are searched and sent back

_PLACE = re.compile(r"(`key` in )?`\$\.?(.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(.*)`, got `(.*)`", re.DOTALL)
_OUT_OF_BOUNDS = re.compile(r"Expected `\w+` (?:of length )?[<>]=? \S+")
_WORD = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
# The field that holds the prompt, and the endpoint that takes it.
_PROMPT_FIELDS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
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
        self._marks = _marks_in(kind)
        self._max_depth = max_depth

    def decode(self, body: bytes) -> T:
        """Return the struct.

        Raises:
            RequestError: not JSON, too deep, or a field that is unknown, missing, not supported,
                out of bounds or of a wrong type; `field` names it.
        """
        if not body.strip():
            raise BodySyntaxError("The body is empty: send a JSON object of fields.")
        if depth_exceeds(body, self._max_depth):
            raise BodySyntaxError(
                f"The body is nested deeper than {self._max_depth} lists and objects."
            )
        try:
            decoded = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explain(str(error), self._kind, body) from None
        except msgspec.DecodeError as error:
            raise BodySyntaxError("The body is not valid JSON: {why}.", why=error) from None
        except UnicodeDecodeError:
            raise BodySyntaxError("The body is not valid UTF-8.") from None
        _check_supported(decoded, "", self._marks)
        return decoded


def convert(value: object, kind: Any, where: str) -> Any:
    """Return a decoded part of a body as `kind`, which may be a union of structs.

    Raises:
        RequestError: as `BodyDecoder.decode`; `where` is the part's place in the body.
    """
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, value, where) from None
    _check_supported(converted, where, _marks_in(kind))
    return converted


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


def _check_supported(value: object, where: str, marks: Marks) -> None:
    """Refuse fields that are marked as not supported, unless null or neutral.

    Raises:
        UnsupportedFieldError: naming the field.
        UnknownFieldError: the protocol calls the field otherwise.
    """
    found = _find_unsupported(value, marks)
    if found is None:
        return
    field, extra = _join(where, found[0]), found[1]
    if "new_name" in extra:
        reason = f"is not a known field. Did you mean '{extra['new_name']}'?"
        raise UnknownFieldError(reason, field=field)
    raise UnsupportedFieldError("is not supported yet: leave it out.", field=field)


def _find_unsupported(value: object, marks: Marks) -> tuple[str, dict[str, Any]] | None:
    """Return the place inside a value and the marks of a field with a value that is not neutral."""
    if isinstance(value, list):
        for place, part in enumerate(value):
            if found := _find_unsupported(part, marks):
                return _join(f"[{place}]", found[0]), found[1]
    for attribute, name, extra in marks.get(type(value), ()):
        inner = getattr(value, attribute)
        if inner is None:
            continue
        if extra is None:
            if found := _find_unsupported(inner, marks):
                return _join(name, found[0]), found[1]
        elif not any(_is_same(inner, neutral) for neutral in extra["neutral"]):
            return name, extra
    return None


@cache
def _marks_in(kind: Any) -> Marks:
    """Return the fields to check, for each struct inside a type."""
    found: Marks = {}
    _collect_marks(_type_of(kind), found)
    return found


def _collect_marks(kind: inspect.Type, found: Marks) -> bool:
    """Add the fields to check of the structs inside a type; return whether there are any."""
    has_any = False
    for part in _parts([kind]):
        if isinstance(part, inspect.ListType):
            has_any |= _collect_marks(part.item_type, found)
        elif isinstance(part, inspect.StructType):
            if part.cls not in found:
                fields = found[part.cls] = []
                for field in part.fields:
                    extra = _extra(field.type)
                    if "neutral" in extra:
                        fields.append((field.name, field.encode_name, extra))
                    elif _collect_marks(field.type, found):
                        fields.append((field.name, field.encode_name, None))
            has_any |= bool(found[part.cls])
    return has_any


def _is_same(value: object, neutral: object) -> bool:
    """Whether both are the same value in JSON, where true is not 1."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def _explain(text: str, kind: Any, body: Any, where: str = "") -> RequestError:
    """Turn msgspec's error about `body`, which may be decoded already, into ours."""
    what, inner, is_of_key = _split(text)
    path, kinds = _join(where, inner), list(_types_at(kind, inner))
    facts: dict[str, object] = {}
    if found := _UNKNOWN.fullmatch(what):
        word = found[1][:MAX_NAME_LENGTH]
        structs = (it for it in kinds if isinstance(it, inspect.StructType))
        known = sorted({field.encode_name for it in structs for field in it.fields})
        hint = nearest(word, known) if path else _elsewhere(word, known) or nearest(word, known)
        return UnknownFieldError("is not a known field.{hint}", field=_join(path, word), hint=hint)
    if found := _MISSING.fullmatch(what):
        return MissingFieldError("is missing.", field=_join(path, found[1]))
    if what.endswith("got `null`") and path and not path.endswith("]"):
        return MissingFieldError("is missing.", field=path)
    if found := _EXPECTED.fullmatch(what):
        reason = f"must be {_in_words(found[1])}, got {_in_words(found[2])}."
    elif found := _WORD.fullmatch(what):
        reason = "must be {known}, got '{value}'.{hint}"
        facts = _about_word(found[1][:MAX_NAME_LENGTH], kinds)
    elif _OUT_OF_BOUNDS.fullmatch(what):
        if is_of_key:
            kinds = list(_parts(it.key_type for it in kinds if isinstance(it, inspect.DictType)))
        got = "" if is_of_key else _got(body, inner)
        reason = f"must {next(filter(None, map(_limits, kinds)))}{got}."
    else:
        reason, facts = "is not valid: {why}.", {"why": what}
    subject = "A key of {field} " if is_of_key else "" if path else "The body "
    return RequestError(subject + reason, field=path or None, **facts)


def _about_word(word: str, kinds: list[inspect.Type]) -> dict[str, object]:
    """Return the facts of an error about a word where a field takes certain words only."""
    literals = (it for it in kinds if isinstance(it, inspect.LiteralType))
    known = dict.fromkeys(str(value) for it in literals for value in it.values)
    special = {key: text for it in kinds for key, text in _extra(it).get("hints", {}).items()}
    hint = f" {special[word]}" if word in special else nearest(word, known)
    words = ", ".join(known) if len(known) == 1 else f"one of {', '.join(known)}"
    return {"known": words, "value": word, "hint": hint}


def _limits(kind: inspect.Type) -> str:
    """Return the limits of a type in words; empty without limits."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        low, high, verb, unit = kind.ge, kind.le, "be", ""
    elif isinstance(kind, inspect.StrType | inspect.ListType | inspect.DictType):
        low, high, verb = kind.min_length, kind.max_length, "have"
        unit = " characters" if isinstance(kind, inspect.StrType) else " items"
    else:
        return ""
    if low is not None and high is not None:
        return f"{verb} from {low} to {high}{unit}"
    if high is not None:
        return f"{verb} at most {high}{unit}"
    unit = unit.rstrip("s") if low == 1 else unit
    return f"{verb} at least {low}{unit}" if low is not None else ""


def _got(body: Any, path: str) -> str:
    """Return what a body has at a place, for an error: a number, or a length."""
    try:
        value = msgspec.json.decode(body) if isinstance(body, bytes) else body
        for step in _STEP.findall(path):
            value = value[int(step[1:-1]) if step.startswith("[") else step]
        return f", got {value if isinstance(value, int | float) else len(value)}"
    except (ValueError, LookupError, TypeError):  # not JSON after that place, or a key twice
        return ""


def _elsewhere(word: str, known: list[str]) -> str:
    """Return which field to send instead of one that another endpoint takes; empty for others."""
    own = next((name for name in _PROMPT_FIELDS if name in known), None)
    if word not in _PROMPT_FIELDS or own is None:
        return ""
    return f" Send '{own}' here; '{word}' is for {_PROMPT_FIELDS[word]}."


def _split(text: str) -> tuple[str, str, bool]:
    """Return what msgspec found wrong, the path where, and whether it is about a key there.

    Takes time linear in the text.
    """
    what, _, place = text.rpartition(" - at ")
    found = _PLACE.fullmatch(place)
    return (what, found[2], found[1] is not None) if what and found else (text, "", False)


def _types_at(kind: Any, path: str) -> Iterator[inspect.Type]:
    """Yield the types of a place inside a type, with their annotations.

    Takes time linear in the path, which a client's own word may look like.
    """
    here: list[inspect.Type] = [_type_of(kind)]
    for step in _STEP.finditer(path):
        here = [inner for part in _parts(here) for inner in _into(part, step[0])]
        if not here:
            break
    return _parts(here)


@cache
def _type_of(kind: Any) -> inspect.Type:
    """Return msgspec's description of a type, which takes a millisecond to make."""
    return inspect.type_info(kind)


def _into(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the types one step inside: of a field, an item, a value, or a struct's tag."""
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType) and step.startswith("["):
        yield kind.value_type
    elif isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
        if kind.tag_field == step:
            yield inspect.LiteralType((str(kind.tag),))


def _parts(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield annotations, and the alternatives of unions instead of these."""
    for kind in kinds:
        if isinstance(kind, inspect.Metadata):
            yield kind
            yield from _parts([kind.type])
        elif isinstance(kind, inspect.UnionType):
            yield from _parts(kind.types)
        else:
            yield kind


def _extra(kind: inspect.Type) -> dict[str, Any]:
    """Return the marks of an annotation; empty for a type without them."""
    return (kind.extra or {}) if isinstance(kind, inspect.Metadata) else {}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def _in_words(types: str) -> str:
    words = [_WORDS.get(word, word) for word in types.split(" | ") if word != "null"]
    return " or ".join(words) or "null"
