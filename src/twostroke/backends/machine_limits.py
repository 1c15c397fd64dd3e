"""This machine's limits: measured once for each set-up, then remembered."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from twostroke.backends.cpu.team import measure_bandwidth, measure_peak
from twostroke.core import env
from twostroke.core.errors import BackendError, ModelFormatError, UsageError
from twostroke.core.hardware import Hardware, memory_total, processor_name
from twostroke.core.json_io import read_checked_json, write_checked_json

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 3  # of the measurement: raise it when what is measured changes


class MachineLimits:
    """The machine's limits for one engine, measured (or read from the cache) at first use.

    A measurement on a busy machine is too low, and the engine's own speed may exceed it. The
    machine is then measured again, once; a speed that still exceeds the limit becomes the limit.
    """

    def __init__(self, level: str, num_threads: int, stream_bytes: int) -> None:
        """Take arguments of `machine`."""
        self._set_up: tuple[str, int, int] | None = (level, num_threads, stream_bytes)
        self._hardware: Hardware | None = None
        self._was_measured_again = False

    @classmethod
    def known(cls, hardware: Hardware | None) -> MachineLimits:
        """Return limits that were measured elsewhere; None: they could not be measured."""
        limits = cls("portable", 1, 0)
        limits._set_up, limits._hardware = None, hardware
        return limits

    def hardware(self) -> Hardware | None:
        """Return the measured limits; None if they cannot be measured."""
        if self._hardware is None:
            self._hardware = self._measure(again=False)
        return self._hardware

    def above(
        self, *, bytes_per_s: float, flops_per_s: float, may_measure: bool
    ) -> Hardware | None:
        """Return limits that are not below the speeds that the engine achieved.

        Without `may_measure` nothing is measured again, since the machine is busy.
        """
        hardware = self.hardware()
        if hardware is None:
            return None
        if bytes_per_s <= hardware.bandwidth and flops_per_s <= hardware.peak:
            return hardware
        if may_measure and not self._was_measured_again:
            self._was_measured_again = True
            hardware = self._hardware = self._measure(again=True) or hardware
        return replace(
            hardware,
            bandwidth=max(hardware.bandwidth, bytes_per_s),
            peak=max(hardware.peak, flops_per_s),
        )

    def _measure(self, *, again: bool) -> Hardware | None:
        if self._set_up is None:
            return None
        level, num_threads, stream_bytes = self._set_up
        try:
            return machine(level, num_threads, stream_bytes, again=again)
        except (BackendError, UsageError):  # the cpu backend cannot run here; another one does
            return None


def machine(level: str, num_threads: int, stream_bytes: int, *, again: bool = False) -> Hardware:
    """Return the machine's bandwidth and peak for kernels of `level` on `num_threads` threads.

    `stream_bytes` is the size of what each step streams (the weights): models that fit into the
    last-level cache have a higher bandwidth. The measurement takes less than a second, the first
    time or with `again`; the result is kept in the cache folder. A busy machine measures too low,
    never too high, so the best of all measurements is kept and returned.
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
    with suppress(OSError):  # the machine is then measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(path, asdict(measured))
    return measured


def _read(path: Path) -> Hardware | None:
    try:
        hardware = Hardware(**read_checked_json(path))
        return hardware if hardware.bandwidth > 0 and hardware.peak > 0 else None
    except (ModelFormatError, TypeError):
        return None
