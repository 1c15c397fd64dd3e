"""Simulates a workload on replicas of a model; its reports have the same form as measured runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import WORKING_BYTES, size_kv_cache
from twostroke.core.distributed_options import DISAGGREGATE
from twostroke.core.errors import Field, MemoryLimitError, UsageError
from twostroke.core.frozen import Frozen, check_choice, check_range
from twostroke.core.hardware import memory_available
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.core.process_tuning import without_garbage_collection
from twostroke.engine.engine import build_scheduler
from twostroke.fleet.routing.policy import POLICIES, PREFIX_POLICIES
from twostroke.lab.measure.requests import Objectives, RunReport, make_report
from twostroke.lab.planner.planner import fitting_context
from twostroke.lab.planner.prices import usd_per_million_tokens
from twostroke.lab.planner.question import MEMORY_SHARE, Question
from twostroke.lab.planner.roofline import Roofline, kv_bytes, request_bytes
from twostroke.lab.simulator.disaggregation import PrefillSettings
from twostroke.lab.simulator.fleet import START_S, SimulatedFleet
from twostroke.lab.simulator.page_cache import PageCacheSettings
from twostroke.lab.simulator.proposer import SimulatedProposer, make_speculator
from twostroke.lab.simulator.replica import Clock, SimulatedReplica
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.cost import CostModel
from twostroke.model.program.kv_layout import FORMATS

if TYPE_CHECKING:
    from twostroke.backends.kv_size import CacheSize
    from twostroke.lab.measure.requests import RequestLog
    from twostroke.lab.planner import Calibration, Device, PlannedModel
    from twostroke.lab.planner.reference_calibration import ReferenceCalibration
    from twostroke.lab.simulator.load import Workload
    from twostroke.model.program.cost import StepCost

MAX_REPLICAS = 1024


class SimulationSetup(Frozen):
    """The simulated replicas of a model, each on `question.count` devices.

    Attributes:
        model: the model.
        device: the kind of devices.
        question: devices of a replica, KV format, efficiency, and price.
        cache, batch: options of the engine.
        replicas: number of replicas.
        routing: the router's policy, a key of `POLICIES`.
        calibration: corrects the times of steps on this machine.
        is_here: the device is this machine, whose engine sizes its KV cache by free memory.
        acceptance: probability that a draft is right; None without speculation.
        draft_cost: time of one draft, as a share of a decode step.
        prefill_replicas: number of replicas that prefill prompts for the other replicas, which
            the requests are routed to. 0: each replica computes its own prompts.
        disaggregate: which prompts these replicas prefill, a value of `DISAGGREGATE`.
        link: bytes per second of a KV transfer; None for the speed of the device's link.
        overhead_s: time from the client to the engine: HTTP, tokenization, routing.
        page_cache_size: bytes that the page cache of each replica holds; None without one.
        page_cache_speed: bytes per second at which pages are loaded from it.
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
    page_cache_size: int | None = None
    page_cache_speed: float = 1e9

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a value or a combination is not valid."""
        check_range(self, "replicas", low=1, high=MAX_REPLICAS)
        check_choice("routing", self.routing, POLICIES)
        if self.acceptance is not None and not 0 < self.acceptance < 1:
            reason = f"must be above 0 and below 1, got {self.acceptance}."
            raise UsageError(reason, field="acceptance")
        check_range(self, "draft_cost", low=0, high=10)
        check_range(self, "overhead_s", low=0, high=60)
        if not 0 <= self.prefill_replicas < self.replicas:
            reason = (
                f"must be from 0 to less than {{other}} ({self.replicas}), since some must decode; "
                f"got {self.prefill_replicas}."
            )
            raise UsageError(reason, field="prefill_replicas", other=Field("replicas"))
        check_choice("disaggregate", self.disaggregate, DISAGGREGATE)
        if not self.cache.prefix_cache:
            if self.prefill_replicas:
                raise UsageError("needs the prefix cache.", field="prefill_replicas")
            if self.routing in PREFIX_POLICIES:
                raise UsageError(f"{self.routing} needs the prefix cache.", field="routing")
        check_range(self, "link", high=1e18)
        check_range(self, "page_cache_size", low=1, high=1e18)
        check_range(self, "page_cache_speed", low=1, high=1e18)
        if self.page_cache_size is not None and self.prefill_replicas:
            other = Field("prefill_replicas")
            raise UsageError(
                "cannot be combined with {other}.", field="page_cache_size", other=other
            )
        if self.page_cache_size is not None and not self.cache.prefix_cache:
            raise UsageError("needs the prefix cache.", field="page_cache_size")

    def prefill(self, cost: StepCost, size: CacheSize) -> PrefillSettings | None:
        """Return the settings of simulated disaggregation; None without prefill replicas.

        `cost` is the work of steps, and `size` the size of the KV cache.
        """
        if not self.prefill_replicas:
            return None
        link = self.link or self.device.link
        if link is None:
            reason = f"must be given: the link of {self.device.name} is not known."
            raise UsageError(reason, field="link")
        state_bytes = self.model.program.state_bytes
        page_bytes = (size.cache_bytes - size.num_states * state_bytes) // size.num_pages
        return PrefillSettings(
            count=self.prefill_replicas,
            rule=self.disaggregate,
            cost=cost,
            page_bytes=page_bytes,
            bytes_per_s=link,
            state_bytes=state_bytes,
        )

    def page_cache(self, size: CacheSize, roofline: Roofline) -> PageCacheSettings | None:
        """Return the settings of the simulated page caches; None without them."""
        if self.page_cache_size is None:
            return None
        program = self.model.program
        page_bytes = (size.cache_bytes - size.num_states * program.state_bytes) // size.num_pages
        return PageCacheSettings(
            max_bytes=self.page_cache_size,
            bytes_per_s=self.page_cache_speed,
            page_bytes=page_bytes,
            num_groups=len(program.cache_groups),
            state_bytes=program.state_bytes,
            token_budget=self.batch.token_budget,
            seconds=lambda batch: roofline.totals(batch).seconds,
        )

    def prefill_s_per_token(self) -> float:
        """Return the seconds that a prompt token takes, in a step filled with prompt tokens."""
        roofline = Roofline(self.model, self.device, self.question, self.calibration)
        num_tokens = self.batch.token_budget
        return float(roofline.totals(BatchShape.prefill(num_tokens)).seconds) / num_tokens

    def size(self) -> CacheSize:
        """Return the context length and the number of KV pages of a simulated replica.

        Raises:
            MemoryLimitError: model and cache do not fit.
            UsageError: the device's memory is not known.
        """
        model, question, cache = self.model, self.question, self.cache
        available = memory_available()
        if not self.is_here:
            if cache.context_length is None and cache.memory_bytes is None:
                self._check_context()
            # The pages are sized as on one device; several devices store some heads twice.
            num_copies = kv_bytes(model, question, 1) / kv_bytes(
                model, replace(question, count=1), 1
            )
            cache = replace(cache, memory_bytes=int(self._kv_memory() / num_copies))
            available = model.all_bytes + WORKING_BYTES + (cache.memory_bytes or 0)
        return size_kv_cache(
            model.program,
            cache,
            self.batch.token_budget,
            model.all_bytes,
            available,
            max_running=self.batch.effective_max_running,
            auto_format=question.kv_format,
        )

    def _check_context(self) -> None:
        """Raise MemoryLimitError if a request as long as the model's context does not fit."""
        context_length, free = self.model.program.context_length, self._kv_memory()
        max_context = fitting_context(self.model, self.question, free)
        if 0 < max_context < context_length:
            raise MemoryLimitError(
                "One request of the whole context, "
                f"{counted_noun(context_length, 'token', form=',')}, takes "
                f"{request_bytes(self.model, self.question, context_length) / 1e9:,.1f} GB, and "
                f"{self.question.count} x {self.device.name} has {free / 1e9:,.1f} GB for keys and "
                f"values: use --context-length {max_context}, or more devices for each replica."
            )

    def _kv_memory(self) -> float:
        """Return the bytes that remain for keys and values on a replica's devices."""
        question, device = self.question, self.device
        requested = self.cache.memory_bytes
        if device.memory_bytes is None:
            if requested is None:
                reason = f"must be given: the size of {device.name}'s memory is not known."
                raise UsageError(reason, field="memory_bytes")
            return requested
        usable = device.memory_bytes * question.count * MEMORY_SHARE
        free = usable - self.model.all_bytes
        if free < (requested or 1):
            raise MemoryLimitError(
                f"It does not fit: weights take {self.model.all_bytes / 1e9:,.1f} GB"
                f"{f', keys and values {requested / 1e9:,.1f} GB' if requested else ''}, and "
                f"{question.count} x {device.name} offers {usable / 1e9:,.1f} GB. Use more devices "
                "for each replica, or fewer bits."
            )
        return requested or free


