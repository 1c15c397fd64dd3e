"""Which sums ranks may split: those of products whose input they hold divided (`--reduce sum`)."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from twostroke.model.program.ops import Attention, Linear, SharedKvAttention
from twostroke.model.program.sharding import Sharding

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from twostroke.model.program.ops import Op


def split_sums(ops: Collection[Op], block_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the outputs of products whose sums are split, and the grain of their inputs' cuts.

    Such a product is the second of a pair: ranks compute its input by columns. They cut between
    whole blocks of its weight, which have `block_sizes` values; the sums of others are not split.
    Nor are those after attention whose keys and values others read: these are all cut alike.
    """
    lent = {op.layer for op in ops if isinstance(op, SharedKvAttention)}
    grains: dict[str, int] = {}  # of values that ranks hold by columns
    split: dict[str, int] = {}
    for op in ops:
        found = [grains[name] for name in op.inputs if name in grains]
        if isinstance(op, Linear) and found and op.weight in block_sizes:
            split[op.output] = lcm(*found, block_sizes[op.weight])
        elif isinstance(op, Linear) or (isinstance(op, Attention) and op.layer not in lent):
            grains[op.output] = op.grain
        elif op.sharding is Sharding.AS_INPUTS and found and op.grain < op.width:
            grains[op.output] = lcm(op.grain, *found)
    return split
