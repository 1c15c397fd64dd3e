"""A step's input on the device: one array of int32 numbers, sent in one copy."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from twostroke.backends.gpu.tiles import MOST_PIECES, Items, divide
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.tiles import Tiling
    from twostroke.backends.step_frame import StepFrame

    Ints = NDArray[np.int32]

LOGIT_ROWS: Final = 64  # rows that get logits at once
STEPS_AHEAD: Final = 1  # that may be in flight when another one is started

# Places in the header: the number of rows, then (offset, count) of each list.
CHANGES: Final = 4
COPIES: Final = 6
_TILINGS: Final = 8
_LINE: Final = 4  # numbers; arrays begin at multiples, so that pointers are aligned
MOST_CHANGES: Final = 4096  # of page tables, in one step's input


def input_ints(num_tilings: int, max_rows: int, most_slots: int) -> int:
    """Return how many numbers the input of any step of `max_rows` rows has at most."""
    chunks, header = -(-max_rows // LOGIT_ROWS), _up(_TILINGS + 6 * num_tilings)
    arrays = header + (_LINE + LOGIT_ROWS) * chunks + 3 * _up(max_rows) + _up(max_rows + 1)
    items = num_tilings * max_rows * (MOST_PIECES * 8 + 8 + 4)
    headers = num_tilings * header * (2 + 2 * max_rows * MOST_PIECES // most_slots)
    return arrays + 2 * MOST_CHANGES + 8 * max_rows + items + headers


class StepArrayOffsets(Frozen):
    """Where the arrays of a step begin whose bucket has `num_rows` rows."""

    num_rows: int
    tokens: int
    positions: int
    tables: int
    first_extra: int
    rest: int


class StepInput:
    """The input of a step: here, in pinned memory, and on the device.

    Rows whose token is not known have a negative one (`pointwise.take_rows`).
    """

    def __init__(self, gpu: Gpu, tilings: Sequence[Tiling], max_rows: int, most_slots: int) -> None:
        """Make room for any step of `max_rows` rows.

        Attention of steps whose pieces take more than `most_slots` is done in several passes, each
        with `headers` of its own.
        """
        self._tilings, self._most_slots = tuple(tilings), most_slots
        self._max_chunks = -(-max_rows // LOGIT_ROWS)
        self._chunks = _up(_TILINGS + 6 * len(self._tilings))  # one number in a line
        self._sampled = self._chunks + _LINE * self._max_chunks
        self._arrays = self._sampled + LOGIT_ROWS * self._max_chunks
        size = input_ints(len(tilings), max_rows, most_slots)
        is_gpu = gpu.device.type == "cuda"
        self._hosts = deque(  # the next step's first; that of a step in flight may not be sent yet
            torch.zeros(size, dtype=torch.int32, pin_memory=is_gpu) for _ in range(1 + STEPS_AHEAD)
        )
        self.device = torch.zeros(size, dtype=torch.int32, device=gpu.device)
        self.headers: list[list[Tensor]] = [[self.device] for _ in tilings]

    @property
    def has_passes(self) -> bool:
        """Whether attention is done in several passes, for which there is no graph."""
        return any(len(headers) > 1 for headers in self.headers)

    def places(self, num_rows: int) -> StepArrayOffsets:
        """Return where the arrays of a bucket of rows begin."""
        starts = [self._arrays]
        for count in (num_rows, num_rows, num_rows, num_rows + 1):
            starts.append(starts[-1] + _up(count))
        return StepArrayOffsets(num_rows, *starts)

    def items_at(self, tiling: int) -> tuple[int, int, int]:
        """Return the places in the header of a tiling's items of few rows, of many, and merges."""
        at = _TILINGS + 6 * tiling
        return at, at + 2, at + 4

    def fill(self, frame: StepFrame, changes: Ints, num_rows: int) -> None:
        """Write a step into a bucket of `num_rows` rows, and send it."""
        numbers, places = self._numbers, self.places(num_rows)
        count, slices = len(frame.tokens), frame.slices
        numbers[: self._arrays] = 0
        numbers[0] = count
        sampled = len(frame.sampled_rows)
        in_chunks = np.clip(sampled - LOGIT_ROWS * np.arange(self._max_chunks), 0, LOGIT_ROWS)
        numbers[self._chunks : self._sampled : _LINE] = in_chunks
        numbers[self._sampled :][:sampled] = frame.sampled_rows
        numbers[places.tokens :][:count] = frame.tokens
        lengths = slices[:, 1]
        numbers[places.positions :][:count] = np.arange(count) + np.repeat(
            slices[:, 2] - slices[:, 0], lengths
        )
        numbers[places.tables :][:count] = np.repeat(slices[:, 3], lengths)
        self._end = places.rest
        extra = self._append(frame.stores[:, 1] if len(frame.stores) else frame.copies[:0])
        stored = np.bincount(frame.stores[:, 0], minlength=count) if len(frame.stores) else 0
        first_extra = numbers[places.first_extra :][: count + 1]
        first_extra[:] = extra
        first_extra[1:] += np.cumsum(stored, dtype=np.int32) if len(frame.stores) else 0
        numbers[CHANGES : CHANGES + 2] = self._append(changes), len(changes)
        numbers[COPIES : COPIES + 2] = self._append(frame.copies), len(frame.copies)
        for number, tiling in enumerate(self._tilings):
            starts: list[int] = []
            for items in divide(slices, tiling, self._most_slots):
                starts.append(self._append(np.zeros(self._chunks, np.int32)) if starts else 0)
                for place, part in zip(self.items_at(number), _lists(items), strict=True):
                    at = starts[-1] + place
                    numbers[at : at + 2] = self._append(part), len(part)
            self.headers[number] = [self.device[start:] for start in starts]
        self._send()

    def clear(self) -> None:
        """Send a step without rows: kernels that are launched for it do nothing."""
        self._numbers[:] = 0
        self._end = len(self._numbers)
        self._send()

    def _append(self, part: Ints) -> int:
        """Write numbers after the others; return where."""
        start = self._end
        self._numbers[start : start + part.size] = part.reshape(-1)
        self._end = start + _up(part.size)
        return start

    @property
    def _numbers(self) -> Ints:
        numbers: Ints = self._hosts[0].numpy()
        return numbers

    def _send(self) -> None:
        self.device[: self._end].copy_(self._hosts[0][: self._end], non_blocking=True)
        self._hosts.rotate()

    def logit_rows(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return how many rows a chunk of logits has, and which."""
        count = self.view(self._chunks + _LINE * chunk, _LINE)
        return count, self.view(self._sampled + LOGIT_ROWS * chunk, LOGIT_ROWS)

    def view(self, start: int, count: int) -> Tensor:
        """Return an array on the device."""
        return self.device[start : start + count]


def _lists(items: Items) -> tuple[Ints, Ints, Ints]:
    return items.small, items.large, items.merges


def _up(count: int) -> int:
    return -(-count // _LINE) * _LINE
