"""What requests of one tenant have said, for guessing what its next ones will say."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from twostroke.spec.index import SHORTEST, TokenIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.core.request import Request

_GENERATION = 1 << 16  # tokens
_MOST_TENANTS = 64
_MOST_TOKENS = 1 << 19  # of all tenants together: some 120 MB at most
_BREAK = 2**31 - 1  # stands between two answers; no vocabulary has such a token


class Memory:
    """The last answers of each tenant, two generations of 65,536 tokens: the older one is dropped.

    Tenants, told apart by the salt of their prefix cache, never see each other's words. The one
    that has been silent for longest is forgotten when there are more than 64, or half a million
    tokens of all together.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._tenants: OrderedDict[bytes, list[TokenIndex]] = OrderedDict()

    def add(self, request: Request) -> None:
        """Keep the answer of a request that has ended."""
        output = request.tokens[max(0, request.num_prompt - SHORTEST) :]
        if request.num_output <= 1:
            return
        generations = self._tenants.setdefault(request.salt, [TokenIndex([])])
        self._tenants.move_to_end(request.salt)
        newest = generations[-1]
        newest.tokens += [_BREAK, *output[-_GENERATION:]]
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


def until_break(tokens: list[int]) -> list[int]:
    """Return tokens up to the end of the answer that they begin in."""
    return tokens[: tokens.index(_BREAK)] if _BREAK in tokens else tokens
