"""Lowers a Program to the flat list of operations that the native executor walks through."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.backends.cpu.fuse import fuse
from twostroke.backends.cpu.places import Buffers, Table
from twostroke.backends.cpu.records import (
    ACTIVATIONS,
    MAX_OUTPUTS,
    NONE,
    ExpertRecord,
    OpKind,
    OpRecord,
    OutputRecord,
    Precision,
    Store,
)
from twostroke.core.config import ACTIVATION_BITS, DEFAULT_ACTIVATION_BITS
from twostroke.core.errors import BackendError
from twostroke.program import ops

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.program import Op, Program

_PRECISIONS = dict(
    zip(ACTIVATION_BITS, (Precision.PLAIN, Precision.MIXED, Precision.COARSE), strict=True)
)
_HEAD_UNIT = 16  # values of a head that the kernels handle at once
_MAX_HEAD_DIM = 512
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Vector:
    """A weight of one dimension as the kernels read it: float32, with `offset` added."""

    name: str
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Lowered:
    """A Program for the native executor.

    `records` name weights, vectors, ropes and buffers by their place in these tuples;
    `buffer_widths` are values a row. `parts[i]` are the Program's operations that record i runs:
    each is in exactly one of them.
    """

    records: tuple[OpRecord, ...]
    parts: tuple[tuple[Op, ...], ...]
    matrices: tuple[str, ...]
    vectors: tuple[Vector, ...]
    ropes: tuple[ops.Rope, ...]
    experts: tuple[ExpertRecord, ...]
    buffer_widths: tuple[int, ...]


def lower(
    program: Program, taps: Sequence[str] = (), *, activation_bits: int = DEFAULT_ACTIVATION_BITS
) -> Lowered:
    """Lower a Program whose values `taps` leave the step.

    `activation_bits` is the precision of activations at quantized weights, except before routers.

    Raises:
        BackendError: a shape that the kernels cannot run.
    """
    _check(program)
    return _Lowering(program, taps, activation_bits).lower()


def _check(program: Program) -> None:
    for op in program.ops:
        if isinstance(op, ops.Attention | ops.Rope) and (
            op.head_dim % _HEAD_UNIT or op.head_dim > _MAX_HEAD_DIM
        ):
            message = f"{program.name}: heads of {op.head_dim} values; the cpu backend runs"
            raise BackendError(f"{message} multiples of {_HEAD_UNIT} up to {_MAX_HEAD_DIM}.")
        if isinstance(op, ops.MixtureOfExperts) and not 1 <= op.num_used <= len(op.experts):
            message = f"{program.name}: a row uses {op.num_used} of {len(op.experts)} experts"
            raise BackendError(f"{message}; it must use at least one, and at most all of them.")


class _Lowering:
    """One pass over the fused Program."""

    def __init__(self, program: Program, taps: Sequence[str], activation_bits: int) -> None:
        self._program, self._taps = program, taps
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in op.inputs:
                self._readers.setdefault(name, []).append(op)
        self._buffers = Buffers(
            Counter({name: len(found) for name, found in self._readers.items()})
        )
        self._matrices: Table[str] = Table()
        self._vectors: Table[Vector] = Table()
        self._ropes: Table[ops.Rope] = Table()
        self._precision = _PRECISIONS[activation_bits]
        self._has_routers = any(isinstance(op, ops.MixtureOfExperts) for op in program.ops)
        self._absorbed: set[str] = set()  # outputs of operations done right after a product
        self._stored: set[str] = set()  # keys and values that go to the pages after their product
        self._experts: list[ExpertRecord] = []
        self._records: list[OpRecord] = []
        self._parts: list[tuple[Op, ...]] = []

    def lower(self) -> Lowered:
        tapped: set[str] = set()
        for run in fuse(self._program, self._taps):
            self._lower_run(run)
            # At once, before another value takes over the buffer.
            for name in self._taps:
                if name not in tapped and name in self._buffers.of_value:
                    tapped.add(name)
                    self._tap(name)
        return Lowered(
            tuple(self._records),
            tuple(self._parts),
            tuple(self._matrices.places),
            tuple(self._vectors.places),
            tuple(self._ropes.places),
            tuple(self._experts),
            tuple(self._buffers.widths),
        )

    def _lower_run(self, run: tuple[Op, ...]) -> None:
        match run:
            case (op,):
                self._single(op)
            case (ops.RMSNorm() as norm, ops.Logits() as logits):
                self._logits(norm, logits)
            case (ops.RMSNorm() as norm, ops.Add() as add):
                self._norm_add(norm, add)
            case (
                ops.RMSNorm() as norm,
                ops.Linear() as gate,
                ops.Linear() as up,
                ops.GatedActivation() as act,
            ):
                self._gated(norm, gate, up, act)
            case (ops.RMSNorm() as norm, *linears):
                self._linears(norm, [op for op in linears if isinstance(op, ops.Linear)])
            case (ops.Linear() as linear, ops.Add() as add):
                self._linear_add(linear, add)
            case (ops.MixtureOfExperts() as mixture, ops.Add() as add):
                self._mixture(mixture, add)
            case (ops.Embed() as embed, ops.Scale() as scale):
                self._embed(embed, scale)
            case _:
                raise BackendError(f"The cpu backend has no kernel for {run}.")

    def _single(self, op: Op) -> None:  # noqa: C901 - a case for each operation
        match op:
            case _ if op.output in self._absorbed:
                pass
            case ops.Linear():
                self._linears(None, [op])
            case ops.Logits():
                self._logits(None, op)
            case ops.Attention():
                self._attention(op)
            case ops.Embed():
                self._embed(op)
            case ops.RMSNorm():
                self._emit(OpKind.NORM, op, norm=op)
            case ops.Rope():
                self._emit(OpKind.ROPE, op, rope=self._rope(op))
            case ops.GatedActivation():
                self._emit(OpKind.ACTIVATION, op).activation = ACTIVATIONS[op.activation]
            case ops.MixtureOfExperts():
                self._mixture(op, None)
            case ops.Scale():
                self._emit(OpKind.SCALE, op).factor = op.factor
            case ops.ExternalInput():
                self._emit(OpKind.EXTERNAL_INPUT, op)
            case ops.Add():
                self._emit(OpKind.ADD, op)
            case _:
                raise BackendError(f"The cpu backend has no kernel for {type(op).__name__}.")

    def _emit(
        self, kind: OpKind, op: Op, norm: ops.RMSNorm | None = None, rope: int = NONE
    ) -> OpRecord:
        """Append a record with up to two inputs and one output."""
        record = self._record(kind, op.inputs[0] if op.inputs else None, norm)
        if len(op.inputs) > 1:
            record.y = self._buffers.of_value[op.inputs[1]]
        record.width = op.width
        buffer = self._buffers.write(op.output, op.width)
        self._add_output(record, _output(buffer, op.width, rope=rope))
        self._append(record, op.inputs, op)
        return record

    def _embed(self, op: ops.Embed, scale: ops.Scale | None = None) -> None:
        parts = (op,) if scale is None else (op, scale)
        record = self._record(OpKind.EMBED, None, None)
        record.width, record.factor = op.width, 1.0 if scale is None else scale.factor
        buffer = self._buffers.write(parts[-1].output, op.width)
        weight = self._matrices.place(op.table)
        self._add_output(record, _output(buffer, op.width, weight=weight))
        self._append(record, (), *parts)

    def _norm_add(self, norm: ops.RMSNorm, add: ops.Add) -> None:
        if self._buffers.reads_left[add.a] > 1:
            self._single(norm)
            self._single(add)
            return
        record = self._record(OpKind.NORM, norm.x, norm)
        record.width = norm.width
        record.y = self._buffers.take_over(add.output, add.a)
        self._add_output(record, _output(record.y, norm.width))
        self._append(record, [norm.x, add.a], norm, add)

    def _linears(self, norm: ops.RMSNorm | None, linears: list[ops.Linear]) -> None:
        """Append products of one input, and the operations that can follow each at once."""
        x = linears[0].x if norm is None else norm.x
        for start in range(0, len(linears), MAX_OUTPUTS):
            record = self._record(OpKind.LINEAR, x, norm)
            record.width = linears[0].in_width
            parts: list[Op] = [norm] if norm is not None and start == 0 else []
            for op in linears[start : start + MAX_OUTPUTS]:
                self._add_output(record, self._product(record, op, parts))
            self._append(record, (), *parts)
        self._buffers.done([x])

    def _product(self, record: OpRecord, op: ops.Linear, parts: list[Op]) -> OutputRecord:
        """Return the output of a product; adds the operations of that output to `parts`."""
        parts.append(op)
        output = _output(NONE, op.width, weight=self._matrices.place(op.weight))
        if op.bias is not None:
            output.bias = self._vectors.place(Vector(op.bias))
        name = op.output
        reader = self._only_reader(name)
        if isinstance(reader, ops.RMSNorm) and self._is_of_heads(reader):
            name = reader.output
            output.norm = self._vectors.place(Vector(reader.weight, reader.offset))
            output.head_dim, output.epsilon = reader.width // reader.num_groups, reader.epsilon
            self._absorbed.add(name)
            parts.append(reader)
            reader = self._only_reader(name)
        if isinstance(reader, ops.Rope):
            name, output.rope = reader.output, self._rope(reader)
            self._absorbed.add(name)
            parts.append(reader)
            reader = self._only_reader(name)
        if (
            isinstance(reader, ops.Attention)
            and name in (reader.k, reader.v)
            and record.layer in (NONE, reader.layer)
        ):
            record.layer = reader.layer
            output.store = Store.KEYS if name == reader.k else Store.VALUES
            self._stored.add(name)
        output.buffer = self._buffers.write(name, op.width)
        return output

    def _is_of_heads(self, norm: ops.RMSNorm) -> bool:
        """Whether a norm's groups are heads, so small that one thread can compute each."""
        dim = norm.width // norm.num_groups
        reader = self._only_reader(norm.output)
        return isinstance(reader, ops.Rope | ops.Attention) and reader.head_dim == dim

    def _gated(
        self, norm: ops.RMSNorm, gate: ops.Linear, up: ops.Linear, act: ops.GatedActivation
    ) -> None:
        record = self._record(OpKind.GATED, norm.x, norm)
        record.width, record.activation = gate.in_width, ACTIVATIONS[act.activation]
        buffer = self._buffers.write(act.output, act.width)
        for op in (gate, up):
            weight = self._matrices.place(op.weight)
            self._add_output(record, _output(buffer, act.width, weight=weight))
        self._append(record, [norm.x], norm, gate, up, act)

    def _linear_add(self, linear: ops.Linear, add: ops.Add) -> None:
        if self._buffers.reads_left[add.a] > 1:
            self._linears(None, [linear])
            self._single(add)
            return
        record = self._record(OpKind.LINEAR, linear.x, None)
        record.width = linear.in_width
        record.accumulate = 1
        buffer = self._buffers.take_over(add.output, add.a)
        weight = self._matrices.place(linear.weight)
        self._add_output(record, _output(buffer, linear.width, weight=weight))
        self._append(record, [linear.x, add.a], linear, add)

    def _mixture(self, op: ops.MixtureOfExperts, add: ops.Add | None) -> None:
        """Append a mixture of experts, and its sum with an earlier value."""
        if add is not None and self._buffers.reads_left[add.a] > 1:
            self._mixture(op, None)
            self._single(add)
            return
        record = self._record(OpKind.EXPERTS, op.x, None)
        record.y, record.width = self._buffers.of_value[op.scores], op.width
        record.first_expert, record.num_experts = len(self._experts), len(op.experts)
        record.num_used, record.normalize = op.num_used, int(op.normalize)
        record.activation = ACTIVATIONS[op.activation]
        for expert in op.experts:
            weights = (expert.gate, expert.up, expert.down)
            self._experts.append(ExpertRecord(*(self._matrices.place(name) for name in weights)))
        inputs, parts = list(op.inputs), (op,) if add is None else (op, add)
        if add is None:
            buffer = self._buffers.write(op.output, op.width)
        else:
            record.accumulate = 1
            buffer = self._buffers.take_over(add.output, add.a)
            inputs.append(add.a)
        self._add_output(record, _output(buffer, op.width))
        self._append(record, inputs, *parts)

    def _logits(self, norm: ops.RMSNorm | None, op: ops.Logits) -> None:
        x = op.x if norm is None else norm.x
        record = self._record(OpKind.LOGITS, x, norm)
        record.width, record.soft_cap = op.in_width, op.soft_cap or 0
        weight = self._matrices.place(op.weight)
        self._add_output(record, _output(NONE, op.width, weight=weight))
        self._append(record, [x], *([] if norm is None else [norm]), op)

    def _attention(self, op: ops.Attention) -> None:
        record = self._record(OpKind.ATTENTION, op.q, None)
        record.y, record.z = self._buffers.of_value[op.k], self._buffers.of_value[op.v]
        record.layer, record.num_heads, record.scale = op.layer, op.num_heads, op.scale
        record.window, record.soft_cap = min(op.window or 0, _MOST_TOKENS), op.soft_cap or 0
        stored = [name in self._stored for name in (op.k, op.v)]
        # Storing the one that is in the pages already a second time does no harm.
        record.is_stored = int(all(stored))
        buffer = self._buffers.write(op.output, op.width)
        self._add_output(record, _output(buffer, op.width))
        self._append(record, op.inputs, op)

    def _tap(self, name: str) -> None:
        record = self._record(OpKind.TAP, name, None)
        record.width = self._buffers.widths[record.x]
        record.tap = self._taps.index(name)
        self._append(record, ())

    def _record(self, kind: OpKind, x: str | None, norm: ops.RMSNorm | None) -> OpRecord:
        record = OpRecord(kind=kind, y=NONE, z=NONE, norm=NONE, layer=NONE, num_groups=1)
        record.precision = self._precision
        # With routers, the smallest difference in a product can change the choice of experts.
        if self._has_routers and kind in {OpKind.LINEAR, OpKind.GATED}:
            record.precision = Precision.PRECISE
        record.x = NONE if x is None else self._buffers.of_value[x]
        if norm is not None:
            record.norm = self._vectors.place(Vector(norm.weight, norm.offset))
            record.epsilon, record.num_groups = norm.epsilon, norm.num_groups
        return record

    def _append(self, record: OpRecord, inputs: Iterable[str], *parts: Op) -> None:
        """Append a record that runs `parts` and reads `inputs`."""
        self._records.append(record)
        self._parts.append(parts)
        self._buffers.done(inputs)

    @staticmethod
    def _add_output(record: OpRecord, output: OutputRecord) -> None:
        record.outputs[record.num_outputs] = output
        record.num_outputs += 1

    def _rope(self, op: ops.Rope) -> int:
        """Return the place of a rotation; equal ones share their angles."""
        angles = ops.Rope(
            "", "", 1, op.head_dim, op.inverse_frequencies, op.interleaved, op.magnitude
        )
        return self._ropes.place(angles)

    def _only_reader(self, name: str) -> Op | None:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._taps else None


def _output(buffer: int, width: int, weight: int = NONE, rope: int = NONE) -> OutputRecord:
    """Return an output that at most a rotation follows."""
    return OutputRecord(weight=weight, bias=NONE, buffer=buffer, width=width, norm=NONE, rope=rope)
