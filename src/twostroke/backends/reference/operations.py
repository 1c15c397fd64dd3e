"""Each operation in NumPy float32: the definition of the correct result, simple and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.interface import MappedPages
from twostroke.backends.reference.recurrent import (
    StateMemory,
    gated_delta_rule,
    mamba2,
    short_convolution,
)
from twostroke.backends.spans import PageMap
from twostroke.core.frozen import Frozen
from twostroke.model.program import Activation, ops
from twostroke.model.program.kv_layout import first_seen
from twostroke.model.program.operation import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.spans import RowSpan
    from twostroke.model.program import Program
    from twostroke.model.program.ops import LocalOp

    Array = NDArray[np.float32]


class ReferenceStepState(Frozen):
    """The inputs of a step's operations: tokens, positions, weights, KV cache and the like.

    Values that other operations have computed are passed separately.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    spans: tuple[RowSpan, ...]
    sampled: NDArray[np.int64]
    weights: Mapping[str, Array]
    cache: PagedCache
    recurrent: StateMemory
    external: Array | None = None


def apply(  # noqa: C901, PLR0911, PLR0912 - a case for each operation
    op: LocalOp, values: Mapping[str, Array], state: ReferenceStepState
) -> Array:
    """Compute one operation of a Program; return its output, (rows, width).

    `values`: the outputs of earlier operations, by name.
    """
    match op:
        case ops.Embed():
            return _embed(op, state)
        case ops.ExternalInput():
            assert state.external is not None
            return state.external
        case ops.RMSNorm():
            return rms_norm(
                op, values[op.x], None if op.weight is None else state.weights[op.weight]
            )
        case ops.Linear():
            bias = None if op.bias is None else state.weights[op.bias]
            return _linear(values[op.x], state.weights[op.weight], bias)
        case ops.HeadLinear():
            return _head_linear(op, values[op.x], state.weights)
        case ops.Join():
            return _join(op, values[op.a], values[op.b])
        case ops.Rope():
            return rotate(op, values[op.x], state.positions)
        case ops.Attention():
            return _attention(op, values, state)
        case ops.GatedActivation():
            return gate(op.activation, values[op.gate], values[op.up])
        case ops.GateRows():
            return values[op.x] * _activate(Activation.SIGMOID, values[op.gate])
        case ops.ShortConvolution():
            mixed = short_convolution(op, values[op.x], state.weights, state.spans, state.recurrent)
            return mixed if op.activation is None else _activate(op.activation, mixed)
        case ops.Mamba2():
            steps = values[op.time_step]
            return mamba2(op, (values[op.x], steps), state.weights, state.spans, state.recurrent)
        case ops.GatedDeltaRule():
            inputs = values[op.x], values[op.decay], values[op.strength]
            return gated_delta_rule(op, inputs, state.weights, state.spans, state.recurrent)
        case ops.MixtureOfExperts():
            terms, total = op.steps
            assert isinstance(terms, ops.ExpertTerms)
            assert isinstance(total, ops.SumTerms)
            x = _expert_terms(terms, values[op.x], values[op.scores], state.weights)
            return _sum_terms(total, x, values[op.scores])
        case ops.Route():
            return _route(op, values[op.x], state.weights)
        case ops.ExpertTerms():
            return _expert_terms(op, values[op.x], values[op.scores], state.weights)
        case ops.SumTerms():
            return _sum_terms(op, values[op.x], values[op.scores])
        case ops.Scale():
            scaled: Array = values[op.x] * np.float32(op.factor)
            return scaled if op.weight is None else scaled * state.weights[op.weight]
        case ops.Add():
            return values[op.a] + values[op.b]
        case ops.Logits():
            logits: Array = values[op.x][state.sampled] @ state.weights[op.weight].T
            return logits if op.soft_cap is None else _soft_cap(logits, op.soft_cap)
        case ops.TakeColumns():
            return values[op.x][:, op.first : op.first + op.width]


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    product: Array = x @ weight.T
    return product if bias is None else product + bias


