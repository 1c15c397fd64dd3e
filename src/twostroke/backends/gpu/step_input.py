"""The input of a step on the device: one int32 array, which is sent in one copy."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from twostroke.backends.gpu.tiles import MAX_PIECES, Items, divide
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.tiles import Tiling
    from twostroke.backends.step_frame import StepFrame

    Ints = NDArray[np.int32]

LOGIT_ROWS: Final = 64  # rows of a chunk of logits
STEPS_AHEAD: Final = 1  # steps that may be in flight when another one is started

# Indices in the header, which has the number of rows, then (offset, count) of each list.
CHANGES: Final = 4
COPIES: Final = 6
_TILINGS: Final = 8
_LINE: Final = 4  # arrays begin at multiples of 4 numbers, so that pointers are aligned
MAX_CHANGES: Final = 4096  # changes of page tables in the input of a step


def input_ints(num_tilings: int, max_rows: int, max_slots: int) -> int:
    """Return the largest size of a step's input of `max_rows` rows, in int32 numbers."""
    chunks, header = -(-max_rows // LOGIT_ROWS), _up(_TILINGS + 6 * num_tilings)
    arrays = header + (_LINE + LOGIT_ROWS) * chunks + 3 * _up(max_rows) + _up(max_rows + 1)
    items = num_tilings * max_rows * (MAX_PIECES * 8 + 8 + 4)
    headers = num_tilings * header * (2 + 2 * max_rows * MAX_PIECES // max_slots)
    return arrays + 2 * MAX_CHANGES + 8 * max_rows + items + headers


class StepArrayOffsets(Frozen):
    """The offsets of a step's arrays in its input, for a step padded to `num_rows` rows."""

    num_rows: int
    tokens: int
    positions: int
    tables: int
    first_extra: int
    rest: int


class StepInput:
    """The input of a step as one int32 array, in pinned host memory and in GPU memory.

    A row whose token is drawn by the previous step has a negative token (`pointwise.take_rows`).
    """

    def __init__(self, gpu: Gpu, tilings: Sequence[Tiling], max_rows: int, max_slots: int) -> None:
        """Allocate memory for the input of any step of up to `max_rows` rows.

        If the pieces of a step take more than `max_slots` slots, attention is computed in several
        passes, each with a separate header in `headers`.
        """
        self._tilings, self._max_slots = tuple(tilings), max_slots
        self._max_chunks = -(-max_rows // LOGIT_ROWS)
        self._chunks = _up(_TILINGS + 6 * len(self._tilings))  # one number in each line
        self._sampled = self._chunks + _LINE * self._max_chunks
        self._arrays = self._sampled + LOGIT_ROWS * self._max_chunks
        size = input_ints(len(tilings), max_rows, max_slots)
        is_gpu = gpu.device.type == "cuda"
        # The first is the next step's. The input of a step in flight may not have been sent yet.
        self._hosts = deque(
            torch.zeros(size, dtype=torch.int32, pin_memory=is_gpu) for _ in range(1 + STEPS_AHEAD)
        )
        self.device = torch.zeros(size, dtype=torch.int32, device=gpu.device)
        self.headers: list[list[Tensor]] = [[self.device] for _ in tilings]

    @property
    def has_passes(self) -> bool:
        """Return whether the step's attention needs several passes; CUDA graphs have only one."""
        return any(len(headers) > 1 for headers in self.headers)

    def array_offsets(self, num_rows: int) -> StepArrayOffsets:
        """Return the offsets of the input's arrays, for a step padded to `num_rows` rows."""
        starts = [self._arrays]
        for count in (num_rows, num_rows, num_rows, num_rows + 1):
            starts.append(starts[-1] + _up(count))
        tokens, positions, tables, first_extra, rest = starts
        return StepArrayOffsets(
            num_rows,
            tokens=tokens,
            positions=positions,
            tables=tables,
            first_extra=first_extra,
            rest=rest,
        )

    def items_at(self, tiling: int) -> tuple[int, int, int]:
        """Return the header indices of three lists of a tiling's attention work.

        They are the items of tiles with few rows, the items of tiles with many rows, and the
        merges.
        """
        first = _TILINGS + 6 * tiling
        return first, first + 2, first + 4

    def fill(self, frame: StepFrame, changes: Ints, num_rows: int) -> None:
        """Write a step, padded to `num_rows` rows, and copy it to the GPU."""
        numbers, array_offsets = self._numbers, self.array_offsets(num_rows)
        count, slices = len(frame.tokens), frame.slices
        numbers[: self._arrays] = 0
        numbers[0] = count
        sampled = len(frame.sampled_rows)
        in_chunks = np.clip(sampled - LOGIT_ROWS * np.arange(self._max_chunks), 0, LOGIT_ROWS)
        numbers[self._chunks : self._sampled : _LINE] = in_chunks
        numbers[self._sampled :][:sampled] = frame.sampled_rows
        numbers[array_offsets.tokens :][:count] = frame.tokens
        lengths = slices[:, 1]
        numbers[array_offsets.positions :][:count] = np.arange(count) + np.repeat(
            slices[:, 2] - slices[:, 0], lengths
        )
        numbers[array_offsets.tables :][:count] = np.repeat(slices[:, 3], lengths)
        self._end = array_offsets.rest
        extra = self._append(frame.stores[:, 1] if len(frame.stores) else frame.copies[:0])
        stored = np.bincount(frame.stores[:, 0], minlength=count) if len(frame.stores) else 0
        first_extra = numbers[array_offsets.first_extra :][: count + 1]
        first_extra[:] = extra
        first_extra[1:] += np.cumsum(stored, dtype=np.int32) if len(frame.stores) else 0
        numbers[CHANGES : CHANGES + 2] = self._append(changes), len(changes)
        numbers[COPIES : COPIES + 2] = self._append(frame.copies), len(frame.copies)
        for number, tiling in enumerate(self._tilings):
            starts: list[int] = []
            for items in divide(slices, tiling, self._max_slots):
                starts.append(self._append(np.zeros(self._chunks, np.int32)) if starts else 0)
                for header_index, item_list in zip(
                    self.items_at(number), _lists(items), strict=True
                ):
                    index = starts[-1] + header_index
                    numbers[index : index + 2] = self._append(item_list), len(item_list)
            self.headers[number] = [self.device[start:] for start in starts]
        self._send()

    def clear(self) -> None:
        """Send a step without rows to the GPU; kernels that are launched with it do nothing."""
        self._numbers[:] = 0
        self._end = len(self._numbers)
        self._send()

    def _append(self, numbers_to_add: Ints) -> int:
        """Append numbers to the step's input; return their offset."""
        start = self._end
        self._numbers[start : start + numbers_to_add.size] = numbers_to_add.reshape(-1)
        self._end = start + _up(numbers_to_add.size)
        return start

    @property
    def _numbers(self) -> Ints:
        numbers: Ints = self._hosts[0].numpy()
        return numbers

    def _send(self) -> None:
        self.device[: self._end].copy_(self._hosts[0][: self._end], non_blocking=True)
        self._hosts.rotate()

    def logit_rows(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return (the number of rows, the indices of the rows) of a chunk of logits, on the GPU."""
        count = self.view(self._chunks + _LINE * chunk, _LINE)
        return count, self.view(self._sampled + LOGIT_ROWS * chunk, LOGIT_ROWS)

    def view(self, start: int, count: int) -> Tensor:
        """Return a view of `count` numbers of the step's input in GPU memory."""
        return self.device[start : start + count]


def _lists(items: Items) -> tuple[Ints, Ints, Ints]:
    return items.small, items.large, items.merges


def _up(count: int) -> int:
    return -(-count // _LINE) * _LINE
