"""What becomes of a load on replicas of a model: the real scheduler under virtual time."""

from twostroke.lab.simulator.load import ARRIVALS, Arrival, Load, Synthetic
from twostroke.lab.simulator.simulation import Setup, Simulation, simulate
from twostroke.lab.simulator.sweep import GOOD_SHARE, Probe, Sweep, sweep
from twostroke.lab.simulator.traces import PUBLISHED, read_trace

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
