"""Page tables in the native executor's format, updated from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.draft_tree import DraftBranch
    from twostroke.core.request import Request

_NEW = -1  # the `num_moves` of a request that has no row yet


class PageTables:
    """Page tables of all requests for native kernels, an array (rows, groups, pages) of page ids.

    The ids of row r and group g start at `address + 4 * (r * num_groups + g) * stride`. Only new
    pages of a request are copied to its row. The scheduler appends pages, and clears entries before
    a window. If it replaces pages, it increments the request's `num_moves`; then all entries are
    copied. An entry that is completely before the window of a slice's first row must not be read:
    it may be `NO_PAGE`, or a page that now belongs to another request.
    """

    def __init__(self, num_groups: int, page_size: int, max_pages: int) -> None:
        self.stride = max_pages
        self._max_rows: int | None = None
        self._page_size = page_size
        self.array = np.zeros((0, num_groups, max_pages), np.int32)
        self.address = 0  # of the array
        self._entries: dict[Request, tuple[int, int]] = {}  # row, `num_moves` at the last copy
        self._free: list[int] = []
        self._branches: list[int] = []  # rows of draft tree branches, for one step
        self._reach = np.zeros(0, np.int32)  # number of tokens for which each row is up to date
        self._last: tuple[list[Request], list[int]] | None = None  # requests and their `num_moves`
        self._current: list[Request] = []  # requests of the step
        self._last_rows = np.zeros(0, np.int32)
        # (row, first and end entry) of changes; None: no other rank has a copy of the tables.
        self._changes: list[tuple[int, int, int]] | None = None

    def limit(self, max_rows: int) -> None:
        """Limit the page tables to `max_rows` rows: the requests and branches of the largest step.

        When all rows are taken, requests that are not in the step lose their rows.
        """
        self._max_rows = max_rows

    def note_changes(self) -> None:
        """Begin to record changes of page ids, which `take_changes` returns for the other ranks."""
        self._changes = []

    def note_all(self) -> None:
        """Make `take_changes` return all entries, because other ranks lost earlier changes."""
        self._changes = [(row, 0, self.stride) for row in range(len(self.array))]

    def take_changes(self) -> NDArray[np.int32]:
        """Return the entries changed since the last call, to send them to the other ranks.

        Each is (index in `array.reshape(-1)`, page id).
        """
        changes, self._changes = self._changes or [], []
        _, num_groups, stride = self.array.shape
        if not changes:
            return np.zeros((0, 2), np.int32)
        indices = np.concatenate(
            [
                np.arange((row * num_groups + group) * stride + first, base_end)
                for row, first, end in changes
                for group in range(num_groups)
                for base_end in ((row * num_groups + group) * stride + end,)
            ]
        )
        return np.stack([indices, self.array.reshape(-1)[indices]], axis=1).astype(np.int32)

    def rows(self, requests: list[Request], reached: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the row of each request, after copying the pages of its first `reached` tokens."""
        requests_and_moves = (requests, [request.num_moves for request in requests])
        self._current = requests
        if requests_and_moves == self._last:  # most steps only add a few pages
            is_outdated = reached > self._reach[self._last_rows]
            for index in is_outdated.nonzero()[0]:
                self._update(requests[index])
        else:
            rows = [self._update(request) for request in requests]
            self._last, self._last_rows = requests_and_moves, np.array(rows, np.int32)
        return self._last_rows

    def branch(self, index: int, request_row: int, branch: DraftBranch) -> int:
        """Write the page table of a draft branch: the request's first pages, then the branch's.

        Returns the table's row. `index`: the number of the branch in the step. `request_row`: the
        row of the request.
        """
        if index == len(self._branches):
            self._branches.append(self._take_row())
        row = self._branches[index]
        self.array[row, :, : branch.page_index] = self.array[request_row, :, : branch.page_index]
        num_places = len(branch.pages[0])
        self.array[row, :, branch.page_index : branch.page_index + num_places] = branch.pages
        if self._changes is not None:
            self._changes.append((row, 0, branch.page_index + num_places))
        return row

    def forget(self, request: Request) -> None:
        """Free the row of a finished request, if it has one."""
        if entry := self._entries.pop(request, None):
            self._free.append(entry[0])
            self._last = None

    def _update(self, request: Request) -> int:
        """Copy a request's new page ids, or all if some were replaced; return the request's row."""
        row, num_moves = self._entries.get(request) or (self._take_row(), _NEW)
        num_pages = len(request.pages[0])
        num_copied = int(self._reach[row]) // self._page_size
        if num_moves != request.num_moves or num_copied > num_pages:
            self._entries[request] = row, request.num_moves
            self._reach[row] = num_copied = 0
        if num_pages == num_copied:
            return row
        if self._changes is not None:
            self._changes.append((row, num_copied, num_pages))
        if num_pages == num_copied + 1:  # assigning a slice takes ten times as long
            for group, pages in enumerate(request.pages):
                self.array[row, group, num_copied] = pages[num_copied]
        else:
            for part, pages in zip(self.array[row], request.pages, strict=True):
                part[num_copied:num_pages] = pages[num_copied:]
        self._reach[row] = num_pages * self._page_size
        return row

    def _take_row(self) -> int:
        if not self._free:
            size, *shape = self.array.shape
            num_new = max(size, 16)
            if self._max_rows is not None:
                num_new = min(num_new, self._max_rows - size)
            if not num_new:
                return self._reclaim_row()
            self._free.extend(range(size + num_new - 1, size - 1, -1))
            self.array = np.concatenate([self.array, np.zeros((num_new, *shape), np.int32)])
            self._reach = np.concatenate([self._reach, np.zeros(num_new, np.int32)])
            self.address = self.array.ctypes.data
        return self._free.pop()

    def _reclaim_row(self) -> int:
        """Take a row from a request that is not in the step, else from an old draft branch.

        Returns the index of the row.
        """
        current = set(self._current)
        for request in self._entries:
            if request not in current:
                return self._entries.pop(request)[0]
        return self._branches.pop()
