"""Draft tokens for tests: right ones, wrong ones, and mixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.draft_tree import ROOT

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.engine.scheduler import Scheduler


def random_draft(
    rng: random.Random, request: Request, output: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """Return up to 8 draft tokens for a request, of which the whole `output` is known.

    Often they are right, often up to some position, sometimes nowhere, and they may continue after
    the end of the request.
    """
    right = list(output[request.num_output :])[: rng.randint(0, 8)]
    if right and rng.random() < 0.6:
        right[rng.randrange(len(right))] = rng.randrange(vocab_size)
    return (*right, *(rng.randrange(vocab_size) for _ in range(rng.choice((0, 0, 1, 3)))))


def random_draft_tree(
    rng: random.Random, request: Request, output: Sequence[int], vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return several drafts as one tree: tokens, and the index of each token's parent.

    Drafts that begin alike share their beginnings, and often one continues where another is wrong.
    """
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(2, 5)):
        at = ROOT
        for token in random_draft(rng, request, output, vocab_size):
            matching_drafts = (i for i, p in enumerate(parents) if p == at and tokens[i] == token)
            result = next(matching_drafts, None)
            if result is None:
                result = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = result
    return tuple(tokens), tuple(parents)


def add_random_drafts(
    rng: random.Random,
    plan: StepPlan,
    scheduler: Scheduler,
    outputs: Mapping[str, Sequence[int]],
    vocab_size: int,
) -> int:
    """Add drafts to some of a plan's slices, as a speculator would; return how many."""
    budget = plan.budget
    for part in plan.slices:
        request = part.request
        if part.samples and part.start >= request.num_prompt and rng.random() < 0.7:
            output = outputs[request.id]
            parents: tuple[int, ...] = ()
            if part.count == 1 and rng.random() < 0.6:
                drafts, parents = random_draft_tree(rng, request, output, vocab_size)
            else:
                drafts = random_draft(rng, request, output, vocab_size)
            scheduler.add_drafts(part, drafts[:budget], parents[:budget])
            budget -= len(part.drafts)
    return plan.budget - budget
