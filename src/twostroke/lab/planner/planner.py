"""Latency, throughput, memory and cost of one model on devices of one kind."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.chunks import chunks, num_chunks, sum_of_steps
from twostroke.lab.planner.prices import usd_per_million_tokens
from twostroke.lab.planner.question import MAX_DEVICES, MEMORY_SHARE
from twostroke.lab.planner.roofline import (
    STATE_COPIES,
    Roofline,
    is_attention,
    kv_bytes,
    kv_layer_bytes,
    request_bytes,
)
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.kv_layout import FORMATS

_KNEE_ITERATIONS = 32
_MAX_ROWS = 1 << 24
_CONTEXT_MULTIPLE = 256  # tokens; context lengths below the model's are rounded down to this

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
    """How a model and its requests use the memory of a plan's devices, in bytes over all devices.

    Attributes:
        usable: memory for weights and requests; None if the device's memory is unknown.
        weights: size of the weights.
        kv_per_token: keys and values of the first token of a request.
        kv_per_request: keys, values and recurrent states of one complete request.
        most_streams: number of complete requests that fit at the same time.
        most_tokens: tokens of the longest single request that fits, at most the model's context.
        devices_needed: devices with which one request fits; None if no number is enough.
    """

    usable: float | None
    weights: float
    kv_per_token: float
    kv_per_request: float
    most_streams: int | None
    most_tokens: int | None
    devices_needed: int | None


class PlanRow(Frozen):
    """A plan's figures if `streams` requests always run: when one ends, the next one starts.

    `step_s`, `mbu`, `mfu` and `bottleneck` describe a decode step. The other figures include
    prefill on the same devices: `tpot_s` includes the prefill of the other streams' prompts.
    `ttft_s` does not include waiting for other prompts. `joules_per_token` assumes full power.
    `usd_per_million` is for a million output tokens, `usd_per_1k` for a thousand requests.
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
    usd_per_1k: float | None
    joules_per_token: float | None


