"""Step plans as the flat arrays of the native executor, kept from step to step."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass
from itertools import accumulate, chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twostroke.backends.cpu.records import StepRecord
from twostroke.core.step import Slice, StepPlan
from twostroke.core.tree import ends_of
from twostroke.sample.rows import RESULT, RowTable, read_results, read_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import TokenLogprobs
    from twostroke.core.tree import Branch


class Drawn(NamedTuple):
    """Tokens and reports of a step: the parts of a `StepResult`."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    hidden: NDArray[np.float32] | None
    scores: Sequence[TokenLogprobs | None]


class StepArrays:
    """Flattens plans; parts that do not change between steps are not written again."""

    def __init__(
        self,
        num_groups: int,
        page_size: int,
        max_pages: int,
        *,
        one_arithmetic: bool,
        tapped_width: int = 0,
        returns_tapped: bool = False,
    ) -> None:
        """`max_pages` is the most that one request's list in one of the cache groups can hold.

        With a `tapped_width` steps have one tap, of values of that width. With `returns_tapped`
        results have its values for the rows that draw.
        """
        self.tables = PageTables(num_groups, page_size, max_pages)
        self._sampling = RowTable()
        self._one_arithmetic = one_arithmetic
        self._tokens = np.zeros(0, np.int32)
        self._slices = np.zeros((0, 4), np.int32)
        self._sampled = np.zeros(0, np.int32)
        self._num_plain = 0  # of how many slices and samples row i is row i of the step, and all
        self._results = np.zeros(0, RESULT)
        self._samples: NDArray[Any] = np.zeros(0, np.uint8)
        self._stores = self._copies = np.zeros(0, np.int32)
        self._tapped = np.zeros((0, tapped_width), np.float32)
        self._returns_tapped = returns_tapped
        self._taps = (c_void_p * 1)()
        self._has_scores = False
        self._pooled: dict[Request, int] = {}  # the end of the rows that are wanted
        self.record = StepRecord()

    def fill(self, plan: StepPlan) -> tuple[Slice, ...]:
        """Write the plan into `record`; returns the slices with logits, in their rows' order."""
        plan, num_generated = self._in_order(plan)
        parts, record, has_drafts = plan.slices, self.record, plan.has_drafts
        counts = [part.num_rows for part in parts] if has_drafts else plan.counts
        if plan.is_decode and not has_drafts:
            self._fill_plain(plan)
            sampling = parts
        else:
            sampling = self._fill_mixed(plan, counts)
        record.num_rows, record.num_slices = sum(counts), len(parts)
        record.num_sampled = len(self._samples)
        record.num_generated = sum(counts[:num_generated])
        record.samples = self._samples.ctypes.data
        has_branches = has_drafts and any([part.branches for part in parts])  # noqa: C419 - twice as quick
        if has_branches or record.num_stores or record.num_copies:
            self._lay_out(parts)
        record.page_tables, record.table_stride = self.tables.address, self.tables.stride
        record.taps = self._taps if self._returns_tapped or self._pooled else None
        record.external = None if plan.external is None else plan.external.ctypes.data
        return sampling

    def _fill_plain(self, plan: StepPlan) -> None:
        """Write a row for each request, of its newest token, and draw the next."""
        count = len(plan.slices)
        self._reserve(count, count, count)
        if self._num_plain < count:
            self._slices[:count, 0] = self._sampled[:count] = np.arange(count)
            self._slices[:count, 1] = 1
            self._num_plain = count
        self._tokens[:count] = [request.tokens[-1] for request in plan.requests]
        slices = self._slices[:count]
        slices[:, 2] = plan.starts
        reached = slices[:, 2] + 1
        slices[:, 3] = self.tables.rows(plan.requests, reached)
        self._samples = self._sampling.rows(plan.requests, num_tokens=reached)
        self._pooled, self._has_scores = {}, False

    def _fill_mixed(self, plan: StepPlan, counts: Sequence[int]) -> tuple[Slice, ...]:
        """Write slices of `counts` rows, drafts among them; returns those with logits."""
        parts, requests = plan.slices, plan.requests
        self._num_plain = 0
        self._reserve(sum(counts), len(parts), sum([part.num_with_logits for part in parts]))
        self._tokens[: sum(counts)] = [token for part in parts for token in _tokens(part)]
        slices = self._slices[: len(parts)]
        slices[:, 1] = counts
        slices[:, 2] = plan.starts
        reached = slices[:, 1] + slices[:, 2]
        slices[:, 3] = self.tables.rows(requests, reached)
        ends = slices[:, 1].cumsum()
        slices[:, 0] = ends - slices[:, 1]
        self._pooled = _ends_of_pooled(parts, ends)
        self._has_scores = any([part.num_scored for part in parts])  # noqa: C419 - twice as quick
        has_logits = [part.num_with_logits > 0 for part in parts]
        sampling = tuple(compress(parts, has_logits))
        requests, ends = list(compress(requests, has_logits)), ends[has_logits]
        if self._has_scores or plan.has_drafts:
            self._sample(sampling, requests, ends)
        else:  # the last row of a slice draws, and is its request's newest token
            self._samples = self._sampling.rows(requests, num_tokens=reached[has_logits])
            self._sampled[: len(requests)] = ends - 1
        return sampling

    def _sample(
        self, parts: Sequence[Slice], requests: Sequence[Request], ends: NDArray[np.int32]
    ) -> None:
        """Write how to sample each row with logits; a slice may have several."""
        self._samples = self._sampling.rows(requests, parts)
        spans = [
            range(e - part.num_with_logits, e) for e, part in zip(ends.tolist(), parts, strict=True)
        ]
        self._sampled[: len(self._samples)] = list(chain(*spans))

    def _lay_out(self, parts: Sequence[Slice]) -> None:
        """Divide slices with branches into runs of rows, each with its own page tables.

        `_slices` has one record for each of the parts.
        """
        whole = self._slices[: len(parts)].tolist()
        runs: list[list[int]] = []
        stores: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        num_tables = 0
        for part, (row, count, start, table) in zip(parts, whole, strict=True):
            num_main = part.branches[0].first + part.count if part.branches else count
            runs.append([row, num_main, start, table])
            for branch, end in ends_of(len(part.drafts), part.branches):
                own = self.tables.branch(num_tables, table, branch)
                num_tables += 1
                first = row + part.count + branch.first
                runs.append([first, end - branch.first, branch.position, own])
                stores += [(row + above, own) for above in branch.above]
                if branch.is_copied:
                    place = branch.own_place
                    copies += [
                        (theirs[place], ours[place - branch.place])
                        for theirs, ours in zip(part.request.pages, branch.pages, strict=True)
                    ]
        if len(runs) > len(self._slices):
            self._slices = np.zeros((2 * len(runs), 4), np.int32)
            self.record.slices = self._slices.ctypes.data
        self._slices[: len(runs)] = runs
        stores.sort()
        self._stores = np.array(stores, np.int32)
        self._copies = np.array(copies, np.int32)
        record = self.record
        record.num_slices = len(runs)
        record.stores, record.num_stores = self._stores.ctypes.data, len(stores)
        record.copies, record.num_copies = self._copies.ctypes.data, len(copies)

    def results(self, plan: StepPlan, sampled: tuple[Slice, ...]) -> Drawn:
        """Return what the last step drew and reported, in the plan's order."""
        num_sampled = self.record.num_sampled
        results, drawn = self._results[:num_sampled], self._sampled[:num_sampled]
        rows = self._samples
        wanted = plan.slices
        if not plan.is_decode:
            wanted = tuple([part for part in wanted if part.num_with_logits])
        if sampled != wanted:
            ends = accumulate(part.num_with_logits for part in sampled)
            places = {
                p.request: range(e - p.num_with_logits, e)
                for p, e in zip(sampled, ends, strict=True)
            }
            order = [row for part in wanted for row in places[part.request]]
            results, drawn, rows = results[order], drawn[order], rows[order]
        scores: list[TokenLogprobs | None] = []
        if self._has_scores:
            draws = np.array(plan.draws, bool)
            scores = read_scores(results[~draws])
            results, drawn, rows = results[draws], drawn[draws], rows[draws]
        hidden = self._tapped[drawn] if self._returns_tapped else None
        return Drawn(*read_results(results, rows), hidden, scores)

    def states(self, plan: StepPlan) -> list[NDArray[np.float32]]:
        """Return the tapped rows of each slice that wants some, until the next step."""
        if not self._pooled:
            return []
        ends = [(self._pooled[p.request], p.num_pooled) for p in plan.slices if p.num_pooled]
        return [self._tapped[end - count : end] for end, count in ends]

    def forget(self, request: Request) -> None:
        """Drop the state of a request."""
        self.tables.forget(request)
        self._sampling.forget(request)

    def _in_order(self, plan: StepPlan) -> tuple[StepPlan, int]:
        """Return the plan with generated rows first, and how many slices have them.

        Where they are computed as prompt rows are, all count as generated, and stay where they are.
        """
        if self._one_arithmetic:
            return plan, len(plan.slices)
        generated: list[Slice] = []
        prompt: list[Slice] = []
        for part in plan.slices:
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
                assert not part.branches, "a tree follows one row of output"
        return StepPlan((*generated, *prompt), external=plan.external), len(generated)

    def _reserve(self, num_tokens: int, num_slices: int, num_sampled: int) -> None:
        """Make room; arrays that are too small are replaced by ones of twice the size."""
        enough = num_slices <= len(self._slices) and num_sampled <= self._sampled.size
        if enough and num_tokens <= self._tokens.size:
            return
        record = self.record
        num_tokens = max(2 * num_tokens, self._tokens.size)
        num_slices = max(2 * num_slices, len(self._slices))
        num_sampled = max(2 * num_sampled, self._sampled.size)
        self._num_plain = 0
        self._tokens = np.zeros(num_tokens, np.int32)
        self._slices = np.zeros((num_slices, 4), np.int32)
        self._sampled = np.zeros(num_sampled, np.int32)
        self._results = np.zeros(num_sampled, RESULT)
        record.tokens = self._tokens.ctypes.data
        record.slices = self._slices.ctypes.data
        record.sampled_rows = self._sampled.ctypes.data
        record.results = self._results.ctypes.data
        if width := self._tapped.shape[1]:
            self._tapped = np.zeros((num_tokens, width), np.float32)
            self._taps[0] = self._tapped.ctypes.data


