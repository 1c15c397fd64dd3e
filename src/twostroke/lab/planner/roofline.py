"""The least time of a step: each operation is bound by arithmetic or by memory."""

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

    # A label, the terms of its work, and key-value heads: operations alike are counted once.
    _Kind: TypeAlias = tuple[str, tuple[tuple[Count, Cost], ...], int | None]

_VALUE_BYTES: Final = 2  # of a value that devices exchange


def is_attention(label: str) -> bool:
    """Tell attention, with or without a window, from products: all other operations."""
    return label.startswith("attention")


class Factors(Frozen):
    """What the least times of a step are multiplied by, and the seconds that are added."""

    attention: float
    products: float
    rest_s: float
    nearest: str  # the name of the measured step that counts most
    between: float = 0.0  # the share of the time that lies between two steps


class Correction(Protocol):
    """Knows how far steps are from their least times."""

    def factors(self, roofline: Roofline, batch: BatchShape) -> Factors:
        """Return how a step of this shape is corrected."""

    def cell(self, batch: BatchShape) -> tuple[int, ...]:
        """Return the same for shapes that are corrected almost alike."""

    def factors_in(self, roofline: Roofline, cell: tuple[int, ...]) -> Factors:
        """Return how the steps of a cell are corrected."""


class PlannedOpTime(Frozen):
    """What operations of one label take in a step: seconds, operations, bytes."""

    seconds: float
    flops: float
    bytes: float
    bound: str  # "arithmetic" or "memory"


class OpWork(Frozen):
    """What steps have to do, by kind of operation; all operations of a kind count together.

    `flops` and `bytes`: (steps, kinds); `num_rows`: (steps,).
    """

    flops: NDArray[np.float64]
    bytes: NDArray[np.float64]
    num_rows: NDArray[np.int64]


class PlannedStepTime(Frozen):
    """The time of a step, by label of its operations.

    `moving_s` is between devices, `rest_s` what is around operations, as far as it was measured.
    """

    ops: dict[str, PlannedOpTime]
    moving_s: float
    rest_s: float = 0.0
    nearest: str | None = None  # the measured step by which it was corrected most

    @property
    def seconds(self) -> float:
        """The whole time."""
        return self.attention_s + self.products_s + self.moving_s + self.rest_s

    @property
    def attention_s(self) -> float:
        """The time of attention."""
        return sum(op.seconds for label, op in self.ops.items() if is_attention(label))

    @property
    def products_s(self) -> float:
        """The time of all other operations."""
        return sum(op.seconds for label, op in self.ops.items() if not is_attention(label))

    @property
    def flops(self) -> float:
        """Floating-point operations of all devices."""
        return sum(op.flops for op in self.ops.values())

    @property
    def bytes(self) -> float:
        """Bytes that the memories of all devices move."""
        return sum(op.bytes for op in self.ops.values())

    @property
    def bottleneck(self) -> str:
        """The label of what takes longest, and what bounds it."""
        label, op = max(self.ops.items(), key=lambda item: item[1].seconds)
        if self.moving_s > op.seconds:
            return "links"
        return f"{label}: {op.bound}"


class Totals(NamedTuple):
    """A step's time, operations and bytes; `between_s` of the time is after the step before it."""

    seconds: float
    flops: float
    bytes: float
    between_s: float = 0.0


