"""Divides a Program into one Program for each rank, which together compute the same values.

Every operation says which part of it a rank can compute (`sharding`), and which columns of its
inputs that part reads. Where ranks hold a value differently from how an operation reads it, a
collective is inserted. Every sum is computed on one rank, unless `--reduce sum` allows `split_sums`
to divide some.
"""

from __future__ import annotations

from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.model.program.collectives import AllGather, AllReduce, Receive, Send, TakeColumns
from twostroke.model.program.kv_layout import CacheGroup
from twostroke.model.program.mesh import cut_into_stages
from twostroke.model.program.ops import (
    Attention,
    Embed,
    GatedDeltaRule,
    Linear,
    Mamba2,
    SharedKvAttention,
)
from twostroke.model.program.sharding import (
    ColumnParts,
    HeldValue,
    RowParts,
    Sharding,
    cuts,
    cuts_from_ranges,
)
from twostroke.model.program.split_kv import SplitKvAttention, split_heads

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twostroke.model.program.mesh import Mesh
    from twostroke.model.program.ops import Op
    from twostroke.model.program.program import Program
    from twostroke.model.program.sharding import Range, Ranges


class RankProgram(Frozen):
    """The part of a model that one rank runs: its own Program, and the weights that it reads.

    `weight_rows` gives the rows (of a vector: the values) of each weight that the rank reads.
    `weight_columns` gives the columns, for weights that the rank does not read completely. Values
    that have all their columns on the rank have the same names as in the undivided Program.

    The rank computes part `row_part` of the `num_row_parts` parts of a step's rows (see
    `RowParts`): every operation writes these rows of its output, and other rows are undefined.
    There are three exceptions: `Embed` writes the rows whose tokens it has, `Logits` writes a row
    for each sampled row, and `AllGather` writes the rows that it gathers.
    """

    program: Program
    weight_rows: Mapping[str, Range]
    weight_columns: Mapping[str, Range]
    row_part: int
    num_row_parts: int


def shard(
    program: Program,
    mesh: Mesh,
    kept_values: Collection[str] = (),
    block_sizes: Mapping[str, int] | None = None,
) -> tuple[RankProgram, ...]:
    """Divide a Program over the ranks of a mesh; return each rank's part, by rank.

    Rank 0 gets all columns of the last value (the logits) and of the `kept_values`. `block_sizes`
    is the quantization block size of each weight; if it is given, ranks split some sums, which
    needs fewer exchanges and changes rounding: see `split_sums`.
    """
    is_divided = len(mesh.column_parts) > 1
    ops: list[Op] = []
    for op in program.ops:
        ops += cast("tuple[Op, ...]", op.steps) if is_divided else [op]
    split_outputs = split_sums(ops, block_sizes) if block_sizes and is_divided else {}
    read_ranges = _find_read_ranges(ops, mesh, split_outputs)
    stages = cut_into_stages(program, ops, mesh.stages)
    ranks: list[RankProgram] = []
    sent: list[HeldValue] = []
    for number, stage_ops in enumerate(stages):
        read_later = {
            name for later_ops in stages[number + 1 :] for op in later_ops for name in op.inputs
        }
        stage = _Stage(mesh, number, read_ranges, split_outputs)
        stage.receive(sent)
        for op in stage_ops:
            stage.add(op)
        if number + 1 < len(stages):
            sent = stage.send(read_later.union(kept_values))
        else:
            stage.finish(program.ops[-1].output, kept_values)
        ranks = stage.programs(program) + ranks  # the last stage has the first ranks
    return tuple(ranks)


