"""Moves factors between matrices so that the channels of a group are alike (arXiv:2306.00978).

Weights of a group share a scale, which the largest decide: where channels differ, small weights
with large inputs err much. A factor that divides an input and multiplies its weights changes no
product. It is taken from what the inputs come from: a norm, the up projection of a gated
feed-forward, values. Which factors are best is tried on some outputs, rounded as all will be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.lab.compress.round import Moments
from twostroke.model.program import ops
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.quant.grouped import scale_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from twostroke.lab.compress.saved_work import Matrices
    from twostroke.model.program import Op, Program
    from twostroke.model.quant import Floats

    Rounder = Callable[[str, Floats, Moments], QuantTensor]
    Tensors = Mapping[str, QuantTensor]
    Source = ops.RMSNorm | ops.GatedActivation | ops.Attention

_SAMPLED: Final = 32  # outputs of each matrix
_SHARES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the inputs' sizes; the rest is the weights'
_LEAST: Final = np.float32(1e-6)  # of the largest size
_MOST: Final = np.log(np.float32(256))  # of a factor, which float16 must hold
_ONE: Final = np.float32(1)


class ChannelEqualizer:
    """Chooses factors for the products of a Program, whose matrices `rounded` rounds.

    They are kept in `store`. `changed` are the weights from which factors were taken.
    """

    def __init__(self, program: Program, rounded: Rounder, store: Matrices) -> None:
        """Find what reads each value, and what writes it."""
        self._written = {op.output: op for op in program.ops}
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in op.inputs:
                self._readers.setdefault(name, []).append(op)
        self._rounded, self._store = rounded, store
        self.changed: dict[str, QuantTensor] = {}

    def products(self, x: str) -> list[str]:
        """Return the matrices of the products of `x`."""
        return [op.weight for op in self._readers[x] if isinstance(op, ops.Linear)]

    def known(self, x: str, width: int) -> Floats | None:
        """Return the factors (width,) that were chosen for `x` before, None if none were."""
        kept = self._store.get(f"{x}.factors", (1, width), FORMATS["F32"])
        factors = None if kept is None else kept.dequantize()[0]
        is_sound = factors is not None and bool((np.isfinite(factors) & (factors > 0)).all())
        return factors if is_sound else None

    def choose(self, x: str, moments: Moments, tensors: Tensors) -> Floats:
        """Return the factors that divide `x`, by which its products err least; keep them."""
        source, plain = self._source(x), np.ones(len(moments.damped), np.float32)
        if source is None:
            return plain
        weights = {name: tensors[name].dequantize() for name in self.products(x)}
        squares = [np.square(weight).mean(axis=0) for weight in weights.values()]
        squares = [square / square.mean() for square in squares if square.any()]
        if not squares:  # all weights are zero
            return plain
        sizes = np.sqrt(np.mean(squares, axis=0))
        inputs, tried = np.sqrt(np.diag(moments.damped)), [plain]
        for share in _SHARES:
            wanted = share * _log(inputs) - (1 - share) * _log(sizes)
            wanted = np.clip(wanted - wanted.mean(), -_MOST, _MOST)
            tried.append(self._possible(source, wanted, tensors))

        def loss(factors: Floats) -> float:
            scaled, total = divided_moments(moments, factors), 0.0
            for name, weight in weights.items():
                rows = np.linspace(0, len(weight) - 1, min(_SAMPLED, len(weight))).astype(np.int64)
                coded = self._rounded(name, weight[rows] * factors, scaled)
                off = coded.dequantize() / factors - weight[rows]
                error = np.einsum("oi,oi->", off @ moments.damped, off)
                total += float(error) * len(weight) / len(rows)
            return total

        # One after another: each takes room for moments, and rounding has threads of its own.
        losses = np.nan_to_num([loss(factors) for factors in tried], nan=np.inf)
        best = tried[int(np.argmin(losses))]
        self._store.add(f"{x}.factors", QuantTensor.from_floats(best[None], FORMATS["F32"]))
        return best

    def move(self, x: str, factors: Floats, tensors: Tensors) -> dict[str, QuantTensor]:
        """Return the weights that change as `x` is divided by factors."""
        source = self._source(x)
        if source is None or (factors == 1).all():
            return {}
        if isinstance(source, ops.RMSNorm):
            changed = {_weight_of(source): self._norm(source, factors, tensors)}
        elif isinstance(source, ops.GatedActivation):
            changed = self._divided(source.up, factors, tensors)
        else:
            heads = factors.reshape(source.num_kv_heads, source.group_size, source.head_dim)
            changed = self._divided(source.v, heads[:, 0].reshape(-1), tensors)
        self.changed |= changed
        scaled = {name: tensors[name].dequantize() * factors for name in self.products(x)}
        floats = {name: QuantTensor.from_floats(w, FORMATS["F32"]) for name, w in scaled.items()}
        return {**changed, **floats}

    def _source(self, x: str) -> Source | None:
        """Return what computes `x`, if factors can be taken from it."""
        op = self._written[x]
        if not all(isinstance(reader, ops.Linear) for reader in self._readers[x]):
            return None
        match op:
            case ops.RMSNorm(num_groups=1, weight=str()):
                return op
            case ops.GatedActivation() if isinstance(self._written[op.up], ops.Linear):
                return op
            case ops.Attention() if has_own_values(op, self._written.values()):
                return op
        return None

    def _possible(self, source: Source, wanted: Floats, tensors: Tensors) -> Floats:
        """Return the factors that can be taken from `source` and are near those wanted.

        `wanted` are their logarithms. What is rounded already can be divided by powers of two; what
        is left of a norm is rounded.
        """
        if isinstance(source, ops.RMSNorm):
            held = tensors[_weight_of(source)].dequantize() + np.float32(source.offset)
            norm = self._norm(source, np.exp(wanted).astype(np.float32), tensors)
            made = norm.dequantize() + np.float32(source.offset)
            is_there = (made != 0) & (held != 0)
            factors = np.divide(held, made, out=np.ones_like(held), where=is_there)
            return np.asarray(factors, np.float32)
        if isinstance(source, ops.Attention):  # query heads that read the same values
            heads = wanted.reshape(source.num_kv_heads, source.group_size, source.head_dim)
            mean = heads.mean(axis=1, keepdims=True)
            wanted = np.broadcast_to(mean, heads.shape).reshape(-1)
        powers: Floats = np.exp2(np.rint(wanted / np.log(2))).astype(np.float32)
        return powers

    def _norm(self, source: ops.RMSNorm, factors: Floats, tensors: Tensors) -> QuantTensor:
        norm, offset = tensors[_weight_of(source)], np.float32(source.offset)
        return QuantTensor.from_floats((norm.dequantize() + offset) / factors - offset, norm.format)

    def _divided(self, name: str, factors: Floats, tensors: Tensors) -> dict[str, QuantTensor]:
        """Return the weights of the product `name` with its outputs divided by factors."""
        op = self._written[name]
        assert isinstance(op, ops.Linear)
        weight = tensors[op.weight]
        if weight.format.block_size == 1:  # floats, whose rows fill no groups
            values = weight.dequantize() / factors[:, None]
            changed = {op.weight: QuantTensor.from_floats(values, weight.format)}
        else:
            changed = {op.weight: scale_rows(weight, _ONE / factors)}
        if op.bias is not None:
            bias = tensors[op.bias]
            changed[op.bias] = QuantTensor.from_floats(bias.dequantize() / factors, bias.format)
        return changed


def divided_moments(moments: Moments, factors: Floats) -> Moments:
    """Return the moments of inputs that are divided by factors."""
    damped = moments.damped / factors / factors[:, None]
    return Moments(damped, moments.factor * factors[:, None])


def _log(sizes: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(sizes, _LEAST * sizes.max()))
    return logs


def _weight_of(norm: ops.RMSNorm) -> str:
    assert norm.weight is not None, "factors are taken from norms that have a weight"
    return norm.weight


def has_own_values(op: ops.Attention, operations: Collection[Op]) -> bool:
    """Whether its values are those of a product, and no other attention reads them."""
    readers = [one for one in operations if isinstance(one, ops.Attention)]
    is_alone = [one.layer for one in readers].count(op.layer) == 1
    return is_alone and any(
        isinstance(one, ops.Linear) and one.output == op.v for one in operations
    )
