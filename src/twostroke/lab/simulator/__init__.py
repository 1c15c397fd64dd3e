"""Simulates a workload on replicas of a model: the real scheduler under virtual time."""

from twostroke.lab.simulator.load import ARRIVALS, RequestArrival, Synthetic, Workload
from twostroke.lab.simulator.simulation import Setup, Simulation, simulate
from twostroke.lab.simulator.sweep import DEFAULT_GOOD_SHARE, LoadProbe, Sweep, sweep
from twostroke.lab.simulator.traces import PUBLISHED_TRACES, read_trace

__all__ = [
    "ARRIVALS",
    "DEFAULT_GOOD_SHARE",
    "PUBLISHED_TRACES",
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
