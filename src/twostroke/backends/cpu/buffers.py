"""Assigns the values of a step to buffers, which are columns of row memories."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.backends.cpu.records import NONE
from twostroke.core.frozen import Frozen
from twostroke.model.program.ops import AllGather, Embed, ExpertTerms
from twostroke.model.program.sharding import ColumnParts, RowParts, TermParts, TokenParts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.backends.cpu.records import OpRecord
    from twostroke.model.program import Program


class Buffer(Frozen):
    """Columns of a row memory in which a step's intermediate value is stored.

    `is_part`: the columns hold only this rank's part of a value that is gathered from all ranks.
    """

    memory: int
    first_column: int
    width: int
    is_part: bool = False


@dataclass(slots=True)
class RowMemory:
    """Memory for a step's intermediate values: a matrix with a row for each row of the step.

    When all of its values have been read, other values reuse it. `num_rows`: a fixed number of
    rows; 0: the rows of the step. `num_values`: how many values the memory holds at the moment.

    Ranks may share the memory of gathered values. `gathers` are the gathers whose outputs are
    stored in it, one after another. Barriers of the team divide a step into numbered intervals.
    This rank writes the memory in the intervals `writes`, and reads values of other ranks in the
    intervals `reads`. `uses` are the intervals of both.
    """

    width: int
    num_rows: int = 0
    num_values: int = 0
    gathers: list[AllGather] = field(default_factory=list)
    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    uses: set[int] = field(default_factory=set)

    @property
    def team(self) -> tuple[int, ...]:
        """Return the ranks that share this memory."""
        return self.gathers[0].team

    def join(self, others: Iterable[RowMemory]) -> RowMemory:
        """Merge the descriptions that several ranks have of one shared memory.

        The result has all gathers and all intervals.
        """
        joined = RowMemory(
            self.width,
            self.num_rows,
            gathers=list(self.gathers),
            writes=set(self.writes),
            reads=set(self.reads),
            uses=set(self.uses),
        )
        for other in others:
            joined.gathers += other.gathers
            joined.writes |= other.writes
            joined.reads |= other.reads
            joined.uses |= other.uses
        return joined


@dataclass(slots=True)
class Buffers:
    """Assigns a step's intermediate values to buffers, which are reused after a value's last read.

    A buffer is only reused for values of the same width, so that rows stay dense. `gather_of` maps
    a value that is this rank's part of a gathered value to the gather: such a part is written
    directly to its columns of the gathered value.
    """

    reads_left: Counter[str]
    gather_of: dict[str, AllGather] = field(default_factory=dict)
    all: list[Buffer] = field(default_factory=list)
    memories: list[RowMemory] = field(default_factory=list)
    buffer_of_value: dict[str, int] = field(default_factory=dict)
    _free: dict[int, list[int]] = field(default_factory=dict)
    _shared: dict[str, int] = field(default_factory=dict)  # the memory of each gathered value
    _intervals: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def write(self, name: str, width: int) -> int:
        """Assign a buffer to a new intermediate value; return the buffer's index."""
        if gather := self.gather_of.get(name):
            memory = self._shared_memory(gather)
            return self._assign(name, Buffer(memory, _first_column(gather), width, is_part=True))
        pool = self._free.setdefault(width, [])
        if pool:
            return self._assign(name, self.all[pool[-1]], pool.pop())
        self.memories.append(RowMemory(width))
        return self._assign(name, Buffer(len(self.memories) - 1, 0, width))

    def view(self, name: str, x: str, first: int, width: int) -> int:
        """Make a new value a view of columns of an earlier value.

        Return the view's buffer index.
        """
        source = self.all[self.buffer_of_value[x]]
        memory = self.memories[source.memory]
        own_columns = memory.gathers and _own_columns(memory.gathers[-1])
        is_part = source.is_part or own_columns == (first, first + width)
        column = source.first_column + first
        return self._assign(name, Buffer(source.memory, column, width, is_part))

    def take_over(self, name: str, earlier: str) -> bool:
        """Let a new value overwrite an earlier value in the same buffer, if possible.

        Returns False if it is not: if the memory holds other values, or if other ranks may still
        read the buffer.
        """
        buffer = self.all[self.buffer_of_value[earlier]]
        memory = self.memories[buffer.memory]
        gather = self.gather_of.get(name)
        if memory.num_values > 1 or bool(memory.gathers) != bool(gather):
            return False
        if gather:
            before = memory.gathers[-1]
            is_same = (before.team, before.parts) == (gather.team, gather.parts)
            is_read = self._intervals[gather.team] in memory.reads
            if is_read or not (
                is_same and buffer.is_part and isinstance(gather.parts, ColumnParts)
            ):
                return False
            memory.gathers.append(gather)
            self._shared[gather.output] = buffer.memory
        self.buffer_of_value[name] = self.buffer_of_value.pop(earlier)
        return True

    def gather(self, gather: AllGather, num_rows: int = 0) -> tuple[int, bool]:
        """Assign a buffer to a value gathered from all ranks.

        Returns the buffer's index, and whether this rank's part is already in the buffer.
        """
        memory = self._shared_memory(gather, num_rows)
        part_index = self.buffer_of_value.get(gather.x or "", NONE)
        is_there = gather.x is None or self.all[part_index].memory == memory
        return self._assign(gather.output, Buffer(memory, 0, gather.width)), is_there

    def note(self, record: OpRecord, gather: AllGather | None = None) -> None:
        """Record which shared memories an operation reads and writes in the current interval.

        `gather`: the gather that the operation computes, whose barrier starts the next interval.
        """
        outputs = [output.buffer for output in record.outputs[: record.num_outputs]]
        if gather and record.x == NONE:
            outputs = []
        for buffers, is_write in ((outputs, True), ((record.x, record.y, record.z), False)):
            for buffer in (self.all[index] for index in buffers if index != NONE):
                memory = self.memories[buffer.memory]
                if not memory.gathers:
                    continue
                interval = self._intervals[memory.team]
                memory.uses.add(interval)
                if is_write:
                    memory.writes.add(interval)
                elif not buffer.is_part:
                    memory.reads.add(interval)
        if gather:
            self._intervals[gather.team] += 1
            memory = self.memories[self._shared[gather.output]]
            memory.reads.add(self._intervals[gather.team])
            memory.uses.add(self._intervals[gather.team])

    def done(self, names: Iterable[str]) -> None:
        """Count an operation's reads of values; free buffers whose values are not read again."""
        for name in names:
            self.reads_left[name] -= 1
            if self.reads_left[name] <= 0 and name in self.buffer_of_value:
                index = self.buffer_of_value.pop(name)
                buffer = self.all[index]
                memory = self.memories[buffer.memory]
                memory.num_values -= 1
                if memory.num_values == 0 and not memory.gathers:
                    self._free[memory.width].append(self._full_buffer(buffer.memory))

    def _assign(self, name: str, buffer: Buffer, index: int | None = None) -> int:
        if index is None:
            self.all.append(buffer)
            index = len(self.all) - 1
        self.buffer_of_value[name] = index
        self.memories[buffer.memory].num_values += 1
        return index

    def _shared_memory(self, gather: AllGather, num_rows: int = 0) -> int:
        if gather.output not in self._shared:
            self.memories.append(RowMemory(gather.width, num_rows, gathers=[gather]))
            self._shared[gather.output] = len(self.memories) - 1
        return self._shared[gather.output]

    def _full_buffer(self, memory: int) -> int:
        """Return the index of the buffer that covers all columns of a memory."""
        return next(i for i, b in enumerate(self.all) if b.memory == memory)


def _first_column(gather: AllGather) -> int:
    columns = _own_columns(gather)
    return columns[0] if columns else 0


def _own_columns(gather: AllGather) -> tuple[int, int] | None:
    """Return the columns (first, end) of a gathered value that this rank computes.

    None if ranks compute different rows of the value instead.
    """
    if not isinstance(gather.parts, ColumnParts):
        return None
    return gather.parts.cuts[gather.team_index], gather.parts.cuts[gather.team_index + 1]


def parts_in_place(program: Program) -> dict[str, AllGather]:
    """Return the gathers whose parts ranks can write directly into the gathered value.

    The keys are the names of the parts. No copy is needed for these gathers.
    """
    gathers: dict[str, AllGather] = {}
    writers = {op.output: op for op in program.ops}
    for op in program.ops:
        if not isinstance(op, AllGather) or op.x is None:
            continue
        match op.parts:
            case TokenParts():
                writes_own_part = isinstance(writers[op.x], Embed)
            case TermParts():
                writes_own_part = isinstance(writers[op.x], ExpertTerms)
            case ColumnParts() | RowParts():
                writes_own_part = True
        if writes_own_part:
            gathers.setdefault(op.x, op)
    return gathers
