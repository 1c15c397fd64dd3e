"""This machine's limits: measured once for each set-up, then remembered."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from twostroke.backends.cpu.team import measure_bandwidth, measure_peak
from twostroke.core import env
from twostroke.core.errors import BackendError, UsageError
from twostroke.core.hardware import Hardware
from twostroke.core.machine import memory_total, processor_name

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.engine.counters import Strokes

_VERSION = 3  # of the measurement: raise it when what is measured changes


class Limits:
    """One engine's limits, measured (or remembered) at first use, which nothing it does exceeds.

    A machine that was busy when it was measured shows itself by a share above 100%. It is measured
    again then, once; a rate that is beyond the limits even so is the limit itself.
    """

    def __init__(self, level: str, num_threads: int, stream_bytes: int) -> None:
        """Be the limits that `machine` measures for these."""
        self._set_up = (level, num_threads, stream_bytes)
        self._hardware: Hardware | None = None
        self._was_measured_again = False

    def hardware(self) -> Hardware | None:
        """Return what was measured; None where no native library can measure."""
        if self._hardware is None:
            self._hardware = self._machine(again=False)
        return self._hardware

    def beside(self, strokes: Strokes) -> Hardware | None:
        """Return the limits to show `strokes` beside; None where there are none."""
        hardware = self.hardware()
        if hardware is None:
            return None
        if _exceeds(strokes, hardware) and not self._was_measured_again:
            self._was_measured_again = True
            hardware = self._hardware = self._machine(again=True) or hardware
        return _raised(hardware, strokes)

    def seen(self, strokes: Strokes) -> Hardware | None:
        """Return the limits, at least what `strokes` achieved; never measures a machine at work."""
        hardware = self.hardware()
        return None if hardware is None else _raised(hardware, strokes)

    def _machine(self, *, again: bool) -> Hardware | None:
        level, num_threads, stream_bytes = self._set_up
        try:
            return machine(level, num_threads, stream_bytes, again=again)
        except (BackendError, UsageError):  # a level for the cpu backend, while another computes
            return None


def _exceeds(strokes: Strokes, hardware: Hardware) -> bool:
    return _raised(hardware, strokes) != hardware


def _raised(hardware: Hardware, strokes: Strokes) -> Hardware:
    """Return limits that are at least what the strokes achieved."""
    both = (strokes.prefill, strokes.decode)
    return replace(
        hardware,
        bandwidth=max(hardware.bandwidth, *(stroke.bytes_per_s for stroke in both)),
        peak=max(hardware.peak, *(stroke.flops_per_s for stroke in both)),
    )


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
    partial = path.with_suffix(".part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(hardware), indent=1))
        partial.replace(path)
        return
    with suppress(OSError):  # half of it, on a full disk
        partial.unlink(missing_ok=True)
