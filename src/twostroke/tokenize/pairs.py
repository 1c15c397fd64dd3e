"""Which two neighbouring tokens may become one, and how soon: listed merges, or scored texts."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

import numpy as np

from twostroke.core.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.tokenize.texts import Texts
    from twostroke.tokenize.vocabulary import Vocabulary

# The rank of two neighbours that stay apart; every other rank is lower.
NEVER = 1 << 62
_MAX_REMEMBERED = 50_000
_MAX_LENGTH = 0xFFFF


class Pairs(Protocol):
    """The rank of a pair by `pairs[left << 32 | right]`: lower is sooner, `NEVER` is not at all."""

    def __getitem__(self, pair: int) -> int:
        """Return the rank of a pair of token ids, the first 32 bits further left."""

    def made(self, rank: int) -> int:
        """Return the id of the token that a merge of this rank makes."""


class ListedPairs(dict[int, int]):
    """The merges of a file, in its order.

    They lie in sorted arrays, 16 bytes each; what was asked for is remembered, up to a bound.
    """

    def __init__(self, merges: Sequence[Texts], vocabulary: Vocabulary) -> None:
        """`merges` are left texts, right texts, and what each two are together.

        Raises ModelFormatError for a merge whose parts or result are not tokens.
        """
        super().__init__()
        sides = [vocabulary.find_all(texts) for texts in merges]
        lost = np.flatnonzero(np.minimum.reduce(sides) < 0)
        if lost.size:
            raise ModelFormatError(
                f"The tokenizer's merges do not fit its tokens: number {lost[0] + 1} "
                "needs one that is missing."
            )
        keys = sides[0] << 32 | sides[1]
        # Of several merges of one pair the last counts.
        order = np.argsort(keys, kind="stable").astype(np.uint32)
        self._keys = array("q", keys[order].tobytes())
        self._ranks = array("I", order.tobytes())
        self._made = array("I", sides[2].astype(np.uint32).tobytes())

    def __missing__(self, pair: int) -> int:
        place = bisect_left(self._keys, pair)
        rank = NEVER
        while place < len(self._keys) and self._keys[place] == pair:
            rank = self._ranks[place]
            place += 1
        return _remembered(self, pair, rank)

    def made(self, rank: int) -> int:
        """Return the id of the token that a merge of this rank makes."""
        return self._made[rank]


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
        by_score = np.argsort(-np.asarray(scores, np.float64), kind="stable").astype(np.uint32)
        places = np.empty_like(by_score)
        places[by_score] = np.arange(len(by_score), dtype=np.uint32)
        self._by_score = array("I", by_score.tobytes())
        self._places = array("I", places.tobytes())

    def __missing__(self, pair: int) -> int:
        left = self._vocabulary.spelling(pair >> 32)
        both = self._vocabulary.find(left + self._vocabulary.spelling(pair & 0xFFFFFFFF))
        if both is None or len(left) > _MAX_LENGTH:
            return _remembered(self, pair, NEVER)
        return _remembered(self, pair, self._places[both] << 16 | (_MAX_LENGTH - len(left)))

    def made(self, rank: int) -> int:
        """Return the id of the token that a merge of this rank makes."""
        return self._by_score[rank >> 16]


def _remembered(pairs: dict[int, int], pair: int, rank: int) -> int:
    if len(pairs) >= _MAX_REMEMBERED:
        pairs.clear()
    pairs[pair] = rank
    return rank
