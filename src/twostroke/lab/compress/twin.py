"""Off-grid twins: models of the same function whose weights lie on no quantization grid.

A file that was quantized before loses nothing when it is quantized to the same grid again, so it
says nothing about a quantizer. In a twin, random factors have moved between each matrix and what
stands before it: norms, the up projection of a gated feed-forward, values. Products, and which
channels have outliers, stay about as they were.
"""

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

_LARGEST = 2.0  # factor; the smallest is its inverse


def twin_of(
    program: Program, tensors: Mapping[str, QuantTensor], seed: int = 0
) -> dict[str, QuantTensor]:
    """Return the Program's weights in float32, with factors moved between them."""
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
    """Move factors from the inputs of `products` to what `op` computes them from."""
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
    factors: Floats = np.exp(rng.uniform(-1, 1, count) * np.log(_LARGEST)).astype(np.float32)
    return factors


def _scale_outputs(op: Op, factors: Floats, weights: dict[str, Floats]) -> None:
    assert isinstance(op, ops.Linear), "values and the up projection are products"
    weights[op.weight] = weights[op.weight] * factors[:, None]
    if op.bias is not None:
        weights[op.bias] = weights[op.bias] * factors
