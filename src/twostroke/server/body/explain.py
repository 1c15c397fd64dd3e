"""Errors about unknown fields of a body, and about values that do not fit their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import RequestError, nearest
from twostroke.core.mismatch import Mismatch, find_mismatch, join_path
from twostroke.server.http.errors import MissingFieldError, UnknownFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAME_LENGTH = 100  # longer words of a client are cut before errors quote them

# The endpoint that takes the prompt in a field of this name.
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
    """Return the error about the first value in a request's body that does not fit its type.

    Args:
        reason: msgspec's error, which is quoted if no wrong value is found.
        kind: the expected type of the body.
        body: the body, decoded or as JSON. JSON is decoded no deeper than needed.
        where: the path of `body` inside the whole request.
    """
    mismatch = find_mismatch(kind, body, where)
    if mismatch is None:
        return _request_error("is not valid: {why}.", path=where, why=reason)
    path = mismatch.path
    actual = mismatch.actual
    match mismatch.problem:
        case "missing":
            return MissingFieldError("is missing.", field=path)
        case "unknown":
            name = str(actual)
            parent = path.removesuffix(name).removesuffix(".")
            return unknown_field(parent, name, mismatch.expected)
        case "type":
            return _request_error(_type_reason(mismatch), path=path)
        case "word":
            return _word_error(mismatch)
        case "key limits":
            return _request_error(f"A key of {{field}} must {mismatch.limits}.", path=path)
    ending = "" if actual is None else f", got {actual}"
    return _request_error(f"must {mismatch.limits}{ending}.", path=path)


def _type_reason(mismatch: Mismatch) -> str:
    words = [_TYPE_WORDS[name] for name in mismatch.expected if name != "null"]
    actual = mismatch.actual
    got = _TYPE_WORDS.get(actual, actual) if isinstance(actual, str) else actual
    return f"must be {' or '.join(words) or 'null'}, got {got}."


def _word_error(mismatch: Mismatch) -> RequestError:
    """Return the error about a value of a field that only accepts some words (an enum)."""
    word = str(mismatch.actual)
    words = mismatch.expected
    advice = mismatch.advice
    word = word[:MAX_NAME_LENGTH]
    special = advice.get(word, advice.get("*"))
    hint = f" {special}" if special else nearest(word, words)
    choices = ", ".join(words) if len(words) == 1 else f"one of {', '.join(words)}"
    reason = "must be {known}, got '{value}'.{hint}"
    return _request_error(reason, path=mismatch.path, known=choices, value=word, hint=hint)


def _request_error(reason: str, *, path: str, **facts: object) -> RequestError:
    has_subject = path or reason.startswith("A key")
    return RequestError(
        reason if has_subject else f"The body {reason}", field=path or None, **facts
    )


def unknown_field(path: str, name: str, known_names: Iterable[str]) -> UnknownFieldError:
    """Return the error about a field of the body that the API does not have.

    The error suggests the most similar of `known_names`. `path` is the path of the object that has
    the field.
    """
    shortened_name = name[:MAX_NAME_LENGTH]
    names = sorted(known_names)
    hint = "" if path else _other_endpoint_hint(shortened_name, names)
    hint = hint or nearest(shortened_name, names)
    field = join_path(path, shortened_name or "''")
    return UnknownFieldError("is not a known field.{hint}", field=field, hint=hint)


def _other_endpoint_hint(word: str, known_names: list[str]) -> str:
    """Return a hint if `messages` was sent to a completions endpoint, or `prompt` to chat.

    Returns "" for other unknown fields.
    """
    prompt_field = next((name for name in _PROMPT_FIELDS if name in known_names), None)
    if word not in _PROMPT_FIELDS or prompt_field is None:
        return ""
    return f" Send '{prompt_field}' here; '{word}' is for {_PROMPT_FIELDS[word]}."
