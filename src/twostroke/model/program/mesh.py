"""How ranks share a Program: pipeline stages, parts of rows, and parts of columns."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.model.program.attention import Attention, SharedKvAttention
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.experts import ExpertTerms
from twostroke.model.program.kv_layout import FLOAT16, KV_SPLIT_TOKENS
from twostroke.model.program.sharding import Sharding, cuts
from twostroke.model.program.work import StepCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.distributed_options import ParallelOptions
    from twostroke.model.program.operation import Operation
    from twostroke.model.program.ops import Op
    from twostroke.model.program.program import Program

_MAX_STORAGE_RATIO = 1.05  # stored keys and values, relative to storing each once


class MeshCoordinate(Frozen):
    """The position of a rank in the mesh: its pipeline stage, row part and column part."""

    stage: int
    row_part: int
    column_part: int


class Mesh(Frozen):
    """The grid of ranks that divide a model: pipeline stages, each of row and column parts.

    Row parts divide the rows of a step equally (context parallel); column parts divide each
    operation's columns and experts (tensor and expert parallel). `stages` and `column_parts` are
    shares of the work: a rank with 3 of 5 computes three fifths of the layers, or of each
    operation's columns and experts. `attention_parts` are the shares of attention, if they differ.
    Rank 0 is in the last stage, where tokens are sampled. Ranks of a stage divide keys and values
    by heads or, if `kv_by_tokens`, by tokens: then each rank stores all heads of every n-th KV
    split (see `SplitKvAttention`).
    """

    stages: tuple[int, ...] = (1,)
    row_parts: int = 1
    column_parts: tuple[int, ...] = (1,)
    kv_by_tokens: bool = False
    attention_parts: tuple[int, ...] = ()

    def shares_of(self, op: Operation) -> tuple[int, ...]:
        """Return the shares of an operation that the column parts of each stage compute."""
        is_attention = isinstance(op, Attention)
        return self.attention_parts if self.attention_parts and is_attention else self.column_parts

    @property
    def ranks_per_stage(self) -> int:
        """Return the number of ranks of a pipeline stage, which have the same layers."""
        return self.row_parts * len(self.column_parts)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the mesh."""
        return len(self.stages) * self.ranks_per_stage

    @property
    def num_kv_ranks(self) -> int:
        """Return the number of ranks that take turns in storing a request's KV splits."""
        return self.ranks_per_stage if self.kv_by_tokens else 1

    def page_size(self, requested_size: int) -> int:
        """Return how many tokens a KV page has: `requested_size`, unless ranks divide tokens.

        Then a page has one KV split (`KV_SPLIT_TOKENS` tokens) for each rank.
        """
        return KV_SPLIT_TOKENS * self.num_kv_ranks if self.num_kv_ranks > 1 else requested_size

    def coordinate(self, rank: int) -> MeshCoordinate:
        """Return a rank's coordinate in the mesh."""
        stages_before_last, index_in_stage = divmod(rank, self.ranks_per_stage)
        row_part, column_part = divmod(index_in_stage, len(self.column_parts))
        return MeshCoordinate(len(self.stages) - 1 - stages_before_last, row_part, column_part)

    def rank(self, coordinate: MeshCoordinate) -> int:
        """Return the rank at a coordinate of the mesh."""
        stages_before_last = len(self.stages) - 1 - coordinate.stage
        index_in_stage = coordinate.row_part * len(self.column_parts) + coordinate.column_part
        return stages_before_last * self.ranks_per_stage + index_in_stage


ONE_RANK = Mesh()


def stores_twice(mesh: Mesh, program: Program) -> bool:
    """Return whether dividing keys and values by heads would store many heads on several ranks.

    Ranks with different query heads of one key-value head each need a copy of that head. True if
    the copies take more than 5% of additional memory. `mesh_for` then divides by tokens instead.
    """
    attention_ops = [op for op in program.ops if isinstance(op, Attention) and op.stores]
    parts = [
        op.part(*columns)
        for op in attention_ops
        for columns in pairwise(cuts(op.length, mesh.column_parts, op.grain))
    ]
    num_stored_heads = mesh.row_parts * sum(part.num_kv_heads for part in parts)
    return num_stored_heads > _MAX_STORAGE_RATIO * sum(op.num_kv_heads for op in attention_ops)


