"""Makes the plan of a model on a device: memory, speeds, costs, and the effects of changes."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.explain import explain
from twostroke.lab.planner.planner import Planner, largest_where
from twostroke.lab.planner.prices import usd_per_million_tokens
from twostroke.lab.planner.question import DEFAULT_MAX_STREAMS, MAX_DEVICES, context_shortfall
from twostroke.lab.planner.queueing import loads, user_load
from twostroke.lab.planner.reference_calibration import REFERENCE, ReferenceCalibration
from twostroke.lab.planner.roofline import request_bytes
from twostroke.lab.planner.variants import variants
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.lab.planner.calibration import Calibration
    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.planner import MemoryPlan, PlanRow
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.queueing import LoadLatencies, UserLoad
    from twostroke.lab.planner.roofline import PlannedStepTime

_MAX_PLANNED_STREAMS = 1 << 14
# Speculation as a what-if: drafts per round, the chance that a draft is accepted, and the cost of
# computing a draft as a share of a decode step.
NUM_DRAFTS = 3
ACCEPTANCE_RATE = 0.7
_DRAFT_COST_RATIO = 0.1


class WhatIf(Frozen):
    """The figures of a plan after one change of model or device, such as other weights.

    `change` names the change. Latencies are in seconds, and `usd_per_million` is for output tokens.
    The number of streams is the plan's. `most_streams` is the number of requests that would fit,
    None if the device's memory is unknown.
    """

    change: str
    ttft_s: float
    tpot_s: float
    most_streams: int | None
    usd_per_million: float | None


class CalibrationAccuracy(Frozen):
    """How accurate a plan's times are, if measured steps correct them.

    Attributes:
        date: day of the last measurement.
        num_threads: threads of the measured steps.
        num_steps: number of measured shapes of steps.
        error: median error when each step is predicted from the other steps, as a share; None
            if only one step was measured.
        nearest: the measured step that corrects the plan's decode step most.
    """

    date: str
    num_threads: int
    num_steps: int
    error: float | None
    nearest: str | None


class DeviceLimits(Frozen):
    """The arithmetic and bandwidth that a plan's devices reach together, with MFU and MBU.

    Attributes:
        peak: operations per second in the plan's arithmetic.
        bandwidth: memory bandwidth in bytes per second.
        link: bandwidth between devices in bytes per second; None if unknown (exchanges then
            take no time).
        usd_per_hour: price of all devices.
        source: where the figures come from.
        price_source: where the price comes from, with its date.
    """

    peak: float
    bandwidth: float
    link: float | None
    usd_per_hour: float | None
    source: str
    price_source: str


class Plan(Frozen):
    """The answer to a planning question: memory, times, rates and costs of a model on devices.

    Attributes:
        arithmetic: the arithmetic of the products, a key of `Device.peaks`.
        ttft_s: seconds to the first token of a prompt that is computed alone.
        knee: number of streams from which arithmetic, and not memory, limits decode steps.
        shown_streams: number of streams of `decode` and of the what-ifs.
        prefill, decode: times of one prompt, and of a decode step.
        rows: rates, latencies and costs by number of streams.
        chosen_row: figures of the largest number of streams that meets all objectives, or of the
            number in the question; None if the question's requirements cannot be met.
        verdict: why they cannot be met; empty if they can.
        bound: what limits the number of streams, unless the question gives the number.
        prefill_per_decode: prefill devices that keep one decode device busy.
        loads: mean latencies at several shares of the highest load of the chosen streams.
        steps: the formulas with their numbers.
        user_load: figures for the question's users; None without users.
        calibrated: the accuracy of times that measured steps correct; None without such steps.
        assumed: configuration fields that are missing, so that transformers' defaults are used.
        usual: the model and machine of the reference steps that correct times; empty without such
            steps.
    """

    model: str
    stored: str
    device: str
    question: Question
    num_weights: int
    context_length: int
    arithmetic: str
    roof: DeviceLimits
    memory: MemoryPlan
    knee: float
    ttft_s: float
    prefill_bottleneck: str
    shown_streams: int = field(name="shown")
    prefill: PlannedStepTime
    decode: PlannedStepTime
    rows: tuple[PlanRow, ...]
    chosen_row: PlanRow | None = field(name="chosen")
    verdict: str
    bound: str
    prefill_per_decode: float | None
    loads: tuple[LoadLatencies, ...]
    what_ifs: tuple[WhatIf, ...]
    steps: tuple[str, ...]
    user_load: UserLoad | None = None
    calibrated: CalibrationAccuracy | None = None
    assumed: tuple[str, ...] = ()
    usual: str = ""

    @property
    def fits(self) -> bool:
        """Whether the model's context, the memory and the token budget suffice for the requests."""
        is_short_enough = self.question.prompt + self.question.output <= self.context_length
        has_memory = self.memory.most_streams != 0
        return is_short_enough and has_memory and self.shown_streams >= (self.question.streams or 1)


