"""How much longer steps take than their minimum times, interpolated between measured steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from twostroke.lab.planner.roofline import Factors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.program.batch import BatchShape, DecodeRun

_NUM_ROW_COORDINATES: Final = 2  # the first coordinates: rows, and rows per request
_CELLS_PER_DOUBLING: Final = 8


class OverheadRatio(NamedTuple):
    """How much longer a measured step took than its planned minimum time.

    `attention` and `products` are ratios to the minimum times of these operations; `rest_s` is in
    seconds. `position` and `name` identify the measured step.
    """

    position: tuple[float, ...]
    name: str
    attention: float
    products: float
    rest_s: float


def factors_at(position: Sequence[float], steps: Sequence[OverheadRatio]) -> Factors:
    """Return factors that correct the minimum time of a step, from measured steps near it.

    `position` is the step's `coordinates`. `steps` are the measured ones. The factors are means,
    weighted by `nearness`. The context influences only attention.
    """
    row_position = position[:_NUM_ROW_COORDINATES]

    def mean_by_rows(values: Sequence[float]) -> float:
        pairs = zip(steps, values, strict=True)
        return weighted_mean(
            row_position, [(step.position[:_NUM_ROW_COORDINATES], value) for step, value in pairs]
        )

    attention = [(step.position, math.log(step.attention)) for step in steps]
    nearest = max(steps, key=lambda step: nearness(position, step.position))
    return Factors(
        attention=math.exp(weighted_mean(position, attention)),
        products=math.exp(mean_by_rows([math.log(step.products) for step in steps])),
        rest_s=mean_by_rows([step.rest_s for step in steps]),
        nearest=nearest.name,
    )


def weighted_mean(
    position: Sequence[float], values: Sequence[tuple[Sequence[float], float]]
) -> float:
    """Return the mean of measured steps' values, weighted by their nearness to a position.

    Each of `values` has the position of its step.
    """
    weights = [nearness(position, other) for other, _ in values]
    products = [weight * value for weight, (_, value) in zip(weights, values, strict=True)]
    return sum(products) / sum(weights)


def coordinates(batch: BatchShape) -> tuple[float, ...]:
    """Return the position of a step of this shape among measured steps.

    The coordinates are logarithms of rows, rows per request, and mean context.
    """
    sizes = (
        batch.num_rows,
        batch.num_rows / len(batch.starts),
        64 + batch.num_attended() / batch.num_rows,
    )
    return tuple(map(math.log2, sizes))


def cell_of(batch: BatchShape) -> tuple[int, ...]:
    """Return a key for steps of similar shape: the cell in which a step's coordinates lie.

    A cell is the step's coordinates in eighths of a doubling, rounded.
    """
    return tuple([round(_CELLS_PER_DOUBLING * value) for value in coordinates(batch)])


def cells_of(run: DecodeRun) -> list[tuple[int, ...]]:
    """Return the `cell_of` each decode step of a run."""
    num_rows = run.num_rows
    by_rows = round(_CELLS_PER_DOUBLING * math.log2(num_rows))
    contexts = (64 + run.num_attended() / num_rows).tolist()
    return [(by_rows, 0, round(_CELLS_PER_DOUBLING * math.log2(size))) for size in contexts]


def cell_center(cell: tuple[int, ...]) -> list[float]:
    """Return the coordinates of the center of a cell of similar steps."""
    return [index / _CELLS_PER_DOUBLING for index in cell]


def nearness(position: Sequence[float], other: Sequence[float]) -> float:
    """Return the weight of a measured step at position `other` for a step at `position`.

    It is the inverse 4th power of the distance.
    """
    return 1 / (math.dist(position, other) ** 4 + 1e-9)
