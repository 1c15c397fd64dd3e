"""The figures of one model on devices of one kind, from the times of its steps."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.chunks import chunks, num_chunks, together
from twostroke.lab.planner.prices import usd_per_million_tokens
from twostroke.lab.planner.question import MAX_DEVICES, MEMORY_SHARE
from twostroke.lab.planner.roofline import Roofline, is_attention, kv_bytes, layers_bytes
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.kv_layout import FORMATS

_KNEE_ROUNDS, _MOST_ROWS = 32, 1 << 24
_PAGES = 256  # tokens of some pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from twostroke.lab.planner.calibration import Calibration
    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.reference_calibration import ReferenceCalibration
    from twostroke.lab.planner.roofline import OpWork, PlannedStepTime


class MemoryPlan(Frozen):
    """Bytes on all devices together; `most_streams` whole requests fit at once.

    Alone, a request of `most_tokens` fits: all of the model's context, or whole pages. `usable` is
    None where the device's memory is not known.
    """

    usable: float | None
    weights: float
    kv_per_token: float
    kv_per_request: float
    most_streams: int | None
    most_tokens: int | None
    devices_needed: int | None  # so that one request fits; None if no number suffices


class Row(Frozen):
    """`streams` requests that are always at work: each that ends is followed by another.

    `step_s`, `mbu`, `mfu` and `bottleneck` are of a decode step. All other figures include prefill
    on the same devices: `tpot_s` the prompts of the other streams, the others each request's own.
    `ttft_s` waits for no other prompt. `joules_per_token` is at full power.
    """

    streams: int
    step_s: float
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    mbu: float
    mfu: float
    bottleneck: str
    requests_per_s: float
    usd_per_million: float | None
    usd_per_1k: float | None  # requests
    joules_per_token: float | None


class Planner:
    """The times of one model on one kind of device."""

    def __init__(
        self,
        model: PlannedModel,
        device: Device,
        question: Question,
        calibration: Calibration | ReferenceCalibration | None = None,
    ) -> None:
        self.model, self.device, self.question = model, device, question
        self.calibration = calibration
        self.roofline = Roofline(model, device, question, calibration)
        self._works: dict[int, tuple[OpWork, NDArray[np.float64]]] = {}  # by streams
        self._times_s: dict[int, tuple[float, float, float]] = {}

    def on(self, device: Device, count: int) -> Planner:
        """Return that of the same model and load on `count` other devices."""
        other = self._changed(device, replace(self.question, count=count))
        other._works = self._works  # noqa: SLF001 - a copy of this one
        return other

    def asked(self, question: Question) -> Planner:
        """Return that of the same model for another question, but for its format of the cache."""
        return self._changed(self.device, question)

    def _changed(self, device: Device, question: Question) -> Planner:
        other = copy(self)
        other.device, other.question = device, question
        other.roofline = self.roofline.on(device, question)
        other._works, other._times_s = {}, {}  # noqa: SLF001 - a copy of this one
        return other

    def prefill(self, *, is_limit: bool = False) -> PlannedStepTime:
        """Return the time of a prompt alone: the sum of its steps, or of their least times."""
        asked, steps = self.question, []
        time_of = self.roofline.least if is_limit else self.roofline.step
        for one in chunks(asked.num_cached, asked.prompt, asked.token_budget):
            batch = BatchShape((one.start,), (one.rows,), int(one.is_last))
            steps.append((time_of(batch), one.times))
        return together(steps)

    def decode(self, streams: int, *, is_limit: bool = False) -> PlannedStepTime:
        """Return the time of a step that gives each of so many streams a token, or its least."""
        batch = self._decoding(streams)
        return self.roofline.least(batch) if is_limit else self.roofline.step(batch)

    def _decoding(self, streams: int) -> BatchShape:
        return BatchShape.decode((self.question.mean_context,) * streams)

    def memory(self) -> MemoryPlan:
        """Return what the model takes, and what remains for requests."""
        asked, usable = self.question, None
        num_tokens = asked.prompt + asked.output
        request = kv_bytes(self.model, asked, num_tokens)
        most = longest = needed = None
        if self.device.memory_bytes is not None:
            usable = self.device.memory_bytes * asked.count * MEMORY_SHARE
            free = usable - self.model.all_bytes
            most, longest = max(0, int(free // request)), fitting_context(self.model, asked, free)
            needed = self._devices_needed(num_tokens)
        token = kv_bytes(self.model, asked, 1)
        return MemoryPlan(usable, self.model.all_bytes, token, request, most, longest, needed)

    def _devices_needed(self, num_tokens: int) -> int | None:
        usable = (self.device.memory_bytes or 0) * MEMORY_SHARE
        layers, weights = Counter(self.model.program.cache_layers), self.model.all_bytes
        stored = FORMATS[self.question.kv_format]
        for count in range(1, MAX_DEVICES + 1):
            request = layers_bytes(layers, stored, count, num_tokens)
            if weights + request <= count * usable:
                return count
        return None

    def row(self, streams: int) -> Row:
        """Return the figures of so many streams."""
        asked, step, request_s = self.question, self.decode(streams), self.request_s(streams)
        usd, watts = self.usd_per_hour, self.device.tdp_w
        per_s = asked.output / request_s
        return Row(
            streams=streams,
            step_s=self.step_s(streams),
            ttft_s=self.ttft_s(streams),
            tpot_s=self.tpot_s(streams),
            tokens_per_s=per_s,
            mbu=step.bytes / step.seconds / (self.roofline.bandwidth / asked.mbu),
            mfu=step.flops / step.seconds / (self.roofline.peak / asked.mfu),
            bottleneck=step.bottleneck,
            requests_per_s=1 / request_s,
            usd_per_million=None if usd is None else usd_per_million_tokens(usd, per_s),
            usd_per_1k=None if usd is None else usd_per_million_tokens(usd, 1 / request_s) / 1e3,
            joules_per_token=None if watts is None else watts * asked.count / per_s,
        )

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all devices."""
        one = self.question.price_of(self.device)
        return None if one is None else one * self.question.count

    @property
    def price_source(self) -> str:
        """Where the price comes from, with its date; empty if there is none."""
        return "as given" if self.question.usd_per_hour else self.device.price_source

    def most_within(self, most: int) -> int:
        """Return the largest number of streams, at most `most`, that meets the objectives.

        0 if one stream is too slow. More streams never take less time.
        """
        most = most_under(self.question.tpot_s, self.tpot_s, most)
        return most_under(self.question.ttft_s, self.ttft_s, most)

    def step_s(self, streams: int) -> float:
        """Return the time of a step that gives each of so many streams a token."""
        return self._seconds(streams)[0]

    def prompt_s(self, streams: int) -> float:
        """Return how much longer steps take that also read a prompt, for `streams` in all."""
        return self._seconds(streams)[1]

    def ttft_s(self, streams: int) -> float:
        """Return the time of the steps that read a prompt and give all other streams tokens."""
        return self._seconds(streams)[2]

    def _seconds(self, streams: int) -> tuple[float, float, float]:
        """Return `step_s`, `prompt_s` and `ttft_s`."""
        if streams not in self._times_s:
            if self.calibration is not None:
                batches, times = self._steps(streams)
                found = np.array([self.roofline.step(batch).seconds for batch in batches])
            else:
                if streams not in self._works:
                    batches, times = self._steps(streams)
                    self._works[streams] = self.roofline.work(batches), times
                work, times = self._works[streams]
                found = self.roofline.least_s(work)
            others_s = found[1] if streams > 1 else 0.0
            longer_s = np.maximum(0.0, found[2:] - others_s)
            prompt_s, first_s = times @ longer_s, times @ (longer_s + others_s)
            self._times_s[streams] = float(found[0]), float(prompt_s), float(first_s)
        return self._times_s[streams]

    def _steps(self, streams: int) -> tuple[list[BatchShape], NDArray[np.float64]]:
        """Return a decode step of all, one without one of them, and those that read its prompt.

        With the latter come how many steps each stands for: (chunks,).
        """
        asked, others = self.question, streams - 1
        read = chunks(asked.num_cached, asked.prompt, asked.chunk(others))
        before = (asked.mean_context,) * others
        reading = [
            BatchShape((*before, one.start), (*(1,) * others, one.rows), others + one.is_last)
            for one in read
        ]
        batches = [self._decoding(streams), self._decoding(max(1, others)), *reading]
        return batches, np.array([one.times for one in read])

    def num_chunks(self, streams: int) -> int:
        """Return how many steps read a prompt, for `streams` in all."""
        return num_chunks(self.question.num_new, self.question.chunk(streams - 1))

    def request_s(self, streams: int) -> float:
        """Return the time of the devices that a request takes among so many."""
        return self.prompt_s(streams) + self.question.output * self.step_s(streams) / streams

    def prefill_per_decode(self, streams: int) -> float:
        """Return how many devices read prompts for one that decodes so many streams."""
        return self.prefill().seconds * streams / (self.step_s(streams) * self.question.output)

    def tpot_s(self, streams: int, step_s: float | None = None) -> float:
        """Return the time of a token, while the prompts of others are read in between.

        `step_s` is the time without these, None for that of a decode step.
        """
        step_s = self.step_s(streams) if step_s is None else step_s
        return step_s + (streams - 1) * self.prompt_s(streams) / self.question.output

    @property
    def knee(self) -> float:
        """The streams from which on the products of a decode step are bound by arithmetic.

        More streams read more experts, which moves it further up, until all are read.
        """
        knee = 1.0
        for _ in range(_KNEE_ROUNDS):
            rows = min(_MOST_ROWS, max(1, round(knee)))
            step = self.roofline.least(BatchShape((0,), (rows,), rows))
            products = [op for label, op in step.ops.items() if not is_attention(label)]
            flops, read = sum(op.flops for op in products), sum(op.bytes for op in products)
            before, knee = (
                knee,
                rows * read / self.roofline.bandwidth / (flops / self.roofline.peak),
            )
            if abs(knee - before) < 0.001 * knee:
                break
        return knee


def fitting_context(model: PlannedModel, question: Question, num_bytes: float) -> int:
    """Return the tokens of the longest request whose keys and values take at most `num_bytes`.

    They are whole pages if they are fewer than the model's context.
    """
    whole = model.program.context_length
    most = last_that(lambda count: kv_bytes(model, question, count) <= num_bytes, whole)
    return most if most == whole else most // _PAGES * _PAGES


def most_under(limit_s: float | None, time_s: Callable[[int], float], most: int) -> int:
    """Return the largest number up to `most` that takes at most `limit_s`, None for no limit."""
    return most if limit_s is None else last_that(lambda number: time_s(number) <= limit_s, most)


def last_that(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` for which it holds, if it holds for all below."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