def make_plan(
    model: PlannedModel,
    device: Device,
    question: Question,
    calibration: Calibration | ReferenceCalibration | None = None,
) -> Plan:
    """Return the plan that answers `question` for a model on devices of one kind.

    `calibration` corrects times: measured steps of this model, or reference steps of another model.
    """
    planner = Planner(model, device, question, calibration)
    memory = planner.memory()
    prefill = planner.prefill()
    num_fitting = _MAX_PLANNED_STREAMS
    if memory.most_streams is not None:
        num_fitting = min(memory.most_streams, _MAX_PLANNED_STREAMS)
    num_running = min(num_fitting, question.max_decoding_streams or num_fitting)
    max_streams = planner.max_streams(num_running)
    default_streams = max_streams
    if question.tpot_s is None:
        default_streams = min(max_streams, DEFAULT_MAX_STREAMS)
    streams = question.streams or default_streams
    verdict = _verdict(planner, memory, num_fitting, max_streams)
    chosen_row = planner.row(streams) if verdict == "" else None
    shown_streams = max(1, min(streams or question.streams or 1, num_running))
    has_answer = chosen_row is not None
    return Plan(
        model=model.name,
        stored=model.stored,
        device=device.name,
        question=question,
        num_weights=model.num_weights,
        context_length=model.program.context_length,
        arithmetic=planner.roofline.arithmetic,
        roof=_roof(planner),
        memory=memory,
        knee=planner.knee,
        ttft_s=prefill.seconds,
        prefill_bottleneck=prefill.bottleneck,
        shown_streams=shown_streams,
        prefill=prefill,
        decode=planner.decode(shown_streams),
        rows=tuple(
            planner.row(count) for count in _shown_stream_counts(num_running, shown_streams)
        ),
        chosen_row=chosen_row,
        verdict=verdict,
        bound=_stream_limit(planner, memory, streams) if has_answer else "",
        prefill_per_decode=planner.prefill_per_decode(streams) if has_answer else None,
        loads=loads(planner, streams) if has_answer else (),
        what_ifs=tuple(_what_ifs(planner, shown_streams)),
        steps=tuple(explain(planner, memory, shown_streams)),
        user_load=user_load(planner, streams) if has_answer else None,
        calibrated=_calibrated(planner, shown_streams),
        usual=REFERENCE if isinstance(calibration, ReferenceCalibration) else "",
        assumed=model.assumed,
    )


def _roof(planner: Planner) -> DeviceLimits:
    roofline = planner.roofline
    return DeviceLimits(
        roofline.peak,
        roofline.bandwidth,
        link=roofline.link,
        usd_per_hour=planner.usd_per_hour,
        source=planner.device.source,
        price_source=planner.price_source,
    )


def _calibrated(planner: Planner, streams: int) -> CalibrationAccuracy | None:
    calibration = planner.calibration
    if calibration is None or isinstance(calibration, ReferenceCalibration):
        return None
    return CalibrationAccuracy(
        calibration.date,
        calibration.num_threads,
        num_steps=calibration.num_steps,
        error=calibration.error(planner.roofline.measured),
        nearest=planner.decode(streams).nearest,
    )


