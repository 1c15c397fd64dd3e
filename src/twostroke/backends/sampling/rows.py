"""The native sampler's input: a table with a fixed-size row of parameters for each request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.backends.sampling.reference import MIN_PENALTY, allows_only, fill_masks
from twostroke.core.draft_tree import branches_with_ends, depths_of, parents_of, path_to
from twostroke.core.sampling import MAX_LOGPROBS
from twostroke.core.step import NO_TOKEN, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import Slice

    Rows = NDArray[np.void]  # of ROW or RESULT

# The columns of native/sample/columns.h, in the same order; pointers as integers.
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

# The columns that change a greedy row, each with the value that has no effect. A sampling option
# that changes logits needs its column here: of a row with all of these values, ranks send only the
# largest logit.
NEUTRAL_VALUES: Final = {
    "temperature": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "num_bias": 0,
    "num_barred": 0,
    "mask": 0,
    "num_logprobs": -1,
    "given": NO_TOKEN,
}

_WHOLE_ROW = np.dtype((np.void, ROW.itemsize))  # copies whole rows, not field by field

# `SampleResult` of native/sample/sample.h, field for field.
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


def columns_hash(row: np.dtype[np.void]) -> int:
    """Return a hash of a row's columns: their names, types and order.

    Each native library has the hash of the columns with which it was compiled
    (`ts_sample_columns_hash`), to be compared with this hash. Both are 64-bit FNV-1a hashes of a
    text such as `tokens uint64;bias_ids uint64;`. Source: Fowler, Noll, Vo, Eastlake: "The FNV
    Non-Cryptographic Hash Algorithm" (IETF draft).
    """
    text = "".join(f"{name} {row[name].name};" for name in row.names or ())
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


COLUMNS_HASH: Final = columns_hash(ROW)


@dataclass(slots=True)
class _History:
    """A request's tokens as an array, from which the native sampler counts tokens for penalties.

    The first `num_tokens` are prompt and output; the step's draft tokens follow.
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_tokens: int = 0


