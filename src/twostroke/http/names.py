"""Which names of a model mean the same."""

from __future__ import annotations

from typing import Final

_LATEST: Final = ":latest"  # which Ollama's clients add


def bare_name(name: str) -> str:
    """Return a name without owner, tag and case."""
    return name.casefold().removesuffix(_LATEST).rpartition("/")[2]