def _verdict(planner: Planner, memory: MemoryPlan, num_fitting: int, max_streams: int) -> str:
    """Explain which requirement of its question a plan misses, by how much, and what would meet it.

    The text is empty if all requirements are met. `num_fitting` requests fit into memory;
    `max_streams` of them meet the latency objectives.
    """
    question, name = planner.question, planner.device.name
    context_length = planner.model.program.context_length
    if shortfall := context_shortfall(planner.model.name, context_length, question):
        return shortfall
    if num_fitting < 1:
        return (
            f"It does not fit: weights take {format_number(memory.weights / 1e9)} GB and one "
            f"request {format_number(memory.kv_per_request / 1e9)} GB, and {question.count} x "
            f"{name} offers {format_number((memory.usable or 0) / 1e9)} GB for them. "
            f"{_fitting_changes(planner, memory)}."
        )
    if question.streams is not None and question.streams > num_fitting:
        streams_do = counted_noun(question.streams, "stream does", "streams do")
        return f"{streams_do} not fit: at most {num_fitting} do."
    limit = question.max_decoding_streams
    if question.streams is not None and limit is not None and question.streams > limit:
        budget = counted_noun(question.token_budget or 0, "token", form=",")
        needed = ceil(question.streams * (question.num_new + question.output) / question.output)
        return (
            f"At most {limit:,} of {counted_noun(question.streams, 'stream', form=',')} can decode "
            f"at once: prefill fills the rest of each step of {budget}. All streams need steps of "
            f"at least {counted_noun(needed, 'token', form=',')} (--token-budget)."
        )
    if 1 <= (question.streams or 1) <= max_streams:
        return ""
    return _missed_objective(planner, max_streams)


def _missed_objective(planner: Planner, max_streams: int) -> str:
    """Explain which latency objective a plan misses, by how much, and what would meet it."""
    question = planner.question
    streams = question.streams or 1
    fewer = f"; at most {max_streams:,} would meet it" if max_streams else ""
    cases = (
        (
            "The first token",
            question.ttft_s,
            Planner.ttft_s,
            "a shorter prompt or more of it cached",
        ),
        (
            "Each further token",
            question.tpot_s,
            Planner.tpot_s,
            "fewer bits for each weight, or speculation",
        ),
    )
    for subject, limit_s, time_s, remedy in cases:
        if limit_s is not None and (actual_s := time_s(planner, streams)) > limit_s:
            return (
                f"{subject} takes at least {format_ms(actual_s)} ms with "
                f"{counted_noun(streams, 'stream', form=',')}, {actual_s / limit_s:,.2f} times the "
                f"objective: {_devices_needed(planner, time_s, limit_s)}, {remedy}{fewer}."
            )
    return ""


def _stream_limit(planner: Planner, memory: MemoryPlan, streams: int) -> str:
    """Return the reason why a plan has no more streams, as a value of `PlannedReplica.bound`."""
    question = planner.question
    if question.streams is not None:
        return ""
    if streams == memory.most_streams:
        return "memory"
    if streams == question.max_decoding_streams:
        return "prompts"
    if question.ttft_s is not None and planner.ttft_s(streams + 1) > question.ttft_s:
        return "TTFT"
    is_default = question.tpot_s is None or streams == _MAX_PLANNED_STREAMS
    return "the default" if is_default else "TPOT"


def _fitting_changes(planner: Planner, memory: MemoryPlan) -> str:
    """Return a sentence about changes of model or device that would make room for one request."""
    question, model, usable = planner.question, planner.model, memory.usable or 0
    needed = memory.devices_needed
    changes = [f"{needed} of them are enough" if needed else "no number of them is enough"]
    for name in ("fp8", "w4a16"):
        smaller = model.with_weights(name).all_bytes
        if smaller < model.all_bytes and smaller + memory.kv_per_request <= usable:
            changes.append(f"weights in {name} take {format_number(smaller / 1e9)} GB and fit")
            break

    def fits(num_tokens: int) -> bool:
        return model.all_bytes + request_bytes(model, question, num_tokens) <= usable

    if num_tokens := largest_where(fits, question.prompt + question.output):
        changes.append(
            f"prompt and output of {counted_noun(num_tokens, 'token', form=',')} together fit"
        )
    return f"{changes[0][0].upper()}{'; '.join(changes)[1:]}"


