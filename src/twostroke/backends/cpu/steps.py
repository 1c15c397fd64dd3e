"""Step plans as the flat arrays that the native executor reads, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.cpu.records import StepRecord
from twostroke.core.step import Slice
from twostroke.sample.rows import RESULT, RowTable, read_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, TokenLogprobs


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

    def fill(self, plan: StepPlan) -> list[Slice]:
        """Write the plan into `record`; returns the slices that sample, in their rows' order."""
        generated, prompt = self._split(plan.slices)
        parts = [*generated, *prompt]
        requests = [part.request for part in parts]
        starts = [part.start for part in parts]
        counts = [part.count for part in parts]
        drafts = [part.drafts for part in parts]
        if has_drafts := any(drafts):
            counts = [part.num_rows for part in parts]
        num_rows = sum(counts)
        if num_rows == len(parts):
            tokens = [r.tokens[start] for r, start in zip(requests, starts, strict=True)]
        else:
            tokens = [t for part in parts for t in _tokens(part)]
        self._reserve(num_rows, len(parts), len(parts) + sum(map(len, drafts)))
        self._tokens[:num_rows] = tokens
        slices = self._slices[: len(parts)]
        slices[:, 1] = 1 if num_rows == len(parts) else counts
        slices[:, 2] = starts
        slices[:, 3] = self.tables.places(requests)
        ends = slices[:, 1].cumsum()
        slices[:, 0] = ends - slices[:, 1]
        samples = [part.samples for part in parts]
        if not all(samples):
            requests = [part.request for part in parts if part.samples]
            drafts = [part.drafts for part in parts if part.samples]
            ends = ends[samples]
        if has_drafts:
            self._samples = self._sampling.rows(requests, drafts)
            spans = [range(e - len(d) - 1, e) for e, d in zip(ends.tolist(), drafts, strict=True)]
            self._sampled[: len(self._samples)] = list(chain(*spans))
        else:
            self._samples = self._sampling.rows(requests)
            self._sampled[: len(requests)] = ends - 1
        record = self.record
        record.page_tables, record.table_stride = self.tables.address, self.tables.stride
        record.num_rows, record.num_slices = num_rows, len(parts)
        record.num_sampled = len(self._samples)
        record.num_generated = sum(counts[: len(generated)])
        record.samples = self._samples.ctypes.data
        return [part for part in parts if part.samples]

    def results(
        self, plan: StepPlan, sampled: list[Slice]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Return what the last step drew, in the plan's order."""
        num_sampled = self.record.num_sampled
        results = self._results[:num_sampled]
        wanted = [part for part in plan.slices if part.samples]
        if sampled != wanted:
            ends = accumulate(part.num_drawn for part in sampled)
            rows = {
                p.request: range(e - p.num_drawn, e) for p, e in zip(sampled, ends, strict=True)
            }
            results = results[[row for part in wanted for row in rows[part.request]]]
        if num_sampled == len(wanted):
            requests = [part.request for part in wanted]
        else:
            requests = [part.request for part in wanted for _ in range(part.num_drawn)]
        return read_results(results, requests)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request."""
        self.tables.forget(request)
        self._sampling.forget(request)

    def _split(self, slices: tuple[Slice, ...]) -> tuple[Sequence[Slice], Sequence[Slice]]:
        """Cut each slice into generated rows and prompt rows; one list if they are the same."""
        if self._one_arithmetic:
            return slices, ()
        generated: list[Slice] = []
        prompt: list[Slice] = []
        for part in slices:
            request, start, count = part.request, part.start, part.count
            num_prompt = min(max(0, request.num_prompt - start), count)
            if not num_prompt:
                generated.append(part)
            elif num_prompt == count:
                prompt.append(part)
            else:
                prompt.append(Slice(request, start, num_prompt, samples=False))
                start, count = start + num_prompt, count - num_prompt
                generated.append(Slice(request, start, count, part.samples, part.drafts))
        return generated, prompt

    def _reserve(self, num_tokens: int, num_slices: int, num_sampled: int) -> None:
        """Have room, and if it must be made, for twice as much as asked for.

        Arrays stay where they are as long as they are large enough.
        """
        enough = num_slices <= len(self._slices) and num_sampled <= self._sampled.size
        if enough and num_tokens <= self._tokens.size:
            return
        record = self.record
        self._tokens = np.zeros(2 * num_tokens, np.int32)
        self._slices = np.zeros((2 * num_slices, 4), np.int32)
        self._sampled = np.zeros(2 * num_sampled, np.int32)
        self._results = np.zeros(2 * num_sampled, RESULT)
        record.tokens = self._tokens.ctypes.data
        record.slices = self._slices.ctypes.data
        record.sampled_rows = self._sampled.ctypes.data
        record.results = self._results.ctypes.data


def _tokens(part: Slice) -> list[int]:
    return [*part.request.tokens[part.start : part.start + part.count], *part.drafts]


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
        self._last: tuple[list[Request], list[int]] | None = None  # with their preemptions
        self._last_num_pages: list[int] = []
        self._last_rows = np.zeros(0, np.int32)

    def places(self, requests: list[Request]) -> NDArray[np.int32]:
        """Return the rows of requests, brought up to date."""
        num_pages = [len(request.pages[0]) for request in requests]
        now = (requests, [request.num_preemptions for request in requests])
        if now == self._last:  # most steps are like the one before, but for a few new pages
            for request, new, old in zip(requests, num_pages, self._last_num_pages, strict=True):
                if new != old:
                    self._update(request)
        else:
            rows = [self._update(request).row for request in requests]
            self._last, self._last_rows = now, np.array(rows, np.int32)
        self._last_num_pages = num_pages
        return self._last_rows

    def forget(self, request: Request) -> None:
        """Free a request's row; one that is not there is no error."""
        if entry := self._entries.pop(request, None):
            self._free.append(entry.row)
            self._last = None

    def _update(self, request: Request) -> _Entry:
        """Copy the pages that are new, if any, or all where a preemption took the others."""
        entry = self._entries.get(request) or self._add(request)
        num_pages = len(request.pages[0])
        if entry.num_preemptions != request.num_preemptions or entry.num_pages > num_pages:
            entry.num_preemptions, entry.num_pages = request.num_preemptions, 0
        if num_pages == entry.num_pages:
            return entry
        if num_pages == entry.num_pages + 1:  # a slice would cost ten times as much
            for group, pages in enumerate(request.pages):
                self.array[entry.row, group, entry.num_pages] = pages[entry.num_pages]
        else:
            for part, pages in zip(self.array[entry.row], request.pages, strict=True):
                part[entry.num_pages : num_pages] = pages[entry.num_pages :]
        entry.num_pages = num_pages
        return entry

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
