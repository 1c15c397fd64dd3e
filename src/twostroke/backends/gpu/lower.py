"""Lowers a Program to launches: some ten for each layer, whatever its family asks for."""

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
    """Lower a Program whose values `taps` leave the step.

    Raises:
        BackendError: an operation, a shape or a tap for which there is no kernel.
    """
    return _GpuLowering(program, taps).lower()


class _Sum(Frozen):
    """A sum that its first reader computes: `delta`, perhaps normed, goes to a residual stream."""

    output: str
    residual: int
    delta: BufferColumns
    post: ops.RMSNorm | None
    factor: str | None = None


class _GpuLowering:
    """One pass over the Program; what a later kernel can do with others waits for it."""

    def __init__(self, program: Program, taps: Collection[str]) -> None:
        self._program, self._taps = program, taps
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in dict.fromkeys(op.inputs):
                self._readers.setdefault(name, []).append(op)
        self._buffers: list[DeviceBuffer] = []
        self._places: dict[str, BufferColumns] = {}
        self._sum: _Sum | None = None
        self._post: dict[str, tuple[BufferColumns, ops.RMSNorm]] = {}  # norms that go into a sum
        self._heads: dict[str, QkvSource] = {}  # norms and rotations that attention's kernel does
        self._joined: dict[str, JoinedHeads] = {}
        self._routes: dict[str, tuple[BufferColumns, ops.Route]] = {}
        self._elements: dict[BufferColumns, int] = {}
        self._tapped: dict[str, int] = {}
        self._records: list[Record] = []
        self._parts: list[tuple[Op, ...]] = []
        self._waiting: list[Op] = []  # operations that the next records do

    def lower(self) -> GpuLowered:
        done: set[str] = set()
        for i, op in enumerate(self._program.ops):
            if op.output in done:
                continue
            if isinstance(op, ops.Linear):
                done |= self._products(self._program.ops[i:])
            else:
                self._waiting.append(op)
                self._lower_op(op)
            self._tap()
        logits = self._program.ops[-1]
        assert isinstance(logits, ops.Logits)
        last = self._element(logits.x)
        self._buffers[last] = DeviceBuffer(self._buffers[last].width, BufferType.ELEMENT, kept=True)
        self._tap()
        missing = set(self._taps) - set(self._tapped) - {logits.output}
        if missing:
            self._refuse(f"keeps no value {min(missing)}")
        return GpuLowered(
            tuple(self._records),
            tuple(self._parts),
            tuple(self._buffers),
            self._tapped,
            last,
            logits,
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
                place, rest = self._place(op.a), self._source(op.b)
                self._joined[op.output] = JoinedHeads(op, place, rest)
            case ops.HeadLinear():
                x = self._place(op.x)
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
                gate, up = self._place(op.gate), self._place(op.up)
                output = self._write(op.output, op.width, BufferType.ELEMENT)
                self._emit(Activate(gate, up, op.activation, output))
            case ops.Scale() if op.output in self._places:
                pass  # done with the embedding
            case ops.Scale():
                self._scale(op)
            case ops.TakeColumns():
                whole = self._place(op.x)
                assert whole.bias is None, "a bias would have to be cut, too"
                self._places[op.output] = BufferColumns(
                    whole.buffer, whole.first + op.first, op.width
                )
            case ops.Add():
                self._add(op)
            case ops.Logits():
                self._waiting.pop()  # after the step
            case ops.MixtureOfExperts():
                self._mix(op)
            case ops.Route():
                self._routes[op.output] = self._place(op.x), op
            case _:
                self._refuse("runs a model on one GPU")

    def _refuse(self, reason: str) -> NoReturn:
        message = f"{self._program.name}: the gpu backend {reason}"
        raise BackendError(f"{message}; `--backend torch` does.")

    def _embed(self, op: ops.Embed) -> None:
        reader = self._only_reader(op.output)
        if isinstance(reader, ops.Scale):
            self._waiting.append(reader)
            output = self._write(reader.output, op.width, BufferType.STREAM)
            self._emit(EmbedRows(op.table, reader.factor, output))
        else:
            output = self._write(op.output, op.width, BufferType.STREAM)
            self._emit(EmbedRows(op.table, 1.0, output))

    def _norm(self, op: ops.RMSNorm) -> None:
        reader = self._only_reader(op.output)
        is_of_heads = isinstance(reader, ops.Rope | ops.Attention) and reader.head_dim == op.grain
        if is_of_heads or (isinstance(reader, ops.Join) and reader.b_width == op.grain):
            self._heads[op.output] = QkvSource(self._place(op.x), op)
            return
        if op.num_groups > 1:
            self._norm_groups(op)
            return
        if self._sum is not None and self._sum.output == op.x:
            self._add_now(self._write(op.output, op.width, BufferType.ELEMENT), op)
            return
        place = self._place(op.x)
        if isinstance(reader, ops.Add) and self._stream_of(reader, other=op.output) is not None:
            self._post[op.output] = place, op
            return
        output = self._write(op.output, op.width, BufferType.ELEMENT)
        if self._is_stream(place):
            self._emit(AddNorm(place.buffer, norm=op, output=output))
        else:
            self._emit(AddNorm(delta=place, norm=op, output=output))

    def _norm_groups(self, op: ops.RMSNorm) -> None:
        place = self._place(op.x)
        if place.bias is not None:
            place = BufferColumns(self._element_of(place), 0, place.width)
        output = self._write(op.output, op.width, BufferType.ELEMENT)
        self._emit(AddNorm(delta=place, norm=op, output=output))

    def _scale(self, op: ops.Scale) -> None:
        """Let the sum before it be scaled as it is added, or scale now."""
        found = self._sum
        is_last = found is not None and found.output == op.x and self._only_reader(op.x) is op
        if found is not None and is_last and op.weight and op.factor == 1 and not found.factor:
            self._sum = replace(found, output=op.output, factor=op.weight)
            return
        place = self._place(op.x)
        output = self._write(op.output, op.width, BufferType.STREAM)
        self._emit(Combine(place, output, op.factor, weight=op.weight))

    def _add(self, op: ops.Add) -> None:
        """Let the next norm add to a stream that nothing else reads; else add now."""
        if self._sum is not None:
            self._add_now()
        for name, other in ((op.a, op.b), (op.b, op.a)):
            if self._stream_of(op, other) == name:
                delta, post = self._post.pop(other, None) or (self._place(other), None)
                self._sum = _Sum(op.output, self._places[name].buffer, delta, post)
                return
        a, b = self._place(op.a), self._place(op.b)
        if b.bias is not None:
            a, b = b, a
        if b.bias is not None:
            b = BufferColumns(self._element_of(b), 0, b.width)
        self._emit(Combine(a, self._write(op.output, op.width, BufferType.STREAM), 1.0, b))

    def _stream_of(self, op: ops.Add, other: str) -> str | None:
        """Return the sum's operand that is not the `other`, if the sum can take its place."""
        if op.a == op.b:
            return None
        name = op.a if op.b == other else op.b
        place = self._places.get(name)
        is_last = self._readers[name][-1] is op
        return name if place is not None and self._is_stream(place) and is_last else None

    def _add_now(self, output: int | None = None, norm: ops.RMSNorm | None = None) -> None:
        """Compute the sum, and write it to an output in the element type, perhaps normed."""
        found, self._sum = self._sum, None
        assert found is not None
        width = self._buffers[found.residual].width
        self._places[found.output] = BufferColumns(found.residual, 0, width)
        given = found.residual, found.delta, found.post, found.factor
        self._emit(AddNorm(*given, norm, output))

    def _products(self, rest: tuple[Op, ...]) -> set[str]:
        """Lower the products at the beginning of `rest` that read one value; return their names."""
        first = rest[0]
        assert isinstance(first, ops.Linear)
        x = self._element(first.x)
        found: list[ops.Linear] = []
        for op in rest:
            if not isinstance(op, ops.Linear) or op.x != first.x:
                break
            found.append(op)
        self._waiting += found
        kind = (
            BufferType.SCORES
            if any(self._are_scores(op.output) for op in found)
            else BufferType.PARTS
        )
        self._buffers.append(DeviceBuffer(sum(op.width for op in found), kind))
        output, column = len(self._buffers) - 1, 0
        for op in found:
            self._places[op.output] = BufferColumns(output, column, op.width, op.bias)
            column += op.width
        weights, widths = tuple(op.weight for op in found), tuple(op.width for op in found)
        self._emit(Products(x, weights, widths, output))
        return {op.output for op in found}

    def _are_scores(self, name: str) -> bool:
        """Whether a value chooses experts."""
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
        self._heads[op.output] = QkvSource(source.place, source.norm, op)

    def _attention(self, op: ops.Attention) -> None:
        self._check_heads(op.head_dim)
        if op.num_heads % op.num_kv_heads or op.first_head:
            self._refuse("divides heads evenly")
        names = (op.q, op.k, op.v) if op.stores else (op.q,)
        sources = tuple([self._source(name) for name in names])
        self._attend(op, StoreKv(sources, op, self._new(op.width, BufferType.ELEMENT)))

    def _latent_attention(self, op: ops.LatentAttention) -> None:
        queries, keys = self._joined.pop(op.q, None), self._joined.pop(op.k, None)
        if queries is None or keys is None or None in (queries.rope, keys.rope, keys.rest.norm):
            self._refuse("has latent attention to a norm beside a rotated key alone")
        places = queries.place, queries.rest.place, keys.place, keys.rest.place
        if queries.rest.norm is not None or any(place.bias is not None for place in places):
            self._refuse("has latent attention without biases")
        if op.window is not None or op.num_kv_heads > 1:
            self._refuse("has latent attention to all that was before")
        for width in (op.rotated, op.head_dim - op.rotated):
            self._check_heads(width)
        self._attend(op, StoreLatents(queries, keys, op, self._new(op.width, BufferType.ELEMENT)))

    def _attend(self, op: ops.Attention, store: StoreKv | StoreLatents) -> None:
        self._waiting.pop()
        self._emit(store)
        self._waiting.append(op)
        self._emit(Attend(store.output, op, self._write(op.output, op.width, BufferType.ELEMENT)))

    def _mix(self, op: ops.MixtureOfExperts) -> None:
        x = self._element(op.x)
        scores, route = self._routes.pop(op.scores, None) or (self._place(op.scores), None)
        routes = self._new(route_ints(op.num_used), BufferType.STREAM)
        self._buffers.append(DeviceBuffer(2 * op.ffn_width, BufferType.LINES, lines=op.num_used))
        gated = self._new(op.num_used * op.ffn_width, BufferType.ELEMENT)
        self._buffers.append(DeviceBuffer(op.width, BufferType.LINES, lines=op.num_used))
        output = gated + 1
        self._places[op.output] = BufferColumns(output, 0, op.width)
        self._emit(MixExperts(x, scores, op, route, routes, routes + 1, gated, output))

    def _check_heads(self, head_dim: int) -> None:
        if head_dim > _MAX_HEAD_DIM or head_dim % 8:
            reason = f"runs heads of up to {_MAX_HEAD_DIM} values, multiples of 8, not {head_dim}"
            self._refuse(reason)

    def _source(self, name: str) -> QkvSource:
        return self._heads.pop(name, None) or QkvSource(self._place(name))

    def _place(self, name: str) -> BufferColumns:
        """Return where a value is, computing what waits for it."""
        if self._sum is not None and self._sum.output == name:
            self._add_now()
        if name in self._post:
            place, norm = self._post.pop(name)
            output = self._write(name, norm.width, BufferType.ELEMENT)
            self._emit(AddNorm(delta=place, norm=norm, output=output))
        if name in self._heads or name in self._joined:
            self._refuse("norms and rotates heads for attention alone")
        return self._places[name]

    def _element(self, name: str) -> int:
        """Return the buffer of a value as products read it."""
        if self._sum is not None and self._sum.output == name:
            output = self._new(self._buffers[self._sum.residual].width, BufferType.ELEMENT)
            self._add_now(output)
            return output
        return self._element_of(self._place(name))

    def _element_of(self, place: BufferColumns) -> int:
        buffer = self._buffers[place.buffer]
        if buffer.kind is BufferType.ELEMENT and place == BufferColumns(
            place.buffer, 0, buffer.width
        ):
            return place.buffer
        if place in self._elements:
            return self._elements[place]
        found = self._new(place.width, BufferType.ELEMENT)
        self._emit(Combine(place, found))
        if buffer.kind is not BufferType.STREAM:  # whose values change
            self._elements[place] = found
        return found

    def _is_stream(self, place: BufferColumns) -> bool:
        buffer = self._buffers[place.buffer]
        return buffer.kind is BufferType.STREAM and place == BufferColumns(
            place.buffer, 0, buffer.width
        )

    def _write(self, name: str, width: int, kind: BufferType) -> int:
        buffer = self._new(width, kind)
        self._places[name] = BufferColumns(buffer, 0, width)
        return buffer

    def _new(self, width: int, kind: BufferType) -> int:
        self._buffers.append(DeviceBuffer(width, kind))
        return len(self._buffers) - 1

    def _tap(self) -> None:
        """Copy tapped values that are there, before others take their place."""
        for name in self._taps:
            if name in self._places and name not in self._tapped:
                place = self._places[name]
                self._buffers.append(DeviceBuffer(place.width, BufferType.STREAM, kept=True))
                self._tapped[name] = len(self._buffers) - 1
                self._emit(Combine(place, self._tapped[name]))

    def _emit(self, record: Record) -> None:
        self._records.append(record)
        self._parts.append(tuple(self._waiting))
        self._waiting = []

    def _only_reader(self, name: str) -> Op | None:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._taps else None
