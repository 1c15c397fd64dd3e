"""Lowers a Program to records of launches, about ten for each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from twostroke.backends.gpu.lowered import (
    Activate,
    AddNorm,
    Attend,
    BufferColumns,
    BufferType,
    Combine,
    DeviceBuffer,
    EmbedRows,
    External,
    GpuLowered,
    HeadProducts,
    JoinedHeads,
    MixExperts,
    Products,
    QkvSource,
    StoreKv,
    StoreLatents,
    route_ints,
)
from twostroke.core.errors import BackendError
from twostroke.core.frozen import Frozen
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Collection

    from twostroke.backends.gpu.lowered import Record
    from twostroke.model.program import Op, Program

_MAX_HEAD_DIM = 512


def lower(program: Program, taps: Collection[str] = ()) -> GpuLowered:
    """Lower a Program to records of kernel launches.

    `taps`: names of intermediate values that each step also returns.

    Raises:
        BackendError: there is no kernel for an operation, a shape or a tap.
    """
    return _GpuLowering(program, taps).lower()


class _Sum(Frozen):
    """An addition to a residual stream that is not emitted yet; a later kernel can include it.

    The sum is `delta`, normed by `post`, plus the stream `residual`.
    """

    output: str
    residual: int
    delta: BufferColumns
    post: ops.RMSNorm | None
    factor: str | None = None


class _GpuLowering:
    """Lowers one Program to records of kernel launches, in a single pass.

    Sums, norms and rotations can be included in later kernels. They are pending, not emitted, until
    their value is read.
    """

    def __init__(self, program: Program, taps: Collection[str]) -> None:
        self._program, self._taps = program, taps
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in dict.fromkeys(op.inputs):
                self._readers.setdefault(name, []).append(op)
        self._buffers: list[DeviceBuffer] = []
        self._columns: dict[str, BufferColumns] = {}
        self._sum: _Sum | None = None
        self._post: dict[
            str, tuple[BufferColumns, ops.RMSNorm]
        ] = {}  # pending norms of the delta of a sum
        self._heads: dict[str, QkvSource] = {}  # pending norms and rotations of heads
        self._joined: dict[str, JoinedHeads] = {}
        self._routes: dict[str, tuple[BufferColumns, ops.Route]] = {}
        self._elements: dict[BufferColumns, int] = {}
        self._tapped: dict[str, int] = {}
        self._records: list[Record] = []
        self._parts: list[tuple[Op, ...]] = []
        self._pending_ops: list[Op] = []  # operations that the next record computes

    def lower(self) -> GpuLowered:
        done: set[str] = set()
        for i, op in enumerate(self._program.ops):
            if op.output in done:
                continue
            if isinstance(op, ops.Linear):
                done |= self._products(self._program.ops[i:])
            else:
                self._pending_ops.append(op)
                self._lower_op(op)
            self._tap()
        logits = self._program.ops[-1]
        assert isinstance(logits, ops.Logits)
        last = self._element(logits.x)
        self._buffers[last] = DeviceBuffer(
            self._buffers[last].width, BufferType.ELEMENT, is_kept=True
        )
        self._tap()
        missing = set(self._taps) - set(self._tapped) - {logits.output}
        if missing:
            self._refuse(f"keeps no value {min(missing)}")
        return GpuLowered(
            records=tuple(self._records),
            parts=tuple(self._parts),
            buffers=tuple(self._buffers),
            taps=self._tapped,
            last=last,
            logits=logits,
        )

    def _lower_op(self, op: Op) -> None:  # noqa: C901, PLR0912 - a case for each operation
        match op:
            case ops.Embed():
                self._embed(op)
            case ops.ExternalInput():
                output = self._write(op.output, op.width, BufferType.STREAM)
                self._emit(External(output))
            case ops.RMSNorm():
                self._norm(op)
            case ops.Rope():
                self._rope(op)
            case ops.Join():
                columns, rest = self._columns_of(op.a), self._source(op.b)
                self._joined[op.output] = JoinedHeads(op, columns, rest)
            case ops.HeadLinear():
                x = self._columns_of(op.x)
                if x.bias is not None:
                    x = BufferColumns(self._element_of(x), 0, x.width)
                self._emit(
                    HeadProducts(x, op, self._write(op.output, op.width, BufferType.ELEMENT))
                )
            case ops.LatentAttention():
                self._latent_attention(op)
            case ops.Attention():
                self._attention(op)
            case ops.GatedActivation():
                self._check_activation(op.activation)
                gate, up = self._columns_of(op.gate), self._columns_of(op.up)
                output = self._write(op.output, op.width, BufferType.ELEMENT)
                self._emit(Activate(gate, up, op.activation, output))
            case ops.Scale() if op.output in self._columns:
                pass  # was included in the embedding
            case ops.Scale():
                self._scale(op)
            case ops.TakeColumns():
                input_columns = self._columns_of(op.x)
                assert input_columns.bias is None, "a bias would have to be cut, too"
                self._columns[op.output] = BufferColumns(
                    input_columns.buffer, input_columns.first + op.first, op.width
                )
            case ops.Add():
                self._add(op)
            case ops.Logits():
                self._pending_ops.pop()  # logits are launched after the step
            case ops.MixtureOfExperts():
                self._mix(op)
            case ops.Route():
                self._routes[op.output] = self._columns_of(op.x), op
            case _:
                self._refuse("runs a model on one GPU")

    def _refuse(self, reason: str) -> NoReturn:
        message = f"{self._program.name}: the gpu backend {reason}"
        raise BackendError(f"{message}; `--backend torch` does.")

    def _embed(self, op: ops.Embed) -> None:
        reader = self._only_reader(op.output)
        if isinstance(reader, ops.Scale):
            self._pending_ops.append(reader)
            output = self._write(reader.output, op.width, BufferType.STREAM)
            self._emit(EmbedRows(op.table, reader.factor, output))
        else:
            output = self._write(op.output, op.width, BufferType.STREAM)
            self._emit(EmbedRows(op.table, 1.0, output))

    def _norm(self, op: ops.RMSNorm) -> None:
        reader = self._only_reader(op.output)
        is_of_heads = isinstance(reader, ops.Rope | ops.Attention) and reader.head_dim == op.grain
        if is_of_heads or (isinstance(reader, ops.Join) and reader.b_width == op.grain):
            self._heads[op.output] = QkvSource(self._columns_of(op.x), op)
            return
        if op.num_groups > 1:
            self._norm_groups(op)
            return
        if self._sum is not None and self._sum.output == op.x:
            self._emit_sum(self._write(op.output, op.width, BufferType.ELEMENT), op)
            return
        columns = self._columns_of(op.x)
        if isinstance(reader, ops.Add) and self._stream_of(reader, other=op.output) is not None:
            self._post[op.output] = columns, op
            return
        output = self._write(op.output, op.width, BufferType.ELEMENT)
        if self._is_stream(columns):
            self._emit(AddNorm(columns.buffer, norm=op, output=output))
        else:
            self._emit(AddNorm(delta=columns, norm=op, output=output))

    def _norm_groups(self, op: ops.RMSNorm) -> None:
        columns = self._columns_of(op.x)
        if columns.bias is not None:
            columns = BufferColumns(self._element_of(columns), 0, columns.width)
        output = self._write(op.output, op.width, BufferType.ELEMENT)
        self._emit(AddNorm(delta=columns, norm=op, output=output))

    def _scale(self, op: ops.Scale) -> None:
        """Lower a scaling: make its factor part of the pending sum, or emit a separate record."""
        pending_sum = self._sum
        is_last = (
            pending_sum is not None and pending_sum.output == op.x and self._only_reader(op.x) is op
        )
        if (
            pending_sum is not None
            and is_last
            and op.weight
            and op.factor == 1
            and not pending_sum.factor
        ):
            self._sum = replace(pending_sum, output=op.output, factor=op.weight)
            return
        columns = self._columns_of(op.x)
        output = self._write(op.output, op.width, BufferType.STREAM)
        self._emit(Combine(columns, output, op.factor, weight=op.weight))

    def _add(self, op: ops.Add) -> None:
        """Lower an addition: make it the pending sum if it adds to a residual stream.

        Any other addition is emitted as a separate record.
        """
        if self._sum is not None:
            self._emit_sum()
        for name, other in ((op.a, op.b), (op.b, op.a)):
            if self._stream_of(op, other) == name:
                delta, post = self._post.pop(other, None) or (self._columns_of(other), None)
                self._sum = _Sum(op.output, self._columns[name].buffer, delta, post)
                return
        a, b = self._columns_of(op.a), self._columns_of(op.b)
        if b.bias is not None:
            a, b = b, a
        if b.bias is not None:
            b = BufferColumns(self._element_of(b), 0, b.width)
        self._emit(Combine(a, self._write(op.output, op.width, BufferType.STREAM), 1.0, b))

    def _stream_of(self, op: ops.Add, other: str) -> str | None:
        """Return the operand of an addition that is a residual stream which the sum may overwrite.

        None if there is no such operand. `other` is the operand that is added to the stream.
        """
        if op.a == op.b:
            return None
        name = op.a if op.b == other else op.b
        columns = self._columns.get(name)
        is_last = self._readers[name][-1] is op
        return name if columns is not None and self._is_stream(columns) and is_last else None

    def _emit_sum(self, output: int | None = None, norm: ops.RMSNorm | None = None) -> None:
        """Emit a record for the pending sum of the residual stream.

        With `output`, the record also writes the sum, normed by `norm`, to this buffer in the
        element type.
        """
        pending_sum, self._sum = self._sum, None
        assert pending_sum is not None
        width = self._buffers[pending_sum.residual].width
        self._columns[pending_sum.output] = BufferColumns(pending_sum.residual, 0, width)
        self._emit(
            AddNorm(
                residual=pending_sum.residual,
                delta=pending_sum.delta,
                post=pending_sum.post,
                factor=pending_sum.factor,
                norm=norm,
                output=output,
            )
        )

    def _products(self, rest: tuple[Op, ...]) -> set[str]:
        """Lower the matrix products at the beginning of `rest` that read the same input.

        Returns the names of their outputs.
        """
        first = rest[0]
        assert isinstance(first, ops.Linear)
        x = self._element(first.x)
        linears: list[ops.Linear] = []
        for op in rest:
            if not isinstance(op, ops.Linear) or op.x != first.x:
                break
            linears.append(op)
        self._pending_ops += linears
        kind = (
            BufferType.SCORES
            if any(self._are_scores(op.output) for op in linears)
            else BufferType.PARTS
        )
        self._buffers.append(DeviceBuffer(sum(op.width for op in linears), kind))
        output, column = len(self._buffers) - 1, 0
        for op in linears:
            self._columns[op.output] = BufferColumns(output, column, op.width, op.bias)
            column += op.width
        weights, widths = tuple(op.weight for op in linears), tuple(op.width for op in linears)
        self._emit(Products(x, weights, widths, output))
        return {op.output for op in linears}

    def _are_scores(self, name: str) -> bool:
        """Return whether a value is used to choose experts; then it must stay float32."""
        return any(
            isinstance(reader, ops.MixtureOfExperts | ops.Route)
            or (isinstance(reader, ops.Scale) and self._are_scores(reader.output))
            for reader in self._readers[name]
        )

    def _rope(self, op: ops.Rope) -> None:
        if not isinstance(self._only_reader(op.output), ops.Attention):
            self._refuse("rotates nothing but queries and keys")
        if op.x in self._joined:
            self._joined[op.output] = replace(self._joined.pop(op.x), rope=op)
            return
        self._check_heads(op.head_dim)
        source = self._source(op.x)
        self._heads[op.output] = QkvSource(source.columns, source.norm, op)

    def _attention(self, op: ops.Attention) -> None:
        self._check_heads(op.head_dim)
        if op.num_heads % op.num_kv_heads or op.first_head:
            self._refuse("divides heads evenly")
        if op.sinks is not None:
            self._refuse("does not compute attention sinks yet")
        if op.is_chunked:
            self._refuse("does not compute chunked attention yet")
        names = (op.q, op.k, op.v) if op.stores else (op.q,)
        sources = tuple([self._source(name) for name in names])
        self._attend(op, StoreKv(sources, op, self._new(op.width, BufferType.ELEMENT)))

    def _latent_attention(self, op: ops.LatentAttention) -> None:
        queries, keys = self._joined.pop(op.q, None), self._joined.pop(op.k, None)
        if queries is None or keys is None or None in (queries.rope, keys.rope, keys.rest.norm):
            self._refuse("has latent attention to a norm beside a rotated key alone")
        all_columns = queries.columns, queries.rest.columns, keys.columns, keys.rest.columns
        if queries.rest.norm is not None or any(
            columns.bias is not None for columns in all_columns
        ):
            self._refuse("has latent attention without biases")
        if op.window is not None or op.num_kv_heads > 1:
            self._refuse("has latent attention to all that was before")
        for width in (op.rotated, op.head_dim - op.rotated):
            self._check_heads(width)
        self._attend(op, StoreLatents(queries, keys, op, self._new(op.width, BufferType.ELEMENT)))

    def _attend(self, op: ops.Attention, store: StoreKv | StoreLatents) -> None:
        self._pending_ops.pop()
        self._emit(store)
        self._pending_ops.append(op)
        self._emit(Attend(store.output, op, self._write(op.output, op.width, BufferType.ELEMENT)))

    def _mix(self, op: ops.MixtureOfExperts) -> None:
        if any(bias is not None for bias in op.experts[0].biases):
            self._refuse("does not add biases of experts yet")
        if op.scales_inputs:
            self._refuse("does not scale the inputs of experts yet")
        self._check_activation(op.activation)
        x = self._element(op.x)
        scores, route = self._routes.pop(op.scores, None) or (self._columns_of(op.scores), None)
        routes = self._new(route_ints(op.num_used), BufferType.STREAM)
        self._buffers.append(DeviceBuffer(2 * op.ffn_width, BufferType.LINES, lines=op.num_used))
        gated = self._new(op.num_used * op.ffn_width, BufferType.ELEMENT)
        self._buffers.append(DeviceBuffer(op.width, BufferType.LINES, lines=op.num_used))
        output = gated + 1
        self._columns[op.output] = BufferColumns(output, 0, op.width)
        self._emit(
            MixExperts(
                x=x,
                scores=scores,
                op=op,
                route=route,
                routes=routes,
                hidden=routes + 1,
                gated=gated,
                output=output,
            )
        )

    def _check_activation(self, activation: ops.Activation) -> None:
        if activation is ops.Activation.SWIGLU_OAI:
            self._refuse(f"does not compute the activation {activation.value} yet")

    def _check_heads(self, head_dim: int) -> None:
        if head_dim > _MAX_HEAD_DIM or head_dim % 8:
            reason = f"runs heads of up to {_MAX_HEAD_DIM} values, multiples of 8, not {head_dim}"
            self._refuse(reason)

    def _source(self, name: str) -> QkvSource:
        return self._heads.pop(name, None) or QkvSource(self._columns_of(name))

    def _columns_of(self, name: str) -> BufferColumns:
        """Return the buffer columns of a value; first emit a pending sum or norm for it."""
        if self._sum is not None and self._sum.output == name:
            self._emit_sum()
        if name in self._post:
            columns, norm = self._post.pop(name)
            output = self._write(name, norm.width, BufferType.ELEMENT)
            self._emit(AddNorm(delta=columns, norm=norm, output=output))
        if name in self._heads or name in self._joined:
            self._refuse("norms and rotates heads for attention alone")
        return self._columns[name]

    def _element(self, name: str) -> int:
        """Return a buffer that holds a value in the element type, as input of matrix products."""
        if self._sum is not None and self._sum.output == name:
            output = self._new(self._buffers[self._sum.residual].width, BufferType.ELEMENT)
            self._emit_sum(output)
            return output
        return self._element_of(self._columns_of(name))

    def _element_of(self, columns: BufferColumns) -> int:
        buffer = self._buffers[columns.buffer]
        if buffer.kind is BufferType.ELEMENT and columns == BufferColumns(
            columns.buffer, 0, buffer.width
        ):
            return columns.buffer
        if columns in self._elements:
            return self._elements[columns]
        element = self._new(columns.width, BufferType.ELEMENT)
        self._emit(Combine(columns, element))
        if buffer.kind is not BufferType.STREAM:  # the values of a stream change later
            self._elements[columns] = element
        return element

    def _is_stream(self, columns: BufferColumns) -> bool:
        buffer = self._buffers[columns.buffer]
        return buffer.kind is BufferType.STREAM and columns == BufferColumns(
            columns.buffer, 0, buffer.width
        )

    def _write(self, name: str, width: int, kind: BufferType) -> int:
        buffer = self._new(width, kind)
        self._columns[name] = BufferColumns(buffer, 0, width)
        return buffer

    def _new(self, width: int, kind: BufferType) -> int:
        self._buffers.append(DeviceBuffer(width, kind))
        return len(self._buffers) - 1

    def _tap(self) -> None:
        """Emit copies of the values that steps must return, before later values overwrite them.

        Values that do not exist yet are copied by later calls.
        """
        for name in self._taps:
            if name in self._columns and name not in self._tapped:
                columns = self._columns[name]
                self._buffers.append(DeviceBuffer(columns.width, BufferType.STREAM, is_kept=True))
                self._tapped[name] = len(self._buffers) - 1
                self._emit(Combine(columns, self._tapped[name]))

    def _emit(self, record: Record) -> None:
        self._records.append(record)
        self._parts.append(tuple(self._pending_ops))
        self._pending_ops = []

    def _only_reader(self, name: str) -> Op | None:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._taps else None
