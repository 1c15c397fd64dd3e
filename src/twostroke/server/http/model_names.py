"""Resolves the model names that clients send to the names of served models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelNotFoundError, nearest
from twostroke.core.frozen import Frozen

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


_MAX_ECHO_LENGTH: Final = 200  # of a name that responses repeat


class ModelNames(Frozen):
    """The names of the models, the default first.

    With `takes_any` every other name means the default.
    """

    known: tuple[str, ...]
    takes_any: bool = False

    def find(self, asked: str | None) -> str:
        """Return the name for the response: as the client wrote it, if it is a name that is known.

        Upper and lower case are the same, and an owner before the name (`openai/NAME`) and the tag
        `:latest` do not count.

        Raises:
            ModelNotFoundError: the client asks for another model.
        """
        known = self.known_name(asked)
        is_short = asked and len(asked) <= _MAX_ECHO_LENGTH and asked.isprintable()
        return asked if asked and is_short else known

    def is_known(self, name: str) -> bool:
        """Whether a request with this name would mean one of the models."""
        return bare_name(name) in map(bare_name, self.known)

    def known_name(self, asked: str | None) -> str:
        """Return the known name that the client means; errors as `find`."""
        if not asked:
            return self.known[0]
        if asked in self.known:
            return asked
        bare = bare_name(asked)
        for name in self.known:
            if bare_name(name) == bare:
                return name
        if self.takes_any:
            return self.known[0]
        raise unknown_model(asked, self.known)
