"""Reference steps, which correct planned times of models that were not measured on this machine."""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner.overhead import (
    OverheadRatio,
    cell_center,
    cell_of,
    cells_of,
    coordinates,
    factors_at,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.roofline import Factors, Roofline
    from twostroke.model.program.batch import BatchShape, DecodeRun

REFERENCE: Final = "gemma3-270m on two threads of an AMD EPYC"


class ReferenceCalibration(Frozen):
    """Corrects the minimum times of a plan by measured steps of another model.

    It implements `Correction`, for models that were not measured on this machine. In `steps`, the
    time of a step besides its operations (`rest_s`) is per layer, since models differ in depth.
    """

    steps: tuple[OverheadRatio, ...]

    def factors(self, roofline: Roofline, batch: BatchShape) -> Factors:
        """Return the factors that correct the minimum time of a step of this shape."""
        return self._factors_at(roofline, coordinates(batch))

    def cell(self, batch: BatchShape) -> tuple[int, ...]:
        """Return a key for steps of similar shape, which get the same correction factors."""
        return cell_of(batch)

    def cells(self, run: DecodeRun) -> list[tuple[int, ...]]:
        """Return the key `cell` of each decode step of a run."""
        return cells_of(run)

    def factors_in(self, roofline: Roofline, cell: tuple[int, ...]) -> Factors:
        """Return the correction factors for all steps of similar shape, given their key `cell`."""
        return self._factors_at(roofline, cell_center(cell))

    def _factors_at(self, roofline: Roofline, position: Sequence[float]) -> Factors:
        factors = factors_at(position, self.steps)
        return replace(factors, rest_s=factors.rest_s * roofline.num_layers)


def reference_steps(device: Device) -> ReferenceCalibration | None:
    """Return reference steps, measured on another machine with the kernels of `device`.

    Returns None if there are none for these kernels.
    """
    (kernels, *_) = device.peaks
    steps = _steps_by_kernels().get(kernels)
    return ReferenceCalibration(steps) if steps else None


@lru_cache(maxsize=1)
def _steps_by_kernels() -> dict[str, tuple[OverheadRatio, ...]]:
    file = resources.files("twostroke.lab.planner").joinpath("reference_calibration.csv")
    steps: dict[str, tuple[OverheadRatio, ...]] = {}
    for row in csv.DictReader(file.read_text("utf-8").splitlines()):
        shape = StepShape(int(row["streams"]), int(row["context"]), int(row["prompt"]))
        step = OverheadRatio(
            coordinates(shape.batch),
            shape.name,
            attention=float(row["attention"]),
            products=float(row["products"]),
            rest_s=float(row["rest_us"]) * 1e-6,
        )
        steps[row["kernels"]] = (*steps.get(row["kernels"], ()), step)
    return steps
