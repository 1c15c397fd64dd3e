"""Chunked prefill: a prompt longer than a step's token budget is computed in several steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.roofline import PlannedOpTime, PlannedStepTime

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SAMPLED_CHUNKS: Final = 6  # chunks whose time is computed; the time between them is linear


class PrefillChunk(Frozen):
    """A chunk of a prompt that one step prefills: `rows` tokens after the first `start` tokens.

    In a sum over all chunks of the prompt, it is counted `times` times.
    """

    start: int
    rows: int
    times: float
    is_last: bool


def chunks(start: int, end: int, max_tokens: int | None) -> list[PrefillChunk]:
    """Divide a prompt's tokens from `start` to `end` into chunks of at most `max_tokens`.

    If `max_tokens` is None, there is a single chunk. If there are many chunks, only a few of them
    are returned: weighted by their `times`, they approximate the sum over all chunks.
    """
    max_tokens = max_tokens or end - start
    num_full = num_chunks(end - start, max_tokens) - 1
    indices = np.linspace(0, max(0, num_full - 1), _MAX_SAMPLED_CHUNKS).round().astype(int)
    indices = np.unique(indices)
    half_gaps = (np.diff(indices) - 1) / 2
    weights = 1 + np.concatenate(([0], half_gaps)) + np.concatenate((half_gaps, [0]))
    full_chunks = [
        PrefillChunk(start + index * max_tokens, max_tokens, weight, is_last=False)
        for index, weight in zip(indices.tolist(), weights.tolist(), strict=True)
        if num_full
    ]
    last_start = start + num_full * max_tokens
    return [*full_chunks, PrefillChunk(last_start, end - last_start, 1.0, is_last=True)]


def num_chunks(num_tokens: int, max_tokens: int | None) -> int:
    """Return the number of chunks in which `num_tokens` prompt tokens are prefilled.

    A chunk has at most `max_tokens`; without a limit (None) there is one chunk.
    """
    return 1 if max_tokens is None else -(-num_tokens // max_tokens)


def sum_of_steps(steps: Sequence[tuple[PlannedStepTime, float]]) -> PlannedStepTime:
    """Return the sum of planned step times, such as the steps that prefill one prompt.

    Each step time comes with its number of occurrences, by which it is multiplied. An operation's
    bound (arithmetic or memory) is its bound in the step where it takes longest.
    """
    if len(steps) == 1:
        return steps[0][0]
    ops: dict[str, PlannedOpTime] = {}
    longest_s: dict[str, float] = {}
    moving_s = rest_s = 0.0
    for step, times in steps:
        moving_s += times * step.moving_s
        rest_s += times * step.rest_s
        for label, op in step.ops.items():
            sums = ops.get(label, PlannedOpTime(0.0, 0, 0, op.bound))
            seconds = times * op.seconds
            is_longest = seconds > longest_s.get(label, 0.0)
            longest_s[label] = max(seconds, longest_s.get(label, 0.0))
            ops[label] = PlannedOpTime(
                sums.seconds + seconds,
                sums.flops + times * op.flops,
                bytes=sums.bytes + times * op.bytes,
                bound=op.bound if is_longest else sums.bound,
            )
    longest_step = max(steps, key=lambda item: item[0].seconds * item[1])[0]
    return replace(longest_step, ops=ops, moving_s=moving_s, rest_s=rest_s)
