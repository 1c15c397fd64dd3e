"""An index of n-grams: finds earlier occurrences of the last tokens of a text."""

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

MIN_MATCH_TOKENS = 3  # the length of an n-gram
_MAX_MATCH_TOKENS = 32  # longer matches count as this long
_MAX_OCCURRENCES = 8  # the latest occurrences, which are compared
_HASH_FACTORS = (0x9E3779B1, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)  # odd, so that no bit is lost
_MASK_64 = 2**64 - 1
_GENERATION_TOKENS = 1 << 16
_MAX_TENANTS = 64
_MAX_TOKENS = 1 << 19  # of all tenants together: at most some 120 MB
END_OF_ANSWER = 2**31 - 1  # separates answers; no vocabulary has this token


class Match(Frozen):
    """Where the longest suffix of a request's tokens occurs in an indexed text.

    Attributes:
        length: the length of the suffix; 32 means 32 or more.
        ends: the index of the token after each occurrence, the latest first.
    """

    length: int
    ends: tuple[int, ...]


class TokenIndex:
    """Finds where a text's last tokens occur in a list of tokens that only grows.

    NumPy sorts the initial tokens once (some 30 ms for 100,000), and appended tokens go into a
    dictionary, so that lookups do not get slower as the list grows. An initial token takes 12 bytes
    of memory, an appended one some 190.
    """

    __slots__ = ("_ends", "_keys", "_later", "_num_indexed", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        """Index a list of tokens; after appending to the list, call `catch_up`."""
        self.tokens = tokens
        array = np.array(tokens, np.uint64)
        size = max(0, len(array) - MIN_MATCH_TOKENS)  # no token follows the last n-gram yet
        keys = np.zeros(size, np.uint64)
        for i, factor in enumerate(_HASH_FACTORS):
            keys += array[i : i + size] * np.uint64(factor)
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order].data  # a memoryview, since `bisect` is faster than NumPy's search
        ends: NDArray[np.int32] = (order + MIN_MATCH_TOKENS).astype(np.int32)
        self._ends = ends  # ascending where keys are equal
        self._later: dict[int, list[int]] = {}
        self._num_indexed = max(MIN_MATCH_TOKENS, len(array))  # smaller ends are in the index

    def __len__(self) -> int:
        return len(self.tokens)

    def catch_up(self) -> None:
        """Index the tokens that were appended to the list since the last call."""
        tokens = self.tokens
        for end in range(self._num_indexed, len(tokens)):
            self._later.setdefault(_key_at(tokens, end), []).append(end)
        self._num_indexed = max(self._num_indexed, len(tokens))

    def match(self, context: Sequence[int]) -> Match | None:
        """Return where the longest suffix of `context` occurs; None below 3 equal tokens."""
        if len(context) < MIN_MATCH_TOKENS:
            return None
        key = _key_at(context, len(context))
        ends = self._later.get(key, ())[: -_MAX_OCCURRENCES - 1 : -1]
        first = bisect_left(self._keys, key)
        if first < len(self._keys) and self._keys[first] == key and len(ends) < _MAX_OCCURRENCES:
            last = bisect_right(self._keys, key, first)
            first = max(first, last - _MAX_OCCURRENCES + len(ends))
            ends = [*ends, *self._ends[first:last][::-1].tolist()]
        if not ends:
            return None
        reversed_context = list(context[: -_MAX_MATCH_TOKENS - 1 : -1])
        lengths = [self._num_equal(end, reversed_context) for end in ends]
        longest = max(lengths)
        if longest < MIN_MATCH_TOKENS:  # different tokens had equal keys
            return None
        pairs = zip(ends, lengths, strict=True)
        return Match(longest, tuple(end for end, length in pairs if length == longest))

    def _num_equal(self, end: int, reversed_context: list[int]) -> int:
        """Return how many indexed tokens before `end` equal the last tokens of a context."""
        tokens, count = self.tokens, 0
        for token in reversed_context[:end]:
            if tokens[end - 1 - count] != token:
                break
            count += 1
        return count


class AnswerMemory:
    """Stores each tenant's last answers as token ids, in which n-gram drafts are looked up.

    Each salt of the prefix cache has its own answers, so tenants never see each other's tokens. A
    tenant has two generations of 65,536 tokens: when the newer is full, it replaces the older. The
    tenant whose last answer is oldest is forgotten if there are more than 64 tenants, or more than
    half a million tokens.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, list[TokenIndex]] = OrderedDict()

    def add(self, request: Request) -> None:
        """Store the answer of an ended request for its tenant."""
        if request.num_output <= 1:
            return
        answer = request.tokens[max(0, request.num_prompt - MIN_MATCH_TOKENS) :]
        generations = self._tenants.setdefault(request.salt, [TokenIndex([])])
        self._tenants.move_to_end(request.salt)
        newest = generations[-1]
        newest.tokens += [END_OF_ANSWER, *answer[-_GENERATION_TOKENS:]]
        newest.catch_up()
        if len(newest) >= _GENERATION_TOKENS:
            generations[:] = [TokenIndex(newest.tokens), TokenIndex([])]
        while len(self._tenants) > _MAX_TENANTS or self._num_tokens() > _MAX_TOKENS:
            self._tenants.popitem(last=False)

    def of(self, request: Request) -> Iterator[TokenIndex]:
        """Yield the indexes of the stored answers of a request's tenant, the latest first."""
        return reversed(self._tenants.get(request.salt, []))

    def _num_tokens(self) -> int:
        return sum(len(index) for indices in self._tenants.values() for index in indices)


def _key_at(tokens: Sequence[int], end: int) -> int:
    """Return the hash of the three tokens before `end`; occurrences are indexed under it."""
    first, second, third = tokens[end - 3], tokens[end - 2], tokens[end - 1]
    return (
        first * _HASH_FACTORS[0] + second * _HASH_FACTORS[1] + third * _HASH_FACTORS[2]
    ) & _MASK_64
