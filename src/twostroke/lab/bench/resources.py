"""The resources that a run took: energy, shares of the machine's limits (MFU, MBU), and costs."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen, check_range
from twostroke.lab.bench.energy import EnergyMeter, EnergyUse, energy_counters
from twostroke.lab.bench.server_counters import (
    ServerCounters,
    counted_between,
    read_counters,
    read_version,
)
from twostroke.lab.measure.requests import steady_window
from twostroke.lab.planner.question import Question
from twostroke.lab.planner.roofline import Roofline
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.endpoint import EndpointClient
    from twostroke.lab.bench.report import BenchReport
    from twostroke.lab.measure.requests import RequestLog
    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel

_SAMPLE_INTERVAL_S: Final = 10.0  # RAPL's counters begin again after a minute at the earliest
_TOKENS_OF_PRICE: Final = 1e6
_LOOPBACK_NAMES: Final = {"localhost", "::1"}
COUNTED_METHOD: Final = "counted by the server in its steps"
ESTIMATED_METHOD: Final = "estimated from the model and the measured latencies"


class BenchMachine(Frozen):
    """The facts about an endpoint's machine and model that the user gives.

    Attributes:
        device: its device, for MFU, MBU and the price; None if unknown.
        num_devices: the number of its devices.
        usd_per_hour: the price of each device; None for the price in the device table, if it has
            one.
        model: the model, for MFU and MBU; None if unknown.
        kv_format: the number format of its keys and values, a key of `FORMATS`.
        counts_energy: whether energy must be counted; None to count it if the endpoint is on this
            machine and the system has counters.
    """

    device: Device | None = None
    num_devices: int = 1
    usd_per_hour: float | None = None
    model: PlannedModel | None = None
    kv_format: str = "f16"
    counts_energy: bool | None = None

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if the price is out of range."""
        check_range(self, "usd_per_hour", high=1e9)

    @property
    def total_usd_per_hour(self) -> float | None:
        """The price of all devices in $ per hour; None if it is unknown."""
        usd = self.usd_per_hour
        if usd is None and self.device is not None:
            usd = self.device.usd_per_hour
        return None if usd is None else usd * self.num_devices

    @property
    def price_source(self) -> str:
        """Where the price comes from."""
        if self.usd_per_hour is not None or self.device is None:
            return "as described by the user"
        return f"{self.device.name}, {self.device.price_source}"


class MachineUse(Frozen):
    """Shares of a machine's limits that a run reached.

    Attributes:
        mfu: FLOP/s over the peak, in prefill steps if the server counts them, else over the whole
            run; None if unknown.
        mbu: bytes per second over the memory bandwidth, in decode steps; None if unknown.
        peak_flops, bandwidth: the limits of all devices, per second.
        limits_source: where the limits come from.
        method: `COUNTED_METHOD` or `ESTIMATED_METHOD`.
    """

    mfu: float | None
    mbu: float | None
    peak_flops: float
    bandwidth: float
    limits_source: str
    method: str


class RunCost(Frozen):
    """The costs of a run in $, if the machine serves only this load.

    Each figure divides the price of the whole machine by a rate of the run. It is None if the rate
    is zero, such as the rate of good requests.

    Attributes:
        usd_per_hour, price_source: the price of all devices.
        per_million_output: per million output tokens.
        per_million_tokens: per million tokens, input and output.
        per_thousand_requests: per thousand completed requests.
        per_thousand_good: per thousand requests that met all objectives; None without objectives.
    """

    usd_per_hour: float
    price_source: str
    per_million_output: float | None
    per_million_tokens: float | None
    per_thousand_requests: float | None
    per_thousand_good: float | None


class RunResources(Frozen):
    """The resources that a run used; unknown resources are None.

    Attributes:
        server_version: the server and its version; empty if unknown.
        counters: counts of the server during the run.
        energy: energy of this machine during the run.
        joules_per_output_token: `energy` divided by all output tokens of the run.
        use: shares of the machine's limits.
        cost: the costs of the machine.
    """

    server_version: str = ""
    counters: ServerCounters | None = None
    energy: EnergyUse | None = None
    joules_per_output_token: float | None = None
    use: MachineUse | None = None
    cost: RunCost | None = None


class ResourceMeter:
    """Measures the resources of one run."""

    def __init__(self, client: EndpointClient, machine: BenchMachine) -> None:
        """Prepare to measure; raise UsageError if energy must be counted and cannot be."""
        self._client = client
        self._machine = machine
        is_local = is_loopback(client.address.host)
        wants_energy = machine.counts_energy or (machine.counts_energy is None and is_local)
        self._counters = (
            energy_counters(must_count=bool(machine.counts_energy)) if wants_energy else []
        )
        self._server_version: str | None = None
        self._server_counters: ServerCounters | None = None
        self._energy: EnergyUse | None = None

    @asynccontextmanager
    async def measure(self, model: str) -> AsyncIterator[None]:
        """Count while the body runs; `model` is the model's name in the endpoint's metrics."""
        if self._server_version is None:
            self._server_version = await read_version(self._client)
        before = await read_counters(self._client, model)
        begin_s = time.monotonic()
        meter = EnergyMeter(self._counters) if self._counters else None
        sampler = asyncio.create_task(_sample(meter)) if meter else None
        try:
            yield
        finally:
            if meter is not None and sampler is not None:
                sampler.cancel()
                self._energy = EnergyUse(meter.sample(), time.monotonic() - begin_s)
            after = await read_counters(self._client, model)
            self._server_counters = counted_between(before, after)

    def resources(self, answers: Sequence[MeasuredAnswer], report: BenchReport) -> RunResources:
        """Return the resources of the measured run with these answers."""
        num_output = sum(answer.log.num_output for answer in answers)
        energy, counters = self._energy, self._server_counters
        return RunResources(
            server_version=self._server_version or "",
            counters=counters,
            energy=energy,
            joules_per_output_token=energy.joules / num_output if energy and num_output else None,
            use=machine_use(self._machine, counters, answers, report),
            cost=run_cost(self._machine, report),
        )


