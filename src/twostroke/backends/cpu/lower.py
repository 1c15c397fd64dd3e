"""Lowers a Program to the flat list of records that the native executor runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from twostroke.backends.cpu.buffers import Buffers, parts_in_place
from twostroke.backends.cpu.fuse import fuse
from twostroke.backends.cpu.lowered import CpuLowered, Vector
from twostroke.backends.cpu.record_fields import (
    Collectives,
    check_heads,
    fields_of_attention,
    fields_of_convolution,
    fields_of_delta_rule,
    fields_of_heads,
    fields_of_join,
    fields_of_mamba2,
    fields_of_route,
    precision_of,
    shares_of,
)
from twostroke.backends.cpu.records import (
    ACTIVATIONS,
    NONE,
    ExpertRecord,
    ExpertShareKind,
    KvTarget,
    OpKind,
    OpRecord,
    OutputRecord,
)
from twostroke.core.errors import BackendError
from twostroke.core.options import DEFAULT_ACTIVATION_BITS
from twostroke.model.program import ops
from twostroke.model.program.sharding import RowParts, TermParts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.options import Bits
    from twostroke.model.program import Op, Program

T = TypeVar("T")

LOGIT_ROWS = 32  # rows of a chunk of logits; shared memory of ranks holds two chunks


def lower(
    program: Program,
    taps: Sequence[str] = (),
    *,
    activation_bits: Bits = DEFAULT_ACTIVATION_BITS,
    has_routers: bool | None = None,
) -> CpuLowered:
    """Lower a Program to the records that the native executor runs.

    `taps`: names of intermediate values that each step also returns. `activation_bits`: bits of the
    inputs of products with quantized weights, for all products or by name of the matrix. Inputs of
    products whose results reach routers stay precise. `has_routers`: whether the undivided Program
    has routers; needed if `program` is a rank's part.

    Raises:
        BackendError: a shape that the kernels cannot run.
    """
    check_heads(program)
    if has_routers is None:
        has_routers = any(isinstance(op, ops.MixtureOfExperts) for op in program.ops)
    return _CpuLowering(program, taps, activation_bits, has_routers=has_routers).lower()


class _CpuLowering:
    """Lowers one Program to native records, in a single pass over its fused operations."""

    def __init__(
        self, program: Program, taps: Sequence[str], bits: Bits, *, has_routers: bool
    ) -> None:
        self._runs = fuse(program, taps)
        self._taps = taps
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in op.inputs:
                self._readers.setdefault(name, []).append(op)
        reads = Counter({name: len(readers) for name, readers in self._readers.items()})
        self._buffers = Buffers(reads + Counter(taps), parts_in_place(program))
        self._matrices: dict[str, int] = {}
        self._vectors: dict[Vector, int] = {}
        self._ropes: dict[ops.Rope, int] = {}
        self._bits = bits
        self._has_routers = has_routers
        self._absorbed: set[str] = set()  # outputs of operations that a product's record includes
        self._stored: set[str] = set()  # keys and values that a product's record stores in pages
        self._experts: list[ExpertRecord] = []
        self._collectives = Collectives()
        self._records: list[OpRecord] = []
        self._parts: list[tuple[Op, ...]] = []

    def lower(self) -> CpuLowered:
        tapped: set[str] = set()
        for run in self._runs:
            self._lower_run(run)
            # Right after the value is written, before another value takes over the buffer.
            for name in self._taps:
                if name not in tapped and name in self._buffers.buffer_of_value:
                    tapped.add(name)
                    self._append(OpKind.TAP, (), [name], [], tap=self._taps.index(name))
        return CpuLowered(
            records=tuple(self._records),
            parts=tuple(self._parts),
            matrices=tuple(self._matrices),
            vectors=tuple(self._vectors),
            ropes=tuple(self._ropes),
            experts=tuple(self._experts),
            memories=tuple(self._buffers.memories),
            buffers=tuple(self._buffers.all),
            teams=tuple(self._collectives.teams),
            cuts=tuple(self._collectives.cuts),
            channels=tuple(self._collectives.channels),
        )

    def _lower_run(self, run: tuple[Op, ...]) -> None:  # noqa: C901, PLR0912 - a case for each run
        match run:
            case (op,) if op.output in self._absorbed:
                pass
            case (ops.Embed() as embed, *scale):
                factor = scale[0].factor if scale and isinstance(scale[0], ops.Scale) else 1.0
                fields = self._collectives.fields(self._gather_of_part(embed))
                self._emit(OpKind.EMBED, *run, weight=embed.table, factor=factor, **fields)
            case (*_, ops.Linear() as gate, ops.Linear() as up, ops.GatedActivation() as op):
                buffer = self._buffers.write(op.output, op.width)
                outputs = [self._output(buffer, op.width, part.weight) for part in (gate, up)]
                self._append(
                    OpKind.GATED,
                    run,
                    run[0].inputs,
                    outputs,
                    activation=ACTIVATIONS[op.activation],
                )
            case (ops.Linear() as linear, ops.Add()):
                self._emit(OpKind.LINEAR, *run, weight=linear.weight)
            case (*_, ops.Linear()):
                self._linears(run)
            case (*_, ops.Logits() as op):
                self._logits(op, run)
            case (ops.MixtureOfExperts() as op, *_):
                self._mixture(OpKind.EXPERTS, op, run, len(op.experts), shares=shares_of(op))
            case (ops.ExpertTerms() as op,):
                self._mixture(OpKind.TERMS, op, run, op.num_experts, own_expert=op.first_expert)
            case (ops.SumTerms() as op, *_):
                self._emit(
                    OpKind.SUM_TERMS,
                    *run,
                    num_experts=self._width_of(op.scores),
                    num_used=op.num_used,
                    shares=shares_of(op),
                )
            case (ops.Attention() as op,):
                # If only one of the two was stored, storing both again does no harm.
                is_stored = not op.stores or {op.k, op.v} <= self._stored
                fields = fields_of_attention(op) | {"first_head": op.first_head}
                sinks = self._vector(op.sinks)
                self._emit(OpKind.ATTENTION, op, is_stored=is_stored, norm=sinks, **fields)
            case (ops.SplitKvAttention() as op,):
                fields = self._collectives.fields_of_split_kv(op)
                fields |= fields_of_attention(op) | {"is_stored": op.reads_shared_kv}
                self._emit(OpKind.PIECES, op, norm=self._vector(op.sinks), **fields)
            case (ops.RMSNorm(), *_):
                self._emit(OpKind.NORM, *run)
            case (ops.Rope() as op,):
                self._emit(OpKind.ROPE, op, rope=self._rope(op))
            case (ops.GatedActivation() as op,):
                self._emit(OpKind.ACTIVATION, op, activation=ACTIVATIONS[op.activation])
            case (ops.ExternalInput() as op,):
                self._emit(OpKind.EXTERNAL_INPUT, op)
            case (ops.Add() as op,):
                self._emit(OpKind.ADD, op)
            case (op,):
                self._lower_other(op)
            case _:
                raise BackendError(f"The cpu backend has no kernel for {run}.")

    def _lower_other(self, op: Op) -> None:
        match op:
            case ops.Scale():
                self._emit(OpKind.SCALE, op, factor=op.factor, norm=self._vector(op.weight))
            case ops.Route():
                self._emit(OpKind.ROUTE, op, norm=self._vector(op.bias), **fields_of_route(op))
                self._records[-1].outputs[0].bias = self._vector(op.factors)
            case ops.GateRows():
                self._emit(OpKind.GATE_ROWS, op)
            case ops.ShortConvolution() | ops.GatedDeltaRule() | ops.Mamba2():
                self._recurrent(op)
            case ops.HeadLinear():
                self._head_products(op)
            case ops.Join():
                self._join(op)
            case ops.AllGather():
                self._gather(op)
            case ops.TakeColumns():
                self._buffers.view(op.output, op.x, op.first, op.width)
                self._buffers.done(op.inputs)
            case ops.Send():
                channel = self._collectives.channel(op)
                self._append(OpKind.SEND, (op,), op.inputs, [], channel=channel)
            case ops.Receive():
                self._emit(OpKind.RECEIVE, op, channel=self._collectives.channel(op))
            case _:
                raise BackendError(f"The cpu backend has no kernel for {op}.")

    def _recurrent(self, op: ops.ShortConvolution | ops.GatedDeltaRule | ops.Mamba2) -> None:
        """Append a record of an operation with a recurrent state."""
        match op:
            case ops.ShortConvolution():
                taps = _index_in(self._vectors, Vector(op.weight, is_transposed=True))
                self._emit(OpKind.CONVOLUTION, op, norm=taps, **fields_of_convolution(op))
                self._records[-1].outputs[0].bias = self._vector(op.bias)
            case ops.GatedDeltaRule():
                rates = self._vector(op.decay_rate)
                self._emit(OpKind.DELTA_RULE, op, norm=rates, **fields_of_delta_rule(op))
                output = self._records[-1].outputs[0]
                output.bias, output.head_dim = self._vector(op.decay_bias), op.value_dim
            case ops.Mamba2():
                rates = self._vector(op.decay_rate)
                self._emit(OpKind.MAMBA2, op, norm=rates, **fields_of_mamba2(op))
                output = self._records[-1].outputs[0]
                output.bias, output.head_dim = self._vector(op.step_bias), op.head_dim
                output.norm = self._vector(op.skip)

    def _emit(
        self,
        kind: OpKind,
        *run: Op,
        weight: str | None = None,
        rope: int = NONE,
        **fields: Any,
    ) -> None:
        """Append a native record that writes one value: the output of the last operation of `run`.

        If `run` ends with an Add, its output overwrites the earlier value in its buffer.
        """
        last = run[-1]
        if len(run) > 1 and isinstance(last, ops.Add):
            if not self._buffers.take_over(last.output, last.a):
                # Copies the earlier value to the sum's buffer, to which the record then adds.
                buffer = self._buffers.write(last.output, last.width)
                self._append(OpKind.COPY, (), [last.a], [self._output(buffer, last.width)])
            buffer = self._buffers.buffer_of_value[last.output]
            fields |= {"y": buffer} if kind is OpKind.NORM else {"accumulate": 1}
        else:
            buffer = self._buffers.write(last.output, last.width)
        output = self._output(buffer, last.width, weight, rope)
        self._append(kind, run, run[0].inputs, [output], **fields)

    def _append(
        self,
        kind: OpKind,
        run: tuple[Op, ...],
        reads: Sequence[str],
        outputs: Sequence[OutputRecord],
        gather: ops.AllGather | None = None,
        **fields: Any,
    ) -> None:
        """Append a native record that computes the operations `run` from the values `reads`."""
        buffers = [self._buffers.buffer_of_value[name] for name in reads]
        record = OpRecord(kind=kind, norm=NONE, layer=NONE, num_groups=1, team=NONE, first_cut=NONE)
        record.x, record.y, record.z = (*buffers, NONE, NONE, NONE)[:3]
        record.width = self._buffers.all[buffers[0]].width if buffers else run[0].width
        record.precision = precision_of(kind, run, self._bits, has_routers=self._has_routers)
        if run and isinstance(norm := run[0], ops.RMSNorm):
            record.norm = _index_in(self._vectors, Vector.of(norm))
            record.epsilon, record.num_groups = norm.epsilon, norm.num_groups
            record.is_wide = norm.is_wide
        for name, value in fields.items():
            setattr(record, name, value)
        record.num_outputs = len(outputs)
        record.outputs[: len(outputs)] = outputs
        self._records.append(record)
        self._parts.append(run)
        self._buffers.note(record, gather)
        self._buffers.done(reads)

    def _output(
        self, buffer: int, width: int, weight: str | None = None, rope: int = NONE
    ) -> OutputRecord:
        """Return the part of a native record for one output, without bias or norm."""
        index = NONE if weight is None else _index_in(self._matrices, weight)
        return OutputRecord(
            weight=index, bias=NONE, buffer=buffer, width=width, norm=NONE, rope=rope
        )

    def _linears(self, run: tuple[Op, ...]) -> None:
        """Append a record of matrix products that read the same input.

        The record also includes head norms, rotations and KV stores that follow a product.
        """
        parts: list[Op] = []
        outputs: list[OutputRecord] = []
        layer = NONE
        for op in run:
            parts.append(op)
            if not isinstance(op, ops.Linear):  # the norm before the products
                continue
            output = self._output(NONE, op.width, op.weight)
            if op.bias is not None:
                output.bias = _index_in(self._vectors, Vector(op.bias))
            name, reader = op.output, self._only_reader(op.output)
            if isinstance(reader, ops.RMSNorm) and self._is_of_heads(reader):
                output.norm = _index_in(self._vectors, Vector.of(reader))
                output.head_dim, output.epsilon = reader.width // reader.num_groups, reader.epsilon
                name, reader = self._absorb(reader, parts)
            if isinstance(reader, ops.Rope):
                output.rope = self._rope(reader)
                name, reader = self._absorb(reader, parts)
            if (
                isinstance(reader, ops.Attention)
                and name in (reader.k, reader.v)
                and layer in (NONE, reader.layer)
            ):
                layer = reader.layer
                output.store = KvTarget.KEYS if name == reader.k else KvTarget.VALUES
                self._stored.add(name)
            output.buffer = self._buffers.write(name, op.width)
            outputs.append(output)
        self._append(OpKind.LINEAR, tuple(parts), run[0].inputs, outputs, layer=layer)

    def _absorb(self, op: ops.RMSNorm | ops.Rope, parts: list[Op]) -> tuple[str, Op | None]:
        """Include a norm or rotation in the record of the matrix product before it.

        Returns the name of its output, and the operation that reads this output if only one does,
        else None.
        """
        self._absorbed.add(op.output)
        parts.append(op)
        return op.output, self._only_reader(op.output)

    def _is_of_heads(self, norm: ops.RMSNorm) -> bool:
        """Return whether a norm works on single attention heads, which one thread can compute."""
        dim = norm.width // norm.num_groups
        reader = self._only_reader(norm.output)
        return isinstance(reader, ops.Rope | ops.Attention) and reader.head_dim == dim

    def _mixture(
        self,
        kind: OpKind,
        op: ops.MixtureOfExperts | ops.ExpertTerms,
        run: tuple[Op, ...],
        num_experts: int,
        **fields: Any,
    ) -> None:
        first = len(self._experts)
        for expert in op.experts:
            matrices = [_index_in(self._matrices, name) for name in expert.matrices]
            biases = [self._vector(name) for name in expert.biases]
            self._experts.append(ExpertRecord(*matrices, *biases))
        if isinstance(op, ops.ExpertTerms) and op.scales_inputs:
            fields["shares"] = ExpertShareKind.OF_INPUTS
        fields |= {"num_used": op.num_used, "activation": ACTIVATIONS[op.activation]}
        fields |= {"num_experts": num_experts, "num_own": len(op.experts)}
        self._emit(kind, *run, first_expert=first, **fields)

    def _head_products(self, op: ops.HeadLinear) -> None:
        """Append a record of products with one matrix for each head.

        The heads' matrices get consecutive indices in the table of weights.
        """
        first = len(self._matrices)
        indices = [_index_in(self._matrices, name) for name in op.matrices]
        assert indices == list(range(first, first + len(indices)))
        self._emit(OpKind.HEAD_PRODUCTS, op, weight=op.matrices[0], **fields_of_heads(op))

    def _join(self, op: ops.Join) -> None:
        """Append a record that concatenates two values head by head, and rotates the result."""
        reader, rope = self._only_reader(op.output), NONE
        run: tuple[Op, ...] = (op,)
        if isinstance(reader, ops.Rope):
            rope, run = self._rope(reader), (op, reader)
            self._absorbed.add(reader.output)
        self._emit(OpKind.JOIN, *run, rope=rope, **fields_of_join(op))

    def _logits(self, op: ops.Logits, run: tuple[Op, ...]) -> None:
        """Append a record that computes logits.

        If this rank has a part of the vocabulary, the record also gathers the logits on rank 0.
        """
        fields: dict[str, Any] = {"soft_cap": op.soft_cap or 0}
        buffer = NONE
        if gather := self._gather_of_part(op):
            assert gather.root == 0
            self._buffers.gather(gather, num_rows=2 * LOGIT_ROWS)
            buffer = self._buffers.write(op.output, op.width)
            self._absorbed.add(gather.output)
            fields |= self._collectives.fields(gather)
            run = (*run, gather)
        output = self._output(buffer, op.width, op.weight)
        self._append(OpKind.LOGITS, run, run[0].inputs, [output], **fields)

    def _gather(self, op: ops.AllGather) -> None:
        """Append a record that gathers a value from all ranks of a team.

        This rank's part is copied, unless it was written in place.
        """
        if op.root is not None:  # of logits, and this rank has no part of the vocabulary
            buffer, _ = self._buffers.gather(op, num_rows=2 * LOGIT_ROWS)
            self._append(OpKind.LOGITS, (op,), (), [], **self._collectives.fields(op))
            self._records[-1].outputs[0] = self._output(buffer, 0)
            return
        buffer, is_there = self._buffers.gather(op)
        fields = self._collectives.fields(op)
        if isinstance(op.parts, TermParts):
            scores = self._buffers.buffer_of_value[op.parts.scores]
            fields |= {"y": scores, "num_used": op.parts.num_used}
            fields["num_experts"] = self._width_of(op.parts.scores)
        reads = () if is_there else op.inputs
        output = self._output(buffer, op.width)
        self._append(OpKind.GATHER, (op,), reads, [output], gather=op, width=op.width, **fields)
        if is_there:
            self._buffers.done(op.inputs)

    def _gather_of_part(self, op: Op) -> ops.AllGather | None:
        """Return the gather that reads the output of `op` as this rank's part; None without it.

        Gathers of divided rows are not returned.
        """
        for reader in self._readers.get(op.output, []):
            if isinstance(reader, ops.AllGather) and not isinstance(reader.parts, RowParts):
                return reader
        return None

    def _vector(self, name: str | None) -> int:
        """Return the index of a weight in the table of vectors; `NONE` for None."""
        return NONE if name is None else _index_in(self._vectors, Vector(name))

    def _width_of(self, name: str) -> int:
        return self._buffers.all[self._buffers.buffer_of_value[name]].width

    def _rope(self, op: ops.Rope) -> int:
        """Return the index of a rotary embedding; equal embeddings share their table of angles."""
        return _index_in(self._ropes, replace(op, output="", x="", num_heads=1))

    def _only_reader(self, name: str) -> Op | None:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._taps else None


def _index_in(table: dict[T, int], item: T) -> int:
    """Return the index of an item in a table; a new item is added with the next index."""
    return table.setdefault(item, len(table))
