"""`StepArrays`: writes step plans to the flat arrays that the native executor reads."""

from __future__ import annotations

from ctypes import c_void_p
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.cpu.page_tables import PageTables
from twostroke.backends.cpu.records import StepRecord
from twostroke.backends.sampling.rows import RESULT, RowTable, only_best, read_results, read_scores
from twostroke.backends.step_frame import StepFrame, encode
from twostroke.core.draft_tree import branches_with_ends
from twostroke.core.request import NO_STATE
from twostroke.core.step import Slice, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends.sampling.rows import Rows
    from twostroke.core.request import Request
    from twostroke.core.step import TokenLogprobs

    Reports = Sequence[TokenLogprobs | None]
    StepOutputs = tuple[list[int], list[TokenLogprobs | None], NDArray[np.float32] | None, Reports]


_UNKNOWN_TOKEN = (0,)  # stands for a token that a step in flight will draw


class StepArrays:
    """Writes step plans to the flat arrays that the native executor reads.

    Values that stay the same between steps are not written again.
    """

    def __init__(  # noqa: PLR0913 - each is a fact that only the caller knows
        self,
        num_groups: int,
        page_size: int,
        max_pages: int,
        *,
        one_arithmetic: bool,
        tapped_width: int = 0,
        returns_tapped: bool = False,
        sends_best: bool = False,
        has_states: bool = False,
    ) -> None:
        """Prepare the arrays of steps, which grow to any number of rows.

        Args:
            num_groups: the number of cache groups.
            page_size: the tokens of a KV page.
            max_pages: the largest number of pages of a request in one cache group.
            one_arithmetic: prompt rows and generated rows are computed in the same way, so that
                rows keep the plan's order (`BackendFacts`).
            tapped_width: the width of the intermediate value that steps also return; 0: there is
                none.
            returns_tapped: whether results have this value, for the rows from which tokens are
                drawn.
            sends_best: for rows that need only the largest logit, other ranks send rank 0 only that
                logit.
            has_states: whether the model has recurrent states.
        """
        self.tables = PageTables(num_groups, page_size, max_pages)
        self._sampling = RowTable()
        self._one_arithmetic = one_arithmetic
        self._tokens = np.zeros(0, np.int32)
        self._slices = np.zeros((0, 4), np.int32)
        self._sampled = np.zeros(0, np.int32)
        self._num_plain = 0  # first slices in `_slices` and `_sampled` that are row i alone
        self._results = np.zeros(0, RESULT)
        self._samples: NDArray[Any] = np.zeros(0, np.uint8)
        self._stores = self._copies = self._only_best = np.zeros(0, np.int32)
        self._sends_best = sends_best
        self._has_states = has_states
        self._states = np.zeros((0, 2), np.int32)
        self._row_states = np.zeros(0, np.int32)
        self._tapped = np.zeros((0, tapped_width), np.float32)
        self._returns_tapped = returns_tapped
        self._external: NDArray[np.float32] | None = None
        self._taps = (c_void_p * 1)()
        self._has_scores = False
        self._pooled: dict[Request, int] = {}  # the end of the rows whose states are returned
        self.record = StepRecord()

    def fill(self, plan: StepPlan) -> tuple[Slice, ...]:
        """Write a step plan to `record`.

        Return the slices that have logits, in the order of rows.
        """
        plan, num_generated = self._in_order(plan)
        slices_of_step, record, has_drafts = plan.slices, self.record, plan.has_drafts
        counts = [slice_.num_rows for slice_ in slices_of_step] if has_drafts else plan.counts
        if plan.is_decode and not has_drafts:
            self._fill_plain(plan)
            sampling = slices_of_step
        else:
            sampling = self._fill_mixed(plan, counts)
        record.num_rows, record.num_slices = sum(counts), len(slices_of_step)
        record.num_sampled = len(self._samples)
        record.num_generated = sum(counts[:num_generated])
        record.samples = self._samples.ctypes.data
        if self._sends_best:
            self._only_best = only_best(self._samples)
            record.only_best = _address(self._only_best)
        has_branches = has_drafts and any([slice_.branches for slice_ in slices_of_step])  # noqa: C419 - twice as quick
        if has_branches or record.num_stores or record.num_copies:
            self._lay_out(slices_of_step)
        if self._has_states:
            self._states = _states_of(slices_of_step)
            record.states = _address(self._states)
            record.row_states = None
            if has_drafts:
                self._row_states = _row_states_of(slices_of_step, record.num_rows)
                record.row_states = _address(self._row_states)
        record.page_tables, record.table_stride = self.tables.address, self.tables.stride
        record.taps = self._taps if self._returns_tapped or self._pooled else None
        self._external = plan.external
        record.external = None if plan.external is None else plan.external.ctypes.data
        return sampling

    def encode_step(self) -> bytes:
        """Return the step in `record` as a message to other ranks.

        Each step must be encoded once, in order, since a message has only the changes of page
        tables since the previous message.
        """
        return encode(self.frame, self.tables.take_changes())

    @property
    def frame(self) -> StepFrame:
        """Return the step in `record` as it is sent to other ranks; valid until the next step."""
        record = self.record
        return StepFrame(
            tokens=self._tokens[: record.num_rows],
            slices=self._slices[: record.num_slices],
            sampled_rows=self._sampled[: record.num_sampled],
            only_best=self._only_best[: record.num_sampled],
            stores=self._stores.reshape(-1, 2)[: record.num_stores],
            copies=self._copies.reshape(-1, 2)[: record.num_copies],
            page_tables=self.tables.array,
            num_generated=record.num_generated,
            external=self._external,
            states=self._states if self._has_states else None,
            row_states=self._row_states if record.row_states else None,
        )

    @property
    def samples(self) -> Rows:
        """Return the native sampler's input rows of the step, valid until the next step."""
        return self._samples

    def _fill_plain(self, plan: StepPlan) -> None:
        """Write a decode step without drafts: one row for each request, its newest token."""
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
        """Write a step with prompt chunks or draft tokens; return the slices that have logits.

        `counts`: the rows of each slice, with its draft tokens.
        """
        slices_of_step, requests = plan.slices, plan.requests
        self._num_plain = 0
        self._reserve(
            sum(counts),
            len(slices_of_step),
            sum([slice_.num_with_logits for slice_ in slices_of_step]),
        )
        self._tokens[: sum(counts)] = [
            token
            for slice_ in slices_of_step
            for known_tokens in (slice_.request.tokens[slice_.start : slice_.start + slice_.count],)
            for tokens in (known_tokens or _UNKNOWN_TOKEN, slice_.drafts)
            for token in tokens
        ]
        slices = self._slices[: len(slices_of_step)]
        slices[:, 1] = counts
        slices[:, 2] = plan.starts
        reached = slices[:, 1] + slices[:, 2]
        slices[:, 3] = self.tables.rows(requests, reached)
        ends = slices[:, 1].cumsum()
        slices[:, 0] = ends - slices[:, 1]
        pairs = zip(slices_of_step, ends.tolist(), strict=True)
        self._pooled = {slice_.request: end for slice_, end in pairs if slice_.num_pooled}
        self._has_scores = any([slice_.num_scored for slice_ in slices_of_step])  # noqa: C419 - twice as quick
        has_logits = [slice_.num_with_logits > 0 for slice_ in slices_of_step]
        sampling = tuple(compress(slices_of_step, has_logits))
        requests, ends = list(compress(requests, has_logits)), ends[has_logits]
        if self._has_scores or plan.has_drafts:
            lengths = [max(len(p.request.tokens), p.start + p.count) for p in sampling]
            self._samples = self._sampling.rows(requests, sampling, np.array(lengths, np.int64))
            pairs = zip(sampling, ends.tolist(), strict=True)
            rows = [row for p, end in pairs for row in range(end - p.num_with_logits, end)]
            self._sampled[: len(rows)] = rows
        else:  # the last row of each slice draws, and is its request's newest token
            self._samples = self._sampling.rows(requests, num_tokens=reached[has_logits])
            self._sampled[: len(requests)] = ends - 1
        return sampling

    def _lay_out(self, slices_of_step: Sequence[Slice]) -> None:
        """Split slices with draft trees into runs of rows, one for each branch.

        Each run has its own page table.
        """
        assert not self._has_states, "recurrent states cannot branch"
        rows_of_slices = self._slices[: len(slices_of_step)].tolist()
        runs: list[list[int]] = []
        stores: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        num_tables = 0
        for slice_, (row, count, start, table) in zip(slices_of_step, rows_of_slices, strict=True):
            num_main = slice_.branches[0].first + slice_.count if slice_.branches else count
            runs.append([row, num_main, start, table])
            for branch, end in branches_with_ends(len(slice_.drafts), slice_.branches):
                branch_table = self.tables.branch(num_tables, table, branch)
                num_tables += 1
                first = row + slice_.count + branch.first
                runs.append([first, end - branch.first, branch.position, branch_table])
                stores += [(row + above, branch_table) for above in branch.above]
                if branch.is_copied:
                    copied_index = branch.own_page_index
                    copies += [
                        (theirs[copied_index], ours[copied_index - branch.page_index])
                        for theirs, ours in zip(slice_.request.pages, branch.pages, strict=True)
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

    def results(self, plan: StepPlan, sampled: tuple[Slice, ...]) -> StepOutputs:
        """Return a step's tokens, log-probabilities, intermediate values and prompt scores.

        All are in the order of the plan.
        """
        num_sampled = self.record.num_sampled
        results, rows_drawn = self._results[:num_sampled], self._sampled[:num_sampled]
        rows = self._samples
        slices_with_logits = plan.slices
        if not plan.is_decode:
            slices_with_logits = tuple(
                [slice_ for slice_ in slices_with_logits if slice_.num_with_logits]
            )
        if sampled != slices_with_logits:
            ends = accumulate(slice_.num_with_logits for slice_ in sampled)
            rows_by_request = {
                p.request: range(e - p.num_with_logits, e)
                for p, e in zip(sampled, ends, strict=True)
            }
            order = [
                row for slice_ in slices_with_logits for row in rows_by_request[slice_.request]
            ]
            results, rows_drawn, rows = results[order], rows_drawn[order], rows[order]
        scores: list[TokenLogprobs | None] = []
        if self._has_scores:
            draws = np.array(plan.draws, bool)
            scores = read_scores(results[~draws])
            results, rows_drawn, rows = results[draws], rows_drawn[draws], rows[draws]
        hidden = self._tapped[rows_drawn] if self._returns_tapped else None
        tokens, logprobs = read_results(results, rows)
        return tokens, logprobs, hidden, scores

    def states(self, plan: StepPlan) -> list[NDArray[np.float32]]:
        """Return the hidden states of slices to embed, as views that the next step overwrites."""
        if not self._pooled:
            return []
        ends = [(self._pooled[p.request], p.num_pooled) for p in plan.slices if p.num_pooled]
        return [self._tapped[end - num_rows : end] for end, num_rows in ends]

    def row_states(self, plan: StepPlan) -> NDArray[np.float32] | None:
        """Return the tapped value of all rows in the plan's order; None if results have none."""
        if not self._returns_tapped:
            return None
        tapped = self._tapped[: self.record.num_rows]
        if self._one_arithmetic or not plan.num_prompt_rows:
            return tapped
        return tapped[_computed_rows(plan)]

    def forget(self, request: Request) -> None:
        """Drop the arrays' state of a finished request."""
        self.tables.forget(request)
        self._sampling.forget(request)

    def _in_order(self, plan: StepPlan) -> tuple[StepPlan, int]:
        """Return a step's plan with generated rows before prompt rows, as the kernels read them.

        Slices with rows of both kinds are split. Also returns the number of slices with generated
        rows. With `one_arithmetic`, all rows count as generated and keep their order.
        """
        if self._one_arithmetic:
            return plan, len(plan.slices)
        generated: list[Slice] = []
        prompt: list[Slice] = []
        for slice_ in plan.slices:
            request, start, count = slice_.request, slice_.start, slice_.count
            num_prompt = min(max(0, request.num_prompt - start), count)
            if not num_prompt:
                generated.append(slice_)
            elif num_prompt == count:
                prompt.append(slice_)
            else:
                read, write = slice_.read_state, slice_.write_state
                prompt.append(
                    Slice(
                        request,
                        start,
                        num_prompt,
                        samples=False,
                        read_state=read,
                        write_state=write,
                    )
                )
                start, count = start + num_prompt, count - num_prompt
                generated.append(  # continues the state where the prompt rows write it
                    Slice(
                        request,
                        start,
                        count,
                        slice_.samples,
                        slice_.drafts,
                        read_state=write,
                        write_state=write,
                        draft_states=slice_.draft_states,
                    )
                )
                assert not slice_.branches, "a tree follows one row of output"
        return StepPlan((*generated, *prompt), external=plan.external), len(generated)

    def _reserve(self, num_tokens: int, num_slices: int, num_sampled: int) -> None:
        """Enlarge step arrays that are too small, to twice the needed size."""
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


def _computed_rows(plan: StepPlan) -> NDArray[np.int64]:
    """Map each row of a plan to its index in the order in which `StepArrays` computes rows.

    Generated rows come first, then prompt rows.
    """
    is_prompt = np.zeros(plan.num_rows, bool)
    end = 0
    for slice_ in plan.slices:
        num_prompt = min(max(0, slice_.request.num_prompt - slice_.start), slice_.count)
        is_prompt[end : end + num_prompt] = True
        end += slice_.num_rows
    num_generated = len(is_prompt) - np.count_nonzero(is_prompt)
    return np.where(is_prompt, num_generated + np.cumsum(is_prompt) - 1, np.cumsum(~is_prompt) - 1)


def _states_of(slices: Sequence[Slice]) -> NDArray[np.int32]:
    """Return each slice's slots of recurrent states: (before its first row, after its last)."""
    return np.array([(part.read_state, part.write_state) for part in slices], np.int32)


def _row_states_of(slices: Sequence[Slice], num_rows: int) -> NDArray[np.int32]:
    """Return the slot for the recurrent state after each row of a step, or `NO_STATE`.

    In each slice, the last row before its drafts has a slot, and so has each draft.
    """
    slots = np.full(num_rows, NO_STATE, np.int32)
    end = 0
    for slice_ in slices:
        end += slice_.num_rows
        states = (slice_.write_state, *slice_.draft_states)
        slots[end - len(states) : end] = states
    return slots


def record_of(frame: StepFrame) -> StepRecord:
    """Return the native record of a step that rank 0 sent; such a step draws no tokens.

    The record refers to the frame's arrays, so the frame must stay alive.
    """
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
    if frame.states is not None:
        record.states = _address(frame.states)
    if frame.row_states is not None:
        record.row_states = _address(frame.row_states)
    if record.num_stores:
        record.stores = _address(frame.stores)
    if record.num_copies:
        record.copies = _address(frame.copies)
    return record


def _address(array: NDArray[Any]) -> int:
    """Return the address of an array's data; `array.ctypes.data` takes several times as long."""
    address: int = array.__array_interface__["data"][0]
    return address
