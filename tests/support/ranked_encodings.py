"""The vocabularies of ranked byte strings that tiktoken reads, with their official encodings."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import tiktoken

from support.ranked_tokenizer import tekken_ranks
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable


class Encoding(Frozen):
    """A vocabulary, its encoder, and the number of control tokens before its ids."""

    ranks: dict[bytes, int]
    official: Any
    num_special: int
    source: str

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ranks of a text's tokens."""
        ranks: list[int] = self.official.encode_ordinary(text)
        return ranks


def _tekken() -> Encoding:
    """Mistral Nemo's vocabulary, from its authors' package."""
    name = "tekken_240718.json"
    description = json.loads((files("mistral_common") / "data" / name).read_bytes())
    ranks, num_special = tekken_ranks(description)
    official = tiktoken.Encoding(
        name, pat_str=description["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    return Encoding(ranks, official, num_special, f"mistral-common, {name}")


def _o200k() -> Encoding:
    """The vocabulary that Phi-4-mini took over; tiktoken fetches it (3.6 MB) and caches it."""
    official = tiktoken.get_encoding("o200k_base")
    tokens = official.token_byte_values()
    ranks = {token: official.encode_single_token(token) for token in tokens}
    return Encoding(ranks, official, 0, "tiktoken, o200k_base")


# By the names that GGUF files have for their pre-tokenizers.
ENCODINGS: dict[str, Callable[[], Encoding]] = {"tekken": _tekken, "gpt-4o": _o200k}
