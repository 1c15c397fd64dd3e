"""Matrices whose columns were sorted by their groups ("act-order").

The inputs of a feed-forward's last matrix are the outputs of the two before it: their rows take the
same order, and no value changes. Other matrices read normalized rows or merged heads, which others
read, too: such a matrix keeps its order, and kernels gather its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numpy.typing import NDArray

    from twostroke.model.quant import QuantTensor

# A matrix whose inputs are the products of others' outputs: these, by the last part of their names.
_PRODUCERS = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}


def place_columns(
    tensors: Mapping[str, QuantTensor], orders: Mapping[str, NDArray[Any]]
) -> dict[str, QuantTensor]:
    """Return tensors by name that know which inputs their columns belong to.

    Column i of the matrix `name` in `orders` belongs to the input `orders[name][i]`.
    """
    placed = dict(tensors)
    for name, order in orders.items():
        scope, _, last = name.removesuffix(".weight").rpartition(".")
        producers = [f"{scope}.{part}" for part in _PRODUCERS.get(last, ())]
        fits = all(
            f"{p}.weight" in tensors and tensors[f"{p}.weight"].shape[0] == len(order)
            for p in producers
        )
        if producers and fits:
            for producer in producers:
                tensor = placed[f"{producer}.weight"]
                placed[f"{producer}.weight"] = replace(tensor, data=tensor.data[order])
        else:
            placed[name] = replace(placed[name], order=order.astype(np.int32))
    return placed
