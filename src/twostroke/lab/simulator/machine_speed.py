"""How much slower a machine is than its measured steps predict, by times of recorded requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.requests import COMPLETED
from twostroke.lab.simulator.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.simulator.load import Workload
    from twostroke.lab.simulator.simulation import SimulationSetup

MAX_SLOWNESS: Final = 2.0  # the search is from half to twice the time of the measured steps
_NUM_SIMULATED: Final = 7  # values of the slowness
_QUANTILES: Final = (0.1, 0.3, 0.5, 0.7, 0.9)  # of parts of the trace
_MAX_PARTS: Final = 10
_MIN_PART: Final = 20  # recorded requests
_MIN_PARTS: Final = 3
_MIN_SPREAD: Final = 1.1  # a machine that was steady may still be 10% slower or faster tomorrow
_ASSUMED: Final = (0.8, 0.9, 1.0, 1.1, 1.25)


class MachineSpeed(Frozen):
    """How much longer steps take than simulated, due to model errors and other programs.

    Attributes:
        slowness: equally likely ratios of real times to simulated times, in ascending order.
        num_recorded: number of recorded requests from which they were computed; 0 if they are
            assumed.
    """

    slowness: tuple[float, ...] = _ASSUMED
    num_recorded: int = 0

    @property
    def middle(self) -> float:
        """The median ratio."""
        return self.slowness[len(self.slowness) // 2]

    @property
    def is_out_of_range(self) -> bool:
        """Whether the recorded times are too far from the simulated ones to be compared."""
        low, high = self.slowness[1], self.slowness[-2]
        return self.num_recorded > 0 and (high >= MAX_SLOWNESS or low <= 1 / MAX_SLOWNESS)


def slowed(
    setup: SimulationSetup, load: Workload, slowness: float
) -> tuple[SimulationSetup, Workload]:
    """Return a simulation of a slower machine, whose times are all divided by `slowness`.

    A machine that is twice as slow is a machine of the same speed whose load is twice as fast, in
    units of time that are twice as long. Multiply the simulated times by `slowness` afterwards.
    """
    if slowness == 1.0:
        return setup, load
    link = setup.link or setup.device.link
    changed = replace(
        setup,
        overhead_s=setup.overhead_s / slowness,
        page_cache_speed=setup.page_cache_speed * slowness,
        link=None if link is None else link * slowness,
    )
    return changed, load.changed(speed=slowness)


def recorded_speed(setup: SimulationSetup, load: Workload) -> MachineSpeed:
    """Return the speed of the machine that recorded a load, compared with its simulation.

    The simulation has the settings of the server that recorded the load; `setup` is the simulated
    server. The load is divided into parts. The slowness of a part is chosen so that its simulated
    requests have the median E2E of its recorded requests. Without enough recorded times, steps are
    assumed to take from 0.8 to 1.25 times as long.
    """
    recorded_s = np.array(
        [
            np.nan if (e2e_s := arrival.recorded_e2e_s) is None else e2e_s
            for arrival in load.arrivals
        ]
    )
    settings = load.settings
    if settings is None or np.count_nonzero(recorded_s > 0) < _MIN_PARTS * _MIN_PART:
        return MachineSpeed()
    batch = replace(
        setup.batch, token_budget=settings.token_budget, max_running=settings.max_running
    )
    setup = replace(setup, batch=batch)
    simulated = np.geomspace(1 / MAX_SLOWNESS, MAX_SLOWNESS, _NUM_SIMULATED)
    times_s = np.array([_e2e_s(setup, load, slowness) for slowness in simulated.tolist()])
    are_known = np.flatnonzero((recorded_s > 0) & (times_s > 0).all(axis=0))
    num_parts = min(_MAX_PARTS, len(are_known) // _MIN_PART)
    if num_parts < _MIN_PARTS:
        return MachineSpeed()
    logs = [
        np.interp(
            np.log(np.median(recorded_s[part])),
            np.maximum.accumulate(np.log(np.median(times_s[:, part], axis=1))),
            np.log(simulated),
        )
        for part in np.array_split(are_known, num_parts)
    ]
    return MachineSpeed(_spread(np.exp(np.quantile(logs, _QUANTILES)).tolist()), len(are_known))


def _spread(slowness: Sequence[float]) -> tuple[float, ...]:
    """Return the values; move both ends outward if they are less than 10% from the middle."""
    middle = slowness[len(slowness) // 2]
    first, *inner, last = slowness
    return (min(first, middle / _MIN_SPREAD), *inner, max(last, middle * _MIN_SPREAD))


def _e2e_s(setup: SimulationSetup, load: Workload, slowness: float) -> np.ndarray:
    """Return the seconds of each request on a slower machine; NaN if it is not completed."""
    simulation = simulate(*slowed(setup, load, slowness))
    return np.array(
        [
            slowness * log.timings.e2e_s if log.outcome == COMPLETED else np.nan
            for log in simulation.logs
        ]
    )
