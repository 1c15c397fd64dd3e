"""Looks at the first megabytes of a file, and stops the download of one that cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelFormatError

if TYPE_CHECKING:
    from twostroke.fetch.hub.partial import PartialFile
    from twostroke.fetch.progress import Inspect

# A GGUF file's table of contents ends within some megabytes: it is looked for at these sizes.
_LOOK_BYTES: Final = tuple(1 << power for power in (16, 20, 22, 23, 24, 25, 26))


class Gate:
    """Inspects a GGUF file while it arrives, until its table of contents is there."""

    def __init__(self, inspect: Inspect) -> None:
        """Begin to look."""
        self._inspect = inspect
        self._sizes = list(_LOOK_BYTES)

    def look(self, partial: PartialFile) -> None:
        """Look again if enough has arrived since; ModelFormatError if the model cannot run."""
        if not self._sizes or partial.size < self._sizes[0]:
            return
        while self._sizes and self._sizes[0] <= partial.size:
            self._sizes.pop(0)
        self.check(partial)

    def check(self, partial: PartialFile) -> None:
        """Look now."""
        try:
            if self._inspect(partial.path, partial.name) is not None:
                self._sizes.clear()
        except ModelFormatError:
            partial.drop()
            raise
