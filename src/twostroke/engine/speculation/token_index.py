"""Finds where the last words of a text were said before, in this text or in earlier answers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request

SHORTEST = 3  # tokens that must be the same for two places to match at all
_LONGEST = 32  # a match is not followed further back
_MOST_PLACES = 8  # the latest places that are compared
_FACTORS = (0x9E3779B1, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)  # odd, so that no bit is lost
_MASK = 2**64 - 1
_GENERATION = 1 << 16  # tokens
_MOST_TENANTS = 64
_MOST_TOKENS = 1 << 19  # of all tenants together: some 120 MB at most
END_OF_ANSWER = 2**31 - 1  # separates answers; no vocabulary has this token


class Match(Frozen):
    """Places where the longest known end of a context was found.

    `ends[i]` is the index of the token that followed, the latest first. The `length` tokens before
    it are the same; 32 means 32 or more.
    """

    length: int
    ends: tuple[int, ...]


class TokenIndex:
    """Finds the longest end of a context in a list of tokens that only grows.

    NumPy sorts the initial tokens once (some 30 ms for 100,000), and what is appended goes into a
    dictionary, so lookups do not get slower as the list grows. Memory: 12 bytes a token of the
    first kind, some 190 of the second.
    """

    __slots__ = ("_ends", "_keys", "_later", "_num_known", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        """Index a list; after appending to it, call `catch_up`."""
        self.tokens = tokens
        array = np.array(tokens, np.uint64)
        size = max(0, len(array) - SHORTEST)  # nothing follows the last one yet
        keys = np.zeros(size, np.uint64)
        for i, factor in enumerate(_FACTORS):
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
        """Index what was appended to the list."""
        tokens = self.tokens
        for end in range(self._num_known, len(tokens)):
            self._later.setdefault(_key_at(tokens, end), []).append(end)
        self._num_known = max(self._num_known, len(tokens))

    def match(self, context: Sequence[int]) -> Match | None:
        """Return where the longest end of `context`, of 3 tokens or more, was found."""
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
        if longest < SHORTEST:  # equal keys of different tokens
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


class AnswerMemory:
    """The last answers of each tenant, in two generations of 65,536 tokens.

    Each salt of the prefix cache has a memory: tenants never see each other's words. The
    tenant that was silent longest is forgotten when there are more than 64 of them, or more than
    half a million tokens.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, list[TokenIndex]] = OrderedDict()

    def add(self, request: Request) -> None:
        """Keep the answer of a request that has ended."""
        if request.num_output <= 1:
            return
        answer = request.tokens[max(0, request.num_prompt - SHORTEST) :]
        generations = self._tenants.setdefault(request.salt, [TokenIndex([])])
        self._tenants.move_to_end(request.salt)
        newest = generations[-1]
        newest.tokens += [END_OF_ANSWER, *answer[-_GENERATION:]]
        newest.catch_up()
        if len(newest) >= _GENERATION:
            generations[:] = [TokenIndex(newest.tokens), TokenIndex([])]
        while len(self._tenants) > _MOST_TENANTS or self._num_tokens() > _MOST_TOKENS:
            self._tenants.popitem(last=False)

    def of(self, request: Request) -> Iterator[TokenIndex]:
        """Yield what the request's tenant has said, the latest first."""
        return reversed(self._tenants.get(request.salt, []))

    def _num_tokens(self) -> int:
        return sum(len(index) for indices in self._tenants.values() for index in indices)


def _key_at(tokens: Sequence[int], end: int) -> int:
    """Return the hash of the 3 tokens before `end`."""
    first, second, third = tokens[end - 3], tokens[end - 2], tokens[end - 1]
    return (first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]) & _MASK
