"""Draws tokens from logits: the integer sampler of ADR 0006 (backends/sampling/reference.py).

One Triton program handles one row. It reads the vocabulary in blocks: once for a greedy row, three
times for a random draw, and eight more times for each of top-k and top-p. All float32 operations
are the same as in the reference. Therefore the compiler must not fuse multiplications with
additions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

from twostroke.backends.gpu import sampling
from twostroke.backends.gpu.kernels.common import overlap_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_BLOCK: Final = 1024


def launch(
    gpu: Gpu, logits: Tensor, rows: Tensor, lists: Tensor, results: Tensor, work: Tensor
) -> None:
    """Launch the sampler: draw a token for each row, into `results`, int32 (rows, RESULT_INTS).

    `logits` are float32 (rows, vocab_size) and are not changed; `work` is memory of the same shape.
    `rows` and `lists`: see `sampling.SampleRows`.
    """
    _launch(gpu, _sample, logits, rows=rows, lists=lists, results=results, work=work)


def report(gpu: Gpu, logits: Tensor, rows: Tensor, results: Tensor) -> None:
    """Launch the kernel that writes the numbers for log-probabilities to `results`."""
    _launch(gpu, _report, logits, rows=rows, results=results)


def _launch(gpu: Gpu, kernel: Any, logits: Tensor, **tensors: Tensor) -> None:
    """Launch a sampling kernel with one program for each row of logits."""
    gpu.launch(
        kernel,
        (logits.shape[0],),
        logits=logits,
        **tensors,
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
    """Load logits of token ids; NaN counts as minus infinity, and -0 as 0."""
    x = tl.load(at + ids, ids < VOCAB, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)
    return tl.where(x == x, x, float("-inf"))  # noqa: PLR0124 - not for NaN


@triton.jit
def _key(x):
    """Convert float logits to unsigned integers that sort in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _weights(x, top, scale, min_weight):
    """Return sampling weights exp((x - top) / temperature) * 2^40 of logits x, as int64.

    0 for weights below `min_weight`.
    """
    is_even = top == float("inf")  # tokens with plus infinity have equal weights
    gap = tl.where(is_even, tl.where(x == top, 0.0, -64.0), x - tl.where(is_even, 0.0, top))
    power = tl.maximum(tl.where(is_even, gap, gap * scale), -64.0)
    exponent = (power + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest even integer
    fraction = power - exponent
    p = fraction * 0.00015461447765119374 + 0.0013390866806730628
    p = p * fraction + 0.009618056938052177
    p = p * fraction + 0.055503569543361664
    p = p * fraction + 0.24022650718688965
    p = p * fraction + 0.6931471824645996
    p = p * fraction + 1.0
    weight = p * ((exponent.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)  # times 2^40
    weight = tl.where(weight < 8388608.0, (weight + 8388608.0) - 8388608.0, weight)
    return tl.where(weight < min_weight, 0.0, weight).to(tl.int64)


@triton.jit
def _is_in_prefix(key, ids, min_key, last):
    """Return which tokens are among the likeliest tokens that top-k or top-p keeps.

    Kept tokens are sorted by key, then by id. The last kept token has the id `last` and the key
    `min_key`.
    """
    return (key > min_key) | ((key == min_key) & (ids <= last))


@triton.jit
def _prefix_masses(x, ids, bounds, numbers, COUNTS: tl.constexpr):
    """Return each token's mass among the likeliest tokens (prefix) that top-k or top-p keeps.

    With COUNTS (top-k) the mass is 1, else the token's weight. Tokens that are not kept have 0.
    """
    top, scale, min_weight, min_key, last = numbers
    is_kept = _is_in_prefix(_key(x), ids, min_key, last) & (ids < bounds)
    if COUNTS:
        return is_kept.to(tl.int64)
    return tl.where(is_kept, _weights(x, top, scale, min_weight), 0)


@triton.jit
def _total_mass(at, numbers, COUNTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits(at, ids, VOCAB)
        total += tl.sum(_prefix_masses(x, ids, VOCAB, numbers, COUNTS), 0)
    return total


@triton.jit
def _find_prefix_end(
    at, numbers, need, COUNTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the last token that top-k or top-p keeps; return its key and id.

    The kept tokens are the shortest prefix of the likeliest tokens whose mass is at least `need`.
    The key is searched four bits at a time, beginning with the highest bits.
    """
    digits = tl.arange(0, 16)
    prefix = tl.zeros((), tl.uint32)
    for turn in tl.static_range(8):
        masses = tl.zeros((16,), tl.int64)
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits(at, ids, VOCAB)
            key = _key(x) >> (28 - 4 * turn)
            mass = _prefix_masses(x, ids, VOCAB, numbers, COUNTS)
            mass = tl.where((key >> 4) == prefix, mass, 0)
            is_digit = (key & 15).to(tl.int32)[:, None] == digits[None, :]
            masses += tl.sum(tl.where(is_digit, mass[:, None], 0), 0)
        # The mass of tokens with this or a larger digit; the largest digit with enough mass.
        reached = tl.sum(tl.where(digits[None, :] >= digits[:, None], masses[None, :], 0), 1)
        digit = tl.max(tl.where(reached >= need, digits, 0), 0)
        need -= tl.sum(tl.where(digits > digit, masses, 0), 0)
        prefix = (prefix << 4) | digit.to(tl.uint32)
    top, scale, min_weight, _, last = numbers
    count = need  # number of tokens with this key that belong to the prefix, by id
    if not COUNTS:
        each = tl.zeros((), tl.int64)
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits(at, ids, VOCAB)
            mass = _prefix_masses(x, ids, VOCAB, numbers, COUNTS)
            each = tl.maximum(each, tl.max(tl.where(_key(x) == prefix, mass, 0), 0))
        count = (need + each - 1) // each
    equal = (top, scale, min_weight, prefix, last)
    return prefix, _find_token(at, equal, target=count - 1, EQUAL=1, VOCAB=VOCAB, BLOCK=BLOCK)


@triton.jit
def _find_token(
    at, numbers, target, EQUAL: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the first token id at which the cumulative mass, by id, exceeds `target`.

    With EQUAL, only tokens with the same key as the last kept token have a mass: 1.
    """
    token = tl.full((), -1, tl.int32)
    mass_before = tl.zeros((), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits(at, ids, VOCAB)
        if EQUAL:
            mass = ((_key(x) == numbers[3]) & (ids < VOCAB)).to(tl.int64)
        else:
            mass = _prefix_masses(x, ids, VOCAB, numbers, 0)
        block_mass = tl.sum(mass, 0)
        if (token < 0) & (mass_before + block_mass > target):
            token = start + tl.sum((mass_before + tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        mass_before += block_mass
    return token


@triton.jit
def _largest(at, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's largest logit and the lowest token id that has it.

    The id is -1 if the logit is minus infinity.
    """
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids_of_largest = tl.full((BLOCK,), -1, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits(at, ids, VOCAB)
        ids_of_largest = tl.where(x > largest, ids, ids_of_largest)
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    token = tl.min(
        tl.where((largest == top) & (ids_of_largest >= 0), ids_of_largest, 0x7FFFFFFF), 0
    )
    return top, tl.where(top == float("-inf"), -1, token)


@triton.jit
def _adjust(row, lists, source, work, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a row's logits to `work`, with bias, penalties, excluded ids and mask applied."""
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
        indices = start + tl.arange(0, BLOCK)
        ids = tl.load(lists + first + indices, indices < count, VOCAB)
        is_token = (ids >= 0) & (ids < VOCAB)
        bias = tl.load(lists + first + count + indices, is_token, 0).to(tl.float32, bitcast=True)
        tl.store(work + ids, tl.load(work + ids, is_token, 0.0) + bias, is_token)
    tl.debug_barrier()
    first, count = tl.load(row + 14), tl.load(row + 15)
    for start in range(0, count, BLOCK):
        indices = start + tl.arange(0, BLOCK)
        ids = tl.load(lists + first + indices, indices < count, VOCAB)
        is_token = (ids >= 0) & (ids < VOCAB)
        seen = tl.load(lists + first + count + indices, is_token, 0)
        tl.store(
            work + ids, _penalized(row, tl.load(work + ids, is_token, 0.0), seen // 2), is_token
        )
    tl.debug_barrier()
    first, count = tl.load(row + 16), tl.load(row + 17)
    for start in range(0, count, BLOCK):
        indices = start + tl.arange(0, BLOCK)
        ids = tl.load(lists + first + indices, indices < count, VOCAB)
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
    overlap_kernels(OVERLAPS)
    index = tl.program_id(0)
    row = rows + index * ROW_INTS
    result = results + index * RESULT_INTS
    forced_token = tl.load(row + 20)
    if forced_token >= 0:
        tl.store(result, forced_token)
        return
    at = logits + index.to(tl.int64) * VOCAB
    if (tl.load(row + 13) + tl.load(row + 15) + tl.load(row + 17) + tl.load(row + 18)) > 0:
        adjusted = work + index.to(tl.int64) * VOCAB
        _adjust(row, lists, source=at, work=adjusted, VOCAB=VOCAB, BLOCK=BLOCK)
        at = adjusted
    top, token = _largest(at, VOCAB, BLOCK)
    scale = _float(row)
    if (token >= 0) & (scale > 0.0):
        min_key, last = tl.zeros((), tl.uint32), tl.full((), VOCAB, tl.int32)
        top_k = tl.load(row + 8)
        min_weight = tl.zeros((), tl.float32)
        if (top_k > 0) & (top_k < VOCAB):
            numbers = (top, scale, min_weight, min_key, last)
            min_key, last = _find_prefix_end(
                at, numbers, need=top_k.to(tl.int64), COUNTS=1, VOCAB=VOCAB, BLOCK=BLOCK,
            )  # fmt: skip
        min_weight = _float(row + 1)
        numbers = (top, scale, min_weight, min_key, last)
        total = _total_mass(at, numbers, 0, VOCAB, BLOCK)
        top_p = _long(row + 2).to(tl.float64, bitcast=True)
        if top_p < 1.0:
            need = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            need = tl.minimum(need, total)
            min_key, last = _find_prefix_end(
                at, numbers, need=need, COUNTS=0, VOCAB=VOCAB, BLOCK=BLOCK
            )
            numbers = (top, scale, min_weight, min_key, last)
            total = _total_mass(at, numbers, 0, VOCAB, BLOCK)
        counter = _long(row + 6)
        low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
        zero = tl.zeros((), tl.uint32)
        first, second, _, _ = tl.philox(_long(row + 4), low, high, zero, zero)
        bits = first.to(tl.uint64) | (second.to(tl.uint64) << 32)
        target = tl.umulhi(bits, total.to(tl.uint64)).to(tl.int64)
        token = _find_token(at, numbers, target=target, EQUAL=0, VOCAB=VOCAB, BLOCK=BLOCK)
    tl.store(result, token)


@triton.jit
def _report(
    logits, rows, results,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, ROW_INTS: tl.constexpr, RESULT_INTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    index = tl.program_id(0)
    row = rows + index * ROW_INTS
    result = results + index * RESULT_INTS
    num_top = tl.load(row + 19)
    token = tl.load(result)
    if (num_top < 0) | (token < 0):
        return
    at = logits + index.to(tl.int64) * VOCAB
    top, likeliest = _largest(at, VOCAB, BLOCK)
    if (likeliest < 0) | (token >= VOCAB):
        tl.store(result, -1)
        return
    zero, no_key = tl.zeros((), tl.float32), tl.zeros((), tl.uint32)
    last = tl.full((), VOCAB, tl.int32)
    numbers = (top, zero + 1.4426950408889634, zero, no_key, last)
    total = _total_mass(at, numbers, 0, VOCAB, BLOCK)
    total = tl.where(top == float("inf"), total >> 40, total)
    tl.store(result + 2, _logits(at, token, VOCAB).to(tl.int32, bitcast=True))
    tl.store(result + 3, top.to(tl.int32, bitcast=True))
    tl.store(result + 4, total.to(tl.int32))
    tl.store(result + 5, (total >> 32).to(tl.int32))
    min_key = no_key
    if (num_top > 0) & (num_top < VOCAB):
        min_key, last = _find_prefix_end(
            at, numbers, need=num_top.to(tl.int64), COUNTS=1, VOCAB=VOCAB, BLOCK=BLOCK,
        )  # fmt: skip
    count = tl.zeros((), tl.int32)
    if num_top > 0:
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits(at, ids, VOCAB)
            is_top = _is_in_prefix(_key(x), ids, min_key, last) & (x > float("-inf"))
            num_top_here = tl.sum(is_top.to(tl.int32), 0)
            if num_top_here > 0:
                slots = count + tl.cumsum(is_top.to(tl.int32), 0) - 1
                tl.store(result + 6 + slots, ids, is_top)
                tl.store(result + 26 + slots, x.to(tl.int32, bitcast=True), is_top)
            count += num_top_here
    tl.store(result + 1, count)
