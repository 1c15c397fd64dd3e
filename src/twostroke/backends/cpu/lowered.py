"""A Program as the native executor runs it: a list of records, and the tables they refer to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from twostroke.backends.cpu.buffers import Buffer, RowMemory
    from twostroke.backends.cpu.layout import RankChannel, SharedLayout
    from twostroke.backends.cpu.records import ExpertRecord, OpRecord
    from twostroke.model.program import Op, ops
    from twostroke.model.quant import QuantTensor


class Vector(Frozen):
    """A weight such as a norm or bias, as a row of float32 numbers to which `offset` is added.

    A `name` of None stands for `width` zeros. `is_transposed`: the weight is a matrix whose columns
    are stored one after another.
    """

    name: str | None
    offset: float = 0.0
    width: int = 0
    is_transposed: bool = False

    @classmethod
    def of(cls, norm: ops.RMSNorm) -> Vector:
        """Return the weight of an RMSNorm as a vector."""
        if norm.weight is None:
            return cls(None, 1.0, norm.width // norm.num_groups)
        return cls(norm.weight, norm.offset)

    def values(self, tensors: Mapping[str, QuantTensor]) -> NDArray[np.float32]:
        """Return the vector's values in float32, dequantized from the model's tensors."""
        numbers = np.zeros(self.width) if self.name is None else tensors[self.name].dequantize()
        values = (numbers.T if self.is_transposed else numbers).reshape(-1)
        return values.astype(np.float32) + np.float32(self.offset)


class CpuLowered(Frozen):
    """A Program lowered for the native executor: records, and the tables to which they refer.

    `records` refer to weights, vectors, ropes, experts, buffers, teams, cuts and channels by their
    index in the tuples below. `parts[i]` are the Program's operations that record i computes; each
    operation is in exactly one part. An entry of `teams` is (the team's ranks, this rank's index
    among them). This rank computes part `rows[0]` of the `rows[1]` parts of a step's rows.
    """

    records: tuple[OpRecord, ...]
    parts: tuple[tuple[Op, ...], ...]
    matrices: tuple[str, ...]
    vectors: tuple[Vector, ...]
    ropes: tuple[ops.Rope, ...]
    experts: tuple[ExpertRecord, ...]
    memories: tuple[RowMemory, ...]
    buffers: tuple[Buffer, ...]
    teams: tuple[tuple[tuple[int, ...], int], ...]
    cuts: tuple[int, ...]
    channels: tuple[RankChannel, ...]
    rank: int = 0
    rows: tuple[int, int] = (0, 1)
    layout: SharedLayout | None = None
