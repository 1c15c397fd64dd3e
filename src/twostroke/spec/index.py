"""Where in a growing sequence of tokens the same words have stood before."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SHORTEST = 3  # tokens that must be the same for two places to match at all
_LONGEST = 32  # a match is not followed further back
_MOST_PLACES = 8  # the latest places that are compared
_FIRST, _SECOND, _THIRD = 0x9E3779B1, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5  # odd: none is lost
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Match:
    """Places where the longest found end of a context stood before.

    `ends[i]` is the index of what followed there, the latest first; `length` tokens before it are
    the same (32 stands for more).
    """

    length: int
    ends: tuple[int, ...]


class TokenIndex:
    """Finds the longest end of a context in a list of tokens that only grows.

    What is there at first is sorted once by NumPy (100,000 tokens take some 30 ms), and what is
    appended goes into a dictionary, so a lookup does not get slower as the list gets longer.
    Memory: 12 bytes a token of the first kind, some 190 of the second.
    """

    __slots__ = ("_ends", "_keys", "_later", "_num_known", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        """Index a list, which may be appended to afterwards: `catch_up` hears of it."""
        self.tokens = tokens
        array = np.array(tokens, np.uint64)
        size = max(0, len(array) - SHORTEST)  # the last has nothing behind it yet
        keys = np.zeros(size, np.uint64)
        for i, factor in enumerate((_FIRST, _SECOND, _THIRD)):
            keys += array[i : i + size] * np.uint64(factor)
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order].data  # `bisect` in it is quicker than NumPy's search
        ends: NDArray[np.int32] = (order + SHORTEST).astype(np.int32)
        self._ends = ends  # ascending where keys are equal
        self._later: dict[int, list[int]] = {}
        self._num_known = max(SHORTEST, len(array))  # ends below are in the index

    def __len__(self) -> int:
        return len(self.tokens)

    def catch_up(self) -> None:
        """Take in what was appended to the list."""
        tokens = self.tokens
        for end in range(self._num_known, len(tokens)):
            self._later.setdefault(_key_at(tokens, end), []).append(end)
        self._num_known = max(self._num_known, len(tokens))

    def match(self, context: Sequence[int]) -> Match | None:
        """Return where the longest end of `context` stands; None if none of 3 tokens does."""
        if len(context) < SHORTEST:
            return None
        key = _key_at(context, len(context))
        ends = self._later.get(key, ())[: -_MOST_PLACES - 1 : -1]
        first = bisect_left(self._keys, key)
        if first < len(self._keys) and self._keys[first] == key and len(ends) < _MOST_PLACES:
            last = bisect_right(self._keys, key, first)
            first = max(first, last - _MOST_PLACES + len(ends))
            ends = [*ends, *self._ends[first:last][::-1].tolist()]
        if not ends:
            return None
        back = list(context[: -_LONGEST - 1 : -1])
        lengths = [self._num_same(end, back) for end in ends]
        longest = max(lengths)
        if longest < SHORTEST:  # two keys alike, and not the tokens
            return None
        pairs = zip(ends, lengths, strict=True)
        return Match(longest, tuple(end for end, length in pairs if length == longest))

    def _num_same(self, end: int, back: list[int]) -> int:
        """Return how many tokens before `end` are those of a context, given from its end."""
        tokens, count = self.tokens, 0
        for token in back[:end]:
            if tokens[end - 1 - count] != token:
                break
            count += 1
        return count


def _key_at(tokens: Sequence[int], end: int) -> int:
    """Return what stands for the 3 tokens before `end`, which there must be."""
    first, second, third = tokens[end - 3], tokens[end - 2], tokens[end - 1]
    return (first * _FIRST + second * _SECOND + third * _THIRD) & _MASK
