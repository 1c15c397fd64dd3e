"""Attention over a context whose KV splits are on several ranks.

Each rank computes the partial attention of its splits for all heads. Then each rank merges the
partial results of all ranks for its own heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.reference.operations import attention_scores, first_visible
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.reference.operations import ReferenceStepState
    from twostroke.backends.spans import RowSpan
    from twostroke.model.program.ops import SplitKvAttention

    Array = NDArray[np.float32]


class PartialAttention(Frozen):
    """Attention of a span's rows to one KV split, before the results of all splits are merged.

    `peak`: the largest score of each row and head; -inf if the row attends to no token of the
    split.
    """

    peak: Array  # (rows, heads)
    sum: Array  # (rows, heads)
    out: Array  # (rows, heads, head_dim)


PartialAttentions = dict[tuple[int, int], PartialAttention]  # by span and split


def partial_attentions(
    op: SplitKvAttention, values: Mapping[str, Array], state: ReferenceStepState
) -> PartialAttentions:
    """Store a rank's keys and values of a step, and attend to the KV splits that it stores."""
    q = values[op.q]
    partials: PartialAttentions = {}
    for number, span in enumerate(state.spans):
        if op.stores:
            rows = span.stored_rows
            positions = np.arange(span.end - len(rows), span.end)
            is_stored = positions // KV_SPLIT_TOKENS % len(op.team) == op.team_index
            k, v = (values[name][rows[is_stored]] for name in (op.k, op.v))
            state.cache.store(span, op.layer, positions[is_stored], k, v)
        queries = q[span.rows].reshape(-1, op.num_heads, op.head_dim)
        for split in _visible_splits(op, span):
            if split % len(op.team) == op.team_index:
                partials[number, split] = _partial_attention(op, queries, span, split, state)
    return partials


def merge_partials(
    op: SplitKvAttention, team: Sequence[PartialAttentions], state: ReferenceStepState
) -> Array:
    """Merge the partial attention of all ranks, for the heads of this rank: (rows, width)."""
    heads = slice(op.first_head, op.end_head)
    output = np.empty((len(state.tokens), op.width), np.float32)
    for number, span in enumerate(state.spans):
        shape = len(output[span.rows]), op.end_head - op.first_head
        peak, total = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
        if op.sinks is not None:  # the softmax begins with the sinks, whose values are zero
            peak[:], total[:] = state.weights[op.sinks][heads], 1
        out = np.zeros((*shape, op.head_dim), np.float32)
        for split in _visible_splits(op, span):
            partial = team[split % len(team)][number, split]
            both = np.maximum(peak, partial.peak[:, heads])
            keep, take = _weight(peak, both), _weight(partial.peak[:, heads], both)
            total = total * keep + partial.sum[:, heads] * take
            out = out * keep[..., None] + partial.out[:, heads] * take[..., None]
            peak = both
        output[span.rows] = (out / total[..., None]).reshape(len(peak), op.width)
    return output


def _visible_splits(op: SplitKvAttention, span: RowSpan) -> range:
    """Return the indices of the KV splits that a span's rows attend to, in order."""
    return range(first_visible(op, span) // KV_SPLIT_TOKENS, -(-span.end // KV_SPLIT_TOKENS))


def _partial_attention(
    op: SplitKvAttention, q: Array, span: RowSpan, split: int, state: ReferenceStepState
) -> PartialAttention:
    """Compute the attention of queries q (rows, heads, head_dim) of a span to one KV split."""
    first = split * KV_SPLIT_TOKENS
    positions = np.arange(first, min(span.end, first + KV_SPLIT_TOKENS))
    positions = positions[positions >= first_visible(op, span)]
    keys, vals = state.cache.load(span, op, positions)
    scores = attention_scores(op, q, keys, np.arange(span.start, span.end), positions)
    peak = scores.max(axis=2)
    weights = _weight(scores, peak[..., None])
    group = np.arange(op.num_heads) // op.group_size
    return PartialAttention(
        peak, weights.sum(axis=2), np.einsum("rhp,phd->rhd", weights, vals[:, group])
    )


def _weight(score: Array, peak: Array) -> Array:
    """Return the softmax weight exp(score - peak); 0 for scores of minus infinity."""
    return np.where(np.isneginf(score), np.float32(0), np.exp(score - peak))
