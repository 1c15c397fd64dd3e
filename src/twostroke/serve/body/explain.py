"""One sentence for each kind of mistake in a body, and what msgspec knows of a place in it."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

from twostroke.core.errors import RequestError, nearest
from twostroke.http.errors import MissingFieldError, UnknownFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_NAME_LENGTH = 100  # of a client's own words that are searched and sent back

_PLACE = re.compile(r"(`key` in )?`\$\.?(.*)`", re.DOTALL)
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


def explain(text: str, kind: Any, body: Any, where: str = "") -> RequestError:
    """Turn msgspec's error about `body`, which may be decoded already, into ours."""
    what, inner, is_of_key = _split(text)
    path, kinds = join(where, inner), list(_types_at(kind, inner))
    facts: dict[str, object] = {}
    if found := _MISSING.fullmatch(what):
        return MissingFieldError("is missing.", field=join(path, found[1]))
    if what.endswith("got `null`") and path and not path.endswith("]"):
        return MissingFieldError("is missing.", field=path)
    if found := _EXPECTED.fullmatch(what):
        got = f", got {_in_words(found[2])}"
        if found[2] == "float":
            got = _got(body, inner) or got
        reason = f"must be {_in_words(found[1])}{got}."
    elif found := _WORD.fullmatch(what):
        reason = "must be {known}, got '{value}'.{hint}"
        facts = _about_word(found[1][:MAX_NAME_LENGTH], kinds)
    elif _OUT_OF_BOUNDS.fullmatch(what):
        if is_of_key:
            kinds = list(parts(it.key_type for it in kinds if isinstance(it, inspect.DictType)))
        got = "" if is_of_key else _got(body, inner)
        reason = f"must {next(filter(None, map(_limits, kinds)))}{got}."
    elif what == "Number out of range":
        reason = f"must {next(filter(None, map(_limits, kinds)), 'be a smaller number')}."
    else:
        reason, facts = "is not valid: {why}.", {"why": what}
    subject = "A key of {field} " if is_of_key else "" if path else "The body "
    return RequestError(subject + reason, field=path or None, **facts)


def unknown_field(path: str, name: str, known: Iterable[str]) -> UnknownFieldError:
    """Return the error about a field that is not among the `known` ones of the object at `path`."""
    word = name[:MAX_NAME_LENGTH]
    names = sorted(known)
    hint = nearest(word, names) if path else _elsewhere(word, names) or nearest(word, names)
    field = join(path, word or "''")
    return UnknownFieldError("is not a known field.{hint}", field=field, hint=hint)


def _about_word(word: str, kinds: list[inspect.Type]) -> dict[str, object]:
    """Return the facts of an error about a word where a field takes certain words only."""
    literals = (it for it in kinds if isinstance(it, inspect.LiteralType))
    known = dict.fromkeys(str(value) for it in literals for value in it.values)
    special = {key: text for it in kinds for key, text in extra_of(it).get("advice", {}).items()}
    own = special.get(word, special.get("*"))
    hint = f" {own}" if own else nearest(word, known)
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
    here: list[inspect.Type] = [type_of(kind)]
    for step in _STEP.finditer(path):
        here = [inner for part in parts(here) for inner in _into(part, step[0])]
        if not here:
            break
    return parts(here)


@cache
def type_of(kind: Any) -> inspect.Type:
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
            advice = getattr(kind.cls, "other_types", {})
            tag = inspect.LiteralType((str(kind.tag),))
            yield inspect.Metadata(tag, extra={"advice": advice})


def parts(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield annotations, and the alternatives of unions instead of these."""
    for kind in kinds:
        if isinstance(kind, inspect.Metadata):
            yield kind
            yield from parts([kind.type])
        elif isinstance(kind, inspect.UnionType):
            yield from parts(kind.types)
        else:
            yield kind


def extra_of(kind: inspect.Type) -> dict[str, Any]:
    """Return the marks of an annotation; empty for a type without them."""
    return (kind.extra or {}) if isinstance(kind, inspect.Metadata) else {}


def join(path: str, name: str) -> str:
    """Return the place of a field, or of an item such as `[3]`, inside another place."""
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def _in_words(types: str) -> str:
    words = [_WORDS.get(word, word) for word in types.split(" | ") if word != "null"]
    return " or ".join(words) or "null"
