"""This machine's limits: measured once for each set-up, then remembered."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from twostroke.backends.cpu.measure import measure_bandwidth, measure_peak
from twostroke.core import env
from twostroke.core.hardware import Hardware
from twostroke.core.machine import memory_total, processor_name

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 1  # of the measurement: raise it when what is measured changes


def machine(level: str, num_threads: int, stream_bytes: int, *, again: bool = False) -> Hardware:
    """Return the machine's bandwidth and peak for kernels of `level` on `num_threads` threads.

    `stream_bytes` is the size of what is streamed at each step (the weights): a model that fits
    into the last-level cache has another bandwidth than one that does not. Measured in well under
    a second the first time, or when `again`; kept in the cache folder afterwards. A busy machine
    measures low, never high, so the best of all measurements is what is kept and returned.
    """
    key = f"{_VERSION}|{processor_name()}|{level}|{num_threads}|{stream_bytes.bit_length()}"
    path = env.cache_dir() / "machine" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    known = _read(path)
    if known is not None and not again:
        return known
    peak, kind = measure_peak(level, num_threads)
    bandwidth = measure_bandwidth(level, num_threads, stream_bytes)
    measured = Hardware(
        name=processor_name(),
        num_threads=num_threads,
        memory_bytes=memory_total(),
        bandwidth=max(bandwidth, known.bandwidth if known else 0),
        peak=max(peak, known.peak if known else 0),
        peak_kind=kind,
        source="measured",
    )
    _write(path, measured)
    return measured


def _read(path: Path) -> Hardware | None:
    try:
        known = Hardware(**json.loads(path.read_text()))
        return known if known.bandwidth > 0 and known.peak > 0 else None
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, hardware: Hardware) -> None:
    """Remember; a folder that cannot be written only means measuring again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(hardware), indent=1))
        partial.replace(path)
    except OSError:
        return
