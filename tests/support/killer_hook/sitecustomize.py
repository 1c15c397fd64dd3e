"""Ends an engine process when it computes a prompt with a certain token, as a bug might."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twostroke.core.step import StepPlan

_NUM_TOKENS_BEFORE = 3


def _let_tokens_kill(token: int, late_token: int) -> None:
    from twostroke.engine.loop import EngineLoop

    start = EngineLoop._start

    def start_or_die(loop: Any, plan: StepPlan) -> None:
        start(loop, plan)  # it says what it computes from now on
        for part in plan.slices:
            request = part.request
            is_late = request.num_output >= _NUM_TOKENS_BEFORE
            if token in request.prompt or (late_token in request.prompt and is_late):
                os._exit(7)

    setattr(EngineLoop, "_start", start_or_die)  # noqa: B010


if "twostroke.engine.process.main" in sys.orig_argv and "KILLER_TOKEN" in os.environ:
    _let_tokens_kill(int(os.environ["KILLER_TOKEN"]), int(os.environ["LATE_KILLER_TOKEN"]))
