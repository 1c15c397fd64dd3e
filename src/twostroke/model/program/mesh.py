"""How ranks share a Program: stages of layers, parts of rows, parts of columns."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.model.program.attention import Attention, SharedKvAttention
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.experts import ExpertTerms
from twostroke.model.program.kv_layout import FLOAT16, PIECE_TOKENS
from twostroke.model.program.sharding import Sharding, cuts
from twostroke.model.program.work import StepCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.options import ParallelOptions
    from twostroke.model.program.operation import Operation
    from twostroke.model.program.ops import Op
    from twostroke.model.program.program import Program

_LITTLE = 1.05  # times what all ranks together must store


class MeshCoordinate(Frozen):
    """Where a rank is in a mesh."""

    stage: int
    row_part: int
    column_part: int


class Mesh(Frozen):
    """A grid of ranks: one stage after another, in each of them row parts times column parts.

    `stages` and `column_parts` are shares: a rank with 3 of 5 computes three fifths of the layers,
    or of each operation's columns and experts. `attention_parts` are those of attention (queries,
    keys and values), if they differ. Row parts are equal. Rank 0 is in the last stage, where tokens
    are drawn. Ranks of a stage divide keys and values by heads, or `by_places`: each has every
    head's, of some tokens (see `AttentionPieces`).
    """

    stages: tuple[int, ...] = (1,)
    row_parts: int = 1
    column_parts: tuple[int, ...] = (1,)
    by_places: bool = False
    attention_parts: tuple[int, ...] = ()

    def shares_of(self, op: Operation) -> tuple[int, ...]:
        """Return the shares by which the ranks of a team divide an operation."""
        is_attention = isinstance(op, Attention)
        return self.attention_parts if self.attention_parts and is_attention else self.column_parts

    @property
    def ranks_per_stage(self) -> int:
        """How many ranks have the same layers."""
        return self.row_parts * len(self.column_parts)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.stages) * self.ranks_per_stage

    @property
    def num_places(self) -> int:
        """How many ranks take turns in storing a request's pieces."""
        return self.ranks_per_stage if self.by_places else 1

    def page_size(self, asked: int) -> int:
        """Return the tokens in a page: a piece for each rank that has some, else those asked."""
        return PIECE_TOKENS * self.num_places if self.num_places > 1 else asked

    def place(self, rank: int) -> MeshCoordinate:
        """Return where a rank is."""
        later, within = divmod(rank, self.ranks_per_stage)
        row_part, column_part = divmod(within, len(self.column_parts))
        return MeshCoordinate(len(self.stages) - 1 - later, row_part, column_part)

    def rank(self, place: MeshCoordinate) -> int:
        """Return the rank at a place."""
        later = len(self.stages) - 1 - place.stage
        within = place.row_part * len(self.column_parts) + place.column_part
        return later * self.ranks_per_stage + within


ONE_RANK = Mesh()


def stores_twice(mesh: Mesh, program: Program) -> bool:
    """Whether over a twentieth of the keys and values is on several ranks if heads divide them."""
    attention = [op for op in program.ops if isinstance(op, Attention) and op.stores]
    parts = [
        op.part(*columns)
        for op in attention
        for columns in pairwise(cuts(op.length, mesh.column_parts, op.grain))
    ]
    stored = mesh.row_parts * sum(part.num_kv_heads for part in parts)
    return stored > _LITTLE * sum(op.num_kv_heads for op in attention)


def mesh_of(parallel: ParallelOptions, program: Program) -> Mesh:
    """Return the mesh that the options ask for.

    Raises:
        UsageError: the Program cannot be divided into so many parts.
    """
    steps = [step for op in program.ops for step in op.steps]
    num_layers = len(stage_ends(program, program.ops))
    num_experts = max([op.length for op in steps if isinstance(op, ExpertTerms)], default=0)
    divided = [op for op in steps if op.sharding is Sharding.BY_COLUMN_PARTS]
    most = max([-(-op.length // op.grain) for op in divided], default=1)
    if parallel.pipeline > num_layers:
        what = "the model's layers"
        if num_layers < len(program.layer_outputs):
            what = "since layers stay with those that borrow their keys and values"
        reason = f"must be at most {num_layers}, {what}, got {parallel.pipeline}."
        raise UsageError(reason, field="pipeline")
    if parallel.expert > 1 and not num_experts:
        raise UsageError("needs a model with experts, which this is not.", field="expert")
    if parallel.expert > max(1, num_experts):
        reason = f"must be at most {num_experts}, the model's experts, got {parallel.expert}."
        raise UsageError(reason, field="expert")
    if parallel.tensor * parallel.expert > most:
        reason = f"must be at most {most // parallel.expert} for this model, got {parallel.tensor}."
        raise UsageError(reason, field="tensor")
    return Mesh(
        parallel.stage_shares,
        parallel.context,
        parallel.column_shares,
        by_places=parallel.kv_shares == "places",
        attention_parts=parallel.attention_shares,
    )


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
