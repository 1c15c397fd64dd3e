"""Runs a load on simulated replicas of a model, and reports as measured runs do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import WORKING_BYTES, size_kv_cache
from twostroke.core.distributed_options import DISAGGREGATE
from twostroke.core.errors import Field, MemoryLimitError, UsageError, nearest
from twostroke.core.frozen import Frozen, check_range
from twostroke.core.hardware import memory_available
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.core.process_tuning import without_garbage_collection
from twostroke.engine.engine import build_scheduler
from twostroke.fleet.routing.policy import LOOKS_AT_PREFIXES, POLICIES
from twostroke.lab.measure.requests import Objectives, RunReport, make_report
from twostroke.lab.planner.planner import fitting_context
from twostroke.lab.planner.prices import usd_per_million_tokens
from twostroke.lab.planner.question import MEMORY_SHARE, Question
from twostroke.lab.planner.roofline import Roofline, kv_bytes
from twostroke.lab.simulator.disaggregation import Prefill
from twostroke.lab.simulator.fleet import START_S, SimulatedFleet
from twostroke.lab.simulator.proposer import SimulatedProposer, make_speculator
from twostroke.lab.simulator.replica import Clock, SimulatedReplica
from twostroke.model.program.cost import CostModel
from twostroke.model.program.kv_layout import FORMATS

if TYPE_CHECKING:
    from twostroke.backends.kv_size import CacheSize
    from twostroke.lab.measure.requests import RequestLog
    from twostroke.lab.planner import Calibration, Device, PlannedModel
    from twostroke.lab.planner.reference_calibration import ReferenceCalibration
    from twostroke.lab.simulator.load import Workload
    from twostroke.model.program.cost import StepCost

MOST_REPLICAS = 1024


class Setup(Frozen):
    """What serves the load: replicas of a model, each on `question.count` devices.

    Attributes:
        question: how a replica is run: devices, format of keys and values, shares, price.
        routing: a key of `router.policy.POLICIES`.
        calibration: corrects the times of steps on this machine.
        is_here: whether the device is this machine, whose engine sizes its cache by free memory.
        acceptance: the chance that a guessed token is right; None without speculation.
        draft_cost: what a guess takes, in decode steps.
        prefill_replicas: how many of the replicas read prompts for the others, which requests come
            to. 0 for replicas that do both.
        disaggregate: which prompts these read, a word of `DISAGGREGATE`.
        link: bytes/s from these to the others; None for the device's link.
        overhead_s: from the client to the engine: HTTP, tokenizing, routing.
    """

    model: PlannedModel
    device: Device
    question: Question = Question()
    cache: CacheOptions = CacheOptions()
    batch: BatchOptions = BatchOptions()
    replicas: int = 1
    routing: str = "least-work"
    calibration: Calibration | ReferenceCalibration | None = None
    is_here: bool = False
    acceptance: float | None = None
    draft_cost: float = 0.0
    prefill_replicas: int = 0
    disaggregate: str = "auto"
    link: float | None = None
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        check_range(self, "replicas", low=1, high=MOST_REPLICAS)
        if self.routing not in POLICIES:
            hint = nearest(self.routing, POLICIES)
            reason = f"must be one of {', '.join(POLICIES)}, got '{{value}}'.{hint}"
            raise UsageError(reason, field="routing", value=self.routing)
        if self.acceptance is not None and not 0 < self.acceptance < 1:
            reason = f"must be above 0 and below 1, got {self.acceptance}."
            raise UsageError(reason, field="acceptance")
        check_range(self, "draft_cost", low=0, high=10)
        check_range(self, "overhead_s", low=0, high=60)
        if not 0 <= self.prefill_replicas < self.replicas:
            reason = (
                f"must be from 0 to less than {{other}} ({self.replicas}), as others must answer, "
            )
            reason += f"got {self.prefill_replicas}."
            raise UsageError(reason, field="prefill_replicas", other=Field("replicas"))
        if self.disaggregate not in DISAGGREGATE:
            hint = nearest(self.disaggregate, DISAGGREGATE)
            reason = f"must be one of {', '.join(DISAGGREGATE)}, got '{{value}}'.{hint}"
            raise UsageError(reason, field="disaggregate", value=self.disaggregate)
        if not self.cache.prefix_cache:
            if self.prefill_replicas:
                raise UsageError("needs the prefix cache.", field="prefill_replicas")
            if self.routing in LOOKS_AT_PREFIXES:
                raise UsageError(f"{self.routing} needs the prefix cache.", field="routing")
        check_range(self, "link", high=1e18)

    def prefill(self, cost: StepCost, size: CacheSize) -> Prefill | None:
        """Return how prompts are handed over, if they are read apart; `cost` is that of steps."""
        if not self.prefill_replicas:
            return None
        link = self.link or self.device.link
        if link is None:
            reason = f"must be given: the link of {self.device.name} is not known."
            raise UsageError(reason, field="link")
        page_bytes = size.cache_bytes // size.num_pages
        return Prefill(self.prefill_replicas, self.disaggregate, cost, page_bytes, link)

    def size(self) -> CacheSize:
        """Return the context and the pages of a replica.

        Raises:
            MemoryLimitError, UsageError: they do not fit, or the device's memory is not known.
        """
        model, asked, cache = self.model, self.question, self.cache
        available = memory_available()
        if not self.is_here:
            if cache.context_length is None and cache.memory_bytes is None:
                self._check_context()
            copies = kv_bytes(model, asked, 1) / kv_bytes(model, replace(asked, count=1), 1)
            cache = replace(cache, memory_bytes=int(self._kv_memory() / copies))
            available = model.all_bytes + WORKING_BYTES + (cache.memory_bytes or 0)
        return size_kv_cache(
            model.program,
            cache,
            self.batch.token_budget,
            model.all_bytes,
            available,
            max_running=self.batch.effective_max_running,
            auto_format=asked.kv_format,
        )

    def _check_context(self) -> None:
        """Refuse the model's whole context where the device has no room for it."""
        whole, room = self.model.program.context_length, self._kv_memory()
        if 0 < (most := fitting_context(self.model, self.question, room)) < whole:
            raise MemoryLimitError(
                f"One request of the whole context, {whole:,} tokens, takes "
                f"{kv_bytes(self.model, self.question, whole) / 1e9:,.1f} GB, and "
                f"{self.question.count} x {self.device.name} has {room / 1e9:,.1f} GB for keys and "
                f"values: use --context-length {most}, or more devices for each replica."
            )

    def _kv_memory(self) -> float:
        """Return the bytes for keys and values on a replica's devices."""
        asked, device, wanted = self.question, self.device, self.cache.memory_bytes
        if device.memory_bytes is None:
            if wanted is None:
                reason = f"must be given: how much memory {device.name} has is not known."
                raise UsageError(reason, field="memory_bytes")
            return wanted
        usable = device.memory_bytes * asked.count * MEMORY_SHARE
        left = usable - self.model.all_bytes
        if left < (wanted or 1):
            raise MemoryLimitError(
                f"It does not fit: weights take {self.model.all_bytes / 1e9:,.1f} GB"
                f"{f', keys and values {wanted / 1e9:,.1f} GB' if wanted else ''}, and "
                f"{asked.count} x {device.name} offers {usable / 1e9:,.1f} GB. Take more devices "
                "for each replica, or fewer bits."
            )
        return wanted or left


