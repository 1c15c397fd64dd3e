"""Puts columns that were sorted by their groups ("act-order") back into place.

The inputs of a feed-forward's last matrix are the outputs of the two before it: their rows take the
same order, and no value changes. Other matrices read normalized rows or merged heads, which others
read, too: such a matrix is kept in floats, in the order of its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.quant import QuantTensor
from twostroke.weights.published.groups import exact_floats

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numpy.typing import NDArray

# A matrix whose inputs are the products of others' outputs: these, by the last part of their names.
_PRODUCERS = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}


def place_columns(
    tensors: Mapping[str, QuantTensor], orders: Mapping[str, NDArray[Any]]
) -> dict[str, QuantTensor]:
    """Return tensors by name in which column i belongs to input i.

    Column i of the matrix `name` in `orders` belongs to the input `orders[name][i]` until then.
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
                placed[f"{producer}.weight"] = _rows(placed[f"{producer}.weight"], order)
        else:
            values = np.empty(placed[name].shape, np.float32)
            values[:, order] = placed[name].dequantize()
            placed[name] = exact_floats(values)
    return placed


def _rows(tensor: QuantTensor, order: NDArray[Any]) -> QuantTensor:
    return QuantTensor(tensor.format, tensor.shape, tensor.data[order])
