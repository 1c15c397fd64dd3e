"""Simulates a workload on replicas of a model: the real scheduler under virtual time."""

from twostroke.lab.simulator.load import ARRIVALS, RequestArrival, SyntheticWorkload, Workload
from twostroke.lab.simulator.simulation import Simulation, SimulationSetup, simulate
from twostroke.lab.simulator.sweep import DEFAULT_GOOD_SHARE, LoadProbe, Sweep, sweep
from twostroke.lab.simulator.traces import PUBLISHED_TRACES, read_trace

__all__ = [
    "ARRIVALS",
    "DEFAULT_GOOD_SHARE",
    "PUBLISHED_TRACES",
    "LoadProbe",
    "RequestArrival",
    "Simulation",
    "SimulationSetup",
    "Sweep",
    "SyntheticWorkload",
    "Workload",
    "read_trace",
    "simulate",
    "sweep",
]
