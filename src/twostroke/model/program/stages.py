"""Where a Program is cut into stages, so that each takes its share of the time."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from twostroke.model.program.attention import SharedKvAttention
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.kv_format import FLOAT16
from twostroke.model.program.work import StepCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.program.ops import Op
    from twostroke.model.program.program import Program

_CONTEXT = 1024  # tokens before the one whose work is balanced
# What rank 0 does besides for each token, as floating-point operations of a core: 0.3 ms to plan
# the step, draw the token and send its text.
_OWN_WORK = 20_000_000


def cut_into_stages(
    program: Program, ops: Sequence[Op], shares: tuple[int, ...]
) -> list[Sequence[Op]]:
    """Cut operations after layers: at least one layer for each stage, and else near its share.

    Shares are those of the work for one generated token, the logits and rank 0's own work included,
    which is done beside the last stage.
    """
    ends = stage_ends(program, ops)
    done = [0, *accumulate(_work(op) for op in ops)]
    places = [0]
    for stage, share in enumerate(accumulate(shares[:-1]), start=1):
        first = 0 if stage == 1 else ends.index(places[-1]) + 1
        choices = ends[first : len(ends) - len(shares) + stage]
        goal = (done[-1] + _OWN_WORK) * share / sum(shares)
        places.append(min(choices, key=lambda end: abs(done[end] - goal)))
    return [ops[start:end] for start, end in zip(places, [*places[1:], len(ops)], strict=True)]


def stage_ends(program: Program, ops: Sequence[Op]) -> list[int]:
    """Return after how many operations stages can end, the last one too.

    A stage has layers together with those that borrow their keys and values.
    """
    stored = {layer: place for place, op in enumerate(ops) for layer in op.stores}
    lent = [(stored[op.layer], i) for i, op in enumerate(ops) if isinstance(op, SharedKvAttention)]
    ends = [place + 1 for place, op in enumerate(ops) if op.output in program.layer_outputs]
    return [end for end in ends if not any(first < end <= last for first, last in lent)]


def _work(op: Op) -> int:
    """Return the floating-point operations for one generated token of a usual context."""
    nothing = dict.fromkeys([weight.name for weight in op.weights], 0)
    return StepCost(tuple(op.work(nothing, FLOAT16))).of(BatchShape.decode((_CONTEXT,))).flops
