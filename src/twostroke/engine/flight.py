"""A step in flight, and what becomes of those after one that failed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.engine.faults import FATAL

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from twostroke.backends import StartRunner
    from twostroke.core.step import StepPlan
    from twostroke.engine.speculation import StepDrafts

_logger = logging.getLogger("twostroke.engine")


@dataclass(slots=True)
class StepInFlight:
    """A step in flight, and the error with which it could not be started."""

    plan: StepPlan
    guesses: StepDrafts
    error: Exception | None = None


def drop_later(steps: deque[StepInFlight], runner: StartRunner, recall: Callable[[], None]) -> None:
    """Take back all steps but the oldest: they fail with it, or follow rows that failed."""
    while len(steps) > 1:
        step = steps.pop()
        if step.error is None:
            try:
                runner.finish()
            except FATAL:
                raise
            except Exception:  # computed again
                _logger.debug("A step failed after another one.", exc_info=True)
        recall()
