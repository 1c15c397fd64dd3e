"""In which numbers training computes its products."""

from __future__ import annotations

import time

import torch

_LEAST_GAIN = 1.3  # from which bfloat16 is worth its rounding
_TRIES = 10


def fast_products() -> torch.autocast:
    """Return a context in which products are computed in bfloat16, if that is faster here."""
    seconds = {kind: _product_s(kind) for kind in (torch.float32, torch.bfloat16)}
    gains = seconds[torch.float32] > _LEAST_GAIN * seconds[torch.bfloat16]
    return torch.autocast("cpu", torch.bfloat16, enabled=gains)


def _product_s(kind: torch.dtype) -> float:
    """Return the least time of a product of usual size."""
    rows, weight = (torch.ones(512, 512, dtype=kind) for _ in range(2))
    times = []
    for _ in range(_TRIES):
        began_s = time.perf_counter()
        _ = rows @ weight
        times.append(time.perf_counter() - began_s)
    return min(times)
