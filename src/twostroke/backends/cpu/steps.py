"""Step plans as the flat arrays of the native executor, kept from step to step."""

from __future__ import annotations

from ctypes import c_void_p
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.cpu.page_tables import PageTables
from twostroke.backends.cpu.records import StepRecord
from twostroke.backends.sampling.rows import RESULT, RowTable, only_best, read_results, read_scores
from twostroke.backends.step_frame import StepFrame, encode
from twostroke.core.draft_tree import ends_of
from twostroke.core.step import Slice, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends.sampling.rows import Rows
    from twostroke.core.request import Request
    from twostroke.core.step import TokenLogprobs

    Reports = Sequence[TokenLogprobs | None]
    Drawn = tuple[list[int], list[TokenLogprobs | None], NDArray[np.float32] | None, Reports]


_BLIND = (0,)  # in place of a token that is not known yet


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
        sends_best: bool = False,
    ) -> None:
        """`max_pages` is the most that one request's list in one of the cache groups can hold.

        With a `tapped_width` steps have one tap, of values of that width. With `returns_tapped`
        results have its values for the rows that draw. With `sends_best` other ranks send rank 0 no
        more than the largest logit of rows that need nothing else.
        """
        self.tables = PageTables(num_groups, page_size, max_pages)
        self._sampling = RowTable()
        self._one_arithmetic = one_arithmetic
        self._tokens = np.zeros(0, np.int32)
        self._slices = np.zeros((0, 4), np.int32)
        self._sampled = np.zeros(0, np.int32)
        self._num_plain = 0  # for how many rows `_slices` and `_sampled` say: row i, alone
        self._results = np.zeros(0, RESULT)
        self._samples: NDArray[Any] = np.zeros(0, np.uint8)
        self._stores = self._copies = self._only_best = np.zeros(0, np.int32)
        self._sends_best = sends_best
        self._tapped = np.zeros((0, tapped_width), np.float32)
        self._returns_tapped = returns_tapped
        self._external: NDArray[np.float32] | None = None
        self._taps = (c_void_p * 1)()
        self._has_scores = False
        self._pooled: dict[Request, int] = {}  # the end of the rows whose states are wanted
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
        if self._sends_best:
            self._only_best = only_best(self._samples)
            record.only_best = _address(self._only_best)
        has_branches = has_drafts and any([part.branches for part in parts])  # noqa: C419 - twice as quick
        if has_branches or record.num_stores or record.num_copies:
            self._lay_out(parts)
        record.page_tables, record.table_stride = self.tables.address, self.tables.stride
        record.taps = self._taps if self._returns_tapped or self._pooled else None
        self._external = plan.external
        record.external = None if plan.external is None else plan.external.ctypes.data
        return sampling

    def encoded(self) -> bytes:
        """Return the step in `record` for the other ranks; each is encoded once, in its order."""
        return encode(self.frame, self.tables.take_changes())

    @property
    def frame(self) -> StepFrame:
        """The step in `record`, until the next one."""
        record = self.record
        return StepFrame(
            self._tokens[: record.num_rows],
            self._slices[: record.num_slices],
            self._sampled[: record.num_sampled],
            self._only_best[: record.num_sampled],
            self._stores.reshape(-1, 2)[: record.num_stores],
            self._copies.reshape(-1, 2)[: record.num_copies],
            self.tables.array,
            record.num_generated,
            self._external,
        )

    @property
    def samples(self) -> Rows:
        """The rows of the sampler for the step in `record`, until the next one."""
        return self._samples

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
        self._tokens[: sum(counts)] = [
            token
            for part in parts
            for known in (part.request.tokens[part.start : part.start + part.count],)
            for tokens in (known or _BLIND, part.drafts)
            for token in tokens
        ]
        slices = self._slices[: len(parts)]
        slices[:, 1] = counts
        slices[:, 2] = plan.starts
        reached = slices[:, 1] + slices[:, 2]
        slices[:, 3] = self.tables.rows(requests, reached)
        ends = slices[:, 1].cumsum()
        slices[:, 0] = ends - slices[:, 1]
        pairs = zip(parts, ends.tolist(), strict=True)
        self._pooled = {part.request: end for part, end in pairs if part.num_pooled}
        self._has_scores = any([part.num_scored for part in parts])  # noqa: C419 - twice as quick
        has_logits = [part.num_with_logits > 0 for part in parts]
        sampling = tuple(compress(parts, has_logits))
        requests, ends = list(compress(requests, has_logits)), ends[has_logits]
        if self._has_scores or plan.has_drafts:
            lengths = [max(len(p.request.tokens), p.start + p.count) for p in sampling]
            self._samples = self._sampling.rows(requests, sampling, np.array(lengths, np.int64))
            pairs = zip(sampling, ends.tolist(), strict=True)
            rows = [row for p, end in pairs for row in range(end - p.num_with_logits, end)]
            self._sampled[: len(rows)] = rows
        else:  # the last row of a slice draws, and is its request's newest token
            self._samples = self._sampling.rows(requests, num_tokens=reached[has_logits])
            self._sampled[: len(requests)] = ends - 1
        return sampling

    def _lay_out(self, parts: Sequence[Slice]) -> None:
        """Divide slices with branches into runs of rows, each with its own page tables."""
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
        """Return tokens, log-probabilities, tapped values and scores, in the plan's order."""
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
        tokens, logprobs = read_results(results, rows)
        return tokens, logprobs, hidden, scores

    def states(self, plan: StepPlan) -> list[NDArray[np.float32]]:
        """Return the tapped rows of each slice that wants some, until the next step."""
        if not self._pooled:
            return []
        ends = [(self._pooled[p.request], p.num_pooled) for p in plan.slices if p.num_pooled]
        return [self._tapped[end - num_rows : end] for end, num_rows in ends]

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
        self._only_best = np.zeros(num_sampled, np.int32)
        record.tokens = self._tokens.ctypes.data
        record.slices = self._slices.ctypes.data
        record.sampled_rows = self._sampled.ctypes.data
        record.results = self._results.ctypes.data
        if width := self._tapped.shape[1]:
            self._tapped = np.zeros((num_tokens, width), np.float32)
            self._taps[0] = self._tapped.ctypes.data


def record_of(frame: StepFrame) -> StepRecord:
    """Return a step of another rank as kernels read it, while the frame lives; it draws nothing."""
    tables = frame.page_tables
    record = StepRecord(
        tokens=_address(frame.tokens),
        slices=_address(frame.slices),
        page_tables=_address(tables),
        sampled_rows=_address(frame.sampled_rows),
        only_best=_address(frame.only_best),
        table_stride=tables.shape[2],
        num_rows=len(frame.tokens),
        num_generated=frame.num_generated,
        num_slices=len(frame.slices),
        num_sampled=len(frame.sampled_rows),
        num_stores=len(frame.stores),
        num_copies=len(frame.copies),
    )
    if frame.external is not None:
        record.external = _address(frame.external)
    if record.num_stores:
        record.stores = _address(frame.stores)
    if record.num_copies:
        record.copies = _address(frame.copies)
    return record


def _address(array: NDArray[Any]) -> int:
    """Return where an array lies; `array.ctypes.data` takes several times as long."""
    address: int = array.__array_interface__["data"][0]
    return address