class Roofline:
    """Least times of a model's steps on a question's devices.

    `peak` and `bandwidth` are those of all devices together, as far as an engine reaches them.
    With a correction, steps take as many times their least time as was measured of steps like them:
    those of `measured`, the model with its own weights on one device.
    """

    def __init__(
        self,
        model: PlannedModel,
        device: Device,
        question: Question,
        correction: Correction | None = None,
    ) -> None:
        self._stored_for, self._correction = model.arithmetic, correction
        self.measured = self
        if correction is not None:
            self.measured = Roofline(model.origin or model, device, Question())
        cache = FORMATS[question.kv_format]
        self._ops: Counter[_Kind] = Counter(
            (op.label, tuple(op.work(model.weight_bytes, cache)), _kv_heads(op))
            for op in model.program.ops
        )
        self._costs = {key: StepCost(key[1]) for key in self._ops}
        self._by_context, self._by_samples, self._by_rows = [], [], []
        for key, times in self._ops.items():
            one = (times, self._costs[key], key[2])
            if is_attention(key[0]):
                self._by_context.append(one)
            elif any(count in (each_sampled_row, once_if_sampled) for count, _ in key[1]):
                self._by_samples.append(one)
            else:
                self._by_rows.append(one)
        self.num_layers = len(model.program.layer_outputs)
        self._exchanged = 2 * self.num_layers * model.hidden_size * _VALUE_BYTES
        self._place(device, question)

    def on(self, device: Device, question: Question) -> Roofline:
        """Return that of the same model on other devices; formats stay those of this one."""
        other = copy(self)
        other._place(device, question)  # noqa: SLF001 - a copy of this one
        return other

    def _place(self, device: Device, question: Question) -> None:
        self.arithmetic = device.arithmetic(self._stored_for)
        self.peak = device.peaks[self.arithmetic] * question.count * question.mfu
        self.bandwidth = device.bandwidth * question.count * question.mbu
        self.link, self._count = device.link, question.count
        self._copies = np.array([copies(key[2], self._count) for key in self._ops])
        self._of_rows: dict[int, Totals] = {}
        self._of_samples: dict[tuple[int, int], Totals] = {}  # by rows, and those with logits
        self._factors: dict[tuple[int, ...], Factors] = {}

    def step(self, batch: BatchShape) -> PlannedStepTime:
        """Return the time of a step."""
        least = self.least(batch)
        if self._correction is None:
            return least
        factors = self._correction.factors(self.measured, batch)
        ops = {
            label: replace(
                op,
                seconds=op.seconds
                * (factors.attention if is_attention(label) else factors.products),
            )
            for label, op in least.ops.items()
        }
        return PlannedStepTime(ops, least.moving_s, factors.rest_s, factors.nearest)

    def work(self, batches: Sequence[BatchShape]) -> OpWork:
        """Return what steps have to do, which is the same on all devices, copies left out."""
        costs = [[self._costs[key].flops_and_bytes(one) for key in self._ops] for one in batches]
        times = np.array(list(self._ops.values()), dtype=float)
        flops, moved = np.moveaxis(np.array(costs, dtype=float), -1, 0)
        return OpWork(times * flops, times * moved, np.array([one.num_rows for one in batches]))

    def least(self, batch: BatchShape) -> PlannedStepTime:
        """Return the least time of a step."""
        work = self.work([batch])
        found: dict[str, PlannedOpTime] = {}
        moved = work.bytes[0] * self._copies
        columns = (work.flops[0], moved, work.flops[0] / self.peak, moved / self.bandwidth)
        for (label, *_), *values in zip(self._ops, *map(np.ndarray.tolist, columns), strict=True):
            flops, read, computing_s, reading_s = values
            bound = "arithmetic" if computing_s > reading_s else "memory"
            seconds = max(computing_s, reading_s)
            before = found.get(label, PlannedOpTime(0.0, 0, 0, bound))
            found[label] = PlannedOpTime(
                before.seconds + seconds,
                before.flops + flops,
                before.bytes + read,
                bound if seconds > before.seconds else before.bound,
            )
        return PlannedStepTime(found, self._moving_s(batch.num_rows))

    def least_s(self, work: OpWork) -> NDArray[np.float64]:
        """Return the least seconds of each step, for searches that need nothing else: (steps,)."""
        moved = work.bytes * self._copies
        times_s = np.maximum(work.flops / self.peak, moved / self.bandwidth)
        return np.asarray(times_s.sum(axis=1) + self._moving_s(work.num_rows))

    def totals(self, batch: BatchShape) -> Totals:
        """Return what `step` does in all; quick for many steps.

        Products depend on numbers of rows alone, so they are counted once for each. Corrections
        are those of cells. Totals of a `DecodeRun` are arrays, with an element for each step.
        """
        if self._correction is not None and isinstance(batch, DecodeRun):
            steps = [self.totals(batch.at(step)) for step in range(batch.num_steps)]
            return Totals(*np.array(steps).T)
        num_rows, num_sampled = batch.num_rows, batch.num_sampled
        rows, samples = self._of_rows.get(num_rows), self._of_samples.get((num_rows, num_sampled))
        if rows is None:
            rows = self._of_rows[num_rows] = self._sum(batch, self._by_rows)
        if samples is None:
            samples = self._sum(batch, self._by_samples)
            self._of_samples[num_rows, num_sampled] = samples
        products = Totals(*map(add, rows, samples))
        attention, moving_s = self._sum(batch, self._by_context), self._moving_s(num_rows)
        flops, moved = products.flops + attention.flops, products.bytes + attention.bytes
        if self._correction is None:
            return Totals(products.seconds + attention.seconds + moving_s, flops, moved)
        cell = self._correction.cell(batch)
        factors = self._factors.get(cell)
        if factors is None:
            factors = self._factors[cell] = self._correction.factors_in(self.measured, cell)
        seconds = factors.products * products.seconds + factors.attention * attention.seconds
        seconds += moving_s + factors.rest_s
        return Totals(seconds, flops, moved, factors.between * seconds)

    def _sum(self, batch: BatchShape, costs: Iterable[tuple[int, StepCost, int | None]]) -> Totals:
        seconds = flops = moved = 0.0
        for times, cost, kv_heads in costs:
            its_flops, its_bytes = cost.flops_and_bytes(batch)
            its_bytes = its_bytes * copies(kv_heads, self._count)
            longer = np.maximum if isinstance(its_flops, np.ndarray) else max
            seconds += times * longer(its_flops / self.peak, its_bytes / self.bandwidth)
            flops, moved = flops + times * its_flops, moved + times * its_bytes
        return Totals(seconds, flops, moved)

    def _moving_s(self, num_rows: Any) -> Any:
        """Return the time of two all-reduces in each layer, in a ring."""
        if self._count == 1 or self.link is None:
            return 0.0
        return num_rows * self._exchanged * 2 * (self._count - 1) / self._count / self.link


def kv_bytes(model: PlannedModel, question: Question, num_tokens: int) -> float:
    """Return the bytes of one request's keys and values on all devices together.

    Where devices are more than key-value heads, several store the same head.
    """
    layers = Counter(model.program.cache_layers)
    return layers_bytes(layers, FORMATS[question.kv_format], question.count, num_tokens)


def layers_bytes(
    layers: Counter[CacheLayer], stored: CacheFormat, count: int, num_tokens: int
) -> float:
    """Return the same on `count` devices; `layers` has how many there are of each kind."""
    total = 0.0
    for layer, times in layers.items():
        tokens = num_tokens if layer.window is None else min(num_tokens, layer.window)
        each = copies(layer.num_kv_heads, count)
        total += times * tokens * layer.bytes_per_token(stored) * each
    return total


def copies(num_kv_heads: int | None, count: int) -> float:
    """Return how often keys and values are stored, and read, on `count` devices.

    Each device has whole heads. None is for what has no heads.
    """
    if num_kv_heads is None:
        return 1.0
    return max(1.0, ceil(num_kv_heads / count) * count / num_kv_heads)


def _kv_heads(op: Op) -> int | None:
    """Return the key-value heads of attention; latent vectors count as one."""
    return getattr(op, "num_kv_heads", 1) if is_attention(op.label) else None