def is_loopback(host: str) -> bool:
    """Return whether an endpoint's host is this machine by its name or address."""
    return host in _LOOPBACK_NAMES or host.startswith("127.")


def run_cost(machine: BenchMachine, report: BenchReport) -> RunCost | None:
    """Return the costs of a run; None if the price is unknown."""
    usd, run = machine.total_usd_per_hour, report.run
    if usd is None:
        return None
    usd_per_s = usd / 3600

    def cost(per_s: float | None, count: float) -> float | None:
        return usd_per_s / per_s * count if per_s else None

    return RunCost(
        usd_per_hour=usd,
        price_source=machine.price_source,
        per_million_output=cost(run.output_per_s, _TOKENS_OF_PRICE),
        per_million_tokens=cost(run.output_per_s + run.input_per_s, _TOKENS_OF_PRICE),
        per_thousand_requests=cost(run.requests_per_s, 1000),
        per_thousand_good=cost(run.good_per_s, 1000),
    )


def machine_use(
    machine: BenchMachine,
    counters: ServerCounters | None,
    answers: Sequence[MeasuredAnswer],
    report: BenchReport,
) -> MachineUse | None:
    """Return the shares of the machine's limits; None if the limits or the work are unknown.

    If the server counted the work of its steps, these counts are used. Otherwise the work is
    estimated from the model.
    """
    question = Question(count=machine.num_devices, kv_format=machine.kv_format)
    peak = bandwidth = None
    source = "measured by the server"
    if machine.device is not None:
        device = machine.device
        arithmetic = device.arithmetic(machine.model.arithmetic if machine.model else "bf16")
        peak = device.peaks[arithmetic] * machine.num_devices
        bandwidth = device.bandwidth * machine.num_devices
        source = f"{device.name}, {device.source or 'as described by the user'}"
    elif counters is not None:
        peak, bandwidth = counters.peak_flops, counters.bandwidth
    if not peak or not bandwidth:
        return None
    shares = _counted_use(counters, peak, bandwidth)
    method = COUNTED_METHOD
    if shares is None and machine.model is not None and machine.device is not None:
        roofline = Roofline(machine.model, machine.device, question)
        method, shares = ESTIMATED_METHOD, _estimated_use(roofline, answers, report)
    if shares is None:
        return None
    return MachineUse(
        mfu=shares[0],
        mbu=shares[1],
        peak_flops=peak,
        bandwidth=bandwidth,
        limits_source=source,
        method=method,
    )


def _counted_use(
    counters: ServerCounters | None, peak: float, bandwidth: float
) -> tuple[float | None, float | None] | None:
    """Return (MFU, MBU) of the steps that the server counted; None if it did not count them."""
    if counters is None or counters.prefill is None or counters.decode is None:
        return None
    prefill, decode = counters.prefill, counters.decode
    return (
        prefill.flops / prefill.seconds / peak if prefill.seconds else None,
        decode.num_bytes / decode.seconds / bandwidth if decode.seconds else None,
    )


def _estimated_use(
    roofline: Roofline, answers: Sequence[MeasuredAnswer], report: BenchReport
) -> tuple[float | None, float | None] | None:
    """Return (MFU, MBU), estimated from the model's work; None without completed requests.

    A request has the FLOPs of its uncached prompt tokens and its output tokens. A decode step is
    assumed to compute the mean number of decoding requests, and to take the median gap between
    chunks: most servers send a chunk after each step, with drafts or without, and most steps have
    no prompt.
    """
    logs = [answer.log for answer in answers if answer.is_completed]
    if not logs:
        return None
    mfu = _flops_per_request(roofline, logs) * _requests_per_s(report) / roofline.peak
    gap = report.run.latencies.get("itl")
    step_s = gap.percentiles["p50"].value if gap is not None else 0.0
    if not step_s:
        return mfu, None
    context = round(np.mean([log.num_prompt + log.num_output / 2 for log in logs]))
    num_decoding = max(1, round(_mean_decoding(logs)))
    step = roofline.min_step(BatchShape.decode((int(context),) * num_decoding))
    return mfu, step.bytes / step_s / roofline.bandwidth


def _flops_per_request(roofline: Roofline, logs: Sequence[RequestLog]) -> float:
    starts = [min(log.num_cached, log.num_prompt - 1) for log in logs]
    counts = [
        log.num_prompt - start + max(0, log.num_output - 1)
        for log, start in zip(logs, starts, strict=True)
    ]
    num_sampled = sum(max(1, log.num_output) for log in logs)
    # A decode step for each token does the same arithmetic as one step of all of them.
    all_requests = BatchShape(tuple(starts), tuple(counts), num_sampled)
    return roofline.min_step(all_requests).flops / len(logs)


def _requests_per_s(report: BenchReport) -> float:
    run = report.run
    return run.requests_per_s or run.num_completed / max(run.duration_s, 1e-9)


def _mean_decoding(logs: Sequence[RequestLog]) -> float:
    """Return the mean number of requests that are between their first and last token."""
    begin_s, end_s = steady_window(logs)
    first = np.array([log.timings.first_token_s for log in logs])
    last = np.array([log.timings.last_token_s for log in logs])
    seconds = (np.minimum(last, end_s) - np.maximum(first, begin_s)).clip(0.0)
    return float(seconds.sum()) / max(end_s - begin_s, 1e-9)


async def _sample(meter: EnergyMeter) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_INTERVAL_S)
        meter.sample()