class Simulation(Frozen):
    """The outcome of a run.

    `busy` is the share of time in which a replica ran steps, for each; `mfu` and `mbu` are the
    shares of the devices' arithmetic and bandwidth while they did. Costs are None without a price.
    `refusal` says why the first refused request was. `logs` are the requests. `decisions` are those
    about prompts that prefill replicas could read, by the words of `choice.REASONS`.
    """

    report: RunReport
    busy: tuple[float, ...]
    num_steps: int
    mfu: float
    mbu: float
    preemptions: int
    usd_per_million: float | None
    usd_per_1k: float | None
    usd_per_1k_good: float | None
    refusal: str
    logs: tuple[RequestLog, ...]
    decisions: dict[str, int]
    assumed: tuple[str, ...] = ()  # as a plan's


def simulate(setup: Setup, load: Workload, objectives: Objectives | None = None) -> Simulation:
    """Return what becomes of a load.

    Raises:
        MemoryLimitError, UsageError: as `Setup.size`, or no request can be served.
    """
    objectives = objectives or Objectives()
    roofline = Roofline(setup.model, setup.device, setup.question, setup.calibration)
    clock, size, program = Clock(START_S), setup.size(), setup.model.program
    cost = CostModel(program, setup.model.weight_bytes, FORMATS[size.kv_format]).per_step()
    prefill = setup.prefill(cost, size)
    replicas = _replicas(setup, roofline, clock, size, cost)
    fleet = SimulatedFleet(
        replicas, setup.routing, clock, program.vocab_size, setup.overhead_s, prefill
    )
    with without_garbage_collection():
        fleet.run(load)
    logs = tuple([fleet.logs[number] for number in range(len(load.arrivals))])
    refusal = (
        f"request {fleet.refusals[0][0] + 1}: {fleet.refusals[0][1]}" if fleet.refusals else ""
    )
    if len(fleet.refusals) == len(logs):
        raise UsageError(f"Every request is refused; {refusal}")
    report = make_report(logs, objectives)
    busy_s, asked = sum(one.busy_s for one in replicas), setup.question
    usd = asked.price_of(setup.device)
    hour = None if usd is None else usd * asked.count * setup.replicas
    return Simulation(
        report=report,
        busy=tuple([one.busy_s / max(report.duration_s, 1e-12) for one in replicas]),
        num_steps=sum(one.num_steps for one in replicas),
        mfu=sum(one.flops for one in replicas) / busy_s / (roofline.peak / asked.mfu),
        mbu=sum(one.bytes for one in replicas) / busy_s / (roofline.bandwidth / asked.mbu),
        preemptions=sum(one.scheduler.stats().num_preemptions for one in replicas),
        usd_per_million=_cost(hour, report.output_per_s, 1e6),
        usd_per_1k=_cost(hour, report.requests_per_s, 1e3),
        usd_per_1k_good=_cost(hour, report.good_per_s, 1e3),
        refusal=refusal,
        logs=logs,
        decisions=fleet.decisions,
        assumed=setup.model.assumed,
    )


