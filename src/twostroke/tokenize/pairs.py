"""Which two neighbouring tokens may become one, and how soon: listed merges, or scored texts."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

import numpy as np

from twostroke.tokenize.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The rank of two neighbours that stay apart; every other rank is lower.
NEVER = 1 << 80
MADE_MASK = 0xFFFFFFFF  # the bits of a rank that are the id of the token made
_MAX_REMEMBERED = 50_000
_MAX_LENGTH = 0xFFFF


class Pairs(Protocol):
    """The rank of a pair of token ids by `pairs[left << 32 | right]`: lower is sooner.

    Its last 32 bits are the id of the token that the two make; `NEVER` if they stay apart.
    """

    def __getitem__(self, pair: int) -> int: ...


class ListedPairs(dict[int, int]):
    """The merges of a file, in its order; those that were asked for are kept, up to a bound.

    A merge that leads to no token of the vocabulary does not count.
    """

    def __init__(self, merges: Iterable[str], vocabulary: Vocabulary) -> None:
        """`merges` are lines of two texts and a space between; of equal ones the last counts."""
        super().__init__()
        self._merges = Vocabulary(merges)
        self._vocabulary = vocabulary

    def __missing__(self, pair: int) -> int:
        left, right = _sides(pair, self._vocabulary)
        place = self._merges.find(left + b" " + right)
        made = None if place is None else self._vocabulary.find(left + right)
        rank = NEVER if place is None or made is None else place << 32 | made
        return _remembered(self, pair, rank)


class ScoredPairs(dict[int, int]):
    """SentencePiece's rule: neighbours may merge when their text joined is a token.

    The token of the best score comes first; of several ways to make one token, that with the
    longest left part, as where the pairs of a vocabulary are listed by Hugging Face's converters
    (`generate_merges` of transformers' tokenization_utils_base.py).
    """

    def __init__(self, scores: Sequence[float], vocabulary: Vocabulary) -> None:
        """`scores` are by id, one for each token."""
        super().__init__()
        self._vocabulary = vocabulary
        by_score = np.argsort(-np.asarray(scores, np.float64), kind="stable")
        places = np.empty(len(by_score), np.uint32)
        places[by_score] = np.arange(len(by_score), dtype=np.uint32)
        self._places = array("I", places.tobytes())

    def __missing__(self, pair: int) -> int:
        left, right = _sides(pair, self._vocabulary)
        made = self._vocabulary.find(left + right)
        if made is None or len(left) > _MAX_LENGTH:
            return _remembered(self, pair, NEVER)
        place = self._places[made] << 16 | (_MAX_LENGTH - len(left))
        return _remembered(self, pair, place << 32 | made)


def _sides(pair: int, vocabulary: Vocabulary) -> tuple[bytes, bytes]:
    return vocabulary.spelling(pair >> 32), vocabulary.spelling(pair & 0xFFFFFFFF)


def _remembered(pairs: dict[int, int], pair: int, rank: int) -> int:
    if len(pairs) >= _MAX_REMEMBERED:
        pairs.clear()
    pairs[pair] = rank
    return rank