def _embed(op: ops.Embed, state: ReferenceStepState) -> Array:
    ids = state.tokens - op.first_id
    is_in_table = (ids >= 0) & (ids < op.num_ids)
    rows = np.full((len(ids), op.width), np.nan, np.float32)
    rows[is_in_table] = state.weights[op.table][ids[is_in_table]]
    return rows


def rms_norm(op: ops.RMSNorm, x: Array, weight: Array | None) -> Array:
    """Apply RMSNorm to x (rows, width); a row's result does not depend on other rows."""
    grouped = x.reshape(len(x), op.num_groups, -1)
    mean_square = np.mean(grouped * grouped, axis=-1, keepdims=True, dtype=np.float32)
    normed = grouped / np.sqrt(mean_square + np.float32(op.epsilon))
    if weight is not None and op.is_wide:
        weight = weight.reshape(op.num_groups, -1)
    if weight is not None:
        normed = normed * (weight if op.offset == 0 else weight + np.float32(op.offset))
    return np.asarray(normed, np.float32).reshape(x.shape)


def _head_linear(op: ops.HeadLinear, x: Array, weights: Mapping[str, Array]) -> Array:
    heads = x.reshape(len(x), op.num_heads, op.x_head)[..., op.first : op.first + op.in_width]
    products = [heads[:, head] @ weights[name].T for head, name in enumerate(op.matrices)]
    return np.concatenate(products, axis=1)


def _join(op: ops.Join, a: Array, b: Array) -> Array:
    first = a.reshape(len(a), op.num_heads, -1)[..., op.first : op.first + op.a_width]
    second = b.reshape(len(b), op.num_heads, op.b_width)
    return np.concatenate([first, second], axis=2).reshape(len(a), -1)


def rotate(op: ops.Rope, x: Array, positions: NDArray[np.int64]) -> Array:
    """Apply RoPE: return x (rows, width) with each head rotated by its row's position."""
    angles = positions[:, None] * np.array(op.inverse_frequencies)  # (rows, pairs), float64
    magnitude: float | NDArray[np.float64] = op.magnitude
    if isinstance(op, ops.QueryRope):
        periods = (positions[:, None] + op.temperature_offset) // op.temperature_length
        magnitude = magnitude * (1 + op.temperature_scale * np.log1p(periods))
    cosine = (np.cos(angles) * magnitude).astype(np.float32)[:, None, :]
    sine = (np.sin(angles) * magnitude).astype(np.float32)[:, None, :]
    pairs = len(op.inverse_frequencies)
    heads = x.reshape(len(x), op.num_heads, op.head_dim)
    if op.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    rotated = heads.copy()
    rotated[..., first] = heads[..., first] * cosine - heads[..., second] * sine
    rotated[..., second] = heads[..., first] * sine + heads[..., second] * cosine
    return rotated.reshape(x.shape)


def _attention(op: ops.Attention, values: Mapping[str, Array], state: ReferenceStepState) -> Array:
    q = values[op.q]
    sinks = None if op.sinks is None else state.weights[op.sinks]
    output = np.empty((len(q), op.width), np.float32)
    for span in state.spans:
        if op.stores:
            rows = span.stored_rows
            stored = np.arange(span.end - len(rows), span.end)
            state.cache.store(span, op.layer, stored, values[op.k][rows], values[op.v][rows])
        visible = np.arange(first_visible(op, span), span.end)
        keys, vals = state.cache.load(span, op, visible)
        queries = q[span.rows].reshape(-1, op.num_heads, op.head_dim)
        scores = attention_scores(op, queries, keys, np.arange(span.start, span.end), visible)
        heads = np.empty(queries.shape, np.float32)
        for head in range(op.num_heads):
            weights = _softmax(scores[:, head], None if sinks is None else sinks[head])
            heads[:, head] = weights @ vals[:, _kv_head(op, head)]
        output[span.rows] = heads.reshape(len(queries), -1)
    return output


