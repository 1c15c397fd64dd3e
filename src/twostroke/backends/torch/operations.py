"""The operations in PyTorch: differentiable, on the device of their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.core.frozen import Frozen
from twostroke.program import Activation, ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.backends.torch.pages import Keeper
    from twostroke.program import Op


class StepState(Frozen):
    """Inputs of a step's operations besides values.

    `tokens`, `positions` (rows) and `sampled` (rows that get logits) are int64 on the weights'
    device. `keeper` stores the step's keys and values and finds those that its rows see.
    """

    tokens: Tensor
    positions: Tensor
    sampled: Tensor
    weights: Mapping[str, Tensor]
    keeper: Keeper
    external: Tensor | None = None


def apply(  # noqa: PLR0911 - a case for each operation
    op: Op, values: Mapping[str, Tensor], state: StepState
) -> Tensor:
    """Return what `op` writes, (rows, width), given the values written so far."""
    weights = state.weights
    match op:
        case ops.Embed():
            return functional.embedding(state.tokens, weights[op.table])
        case ops.ExternalInput():
            assert state.external is not None
            return state.external
        case ops.RMSNorm():
            return _rms_norm(op, values[op.x], weights[op.weight])
        case ops.Linear():
            bias = None if op.bias is None else weights[op.bias]
            return functional.linear(values[op.x], weights[op.weight], bias)
        case ops.Rope():
            return _rope(op, values[op.x], state.positions)
        case ops.Attention():
            return _attention(op, values, state)
        case ops.GatedActivation():
            return _activate(op.activation, values[op.gate]) * values[op.up]
        case ops.MixtureOfExperts():
            return _mix_experts(op, values[op.x], values[op.scores], weights)
        case ops.Scale():
            return values[op.x] * op.factor
        case ops.Add():
            return values[op.a] + values[op.b]
        case ops.Logits():
            logits = functional.linear(values[op.x][state.sampled], weights[op.weight])
            return logits if op.soft_cap is None else _soft_cap(logits, op.soft_cap)


def _rms_norm(op: ops.RMSNorm, x: Tensor, weight: Tensor) -> Tensor:
    grouped = x.reshape(len(x), op.num_groups, -1)
    normed = functional.rms_norm(grouped, (grouped.shape[-1],), weight + op.offset, op.epsilon)
    return normed.reshape(x.shape)


def _rope(op: ops.Rope, x: Tensor, positions: Tensor) -> Tensor:
    frequencies = torch.tensor(op.inverse_frequencies, dtype=torch.float64, device=x.device)
    angles = positions[:, None] * frequencies  # (rows, pairs)
    cosine = (angles.cos() * op.magnitude).to(x.dtype)[:, None, :]
    sine = (angles.sin() * op.magnitude).to(x.dtype)[:, None, :]
    heads = x.reshape(len(x), op.num_heads, op.head_dim)
    pairs = len(op.inverse_frequencies)
    turned, rest = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
    if op.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    one, two = first * cosine - second * sine, first * sine + second * cosine
    if op.interleaved:
        turned = torch.stack((one, two), dim=-1).flatten(-2)
    else:
        turned = torch.cat((one, two), dim=-1)
    return torch.cat((turned, rest), dim=-1).reshape(x.shape)


def _attention(op: ops.Attention, values: Mapping[str, Tensor], state: StepState) -> Tensor:
    q, k, v = (values[name] for name in op.inputs)
    outputs = []
    for rows, keys, vals, first in state.keeper.spans(op, k, v):
        queries = q[rows].reshape(-1, op.num_heads, op.head_dim)
        distance = state.positions[rows, None] - torch.arange(
            first, first + len(keys), device=q.device
        )
        seen = distance >= 0 if op.window is None else (distance >= 0) & (distance < op.window)
        outputs.append(_attend(op, queries, keys, vals, seen))
    return torch.cat(outputs)


def _attend(op: ops.Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return (rows, width); q is (rows, heads, head_dim), k and v (context, kv_heads, head_dim)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
    if op.soft_cap is None:
        mixed = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], seen, scale=op.scale, enable_gqa=True
        )[0]
    else:
        group = op.num_heads // op.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        scores = _soft_cap(q @ k.transpose(1, 2) * op.scale, op.soft_cap)
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v
    return mixed.transpose(0, 1).flatten(1)


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _activate(activation: Activation, x: Tensor) -> Tensor:
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")


def _mix_experts(
    op: ops.MixtureOfExperts, x: Tensor, scores: Tensor, weights: Mapping[str, Tensor]
) -> Tensor:
    shares = scores.softmax(dim=-1)  # (rows, experts)
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[:, : op.num_used]
    kept = shares.gather(1, chosen)
    if op.normalize:
        kept = kept / kept.sum(dim=-1, keepdim=True)
    output = torch.zeros_like(x)
    for index, expert in enumerate(op.experts):
        rows, ranks = torch.nonzero(chosen == index, as_tuple=True)
        if not len(rows):
            continue
        gate = _activate(op.activation, functional.linear(x[rows], weights[expert.gate]))
        mixed = gate * functional.linear(x[rows], weights[expert.up])
        mixed = functional.linear(mixed, weights[expert.down])
        output = output.index_add(0, rows, kept[rows, ranks, None] * mixed)
    return output
