"""Whether guesses are worth making at all."""

from __future__ import annotations

from dataclasses import dataclass

_STEP = 0.05
_RETURN = 0.002  # of the way back to the beginning


@dataclass(slots=True)
class Hope:
    """How often the first guess was right lately; `first` is what is thought beforehand."""

    first: float
    value: float

    def is_lost(self, least: float) -> bool:
        """Whether to make no guess, if guesses pay from the chance `least` on.

        Hope comes back slowly meanwhile, so that they will be made again some day.
        """
        if self.value >= least:
            return False
        self.come_back()
        return True

    def learn(self, *, right: bool) -> None:
        """Hear whether the first guess was right."""
        self.value += _STEP * (right - self.value)

    def come_back(self, share: float = _RETURN) -> None:
        """Go a share of the way back to what was thought beforehand."""
        self.value += share * (self.first - self.value)
