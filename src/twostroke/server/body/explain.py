"""Errors about unknown fields, and about values that do not fit their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import RequestError, nearest
from twostroke.core.mismatch import Mismatch, find_mismatch, join
from twostroke.server.http.errors import MissingFieldError, UnknownFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAME_LENGTH = 100  # of a client's own words that are searched and sent back

# The field that holds the prompt, and the endpoint that takes it.
_PROMPT_FIELDS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}

_TYPE_WORDS: Final = {
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "dict": "an object",
}


def explain(reason: str, kind: Any, body: Any, where: str = "") -> RequestError:
    """Return the error about the first value of a body that does not fit its type.

    Args:
        reason: msgspec's error, which is quoted if no wrong value is found.
        kind: the type of the body.
        body: the body, decoded or as JSON. JSON is decoded no deeper than needed.
        where: the body's path inside the whole request.
    """
    mismatch = find_mismatch(kind, body, where)
    if mismatch is None:
        return _error("is not valid: {why}.", path=where, why=reason)
    path, actual = mismatch.path, mismatch.actual
    match mismatch.problem:
        case "missing":
            return MissingFieldError("is missing.", field=path)
        case "unknown":
            name = str(actual)
            parent = path.removesuffix(name).removesuffix(".")
            return unknown_field(parent, name, mismatch.expected)
        case "type":
            return _error(_type_reason(mismatch), path=path)
        case "word":
            return _word_error(mismatch)
        case "key limits":
            return _error(f"A key of {{field}} must {mismatch.limits}.", path=path)
    ending = "" if actual is None else f", got {actual}"
    return _error(f"must {mismatch.limits}{ending}.", path=path)


def _type_reason(mismatch: Mismatch) -> str:
    words = [_TYPE_WORDS[name] for name in mismatch.expected if name != "null"]
    actual = mismatch.actual
    got = _TYPE_WORDS.get(actual, actual) if isinstance(actual, str) else actual
    return f"must be {' or '.join(words) or 'null'}, got {got}."


def _word_error(mismatch: Mismatch) -> RequestError:
    """Return the error about a text in a field that accepts only certain words."""
    word, words, advice = str(mismatch.actual), mismatch.expected, mismatch.advice
    word = word[:MAX_NAME_LENGTH]
    special = advice.get(word, advice.get("*"))
    hint = f" {special}" if special else nearest(word, words)
    listed = ", ".join(words) if len(words) == 1 else f"one of {', '.join(words)}"
    reason = "must be {known}, got '{value}'.{hint}"
    return _error(reason, path=mismatch.path, known=listed, value=word, hint=hint)


def _error(reason: str, *, path: str, **facts: object) -> RequestError:
    has_subject = path or reason.startswith("A key")
    return RequestError(
        reason if has_subject else f"The body {reason}", field=path or None, **facts
    )


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
