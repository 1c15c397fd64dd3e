"""Whether a proposer's guesses have been worth their time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_START = 1.0
_MOST = 2.0  # steps that may be saved up: the rest is soon found out when texts change
_LEAST = -1.0
_MOST_LOST = 0.5  # of one round: a prompt that is read once is to pay over many
_FIRST_REST = 64  # rounds
_LAST_REST = 1024
_UNSEEN: Final = 0.005  # of a step: what takes less time is not counted


@dataclass(slots=True)
class Balance:
    """An account of the steps that guesses have saved, less those that they have cost.

    Odds and predicted times are estimates, and they may be wrong together: this is what became of
    them. Where more was lost than is in the account, nobody is asked for a while, and for twice as
    long each time that this happens again at once.
    """

    saved: float = _START
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def may_ask(self) -> bool:
        """Whether to ask in this round."""
        if self._rest:
            self._rest -= 1
        return not self._rest

    def add(self, won: float, spent: float) -> None:
        """Hear what a round's guesses brought and what they took, both in steps without any."""
        change = won - (spent if spent > _UNSEEN else 0.0)
        self.saved += max(-_MOST_LOST, change)
        if self.saved >= _MOST:
            self.saved, self._next_rest = _MOST, _FIRST_REST
        elif self.saved < _LEAST:
            self.saved, self._rest = 0.0, self._next_rest
            self._next_rest = min(2 * self._next_rest, _LAST_REST)
