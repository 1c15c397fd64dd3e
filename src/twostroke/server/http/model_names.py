"""Resolves the model names that clients send to the names of served models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelNotFoundError, nearest
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SHOWN_LENGTH: Final = 100  # of an unknown name in an error
_MAX_ECHO_LENGTH: Final = 200  # of a client's name in responses
_LATEST: Final = ":latest"  # Ollama's clients add this tag


def bare_name(name: str) -> str:
    """Return a model name in lower case, without owner and tag, to compare names.

    Names with the same result mean the same model.
    """
    return name.casefold().removesuffix(_LATEST).rpartition("/")[2]


def unknown_model(name: str, served_names: Sequence[str]) -> ModelNotFoundError:
    """Return the error for a model name that the server does not know.

    The message lists `served_names`.
    """
    shown_name = name[:_MAX_SHOWN_LENGTH]
    served_text = "Served: {served}." if served_names else "No model is served."
    return ModelNotFoundError(
        "The model '{name}' does not exist.{hint} " + served_text,
        field="model",
        name=shown_name,
        hint=nearest(shown_name, served_names),
        served=", ".join(served_names),
    )


class ModelNames(Frozen):
    """The names of the models that a server serves; the first is the default model.

    With `takes_any`, an unknown name means the default model.
    """

    served_names: tuple[str, ...]
    takes_any: bool = False

    def find(self, name: str | None) -> str:
        """Check the model name of a request, and return the model name for the response.

        The response has the client's own spelling, or the served name if that spelling is long or
        not printable. For the check, case, an owner before the name (`openai/NAME`) and the tag
        `:latest` are ignored.

        Raises:
            ModelNotFoundError: no served model has this name.
        """
        served_name = self.served_name(name)
        if name and len(name) <= _MAX_ECHO_LENGTH and name.isprintable():
            return name
        return served_name

    def is_known(self, name: str) -> bool:
        """Return whether a client's model name means one of the served models."""
        return bare_name(name) in map(bare_name, self.served_names)

    def served_name(self, name: str | None) -> str:
        """Return the name under which the server knows the model that a client names.

        Raises:
            ModelNotFoundError: no served model has this name.
        """
        if not name:
            return self.served_names[0]
        if name in self.served_names:
            return name
        for served_name in self.served_names:
            if bare_name(served_name) == bare_name(name):
                return served_name
        if self.takes_any:
            return self.served_names[0]
        raise unknown_model(name, self.served_names)
