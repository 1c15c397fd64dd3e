"""Requests as the native sampler reads them: one fixed-size row each, kept from step to step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.sampling.reference import LEAST_PENALTY, allows_only, fill_masks
from twostroke.core.draft_tree import depths_of, ends_of, parents_of, path_to
from twostroke.core.sampling import MAX_LOGPROBS
from twostroke.core.step import NO_TOKEN, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import Slice

    Rows = NDArray[np.void]  # of ROW or RESULT

# `SampleRow` of native/sample/sample.h, field for field; pointers as integers.
ROW = np.dtype(
    [
        ("tokens", np.uint64),
        ("bias_ids", np.uint64),
        ("bias_values", np.uint64),
        ("barred_ids", np.uint64),
        ("mask", np.uint64),
        ("seed", np.uint64),
        ("counter", np.uint64),
        ("num_tokens", np.int64),
        ("num_prompt", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("top_k", np.int32),
        ("num_bias", np.int32),
        ("num_barred", np.int32),
        ("num_logprobs", np.int32),
        ("given", np.int32),
    ],
    align=True,
)

_WHOLE_ROW = np.dtype((np.void, ROW.itemsize))  # else NumPy copies field by field

# `SampleResult`, likewise.
RESULT = np.dtype(
    [
        ("token", np.int32),
        ("count", np.int32),
        ("logprob", np.float32),
        ("top_ids", np.int32, (MAX_LOGPROBS,)),
        ("top_logprobs", np.float32, (MAX_LOGPROBS,)),
    ],
    align=True,
)


@dataclass(slots=True)
class _History:
    """Prompt and output of a request, `num_tokens` in all, and perhaps drafts."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_tokens: int = 0