def _ends_of_pooled(parts: Sequence[Slice], ends: NDArray[np.int32]) -> dict[Request, int]:
    pairs = zip(parts, ends.tolist(), strict=True)
    return {part.request: end for part, end in pairs if part.num_pooled}


def _tokens(part: Slice) -> list[int]:
    return [*part.request.tokens[part.start : part.start + part.count], *part.drafts]


class PageTables:
    """One row of page ids a request and in it one part a cache group, copied as its pages grow.

    The ids of row r and group g start at `address + 4 * (r * num_groups + g) * stride`. The
    scheduler only appends to a request's pages, empties places before a window, or replaces some
    and counts that (`num_moves`). A place wholly before the window of a slice's first row must not
    be read: it may be `NO_PAGE`, or a page that another request has now.
    """

    def __init__(self, num_groups: int, page_size: int, max_pages: int) -> None:
        self.stride = max_pages
        self._page_size = page_size
        self.array = np.zeros((0, num_groups, max_pages), np.int32)
        self.address = 0  # of the array
        self._entries: dict[Request, _Entry] = {}
        self._free: list[int] = []
        self._branches: list[int] = []  # rows of branches, for the step alone
        self._reach = np.zeros(0, np.int32)  # up to which token each row is up to date
        self._last: tuple[list[Request], list[int]] | None = None  # with their moves
        self._last_rows = np.zeros(0, np.int32)

    def rows(self, requests: list[Request], reached: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows of requests, up to date for the first `reached` tokens of each."""
        now = (requests, [request.num_moves for request in requests])
        if now == self._last:  # most steps are like the one before, but for a few new pages
            is_short = reached > self._reach[self._last_rows]
            for place in is_short.nonzero()[0]:
                self._update(requests[place])
        else:
            rows = [self._update(request).row for request in requests]
            self._last, self._last_rows = now, np.array(rows, np.int32)
        return self._last_rows

    def branch(self, index: int, request_row: int, branch: Branch) -> int:
        """Return the row of the step's branch `index`: its request's first pages, then its own."""
        if index == len(self._branches):
            self._branches.append(self._take_row())
        row = self._branches[index]
        self.array[row, :, : branch.place] = self.array[request_row, :, : branch.place]
        num_places = len(branch.pages[0])
        self.array[row, :, branch.place : branch.place + num_places] = branch.pages
        return row

    def forget(self, request: Request) -> None:
        """Free a request's row; an unknown request is ignored."""
        if entry := self._entries.pop(request, None):
            self._free.append(entry.row)
            self._last = None

    def _update(self, request: Request) -> _Entry:
        """Copy the pages that are new, if any, or all where others were replaced."""
        entry = self._entries.get(request) or self._add(request)
        num_pages = len(request.pages[0])
        num_copied = int(self._reach[entry.row]) // self._page_size
        if entry.num_moves != request.num_moves or num_copied > num_pages:
            entry.num_moves, num_copied = request.num_moves, 0
        if num_pages == num_copied:
            return entry
        if num_pages == num_copied + 1:  # a slice would cost ten times as much
            for group, pages in enumerate(request.pages):
                self.array[entry.row, group, num_copied] = pages[num_copied]
        else:
            for part, pages in zip(self.array[entry.row], request.pages, strict=True):
                part[num_copied:num_pages] = pages[num_copied:]
        self._reach[entry.row] = num_pages * self._page_size
        return entry

    def _add(self, request: Request) -> _Entry:
        entry = self._entries[request] = _Entry(self._take_row(), request.num_moves)
        self._reach[entry.row] = 0
        return entry

    def _take_row(self) -> int:
        if not self._free:
            size, *shape = self.array.shape
            more = max(size, 16)
            self._free.extend(range(size + more - 1, size - 1, -1))
            self.array = np.concatenate([self.array, np.zeros((more, *shape), np.int32)])
            self._reach = np.concatenate([self._reach, np.zeros(more, np.int32)])
            self.address = self.array.ctypes.data
        return self._free.pop()


@dataclass(slots=True)
class _Entry:
    """A request's row, and the request's `num_moves` when it was copied."""

    row: int
    num_moves: int
