"""What a description needs to know of the server that it describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.serve.options import Limits


@dataclass(frozen=True, slots=True)
class Facts:
    """One running server.

    `names` are what clients may call the model, the first the one to use; `guessers` the words that
    `speculate` takes. With `has_keys` a request needs one.
    """

    version: str
    names: tuple[str, ...]
    context_length: int
    vocab_size: int
    embedding_width: int
    guessers: tuple[str, ...]
    has_keys: bool
    limits: Limits