class RowTable:
    """The rows of all requests that a backend knows.

    A request's parameters are written once. A step costs one gather of rows, unless it has the
    same requests as the step before and none has penalties, plus the new tokens in the histories
    of requests with penalties.
    """

    def __init__(self) -> None:
        self._places: dict[Request, int] = {}
        self._arrays: dict[Request, tuple[NDArray[Any], ...]] = {}  # that rows point to
        self._histories: dict[Request, _History] = {}  # of requests with penalties
        self._free: list[int] = []
        self._table: Rows = np.zeros(0, dtype=ROW)
        # What `num_barred` is while fewer than `min_tokens` tokens are out.
        self._min_tokens: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._num_ends: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._last: Sequence[Request] | None = None  # and their rows and places
        self._rows: Rows = np.zeros(0, dtype=ROW)
        self._last_places: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._has_minimum = False  # whether any of them has `min_tokens`
        self._drafted: Rows = self._rows  # with those of drafts
        self._branched: list[NDArray[np.int32]] = []  # tokens up to the ends of branches
        self._masks: dict[Request, NDArray[np.uint32]] = {}  # of requests with a constraint

    def __len__(self) -> int:
        return len(self._places)

    def rows(
        self,
        requests: Sequence[Request],
        parts: Sequence[Slice] | None = None,
        num_tokens: NDArray[Any] | None = None,
    ) -> Rows:
        """Return an array of `ROW`, one for each request's next token, in their order.

        Each draft in `parts[i]`, the slice of `requests[i]`, has a row too, for the token after
        it; rows of scored tokens come before these. `num_tokens` is how many tokens each request
        has, if the caller knows. The array and its pointers are valid until the next call, or
        until a request is forgotten.
        """
        if self._histories or requests != self._last:
            self._gather(requests)
        rows, places = self._rows, self._last_places
        if num_tokens is None:
            num_tokens = np.array([len(request.tokens) for request in requests], dtype=np.int64)
        if parts is not None:
            scored = np.array([part.num_scored for part in parts])
            counts = scored + np.array([part.num_drawn for part in parts])
            firsts = counts.cumsum() - counts + scored
            num_tokens = (num_tokens - firsts).repeat(counts) + np.arange(counts.sum())
            for part in parts if self._histories else ():
                end = part.branches[0].first if part.branches else None
                self._write_history(part.request, part.drafts[:end])
            places = places.repeat(counts)
            rows = self._drafted = self._table.view(_WHOLE_ROW)[places].view(ROW)
            self._branch(parts, firsts, rows, num_tokens)
            if scored.any():
                _give(parts, firsts, rows)
        counters = num_tokens - rows["num_prompt"]
        rows["num_tokens"] = num_tokens
        rows["counter"] = counters
        if self._has_minimum:
            early = counters < self._min_tokens[places]
            rows["num_barred"] = np.where(early, self._num_ends[places], 0)
        if self._masks:
            self._mask(requests, parts, rows)
        return rows

    def _gather(self, requests: Sequence[Request]) -> None:
        known = self._places
        found = list(map(known.get, requests))
        if None in found:
            found = [known[r] if r in known else self._add(r) for r in requests]
        if self._histories:
            for request in requests:
                self._write_history(request)
        self._last = requests
        self._last_places = np.array(found, dtype=np.intp)
        self._rows = self._table.view(_WHOLE_ROW)[self._last_places].view(ROW)
        self._has_minimum = bool(self._min_tokens[self._last_places].any())

    def forget(self, request: Request) -> None:
        """Drop a request's row; does nothing without one."""
        if request in self._places:
            self._last = None
            self._free.append(self._places.pop(request))
            del self._arrays[request]
            self._masks.pop(request, None)
            self._histories.pop(request, None)

    def _add(self, request: Request) -> int:
        if not self._free:
            self._grow()
        params = request.params
        bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int32)
        bias_values = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        end_ids = np.array(sorted(request.end_ids), dtype=np.int32)
        place = self._places[request] = self._free.pop()
        self._arrays[request] = (bias_ids, bias_values, end_ids)
        self._min_tokens[place] = params.min_tokens
        self._num_ends[place] = end_ids.size

        row = self._table[place]
        row["tokens"] = row["mask"] = 0
        row["bias_ids"], row["bias_values"] = bias_ids.ctypes.data, bias_values.ctypes.data
        row["barred_ids"], row["num_bias"] = end_ids.ctypes.data, bias_ids.size
        row["seed"], row["num_prompt"] = request.seed & (2**64 - 1), request.num_prompt
        values = params.values
        row["temperature"], row["top_k"] = values.temperature, values.top_k
        row["top_p"], row["min_p"] = values.top_p, values.min_p
        row["repetition_penalty"] = max(values.repetition_penalty, LEAST_PENALTY)
        row["frequency_penalty"] = params.frequency_penalty
        row["presence_penalty"] = params.presence_penalty
        row["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        row["given"] = NO_TOKEN

        if params.has_penalties:
            self._histories[request] = _History()
        if request.matcher is not None:
            self._masks[request] = np.zeros((1, request.matcher.num_words), dtype=np.uint32)
        return place

    def _grow(self) -> None:
        size = self._table.size
        self._free.extend(range(max(2 * size, 64) - 1, size - 1, -1))
        more = len(self._free)
        self._table = np.concatenate([self._table, np.zeros(more, dtype=ROW)])
        self._min_tokens = np.concatenate([self._min_tokens, np.zeros(more, dtype=np.int64)])
        self._num_ends = np.concatenate([self._num_ends, np.zeros(more, dtype=np.int32)])

    def _write_history(self, request: Request, drafts: Sequence[int] = ()) -> None:
        """Bring a request's history up to date, if it has one, with drafts at its end."""
        history = self._histories.get(request)
        if history is None:
            return
        tokens = history.tokens
        del tokens[history.num_tokens :]  # drafts of an earlier step
        tokens.extend(request.tokens[history.num_tokens :])
        tokens.extend(drafts)
        history.num_tokens = len(request.tokens)
        self._table["tokens"][self._places[request]] = tokens.buffer_info()[0]

    def _branch(
        self, parts: Sequence[Slice], firsts: NDArray[Any], rows: Rows, num_tokens: NDArray[Any]
    ) -> None:
        """Let the rows of branches know how many tokens are before them, and which."""
        self._branched = []
        for part, first in zip(parts, firsts.tolist(), strict=True):
            if not part.branches:
                continue
            count, request = len(part.drafts), part.request
            depths = np.array(depths_of(count, part.branches))
            num_tokens[first + 1 : first + 1 + count] = len(request.tokens) + 1 + depths
            if request not in self._histories:
                continue
            parents = parents_of(count, part.branches)
            for branch, end in ends_of(count, part.branches):
                path = [part.drafts[i] for i in path_to(end - 1, parents)]
                tokens = np.array([*request.tokens, *path], np.int32)
                rows["tokens"][first + 1 + branch.first : first + 1 + end] = tokens.ctypes.data
                self._branched.append(tokens)

    def _mask(self, requests: Sequence[Request], parts: Sequence[Slice] | None, rows: Rows) -> None:
        """Point the rows of requests with a constraint to masks, which are good for this step."""
        slices: Sequence[Slice | None] = parts or [None] * len(requests)
        counts = [1 if part is None else part.num_drawn for part in slices]
        at = 0
        for request, part, count in zip(requests, slices, counts, strict=True):
            at += 0 if part is None else part.num_scored
            own, at = rows[at : at + count], at + count
            if request.matcher is None or not count:
                continue
            masks = self._masks[request]
            if len(masks) < count:
                masks = self._masks[request] = np.zeros((2 * count, masks.shape[1]), masks.dtype)
            masks = masks[:count]
            fill_masks(request, part, masks)
            own["mask"] = masks.ctypes.data + masks.strides[0] * np.arange(count, dtype=np.uint64)
            for row, mask in zip(own, masks, strict=True):
                if row["num_barred"] and allows_only(mask, request.end_ids):
                    row["num_barred"] = 0


def only_best(rows: Rows) -> NDArray[np.int32]:
    """Return 1 for each `ROW` that draws the token of the largest logit and asks for nothing else.

    Others need all logits: their numbers, or others' places among them, count.
    """
    neutral = (
        ("temperature", 0), ("repetition_penalty", 1), ("frequency_penalty", 0),
        ("presence_penalty", 0), ("num_bias", 0), ("num_barred", 0), ("mask", 0),
        ("num_logprobs", -1), ("given", NO_TOKEN),
    )  # fmt: skip
    found = np.ones(len(rows), np.bool_)
    for name, value in neutral:
        found &= rows[name] == value
    return found.astype(np.int32)


def _give(parts: Sequence[Slice], firsts: NDArray[Any], rows: Rows) -> None:
    """Let scored rows report on the prompt's tokens; a slice's others begin at `firsts`."""
    for part, first in zip(parts, firsts.tolist(), strict=True):
        if part.num_scored:
            own = rows[first - part.num_scored : first]
            own["given"] = part.scored_tokens
            own["num_logprobs"] = part.request.params.prompt_logprobs


def read_results(results: Rows, rows: Rows) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return what a `StepResult` holds, from the `RESULT` of each `ROW`."""
    tokens: list[int] = results["token"].tolist()
    asked: list[int] = rows["num_logprobs"].tolist()
    if max(asked, default=-1) < 0:
        return tokens, [None] * len(tokens)
    logprobs = [
        _token_logprobs(results[i]) if count >= 0 and token != NO_TOKEN else None
        for i, (count, token) in enumerate(zip(asked, tokens, strict=True))
    ]
    return tokens, logprobs


def read_scores(results: Rows) -> list[TokenLogprobs | None]:
    """Return what scored rows report, from an array of `RESULT`; None where nothing could be."""
    return [None if result["token"] == NO_TOKEN else _token_logprobs(result) for result in results]


def _token_logprobs(result: np.void) -> TokenLogprobs:
    count = int(result["count"])
    return TokenLogprobs(
        float(result["logprob"]),
        tuple(result["top_ids"][:count].tolist()),
        tuple(result["top_logprobs"][:count].tolist()),
    )
