"""The limits of a machine, which every measured speed is compared with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device's memory, bandwidth and arithmetic peak, and where the figures come from.

    `bandwidth` is in bytes/s for streams the size of a model; `peak` in operations/s (one
    multiply-add is two) of the best arithmetic that the kernels of this level can use.
    """

    name: str
    num_threads: int
    memory_bytes: int
    bandwidth: float
    peak: float
    peak_kind: str
    source: str