class Planner:
    """Computes the times, memory and costs of a model on a device, for a planning question.

    `device` is one device, and `question.count` of them divide each layer. Times, in seconds, are
    minimum times of the roofline, corrected by `calibration` if there is one.
    """

    def __init__(
        self,
        model: PlannedModel,
        device: Device,
        question: Question,
        calibration: Calibration | ReferenceCalibration | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.question = question
        self.calibration = calibration
        self.roofline = Roofline(model, device, question, calibration)
        self._work_by_streams: dict[int, tuple[OpWork, NDArray[np.float64]]] = {}
        self._times_by_streams: dict[int, tuple[float, float, float]] = {}

    def on_devices(self, device: Device, count: int) -> Planner:
        """Return a planner of the same model and load on `count` devices of another kind."""
        other = self._changed(device, replace(self.question, count=count))
        other._work_by_streams = self._work_by_streams  # noqa: SLF001 - a copy of this one
        return other

    def for_question(self, question: Question) -> Planner:
        """Return a planner of the same model and device for another question.

        The number format of the KV cache stays, even if the new question names another format.
        """
        return self._changed(self.device, question)

    def _changed(self, device: Device, question: Question) -> Planner:
        other = copy(self)
        other.device = device
        other.question = question
        other.roofline = self.roofline.on_devices(device, question)
        other._work_by_streams = {}  # noqa: SLF001 - a copy of this one
        other._times_by_streams = {}  # noqa: SLF001
        return other

    def prefill(self, *, is_limit: bool = False) -> PlannedStepTime:
        """Return the time of a prompt that is computed alone, as the sum of its steps.

        With `is_limit`, the result is the minimum time, without correction.
        """
        question, steps = self.question, []
        time_of = self.roofline.min_step if is_limit else self.roofline.step
        for chunk in chunks(question.num_cached, question.prompt, question.token_budget):
            batch = BatchShape((chunk.start,), (chunk.rows,), int(chunk.is_last))
            steps.append((time_of(batch), chunk.times))
        return sum_of_steps(steps)

    def decode(self, streams: int, *, is_limit: bool = False) -> PlannedStepTime:
        """Return the time of a step in which `streams` requests decode.

        With `is_limit`, the result is the minimum time, without correction.
        """
        batch = self._decode_batch(streams)
        return self.roofline.min_step(batch) if is_limit else self.roofline.step(batch)

    def _decode_batch(self, streams: int) -> BatchShape:
        return BatchShape.decode((self.question.mean_context,) * streams)

    def memory(self) -> MemoryPlan:
        """Return the memory that the model takes, and how many requests fit into the rest."""
        question, usable = self.question, None
        num_tokens = question.prompt + question.output
        bytes_per_request = request_bytes(self.model, question, num_tokens)
        max_streams = max_context = devices_needed = None
        if self.device.memory_bytes is not None:
            usable = self.device.memory_bytes * question.count * MEMORY_SHARE
            free = usable - self.model.all_bytes
            max_streams = max(0, int(free // bytes_per_request))
            max_context = fitting_context(self.model, question, free)
            devices_needed = self._devices_needed(num_tokens)
        return MemoryPlan(
            usable=usable,
            weights=self.model.all_bytes,
            kv_per_token=kv_bytes(self.model, question, 1),
            kv_per_request=bytes_per_request,
            most_streams=max_streams,
            most_tokens=max_context,
            devices_needed=devices_needed,
        )

    def _devices_needed(self, num_tokens: int) -> int | None:
        usable = (self.device.memory_bytes or 0) * MEMORY_SHARE
        layers, weights = Counter(self.model.program.cache_layers), self.model.all_bytes
        stored = FORMATS[self.question.kv_format]
        state_bytes = STATE_COPIES * self.model.program.state_bytes
        for count in range(1, MAX_DEVICES + 1):
            request = kv_layer_bytes(layers, stored, count, num_tokens)
            if weights + request + state_bytes <= count * usable:
                return count
        return None

    def row(self, streams: int) -> PlanRow:
        """Return the speeds, latencies and costs with a number of streams."""
        question = self.question
        step = self.decode(streams)
        request_s = self.request_s(streams)
        usd = self.usd_per_hour
        watts = self.device.tdp_w
        tokens_per_s = question.output / request_s
        return PlanRow(
            streams=streams,
            step_s=self.step_s(streams),
            ttft_s=self.ttft_s(streams),
            tpot_s=self.tpot_s(streams),
            tokens_per_s=tokens_per_s,
            mbu=step.bytes / step.seconds / (self.roofline.bandwidth / question.mbu),
            mfu=step.flops / step.seconds / (self.roofline.peak / question.mfu),
            bottleneck=step.bottleneck,
            requests_per_s=1 / request_s,
            usd_per_million=None if usd is None else usd_per_million_tokens(usd, tokens_per_s),
            usd_per_1k=None if usd is None else usd_per_million_tokens(usd, 1 / request_s) / 1e3,
            joules_per_token=None if watts is None else watts * question.count / tokens_per_s,
        )

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all devices together in $ per hour; None if it is unknown."""
        price = self.question.price_of(self.device)
        return None if price is None else price * self.question.count

    @property
    def price_source(self) -> str:
        """The source of the devices' price, with its date; empty if there is no price."""
        return "as given" if self.question.usd_per_hour else self.device.price_source

    def max_streams(self, limit: int) -> int:
        """Return the largest number of streams up to `limit` that meets the latency objectives.

        The result is 0 if one stream is too slow. The search relies on times that never fall with
        more streams.
        """
        limit = max_within_limit(self.question.tpot_s, self.tpot_s, limit)
        return max_within_limit(self.question.ttft_s, self.ttft_s, limit)

    def step_s(self, streams: int) -> float:
        """Return the seconds of a step in which `streams` requests decode."""
        return self._seconds(streams)[0]

    def prompt_s(self, streams: int) -> float:
        """Return the seconds that a prompt's chunks add to the steps in which other streams decode.

        `streams` counts the prompt's request and the decoding streams.
        """
        return self._seconds(streams)[1]

    def ttft_s(self, streams: int) -> float:
        """Return the seconds from a prompt's first chunk to its first token.

        `streams` counts the prompt's request and the streams that decode in the same steps.
        """
        return self._seconds(streams)[2]

    def _seconds(self, streams: int) -> tuple[float, float, float]:
        """Return `step_s`, `prompt_s` and `ttft_s` for a number of streams, which share their work.

        They are computed once for each number.
        """
        if streams not in self._times_by_streams:
            if self.calibration is not None:
                batches, counts = self._steps(streams)
                seconds = np.array([self.roofline.step(batch).seconds for batch in batches])
            else:
                if streams not in self._work_by_streams:
                    batches, counts = self._steps(streams)
                    self._work_by_streams[streams] = self.roofline.work(batches), counts
                work, counts = self._work_by_streams[streams]
                seconds = self.roofline.min_seconds(work)
            others_s = seconds[1] if streams > 1 else 0.0
            added_s = np.maximum(0.0, seconds[2:] - others_s)
            prompt_s = counts @ added_s
            first_token_s = counts @ (added_s + others_s)
            times = float(seconds[0]), float(prompt_s), float(first_token_s)
            self._times_by_streams[streams] = times
        return self._times_by_streams[streams]

    def _steps(self, streams: int) -> tuple[list[BatchShape], NDArray[np.float64]]:
        """Return the steps whose times determine the latencies with `streams` requests.

        The steps are a decode step of all streams, a decode step without one stream, and mixed
        steps with a chunk of that stream's prompt. The array (chunks,) has, for each mixed step,
        how many steps it represents.
        """
        question, num_others = self.question, streams - 1
        prompt_chunks = chunks(question.num_cached, question.prompt, question.max_chunk(num_others))
        other_contexts = (question.mean_context,) * num_others
        mixed_steps = [
            BatchShape(
                (*other_contexts, chunk.start),
                (*(1,) * num_others, chunk.rows),
                num_others + chunk.is_last,
            )
            for chunk in prompt_chunks
        ]
        batches = [
            self._decode_batch(streams),
            self._decode_batch(max(1, num_others)),
            *mixed_steps,
        ]
        return batches, np.array([chunk.times for chunk in prompt_chunks])

    def num_chunks(self, streams: int) -> int:
        """Return the number of steps that compute a prompt while the other streams decode."""
        return num_chunks(self.question.num_new, self.question.max_chunk(streams - 1))

    def request_s(self, streams: int) -> float:
        """Return the device time, in seconds, of each request if `streams` requests share steps."""
        return self.prompt_s(streams) + self.question.output * self.step_s(streams) / streams

    def prefill_per_decode(self, streams: int) -> float:
        """Return the number of prefill devices for each decode device, so that both are busy.

        A decode device runs `streams` requests.
        """
        return self.prefill().seconds * streams / (self.step_s(streams) * self.question.output)

    def tpot_s(self, streams: int, step_s: float | None = None) -> float:
        """Return the mean seconds per output token, with the prefill of other streams' prompts.

        `step_s` replaces the time of a decode step.
        """
        step_s = self.step_s(streams) if step_s is None else step_s
        return step_s + (streams - 1) * self.prompt_s(streams) / self.question.output

    @property
    def knee(self) -> float:
        """The number of streams from which arithmetic, and not memory, limits decode steps.

        It counts matrix products only. With experts the number is higher, because more streams read
        more experts.
        """
        knee = 1.0
        for _ in range(_KNEE_ITERATIONS):
            rows = min(_MAX_ROWS, max(1, round(knee)))
            step = self.roofline.min_step(BatchShape((0,), (rows,), rows))
            products = [op for label, op in step.ops.items() if not is_attention(label)]
            flops = sum(op.flops for op in products)
            num_bytes = sum(op.bytes for op in products)
            before = knee
            knee = rows * num_bytes / self.roofline.bandwidth / (flops / self.roofline.peak)
            if abs(knee - before) < 0.001 * knee:
                break
        return knee


def fitting_context(model: PlannedModel, question: Question, num_bytes: float) -> int:
    """Return the tokens of the longest request that takes at most `num_bytes`.

    A request takes the bytes of its keys, values and recurrent states. The result is the model's
    context or a multiple of 256 tokens.
    """
    limit = model.program.context_length
    num_tokens = largest_where(
        lambda count: request_bytes(model, question, count) <= num_bytes, limit
    )
    return (
        num_tokens if num_tokens == limit else num_tokens // _CONTEXT_MULTIPLE * _CONTEXT_MULTIPLE
    )


def max_within_limit(limit_s: float | None, time_s: Callable[[int], float], limit: int) -> int:
    """Return the largest number of streams up to `limit` whose time is within a time limit.

    The condition is `time_s(number) <= limit_s`. If `limit_s` is None, the result is `limit`.
    """
    if limit_s is None:
        return limit
    return largest_where(lambda number: time_s(number) <= limit_s, limit)


def largest_where(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 0 to `limit` for which `holds` is true, by bisection.

    `holds` must be true for all numbers from 1 up to the result.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