class Simulation(Frozen):
    """The result of a simulation: latencies, rates, costs, and the requests.

    Attributes:
        report: latencies and rates.
        busy: for each replica, the share of the time in which it ran steps.
        num_steps: number of steps of all replicas.
        mfu, mbu: shares of the devices' arithmetic and bandwidth during steps.
        preemptions: number of preemptions.
        usd_per_million: price of a million output tokens; None without a price.
        usd_per_1k, usd_per_1k_good: price of a thousand requests, and of a thousand requests
            that met the objectives.
        refusal: number of the first refused request, and the reason; empty if there is none.
        logs: the times and counts of each request.
        decisions: number of placement decisions about prompts, by reason.
        num_page_loads: number of requests for which pages came from a page cache.
        assumed: configuration fields that are missing, as in `Plan`.
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
    num_page_loads: int = 0
    assumed: tuple[str, ...] = ()


def simulate(
    setup: SimulationSetup, load: Workload, objectives: Objectives | None = None
) -> Simulation:
    """Simulate a workload on replicas of a model; return latencies, rates and costs.

    Raises:
        MemoryLimitError: the model and its KV cache do not fit into the devices' memory.
        UsageError: the device's memory is not known, or every request is refused.
    """
    objectives = objectives or Objectives()
    question = setup.question
    builder = ReplicaBuilder(setup)
    roofline = builder.roofline
    replicas = [builder.build() for _ in range(setup.replicas)]
    fleet = SimulatedFleet(
        replicas,
        setup.routing,
        clock=builder.clock,
        vocab_size=setup.model.program.vocab_size,
        overhead_s=setup.overhead_s,
        prefill=setup.prefill(builder.cost, builder.size),
        page_cache=setup.page_cache(builder.size, roofline),
    )
    with without_garbage_collection():
        fleet.run(load)
    logs = tuple([fleet.logs[number] for number in range(len(load.arrivals))])
    refusal = ""
    if fleet.refusals:
        number, reason = fleet.refusals[0]
        refusal = f"request {number + 1}: {reason}"
    if len(fleet.refusals) == len(logs):
        raise UsageError(f"Every request is refused; {refusal}")
    report = make_report(logs, objectives)
    busy_s = sum(replica.busy_s for replica in replicas)
    flops = sum(replica.flops for replica in replicas)
    num_bytes = sum(replica.bytes for replica in replicas)
    device_usd = question.price_of(setup.device)
    usd_per_hour = None if device_usd is None else device_usd * question.count * setup.replicas
    return Simulation(
        report=report,
        busy=tuple([replica.busy_s / max(report.duration_s, 1e-12) for replica in replicas]),
        num_steps=sum(replica.num_steps for replica in replicas),
        mfu=flops / busy_s / (roofline.peak / question.mfu),
        mbu=num_bytes / busy_s / (roofline.bandwidth / question.mbu),
        preemptions=sum(replica.scheduler.stats().num_preemptions for replica in replicas),
        usd_per_million=_cost(usd_per_hour, report.output_per_s, 1e6),
        usd_per_1k=_cost(usd_per_hour, report.requests_per_s, 1e3),
        usd_per_1k_good=_cost(usd_per_hour, report.good_per_s, 1e3),
        refusal=refusal,
        logs=logs,
        decisions=fleet.decisions,
        num_page_loads=fleet.num_page_loads,
        assumed=setup.model.assumed,
    )


def _cost(usd_per_hour: float | None, per_s: float | None, count: float) -> float | None:
    if usd_per_hour is None or not per_s:
        return None
    return usd_per_million_tokens(usd_per_hour, per_s) * count / 1e6


class ReplicaBuilder:
    """Builds the simulated replicas of a setup, which share a virtual clock.

    Attributes:
        clock: the virtual time.
        roofline: the times of steps.
        size: context length and KV cache of a replica.
        cost: the work of steps.
    """

    def __init__(self, setup: SimulationSetup) -> None:
        """Determine the size of a replica.

        Raises:
            MemoryLimitError: the model and its KV cache do not fit into the devices' memory.
            UsageError: the device's memory is not known.
        """
        model = setup.model
        self.clock = Clock(START_S)
        self.roofline = Roofline(model, setup.device, setup.question, setup.calibration)
        self.size = setup.size()
        formats = FORMATS[self.size.kv_format]
        self.cost = CostModel(model.program, model.weight_bytes, formats).per_step()
        self._setup = setup
        self._facts = BackendFacts(
            name="simulated",
            detail=setup.device.name,
            num_threads=1,
            num_pages=self.size.num_pages,
            page_size=self.size.page_size,
            windows=tuple([group.window for group in model.program.cache_groups]),
            weight_bytes=model.all_bytes,
            cache_bytes=self.size.cache_bytes,
            num_states=self.size.num_states,
        )

    def build(self) -> SimulatedReplica:
        """Return a replica without requests and with an empty cache."""
        setup, clock, vocab_size = self._setup, self.clock, self._setup.model.program.vocab_size
        scheduler = build_scheduler(
            setup.cache, setup.batch, size=self.size, facts=self._facts, clock=clock.read
        )
        speculator = None
        if setup.acceptance is not None:
            proposer = SimulatedProposer(
                setup.acceptance,
                setup.draft_cost,
                roofline=self.roofline,
                clock=clock,
                vocab_size=vocab_size,
            )
            speculator = make_speculator(proposer, self.cost, self.roofline, clock)
        return SimulatedReplica(
            scheduler,
            self.roofline.totals,
            clock=clock,
            vocab_size=vocab_size,
            page_size=self.size.page_size,
            speculator=speculator,
        )
