"""What rendering a chat template may use: steps, processor time, and size of what it builds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from twostroke.core.errors import RequestError

# A value counts its characters in this many for one step: about what copying costs.
_CHARS_A_STEP = 256


@dataclass(frozen=True, slots=True)
class RenderBudget:
    """The limits of one rendering.

    `max_chars` bounds every string or structure that a template builds, and the prompt. A step is
    about one small operation of the template; `max_cpu_s` is time of the rendering thread alone,
    so a busy machine does not fail a good template.
    """

    max_chars: int = 4_000_000
    max_steps: int = 2_000_000
    max_cpu_s: float = 1.0


class BudgetError(RequestError):
    """A chat template wanted more than its budget."""


class Meter:
    """Counts what one rendering has used and raises BudgetError when it is too much."""

    def __init__(self, budget: RenderBudget) -> None:
        self._budget = budget
        self._steps = 0
        self._written = 0
        self._deadline_s = time.thread_time() + budget.max_cpu_s
        # Weights of structures by identity; the structure is kept so that its id stays its own.
        self._weights: dict[int, tuple[object, int]] = {}
        self._kept = 0

    def charge(self, num_steps: int = 1) -> None:
        """Count work about to be done."""
        self._steps += num_steps
        if self._steps > self._budget.max_steps:
            raise self._over(f"{self._budget.max_steps:,} steps", "max_steps")
        if time.thread_time() > self._deadline_s:
            raise self._over(f"{self._budget.max_cpu_s:g} s of processor time", "max_cpu_s")

    def charge_for(self, value: object) -> None:
        """Count work in proportion to the size of `value`."""
        self.charge(1 + self.weigh(value) // _CHARS_A_STEP)

    def write(self, num_chars: int) -> None:
        """Count text written by the template; blocks kept in variables count when written too."""
        self._written += num_chars
        if self._written > 4 * self._budget.max_chars:
            raise self._too_big()

    def fit(self, num_chars: int) -> None:
        """Refuse a value of `num_chars` before it is built."""
        if num_chars > self._budget.max_chars:
            raise self._too_big()

    def weigh(self, value: object) -> int:
        """Return the characters that `value` would print as, about; refuse what is too much.

        Structures that share their parts count them each time, as printing or comparing would.
        """
        if isinstance(value, str):
            weight = len(value)
            self.fit(weight)
            return weight
        if isinstance(value, range):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return 1
        known = self._weights.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        weight = 2
        parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        for part in parts:
            weight += 2 + self.weigh(part)
            self.fit(weight)
        self._remember(value, weight)
        return weight

    def _remember(self, value: object, weight: int) -> None:
        self._kept += weight
        if self._kept > self._budget.max_chars:
            self._weights.clear()
            self._kept = weight
        self._weights[id(value)] = (value, weight)

    def _too_big(self) -> BudgetError:
        return self._over(f"{self._budget.max_chars:,} characters", "max_chars")

    def _over(self, limit: str, knob: str) -> BudgetError:
        return BudgetError(
            f"Rendering the chat template needs more than {limit} (RenderBudget.{knob})."
        )
