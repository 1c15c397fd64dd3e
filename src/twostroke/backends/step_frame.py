"""`StepFrame`: the message with a step that rank 0 sends to the other ranks, and its encoding."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from twostroke.core.errors import BackendError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.request import NO_STATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int32]

_MAGIC: Final = 0x46535354  # "TSSF"
_VERSION: Final = 4
_HEADER: Final = 12  # numbers of 4 bytes
_MAX_TABLES: Final = 1 << 16
_MAX_TABLE_BYTES: Final = 1 << 31


class FrameError(BackendError):
    """A step from rank 0 has numbers that are out of bounds, so this rank cannot compute it."""


class FrameLostError(FrameError):
    """A step message could not be decoded, so its page table changes are lost, too."""


class FrameLimits(Frozen):
    """Upper bounds of a step's numbers, which rank 0 sends to all ranks when they start.

    `external_width`: values of each row of `StepFrame.external`; 0: steps have none. `num_states`:
    slots for recurrent states; 0 for models without such states.
    """

    vocab_size: int
    num_pages: int
    page_size: int
    max_rows: int
    num_groups: int
    table_stride: int
    external_width: int = 0
    num_states: int = 0


class StepFrame(Frozen):
    """A step that rank 0 sends to the other ranks: flat int32 arrays, and `external` in float32.

    - `slices`: (first row, number of rows, first position, page table) each; they cover the rows in
      order.
    - `num_generated`: how many of the first rows are computed as generated rows; the rest are
      computed as prompt rows.
    - `stores`: (row, page table); the row's keys and values are also stored in this table's pages.
    - `copies`: (source page, target page), done before the step.
    - `page_tables`: belongs to the reader, and changes with the next frame.
    - `states`: for models with recurrent states, (slot of the state before the first row, or
      `NO_STATE`; slot for the state after the last row) of each slice.
    - `row_states`: in such models, if the step has drafts: the slot for the state after each row,
      or `NO_STATE`. The last row of a slice always has a slot.
    """

    tokens: Ints  # (rows)
    slices: Ints  # (slices, 4)
    sampled_rows: Ints  # (rows with logits)
    only_best: Ints  # (rows with logits): 1 where only the largest logit matters, else 0
    stores: Ints  # (stores, 2)
    copies: Ints  # (copies, 2)
    page_tables: Ints  # (tables, groups, pages)
    num_generated: int
    external: NDArray[np.float32] | None = None  # (rows, width)
    states: Ints | None = None  # (slices, 2)
    row_states: Ints | None = None  # (rows)


def encode(frame: StepFrame, changes: Ints) -> bytes:
    """Return a step as the message that rank 0 sends to the other ranks.

    `changes`: page table entries that changed since the previous step, each (index in
    `page_tables.reshape(-1)`, page id).
    """
    external = frame.external
    width = 0 if external is None else external.shape[1]
    counts = [len(a) for a in (frame.slices, frame.sampled_rows, frame.stores, frame.copies)]
    header = [_MAGIC, _VERSION, len(frame.tokens), frame.num_generated, *counts, len(changes)]
    state_arrays = [a for a in (frame.states, frame.row_states) if a is not None]
    header += [len(frame.page_tables), width, len(state_arrays)]
    parts = [
        np.array(header, np.int32),
        frame.tokens,
        frame.slices.reshape(-1),
        frame.sampled_rows,
        frame.only_best,
        frame.stores.reshape(-1),
        frame.copies.reshape(-1),
        changes.reshape(-1),
    ]
    parts += [array.reshape(-1) for array in state_arrays]
    if external is not None:
        parts.append(np.ascontiguousarray(external).reshape(-1).view(np.int32))
    return np.concatenate(parts).tobytes()


class FrameReader:
    """Decodes and checks steps that rank 0 sends, and keeps a copy of rank 0's page tables."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._tables = np.zeros((0, limits.num_groups, limits.table_stride), np.int32)
        self._checked: _CheckedFrame | None = None

    def read(self, data: bytes | bytearray | memoryview) -> StepFrame:
        """Decode and check a step message.

        The arrays of the step are views of `data`, which must not change while the step is used.

        Raises:
            FrameLostError: `data` is not a step message; the page tables are wrong from now on.
            FrameError: the step names rows, tokens, tables or pages that do not exist.
        """
        if len(data) % 4 or len(data) < 4 * _HEADER:
            raise FrameLostError(
                f"A step message of {counted_noun(len(data), 'byte')} is incomplete."
            )
        numbers = np.frombuffer(data, "<i4")
        head: list[int] = numbers[:_HEADER].tolist()
        magic, version, num_rows, num_generated, *counts, num_tables, width, num_states = head
        if (magic, version) != (_MAGIC, _VERSION):
            raise FrameLostError(
                f"A step message has format version {version}; this rank reads {_VERSION}."
            )
        self._check_tables(min(num_rows, *counts), num_tables)
        num_slices, num_sampled, num_stores, num_copies, num_changes = counts
        shapes = [(num_rows,), (num_slices, 4), (num_sampled,), (num_sampled,)]
        shapes += [(num_stores, 2), (num_copies, 2)]
        fixed = sum(map(prod, shapes))
        changed = fixed + 2 * num_changes
        row_states = changed + (2 * num_slices if num_states else 0)
        expected = row_states + (num_rows if num_states > 1 else 0)
        if (
            num_states not in {0, 1, 2}
            or (width, num_states > 0)
            != (
                self._limits.external_width,
                self._limits.num_states > 0,
            )
            or numbers.size != _HEADER + expected + width * num_rows
        ):
            raise FrameLostError(
                f"A step of {counted_noun(len(data), 'byte')} is not of the size that it states."
            )
        body = numbers[_HEADER:]
        # Applied even if the step is refused, because rank 0 sends each change only once.
        if num_changes:
            self._change(body[fixed:changed].reshape(-1, 2), num_tables)
        elif num_tables > len(self._tables):
            self._grow(num_tables)
        self._check_counts(num_rows, num_generated, counts, num_tables)
        external = body[expected:].view("<f4").reshape(num_rows, width) if width else None
        tokens, slices, sampled, best, stores, copies = _split(body, shapes)
        frame = StepFrame(
            tokens=tokens,
            slices=slices,
            sampled_rows=sampled,
            only_best=best,
            stores=stores,
            copies=copies,
            page_tables=self._tables,
            num_generated=num_generated,
            external=external,
            states=body[changed:row_states].reshape(-1, 2) if num_states else None,
            row_states=body[row_states:expected] if num_states > 1 else None,
        )
        self._check_states(frame)
        self._check(frame, body[:fixed], (num_generated, num_tables, *counts[:4]))
        return frame

    def _check(self, frame: StepFrame, body: Ints, head: tuple[int, ...]) -> None:
        """Raise FrameError if a step's numbers are out of bounds or out of order.

        Most steps differ from the previous step only in tokens and positions. Such a step is
        checked quickly, with the bounds that the previous check computed.
        """
        previous = self._checked
        if previous is not None and previous.head == head and previous.body.size == body.size:
            is_same_form = not ((body ^ previous.body) & previous.mask).any()
            if is_same_form and not (body.view(np.uint32) >= previous.bounds).any():
                return
        checked = _CheckedFrame.of(frame, body, head, self._limits)
        if (body.view(np.uint32) >= checked.bounds).any():
            raise FrameError("A step names a row, token, table or page that does not exist.")
        _check_order(frame)
        self._checked = checked

    def _check_states(self, frame: StepFrame) -> None:
        """Raise FrameError if a step reads or writes a recurrent state that does not exist."""
        if frame.states is None:
            return
        if frame.row_states is not None:
            lowest_slot, highest_slot = frame.row_states.min(), frame.row_states.max()
            last_rows = frame.slices[:, 0] + frame.slices[:, 1] - 1
            has_rows = last_rows.min() >= 0 and last_rows.max() < len(frame.row_states)
            if (
                not has_rows
                or frame.row_states[last_rows].min() < 0
                or lowest_slot < NO_STATE
                or highest_slot >= self._limits.num_states
            ):
                raise FrameError("A step names a recurrent state that does not exist.")
        lowest, highest = frame.states.min(axis=0), frame.states.max()
        if lowest[0] < NO_STATE or lowest[1] < 0 or highest >= self._limits.num_states:
            raise FrameError("A step names a recurrent state that does not exist.")

    def _check_tables(self, least_count: int, num_tables: int) -> None:
        """Raise FrameLostError if a step has a negative count, or too large page tables."""
        limits = self._limits
        table_bytes = 4 * num_tables * limits.num_groups * limits.table_stride
        fits = len(self._tables) <= num_tables <= _MAX_TABLES and table_bytes <= _MAX_TABLE_BYTES
        if least_count < 0 or not fits:
            raise FrameLostError(
                f"A step with {counted_noun(num_tables, 'page table')} cannot be read here."
            )

    def _check_counts(
        self, num_rows: int, num_generated: int, counts: Sequence[int], num_tables: int
    ) -> None:
        limits = self._limits
        num_slices, num_sampled, num_stores, num_copies, _ = counts
        fits = (
            0 < num_rows <= limits.max_rows
            and 0 <= num_generated <= num_rows
            and 0 < num_slices <= num_rows
            and 0 <= num_sampled <= num_rows
            and 0 <= num_stores <= num_rows * num_tables
            and 0 <= num_copies <= limits.num_pages
        )
        if not fits:
            numbers = (
                f"{counted_noun(num_rows, 'row')}, {counted_noun(num_slices, 'slice')}, "
                f"{counted_noun(num_tables, 'table')}"
            )
            raise FrameError(f"A step of {numbers} cannot be computed here.")

    def _change(self, changes: Ints, num_tables: int) -> None:
        """Apply a step's changes to this rank's copy of the page tables.

        `changes`: (index, page id) each; a page id may be `NO_PAGE`.
        """
        if num_tables > len(self._tables):
            self._grow(num_tables)
        indices, pages = changes[:, 0], changes[:, 1]
        in_tables = indices.min() >= 0 and indices.max() < self._tables.size
        if not in_tables or pages.min() < -1 or pages.max() >= self._limits.num_pages:
            raise FrameLostError("A step changes a page table entry or page that does not exist.")
        self._tables.reshape(-1)[indices] = pages

    def _grow(self, num_tables: int) -> None:
        grown = np.zeros((num_tables, *self._tables.shape[1:]), np.int32)
        grown[: len(self._tables)] = self._tables
        self._tables = grown


