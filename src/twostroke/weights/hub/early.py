"""Refusing a model that cannot run here by its first bytes, before gigabytes have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import ModelFormatError
from twostroke.models import ARCHITECTURES
from twostroke.quant import FORMATS
from twostroke.weights.gguf import peek_gguf
from twostroke.weights.hf_model import hf_fields, hf_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.weights.hub.partial import PartialFile

# A GGUF file's table of contents ends within some megabytes: it is looked for at these sizes.
_LOOK_BYTES: Final = tuple(1 << power for power in (16, 20, 22, 23, 24, 25, 26))


def check_config(config: Mapping[str, Any], repo: str) -> None:
    """Raise ModelFormatError for a config.json of a model that cannot run."""
    hf_spec(hf_fields(f"{repo}/config.json", config), repo)


class Gate:
    """Looks into a GGUF file while it arrives, until its table of contents is there."""

    def __init__(self) -> None:
        """Begin to look."""
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
            if self._is_known(partial):
                self._sizes.clear()
        except ModelFormatError:
            partial.drop()
            raise

    def _is_known(self, partial: PartialFile) -> bool:
        peek = peek_gguf(partial.path)
        if peek is None:
            return False
        if peek.architecture not in ARCHITECTURES:
            raise ModelFormatError(
                f"{partial.name!r} is of the family {peek.architecture[:40]!r}, which this version "
                f"cannot run yet; supported: {', '.join(sorted(ARCHITECTURES))}. The download was "
                "stopped."
            )
        if peek.unsupported:
            raise ModelFormatError(
                f"{partial.name!r} has numbers of type {', '.join(peek.unsupported)}, which this "
                f"version cannot read; supported: {', '.join(FORMATS)}. The download was stopped: "
                "name another quantization."
            )
        return True
