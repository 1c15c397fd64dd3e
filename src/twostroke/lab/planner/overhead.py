"""How far steps are from their least times, told by those near them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from twostroke.lab.planner.roofline import Factors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.program.batch import BatchShape

_OF_ROWS: Final = 2  # of a place's coordinates: rows, and rows of a request
_CELLS: Final = 8  # for each doubling of a coordinate


class OverheadRatio(NamedTuple):
    """A known step: its place, its name, and what its parts take over their least times."""

    place: tuple[float, ...]
    name: str
    attention: float
    products: float
    rest_s: float


def factors_at(place: Sequence[float], known: Sequence[OverheadRatio]) -> Factors:
    """Return the factors of a step at a place. Contexts matter to attention alone."""
    near = [nearness(place, one.place) for one in known]
    rows = place[:_OF_ROWS]

    def of_rows(values: Sequence[float]) -> float:
        pairs = zip(known, values, strict=True)
        return mean_near(rows, [(one.place[:_OF_ROWS], value) for one, value in pairs])

    attention = [(one.place, math.log(one.attention)) for one in known]
    return Factors(
        attention=math.exp(mean_near(place, attention)),
        products=math.exp(of_rows([math.log(one.products) for one in known])),
        rest_s=of_rows([one.rest_s for one in known]),
        nearest=known[max(range(len(near)), key=near.__getitem__)].name,
    )


def mean_near(place: Sequence[float], known: Sequence[tuple[Sequence[float], float]]) -> float:
    """Return the mean of the values known at places, by their nearness to `place`."""
    weights = [nearness(place, there) for there, _ in known]
    return sum(w * value for w, (_, value) in zip(weights, known, strict=True)) / sum(weights)


def place_of(batch: BatchShape) -> tuple[float, ...]:
    """Return the coordinates of a step: logarithms of rows, rows of a request, and context."""
    requests = len(batch.starts)
    sizes = batch.num_rows, batch.num_rows / requests, 64 + batch.num_attended() / batch.num_rows
    return tuple(map(math.log2, sizes))


def cell_of(batch: BatchShape) -> tuple[int, ...]:
    """Return the coordinates of a step, as multiples of an eighth of a doubling."""
    return tuple([round(_CELLS * one) for one in place_of(batch)])


def middle_of(cell: tuple[int, ...]) -> list[float]:
    """Return the coordinates of a cell's middle."""
    return [one / _CELLS for one in cell]


def nearness(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the weight of a place for another: the inverse fourth power of their distance."""
    return 1 / (math.dist(one, other) ** 4 + 1e-9)
