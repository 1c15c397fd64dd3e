"""Drafts for tests: right ones, wrong ones, and all between."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.schedule import Scheduler


def guess(
    chance: random.Random, request: Request, output: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """Return up to 8 guesses of what follows, given what the whole `output` will be.

    Often they are right, often up to some place, sometimes nowhere, and they may go on behind the
    end of the request.
    """
    right = list(output[request.num_output :])[: chance.randint(0, 8)]
    if right and chance.random() < 0.6:
        right[chance.randrange(len(right))] = chance.randrange(vocab_size)
    return (*right, *(chance.randrange(vocab_size) for _ in range(chance.choice((0, 0, 1, 3)))))


def add_guesses(
    chance: random.Random,
    plan: StepPlan,
    scheduler: Scheduler,
    outputs: Mapping[str, Sequence[int]],
    vocab_size: int,
) -> int:
    """Put drafts behind some of the plan's slices, as a speculator would; return how many."""
    budget = plan.budget
    for part in plan.slices:
        request = part.request
        if part.samples and part.start >= request.num_prompt and chance.random() < 0.7:
            drafts = guess(chance, request, outputs[request.id], vocab_size)[:budget]
            part.drafts = drafts[: scheduler.make_room(part, len(drafts))]
            budget -= len(part.drafts)
    return plan.budget - budget
