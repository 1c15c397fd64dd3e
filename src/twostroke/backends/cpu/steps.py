"""Step plans as the flat arrays that the native executor reads, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.cpu.records import StepRecord
from twostroke.sample.rows import RESULT, RowTable, read_results

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan, TokenLogprobs


class StepArrays:
    """Flattens plans; what does not change from one step to the next is not touched again."""

    def __init__(self, num_groups: int, max_pages: int, *, one_arithmetic: bool) -> None:
        """`max_pages` is the most that one request's list in one of the cache groups can hold."""
        self.tables = PageTables(num_groups, max_pages)
        self._sampling = RowTable()
        self._one_arithmetic = one_arithmetic
        self._tokens = np.zeros(0, np.int32)
        self._slices = np.zeros((0, 4), np.int32)
        self._sampled = np.zeros(0, np.int32)
        self._results = np.zeros(0, RESULT)
        self._samples: NDArray[Any] = np.zeros(0, np.uint8)
        self.record = StepRecord()

    def fill(self, plan: StepPlan) -> list[Request]:
        """Write the plan into `record`; returns the sampled requests in the order of their rows."""
        generated, prompt = self._split(plan.slices)
        tokens: list[int] = []
        slices: list[tuple[int, int, int, int]] = []
        sampled: list[int] = []
        requests: list[Request] = []
        num_generated = 0
        for kind in (generated, prompt):
            for request, start, end, samples in kind:
                row = len(tokens)
                if end - start == 1:
                    tokens.append(request.tokens[start])
                else:
                    tokens += request.tokens[start:end]
                slices.append((row, end - start, start, self.tables.place(request)))
                if samples:
                    sampled.append(row + end - start - 1)
                    requests.append(request)
            num_generated = num_generated or len(tokens)
        if not generated:
            num_generated = 0
        self._write(tokens, slices, sampled)
        self._samples = self._sampling.rows(requests)
        record = self.record
        record.num_generated = num_generated
        record.samples = self._samples.ctypes.data
        return requests

    def results(
        self, plan: StepPlan, requests: list[Request]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Return what the last step drew, in the plan's order."""
        results = self._results[: len(requests)]
        wanted = [part.request for part in plan.slices if part.samples]
        if requests != wanted:
            row_of = {request: row for row, request in enumerate(requests)}
            results = results[[row_of[request] for request in wanted]]
        return read_results(results, wanted)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request."""
        self.tables.forget(request)
        self._sampling.forget(request)

    def _split(self, slices: tuple[Slice, ...]) -> tuple[list[_Part], list[_Part]]:
        """Cut each slice into generated rows and prompt rows; one list if they are the same."""
        generated: list[_Part] = []
        prompt: list[_Part] = []
        for part in slices:
            request, start = part.request, part.start
            end = start + part.count
            if self._one_arithmetic or start >= request.num_prompt:
                generated.append((request, start, end, part.samples))
            elif end <= request.num_prompt:
                prompt.append((request, start, end, part.samples))
            else:
                middle = request.num_prompt
                prompt.append((request, start, middle, False))
                generated.append((request, middle, end, part.samples))
        return generated, prompt

    def _write(
        self, tokens: list[int], slices: list[tuple[int, int, int, int]], sampled: list[int]
    ) -> None:
        """Copy lists into arrays that stay where they are as long as they are large enough."""
        if len(tokens) > self._tokens.size or len(slices) > len(self._slices):
            self._grow(len(tokens), len(slices))
        self._tokens[: len(tokens)] = tokens
        self._slices[: len(slices)] = slices
        self._sampled[: len(sampled)] = sampled
        record = self.record
        record.page_tables = self.tables.address
        record.table_stride = self.tables.stride
        record.num_rows = len(tokens)
        record.num_slices = len(slices)
        record.num_sampled = len(sampled)

    def _grow(self, num_tokens: int, num_slices: int) -> None:
        """Make room for twice as much as asked for."""
        record = self.record
        self._tokens = np.zeros(2 * num_tokens, np.int32)
        self._slices = np.zeros((2 * num_slices, 4), np.int32)
        self._sampled = np.zeros(2 * num_slices, np.int32)
        self._results = np.zeros(2 * num_slices, RESULT)
        record.tokens = self._tokens.ctypes.data
        record.slices = self._slices.ctypes.data
        record.sampled_rows = self._sampled.ctypes.data
        record.results = self._results.ctypes.data


_Part = tuple["Request", int, int, bool]  # rows start to end of a request; is the last one sampled


class PageTables:
    """One row of page ids a request and in it one part a cache group, copied as its pages grow.

    The ids of row r and group g start at `address + 4 * (r * num_groups + g) * stride`. The
    scheduler only appends to a request's pages, empties places behind a window, or takes all of
    them (a preemption). What stands in a place wholly behind the window of a slice's first row is
    not to be read: it may be `NO_PAGE`, or a page that has become another's.
    """

    def __init__(self, num_groups: int, max_pages: int) -> None:
        self.stride = max_pages
        self.array = np.zeros((0, num_groups, max_pages), np.int32)
        self.address = 0  # of the array
        self._entries: dict[Request, _Entry] = {}
        self._free: list[int] = []

    def place(self, request: Request) -> int:
        """Return the row of a request, brought up to date."""
        entry = self._entries.get(request)
        if entry is None:
            entry = self._add(request)
        num_pages = len(request.pages[0])
        if entry.num_preemptions != request.num_preemptions or entry.num_pages > num_pages:
            entry.num_preemptions, entry.num_pages = request.num_preemptions, 0
        if entry.num_pages < num_pages:
            for part, pages in zip(self.array[entry.row], request.pages, strict=True):
                part[entry.num_pages : num_pages] = pages[entry.num_pages :]
            entry.num_pages = num_pages
        return entry.row

    def forget(self, request: Request) -> None:
        """Free a request's row; one that is not there is no error."""
        if entry := self._entries.pop(request, None):
            self._free.append(entry.row)

    def _add(self, request: Request) -> _Entry:
        if not self._free:
            size, *shape = self.array.shape
            more = max(size, 16)
            self._free.extend(range(size + more - 1, size - 1, -1))
            self.array = np.concatenate([self.array, np.zeros((more, *shape), np.int32)])
            self.address = self.array.ctypes.data
        entry = self._entries[request] = _Entry(self._free.pop(), request.num_preemptions)
        return entry


@dataclass(slots=True)
class _Entry:
    """A request's row, how much of its lists is in it, and since which preemption."""

    row: int
    num_preemptions: int
    num_pages: int = 0
