"""Moves factors between matrices before rounding, so that channels have similar sizes.

The method is AWQ's (arXiv:2306.00978).
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

    from twostroke.lab.compress.saved_work import SavedMatrices
    from twostroke.model.program import Op, Program
    from twostroke.model.quant import Floats

    Rounder = Callable[[str, Floats, Moments], QuantTensor]
    Tensors = Mapping[str, QuantTensor]
    Source = ops.RMSNorm | ops.GatedActivation | ops.Attention

_NUM_SAMPLED_OUTPUTS: Final = 32  # of each matrix
_INPUT_SHARES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # weights of input sizes, not weight sizes
_MIN_RELATIVE_SIZE: Final = np.float32(1e-6)  # to the largest size
_MAX_LOG_FACTOR: Final = np.log(np.float32(256))  # so that scales fit into float16
_UNIT: Final = np.float32(1)


class ChannelEqualizer:
    """Moves factors per channel between neighbouring matrices, so that rounding changes less.

    The inputs of a matrix product are divided by the factors, in the operation that computes these
    inputs, and the product's matrix is multiplied by them. The model's outputs stay the same.
    `round_weight` rounds the matrix, to measure the error with and without factors. The factors are
    saved in `store`. `changed` has the weights that were divided by factors.
    """

    def __init__(self, program: Program, round_weight: Rounder, store: SavedMatrices) -> None:
        """Index a Program's operations by the value they compute and the values they read."""
        self._op_by_output = {op.output: op for op in program.ops}
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in op.inputs:
                self._readers.setdefault(name, []).append(op)
        self._round_weight = round_weight
        self._store = store
        self.changed: dict[str, QuantTensor] = {}

    def products(self, x: str) -> list[str]:
        """Return the names of the matrices that multiply the value `x`."""
        return [op.weight for op in self._readers[x] if isinstance(op, ops.Linear)]

    def load(self, x: str, width: int) -> Floats | None:
        """Return the saved factors (width,) of the value `x`; None if missing or damaged."""
        tensor = self._store.get(f"{x}.factors", (1, width), FORMATS["F32"])
        factors = None if tensor is None else tensor.dequantize()[0]
        is_valid = factors is not None and bool((np.isfinite(factors) & (factors > 0)).all())
        return factors if is_valid else None

    def choose(self, x: str, moments: Moments, tensors: Tensors) -> Floats:
        """Choose the factors by which the value `x` is divided so that rounding changes least.

        `x` is the input of some matrix products, `moments` are its second moments. The factors,
        (width,), are saved and returned. They are 1 if the operation that computes `x` cannot be
        divided.
        """
        source, unit_factors = self._source(x), np.ones(len(moments.damped), np.float32)
        if source is None:
            return unit_factors
        weights = {name: tensors[name].dequantize() for name in self.products(x)}
        squares = [np.square(weight).mean(axis=0) for weight in weights.values()]
        squares = [square / square.mean() for square in squares if square.any()]
        if not squares:  # all weights are zero
            return unit_factors
        sizes = np.sqrt(np.mean(squares, axis=0))
        inputs, candidates = np.sqrt(np.diag(moments.damped)), [unit_factors]
        for share in _INPUT_SHARES:
            log_factors = share * _log_sizes(inputs) - (1 - share) * _log_sizes(sizes)
            log_factors = log_factors - log_factors.mean()
            log_factors = np.clip(log_factors, -_MAX_LOG_FACTOR, _MAX_LOG_FACTOR)
            candidates.append(self._movable_factors(source, log_factors, tensors))

        def loss(factors: Floats) -> float:
            scaled, total = divided_moments(moments, factors), 0.0
            for name, weight in weights.items():
                count = min(_NUM_SAMPLED_OUTPUTS, len(weight))
                rows = np.linspace(0, len(weight) - 1, count).astype(np.int64)
                rounded = self._round_weight(name, weight[rows] * factors, scaled)
                error = rounded.dequantize() / factors - weight[rows]
                squared_error = np.einsum("oi,oi->", error @ moments.damped, error)
                total += float(squared_error) * len(weight) / len(rows)
            return total

        # One after another, because each needs memory for moments, and rounding uses all threads.
        losses = np.nan_to_num([loss(factors) for factors in candidates], nan=np.inf)
        best = candidates[int(np.argmin(losses))]
        self._store.add(f"{x}.factors", QuantTensor.from_floats(best[None], FORMATS["F32"]))
        return best

    def move(self, x: str, factors: Floats, tensors: Tensors) -> dict[str, QuantTensor]:
        """Divide the value `x` by factors; return all weights that change by this, by name.

        `tensors` has the current weights by name.
        """
        source = self._source(x)
        if source is None or (factors == 1).all():
            return {}
        if isinstance(source, ops.RMSNorm):
            changed = {_norm_weight(source): self._norm(source, factors, tensors)}
        elif isinstance(source, ops.GatedActivation):
            changed = self._divide_outputs(source.up, factors, tensors)
        else:
            heads = factors.reshape(source.num_kv_heads, source.group_size, source.head_dim)
            changed = self._divide_outputs(source.v, heads[:, 0].reshape(-1), tensors)
        self.changed |= changed
        scaled = {name: tensors[name].dequantize() * factors for name in self.products(x)}
        floats = {name: QuantTensor.from_floats(w, FORMATS["F32"]) for name, w in scaled.items()}
        return {**changed, **floats}

    def _source(self, x: str) -> Source | None:
        """Return the operation that computes the value `x`, to divide its outputs by factors.

        Returns None if the operation cannot be changed this way.
        """
        op = self._op_by_output[x]
        if not all(isinstance(reader, ops.Linear) for reader in self._readers[x]):
            return None
        match op:
            case ops.RMSNorm(num_groups=1, weight=str()):
                return op
            case ops.GatedActivation() if isinstance(self._op_by_output[op.up], ops.Linear):
                return op
            case ops.Attention() if has_own_values(op, self._op_by_output.values()):
                return op
        return None

    def _movable_factors(self, source: Source, log_factors: Floats, tensors: Tensors) -> Floats:
        """Return the factors nearest to exp(`log_factors`) by which `source` can be divided.

        An already rounded matrix can be divided by powers of two. The weight of a norm is rounded
        to its format after the division.
        """
        if isinstance(source, ops.RMSNorm):
            before = tensors[_norm_weight(source)].dequantize() + np.float32(source.offset)
            norm = self._norm(source, np.exp(log_factors).astype(np.float32), tensors)
            after = norm.dequantize() + np.float32(source.offset)
            is_nonzero = (after != 0) & (before != 0)
            factors = np.divide(before, after, out=np.ones_like(before), where=is_nonzero)
            return np.asarray(factors, np.float32)
        if isinstance(source, ops.Attention):  # query heads of a group share their values
            heads = log_factors.reshape(source.num_kv_heads, source.group_size, source.head_dim)
            mean = heads.mean(axis=1, keepdims=True)
            log_factors = np.broadcast_to(mean, heads.shape).reshape(-1)
        powers: Floats = np.exp2(np.rint(log_factors / np.log(2))).astype(np.float32)
        return powers

    def _norm(self, source: ops.RMSNorm, factors: Floats, tensors: Tensors) -> QuantTensor:
        norm, offset = tensors[_norm_weight(source)], np.float32(source.offset)
        return QuantTensor.from_floats((norm.dequantize() + offset) / factors - offset, norm.format)

    def _divide_outputs(
        self, name: str, factors: Floats, tensors: Tensors
    ) -> dict[str, QuantTensor]:
        """Divide the outputs of a matrix product by factors; return its changed weights by name."""
        op = self._op_by_output[name]
        assert isinstance(op, ops.Linear)
        weight = tensors[op.weight]
        if weight.format.block_size == 1:  # floats
            values = weight.dequantize() / factors[:, None]
            changed = {op.weight: QuantTensor.from_floats(values, weight.format)}
        else:
            changed = {op.weight: scale_rows(weight, _UNIT / factors)}
        if op.bias is not None:
            bias = tensors[op.bias]
            changed[op.bias] = QuantTensor.from_floats(bias.dequantize() / factors, bias.format)
        return changed


def divided_moments(moments: Moments, factors: Floats) -> Moments:
    """Return the second moments of a matrix product's inputs after a division by factors."""
    damped = moments.damped / factors / factors[:, None]
    return Moments(damped, moments.factor * factors[:, None])


def _log_sizes(sizes: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(sizes, _MIN_RELATIVE_SIZE * sizes.max()))
    return logs


def _norm_weight(norm: ops.RMSNorm) -> str:
    assert norm.weight is not None, "factors are taken from norms that have a weight"
    return norm.weight


def has_own_values(op: ops.Attention, operations: Collection[Op]) -> bool:
    """Whether an attention layer gets its values from a matrix product that no other layer reads.

    If so, the outputs of this product can be scaled without changing other layers.
    """
    readers = [op for op in operations if isinstance(op, ops.Attention)]
    is_only_reader = [reader.layer for reader in readers].count(op.layer) == 1
    return is_only_reader and any(
        isinstance(other, ops.Linear) and other.output == op.v for other in operations
    )
