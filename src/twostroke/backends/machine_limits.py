"""The memory bandwidth and arithmetic peak of this machine, measured once and then cached."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from twostroke.backends.cpu.team import measure_bandwidth, measure_peak
from twostroke.core import env
from twostroke.core.errors import BackendError, ModelFormatError, UsageError
from twostroke.core.hardware import Hardware, max_busy_threads, memory_total, processor_name
from twostroke.core.json_io import read_checked_json, write_checked_json

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 4  # raise it when the measurement changes: cached results become invalid


class MachineLimits:
    """The memory bandwidth and peak FLOP/s of the machine, measured or cached, for one engine.

    A measurement on a busy machine is too low, and the engine may run faster. The machine is then
    measured again, once. If the engine is still faster, its speed becomes the limit.
    """

    def __init__(self, level: str, num_threads: int, stream_bytes: int) -> None:
        """Set the kernels' instruction-set level, the threads and the bytes read by a step.

        Nothing is measured yet.
        """
        self._set_up: tuple[str, int, int] | None = (level, num_threads, stream_bytes)
        self._hardware: Hardware | None = None
        self._was_measured_again = False

    @classmethod
    def of_hardware(cls, hardware: Hardware | None) -> MachineLimits:
        """Return machine limits that another process measured; None: they could not be measured."""
        limits = cls("portable", 1, 0)
        limits._set_up, limits._hardware = None, hardware
        return limits

    def hardware(self) -> Hardware | None:
        """Return the machine's bandwidth and peak; None if they cannot be measured.

        The first call measures them, or reads them from the cache.
        """
        if self._hardware is None:
            self._hardware = self._measure(remeasure=False)
        return self._hardware

    def above(
        self, *, bytes_per_s: float, flops_per_s: float, may_measure: bool
    ) -> Hardware | None:
        """Return machine limits that are at least the speeds that the engine achieved.

        If the engine was faster than the limits, the limits are raised. `may_measure`: the machine
        is idle, and can be measured again first.
        """
        hardware = self.hardware()
        if hardware is None:
            return None
        if bytes_per_s <= hardware.bandwidth and flops_per_s <= hardware.peak:
            return hardware
        if may_measure and not self._was_measured_again:
            self._was_measured_again = True
            hardware = self._hardware = self._measure(remeasure=True) or hardware
        return replace(
            hardware,
            bandwidth=max(hardware.bandwidth, bytes_per_s),
            peak=max(hardware.peak, flops_per_s),
        )

    def _measure(self, *, remeasure: bool) -> Hardware | None:
        if self._set_up is None:
            return None
        level, num_threads, stream_bytes = self._set_up
        try:
            return machine(level, num_threads, stream_bytes, remeasure=remeasure)
        except (BackendError, UsageError):  # another backend runs, because cpu cannot
            return None


def machine(
    level: str, num_threads: int, stream_bytes: int, *, remeasure: bool = False
) -> Hardware:
    """Measure this machine's memory bandwidth and peak FLOP/s, or read them from the cache.

    The result is for kernels of instruction-set level `level` on `num_threads` threads. Threads
    beyond the usable cores are not measured, since they would only slow the measurement down.

    `stream_bytes` is the number of bytes that each step reads, which is the size of the weights:
    models that fit into the last-level cache have a higher bandwidth. A measurement takes less than
    a second; it is made the first time and with `remeasure`. A busy machine measures too low, never
    too high, so the best of all measurements is cached and returned.
    """
    num_threads = min(num_threads, max_busy_threads())
    key = f"{_VERSION}|{processor_name()}|{level}|{num_threads}|{stream_bytes.bit_length()}"
    path = env.cache_dir() / "machine" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    cached = _read(path)
    if cached is not None and not remeasure:
        return cached
    peak, kind = measure_peak(level, num_threads)
    bandwidth = measure_bandwidth(level, num_threads, stream_bytes)
    measured = Hardware(
        name=processor_name(),
        num_threads=num_threads,
        memory_bytes=memory_total(),
        bandwidth=max(bandwidth, cached.bandwidth if cached else 0),
        peak=max(peak, cached.peak if cached else 0),
        peak_kind=kind,
        source="measured",
    )
    with suppress(OSError):  # without a cache, the next process measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(path, asdict(measured))
    return measured


def _read(path: Path) -> Hardware | None:
    try:
        hardware = Hardware(**read_checked_json(path))
        return hardware if hardware.bandwidth > 0 and hardware.peak > 0 else None
    except (ModelFormatError, TypeError):
        return None
