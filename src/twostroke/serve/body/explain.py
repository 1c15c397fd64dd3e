"""Errors about unknown fields, and msgspec's descriptions of the types of fields."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import inspect

from twostroke.core.errors import nearest
from twostroke.http.errors import UnknownFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_NAME_LENGTH = 100  # of a client's own words that are searched and sent back

# The field that holds the prompt, and the endpoint that takes it.
_PROMPT_FIELDS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


def unknown_field(path: str, name: str, known: Iterable[str]) -> UnknownFieldError:
    """Return the error about a field that is not among the `known` ones of the object at `path`."""
    word = name[:MAX_NAME_LENGTH]
    names = sorted(known)
    hint = nearest(word, names) if path else _elsewhere(word, names) or nearest(word, names)
    field = join(path, word or "''")
    return UnknownFieldError("is not a known field.{hint}", field=field, hint=hint)


def _elsewhere(word: str, known: list[str]) -> str:
    """Return which field to send instead of one that another endpoint takes; empty for others."""
    own = next((name for name in _PROMPT_FIELDS if name in known), None)
    if word not in _PROMPT_FIELDS or own is None:
        return ""
    return f" Send '{own}' here; '{word}' is for {_PROMPT_FIELDS[word]}."


@cache
def type_of(kind: Any) -> inspect.Type:
    """Return msgspec's description of a type, which takes a millisecond to make."""
    return inspect.type_info(kind)


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
