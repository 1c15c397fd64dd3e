"""Each operation in PyTorch, differentiable, on the device of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.backends.torch.recurrent import gated_delta_rule, mamba2, short_convolution
from twostroke.core.frozen import Frozen
from twostroke.model.program import Activation, ops
from twostroke.model.program.kv_layout import first_seen
from twostroke.model.program.operation import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.backends.torch.link import TorchLink
    from twostroke.backends.torch.pages import KvKeeper
    from twostroke.backends.torch.recurrent import RecurrentStep
    from twostroke.model.program import Op


class TorchStepState(Frozen):
    """The inputs of a step's operations: tokens, positions, weights, keys and values.

    Values that other operations have computed are passed separately.

    `tokens`, `positions` (rows) and `sampled` (the rows with logits) are int64 on the weights'
    device. `keeper` stores the step's keys and values, and returns the keys and values that its
    rows attend to. `recurrent` has the step's recurrent states, if the Program has any. With
    several ranks, this rank reaches the others by its `link`, and computes part `row_part` of
    `num_row_parts` of the rows.
    """

    tokens: Tensor
    positions: Tensor
    sampled: Tensor
    weights: Mapping[str, Tensor]
    keeper: KvKeeper
    recurrent: RecurrentStep | None = None
    external: Tensor | None = None
    link: TorchLink | None = None
    row_part: int = 0
    num_row_parts: int = 1

    @property
    def own_rows(self) -> slice:
        """Return the rows of the step that this rank computes."""
        count, part, parts = len(self.tokens), self.row_part, self.num_row_parts
        return slice(count * part // parts, count * (part + 1) // parts)


def apply(  # noqa: C901, PLR0911, PLR0912 - a case for each operation
    op: Op, values: Mapping[str, Tensor], state: TorchStepState
) -> Tensor:
    """Compute one operation of a Program; return its output, (rows, width).

    `values`: the outputs of earlier operations, by name. A value has all rows of the step, or only
    the rows that this rank computes.
    """
    weights = state.weights
    match op:
        case ops.AllGather() | ops.AllReduce() | ops.Send() | ops.Receive():
            return _exchange(op, values, state)
        case ops.Embed():
            return _embed(op, state.tokens, weights[op.table])
        case ops.ExternalInput():
            assert state.external is not None
            return state.external
        case ops.RMSNorm():
            return _rms_norm(op, values[op.x], weights)
        case ops.Linear():
            bias = None if op.bias is None else weights[op.bias]
            return _linear(values[op.x], weights[op.weight], bias)
        case ops.HeadLinear():
            return _head_linear(op, values[op.x], weights)
        case ops.Join():
            return _join(op, values[op.a], values[op.b])
        case ops.Rope():
            return _rope(op, values[op.x], state.positions[state.own_rows])
        case ops.Attention():
            return _attention(op, values, state)
        case ops.GatedActivation():
            return _gate(op.activation, values[op.gate], values[op.up])
        case ops.MixtureOfExperts():
            terms, total = op.steps
            assert isinstance(terms, ops.ExpertTerms)
            assert isinstance(total, ops.SumTerms)
            return _sum_terms(total, _expert_terms(terms, values, weights), values[op.scores])
        case ops.Route():
            return _route(op, values[op.x], weights)
        case ops.ExpertTerms():
            return _expert_terms(op, values, weights)
        case ops.SumTerms():
            return _sum_terms(op, values[op.x], values[op.scores])
        case ops.TakeColumns():
            return values[op.x][:, op.first : op.first + op.width]
        case ops.ShortConvolution() | ops.GatedDeltaRule() | ops.Mamba2():
            return _recurrent(op, values, state)
        case ops.GateRows():
            return values[op.x] * values[op.gate].sigmoid()
        case ops.Scale():
            scaled = values[op.x] * op.factor
            return scaled if op.weight is None else scaled * weights[op.weight]
        case ops.Add():
            return values[op.a] + values[op.b]
        case ops.Logits():
            logits = _linear(values[op.x][state.sampled], weights[op.weight])
            return logits if op.soft_cap is None else _soft_cap(logits, op.soft_cap)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` in the weight's type; autocast may use another type."""
    return functional.linear(x, weight, bias).to(weight.dtype)


def _exchange(
    op: ops.AllGather | ops.AllReduce | ops.Send | ops.Receive,
    values: Mapping[str, Tensor],
    state: TorchStepState,
) -> Tensor:
    """Run a collective operation over the link to the other ranks; return its output."""
    assert state.link is not None, "a divided Program needs the other ranks"
    x = values[op.inputs[0]] if op.inputs else None
    return state.link.apply(op, x, state.tokens, state.own_rows)


