"""Twins of models, which compute the same with weights that lie on no quantization grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.lab.compress.equalize import has_own_values
from twostroke.model.program import Program, ops
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.program import Op
    from twostroke.model.quant import Floats

_MAX_FACTOR = 2.0  # the smallest factor is its inverse


def twin_of(
    program: Program, tensors: Mapping[str, QuantTensor], seed: int = 0
) -> dict[str, QuantTensor]:
    """Return the float32 weights, by name, of a model that computes the same as another model.

    Random factors are moved between its matrices, so that no weight lies on the quantization grid
    of a file. The twin of a model that was already quantized is a fair test for quantization.
    """
    rng = np.random.default_rng(seed)
    weights = {name: tensors[name].dequantize() for name in program.weight_shapes}
    written = {op.output: op for op in program.ops}
    for op in program.ops:
        readers = [reader for reader in program.ops if op.output in reader.inputs]
        products = [reader for reader in readers if isinstance(reader, ops.Linear)]
        if products and len(products) == len(readers):
            _move(op, products, written, weights, rng)
    return {name: QuantTensor.from_floats(w, FORMATS["F32"]) for name, w in weights.items()}


def _move(
    op: Op,
    products: list[ops.Linear],
    written: Mapping[str, Op],
    weights: dict[str, Floats],
    rng: np.random.Generator,
) -> None:
    """Multiply the outputs of `op` by random factors, and divide its readers' matrices by them.

    `products` are the matrix products that read the output of `op`; `weights` is changed in place.
    """
    match op:
        case ops.RMSNorm(num_groups=1, weight=str(weight)):
            factors = moved = _factors(op.width, rng)
            offset = np.float32(op.offset)
            weights[weight] = (weights[weight] + offset) * factors - offset
        case ops.GatedActivation() if isinstance(written[op.up], ops.Linear):
            factors = moved = _factors(op.width, rng)
            _scale_outputs(written[op.up], factors, weights)
        case ops.Attention() if has_own_values(op, written.values()):
            moved = _factors(op.num_kv_heads * op.head_dim, rng)
            heads = np.repeat(moved.reshape(op.num_kv_heads, -1), op.group_size, axis=0)
            factors = heads.reshape(-1)
            _scale_outputs(written[op.v], moved, weights)
        case _:
            return
    for product in products:
        weights[product.weight] = weights[product.weight] / factors


def _factors(count: int, rng: np.random.Generator) -> Floats:
    factors: Floats = np.exp(rng.uniform(-1, 1, count) * np.log(_MAX_FACTOR)).astype(np.float32)
    return factors


def _scale_outputs(op: Op, factors: Floats, weights: dict[str, Floats]) -> None:
    assert isinstance(op, ops.Linear), "values and the up projection are products"
    weights[op.weight] = weights[op.weight] * factors[:, None]
    if op.bias is not None:
        weights[op.bias] = weights[op.bias] * factors
