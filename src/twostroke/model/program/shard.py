"""The shard reader: divides a Program into one for each rank, which together compute the same.

Every operation says which part of it a rank can compute (`sharding`), and which columns of its
inputs that part reads. Where ranks hold a value differently from how an operation reads it, a
collective is inserted. No sum is split, unless `split_sums` are wanted.
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
from twostroke.model.program.ops import Attention, Embed, Linear, SharedKvAttention
from twostroke.model.program.sharding import (
    ColumnParts,
    HeldValue,
    RowParts,
    Sharding,
    cuts,
    cuts_of,
)
from twostroke.model.program.split_kv import SplitKvAttention, heads_of_each

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twostroke.model.program.mesh import Mesh
    from twostroke.model.program.ops import Op
    from twostroke.model.program.program import Program
    from twostroke.model.program.sharding import Range, Ranges


class RankProgram(Frozen):
    """The part of a Program that one rank runs.

    `weight_rows` are the rows (of a vector: values) of each weight that the rank reads, and
    `weight_columns` the columns of those of which it does not read all. Values that the rank holds
    whole are called as in the undivided Program.

    Of a step's rows the rank computes part `row_part` of `num_row_parts` (see `RowParts`): every
    operation writes these rows of its output, and the others are undefined. Exceptions are
    `Embed`, which writes the rows whose tokens it has, `Logits`, which writes a row for each one
    that is sampled, and `AllGather`.
    """

    program: Program
    weight_rows: Mapping[str, Range]
    weight_columns: Mapping[str, Range]
    row_part: int
    num_row_parts: int


def shard(
    program: Program,
    mesh: Mesh,
    kept: Collection[str] = (),
    block_sizes: Mapping[str, int] | None = None,
) -> tuple[RankProgram, ...]:
    """Return the parts of a Program, by rank.

    The last value (the logits), and those that are `kept`, become whole on rank 0. With
    `block_sizes` (values in a block, by weight) some sums are split: see `split_sums`.
    """
    is_divided = len(mesh.column_parts) > 1
    ops: list[Op] = []
    for op in program.ops:
        ops += cast("tuple[Op, ...]", op.steps) if is_divided else [op]
    sums = split_sums(ops, block_sizes) if block_sizes and is_divided else {}
    wanted = _wanted(ops, mesh, sums)
    stages = cut_into_stages(program, ops, mesh.stages)
    ranks: list[RankProgram] = []
    sent: list[HeldValue] = []
    for number, own in enumerate(stages):
        read_later = {name for rest in stages[number + 1 :] for op in rest for name in op.inputs}
        stage = _Stage(mesh, number, wanted, sums)
        stage.receive(sent)
        for op in own:
            stage.add(op)
        if number + 1 < len(stages):
            sent = stage.send(read_later.union(kept))
        else:
            stage.finish(program.ops[-1].output, kept)
        ranks = stage.programs(program) + ranks  # the last stage has the first ranks
    return tuple(ranks)


def _wanted(ops: Sequence[Op], mesh: Mesh, sums: Mapping[str, int]) -> dict[str, Ranges]:
    """Return the columns of values, by column part, that are read by operations after them.

    Values that are read whole are left out.
    """
    wanted: dict[str, Ranges] = {}
    for op in reversed(ops):
        if isinstance(op, Linear) and op.output in sums:
            inputs = cuts(op.in_width, mesh.column_parts, sums[op.output])
            wanted.setdefault(op.x, tuple(pairwise(inputs)))
            continue
        if isinstance(op, Attention) and mesh.by_places:
            wanted = {**heads_of_each(op, mesh.column_parts), **wanted}
            continue
        ranges = wanted.get(op.output)
        if op.sharding is Sharding.BY_COLUMN_PARTS and ranges is None:
            ranges = _shares(op, mesh.shares_of(op))
        if ranges is None or op.sharding is Sharding.WHOLE or not _fits(op, ranges):
            continue
        for field in op.reads:
            read = [op.part_reads(field, *columns) for columns in ranges]
            found = tuple([columns for columns in read if columns is not None])
            if len(found) == len(read):
                wanted.setdefault(getattr(op, field), found)
    return wanted


def _shares(op: Op, shares: tuple[int, ...]) -> Ranges | None:
    """Return the part of each rank; None if there is nothing to divide."""
    if len(shares) == 1 or op.length <= op.grain:
        return None
    return tuple(pairwise(cuts(op.length, shares, op.grain)))


def _fits(op: Op, ranges: Ranges) -> bool:
    """Whether an operation can be cut so."""
    ends = [end for columns in ranges for end in columns]  # both of each, since parts may overlap
    return all(end == op.length or end % op.grain == 0 for end in ends)


class _Stage:
    """The operations of the ranks of one stage.

    Rank `index` of the stage has row part `index // num_columns` and column part
    `index % num_columns`.
    """

    def __init__(
        self, mesh: Mesh, number: int, wanted: Mapping[str, Ranges], sums: Collection[str]
    ) -> None:
        self._mesh, self._wanted, self._sums = mesh, wanted, sums
        self._num_columns, self._num_rows = len(mesh.column_parts), mesh.row_parts
        self._size = mesh.ranks_per_stage
        self._first_rank = (len(mesh.stages) - 1 - number) * self._size
        self._held: dict[str, list[HeldValue]] = {}
        self._ops: list[dict[str, Op]] = [{} for _ in range(self._size)]  # by output
        self._weight_rows: list[dict[str, Range]] = [{} for _ in range(self._size)]
        self._weight_columns: list[dict[str, Range]] = [{} for _ in range(self._size)]

    def add(self, op: Op) -> None:
        """Add an operation, with the collectives that bring its inputs."""
        if isinstance(op, Linear) and op.output in self._sums:
            x = self._divided(op.x)
            if x is not None and x.ranges == self._wanted[op.x]:
                self._add_sum(op, x)
                return
        if isinstance(op, Attention) and self._mesh.num_places > 1:
            self._add_pieces(op)
            return
        ranges = self._ranges(op)
        reads = {field: self._read(op, field, ranges) for field in op.reads}
        all_rows = self._num_rows == 1 or op.sharding is Sharding.BY_STAGE
        if ranges is None and isinstance(op, Embed):  # of a small table: it writes a rank's rows
            all_rows = self._num_rows == 1
        value = HeldValue(op.output, op.width, ranges, all_rows=all_rows)
        if ranges is not None:
            named = replace(op, **{field: read.at(0) for field, read in reads.items()})
            value = replace(value, parts=named.parts_by(cuts_of(ranges)))
        for index in range(self._size):
            own = None if ranges is None else value.range_at(index)
            if value.at(index) is None:
                continue
            part = op if own is None else op.part(*own)
            names = {field: read.at(index) for field, read in reads.items()}
            self._emit(index, replace(part, output=value.at(index), **names))
            divided = {weight.name for weight in op.weights if weight.is_divided}
            for weight in part.weights:
                rows = own if own and weight.name in divided else (0, weight.shape[0])
                assert self._weight_rows[index].setdefault(weight.name, rows) == rows
        self._held[op.output] = [value]

    def _add_sum(self, op: Linear, x: HeldValue) -> None:
        """Add a product of which each member of a team computes a term, from its columns of `x`."""
        value = HeldValue(op.output, op.width, all_rows=self._num_rows == 1)
        for index in range(self._size):
            own, columns, term = x.at(index), x.range_at(index), None
            if own is not None:
                term = f"{value.at(index)}.term"
                part = replace(op.term(*columns), output=term, x=own)
                self._emit(index, part)
                self._weight_rows[index] |= {weight.name: (0, op.width) for weight in part.weights}
                self._weight_columns[index][op.weight] = columns
            team, place = self._team(index, self._num_columns)
            self._emit(index, AllReduce(str(value.at(index)), term, op.width, team, place))
        self._held[op.output] = [value]

    def _add_pieces(self, op: Attention) -> None:
        """Add an attention whose keys and values are divided by places among all ranks."""
        for name in op.inputs:  # one gather directly after another: together they can wait once
            self._whole(name)
        read = [self._whole(name, all_rows=True) for name in op.inputs]
        head_cuts = cuts(op.num_heads, self._mesh.column_parts)
        ranges = tuple(pairwise([cut * op.head_dim for cut in head_cuts]))
        value = HeldValue(op.output, op.width, all_rows=self._num_rows == 1)
        if self._num_columns > 1:
            value = replace(value, ranges=ranges, parts=ColumnParts(cuts_of(ranges)))
        for index in range(self._size):
            team, place = self._team(index, self._size)
            output = value.at(index) or f"{op.output}.none"
            part = SplitKvAttention.of(op, team, place, head_cuts)
            names = {field: x.at(index) for field, x in zip(op.reads, read, strict=True)}
            self._emit(index, replace(part, output=output, **names))
        self._held[op.output] = [value]

    def finish(self, last: str, kept: Collection[str]) -> None:
        """Bring the last value to rank 0, and those that are kept."""
        (value,) = self._held[last]
        if value.ranges is None:
            kept = (last, *kept)
        else:
            self._gather_columns(value, root=0)
        for name in kept:
            self._whole(name, all_rows=True)

    def send(self, names: Collection[str]) -> list[HeldValue]:
        """Send values to the next stage, each rank to the one at its place; return them."""
        sent = []
        for name in [name for name in self._held if name in names]:
            value = self._divided(name) or self._whole(name)
            sent.append(value)
            for index, x in self._names(value):
                to = self._first_rank - self._size + index
                self._emit(index, Send(f"{x}.sent", x, value.width_at(index), to))
        return sent

    def receive(self, values: Sequence[HeldValue]) -> None:
        """Receive what the previous stage sends."""
        for value in values:
            own = replace(value, all_rows=self._num_rows == 1)
            for index, output in self._names(own):
                sender = self._first_rank + self._size + index
                self._emit(index, Receive(output, own.width_at(index), sender))
            self._held[value.name] = [own]

    def programs(self, program: Program) -> list[RankProgram]:
        """Return the finished Programs."""
        return [
            RankProgram(
                _part_of(program, ops.values()),
                self._weight_rows[index],
                self._weight_columns[index],
                index // self._num_columns,
                self._num_rows,
            )
            for index, ops in enumerate(self._ops)
        ]

    def _emit(self, index: int, op: Op) -> None:
        """Add an operation to a rank's, unless that has its output already: names tell values."""
        self._ops[index].setdefault(op.output, op)

    def _ranges(self, op: Op) -> Ranges | None:
        """Return which part of an operation each member of a team computes; None: each all."""
        match op.sharding:
            case Sharding.WHOLE:
                return None
            case Sharding.BY_STAGE:
                return _shares(op, self._mesh.column_parts * self._num_rows)
            case Sharding.BY_COLUMN_PARTS:
                return self._wanted.get(op.output) or _shares(op, self._mesh.shares_of(op))
            case Sharding.AS_INPUTS:
                return self._ranges_as_inputs(op)

    def _ranges_as_inputs(self, op: Op) -> Ranges | None:
        """Return the columns that are read later, or those of an input; None if it can be whole."""
        wanted = self._wanted.get(op.output)
        held = [self._held[name] for name in op.inputs]
        if wanted is None and all(any(v.ranges is None for v in values) for values in held):
            return None
        found = [v.ranges for v in map(self._divided, op.inputs) if v is not None]
        if wanted is not None and (wanted in found or not found):
            found = [wanted]
        return next((ranges for ranges in found if ranges and _fits(op, ranges)), None)

    def _read(self, op: Op, field: str, ranges: Ranges | None) -> HeldValue:
        """Return an input in the way in which the parts of an operation read it."""
        name, all_rows = getattr(op, field), field in op.needs_all_rows
        read = [op.part_reads(field, *part) for part in ranges or ()]
        columns = tuple([part for part in read if part is not None])
        if columns:
            return self._columns(name, columns, all_rows=all_rows)
        return self._whole(name, all_rows=all_rows)

    def _divided(self, name: str) -> HeldValue | None:
        """Return a value as its columns are divided, if they are."""
        for value in self._held[name]:
            if value.has_columns:
                return value
        return None

    def _columns(self, name: str, ranges: Ranges, *, all_rows: bool) -> HeldValue:
        """Return some columns of a value on each rank."""
        found = [v for v in self._held[name] if v.ranges == ranges and v.has_columns]
        if not found:
            whole = self._whole(name)
            parts = ColumnParts(cuts_of(ranges))
            value = HeldValue(name, whole.width, ranges, parts, all_rows=self._num_rows == 1)
            for index, output in self._names(value):
                x, (first, end) = whole.at(index), value.range_at(index)
                assert x is not None
                self._emit(index, TakeColumns(output, x, end - first, first))
            self._held[name].append(value)
            found = [value]
        return self._all_rows(found) if all_rows else found[0]

    def _whole(self, name: str, *, all_rows: bool = False) -> HeldValue:
        """Return a value whose columns are all on each rank."""
        found = [value for value in self._held[name] if value.ranges is None]
        if not found:
            found = [self._gather_columns(self._held[name][0])]
        return self._all_rows(found) if all_rows else found[0]

    def _gather_columns(self, value: HeldValue, root: int | None = None) -> HeldValue:
        """Put together what the members of each team hold."""
        assert value.ranges is not None
        assert value.parts is not None
        whole = replace(value, ranges=None, parts=None)
        size = len(value.ranges)
        for index in range(self._size):
            team, place = self._team(index, size)
            own = self._own_tile(value, index)
            gather = AllGather(
                str(whole.at(index)), own, whole.width, value.parts, team, place, root
            )
            self._emit(index, gather)
        self._held[value.name].append(whole)
        return whole

    def _team(self, index: int, size: int) -> tuple[tuple[int, ...], int]:
        """Return the `size` ranks that have the parts of a value, and the place among them."""
        first = self._first_rank + index // size * size
        return tuple(range(first, first + size)), index % size

    def _own_tile(self, value: HeldValue, index: int) -> str | None:
        """Return a rank's part without the columns that an earlier rank has, too."""
        x = value.at(index)
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

    def _all_rows(self, found: Sequence[HeldValue]) -> HeldValue:
        """Return a value with all rows, gathered from the row parts if no one has them."""
        for value in found:
            if value.all_rows:
                return value
        value = replace(found[0], all_rows=True)
        for index, output in self._names(value):
            first = self._first_rank + index % self._num_columns
            team = tuple(range(first, first + self._size, self._num_columns))
            x, width, place = (
                found[0].at(index),
                value.width_at(index),
                index // self._num_columns,
            )
            gather = AllGather(output, x, width, RowParts(self._num_rows), team, place)
            self._emit(index, gather)
        self._held[value.name].append(value)
        return value

    def _names(self, value: HeldValue) -> list[tuple[int, str]]:
        """Return the ranks of the stage that have some of a value, and its name there."""
        return [(i, name) for i in range(self._size) if (name := value.at(i)) is not None]


def _part_of(program: Program, ops: Collection[Op]) -> Program:
    """Return a Program with some of the operations; its layers are numbered from 0."""
    layers = sorted({layer for op in ops for layer in op.stores})
    places = {layer: place for place, layer in enumerate(layers)}
    groups = [
        CacheGroup(tuple([places[n] for n in group.layers if n in places]), group.window)
        for group in program.cache_groups
    ]
    outputs = {op.output for op in ops}
    return replace(
        program,
        ops=tuple([op.with_layers(places) for op in ops]),
        layer_outputs=tuple([name for name in program.layer_outputs if name in outputs]),
        groups=tuple(groups),
    )


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
