"""Runs the Program of draft heads in PyTorch with gradients, once for each depth of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from twostroke.backends.torch.operations import TorchStepState, apply
from twostroke.core.frozen import Frozen
from twostroke.model.families.heads import EAGLE, last_hidden
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from twostroke.model.families.heads import HeadsSpec
    from twostroke.model.program import Program


class TrainingBatch(Frozen):
    """Parts of recorded answers, all of one length, on which draft heads are trained together.

    `tokens` and `valid` are (pieces, length), and `hidden` is (pieces, length, width). Row i of a
    piece has the state `hidden[i]`, from which `tokens[i]` was sampled. A row is `valid` if it has
    a next row.
    """

    tokens: Tensor
    hidden: Tensor
    valid: Tensor


class NoPages:
    """A KV cache that stores nothing, because the training computes attention over whole parts."""

    def spans(
        self, op: ops.Attention, new_kv: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
        """Yield nothing, because this KV cache stores no keys and values."""
        del op, new_kv
        return iter(())


def unroll(
    spec: HeadsSpec, program: Program, weights: Mapping[str, Tensor], batch: TrainingBatch
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run draft heads at each depth of drafts; for each depth, yield (logits, mask).

    The mask (pieces, length) selects rows of the batch; the logits (rows, num_tokens) are for these
    rows. At each depth, row i has a draft of `tokens[i + 1]`. At depth d, the draft is computed
    from the tokens that were known d rows earlier.
    """
    unroll_kind = _eagle if spec.kind == EAGLE else _medusa
    yield from unroll_kind(spec, program, weights, batch)


def _eagle(
    spec: HeadsSpec, program: Program, weights: Mapping[str, Tensor], batch: TrainingBatch
) -> Iterator[tuple[Tensor, Tensor]]:
    pieces, length = batch.tokens.shape
    tokens = batch.tokens.flatten()
    positions = torch.arange(length).repeat(pieces)
    hidden, attention = batch.hidden, _DepthsAttention(pieces, length)
    for depth in range(spec.depth):
        rows = batch.valid & (torch.arange(length) >= depth)
        state = TorchStepState(
            tokens,
            positions,
            rows.flatten().nonzero()[:, 0],
            weights,
            NoPages(),
            external=hidden.flatten(0, 1),
        )
        values: dict[str, Tensor] = {}
        for op in program.ops:
            if isinstance(op, ops.Attention):
                values[op.output] = attention.attend(op, values)
            else:
                values[op.output] = apply(op, values, state)
        yield values[program.ops[-1].output], rows
        hidden = _shifted(values[last_hidden(program)].unflatten(0, (pieces, length)), 1)


def _medusa(
    spec: HeadsSpec, program: Program, weights: Mapping[str, Tensor], batch: TrainingBatch
) -> Iterator[tuple[Tensor, Tensor]]:
    _, length = batch.tokens.shape
    for depth in range(spec.depth):
        rows = batch.valid & (torch.arange(length) >= depth)
        hidden = _shifted(batch.hidden, depth)[rows]
        indices = torch.arange(len(hidden))
        state = TorchStepState(
            torch.full_like(indices, depth),
            indices,
            indices,
            weights,
            NoPages(),
            external=hidden,
        )
        values: dict[str, Tensor] = {}
        for op in program.ops:
            values[op.output] = apply(op, values, state)
        yield values[program.ops[-1].output], rows


class _DepthsAttention:
    """Attention of draft heads over the keys and values of all depths so far.

    A row at depth d attends to the rows of depth 0 that are at least d rows before it, and to one
    row of each later depth: the row of its own chain of drafts.
    """

    def __init__(self, pieces: int, length: int) -> None:
        self._shape = (pieces, length)
        self._keys_and_values: list[tuple[Tensor, Tensor]] = []  # by depth

    def attend(self, op: ops.Attention, values: Mapping[str, Tensor]) -> Tensor:
        """Return the output of draft heads' attention at the current depth: (rows, width)."""
        q, k, v = (values[name].unflatten(0, self._shape) for name in op.inputs)
        group = op.num_heads // op.num_kv_heads
        q = q.unflatten(2, (op.num_heads, -1)).transpose(1, 2)  # (pieces, heads, length, dim)
        k, v = (
            x.unflatten(2, (op.num_kv_heads, -1)).transpose(1, 2).repeat_interleave(group, dim=1)
            for x in (k, v)
        )
        self._keys_and_values.append((k, v))
        depth, length = len(self._keys_and_values) - 1, self._shape[1]
        first_k, first_v = self._keys_and_values[0]
        if not depth:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=op.scale)
            return mixed.transpose(1, 2).flatten(2).flatten(0, 1)
        rows = torch.arange(length)
        is_hidden = rows[None, :] > rows[:, None] - depth
        scores = [(q @ first_k.transpose(2, 3)).masked_fill(is_hidden, -torch.inf)]
        chain = [
            (_shifted(keys, depth - at, 2), _shifted(vals, depth - at, 2))
            for at, (keys, vals) in enumerate(self._keys_and_values[1:], 1)
        ]
        scores += [(q * keys).sum(dim=3, keepdim=True) for keys, _ in chain]
        weights = (torch.cat(scores, dim=3) * op.scale).softmax(dim=3)
        mixed = weights[..., :length] @ first_v
        for at, (_, vals) in enumerate(chain):
            mixed = mixed + weights[..., length + at, None] * vals
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def _shifted(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """Return a tensor with its rows shifted by `count` along `dim`, and zeros before them."""
    if not count:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - count)], dim=dim)
