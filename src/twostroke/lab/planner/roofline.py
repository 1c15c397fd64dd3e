"""The shortest time of a step: arithmetic or memory bandwidth limits each operation."""

from __future__ import annotations

from collections import Counter
from copy import copy
from math import ceil
from operator import add
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.question import Question
from twostroke.model.program.batch import DecodeRun
from twostroke.model.program.kv_layout import FORMATS
from twostroke.model.program.work import StepCost, each_sampled_row, once_if_sampled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.model.program.batch import BatchShape
    from twostroke.model.program.kv_layout import CacheFormat, CacheLayer
    from twostroke.model.program.ops import Op
    from twostroke.model.program.work import Cost, Count

    # Label, terms of the work, KV heads. Operations with equal keys are counted together.
    _OpKind: TypeAlias = tuple[str, tuple[tuple[Count, Cost], ...], int | None]

STATE_COPIES: Final = 2  # of a request's recurrent states
_EXCHANGED_VALUE_BYTES: Final = 2  # size of a value that devices exchange


def is_attention(label: str) -> bool:
    """Whether an operation's label names attention, with or without a window.

    All other operations count as products.
    """
    return label.startswith("attention")


class Factors(Frozen):
    """Factors that correct the minimum time of a step to the time that an engine really takes.

    Attributes:
        attention: multiplies the minimum time of attention.
        products: multiplies the minimum time of all other operations.
        rest_s: seconds added for work around operations.
        nearest: name of the measured step with the largest weight.
        between_share: share of a step's time that passes between the previous step and this one.
    """

    attention: float
    products: float
    rest_s: float
    nearest: str
    between_share: float = 0.0


class Correction(Protocol):
    """Corrects the planned minimum times of steps by measured steps of an engine."""

    def factors(self, roofline: Roofline, batch: BatchShape) -> Factors:
        """Return the factors that correct the minimum time of a step of this shape."""

    def cell(self, batch: BatchShape) -> tuple[int, ...]:
        """Return a key for steps of similar shape, which get the same correction factors.

        Factors are computed once for each key and cached.
        """

    def cells(self, run: DecodeRun) -> list[tuple[int, ...]]:
        """Return the key `cell` of each decode step of a run."""

    def factors_in(self, roofline: Roofline, cell: tuple[int, ...]) -> Factors:
        """Return the correction factors for all steps of similar shape, given their key `cell`."""


class PlannedOpTime(Frozen):
    """Planned seconds, arithmetic and bytes of all operations with one label in a step."""

    seconds: float
    flops: float
    bytes: float
    bound: str  # "arithmetic" or "memory"


class OpWork(Frozen):
    """The arithmetic and memory traffic of several steps, as arrays.

    `flops` and `bytes` are (steps, kinds of operations), and `num_rows` is (steps,). Operations of
    equal label and work are one column.
    """

    flops: NDArray[np.float64]
    bytes: NDArray[np.float64]
    num_rows: NDArray[np.int64]


class PlannedStepTime(Frozen):
    """The planned time of a step, by operation.

    Attributes:
        ops: time and work by label of operations.
        moving_s: seconds of exchanges between devices.
        rest_s: measured seconds of work around operations.
        nearest: name of the measured step that corrected the times most; None without
            correction.
    """

    ops: dict[str, PlannedOpTime]
    moving_s: float
    rest_s: float = 0.0
    nearest: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the whole planned step."""
        return self.attention_s + self.products_s + self.moving_s + self.rest_s

    @property
    def attention_s(self) -> float:
        """Seconds of attention in the planned step."""
        return sum(op.seconds for label, op in self.ops.items() if is_attention(label))

    @property
    def products_s(self) -> float:
        """Seconds of all operations except attention in the planned step."""
        return sum(op.seconds for label, op in self.ops.items() if not is_attention(label))

    @property
    def flops(self) -> float:
        """Floating-point operations of the step on all devices."""
        return sum(op.flops for op in self.ops.values())

    @property
    def bytes(self) -> float:
        """Bytes that all devices read and write in their memories during the step."""
        return sum(op.bytes for op in self.ops.values())

    @property
    def bottleneck(self) -> str:
        """The label of the step's slowest operation, and its limit; "links" for exchanges."""
        label, op = max(self.ops.items(), key=lambda item: item[1].seconds)
        if self.moving_s > op.seconds:
            return "links"
        return f"{label}: {op.bound}"


class Totals(NamedTuple):
    """The planned seconds, arithmetic operations and bytes of a whole step.

    `between_s` is the part of `seconds` that passes before the step, after the previous one.
    """

    seconds: float
    flops: float
    bytes: float
    between_s: float = 0.0


