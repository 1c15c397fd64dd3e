"""Finds the products of a model whose inputs may have fewer bits, and their costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.program import Op, Program
    from twostroke.model.quant import QuantTensor

# The cost of a multiplication by its bits, relative to 15 bits, for steps with many rows. Constants
# are used, not the machine's speed, because the same file must get the same bits everywhere.
_COSTS: Final = {15: 1.0, 9: 0.78, 8: 0.58}
_FORMATS_WITH_9_BITS: Final = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "TQ1_0", "TQ2_0"}
)
_LOGITS_SHARE: Final = 0.5  # prompts need the logits of one row only


class Product(Frozen):
    """Matrix products that read the same value, and therefore have the same activation bits.

    `kind`: a name that the corresponding products of all layers share. `costs`: the products'
    multiplications for a row, weighted by their relative time (15 bits: 1.0), by number of bits.
    There is no entry for 9 bits if they save nothing over 15 bits.
    """

    kind: str
    matrices: tuple[str, ...]
    num_weights: int
    costs: Mapping[int, float]


def products_of(program: Program, tensors: Mapping[str, QuantTensor]) -> list[Product]:
    """Return a Program's products whose number of activation bits may be chosen, in order.

    Products with float weights are left out. In models with routers, products whose results reach a
    router are left out, too, because they stay precise.
    """
    has_routers = any(isinstance(op, ops.MixtureOfExperts) for op in program.ops)
    groups: dict[tuple[type[Op], str], list[Op]] = {}
    for op in program.ops:
        if isinstance(op, ops.Logits | ops.MixtureOfExperts) or (
            isinstance(op, ops.Linear) and not has_routers
        ):
            groups.setdefault((type(op), op.inputs[0]), []).append(op)
    products = [_product(group, tensors) for group in groups.values()]
    return [product for product in products if product.matrices]


def _product(group: list[Op], tensors: Mapping[str, QuantTensor]) -> Product:
    costs = dict.fromkeys(_COSTS, 0.0)
    matrices: list[str] = []
    num_weights = 0
    for op in group:
        share = _LOGITS_SHARE if isinstance(op, ops.Logits) else 1.0
        if isinstance(op, ops.MixtureOfExperts):
            share = op.num_used / len(op.experts)
        for weight in op.weights:
            tensor = tensors[weight.name]
            if len(weight.shape) != 2 or tensor.format.multiplies_floats:
                continue
            matrices.append(weight.name)
            count = weight.shape[0] * weight.shape[1]
            num_weights += count
            for bits, cost in _COSTS.items():
                is_used = bits != 9 or tensor.format.name in _FORMATS_WITH_9_BITS
                costs[bits] += count * share * (cost if is_used else _COSTS[15])
    if costs[9] >= costs[15]:
        del costs[9]
    kind = "+".join(name.split(".", 2)[-1] for name in matrices[:3])
    return Product(kind, tuple(matrices), num_weights, costs)
