"""Counts of guesses and of the time that they saved."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

_NUM_RECENT = 1024


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of `num_rows`, `num_guesses` of them guesses, which brought `num_tokens`.

    Without guesses it would have brought `num_plain` tokens. Its time is `step_s`, after `asking_s`
    that proposers took.
    """

    num_rows: int
    num_guesses: int
    num_plain: int
    num_tokens: int
    step_s: float
    asking_s: float


@dataclass(slots=True)
class SpeculationStats:
    """Counts since the start.

    Attributes:
        proposed: guesses that were computed, by their source.
        accepted: those of them that were right.
        accepted_at: how often the guess at each place was right.
        passes: slices with guesses; each brought one token besides the accepted ones.
        saved_s: how much longer the same tokens would have taken without, by `StepTime`.
        recent: the last steps, with or without guesses.
    """

    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    passes: int = 0
    saved_s: float = 0.0
    recent: deque[TimedStep] = field(default_factory=partial(deque, maxlen=_NUM_RECENT))

    def add(self, source: str, right: int, tried: int) -> None:
        """Count `tried` guesses of one request, `right` of them right."""
        if tried:
            self.passes += 1
            self.proposed[source] += tried
            self.accepted[source] += right
            self.accepted_at.update(range(right))
