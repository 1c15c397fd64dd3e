"""What becomes of a load on replicas of a model: the real scheduler under virtual time."""

from twostroke.lab.simulator.load import ARRIVALS, RequestArrival, Synthetic, Workload
from twostroke.lab.simulator.simulation import Setup, Simulation, simulate
from twostroke.lab.simulator.sweep import GOOD_SHARE, LoadProbe, Sweep, sweep
from twostroke.lab.simulator.traces import PUBLISHED, read_trace

__all__ = [
    "ARRIVALS",
    "GOOD_SHARE",
    "PUBLISHED",
    "LoadProbe",
    "RequestArrival",
    "Setup",
    "Simulation",
    "Sweep",
    "Synthetic",
    "Workload",
    "read_trace",
    "simulate",
    "sweep",
]
