"""Rows of the sampler as its kernels read them: one flat array of int32, and what comes back."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.backends.sampling.reference import MIN_LOGPROB, UNIT
from twostroke.core.frozen import Frozen
from twostroke.core.step import NO_TOKEN, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends.sampling.rows import Rows

    Ints = NDArray[np.int32]

ROW_INTS: Final = 24  # of a row, at these places
SCALE, LEAST, TOP_P, SEED, COUNTER, TOP_K = 0, 1, 2, 4, 6, 8
REPETITION, FREQUENCY, PRESENCE = 9, 10, 11
BIAS, SEEN, BARRED, MASK, NUM_TOP, GIVEN = 12, 14, 16, 18, 19, 20

RESULT_INTS: Final = 48  # token, count, its logit, the largest, the sum of weights; then the top
TOKEN, COUNT, LOGIT, LARGEST, WEIGHT, TOP_IDS, TOP_LOGITS = 0, 1, 2, 3, 4, 6, 26


class SampleRows(Frozen, eq=False):
    """`rows` int32 (rows, ROW_INTS), and `lists`, into which they point.

    A list is its ids, then a value for each: what is added to a logit (float32), or how often the
    history has a token (twice the count in the output, plus 1 if it is in the prompt). Lists of
    barred ids and masks have no values. The first 0 of `lists` is not used.
    """

    rows: Ints
    lists: Ints

    @property
    def reports(self) -> bool:
        """Whether any row asks for log-probabilities."""
        return bool((self.rows[:, NUM_TOP] >= 0).any())


def sample_rows(rows: Rows, mask_words: int) -> SampleRows:
    """Return rows of `sample.rows.RowTable` for the kernels; masks have `mask_words` words."""
    out = np.zeros((len(rows), ROW_INTS), np.int32)
    greedy = rows["temperature"] == 0
    with np.errstate(divide="ignore"):
        scale = np.minimum(math.log2(math.e) / rows["temperature"], 1e30)
    _put(out, SCALE, np.where(greedy, 0.0, scale).astype(np.float32))
    _put(out, LEAST, _least(rows["min_p"]))
    for place, name in ((TOP_P, "top_p"), (SEED, "seed"), (COUNTER, "counter"), (TOP_K, "top_k")):
        _put(out, place, rows[name])
    for place, name in (
        (REPETITION, "repetition"),
        (FREQUENCY, "frequency"),
        (PRESENCE, "presence"),
    ):
        _put(out, place, rows[f"{name}_penalty"])
    out[:, NUM_TOP], out[:, GIVEN] = rows["num_logprobs"], rows["given"]
    lists = _Lists()
    penalized = rows["repetition_penalty"] != 1
    penalized |= (rows["frequency_penalty"] != 0) | (rows["presence_penalty"] != 0)
    special = penalized | (rows["num_bias"] > 0) | (rows["num_barred"] > 0) | (rows["mask"] != 0)
    for place in np.flatnonzero(special & (rows["given"] == NO_TOKEN)).tolist():
        row = rows[place]
        count = int(row["num_bias"])
        bias = _at(row["bias_values"], count, np.float32).view(np.int32)
        out[place, BIAS : BIAS + 2] = lists.add(_at(row["bias_ids"], count), bias)
        if penalized[place]:
            out[place, SEEN : SEEN + 2] = lists.add(*_seen(row))
        barred = _at(row["barred_ids"], int(row["num_barred"]))
        out[place, BARRED : BARRED + 2] = lists.add(barred)
        if row["mask"]:
            out[place, MASK] = lists.add(_at(row["mask"], mask_words))[0]
    return SampleRows(out, np.concatenate(lists.arrays))


def read_results(
    results: Ints, asked: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return the tokens of `results` (rows, RESULT_INTS), and how likely where `asked` is not -1.

    `asked` are the rows' `num_logprobs`.
    """
    tokens: list[int] = results[:, TOKEN].tolist()
    return tokens, [
        _logprobs(result) if count >= 0 and token != NO_TOKEN else None
        for result, count, token in zip(results, asked, tokens, strict=True)
    ]


def _logprobs(result: Ints) -> TokenLogprobs:
    count = int(result[COUNT])
    logit, largest = (float(x) for x in result[LOGIT : LARGEST + 1].view(np.float32))
    total = int(result[WEIGHT : WEIGHT + 2].view(np.int64)[0])
    # With plus infinity as the largest, the sum counts the tokens that have it.
    log_total = math.log(total if math.isinf(largest) else total / UNIT)
    logits = result[TOP_LOGITS : TOP_LOGITS + count].view(np.float32)
    ids = result[TOP_IDS : TOP_IDS + count]
    order = np.lexsort((ids, -logits))

    def logprob(value: float) -> float:
        gap = 0.0 if value == largest else value - largest
        return max(gap - log_total, MIN_LOGPROB)

    top = tuple(logprob(x) for x in logits[order].tolist())
    return TokenLogprobs(logprob(logit), tuple(ids[order].tolist()), top)


class _Lists:
    def __init__(self) -> None:
        self.arrays: list[Ints] = [np.zeros(1, np.int32)]
        self._size = 1

    def add(self, *arrays: NDArray[Any]) -> tuple[int, int]:
        """Append arrays of one length; return where they begin, and the length."""
        first, size = self._size, len(arrays[0])
        self.arrays += [array.view(np.int32) for array in arrays]
        self._size += len(arrays) * size
        return first, size


def _at(pointer: Any, count: int, dtype: Any = np.int32) -> NDArray[Any]:
    if not count:
        return np.zeros(0, dtype)
    memory = (ctypes.c_char * (4 * count)).from_address(int(pointer))
    found: NDArray[Any] = np.frombuffer(memory, dtype)  # type: ignore[call-overload]
    return found


def _seen(row: Any) -> tuple[Ints, Ints]:
    tokens = _at(row["tokens"], int(row["num_tokens"]))
    amounts = np.where(np.arange(len(tokens)) < row["num_prompt"], 0, 2)
    ids, places = np.unique(tokens, return_inverse=True)
    counts = np.bincount(places, amounts, len(ids)).astype(np.int32)
    counts[places[: row["num_prompt"]]] |= 1
    if row["repetition_penalty"] == 1:
        ids, counts = ids[counts > 1], counts[counts > 1]
    return ids.astype(np.int32), counts


def _least(min_p: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the smallest weights, float32, that are not below `min_p` times the largest."""
    share = np.minimum(min_p, 1.0) * UNIT
    least = share.astype(np.float32)
    return np.where(
        least.astype(np.float64) < share, np.nextafter(least, np.float32(np.inf)), least
    )


def _put(out: Ints, place: int, values: NDArray[Any]) -> None:
    words = np.ascontiguousarray(values)[:, None].view(np.int32)
    out[:, place : place + words.shape[1]] = words