def first_visible(op: ops.Attention | ops.SplitKvAttention, span: RowSpan) -> int:
    """Return the first position that any row of a span attends to; earlier pages may be freed."""
    if op.window is None:
        return 0
    first: int = first_seen(span.start, op.window, is_chunked=op.is_chunked)
    return max(0, first)


def attention_scores(
    op: ops.Attention | ops.SplitKvAttention,
    q: Array,
    k: Array,
    query_positions: NDArray[np.int64],
    key_positions: NDArray[np.int64],
) -> Array:
    """Return attention scores (rows, heads, keys) of q and k.

    They are minus infinity for keys after the query, and for keys outside the window. q is (rows,
    heads, head_dim), and k is (keys, kv_heads, head_dim).
    """
    hidden = query_positions[:, None] < key_positions
    if op.window is not None:
        first = first_seen(query_positions[:, None], op.window, is_chunked=op.is_chunked)
        hidden |= key_positions < first
    scores = np.empty((op.num_heads, len(q), len(k)), np.float32)
    for head in range(op.num_heads):
        scores[head] = q[:, head] @ k[:, _kv_head(op, head)].T * np.float32(op.scale)
    if op.soft_cap is not None:
        scores = _soft_cap(scores, op.soft_cap)
    np.copyto(scores, -np.inf, where=hidden)
    return scores.swapaxes(0, 1)


def _kv_head(op: ops.Attention | ops.SplitKvAttention, head: int) -> int:
    first = op.first_head if isinstance(op, ops.Attention) else 0
    return (first + head) // op.group_size


def _activate(activation: Activation, x: Array) -> Array:
    match activation:
        case Activation.SILU:
            activated: Array = x / (1 + np.exp(-x))
        case Activation.SIGMOID:
            activated = np.reciprocal(1 + np.exp(-x))
        case Activation.IDENTITY:
            activated = x
        case Activation.RELU:
            activated = np.maximum(x, 0)
        case Activation.GELU_TANH:
            inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
            activated = np.float32(0.5) * x * (1 + np.tanh(inner))
        case Activation.SWIGLU_OAI:
            raise ValueError("this activation needs the values of an up projection")
    return activated


def gate(activation: Activation, gates: Array, ups: Array) -> Array:
    """Return the gated activation of the values of a gate and an up projection."""
    if activation is not Activation.SWIGLU_OAI:
        return _activate(activation, gates) * ups
    limit = np.float32(SWIGLU_OAI_LIMIT)
    gates, ups = np.minimum(gates, limit), np.clip(ups, -limit, limit)
    gated: Array = gates / (1 + np.exp(-np.float32(SWIGLU_OAI_ALPHA) * gates)) * (ups + 1)
    return gated


