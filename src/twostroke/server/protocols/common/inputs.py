"""Fields that take one input or several: prompts, and texts to embed."""

from __future__ import annotations

from typing import Any

from twostroke.core.errors import RequestError


def split_inputs(value: str | list[Any], field: str) -> tuple[str | list[int | str], ...]:
    """Return the inputs in a field that takes one or several of them.

    An input is a text, or a list of token ids and texts that follow each other: a list that has an
    id is one input.

    Raises:
        RequestError: the list is empty, or mixes token ids with lists.
    """
    if isinstance(value, str):
        return (value,)
    if not value:
        raise RequestError(f"is an empty list: give at least one {field}.", field=field)
    if not any(isinstance(part, int) for part in value):
        return tuple(value)
    if any(isinstance(part, list) for part in value):
        reason = f"mixes token ids with lists: give one {field} or a list of {field}s."
        raise RequestError(reason, field=field)
    return (value,)


def split_prompts(
    value: str | list[str | int | list[int]], field: str
) -> tuple[str | list[int], ...]:
    """Return the texts and lists of token ids in a field that takes one or several of either.

    Raises:
        RequestError: the list is empty, or mixes token ids with others.
    """
    if isinstance(value, str):
        return (value,)
    if not value:
        raise RequestError(f"is an empty list: give at least one {field}.", field=field)
    ids = [part for part in value if isinstance(part, int)]
    if ids and len(ids) < len(value):
        reason = f"mixes token ids with texts or lists: give one {field} or a list of {field}s."
        raise RequestError(reason, field=field)
    return (ids,) if ids else tuple(part for part in value if not isinstance(part, int))