def _embed(op: ops.Embed, tokens: Tensor, table: Tensor) -> Tensor:
    """Return the embedding of tokens; zeros for tokens that are not in this rank's table."""
    ids = tokens - op.first_id
    is_missing = (ids < 0) | (ids >= op.num_ids)
    rows = functional.embedding(ids.masked_fill(is_missing, 0), table)
    return rows.masked_fill(is_missing[:, None], 0)


def _rms_norm(op: ops.RMSNorm, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    grouped = x.reshape(len(x), op.num_groups, op.width // op.num_groups)
    weight = None if op.weight is None else weights[op.weight] + op.offset
    if weight is None or not op.is_wide:
        normed = functional.rms_norm(grouped, (grouped.shape[-1],), weight, op.epsilon)
    else:
        normed = functional.rms_norm(grouped, (grouped.shape[-1],), None, op.epsilon)
        normed = normed * weight.reshape(op.num_groups, -1)
    return normed.reshape(x.shape)


def _head_linear(op: ops.HeadLinear, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    heads = x.reshape(len(x), op.num_heads, op.x_head)[..., op.first : op.first + op.in_width]
    matrices = torch.stack([weights[name] for name in op.matrices])  # (heads, outputs, inputs)
    return torch.bmm(heads.transpose(0, 1), matrices.mT).transpose(0, 1).flatten(1)


def _join(op: ops.Join, a: Tensor, b: Tensor) -> Tensor:
    first = a.reshape(len(a), op.num_heads, op.a_head)[..., op.first : op.first + op.a_width]
    return torch.cat((first, b.reshape(len(b), op.num_heads, op.b_width)), dim=-1).flatten(1)


def _rope(op: ops.Rope, x: Tensor, positions: Tensor) -> Tensor:
    frequencies = torch.tensor(op.inverse_frequencies, dtype=torch.float64, device=x.device)
    angles = positions[:, None] * frequencies  # (rows, pairs)
    magnitude: float | Tensor = op.magnitude
    if isinstance(op, ops.QueryRope):
        periods = (positions[:, None] + op.temperature_offset) // op.temperature_length
        magnitude = magnitude * (1 + op.temperature_scale * periods.double().log1p())
    cosine = (angles.cos() * magnitude).to(x.dtype)[:, None, :]
    sine = (angles.sin() * magnitude).to(x.dtype)[:, None, :]
    heads = x.reshape(len(x), op.num_heads, op.head_dim)
    pairs = len(op.inverse_frequencies)
    rotated, rest = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
    if op.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    new_first, new_second = first * cosine - second * sine, first * sine + second * cosine
    if op.interleaved:
        rotated = torch.stack((new_first, new_second), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((new_first, new_second), dim=-1)
    return torch.cat((rotated, rest), dim=-1).reshape(x.shape)


def _attention(op: ops.Attention, values: Mapping[str, Tensor], state: TorchStepState) -> Tensor:
    q, *stored = (values[name] for name in op.inputs)
    sinks = None if op.sinks is None else state.weights[op.sinks]
    own_rows = state.own_rows
    outputs = [q[:0]]
    for span, keys, vals, first in state.keeper.spans(op, tuple(stored)):
        rows = slice(max(span.start, own_rows.start), min(span.stop, own_rows.stop))
        if rows.start >= rows.stop:
            continue
        queries = q[rows.start - own_rows.start : rows.stop - own_rows.start]
        queries = queries.reshape(-1, op.num_heads, op.head_dim)
        positions = state.positions[rows, None]
        key_positions = torch.arange(first, first + len(keys), device=q.device)
        seen = key_positions <= positions
        if op.window is not None:
            seen &= key_positions >= first_seen(positions, op.window, is_chunked=op.is_chunked)
        outputs.append(_attend(op, queries, keys, vals, seen=seen, sinks=sinks))
    return torch.cat(outputs)


def _attend(
    op: ops.Attention, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, sinks: Tensor | None
) -> Tensor:
    """Compute attention: (rows, width) for q (rows, heads, head_dim).

    k and v are (context, kv_heads, head_dim). `seen`: which keys each row sees.
    """
    heads = torch.arange(op.first_head, op.first_head + op.num_heads, device=q.device)
    k, v = (x.index_select(1, heads // op.group_size) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
    if op.soft_cap is None and sinks is None:
        mixed = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], seen, scale=op.scale
        )[0]
    else:
        scores = q @ k.transpose(1, 2) * op.scale
        if op.soft_cap is not None:
            scores = _soft_cap(scores, op.soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink_scores = sinks[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sink_scores), dim=-1)
        mixed = scores.softmax(dim=-1)[..., : len(k[0])] @ v
    return mixed.transpose(0, 1).flatten(1)


def _recurrent(
    op: ops.ShortConvolution | ops.GatedDeltaRule | ops.Mamba2,
    values: Mapping[str, Tensor],
    state: TorchStepState,
) -> Tensor:
    """Compute a recurrent operation on all rows of the step; return the rows of this rank."""
    assert state.recurrent is not None, "the Program has recurrent states"
    if isinstance(op, ops.GatedDeltaRule):
        inputs = values[op.x], values[op.decay], values[op.strength]
        return gated_delta_rule(op, inputs, state.weights, state.recurrent)[state.own_rows]
    if isinstance(op, ops.Mamba2):
        steps = values[op.time_step]
        return mamba2(op, (values[op.x], steps), state.weights, state.recurrent)[state.own_rows]
    mixed = short_convolution(op, values[op.x], state.weights, state.recurrent)[state.own_rows]
    return mixed if op.activation is None else _activate(op.activation, mixed)


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _activate(activation: Activation, x: Tensor) -> Tensor:
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.SIGMOID:
            return x.sigmoid()
        case Activation.IDENTITY:
            return x
        case Activation.RELU:
            return functional.relu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.SWIGLU_OAI:
            raise ValueError("this activation needs the values of an up projection")


def _gate(activation: Activation, gates: Tensor, ups: Tensor) -> Tensor:
    """Return the gated activation of the values of a gate and an up projection."""
    if activation is not Activation.SWIGLU_OAI:
        return _activate(activation, gates) * ups
    gates = gates.clamp(max=SWIGLU_OAI_LIMIT)
    ups = ups.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
    return gates * (SWIGLU_OAI_ALPHA * gates).sigmoid() * (ups + 1)


def _expert_terms(
    op: ops.ExpertTerms, values: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> Tensor:
    """Return the weighted outputs of each row's experts; zeros for experts of other ranks."""
    x, experts = values[op.x], _experts_of_rows(op, values[op.scores])
    terms = x.new_zeros(*experts.shape, op.hidden)
    for index, expert in enumerate(op.experts, op.first_expert):
        rows, slots = torch.nonzero(experts == index, as_tuple=True)
        if not len(rows):
            continue
        gate_bias, up_bias, down_bias = (
            None if bias is None else weights[bias] for bias in expert.biases
        )
        inputs = x[rows]
        if op.scales_inputs:
            inputs = inputs * values[op.scores][rows, index, None].sigmoid()
        gates = _linear(inputs, weights[expert.gate], gate_bias)
        ups = _linear(inputs, weights[expert.up], up_bias)
        mixed = _gate(op.activation, gates, ups)
        terms[rows, slots] = _linear(mixed, weights[expert.down], down_bias)
    return terms.flatten(1)


def _sum_terms(op: ops.SumTerms, terms: Tensor, scores: Tensor) -> Tensor:
    if op.scales_inputs:
        return sum(terms.unflatten(1, (op.num_used, -1)).unbind(1))
    all_shares = scores if op.are_shares else scores.softmax(dim=-1)
    shares = all_shares.gather(1, _experts_of_rows(op, scores))  # (rows, num_used)
    if op.normalize:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    weighed = shares[..., None] * terms.unflatten(1, (op.num_used, -1))
    return sum(weighed.unbind(1)[1:], weighed[:, 0])


def _route(op: ops.Route, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    scores = x.sigmoid() if op.is_sigmoid else x.softmax(dim=-1)
    priorities = scores if op.bias is None else scores + weights[op.bias]
    groups = priorities.reshape(len(x), op.num_groups, -1)
    best = groups.topk(op.group_best, dim=-1).values.sum(dim=-1)
    used = _largest(best, op.num_used_groups)[..., None].expand(-1, -1, groups.shape[-1])
    masked = torch.full_like(groups, -torch.inf).scatter(1, used, groups.gather(1, used))
    experts = _largest(masked.flatten(1), op.num_used)
    shares = scores.gather(1, experts)
    if op.normalize:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    shares = shares * op.scale
    if op.factors is not None:
        shares = shares * weights[op.factors][experts]
    return torch.full_like(x, -1).scatter(1, experts, shares)


def _experts_of_rows(op: ops.ExpertTerms | ops.SumTerms, scores: Tensor) -> Tensor:
    """Return the experts with the largest scores for each row, (rows, num_used), best first."""
    return _largest(scores, op.num_used)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest scores of each row; of equal scores, the first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
