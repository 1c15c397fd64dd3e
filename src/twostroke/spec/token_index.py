"""Finds where the last words of a text were said before, in this text or in earlier answers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.core.request import Request

SHORTEST = 3  # tokens that must be the same for two places to match at all
_LONGEST = 32  # a match is not followed further back
_MOST_PLACES = 8  # the latest places that are compared
_GENERATION = 1 << 16  # tokens
_MOST_TENANTS = 64
_MOST_TOKENS = 1 << 19  # of all tenants together: some 100 MB at most
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

    Places with the same three tokens are linked from the latest to the earliest, so a lookup takes
    as long in a long list as in a short one. Memory: some 200 bytes a token.
    """

    __slots__ = ("_earlier", "_latest", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        """Index a list; after appending to it, call `catch_up`."""
        self.tokens = tokens
        self._latest: dict[tuple[int, ...], int] = {}  # where three tokens were said last
        self._earlier: list[int] = []  # for each place, the one before with the same tokens
        self.catch_up()

    def __len__(self) -> int:
        return len(self.tokens)

    def catch_up(self) -> None:
        """Index what was appended to the list; nothing follows the last three tokens yet."""
        tokens, latest = self.tokens, self._latest
        for place in range(len(self._earlier), len(tokens) - SHORTEST):
            said = tuple(tokens[place : place + SHORTEST])
            self._earlier.append(latest.get(said, -1))
            latest[said] = place

    def match(self, context: Sequence[int]) -> Match | None:
        """Return where the longest end of `context`, of 3 tokens or more, was found."""
        place = self._latest.get(tuple(context[-SHORTEST:]), -1)
        back = context[: -_LONGEST - 1 : -1]
        longest, ends = 0, list[int]()
        for _ in range(_MOST_PLACES):
            if place < 0:
                break
            end = place + SHORTEST
            length = self._num_same(end, back)
            if length > longest:
                longest, ends = length, []
            if length == longest:
                ends.append(end)
            place = self._earlier[place]
        return Match(longest, tuple(ends)) if ends else None

    def _num_same(self, end: int, back: Sequence[int]) -> int:
        """Return how many tokens before `end` are those of a context, given from its end."""
        tokens, count = self.tokens, 0
        for token in back[:end]:
            if tokens[end - 1 - count] != token:
                break
            count += 1
        return count


class AnswerMemory:
    """The last answers of each tenant, in two generations of 65,536 tokens.

    Each salt of the prefix cache has a memory: tenants never see each other's words. The tenant
    that was silent longest is forgotten when there are more than 64 of them, or more than half a
    million tokens.
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
            generations[:] = [newest, TokenIndex([])]
        while len(self._tenants) > _MOST_TENANTS or self._num_tokens() > _MOST_TOKENS:
            self._tenants.popitem(last=False)

    def of(self, request: Request) -> Iterator[TokenIndex]:
        """Yield what the request's tenant has said, the latest first."""
        return reversed(self._tenants.get(request.salt, []))

    def _num_tokens(self) -> int:
        return sum(len(index) for indices in self._tenants.values() for index in indices)
