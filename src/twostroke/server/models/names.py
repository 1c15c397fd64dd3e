"""The names by which clients ask for models."""

from __future__ import annotations

from typing import Final

from twostroke.core.frozen import Frozen
from twostroke.server.http.names import bare_name, unknown_model

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
