"""The input of the GPU's sampler as flat int32 arrays, and its results."""

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

ROW_INTS: Final = 24  # numbers of a row, at these offsets
SCALE, MIN_WEIGHT, TOP_P, SEED, COUNTER, TOP_K = 0, 1, 2, 4, 6, 8
REPETITION, FREQUENCY, PRESENCE = 9, 10, 11
BIAS, SEEN, BARRED, MASK, NUM_TOP, FORCED_TOKEN = 12, 14, 16, 18, 19, 20

# Numbers of a result: token, number of top tokens, the token's logit, the largest logit, the sum of
# weights (two numbers), and the ids and logits of the top tokens.
RESULT_INTS: Final = 48
TOKEN, COUNT, LOGIT, LARGEST, WEIGHT, TOP_IDS, TOP_LOGITS = 0, 1, 2, 3, 4, 6, 26


# The columns of `sampling.rows.ROW` that `sample_rows` converts: all of them, as a test checks. A
# new sampling option needs its number here and its effect in `kernels/sampler.py`.
CONVERTED_COLUMNS: Final = frozenset(
    {
        *("tokens", "bias_ids", "bias_values", "barred_ids", "mask", "seed", "counter"),
        *("num_tokens", "num_prompt", "temperature", "top_p", "min_p", "top_k"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("num_bias", "num_barred", "num_logprobs", "given"),
    }
)


class SampleRows(Frozen, eq=False):
    """The sampling parameters of a step's rows as int32 arrays for GPU kernels.

    `rows` are (rows, ROW_INTS). A row refers to its lists in `lists` by offset and length. A list
    has ids, then a value for each id: the bias of a logit (float32), or twice the count of a token
    in the output, plus 1 if the token is in the prompt. Lists of excluded ids and masks have no
    values. `lists` begins with an unused 0.
    """

    rows: Ints
    lists: Ints

    @property
    def reports(self) -> bool:
        """Return whether any row of the step asks for log-probabilities."""
        return bool((self.rows[:, NUM_TOP] >= 0).any())


def sample_rows(rows: Rows, mask_words: int) -> SampleRows:
    """Convert sampling parameters from `sampling.rows.RowTable` for the GPU's kernels.

    `mask_words`: the words of a constraint's mask.
    """
    out = np.zeros((len(rows), ROW_INTS), np.int32)
    greedy = rows["temperature"] == 0
    with np.errstate(divide="ignore"):
        scale = np.minimum(math.log2(math.e) / rows["temperature"], 1e30)
    _write_words(out, SCALE, np.where(greedy, 0.0, scale).astype(np.float32))
    _write_words(out, MIN_WEIGHT, _min_weights(rows["min_p"]))
    for index, name in ((TOP_P, "top_p"), (SEED, "seed"), (COUNTER, "counter"), (TOP_K, "top_k")):
        _write_words(out, index, rows[name])
    for index, name in (
        (REPETITION, "repetition"),
        (FREQUENCY, "frequency"),
        (PRESENCE, "presence"),
    ):
        _write_words(out, index, rows[f"{name}_penalty"])
    out[:, NUM_TOP], out[:, FORCED_TOKEN] = rows["num_logprobs"], rows["given"]
    lists = _Lists()
    penalized = rows["repetition_penalty"] != 1
    penalized |= (rows["frequency_penalty"] != 0) | (rows["presence_penalty"] != 0)
    special = penalized | (rows["num_bias"] > 0) | (rows["num_barred"] > 0) | (rows["mask"] != 0)
    for index in np.flatnonzero(special & (rows["given"] == NO_TOKEN)).tolist():
        row = rows[index]
        count = int(row["num_bias"])
        bias = _read_list(row["bias_values"], count, np.float32).view(np.int32)
        out[index, BIAS : BIAS + 2] = lists.add(_read_list(row["bias_ids"], count), bias)
        if penalized[index]:
            out[index, SEEN : SEEN + 2] = lists.add(*_seen_tokens(row))
        barred = _read_list(row["barred_ids"], int(row["num_barred"]))
        out[index, BARRED : BARRED + 2] = lists.add(barred)
        if row["mask"]:
            out[index, MASK] = lists.add(_read_list(row["mask"], mask_words))[0]
    return SampleRows(out, np.concatenate(lists.arrays))


def read_results(
    results: Ints, num_logprobs: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return the drawn tokens of a step, and their log-probabilities, from the GPU's results.

    `results` are (rows, RESULT_INTS). `num_logprobs`: the number of top tokens to report for each
    row; a row with -1 has no log-probabilities.
    """
    tokens: list[int] = results[:, TOKEN].tolist()
    return tokens, [
        _logprobs(result) if count >= 0 and token != NO_TOKEN else None
        for result, count, token in zip(results, num_logprobs, tokens, strict=True)
    ]


def _logprobs(result: Ints) -> TokenLogprobs:
    count = int(result[COUNT])
    logit, largest = (float(x) for x in result[LOGIT : LARGEST + 1].view(np.float32))
    total = int(result[WEIGHT : WEIGHT + 2].view(np.int64)[0])
    # If the largest logit is plus infinity, the sum is the number of such tokens.
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
        """Append arrays of the same length; return the first array's offset, and the length."""
        first, size = self._size, len(arrays[0])
        self.arrays += [array.view(np.int32) for array in arrays]
        self._size += len(arrays) * size
        return first, size


def _read_list(pointer: Any, count: int, dtype: Any = np.int32) -> NDArray[Any]:
    if not count:
        return np.zeros(0, dtype)
    memory = (ctypes.c_char * (4 * count)).from_address(int(pointer))
    array: NDArray[Any] = np.frombuffer(memory, dtype)  # type: ignore[call-overload]
    return array


def _seen_tokens(row: Any) -> tuple[Ints, Ints]:
    tokens = _read_list(row["tokens"], int(row["num_tokens"]))
    amounts = np.where(np.arange(len(tokens)) < row["num_prompt"], 0, 2)
    ids, positions = np.unique(tokens, return_inverse=True)
    counts = np.bincount(positions, amounts, len(ids)).astype(np.int32)
    counts[positions[: row["num_prompt"]]] |= 1
    if row["repetition_penalty"] == 1:
        ids, counts = ids[counts > 1], counts[counts > 1]
    return ids.astype(np.int32), counts


def _min_weights(min_p: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the smallest float32 weights that are at least `min_p` times the largest weight."""
    share = np.minimum(min_p, 1.0) * UNIT
    rounded = share.astype(np.float32)
    return np.where(
        rounded.astype(np.float64) < share, np.nextafter(rounded, np.float32(np.inf)), rounded
    )


def _write_words(out: Ints, offset: int, values: NDArray[Any]) -> None:
    words = np.ascontiguousarray(values)[:, None].view(np.int32)
    out[:, offset : offset + words.shape[1]] = words
