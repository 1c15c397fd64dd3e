"""Answers a question: what fits, how fast both strokes are, and what they cost."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.explain import explain
from twostroke.lab.planner.planner import Planner, last_that
from twostroke.lab.planner.prices import usd_per_million_tokens
from twostroke.lab.planner.question import MAX_DEVICES, MOST_UNASKED, context_shortfall
from twostroke.lab.planner.queueing import loads, user_load
from twostroke.lab.planner.reference_calibration import MEASURED, ReferenceCalibration
from twostroke.lab.planner.roofline import kv_bytes
from twostroke.lab.planner.variants import variants
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.lab.planner.calibration import Calibration
    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.planner import MemoryPlan, Row
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.queueing import Loaded, UserLoad
    from twostroke.lab.planner.roofline import PlannedStepTime

_MOST_STREAMS = 1 << 14  # that a plan looks at
_DRAFTS, _ACCEPTANCE, _DRAFT_COST = 3, 0.7, 0.1  # of the speculation that a plan looks at


class WhatIf(Frozen):
    """What another choice would give at the plan's number of streams.

    `most_streams` is what would fit, None where the device's memory is not known.
    """

    change: str
    ttft_s: float
    tpot_s: float
    most_streams: int | None
    usd_per_million: float | None


class Calibrated(Frozen):
    """How far times can be trusted: what the measured steps say of each other.

    `error` is the median, as a share, and None for a single step. `nearest` is the step that counts
    most for `chosen`.
    """

    date: str
    num_threads: int
    num_steps: int
    error: float | None
    nearest: str | None


class Roof(Frozen):
    """What the devices of a plan offer together, as far as an engine reaches it.

    `peak` is in operations/s of the plan's arithmetic, `bandwidth` in bytes/s, as is `link`, that
    of one device: None if it is not known and takes no time. `source` and `price_source` say where
    figures come from, the price with its date.
    """

    peak: float
    bandwidth: float
    link: float | None
    usd_per_hour: float | None
    source: str
    price_source: str


class Plan(Frozen):
    """The answer to a question. `chosen` is None if no number of streams does what is asked.

    `bound` says why there are no more streams, where their number was not asked for.

    `prefill` and `decode` are the steps of a prompt and of `shown` streams. `loads` are shares of
    the load that the chosen streams carry. `user_load` is None if the question names no users.
    """

    model: str
    stored: str
    device: str
    question: Question
    num_weights: int
    context_length: int
    arithmetic: str
    roof: Roof
    memory: MemoryPlan
    knee: float
    ttft_s: float
    prefill_bottleneck: str
    shown: int
    prefill: PlannedStepTime
    decode: PlannedStepTime
    rows: tuple[Row, ...]
    chosen: Row | None
    verdict: str
    bound: str
    prefill_per_decode: float | None
    loads: tuple[Loaded, ...]
    what_ifs: tuple[WhatIf, ...]
    steps: tuple[str, ...]
    user_load: UserLoad | None = None
    calibrated: Calibrated | None = None
    assumed: tuple[str, ...] = ()  # sizes that the model's configuration leaves out
    usual: str = ""  # of which model, on which machine, the steps are by which times are corrected

    @property
    def fits(self) -> bool:
        """Whether the context holds a request, and the memory as many streams as are asked."""
        is_short_enough = self.question.prompt + self.question.output <= self.context_length
        has_memory = self.memory.most_streams != 0
        return is_short_enough and has_memory and self.shown >= (self.question.streams or 1)


def make_plan(
    model: PlannedModel,
    device: Device,
    question: Question,
    calibration: Calibration | ReferenceCalibration | None = None,
) -> Plan:
    """Return the answer to `question` for a model on devices of one kind.

    `calibration` corrects times: that of the model on this machine, or of another model.
    """
    planner = Planner(model, device, question, calibration)
    memory, prefill = planner.memory(), planner.prefill()
    fitting = _MOST_STREAMS if memory.most_streams is None else memory.most_streams
    fitting = min(fitting, _MOST_STREAMS)
    room = min(fitting, question.most_decoding or fitting)
    most = planner.most_within(room)
    unasked = most if question.tpot_s is not None else min(most, MOST_UNASKED)
    streams = question.streams or unasked
    verdict = _verdict(planner, memory, fitting, most)
    chosen = planner.row(streams) if verdict == "" else None
    shown = max(1, min(streams or question.streams or 1, room))
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
        shown=shown,
        prefill=prefill,
        decode=planner.decode(shown),
        rows=tuple(planner.row(count) for count in _counts(room, shown)),
        chosen=chosen,
        verdict=verdict,
        bound="" if chosen is None else _bound(planner, memory, chosen.streams),
        prefill_per_decode=None if chosen is None else planner.prefill_per_decode(chosen.streams),
        loads=() if chosen is None else loads(planner, chosen.streams),
        what_ifs=tuple(_what_ifs(planner, shown)),
        steps=tuple(explain(planner, memory, shown)),
        user_load=None if chosen is None else user_load(planner, chosen.streams),
        calibrated=_calibrated(planner, shown),
        usual=MEASURED if isinstance(calibration, ReferenceCalibration) else "",
        assumed=model.assumed,
    )


def _roof(planner: Planner) -> Roof:
    roofline = planner.roofline
    offered = roofline.peak, roofline.bandwidth, roofline.link
    return Roof(*offered, planner.usd_per_hour, planner.device.source, planner.price_source)


def _calibrated(planner: Planner, streams: int) -> Calibrated | None:
    known = planner.calibration
    if known is None or isinstance(known, ReferenceCalibration):
        return None
    nearest = planner.decode(streams).nearest
    error = known.error(planner.roofline.measured)
    return Calibrated(known.date, known.num_threads, known.num_steps, error, nearest)


def _verdict(planner: Planner, memory: MemoryPlan, fitting: int, most: int) -> str:
    """Return why what is asked cannot be, by how much, and what would do it; else nothing."""
    asked, name = planner.question, planner.device.name
    context_length = planner.model.program.context_length
    if shortfall := context_shortfall(planner.model.name, context_length, asked):
        return shortfall
    if fitting < 1:
        return (
            f"It does not fit: weights take {format_number(memory.weights / 1e9)} GB and one "
            f"request {format_number(memory.kv_per_request / 1e9)} GB, and {asked.count} x {name} "
            f"offers {format_number((memory.usable or 0) / 1e9)} GB for them. "
            f"{_what_fits(planner, memory)}."
        )
    if asked.streams is not None and asked.streams > fitting:
        return f"{asked.streams} streams do not fit: at most {fitting} do."
    if asked.streams is not None and asked.streams > (asked.most_decoding or asked.streams):
        needed = ceil(asked.streams * (asked.num_new + asked.output) / asked.output)
        return (
            f"At most {asked.most_decoding:,} of {asked.streams:,} streams can decode at once: "
            f"their prompts fill the rest of steps of {asked.token_budget:,} tokens. All need "
            f"steps of at least {needed:,}."
        )
    return "" if 1 <= (asked.streams or 1) <= most else _late(planner, most)


def _late(planner: Planner, most: int) -> str:
    """Return which objective is missed, by how much, and what would meet it."""
    asked, streams = planner.question, planner.question.streams or 1
    fewer = f"; at most {most:,} would meet it" if most else ""
    cases = (
        ("The first token", asked.ttft_s, Planner.ttft_s, "a shorter prompt or more of it cached"),
        ("A token", asked.tpot_s, Planner.tpot_s, "fewer bits for each weight, or speculation"),
    )
    for what, limit_s, time_s, otherwise in cases:
        if limit_s is not None and (taken_s := time_s(planner, streams)) > limit_s:
            return (
                f"{what} takes at least {format_ms(taken_s)} ms with {streams:,} "
                f"{'streams' if streams > 1 else 'stream'}, {taken_s / limit_s:,.2f} times the "
                f"objective: {_devices(planner, time_s, limit_s)}, {otherwise}{fewer}."
            )
    return ""


def _bound(planner: Planner, memory: MemoryPlan, streams: int) -> str:
    """Return what keeps a plan from more streams, in the words of `Replica.bound`."""
    asked = planner.question
    if asked.streams is not None:
        return ""
    if streams == memory.most_streams:
        return "memory"
    if streams == asked.most_decoding:
        return "prompts"
    if asked.ttft_s is not None and planner.ttft_s(streams + 1) > asked.ttft_s:
        return "TTFT"
    return "the default" if asked.tpot_s is None or streams == _MOST_STREAMS else "TPOT"


def _what_fits(planner: Planner, memory: MemoryPlan) -> str:
    """Return what would make room for one request."""
    asked, model, usable = planner.question, planner.model, memory.usable or 0
    needed = memory.devices_needed
    found = [f"{needed} of them are enough" if needed else "no number of them is enough"]
    for name in ("fp8", "w4a16"):
        smaller = model.as_(name).all_bytes
        if smaller < model.all_bytes and smaller + memory.kv_per_request <= usable:
            found.append(f"weights in {name} take {format_number(smaller / 1e9)} GB and fit")
            break

    def holds(num_tokens: int) -> bool:
        return model.all_bytes + kv_bytes(model, asked, num_tokens) <= usable

    if num_tokens := last_that(holds, asked.prompt + asked.output):
        found.append(f"prompt and output of {num_tokens:,} tokens together fit")
    return f"{found[0][0].upper()}{'; '.join(found)[1:]}"


def _devices(planner: Planner, time_s: Callable[[Planner, int], float], limit_s: float) -> str:
    """Return how many devices would meet an objective, what their links take included."""
    streams = planner.question.streams or 1

    def is_late(count: int) -> bool:
        return time_s(planner.on(planner.device, count), streams) > limit_s

    if is_late(MAX_DEVICES):
        return f"{MAX_DEVICES:,} devices are not enough: it needs fewer operations and bytes"
    return f"it needs at least {last_that(is_late, MAX_DEVICES) + 1} devices"


def _what_ifs(planner: Planner, streams: int) -> list[WhatIf]:
    """Return what other choices would give."""
    asked, model, device = planner.question, planner.model, planner.device
    cached = (1 + asked.cached) / 2
    twice = "twice the devices" + ("" if device.link else ", without their links")
    others: list[tuple[str, PlannedModel, Question]] = [("as asked", model, asked)]
    for name in ("fp8", "w4a16"):
        if model.stored == name:
            continue
        smaller = model.as_(name)
        if smaller.all_bytes < 0.9 * model.all_bytes:
            others.append((f"weights {name}", smaller, asked))
    if asked.kv_format != "int8":
        others.append(("keys and values int8", model, replace(asked, kv_format="int8")))
    for change, other in variants(model, asked.prompt + asked.output):
        others.append((change, other, asked))
    others += [
        ("half the prompt", model, replace(asked, prompt=max(1, asked.prompt // 2))),
        (f"{cached:.0%} of the prompt cached", model, replace(asked, cached=cached)),
    ]
    if 2 * asked.count <= MAX_DEVICES:
        others.append((twice, model, replace(asked, count=2 * asked.count)))
    found = []
    for change, other, question in others:
        if other is model and question.kv_format == asked.kv_format:
            one = planner.asked(question)
        else:
            one = Planner(other, device, question, planner.calibration)
        found.append(_what_if(change, one, streams, one.decode(streams).seconds))
    starts, rows = (asked.mean_context,) * streams, _DRAFTS + 1
    verify = planner.roofline.step(BatchShape(starts, (rows,) * streams, streams * rows))
    drafts_s = _DRAFTS * _DRAFT_COST * planner.decode(streams).seconds
    round_s = (verify.seconds + drafts_s) / expected_tokens_per_round(_ACCEPTANCE, _DRAFTS)
    change = f"speculation ({_DRAFTS} drafts, {_ACCEPTANCE:.0%} right)"
    return [*found, _what_if(change, planner, streams, round_s)]


def _what_if(change: str, planner: Planner, streams: int, step_s: float) -> WhatIf:
    output, usd = planner.question.output, planner.usd_per_hour
    per_s = output / (planner.prompt_s(streams) + output * step_s / streams)
    return WhatIf(
        change,
        planner.ttft_s(streams),
        planner.tpot_s(streams, step_s),
        planner.memory().most_streams,
        None if usd is None else usd_per_million_tokens(usd, per_s),
    )


def _counts(most: int, streams: int) -> list[int]:
    """Return the numbers of streams to show: powers of two that fit, and the chosen one."""
    powers = [1 << power for power in range(15)]
    return sorted({one for one in [*powers, streams] if one <= max(1, most)})


def expected_tokens_per_round(acceptance: float, num_drafts: int) -> float:
    """Return the expected number of tokens that one round of speculation yields.

    `acceptance` is the probability that a draft is accepted after all earlier drafts of the round
    were accepted. Source: Leviathan et al., "Fast Inference from Transformers via Speculative
    Decoding" (2023), equation 1.
    """
    if acceptance >= 1:
        return num_drafts + 1.0
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
