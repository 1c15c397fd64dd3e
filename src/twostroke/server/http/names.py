"""Which names of a model mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelNotFoundError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_SHOWN: Final = 100  # of a name that a client made up
_LATEST: Final = ":latest"  # which Ollama's clients add


def bare_name(name: str) -> str:
    """Return a name without owner, tag and case."""
    return name.casefold().removesuffix(_LATEST).rpartition("/")[2]


def unknown_model(asked: str, known: Sequence[str]) -> ModelNotFoundError:
    """Return the error for a name that is none of those that are known."""
    word = asked[:_MOST_SHOWN]
    return ModelNotFoundError(
        "The model '{name}' does not exist.{hint} Served: {served}.",
        field="model",
        name=word,
        hint=nearest(word, known),
        served=", ".join(known),
    )