def mesh_of(parallel: ParallelOptions, program: Program) -> Mesh:
    """Return the mesh of ranks for a model, from the options such as `--tensor-parallel`.

    Raises:
        UsageError: the Program cannot be divided into that many parts.
    """
    steps = [step for op in program.ops for step in op.steps]
    num_layers = len(stage_ends(program, program.ops))
    num_experts = max([op.length for op in steps if isinstance(op, ExpertTerms)], default=0)
    divided = [op for op in steps if op.sharding is Sharding.BY_COLUMN_PARTS]
    max_tensor_parts = max([-(-op.length // op.grain) for op in divided], default=1)
    if parallel.pipeline > num_layers:
        limit_reason = "the model's layers"
        if num_layers < len(program.layer_outputs):
            limit_reason = "since layers that share keys and values stay on one stage"
        reason = f"must be at most {num_layers}, {limit_reason}, got {parallel.pipeline}."
        raise UsageError(reason, field="pipeline")
    if parallel.expert > 1 and not num_experts:
        raise UsageError("needs a model with experts, which this is not.", field="expert")
    if parallel.expert > max(1, num_experts):
        reason = f"must be at most {num_experts}, the model's experts, got {parallel.expert}."
        raise UsageError(reason, field="expert")
    if parallel.tensor * parallel.expert > max_tensor_parts:
        limit = max_tensor_parts // parallel.expert
        reason = f"must be at most {limit} for this model, got {parallel.tensor}."
        raise UsageError(reason, field="tensor")
    return Mesh(
        parallel.stage_shares,
        parallel.context,
        parallel.column_shares,
        kv_by_tokens=parallel.kv_shares == "places",
        attention_parts=parallel.attention_shares,
    )


_CONTEXT_TOKENS = 1024  # stages are balanced for the decode step at this context length
# Rank 0's other work for each token, as floating-point operations of a core: 0.3 ms to plan the
# step, sample the token and send its text.
_RANK_0_FLOPS = 20_000_000


def cut_into_stages(
    program: Program, ops: Sequence[Op], shares: tuple[int, ...]
) -> list[Sequence[Op]]:
    """Divide operations into pipeline stages of about the requested shares of the work.

    `ops` are the operations of `program`, perhaps replaced by their `Operation.steps`; `program`
    tells where its layers end. Returns the consecutive operations of
    each stage, which has at least one layer. With `shares` (1, 2) the second stage gets two thirds
    of the work. Work is counted in FLOPs for one decoded token. The last stage's work includes the
    logits, and rank 0's work besides the model, such as sampling. Each cut is as near to its share
    as layers allow.
    """
    ends = stage_ends(program, ops)
    work_before = [0, *accumulate(_decode_flops(op) for op in ops)]
    stage_cuts = [0]
    for stage, share in enumerate(accumulate(shares[:-1]), start=1):
        first = 0 if stage == 1 else ends.index(stage_cuts[-1]) + 1
        possible_ends = ends[first : len(ends) - len(shares) + stage]
        target_work = (work_before[-1] + _RANK_0_FLOPS) * share / sum(shares)
        stage_cuts.append(min(possible_ends, key=lambda end: abs(work_before[end] - target_work)))
    return [
        ops[start:end] for start, end in zip(stage_cuts, [*stage_cuts[1:], len(ops)], strict=True)
    ]


def stage_ends(program: Program, ops: Sequence[Op]) -> list[int]:
    """Return the positions in `ops` at which a pipeline stage can end, in ascending order.

    At position i, the stage ends before `ops[i]`. These are the ends of layers, the last layer's
    included, without cuts between layers that share keys and values. The final norm and the logits
    come after the last position, and belong to the last stage.
    """
    op_index_by_layer = {layer: index for index, op in enumerate(ops) for layer in op.stores}
    shared_spans = [
        (op_index_by_layer[op.layer], i)
        for i, op in enumerate(ops)
        if isinstance(op, SharedKvAttention)
    ]
    ends = [index + 1 for index, op in enumerate(ops) if op.output in program.layer_outputs]
    return [end for end in ends if not any(first < end <= last for first, last in shared_spans)]


def _decode_flops(op: Op) -> int:
    """Return the FLOPs of an operation for one decoded token, to balance pipeline stages."""
    no_weight_bytes = dict.fromkeys([weight.name for weight in op.weights], 0)
    return (
        StepCost(tuple(op.work(no_weight_bytes, FLOAT16)))
        .of(BatchShape.decode((_CONTEXT_TOKENS,)))
        .flops
    )