def _find_read_ranges(
    ops: Sequence[Op], mesh: Mesh, split_outputs: Mapping[str, int]
) -> dict[str, Ranges]:
    """Return, for each value, the column range that each rank of a stage will read of it.

    Values that a rank reads completely are left out. `split_outputs` is the result of `split_sums`.
    """
    read_ranges: dict[str, Ranges] = {}
    for op in reversed(ops):
        if isinstance(op, Linear) and op.output in split_outputs:
            input_cuts = cuts(op.in_width, mesh.column_parts, split_outputs[op.output])
            read_ranges.setdefault(op.x, tuple(pairwise(input_cuts)))
            continue
        if isinstance(op, Attention) and mesh.kv_by_tokens:
            read_ranges = {**split_heads(op, mesh.column_parts), **read_ranges}
            continue
        ranges = read_ranges.get(op.output)
        if op.sharding is Sharding.BY_COLUMN_PARTS and ranges is None:
            ranges = _part_ranges(op, mesh.shares_of(op))
        if ranges is None or op.sharding is Sharding.REPLICATED or not _can_be_cut(op, ranges):
            continue
        for field in op.reads:
            input_ranges = [op.part_reads(field, *columns) for columns in ranges]
            divided_ranges = tuple([columns for columns in input_ranges if columns is not None])
            if len(divided_ranges) == len(input_ranges):
                read_ranges.setdefault(getattr(op, field), divided_ranges)
    return read_ranges


def _part_ranges(op: Op, shares: tuple[int, ...]) -> Ranges | None:
    """Return each rank's range of an operation's units; None if ranks do not divide it."""
    if len(shares) == 1 or op.length <= op.grain:
        return None
    return tuple(pairwise(cuts(op.length, shares, op.grain)))


def _can_be_cut(op: Op, ranges: Ranges) -> bool:
    """Return whether all ranges begin and end at multiples of the operation's `grain`.

    Otherwise ranks cannot compute these ranges, for example if a cut is inside a head.
    """
    ends = [end for columns in ranges for end in columns]  # both bounds, as parts may overlap
    return all(end == op.length or end % op.grain == 0 for end in ends)


