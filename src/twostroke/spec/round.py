"""What the guesses of a step bring, while they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.spec.proposal import Price


@dataclass(slots=True)
class Round:
    """Guesses for a step that brings `num_tokens` without any, made one behind the other.

    `taken_s` is about how long it took to make those up to now; prompts are not in it.
    """

    num_tokens: int
    price: Price
    taken_s: float

    def least_next(
        self, num_guesses: int, num_expected: float, num_active: int, step_s: float
    ) -> float:
        """Return the chance from which on another guess pays, and take it that it will be made.

        There are `num_guesses`, of which `num_expected` will be right. `num_active` requests get
        another one each, and making them takes `step_s`.
        """
        num_tokens = self.num_tokens + num_expected
        rate = self.price.rate_with(num_guesses, num_tokens, self.taken_s)
        self.taken_s += step_s
        return self.price.least_next(num_guesses, rate, step_s / max(1, num_active))
