"""What this engine's kernels usually take, for models of which no step was measured here.

`usual.csv` has steps of one model on one machine, over the least times of that machine: a row for
each kind of kernels, as `twostroke doctor` names the peak of their arithmetic.
`make bench WHAT=plan` says how far other models are from them.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.single_step import Shape
from twostroke.lab.planner.overhead import OverheadRatio, cell_of, factors_at, middle_of, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.roofline import Factors, Roofline
    from twostroke.model.program.batch import BatchShape

MEASURED: Final = "gemma3-270m on two threads of an AMD EPYC"


class ReferenceCalibration(Frozen):
    """Corrects least times by the steps of another model, `known`; see `calibration.Calibration`.

    Time around operations counts for each layer.
    """

    known: tuple[OverheadRatio, ...]

    def factors(self, roofline: Roofline, batch: BatchShape) -> Factors:
        """Return how a step like `batch` is corrected."""
        return self._factors_at(roofline, place_of(batch))

    def cell(self, batch: BatchShape) -> tuple[int, ...]:
        """Return the same for shapes that are corrected almost alike."""
        return cell_of(batch)

    def factors_in(self, roofline: Roofline, cell: tuple[int, ...]) -> Factors:
        """Return how a step in the middle of a cell is corrected."""
        return self._factors_at(roofline, middle_of(cell))

    def _factors_at(self, roofline: Roofline, place: Sequence[float]) -> Factors:
        found = factors_at(place, self.known)
        return replace(found, rest_s=found.rest_s * roofline.num_layers)


def usual(device: Device) -> ReferenceCalibration | None:
    """Return what kernels usually take on this machine; None if that is not known of its kind."""
    (kernels, *_) = device.peaks
    known = _known().get(kernels)
    return ReferenceCalibration(known) if known else None


@lru_cache(maxsize=1)
def _known() -> dict[str, tuple[OverheadRatio, ...]]:
    text = resources.files("twostroke.lab.planner").joinpath("usual.csv").read_text("utf-8")
    found: dict[str, tuple[OverheadRatio, ...]] = {}
    for row in csv.DictReader(text.splitlines()):
        shape = Shape(int(row["streams"]), int(row["context"]), int(row["prompt"]))
        factors = float(row["attention"]), float(row["products"])
        one = OverheadRatio(
            place_of(shape.batch), shape.name, *factors, float(row["rest_us"]) * 1e-6
        )
        found[row["kernels"]] = (*found.get(row["kernels"], ()), one)
    return found