def choose_experts(scores: Array, num_used: int) -> NDArray[np.int64]:
    """Return the experts with the largest scores for each row, (rows, num_used), best first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :num_used]


def _route(op: ops.Route, x: Array, weights: Mapping[str, Array]) -> Array:
    scores: Array = np.reciprocal(1 + np.exp(-x)) if op.is_sigmoid else _softmax(x)
    priorities: Array = scores if op.bias is None else scores + weights[op.bias]
    groups = priorities.reshape(len(x), op.num_groups, -1)
    best: Array = -np.sort(-groups, axis=2)[:, :, : op.group_best].sum(axis=2)
    is_allowed = np.zeros(groups.shape, bool)
    np.put_along_axis(
        is_allowed, choose_experts(best, op.num_used_groups)[..., None], values=True, axis=1
    )
    priorities = np.where(is_allowed, groups, np.float32(-np.inf)).reshape(x.shape)
    experts = choose_experts(priorities, op.num_used)
    shares: Array = np.take_along_axis(scores, experts, axis=1)
    if op.normalize:
        shares /= shares.sum(axis=1, keepdims=True) + np.float32(1e-20)
    shares *= np.float32(op.scale)
    if op.factors is not None:
        shares *= weights[op.factors][experts]
    output = np.full(x.shape, -1, np.float32)
    np.put_along_axis(output, experts, shares, axis=1)
    return output


def _expert_terms(
    op: ops.ExpertTerms, x: Array, scores: Array, weights: Mapping[str, Array]
) -> Array:
    experts = choose_experts(scores, op.num_used)
    terms = np.full((*experts.shape, op.hidden), np.nan, np.float32)
    for index, expert in enumerate(op.experts, op.first_expert):
        rows, slots = np.nonzero(experts == index)
        if not len(rows):
            continue
        inputs = x[rows]
        if op.scales_inputs:
            inputs = inputs * _activate(Activation.SIGMOID, scores[rows, index])[:, None]
        gates, ups = (
            _linear(inputs, weights[matrix], None if bias is None else weights[bias])
            for matrix, bias in zip(expert.matrices[:2], expert.biases[:2], strict=True)
        )
        gated = gate(op.activation, gates, ups)
        bias = None if expert.down_bias is None else weights[expert.down_bias]
        terms[rows, slots] = _linear(gated, weights[expert.down], bias)
    return terms.reshape(len(x), -1)


def _sum_terms(op: ops.SumTerms, x: Array, scores: Array) -> Array:
    experts = choose_experts(scores, op.num_used)
    all_shares = scores if op.are_shares else _softmax(scores)
    shares = np.take_along_axis(all_shares, experts, axis=1)  # (rows, num_used)
    if op.scales_inputs:
        shares = np.ones_like(shares)
    elif op.normalize:
        shares /= shares.sum(axis=1, keepdims=True)
    output = np.zeros((len(x), op.width), np.float32)
    for slot, term in enumerate(np.split(x, op.num_used, axis=1)):
        output += shares[:, slot, None] * term
    return output


def _softmax(scores: Array, sink: np.float32 | None = None) -> Array:
    """Return the softmax of each row; with a `sink`, the sum of a row includes exp(sink)."""
    peak = scores.max(axis=1, keepdims=True)
    if sink is not None:
        peak = np.maximum(peak, sink)
    shares: Array = np.exp(scores - peak)
    total = shares.sum(axis=1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - peak)
    shares /= total
    return shares


def _soft_cap(x: Array, cap: float) -> Array:
    capped: Array = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


class PagedCache:
    """The reference backend's KV cache: keys and values of all layers in float32 pages."""

    def __init__(self, program: Program, num_pages: int, page_size: int) -> None:
        """Reserve `num_pages` KV pages, each for `page_size` tokens of one cache group."""
        self._map = PageMap(program, page_size)
        self._memory = np.zeros((num_pages * self._map.page_slots, self._map.width), np.float32)
        self._num_pages = num_pages

    @property
    def bytes(self) -> MappedPages:
        """Return access to the bytes of all KV pages."""
        return MappedPages(memoryview(self._memory.data).cast("B"), self._num_pages)

    def copy_pages(self, spans: Sequence[RowSpan]) -> None:
        """Copy the first KV page of each draft branch from its request's page, before a step."""
        targets, sources = self._map.copies(spans)
        self._memory[targets] = self._memory[sources]

    def store(
        self, span: RowSpan, layer: int, positions: NDArray[np.int64], k: Array, v: Array
    ) -> None:
        """Write keys `k` and values `v` (positions, width) of a row span to its KV pages."""
        slots = self._map.slots(span, layer, positions)
        keys, values = self._map.columns(layer)
        self._memory[slots, keys] = k
        self._memory[slots, values] = v

    def load(
        self, span: RowSpan, op: ops.Attention | ops.SplitKvAttention, positions: NDArray[np.int64]
    ) -> tuple[Array, Array]:
        """Read keys and values at these positions from the KV pages of a row span.

        Both are (positions, kv_heads, head_dim).
        """
        slots = self._map.slots(span, op.layer, positions)
        shape = (len(slots), op.num_kv_heads, op.head_dim)
        keys, values = self._map.columns(op.layer)
        return self._memory[slots, keys].reshape(shape), self._memory[slots, values].reshape(shape)