def _cost(usd_per_hour: float | None, per_s: float | None, count: float) -> float | None:
    if usd_per_hour is None or not per_s:
        return None
    return usd_per_million_tokens(usd_per_hour, per_s) * count / 1e6


def _replicas(
    setup: Setup, roofline: Roofline, clock: Clock, size: CacheSize, cost: StepCost
) -> list[SimulatedReplica]:
    model, program = setup.model, setup.model.program
    facts = BackendFacts(
        name="simulated",
        detail=setup.device.name,
        num_threads=1,
        num_pages=size.num_pages,
        page_size=size.page_size,
        windows=tuple([group.window for group in program.cache_groups]),
        weight_bytes=model.all_bytes,
        cache_bytes=size.cache_bytes,
    )
    replicas = []
    for _ in range(setup.replicas):
        scheduler = build_scheduler(setup.cache, setup.batch, size, facts, clock.read)
        speculator = None
        if setup.acceptance is not None:
            odds = setup.acceptance, setup.draft_cost
            guesser = SimulatedProposer(*odds, roofline, clock, program.vocab_size)
            speculator = make_speculator(guesser, cost, roofline, clock)
        replicas.append(
            SimulatedReplica(
                scheduler, roofline.totals, clock, program.vocab_size, size.page_size, speculator
            )
        )
    return replicas
