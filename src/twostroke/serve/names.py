"""The names by which clients ask for the model."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import ModelNotFoundError, nearest
from twostroke.core.frozen import Frozen
from twostroke.serve.body.explain import MAX_NAME_LENGTH

_LATEST: Final = ":latest"  # which Ollama's clients add
_MAX_ECHO_LENGTH: Final = 200  # of a name that responses repeat


class ModelNames(Frozen):
    """The names of the model, the default first; `takes_any` makes every other one a name, too."""

    known: tuple[str, ...]
    takes_any: bool = False

    def find(self, asked: str | None) -> str:
        """Return the name for the response: as the client wrote it, if it is a name of the model.

        Upper and lower case are the same, and an owner before the name (`openai/NAME`) and the tag
        `:latest` do not count.

        Raises:
            ModelNotFoundError: the client asks for another model.
        """
        if not asked:
            return self.known[0]
        if asked in self.known:
            return asked
        is_short = len(asked) <= _MAX_ECHO_LENGTH and asked.isprintable()
        if self.takes_any or _bare(asked) in map(_bare, self.known):
            return asked if is_short else self.known[0]
        word = asked[:MAX_NAME_LENGTH]
        raise ModelNotFoundError(
            "The model '{name}' does not exist.{hint} Served: {served}.",
            field="model",
            name=word,
            hint=nearest(word, self.known),
            served=", ".join(self.known),
        )


def _bare(name: str) -> str:
    """Return a name without owner, tag and case."""
    return name.casefold().removesuffix(_LATEST).rpartition("/")[2]