class _CheckedFrame(Frozen, eq=False):
    """A checked step, with bounds by which the next step of the same shape is checked quickly.

    `bounds`: exclusive upper bounds of the numbers of a step. `mask`: 0 for numbers that may differ
    (tokens, positions, tables), all ones for numbers that must be the same as in `body`.
    """

    head: tuple[int, ...]
    body: Ints
    mask: Ints
    bounds: NDArray[np.uint32]

    @classmethod
    def of(cls, frame: StepFrame, body: Ints, head: tuple[int, ...], limits: FrameLimits) -> Self:
        """Return a step with the bounds of its numbers; this method does not check the step."""
        num_rows, num_tables = len(frame.tokens), len(frame.page_tables)
        num_positions = limits.table_stride * limits.page_size
        ends = np.tile([num_rows, num_rows + 1, 0, num_tables], (len(frame.slices), 1))
        ends[:, 2] = np.maximum(0, num_positions + 1 - frame.slices[:, 1])
        pieces: list[Any] = [
            np.full(num_rows, limits.vocab_size),
            ends.reshape(-1),
            np.full(len(frame.sampled_rows), num_rows),
            np.full(len(frame.only_best), 2),
            np.tile([num_rows, num_tables], len(frame.stores)),
            np.full(frame.copies.size, limits.num_pages),
        ]
        mask = np.full(body.size, -1, np.int32)
        mask[:num_rows] = 0
        mask[num_rows : num_rows + frame.slices.size].reshape(-1, 4)[:, 2:] = 0
        return cls(head, body, mask, np.concatenate(pieces).astype(np.uint32))


