"""What has become of guesses, and how long steps took."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

_NUM_RECENT = 1024


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step: `num_tokens` came of `num_rows`, of which `num_guesses` were guesses.

    There would have been `num_plain` tokens without. `step_s` is its time without `asking_s`, that
    of looking for guesses.
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

    `proposed` and `accepted`, by where guesses came from: tokens that were computed as guesses, and
    those of them that were right. `accepted_at[i]`: how often the guess at place i was right.
    `passes`: slices with guesses; each brought one token besides the accepted ones. `saved_s`: how
    much longer the same tokens would have taken without, by what steps are known to take. `recent`
    are the last steps, whether or not anything was guessed.
    """

    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    passes: int = 0
    saved_s: float = 0.0
    recent: deque[TimedStep] = field(default_factory=partial(deque, maxlen=_NUM_RECENT))

    def add(self, source: str, right: int, tried: int) -> None:
        """Count what became of `tried` guesses behind one request."""
        if tried:
            self.passes += 1
            self.proposed[source] += tried
            self.accepted[source] += right
            self.accepted_at.update(range(right))
