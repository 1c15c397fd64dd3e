"""A Program as a list of records, each one or a few launches, over buffers without memory yet."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.model.program import Activation, Op, ops


class BufferType(Enum):
    """The type of a buffer's contents in GPU memory.

    `STREAM`: a float32 residual stream. `ELEMENT`: input of products, in the element type. `PARTS`:
    partial sums of products. `SCORES`: partial sums that stay float32 with many rows. `LINES`:
    several lines for each row, whose sum is the value.
    """

    STREAM = "stream"
    ELEMENT = "element"
    PARTS = "parts"
    SCORES = "scores"
    LINES = "lines"


class DeviceBuffer(Frozen):
    """A buffer in GPU memory for an intermediate value: `width` values for each row of a step.

    `is_kept`: the buffer is read after the step, so that no other buffer may reuse its memory.
    `lines`: lines of a row in a buffer of type LINES.
    """

    width: int
    kind: BufferType
    is_kept: bool = False
    lines: int = 1


class BufferColumns(Frozen):
    """The columns of a buffer that hold a value; the reader adds the bias with the name `bias`."""

    buffer: int
    first: int
    width: int
    bias: str | None = None


class QkvSource(Frozen):
    """Queries, keys or values in a buffer, and the norm and RoPE that the reader applies."""

    columns: BufferColumns
    norm: ops.RMSNorm | None = None
    rope: ops.Rope | None = None


class EmbedRows(Frozen):
    """Launch record: gathers the embeddings of a step's tokens, times a factor."""

    table: str
    factor: float
    output: int


class External(Frozen):
    """Launch record: copies the step's external input to a buffer."""

    output: int


class AddNorm(Frozen):
    """Launch record: adds to the residual stream, and norms the sum.

    Computes `residual = (residual + post(delta)) * factor`, `output = norm(residual)`. Operands
    that are None are left out; without a norm the output is a copy. `factor` is the name of a
    weight with one number.
    """

    residual: int | None = None
    delta: BufferColumns | None = None
    post: ops.RMSNorm | None = None
    factor: str | None = None
    norm: ops.RMSNorm | None = None
    output: int | None = None


class Products(Frozen):
    """Launch record: products of one input with several matrices, with outputs side by side."""

    x: int
    weights: tuple[str, ...]
    widths: tuple[int, ...]
    output: int


class HeadProducts(Frozen):
    """Launch record: products of each head's values with the head's own matrix."""

    x: BufferColumns
    op: ops.HeadLinear
    output: int


class JoinedHeads(Frozen):
    """The heads of queries or keys of latent attention, from two sources.

    Rotated values are read from `columns`, and the values after them from `rest`.
    """

    op: ops.Join
    columns: BufferColumns
    rest: QkvSource
    rope: ops.Rope | None = None


class StoreKv(Frozen):
    """Launch record: prepares queries for attention, and stores keys and values in KV pages.

    A layer that reads another layer's keys and values has only queries.
    """

    sources: tuple[QkvSource, ...]
    op: ops.Attention
    output: int


class StoreLatents(Frozen):
    """Launch record: prepares queries for latent attention, and stores keys in KV pages."""

    queries: JoinedHeads
    keys: JoinedHeads
    op: ops.LatentAttention
    output: int


class Attend(Frozen):
    """Launch record: attention of queries to the KV pages."""

    q: int
    op: ops.Attention
    output: int


class Activate(Frozen):
    """Launch record: the gated activation `activation(gate) * up`."""

    gate: BufferColumns
    up: BufferColumns
    activation: Activation
    output: int


class MixExperts(Frozen):
    """Launch record: a mixture of experts, from router scores to the experts' outputs.

    `routes`, `hidden`, `gated` and `output` are buffers: `routes` has the (row, expert) pairs, the
    others one line for each pair. `route`: the rule by which scores choose experts; None: the rule
    of `op`.
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
    """Launch record: the elementwise sum `a * factor + b`.

    `weight` is the name of a weight with one number, by which `a` is multiplied, too.
    """

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
    """A Program lowered for the GPU: launch records in order, with the operations of each.

    `taps`: the float32 buffers of intermediate values that steps also return, by name. `last`: the
    buffer with the last hidden states, from which `logits` are computed after the step, for the
    rows that need logits.
    """

    records: tuple[Record, ...]
    parts: tuple[tuple[Op, ...], ...]
    buffers: tuple[DeviceBuffer, ...]
    taps: Mapping[str, int]
    last: int
    logits: ops.Logits


def route_ints(num_used: int) -> int:
    """Return how many int32 numbers the expert routes of a row take.

    A (row, expert) pair takes an item of four numbers, its expert, its index in the order, and its
    weight. The arrays and the header begin at multiples of four numbers.
    """
    return (4 + 3) * num_used + 16


def touched_buffers(record: Record) -> Iterator[int]:
    """Yield the indices of the buffers that a launch record reads or writes."""
    for name in record.__struct_fields__:
        if name != "factor" and isinstance(buffer := getattr(record, name), int):
            yield buffer
    yield from (columns.buffer for columns in columns_read(record))


def columns_read(record: Record) -> Iterator[BufferColumns]:
    """Yield the buffer columns that a launch record reads."""
    yield from (source.columns for source in sources(record))
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, JoinedHeads):
            value = value.columns
        if isinstance(value, BufferColumns):
            yield value


def sources(record: Record) -> tuple[QkvSource, ...]:
    """Return the queries, keys and values that a launch record norms and rotates."""
    match record:
        case StoreKv(sources=kv_sources):
            return kv_sources
        case StoreLatents(queries=queries, keys=keys):
            return queries.rest, keys.rest
    return ()


def ropes(record: Record) -> Iterator[ops.Rope]:
    """Yield the rotary embeddings that a launch record applies."""
    yield from (source.rope for source in sources(record) if source.rope is not None)
    if isinstance(record, StoreLatents) and record.keys.rope is not None:
        yield record.keys.rope
