"""What a proposer offers: tokens that may follow, and how sure it is of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses of a request's next tokens, one behind the other; at least one.

    `odds[i]` is the chance that `tokens[i]` is right if those before it are. `source` tells where
    they come from, and `kinds[i]` what the odds of each were read from: the proposer hears of
    their fate by these.
    """

    source: str
    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Price:
    """What guesses cost in the step that is being planned.

    `row_chance` is the chance of being right from which on a guess is worth its row, and `rate` how
    many tokens a second there are without guesses. Of one request at most `most` are taken.
    """

    row_chance: float
    rate: float
    most: int

    def least_chance(self, seconds: float) -> float:
        """Return the chance from which on a guess pays that takes `seconds` to be made."""
        return self.row_chance + self.rate * seconds


class Proposer(Protocol):
    """Guesses what follows."""

    name: str

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""

    def learn(self, request: Request, proposal: Proposal, num_right: int, num_tried: int) -> None:
        """Hear how many of the first `num_tried` tokens of a proposal were right."""

    def finish(self, request: Request) -> None:
        """Hear that a request has ended: drop what is kept for it, or keep what it teaches."""

    def close(self) -> None:
        """Give back memory and threads."""
