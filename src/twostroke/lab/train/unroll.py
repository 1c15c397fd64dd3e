"""Runs the Program of heads in PyTorch, with gradients, once for each guess in a row.

The state that an EAGLE head returns at one depth is its input at the next, so that it learns from
its own mistakes ("training-time test", arXiv:2503.01840). Rows of all depths see what they will
see when they guess.
"""

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
    """Pieces of answers: all tensors are (pieces, length) but for `hidden` (.., width).

    Row i of a piece has the state `hidden[i]`, from which `tokens[i]` was drawn; `valid` rows have
    a next row.
    """

    tokens: Tensor
    hidden: Tensor
    valid: Tensor


class NoPages:
    """No pages: attention is computed in this file."""

    def spans(
        self, op: ops.Attention, own: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
        """Yield nothing."""
        del op, own
        return iter(())


def unroll(
    spec: HeadsSpec, program: Program, weights: Mapping[str, Tensor], batch: TrainingBatch
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth the logits (rows, num_tokens) and which rows of the batch have them.

    The guess of row i is about `tokens[i + 1]`, whatever the depth: at depth d it was made from
    what was known d rows before. Rows are a mask (pieces, length).
    """
    guesses = _eagle if spec.kind == EAGLE else _medusa
    yield from guesses(spec, program, weights, batch)


def _eagle(
    spec: HeadsSpec, program: Program, weights: Mapping[str, Tensor], batch: TrainingBatch
) -> Iterator[tuple[Tensor, Tensor]]:
    pieces, length = batch.tokens.shape
    tokens = batch.tokens.flatten()
    positions = torch.arange(length).repeat(pieces)
    given, seen = batch.hidden, _Seen(pieces, length)
    for depth in range(spec.depth):
        rows = batch.valid & (torch.arange(length) >= depth)
        flat = given.flatten(0, 1)
        state = TorchStepState(
            tokens, positions, rows.flatten().nonzero()[:, 0], weights, NoPages(), flat
        )
        values: dict[str, Tensor] = {}
        for op in program.ops:
            if isinstance(op, ops.Attention):
                values[op.output] = seen.attend(op, values)
            else:
                values[op.output] = apply(op, values, state)
        yield values[program.ops[-1].output], rows
        given = _later(values[last_hidden(program)].unflatten(0, (pieces, length)), 1)


def _medusa(
    spec: HeadsSpec, program: Program, weights: Mapping[str, Tensor], batch: TrainingBatch
) -> Iterator[tuple[Tensor, Tensor]]:
    _, length = batch.tokens.shape
    for depth in range(spec.depth):
        rows = batch.valid & (torch.arange(length) >= depth)
        given = _later(batch.hidden, depth)[rows]
        every = torch.arange(len(given))
        state = TorchStepState(
            torch.full_like(every, depth), every, every, weights, NoPages(), given
        )
        values: dict[str, Tensor] = {}
        for op in program.ops:
            values[op.output] = apply(op, values, state)
        yield values[program.ops[-1].output], rows


class _Seen:
    """Keys and values of all depths so far.

    A row at depth d sees those of depth 0 up to d rows before it, and of each later depth the one
    row that its own chain of guesses went through.
    """

    def __init__(self, pieces: int, length: int) -> None:
        self._shape = (pieces, length)
        self._known: list[tuple[Tensor, Tensor]] = []

    def attend(self, op: ops.Attention, values: Mapping[str, Tensor]) -> Tensor:
        """Return the attention's output (rows, width)."""
        q, k, v = (values[name].unflatten(0, self._shape) for name in op.inputs)
        group = op.num_heads // op.num_kv_heads
        q = q.unflatten(2, (op.num_heads, -1)).transpose(1, 2)  # (pieces, heads, length, dim)
        k, v = (
            x.unflatten(2, (op.num_kv_heads, -1)).transpose(1, 2).repeat_interleave(group, dim=1)
            for x in (k, v)
        )
        self._known.append((k, v))
        depth, length = len(self._known) - 1, self._shape[1]
        first_k, first_v = self._known[0]
        if not depth:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=op.scale)
            return mixed.transpose(1, 2).flatten(2).flatten(0, 1)
        rows = torch.arange(length)
        hidden = rows[None, :] > rows[:, None] - depth
        scores = [(q @ first_k.transpose(2, 3)).masked_fill(hidden, -torch.inf)]
        own = [
            (_later(keys, depth - at, 2), _later(vals, depth - at, 2))
            for at, (keys, vals) in enumerate(self._known[1:], 1)
        ]
        scores += [(q * keys).sum(dim=3, keepdim=True) for keys, _ in own]
        shares = (torch.cat(scores, dim=3) * op.scale).softmax(dim=3)
        mixed = shares[..., :length] @ first_v
        for at, (_, vals) in enumerate(own):
            mixed = mixed + shares[..., length + at, None] * vals
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def _later(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """Return x with its rows shifted by `count`, and zeros before them."""
    if not count:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - count)], dim=dim)