class RowTable:
    """The native sampler's parameters of all requests: a table that is kept from step to step.

    A request's parameters are written once. A step copies its requests' rows out of the table,
    except if it has the same requests as the previous step and none of them has penalties. For
    requests with penalties, new tokens are appended to their histories.
    """

    def __init__(self) -> None:
        self._row_by_request: dict[Request, int] = {}
        self._arrays: dict[Request, tuple[NDArray[Any], ...]] = {}  # kept alive: rows point to them
        self._histories: dict[Request, _History] = {}  # only of requests with penalties
        self._free: list[int] = []
        self._table: Rows = np.zeros(0, dtype=ROW)
        # By row: `num_barred` is `_num_ends` until a request has `_min_tokens` output tokens.
        self._min_tokens: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._num_ends: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._last: Sequence[Request] | None = None  # of the previous step
        self._rows: Rows = np.zeros(0, dtype=ROW)
        self._last_indices: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._has_minimum = False  # whether any request of `_last` has `min_tokens`
        self._drafted: Rows = self._rows  # with the rows of drafts
        self._branched: list[NDArray[np.int32]] = []  # tokens up to the end of each branch
        self._masks: dict[Request, NDArray[np.uint32]] = {}  # only of requests with a constraint

    def __len__(self) -> int:
        return len(self._row_by_request)

    def rows(
        self,
        requests: Sequence[Request],
        slices: Sequence[Slice] | None = None,
        num_tokens: NDArray[Any] | None = None,
    ) -> Rows:
        """Return the native sampler's input for a step: an array with a `ROW` for each drawn token.

        Without `slices` there is one row for each request, in the order of the requests.

        `slices[i]`: the slice of `requests[i]`. It has rows for the prompt tokens to score, then a
        row for the next token, then a row for the token after each draft. `num_tokens`: the number
        of tokens of each request, if the caller knows it. The array and its pointers are valid
        until the next call, or until a request is forgotten.
        """
        if self._histories or requests != self._last:
            self._gather(requests)
        rows, row_indices = self._rows, self._last_indices
        if num_tokens is None:
            num_tokens = np.array([len(request.tokens) for request in requests], dtype=np.int64)
        if slices is not None:
            scored = np.array([slice_.num_scored for slice_ in slices])
            counts = scored + np.array([slice_.num_drawn for slice_ in slices])
            firsts = counts.cumsum() - counts + scored
            num_tokens = (num_tokens - firsts).repeat(counts) + np.arange(counts.sum())
            for slice_ in slices if self._histories else ():
                end = slice_.branches[0].first if slice_.branches else None
                self._write_history(slice_.request, slice_.drafts[:end])
            row_indices = row_indices.repeat(counts)
            rows = self._drafted = self._table.view(_WHOLE_ROW)[row_indices].view(ROW)
            self._branch(slices, firsts, rows, num_tokens)
            if scored.any():
                _set_scored_tokens(slices, firsts, rows)
        counters = num_tokens - rows["num_prompt"]
        rows["num_tokens"] = num_tokens
        rows["counter"] = counters
        if self._has_minimum:
            early = counters < self._min_tokens[row_indices]
            rows["num_barred"] = np.where(early, self._num_ends[row_indices], 0)
        if self._masks:
            self._mask(requests, slices, rows)
        return rows

    def _gather(self, requests: Sequence[Request]) -> None:
        row_by_request = self._row_by_request
        indices = list(map(row_by_request.get, requests))
        if None in indices:
            indices = [row_by_request[r] if r in row_by_request else self._add(r) for r in requests]
        if self._histories:
            for request in requests:
                self._write_history(request)
        self._last = requests
        self._last_indices = np.array(indices, dtype=np.intp)
        self._rows = self._table.view(_WHOLE_ROW)[self._last_indices].view(ROW)
        self._has_minimum = bool(self._min_tokens[self._last_indices].any())

    def forget(self, request: Request) -> None:
        """Drop a request's sampling parameters, if the table has them."""
        if request in self._row_by_request:
            self._last = None
            self._free.append(self._row_by_request.pop(request))
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
        index = self._row_by_request[request] = self._free.pop()
        self._arrays[request] = (bias_ids, bias_values, end_ids)
        self._min_tokens[index] = params.min_tokens
        self._num_ends[index] = end_ids.size

        row = self._table[index]
        row["tokens"] = row["mask"] = 0
        row["bias_ids"], row["bias_values"] = bias_ids.ctypes.data, bias_values.ctypes.data
        row["barred_ids"], row["num_bias"] = end_ids.ctypes.data, bias_ids.size
        row["seed"], row["num_prompt"] = request.seed & (2**64 - 1), request.num_prompt
        values = params.values
        row["temperature"], row["top_k"] = values.temperature, values.top_k
        row["top_p"], row["min_p"] = values.top_p, values.min_p
        row["repetition_penalty"] = max(values.repetition_penalty, MIN_PENALTY)
        row["frequency_penalty"] = params.frequency_penalty
        row["presence_penalty"] = params.presence_penalty
        row["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        row["given"] = NO_TOKEN

        if params.has_penalties:
            self._histories[request] = _History()
        if request.matcher is not None:
            self._masks[request] = np.zeros((1, request.matcher.num_words), dtype=np.uint32)
        return index

    def _grow(self) -> None:
        size = self._table.size
        self._free.extend(range(max(2 * size, 64) - 1, size - 1, -1))
        num_new = len(self._free)
        self._table = np.concatenate([self._table, np.zeros(num_new, dtype=ROW)])
        self._min_tokens = np.concatenate([self._min_tokens, np.zeros(num_new, dtype=np.int64)])
        self._num_ends = np.concatenate([self._num_ends, np.zeros(num_new, dtype=np.int32)])

    def _write_history(self, request: Request, drafts: Sequence[int] = ()) -> None:
        """Append new tokens and draft tokens to the history of a request with penalties."""
        history = self._histories.get(request)
        if history is None:
            return
        tokens = history.tokens
        del tokens[history.num_tokens :]  # drafts of an earlier step
        tokens.extend(request.tokens[history.num_tokens :])
        tokens.extend(drafts)
        history.num_tokens = len(request.tokens)
        self._table["tokens"][self._row_by_request[request]] = tokens.buffer_info()[0]

    def _branch(
        self, slices: Sequence[Slice], firsts: NDArray[Any], rows: Rows, num_tokens: NDArray[Any]
    ) -> None:
        """Set the token counts and histories in the rows of draft trees, branch by branch.

        `firsts`: the row of each slice's first drawn token.
        """
        self._branched = []
        for slice_, first in zip(slices, firsts.tolist(), strict=True):
            if not slice_.branches:
                continue
            count, request = len(slice_.drafts), slice_.request
            depths = np.array(depths_of(count, slice_.branches))
            num_tokens[first + 1 : first + 1 + count] = len(request.tokens) + 1 + depths
            if request not in self._histories:
                continue
            parents = parents_of(count, slice_.branches)
            for branch, end in branches_with_ends(count, slice_.branches):
                path = [slice_.drafts[i] for i in path_to(end - 1, parents)]
                tokens = np.array([*request.tokens, *path], np.int32)
                rows["tokens"][first + 1 + branch.first : first + 1 + end] = tokens.ctypes.data
                self._branched.append(tokens)

    def _mask(
        self, requests: Sequence[Request], slices: Sequence[Slice] | None, rows: Rows
    ) -> None:
        """Compute the masks of requests with a constraint, and write their addresses to rows."""
        slices_or_none: Sequence[Slice | None] = slices or [None] * len(requests)
        counts = [1 if slice_ is None else slice_.num_drawn for slice_ in slices_or_none]
        next_row = 0
        for request, slice_, count in zip(requests, slices_or_none, counts, strict=True):
            next_row += 0 if slice_ is None else slice_.num_scored
            request_rows = rows[next_row : next_row + count]
            next_row += count
            if request.matcher is None or not count:
                continue
            masks = self._masks[request]
            if len(masks) < count:
                masks = self._masks[request] = np.zeros((2 * count, masks.shape[1]), masks.dtype)
            masks = masks[:count]
            fill_masks(request, slice_, masks)
            request_rows["mask"] = masks.ctypes.data + masks.strides[0] * np.arange(
                count, dtype=np.uint64
            )
            for row, mask in zip(request_rows, masks, strict=True):
                if row["num_barred"] and allows_only(mask, request.end_ids):
                    row["num_barred"] = 0


def only_best(rows: Rows) -> NDArray[np.int32]:
    """Return 1 for each sampler row that needs only the largest logit, and 0 for all other rows.

    Greedy requests without penalties, constraint and log-probabilities need only the largest.
    """
    is_best_only = np.ones(len(rows), np.bool_)
    for name, value in NEUTRAL_VALUES.items():
        is_best_only &= rows[name] == value
    return is_best_only.astype(np.int32)


def _set_scored_tokens(slices: Sequence[Slice], firsts: NDArray[Any], rows: Rows) -> None:
    """Make the sampler report log-probabilities of prompt tokens, for requests that ask for them.

    `firsts`: the first row after each slice's scored rows.
    """
    for slice_, first in zip(slices, firsts.tolist(), strict=True):
        if slice_.num_scored:
            scored_rows = rows[first - slice_.num_scored : first]
            scored_rows["given"] = slice_.scored_tokens
            scored_rows["num_logprobs"] = slice_.request.params.prompt_logprobs


def read_results(results: Rows, rows: Rows) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return a step's drawn tokens and log-probabilities from the native sampler's results."""
    tokens: list[int] = results["token"].tolist()
    num_logprobs: list[int] = rows["num_logprobs"].tolist()
    if max(num_logprobs, default=-1) < 0:
        return tokens, [None] * len(tokens)
    logprobs = [
        _token_logprobs(results[i]) if count >= 0 and token != NO_TOKEN else None
        for i, (count, token) in enumerate(zip(num_logprobs, tokens, strict=True))
    ]
    return tokens, logprobs


def read_scores(results: Rows) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of prompt tokens from the native sampler's results.

    None for a row whose logits are all NaN or minus infinity.
    """
    return [None if result["token"] == NO_TOKEN else _token_logprobs(result) for result in results]


def _token_logprobs(result: np.void) -> TokenLogprobs:
    count = int(result["count"])
    return TokenLogprobs(
        float(result["logprob"]),
        tuple(result["top_ids"][:count].tolist()),
        tuple(result["top_logprobs"][:count].tolist()),
    )
