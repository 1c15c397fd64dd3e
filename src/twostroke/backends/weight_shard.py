"""`WeightShard`: a rank among those that run a Program together, and its part of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.core.frozen import Frozen
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh
    from twostroke.model.program.shard import RankProgram
    from twostroke.model.quant import QuantTensor


def block_sizes(tensors: Mapping[str, QuantTensor]) -> dict[str, int]:
    """Return how many values a block has of each tensor whose columns are in inputs' order."""
    return {name: one.format.block_size for name, one in tensors.items() if one.order is None}


class WeightShard(Frozen, eq=False):
    """One rank's share of a Program, and its end of the link to the others.

    No step has more than `max_rows` rows. With `block_sizes` sums are split (see `shard`).
    """

    rank: int
    mesh: Mesh
    max_rows: int
    link: Any  # a `LinkRecord` for the cpu backend, a `TorchLink` for torch
    block_sizes: Mapping[str, int] | None = None

    def parts(self, program: Program, kept: Collection[str] = ()) -> tuple[RankProgram, ...]:
        """Return the part of each rank; the values that are `kept` are whole on rank 0."""
        return shard(program, self.mesh, kept, self.block_sizes)

    def tensors(
        self, part: RankProgram, tensors: Mapping[str, QuantTensor]
    ) -> dict[str, QuantTensor]:
        """Return what this rank reads of each weight; nothing is copied."""
        found = {name: tensors[name].part(*rows) for name, rows in part.weight_rows.items()}
        cut = part.weight_columns.items()
        return found | {name: found[name].columns(*columns) for name, columns in cut}
