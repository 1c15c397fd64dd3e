"""Draws tokens from logits: the integer sampler of ADR 0006 (backends/sampling/reference.py).

One program does a row: it goes over the vocabulary in blocks, once for a greedy row, three times
for a draw, and eight times more for each of top-k and top-p. All float32 operations are those of
the reference, one by one, so these kernels must not be contracted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

from twostroke.backends.gpu import sampling
from twostroke.backends.gpu.kernels.common import begin

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_BLOCK: Final = 1024


def launch(
    gpu: Gpu, logits: Tensor, rows: Tensor, lists: Tensor, results: Tensor, work: Tensor
) -> None:
    """Write the token of each row into `results` int32 (rows, RESULT_INTS).

    `logits` are float32 (rows, vocab_size) and stay as they are; `work` has their shape. `rows`
    and `lists` are those of `sampling.SampleRows`.
    """
    _launch(gpu, _sample, logits, rows, lists, results, work)


def report(gpu: Gpu, logits: Tensor, rows: Tensor, results: Tensor) -> None:
    """Add to the results of rows what their log-probabilities are made of."""
    _launch(gpu, _report, logits, rows, results)


def _launch(gpu: Gpu, kernel: Any, logits: Tensor, *others: Tensor) -> None:
    """Launch a program for each row."""
    gpu.launch(
        kernel,
        (logits.shape[0],),
        logits,
        *others,
        num_warps=16,
        may_contract=False,
        max_registers=128,
        VOCAB=logits.shape[1],
        BLOCK=_BLOCK,
        ROW_INTS=sampling.ROW_INTS,
        RESULT_INTS=sampling.RESULT_INTS,
    )


@triton.jit
def _float(at):
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def _long(at):
    return tl.load(at).to(tl.uint32, bitcast=True).to(tl.uint64) | (
        tl.load(at + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    )


@triton.jit
def _logits(at, ids, VOCAB: tl.constexpr):
    """Load logits; NaN counts as minus infinity, and -0 as 0."""
    x = tl.load(at + ids, ids < VOCAB, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)
    return tl.where(x == x, x, float("-inf"))  # noqa: PLR0124 - not for NaN


@triton.jit
def _key(x):
    """Return integers in the order of `x`."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _weights(x, top, scale, least):
    """Return exp((x - top) / temperature) * 2^40 rounded to integers, as int64; 0 below `least`."""
    is_even = top == float("inf")  # those with plus infinity share the whole
    gap = tl.where(is_even, tl.where(x == top, 0.0, -64.0), x - tl.where(is_even, 0.0, top))
    power = tl.maximum(tl.where(is_even, gap, gap * scale), -64.0)
    whole = (power + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest even integer
    fraction = power - whole
    p = fraction * 0.00015461447765119374 + 0.0013390866806730628
    p = p * fraction + 0.009618056938052177
    p = p * fraction + 0.055503569543361664
    p = p * fraction + 0.24022650718688965
    p = p * fraction + 0.6931471824645996
    p = p * fraction + 1.0
    weight = p * ((whole.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)  # times 2^40
    weight = tl.where(weight < 8388608.0, (weight + 8388608.0) - 8388608.0, weight)
    return tl.where(weight < least, 0.0, weight).to(tl.int64)


@triton.jit
def _is_kept(key, ids, least_key, last):
    """Return whether tokens are in the prefix that ends with token `last`, of key `least_key`."""
    return (key > least_key) | ((key == least_key) & (ids <= last))


@triton.jit
def _masses(x, ids, bounds, numbers, COUNTS: tl.constexpr):
    """Return what each token of the prefix counts for: 1, or its weight."""
    top, scale, least, least_key, last = numbers
    is_kept = _is_kept(_key(x), ids, least_key, last) & (ids < bounds)
    if COUNTS:
        return is_kept.to(tl.int64)
    return tl.where(is_kept, _weights(x, top, scale, least), 0)


@triton.jit
def _total(at, numbers, COUNTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits(at, ids, VOCAB)
        total += tl.sum(_masses(x, ids, VOCAB, numbers, COUNTS), 0)
    return total


@triton.jit
def _cut(at, numbers, need, COUNTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the last token, and its key, of the shortest prefix whose mass is at least `need`.

    The key is found from its highest four bits on.
    """
    digits = tl.arange(0, 16)
    prefix = tl.zeros((), tl.uint32)
    for turn in tl.static_range(8):
        masses = tl.zeros((16,), tl.int64)
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits(at, ids, VOCAB)
            key = _key(x) >> (28 - 4 * turn)
            mass = _masses(x, ids, VOCAB, numbers, COUNTS)
            mass = tl.where((key >> 4) == prefix, mass, 0)
            is_digit = (key & 15).to(tl.int32)[:, None] == digits[None, :]
            masses += tl.sum(tl.where(is_digit, mass[:, None], 0), 0)
        # The mass from each digit on, and the largest digit from which it is enough.
        reached = tl.sum(tl.where(digits[None, :] >= digits[:, None], masses[None, :], 0), 1)
        digit = tl.max(tl.where(reached >= need, digits, 0), 0)
        need -= tl.sum(tl.where(digits > digit, masses, 0), 0)
        prefix = (prefix << 4) | digit.to(tl.uint32)
    top, scale, least, _, last = numbers
    count = need  # of the tokens with this key, by id
    if not COUNTS:
        each = tl.zeros((), tl.int64)
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits(at, ids, VOCAB)
            mass = _masses(x, ids, VOCAB, numbers, COUNTS)
            each = tl.maximum(each, tl.max(tl.where(_key(x) == prefix, mass, 0), 0))
        count = (need + each - 1) // each
    equal = (top, scale, least, prefix, last)
    return prefix, _find(at, equal, count - 1, 1, VOCAB, BLOCK)


@triton.jit
def _find(
    at, numbers, target, EQUAL: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the id at which the running sum of masses passes `target`.

    With EQUAL a token counts 1 if it has the key of the prefix, else its weight.
    """
    token = tl.full((), -1, tl.int32)
    passed = tl.zeros((), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits(at, ids, VOCAB)
        if EQUAL:
            mass = ((_key(x) == numbers[3]) & (ids < VOCAB)).to(tl.int64)
        else:
            mass = _masses(x, ids, VOCAB, numbers, 0)
        own = tl.sum(mass, 0)
        if (token < 0) & (passed + own > target):
            token = start + tl.sum((passed + tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        passed += own
    return token


@triton.jit
def _largest(at, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit and the lowest id that has it, -1 for minus infinity."""
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    found = tl.full((BLOCK,), -1, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits(at, ids, VOCAB)
        found = tl.where(x > largest, ids, found)
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    token = tl.min(tl.where((largest == top) & (found >= 0), found, 0x7FFFFFFF), 0)
    return top, tl.where(top == float("-inf"), -1, token)


@triton.jit
def _adjust(row, lists, source, work, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Copy logits with bias, penalties, barred ids and the mask applied."""
    mask = tl.load(row + 18)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(source + ids, ids < VOCAB, 0.0)
        if mask > 0:
            words = tl.load(lists + mask + ids // 32, ids < VOCAB, 0)
            x = tl.where(((words >> (ids % 32)) & 1) == 1, x, float("-inf"))
        tl.store(work + ids, x, ids < VOCAB)
    tl.debug_barrier()
    first, count = tl.load(row + 12), tl.load(row + 13)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(lists + first + places, places < count, VOCAB)
        own = (ids >= 0) & (ids < VOCAB)
        bias = tl.load(lists + first + count + places, own, 0).to(tl.float32, bitcast=True)
        tl.store(work + ids, tl.load(work + ids, own, 0.0) + bias, own)
    tl.debug_barrier()
    first, count = tl.load(row + 14), tl.load(row + 15)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(lists + first + places, places < count, VOCAB)
        own = (ids >= 0) & (ids < VOCAB)
        seen = tl.load(lists + first + count + places, own, 0)
        tl.store(work + ids, _penalized(row, tl.load(work + ids, own, 0.0), seen // 2), own)
    tl.debug_barrier()
    first, count = tl.load(row + 16), tl.load(row + 17)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(lists + first + places, places < count, VOCAB)
        tl.store(work + ids, float("-inf"), (ids >= 0) & (ids < VOCAB))
    tl.debug_barrier()


@triton.jit
def _penalized(row, x, num_output):
    penalty = _float(row + 9)
    x = tl.where(penalty == 1.0, x, tl.where(x > 0.0, tl.div_rn(x, penalty), x * penalty))
    rest = x.to(tl.float64) - _float(row + 10).to(tl.float64) * num_output.to(tl.float64)
    rest -= _float(row + 11).to(tl.float64)
    return tl.where(num_output > 0, rest.to(tl.float32), x)


@triton.jit
def _sample(
    logits, rows, lists, results, work,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROW_INTS: tl.constexpr, RESULT_INTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    index = tl.program_id(0)
    row = rows + index * ROW_INTS
    result = results + index * RESULT_INTS
    given = tl.load(row + 20)
    if given >= 0:
        tl.store(result, given)
        return
    at = logits + index.to(tl.int64) * VOCAB
    if (tl.load(row + 13) + tl.load(row + 15) + tl.load(row + 17) + tl.load(row + 18)) > 0:
        own = work + index.to(tl.int64) * VOCAB
        _adjust(row, lists, at, own, VOCAB, BLOCK)
        at = own
    top, token = _largest(at, VOCAB, BLOCK)
    scale = _float(row)
    if (token >= 0) & (scale > 0.0):
        least_key, last = tl.zeros((), tl.uint32), tl.full((), VOCAB, tl.int32)
        top_k = tl.load(row + 8)
        least = tl.zeros((), tl.float32)
        if (top_k > 0) & (top_k < VOCAB):
            numbers = (top, scale, least, least_key, last)
            least_key, last = _cut(at, numbers, top_k.to(tl.int64), 1, VOCAB, BLOCK)
        least = _float(row + 1)
        numbers = (top, scale, least, least_key, last)
        total = _total(at, numbers, 0, VOCAB, BLOCK)
        top_p = _long(row + 2).to(tl.float64, bitcast=True)
        if top_p < 1.0:
            need = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            need = tl.minimum(need, total)
            least_key, last = _cut(at, numbers, need, 0, VOCAB, BLOCK)
            numbers = (top, scale, least, least_key, last)
            total = _total(at, numbers, 0, VOCAB, BLOCK)
        counter = _long(row + 6)
        low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
        zero = tl.zeros((), tl.uint32)
        first, second, _, _ = tl.philox(_long(row + 4), low, high, zero, zero)
        bits = first.to(tl.uint64) | (second.to(tl.uint64) << 32)
        target = tl.umulhi(bits, total.to(tl.uint64)).to(tl.int64)
        token = _find(at, numbers, target, 0, VOCAB, BLOCK)
    tl.store(result, token)


@triton.jit
def _report(
    logits, rows, results,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROW_INTS: tl.constexpr, RESULT_INTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    index = tl.program_id(0)
    row = rows + index * ROW_INTS
    result = results + index * RESULT_INTS
    num_top = tl.load(row + 19)
    token = tl.load(result)
    if (num_top < 0) | (token < 0):
        return
    at = logits + index.to(tl.int64) * VOCAB
    top, found = _largest(at, VOCAB, BLOCK)
    if (found < 0) | (token >= VOCAB):
        tl.store(result, -1)
        return
    zero, none = tl.zeros((), tl.float32), tl.zeros((), tl.uint32)
    last = tl.full((), VOCAB, tl.int32)
    numbers = (top, zero + 1.4426950408889634, zero, none, last)
    total = _total(at, numbers, 0, VOCAB, BLOCK)
    total = tl.where(top == float("inf"), total >> 40, total)
    tl.store(result + 2, _logits(at, token, VOCAB).to(tl.int32, bitcast=True))
    tl.store(result + 3, top.to(tl.int32, bitcast=True))
    tl.store(result + 4, total.to(tl.int32))
    tl.store(result + 5, (total >> 32).to(tl.int32))
    least_key = none
    if (num_top > 0) & (num_top < VOCAB):
        least_key, last = _cut(at, numbers, num_top.to(tl.int64), 1, VOCAB, BLOCK)
    count = tl.zeros((), tl.int32)
    if num_top > 0:
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits(at, ids, VOCAB)
            is_top = _is_kept(_key(x), ids, least_key, last) & (x > float("-inf"))
            own = tl.sum(is_top.to(tl.int32), 0)
            if own > 0:
                place = count + tl.cumsum(is_top.to(tl.int32), 0) - 1
                tl.store(result + 6 + place, ids, is_top)
                tl.store(result + 26 + place, x.to(tl.int32, bitcast=True), is_top)
            count += own
    tl.store(result + 1, count)
