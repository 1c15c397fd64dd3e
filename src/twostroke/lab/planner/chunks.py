"""The chunks in which a prompt is read that is longer than a step's budget of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.roofline import PlannedOpTime, PlannedStepTime

if TYPE_CHECKING:
    from collections.abc import Sequence

_COUNTED: Final = 6  # of a prompt's chunks; times of those between are linear


class PrefillChunk(Frozen):
    """`rows` of a prompt after `start` tokens; it stands for `times` chunks like it."""

    start: int
    rows: int
    times: float
    is_last: bool


def chunks(start: int, end: int, most: int | None) -> list[PrefillChunk]:
    """Return the chunks of at most `most` tokens from `start` to `end`; None is for a single one.

    Of many, a few stand for all: those that interpolation between them gives.
    """
    most = most or end - start
    num_whole = num_chunks(end - start, most) - 1
    places = np.unique(np.linspace(0, max(0, num_whole - 1), _COUNTED).round().astype(int))
    between = (np.diff(places) - 1) / 2
    times = 1 + np.concatenate(([0], between)) + np.concatenate((between, [0]))
    found = [
        PrefillChunk(start + place * most, most, one, is_last=False)
        for place, one in zip(places.tolist(), times.tolist(), strict=True)
        if num_whole
    ]
    last = start + num_whole * most
    return [*found, PrefillChunk(last, end - last, 1.0, is_last=True)]


def num_chunks(num_tokens: int, most: int | None) -> int:
    """Return how many chunks of at most `most` tokens these are."""
    return 1 if most is None else -(-num_tokens // most)


def together(steps: Sequence[tuple[PlannedStepTime, float]]) -> PlannedStepTime:
    """Return the sum of steps, each so many times; an operation's bound is that of the longest."""
    if len(steps) == 1:
        return steps[0][0]
    ops: dict[str, PlannedOpTime] = {}
    longest: dict[str, float] = {}
    moving_s = rest_s = 0.0
    for step, times in steps:
        moving_s, rest_s = moving_s + times * step.moving_s, rest_s + times * step.rest_s
        for label, op in step.ops.items():
            old, seconds = ops.get(label, PlannedOpTime(0.0, 0, 0, op.bound)), times * op.seconds
            is_longest = seconds > longest.get(label, 0.0)
            longest[label] = max(seconds, longest.get(label, 0.0))
            ops[label] = PlannedOpTime(
                old.seconds + seconds,
                old.flops + times * op.flops,
                old.bytes + times * op.bytes,
                op.bound if is_longest else old.bound,
            )
    first = max(steps, key=lambda one: one[0].seconds * one[1])[0]
    return replace(first, ops=ops, moving_s=moving_s, rest_s=rest_s)