class _Stage:
    """Builds the Programs of the ranks of one pipeline stage, operation by operation.

    `_held_values` tells how the ranks hold each value after the operations added so far. Rank
    `index` of the stage has row part `index // num_column_parts` and column part `index %
    num_column_parts`.
    """

    def __init__(
        self,
        mesh: Mesh,
        number: int,
        read_ranges: Mapping[str, Ranges],
        split_outputs: Collection[str],
    ) -> None:
        self._mesh = mesh
        self._read_ranges = read_ranges
        self._split_outputs = split_outputs
        self._num_column_parts = len(mesh.column_parts)
        self._num_row_parts = mesh.row_parts
        self._size = mesh.ranks_per_stage
        self._first_rank = (len(mesh.stages) - 1 - number) * self._size
        self._held_values: dict[str, list[HeldValue]] = {}
        self._ops: list[dict[str, Op]] = [{} for _ in range(self._size)]  # by output
        self._weight_rows: list[dict[str, Range]] = [{} for _ in range(self._size)]
        self._weight_columns: list[dict[str, Range]] = [{} for _ in range(self._size)]

    def add(self, op: Op) -> None:
        """Add an operation to each rank of the stage, after the collectives that it needs."""
        if isinstance(op, Linear) and op.output in self._split_outputs:
            x = self._divided(op.x)
            if x is not None and x.ranges == self._read_ranges[op.x]:
                self._add_sum(op, x)
                return
        if isinstance(op, Attention) and self._mesh.num_kv_ranks > 1:
            self._add_split_kv_attention(op)
            return
        ranges = self._ranges(op)
        inputs = {field: self._held_input(op, field, ranges) for field in op.reads}
        all_rows = self._num_row_parts == 1 or op.sharding is Sharding.BY_STAGE
        if ranges is None and isinstance(op, Embed):  # an undivided table: a rank writes its rows
            all_rows = self._num_row_parts == 1
        value = HeldValue(op.output, op.width, ranges, all_rows=all_rows)
        if ranges is not None:
            op_of_rank_0 = replace(op, **{field: x.name_at(0) for field, x in inputs.items()})
            value = replace(value, parts=op_of_rank_0.parts_by(cuts_from_ranges(ranges)))
        for index in range(self._size):
            own_range = None if ranges is None else value.range_at(index)
            if value.name_at(index) is None:
                continue
            part = op if own_range is None else op.part(*own_range)
            names = {field: x.name_at(index) for field, x in inputs.items()}
            self._emit(index, replace(part, output=value.name_at(index), **names))
            undivided_weights = {weight.name: weight for weight in op.weights}
            for weight in part.weights:
                rows = undivided_weights[weight.name].rows(own_range)
                assert self._weight_rows[index].setdefault(weight.name, rows) == rows
        self._held_values[op.output] = [value]

    def _add_sum(self, op: Linear, x: HeldValue) -> None:
        """Add a matrix product whose sum the ranks split: each computes a term, then all-reduces.

        A rank's term is the product with the columns of `x` that it holds.
        """
        value = HeldValue(op.output, op.width, all_rows=self._num_row_parts == 1)
        for index in range(self._size):
            own_input = x.name_at(index)
            columns = x.range_at(index)
            term = None
            if own_input is not None:
                term = f"{value.name_at(index)}.term"
                part = replace(op.term(*columns), output=term, x=own_input)
                self._emit(index, part)
                self._weight_rows[index] |= {weight.name: (0, op.width) for weight in part.weights}
                self._weight_columns[index][op.weight] = columns
            team, team_index = self._team(index, self._num_column_parts)
            self._emit(
                index, AllReduce(str(value.name_at(index)), term, op.width, team, team_index)
            )
        self._held_values[op.output] = [value]

    def _add_split_kv_attention(self, op: Attention) -> None:
        """Add an attention for which the ranks of the stage divide keys and values by tokens."""
        for name in op.inputs:  # consecutive gathers can wait together
            self._undivided(name)
        inputs = [self._undivided(name, all_rows=True) for name in op.inputs]
        head_cuts = cuts(op.num_heads, self._mesh.column_parts)
        ranges = tuple(pairwise([cut * op.head_dim for cut in head_cuts]))
        value = HeldValue(op.output, op.width, all_rows=self._num_row_parts == 1)
        if self._num_column_parts > 1:
            value = replace(value, ranges=ranges, parts=ColumnParts(cuts_from_ranges(ranges)))
        for index in range(self._size):
            team, team_index = self._team(index, self._size)
            output = value.name_at(index) or f"{op.output}.none"
            part = SplitKvAttention.of(op, team, team_index, head_cuts)
            names = {field: x.name_at(index) for field, x in zip(op.reads, inputs, strict=True)}
            self._emit(index, replace(part, output=output, **names))
            self._weight_rows[index] |= {weight.name: weight.rows(None) for weight in part.weights}
        self._held_values[op.output] = [value]

    def finish(self, last: str, kept_values: Collection[str]) -> None:
        """End the last stage: gather the last value (the logits) and the kept values on rank 0."""
        (value,) = self._held_values[last]
        if value.ranges is None:
            kept_values = (last, *kept_values)
        else:
            self._gather_columns(value, root=0)
        for name in kept_values:
            self._undivided(name, all_rows=True)

    def send(self, names: Collection[str]) -> list[HeldValue]:
        """Send values to the ranks of the next pipeline stage with the same row and column part.

        Returns how the ranks hold the values, for the next stage's `receive`.
        """
        sent = []
        for name in [name for name in self._held_values if name in names]:
            value = self._divided(name) or self._undivided(name)
            sent.append(value)
            for index, x in self._names(value):
                receiver = self._first_rank - self._size + index
                self._emit(index, Send(f"{x}.sent", x, value.width_at(index), receiver))
        return sent

    def receive(self, values: Sequence[HeldValue]) -> None:
        """Add the operations that receive the previous pipeline stage's values.

        `values` is the result of that stage's `send`.
        """
        for value in values:
            own_value = replace(value, all_rows=self._num_row_parts == 1)
            for index, output in self._names(own_value):
                sender = self._first_rank + self._size + index
                self._emit(index, Receive(output, own_value.width_at(index), sender))
            self._held_values[value.name] = [own_value]

    def programs(self, program: Program) -> list[RankProgram]:
        """Return the finished Program of each rank of the stage."""
        return [
            RankProgram(
                program=_part_of(program, ops.values()),
                weight_rows=self._weight_rows[index],
                weight_columns=self._weight_columns[index],
                row_part=index // self._num_column_parts,
                num_row_parts=self._num_row_parts,
            )
            for index, ops in enumerate(self._ops)
        ]

    def _emit(self, index: int, op: Op) -> None:
        """Add an operation to one rank's Program, unless a value of this name exists there."""
        self._ops[index].setdefault(op.output, op)

    def _ranges(self, op: Op) -> Ranges | None:
        """Return the range of an operation's units that each rank computes; None for all units."""
        match op.sharding:
            case Sharding.REPLICATED:
                return None
            case Sharding.BY_STAGE:
                return _part_ranges(op, self._mesh.column_parts * self._num_row_parts)
            case Sharding.BY_COLUMN_PARTS:
                return self._read_ranges.get(op.output) or _part_ranges(
                    op, self._mesh.shares_of(op)
                )
            case Sharding.AS_INPUTS:
                return self._ranges_as_inputs(op)

    def _ranges_as_inputs(self, op: Op) -> Ranges | None:
        """Return the columns that each rank computes of an elementwise operation; None for all.

        The columns that later operations read are preferred. Otherwise the ranks compute the
        columns that they hold of an input.
        """
        output_ranges = self._read_ranges.get(op.output)
        held_inputs = [self._held_values[name] for name in op.inputs]
        if output_ranges is None and all(
            any(v.ranges is None for v in values) for values in held_inputs
        ):
            return None
        candidates = [v.ranges for v in map(self._divided, op.inputs) if v is not None]
        if output_ranges is not None and (output_ranges in candidates or not candidates):
            candidates = [output_ranges]
        return next((ranges for ranges in candidates if ranges and _can_be_cut(op, ranges)), None)

    def _held_input(self, op: Op, field: str, ranges: Ranges | None) -> HeldValue:
        """Return how ranks hold the input `field` after adding the collectives that `op` needs.

        `ranges` are the units of the operation that each rank computes; None: all units.
        """
        name = getattr(op, field)
        all_rows = field in op.needs_all_rows
        input_ranges = [op.part_reads(field, *part) for part in ranges or ()]
        columns = tuple([part for part in input_ranges if part is not None])
        if columns:
            return self._columns(name, columns, all_rows=all_rows)
        return self._undivided(name, all_rows=all_rows)

    def _divided(self, name: str) -> HeldValue | None:
        """Return the entry of a value whose columns ranks divide; None if there is none."""
        for value in self._held_values[name]:
            if value.has_columns:
                return value
        return None

    def _columns(self, name: str, ranges: Ranges, *, all_rows: bool) -> HeldValue:
        """Let each rank hold its columns of `ranges` of a value; return the `HeldValue`.

        If no entry of `_held_values` has these ranges, operations that cut the undivided value are
        added.
        """
        matching = [v for v in self._held_values[name] if v.ranges == ranges and v.has_columns]
        if not matching:
            undivided = self._undivided(name)
            parts = ColumnParts(cuts_from_ranges(ranges))
            value = HeldValue(
                name, undivided.width, ranges, parts, all_rows=self._num_row_parts == 1
            )
            for index, output in self._names(value):
                x, (first, end) = undivided.name_at(index), value.range_at(index)
                assert x is not None
                self._emit(index, TakeColumns(output, x, end - first, first))
            self._held_values[name].append(value)
            matching = [value]
        return self._with_all_rows(matching) if all_rows else matching[0]

    def _undivided(self, name: str, *, all_rows: bool = False) -> HeldValue:
        """Let each rank hold all columns of a value; return the `HeldValue`.

        If no entry of `_held_values` is undivided, a gather is added.
        """
        undivided = [value for value in self._held_values[name] if value.ranges is None]
        if not undivided:
            undivided = [self._gather_columns(self._held_values[name][0])]
        return self._with_all_rows(undivided) if all_rows else undivided[0]

    def _gather_columns(self, value: HeldValue, root: int | None = None) -> HeldValue:
        """Add operations that gather a divided value; return the `HeldValue` with all columns.

        `root`: the only rank that receives the value; None: all ranks of the stage.
        """
        assert value.ranges is not None
        assert value.parts is not None
        undivided = replace(value, ranges=None, parts=None)
        size = len(value.ranges)
        for index in range(self._size):
            team, team_index = self._team(index, size)
            own_part = self._part_to_gather(value, index)
            gather = AllGather(
                str(undivided.name_at(index)),
                x=own_part,
                width=undivided.width,
                parts=value.parts,
                team=team,
                team_index=team_index,
                root=root,
            )
            self._emit(index, gather)
        self._held_values[value.name].append(undivided)
        return undivided

    def _team(self, index: int, size: int) -> tuple[tuple[int, ...], int]:
        """Return the ranks that gather a value together, and a rank's index among them.

        The ranks are `size` neighbours. `index` is the rank, counted in the stage.
        """
        first = self._first_rank + index // size * size
        return tuple(range(first, first + size)), index % size

    def _part_to_gather(self, value: HeldValue, index: int) -> str | None:
        """Return the name of the columns that a rank contributes to a gather; None if it has none.

        If the ranks' column ranges overlap, only the first rank that has a column sends it. For
        other ranks, an operation that takes the remaining columns is added.
        """
        x = value.name_at(index)
        if x is None or not isinstance(value.parts, ColumnParts):
            return x
        cut, end = list(pairwise(value.parts.cuts))[index % len(value.parts.cuts[1:])]
        first, _ = value.range_at(index)
        if cut == first:
            return x
        if cut == end:
            return None
        tile = f"{x}.tile"
        self._emit(index, TakeColumns(tile, x, end - cut, cut - first))
        return tile

    def _with_all_rows(self, values: Sequence[HeldValue]) -> HeldValue:
        """Let each rank hold all rows of a value; return the `HeldValue`.

        If necessary, a gather of rows is added. `values` are the entries of the value in
        `_held_values` with the same columns.
        """
        for value in values:
            if value.all_rows:
                return value
        value = replace(values[0], all_rows=True)
        for index, output in self._names(value):
            first = self._first_rank + index % self._num_column_parts
            team = tuple(range(first, first + self._size, self._num_column_parts))
            gather = AllGather(
                output,
                x=values[0].name_at(index),
                width=value.width_at(index),
                parts=RowParts(self._num_row_parts),
                team=team,
                team_index=index // self._num_column_parts,
            )
            self._emit(index, gather)
        self._held_values[value.name].append(value)
        return value

    def _names(self, value: HeldValue) -> list[tuple[int, str]]:
        """Return the ranks of the stage that have a part of a value, each with the part's name."""
        return [(i, name) for i in range(self._size) if (name := value.name_at(i)) is not None]