class Roofline:
    """Computes the minimum times of a model's steps on the devices of a planning question.

    `peak` and `bandwidth` are the sums over all devices, times MFU and MBU. With a correction,
    minimum times are multiplied by measured factors. `measured` is the roofline for which the
    factors were measured: the model with its original weights on one device.
    """

    def __init__(
        self,
        model: PlannedModel,
        device: Device,
        question: Question,
        correction: Correction | None = None,
    ) -> None:
        self._preferred_arithmetic, self._correction = model.arithmetic, correction
        self.measured = self
        if correction is not None:
            self.measured = Roofline(model.origin or model, device, Question())
        cache = FORMATS[question.kv_format]
        self._ops: Counter[_OpKind] = Counter(
            (op.label, tuple(op.work(model.weight_bytes, cache)), _kv_heads(op))
            for op in model.program.ops
        )
        self._costs = {key: StepCost(key[1]) for key in self._ops}
        self._context_ops, self._sampled_row_ops, self._row_ops = [], [], []
        for key, count in self._ops.items():
            label, work, num_kv_heads = key
            counted_cost = (count, self._costs[key], num_kv_heads)
            if is_attention(label):
                self._context_ops.append(counted_cost)
            elif any(term in (each_sampled_row, once_if_sampled) for term, _ in work):
                self._sampled_row_ops.append(counted_cost)
            else:
                self._row_ops.append(counted_cost)
        self.num_layers = len(model.program.layer_outputs)
        self._exchanged_bytes_per_row = (
            2 * self.num_layers * model.hidden_size * _EXCHANGED_VALUE_BYTES
        )
        self._set_device(device, question)

    def on_devices(self, device: Device, question: Question) -> Roofline:
        """Return the roofline of the same model and number formats on other devices."""
        other = copy(self)
        other._set_device(device, question)  # noqa: SLF001 - a copy of this one
        return other

    def _set_device(self, device: Device, question: Question) -> None:
        self.arithmetic = device.arithmetic(self._preferred_arithmetic)
        self.peak = device.peaks[self.arithmetic] * question.count * question.mfu
        self.bandwidth = device.bandwidth * question.count * question.mbu
        self.link, self._num_devices = device.link, question.count
        self._kv_copies = np.array([kv_copies(key[2], self._num_devices) for key in self._ops])
        self._row_totals: dict[int, Totals] = {}
        self._sampled_row_totals: dict[tuple[int, int], Totals] = {}  # by rows, sampled rows
        self._factors: dict[tuple[int, ...], tuple[float, float, float, float]] = {}

    def step(self, batch: BatchShape) -> PlannedStepTime:
        """Return the planned time of a step; measured factors correct it if there are any."""
        min_step = self.min_step(batch)
        if self._correction is None:
            return min_step
        factors = self._correction.factors(self.measured, batch)
        ops = {
            label: replace(
                op,
                seconds=op.seconds
                * (factors.attention if is_attention(label) else factors.products),
            )
            for label, op in min_step.ops.items()
        }
        return PlannedStepTime(
            ops, min_step.moving_s, rest_s=factors.rest_s, nearest=factors.nearest
        )

    def work(self, batches: Sequence[BatchShape]) -> OpWork:
        """Return the arithmetic and memory traffic of several steps of the model.

        A step does the same work on any devices, except that several devices may store the same
        keys and values.
        """
        costs = [
            [self._costs[key].flops_and_bytes(batch) for key in self._ops] for batch in batches
        ]
        counts = np.array(list(self._ops.values()), dtype=float)
        flops, num_bytes = np.moveaxis(np.array(costs, dtype=float), -1, 0)
        num_rows = np.array([batch.num_rows for batch in batches])
        return OpWork(counts * flops, counts * num_bytes, num_rows)

    def min_step(self, batch: BatchShape) -> PlannedStepTime:
        """Return the minimum time of a step on the devices, without correction."""
        work = self.work([batch])
        ops: dict[str, PlannedOpTime] = {}
        all_bytes = work.bytes[0] * self._kv_copies
        columns = (
            work.flops[0],
            all_bytes,
            work.flops[0] / self.peak,
            all_bytes / self.bandwidth,
        )
        for (label, *_), *values in zip(self._ops, *map(np.ndarray.tolist, columns), strict=True):
            flops, num_bytes, computing_s, reading_s = values
            bound = "arithmetic" if computing_s > reading_s else "memory"
            seconds = max(computing_s, reading_s)
            sums = ops.get(label, PlannedOpTime(0.0, 0, 0, bound))
            ops[label] = PlannedOpTime(
                sums.seconds + seconds,
                sums.flops + flops,
                bytes=sums.bytes + num_bytes,
                bound=bound if seconds > sums.seconds else sums.bound,
            )
        return PlannedStepTime(ops, self._moving_s(batch.num_rows))

    def min_seconds(self, work: OpWork) -> NDArray[np.float64]:
        """Return only the minimum seconds of each step: (steps,).

        This is faster than `min_step`.
        """
        num_bytes = work.bytes * self._kv_copies
        times_s = np.maximum(work.flops / self.peak, num_bytes / self.bandwidth)
        return np.asarray(times_s.sum(axis=1) + self._moving_s(work.num_rows))

    def totals(self, batch: BatchShape) -> Totals:
        """Return the planned seconds, arithmetic and bytes of a step, quickly for many steps.

        Work that depends only on numbers of rows is computed once and cached. Corrections are the
        same for all steps with the same `Correction.cell`. For a `DecodeRun`, totals are arrays:
        (steps,).
        """
        num_rows, num_sampled = batch.num_rows, batch.num_sampled
        rows = self._row_totals.get(num_rows)
        sampled_rows = self._sampled_row_totals.get((num_rows, num_sampled))
        if rows is None:
            rows = self._row_totals[num_rows] = self._sum(batch, self._row_ops)
        if sampled_rows is None:
            sampled_rows = self._sum(batch, self._sampled_row_ops)
            self._sampled_row_totals[num_rows, num_sampled] = sampled_rows
        products = Totals(*map(add, rows, sampled_rows))
        attention = self._sum(batch, self._context_ops)
        moving_s = self._moving_s(num_rows)
        flops = products.flops + attention.flops
        num_bytes = products.bytes + attention.bytes
        if self._correction is None:
            return Totals(products.seconds + attention.seconds + moving_s, flops, num_bytes)
        attention_factor, products_factor, rest_s, between_share = self._cell_factors(batch)
        seconds = products_factor * products.seconds + attention_factor * attention.seconds
        seconds += moving_s + rest_s
        return Totals(seconds, flops, num_bytes, between_s=between_share * seconds)

    def _cell_factors(self, batch: BatchShape) -> Any:
        """Return (attention factor, products factor, `rest_s`, `between_share`) of `Factors`.

        For a `DecodeRun`, each is an array: (steps,).
        """
        assert self._correction is not None
        if not isinstance(batch, DecodeRun):
            return self._factors_in(self._correction.cell(batch))
        cells = self._correction.cells(batch)
        if cells[0] == cells[-1]:  # contexts grow, so all steps between are in the cell
            return self._factors_in(cells[0])
        return np.array([self._factors_in(cell) for cell in cells]).T

    def _factors_in(self, cell: tuple[int, ...]) -> tuple[float, float, float, float]:
        values = self._factors.get(cell)
        if values is None:
            assert self._correction is not None
            factors = self._correction.factors_in(self.measured, cell)
            values = (factors.attention, factors.products, factors.rest_s, factors.between_share)
            self._factors[cell] = values
        return values

    def _sum(self, batch: BatchShape, costs: Iterable[tuple[int, StepCost, int | None]]) -> Totals:
        seconds = flops = num_bytes = 0.0
        for count, cost, num_kv_heads in costs:
            op_flops, op_bytes = cost.flops_and_bytes(batch)
            op_bytes = op_bytes * kv_copies(num_kv_heads, self._num_devices)
            maximum = np.maximum if isinstance(op_flops, np.ndarray) else max
            seconds += count * maximum(op_flops / self.peak, op_bytes / self.bandwidth)
            flops += count * op_flops
            num_bytes += count * op_bytes
        return Totals(seconds, flops, num_bytes)

    def _moving_s(self, num_rows: Any) -> Any:
        """Return the seconds of two ring all-reduces per layer between the devices.

        The result is 0 if the speed of the link is unknown.
        """
        count = self._num_devices
        if count == 1 or self.link is None:
            return 0.0
        return num_rows * self._exchanged_bytes_per_row * 2 * (count - 1) / count / self.link


