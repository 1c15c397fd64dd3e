"""What becomes of a load on replicas of a model: the real scheduler under virtual time."""

from twostroke.simulate.load import ARRIVALS, Arrival, Load, Synthetic
from twostroke.simulate.simulation import Setup, Simulation, simulate
from twostroke.simulate.sweep import GOOD_SHARE, Probe, Sweep, sweep
from twostroke.simulate.traces import PUBLISHED, read_trace

__all__ = [
    "ARRIVALS",
    "GOOD_SHARE",
    "PUBLISHED",
    "Arrival",
    "Load",
    "Probe",
    "Setup",
    "Simulation",
    "Sweep",
    "Synthetic",
    "read_trace",
    "simulate",
    "sweep",
]