def _split(body: Ints, shapes: Sequence[tuple[int, ...]]) -> list[Ints]:
    """Return views of the arrays that a step message's body holds one after another.

    `shapes`: the shape of each array.
    """
    parts, start = [], 0
    for shape in shapes:
        end = start + prod(shape)
        part = body[start:end]
        parts.append(part if len(shape) == 1 else part.reshape(shape))
        start = end
    return parts


def _check_order(frame: StepFrame) -> None:
    """Raise FrameError if a step's slices do not cover its rows, or if its lists are not sorted."""
    firsts, counts = frame.slices[:, 0], frame.slices[:, 1]
    ends = firsts + counts
    is_covered = (
        firsts[0] == 0
        and ends[-1] == len(frame.tokens)
        and (firsts[1:] == ends[:-1]).all()
        and counts.min() > 0
        and frame.num_generated in {0, len(frame.tokens), *ends.tolist()}
    )
    if not is_covered:
        raise FrameError("The slices of a step do not cover its rows.")
    sampled = frame.sampled_rows
    if (sampled[1:] <= sampled[:-1]).any():
        raise FrameError("The rows with logits are not in order.")
    if len(frame.stores) and (np.diff(frame.stores[:, 0]) < 0).any():
        raise FrameError("The stored rows of a step are not in order.")
    pages = frame.copies.reshape(-1)
    targets = frame.copies[:, 1]
    if len(pages) and len(np.unique(pages)) != len(np.unique(frame.copies[:, 0])) + len(targets):
        raise FrameError("A page of a step is copied to twice.")