def kv_bytes(model: PlannedModel, question: Question, num_tokens: int) -> float:
    """Return the bytes of one request's keys and values, summed over all devices.

    If there are more devices than KV heads, several devices store the same head.
    """
    layers = Counter(model.program.cache_layers)
    return kv_layer_bytes(layers, FORMATS[question.kv_format], question.count, num_tokens)


def request_bytes(model: PlannedModel, question: Question, num_tokens: int) -> float:
    """Return the bytes of one request's keys and values and recurrent states, over all devices.

    The engine keeps two copies of the states: a step reads one and writes the other.
    """
    return kv_bytes(model, question, num_tokens) + STATE_COPIES * model.program.state_bytes


def kv_layer_bytes(
    layers: Counter[CacheLayer], stored: CacheFormat, count: int, num_tokens: int
) -> float:
    """Return the bytes of one request's keys and values in all layers, on `count` devices.

    `layers` counts the layers of each kind of KV cache. `stored` is the number format.
    """
    total = 0.0
    for layer, num_layers in layers.items():
        num_cached = num_tokens if layer.window is None else min(num_tokens, layer.window)
        num_copies = kv_copies(layer.num_kv_heads, count)
        total += num_layers * num_cached * layer.bytes_per_token(stored) * num_copies
    return total


def kv_copies(num_kv_heads: int | None, count: int) -> float:
    """Return how many devices on average store, and read, the same key or value.

    Each of the `count` devices stores whole heads, so that heads are copied if there are more
    devices than heads. `num_kv_heads` is None for operations without heads: then the result is 1.
    """
    if num_kv_heads is None:
        return 1.0
    return max(1.0, ceil(num_kv_heads / count) * count / num_kv_heads)


def _kv_heads(op: Op) -> int | None:
    """Return the number of KV heads of an attention operation; None for other operations.

    It is 1 if keys and values are stored as latent vectors (DeepSeek).
    """
    return getattr(op, "num_kv_heads", 1) if is_attention(op.label) else None