def _part_of(program: Program, ops: Collection[Op]) -> Program:
    """Return the Program that has only some of the operations, for one rank.

    KV cache layers are numbered from 0 again.
    """
    layers = sorted({layer for op in ops for layer in op.stores})
    new_layers = {layer: number for number, layer in enumerate(layers)}
    groups = [
        CacheGroup(
            tuple([new_layers[layer] for layer in group.layers if layer in new_layers]),
            group.window,
        )
        for group in program.cache_groups
    ]
    outputs = {op.output for op in ops}
    return replace(
        program,
        ops=tuple([op.with_layers(new_layers) for op in ops]),
        layer_outputs=tuple([name for name in program.layer_outputs if name in outputs]),
        groups=tuple(groups),
    )


def split_sums(ops: Collection[Op], block_sizes: Mapping[str, int]) -> dict[str, int]:
    """Choose the matrix products whose sums ranks split, for `--reduce sum`.

    Returns the names of their outputs, each with a number of input columns: the input is cut only
    at multiples of this number. Such a product reads a value that ranks already hold by columns,
    such as the output of attention, of the delta rule or of Mamba-2. Cuts do not divide a
    quantization block of the product's weight; `block_sizes` has the size of these blocks, and a
    product whose weight has no block size is not split. A product after attention is not split if
    other operations read that attention's keys and values, since all these operations must be cut
    at the same heads.
    """
    shared_layers = {op.layer for op in ops if isinstance(op, SharedKvAttention)}
    grains: dict[str, int] = {}  # of values that ranks hold by columns
    split: dict[str, int] = {}
    for op in ops:
        input_grains = [grains[name] for name in op.inputs if name in grains]
        if isinstance(op, Linear) and input_grains and op.weight in block_sizes:
            split[op.output] = lcm(*input_grains, block_sizes[op.weight])
        elif isinstance(op, Linear | GatedDeltaRule | Mamba2) or (
            isinstance(op, Attention) and op.layer not in shared_layers
        ):
            grains[op.output] = op.grain
        elif op.sharding is Sharding.AS_INPUTS and input_grains and op.grain < op.width:
            grains[op.output] = lcm(op.grain, *input_grains)
    return split