def _devices_needed(
    planner: Planner, time_s: Callable[[Planner, int], float], limit_s: float
) -> str:
    """Return a clause about the number of devices that would meet a latency objective.

    `time_s` returns the latency of a planner's devices with a number of streams, and `limit_s` is
    the objective. Transfers over the links between devices are included.
    """
    streams = planner.question.streams or 1

    def is_too_slow(count: int) -> bool:
        return time_s(planner.on_devices(planner.device, count), streams) > limit_s

    if is_too_slow(MAX_DEVICES):
        return f"{MAX_DEVICES:,} devices are not enough: it needs fewer operations and bytes"
    return (
        f"it needs at least {counted_noun(largest_where(is_too_slow, MAX_DEVICES) + 1, 'device')}"
    )


def _what_ifs(planner: Planner, streams: int) -> list[WhatIf]:
    """Return a plan's figures after each of several changes of model or device.

    The first entry is without a change.
    """
    results = []
    for change, model, question in _changed_questions(planner):
        if model is planner.model and question.kv_format == planner.question.kv_format:
            changed = planner.for_question(question)
        else:
            changed = Planner(model, planner.device, question, planner.calibration)
        results.append(_what_if(change, changed, streams, changed.decode(streams).seconds))
    contexts = (planner.question.mean_context,) * streams
    num_rows = NUM_DRAFTS + 1
    verify = planner.roofline.step(BatchShape(contexts, (num_rows,) * streams, streams * num_rows))
    drafts_s = NUM_DRAFTS * _DRAFT_COST_RATIO * planner.decode(streams).seconds
    round_s = (verify.seconds + drafts_s) / expected_tokens_per_round(ACCEPTANCE_RATE, NUM_DRAFTS)
    change = f"speculation ({NUM_DRAFTS} drafts, {ACCEPTANCE_RATE:.0%} right)"
    return [*results, _what_if(change, planner, streams, round_s)]


def _changed_questions(planner: Planner) -> Iterator[tuple[str, PlannedModel, Question]]:
    """Yield each change that a plan considers: its name, the changed model and question."""
    question, model, device = planner.question, planner.model, planner.device
    yield "as asked", model, question
    for name in ("fp8", "w4a16"):
        if model.stored == name:
            continue
        smaller = model.with_weights(name)
        if smaller.all_bytes < 0.9 * model.all_bytes:
            yield f"weights {name}", smaller, question
    if question.kv_format != "int8":
        yield "keys and values int8", model, replace(question, kv_format="int8")
    for change, variant in variants(model, question.prompt + question.output):
        yield change, variant, question
    yield "half the prompt", model, replace(question, prompt=max(1, question.prompt // 2))
    cached = (1 + question.cached) / 2
    yield f"{cached:.0%} of the prompt cached", model, replace(question, cached=cached)
    if 2 * question.count <= MAX_DEVICES:
        note = "" if device.link else ", without their links"
        yield f"twice the devices{note}", model, replace(question, count=2 * question.count)


def _what_if(change: str, planner: Planner, streams: int, step_s: float) -> WhatIf:
    """Return the figures of a plan after a change; its decode step takes `step_s` seconds."""
    output, usd = planner.question.output, planner.usd_per_hour
    tokens_per_s = output / (planner.prompt_s(streams) + output * step_s / streams)
    return WhatIf(
        change,
        planner.ttft_s(streams),
        tpot_s=planner.tpot_s(streams, step_s),
        most_streams=planner.memory().most_streams,
        usd_per_million=None if usd is None else usd_per_million_tokens(usd, tokens_per_s),
    )


def _shown_stream_counts(limit: int, streams: int) -> list[int]:
    """Return the numbers of streams for which a plan's table has a row.

    They are the powers of two up to `limit`, and `streams`, in ascending order.
    """
    powers = [1 << power for power in range(15)]
    return sorted({count for count in [*powers, streams] if count <= max(1, limit)})


def expected_tokens_per_round(acceptance: float, num_drafts: int) -> float:
    """Return the expected number of tokens from one round of speculative decoding.

    `acceptance` is the probability that a draft is accepted after all earlier drafts of the round
    were accepted. Source: Leviathan et al., "Fast Inference from Transformers via Speculative
    Decoding" (2023), equation 1.
    """
    if acceptance >= 1:
        return num_drafts + 1.0
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
