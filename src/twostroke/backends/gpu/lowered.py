"""A Program as launches over buffers, before there is memory for them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.model.program import Activation, Op, ops


class BufferType(Enum):
    """What a buffer holds.

    A float32 stream, input of products, sums in parts, such sums that stay float32 with many rows,
    or lines of sums that are not divided.
    """

    STREAM = "stream"
    ELEMENT = "element"
    PARTS = "parts"
    SCORES = "scores"
    LINES = "lines"


class DeviceBuffer(Frozen):
    """Rows of `width` values; one that is `kept` is read after the step.

    A row of LINES has several `lines`, whose sum is its value.
    """

    width: int
    kind: BufferType
    kept: bool = False
    lines: int = 1


class BufferColumns(Frozen):
    """Columns of a buffer that hold a value, to which its reader adds the `bias`."""

    buffer: int
    first: int
    width: int
    bias: str | None = None


class QkvSource(Frozen):
    """Queries, keys or values, whose reader norms and rotates each head."""

    place: BufferColumns
    norm: ops.RMSNorm | None = None
    rope: ops.Rope | None = None


class EmbedRows(Frozen):
    """Rows of the table, times the factor."""

    table: str
    factor: float
    output: int


class External(Frozen):
    """Values that come with the step."""

    output: int


class AddNorm(Frozen):
    """`residual = (residual + post(delta)) * factor`, `output = norm(residual)`.

    As far as there are such; without a norm the output is a copy. `factor` names one number.
    """

    residual: int | None = None
    delta: BufferColumns | None = None
    post: ops.RMSNorm | None = None
    factor: str | None = None
    norm: ops.RMSNorm | None = None
    output: int | None = None


class Products(Frozen):
    """Products of one input with matrices; each writes its columns of the output."""

    x: int
    weights: tuple[str, ...]
    widths: tuple[int, ...]
    output: int


class HeadProducts(Frozen):
    """Products of each head's values with a matrix of its own."""

    x: BufferColumns
    op: ops.HeadLinear
    output: int


class JoinedHeads(Frozen):
    """Heads of which each is some values at a place, rotated, then those of `rest`."""

    op: ops.Join
    place: BufferColumns
    rest: QkvSource
    rope: ops.Rope | None = None


class StoreKv(Frozen):
    """Queries ready for attention, keys and values in the pages.

    Where these are other layers' there are queries alone.
    """

    sources: tuple[QkvSource, ...]
    op: ops.Attention
    output: int


class StoreLatents(Frozen):
    """Queries ready for latent attention, keys in the pages."""

    queries: JoinedHeads
    keys: JoinedHeads
    op: ops.LatentAttention
    output: int


class Attend(Frozen):
    """Attention over the pages."""

    q: int
    op: ops.Attention
    output: int


class Activate(Frozen):
    """`activation(gate) * up`."""

    gate: BufferColumns
    up: BufferColumns
    activation: Activation
    output: int


class MixExperts(Frozen):
    """A mixture of experts: `routes` says which rows go where, a line of the others is a pair's.

    Scores become shares by the rule of `route`, if it is not the mixture's own.
    """

    x: int
    scores: BufferColumns
    op: ops.MixtureOfExperts
    route: ops.Route | None
    routes: int
    hidden: int
    gated: int
    output: int


class Combine(Frozen):
    """`a * factor + b`; `weight` names a number that multiplies a, too."""

    a: BufferColumns
    output: int
    factor: float = 1.0
    b: BufferColumns | None = None
    weight: str | None = None


Record = (
    EmbedRows
    | External
    | AddNorm
    | Products
    | HeadProducts
    | StoreKv
    | StoreLatents
    | Attend
    | Activate
    | MixExperts
    | Combine
)


class GpuLowered(Frozen):
    """Launches in their order, and the Program's operations that each does.

    `taps` names the buffers, float32, of values that leave the step. `last` is the buffer from
    whose rows `logits` are computed, after the step, for those rows that need them.
    """

    records: tuple[Record, ...]
    parts: tuple[tuple[Op, ...], ...]
    buffers: tuple[DeviceBuffer, ...]
    taps: Mapping[str, int]
    last: int
    logits: ops.Logits


def route_ints(num_used: int) -> int:
    """Return how many numbers a row's routes take: of each pair, its item, choice, order, share."""
    return (4 + 3) * num_used + 16  # and a header, in arrays that begin at multiples of four


def touched(record: Record) -> Iterator[int]:
    """Yield the buffers that a record reads or writes."""
    for name in record.__struct_fields__:
        if name != "factor" and isinstance(buffer := getattr(record, name), int):
            yield buffer
    yield from (place.buffer for place in places(record))


def places(record: Record) -> Iterator[BufferColumns]:
    """Yield the places that a record reads."""
    yield from (source.place for source in sources(record))
    for name in record.__struct_fields__:
        found = getattr(record, name)
        if isinstance(found, JoinedHeads):
            found = found.place
        if isinstance(found, BufferColumns):
            yield found


def sources(record: Record) -> tuple[QkvSource, ...]:
    """Return what a record norms and rotates."""
    match record:
        case StoreKv(sources=found):
            return found
        case StoreLatents(queries=queries, keys=keys):
            return queries.rest, keys.rest
    return ()


def ropes(record: Record) -> Iterator[ops.Rope]:
    """Yield the rotations that a record does."""
    yield from (source.rope for source in sources(record) if source.rope is not None)
    if isinstance(record, StoreLatents) and record.keys.rope is not None:
        yield record.keys.rope
