"""What sampling means: one row of logits to one token, in plain NumPy.

The native sampler (native/sample) draws the same token bit for bit on every instruction set. Three
choices make that possible:

- Probabilities are compared and summed as integers. A token's weight is
  `exp((logit - top) / temperature) * 2^40`, rounded, from a fixed sequence of float32 operations
  (`weights`). Integer sums do not depend on their order. A token less likely than the likeliest by
  a factor of 2^41 or more has weight 0 and is never drawn; weights are right to a few parts in a
  million, far closer than a model's logits.
- Every truncation keeps a prefix of one order: larger logit first, lower id among equals.
- The draw inverts the cumulative weight over ascending ids at `floor(bits * total / 2^64)`, where
  `bits` are Philox4x32-10 keyed by the request's seed at the index of the output token. Nothing
  else is random, so the batch, preemption and the order of work do not matter.

A logit that is NaN counts as minus infinity: a damaged value is never chosen. A row in which
nothing is above minus infinity (all NaN, or all barred) gives `NO_TOKEN`: its request fails, others
do not. Logits of plus infinity share the whole probability evenly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.draft_tree import ROOT, parents_of, path_to
from twostroke.core.step import NO_TOKEN, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.sampling import SamplingParams
    from twostroke.core.step import Slice, StepPlan


UNIT = 2**40  # the weight of the likeliest token
LEAST_LOGPROB = -9999.0  # JSON has no infinity
LEAST_PENALTY = float(np.finfo(np.float32).tiny)

_POWER_OF_TWO = tuple(  # (2^f - 1) / f on [-1/2, 1/2], highest power first
    np.float32(float.fromhex(c))
    for c in (
        "0x1.444004p-13",
        "0x1.5f0896p-10",
        "0x1.3b2a1cp-7",
        "0x1.c6af6cp-5",
        "0x1.ebfbe0p-3",
        "0x1.62e430p-1",
    )
)


_overflow_is_infinite = np.errstate(over="ignore")  # as IEEE arithmetic, and C++, have it


def draw_all(
    plan: StepPlan, logits: NDArray[np.float32]
) -> tuple[list[tuple[int, TokenLogprobs | None]], list[TokenLogprobs | None]]:
    """Draw all tokens of a step, as `draw`; return them, and the scores of its scored rows.

    `logits` (rows, vocab_size) are those of all rows that have some, in the plan's order.
    """
    drawn: list[tuple[int, TokenLogprobs | None]] = []
    scores: list[TokenLogprobs | None] = []
    rows = iter(logits)
    for part in plan.slices:
        scores += [score(part.request, next(rows), token) for token in part.scored_tokens]
        before_each = zip(_drafts_before(part), _masks(part), strict=True)
        drawn += [draw(part.request, next(rows), drafts, mask) for drafts, mask in before_each]
    assert next(rows, None) is None, "more rows of logits than tokens"
    return drawn, scores


def _masks(part: Slice) -> Sequence[NDArray[np.uint32] | None]:
    """Return the mask of each token to be drawn, if there is a constraint."""
    matcher = part.request.matcher
    if matcher is None or not part.samples:
        return [None] * part.num_drawn
    masks = np.zeros((part.num_drawn, matcher.num_words), np.uint32)
    fill_masks(part.request, part, masks)
    return list(masks)


def _drafts_before(part: Slice) -> list[list[int]]:
    """Return the drafts that each token to be drawn follows."""
    parents = parents_of(len(part.drafts), part.branches)
    drawn = range(ROOT, part.num_drawn + ROOT)  # each after the draft with this index
    return [[part.drafts[i] for i in path_to(draft, parents)] for draft in drawn]


def draw(
    request: Request,
    logits: NDArray[np.float32],
    drafts: Sequence[int] = (),
    mask: NDArray[np.uint32] | None = None,
) -> tuple[int, TokenLogprobs | None]:
    """Draw the token after a request's newest one, or after `drafts` that follow it.

    Only those that are in the `mask`, if there is one, may be drawn (`core.constraint.Matcher`).
    `logits`, of shape (vocab_size,), are left as they are. Returns the token, or `NO_TOKEN` where
    nothing may be drawn, and its log-probabilities if the request asked for them (None with
    `NO_TOKEN`).
    """
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    adjusted = adjust(request, logits, drafts, mask)
    if request.params.is_greedy:
        token = _likeliest(adjusted)
    else:
        ids, weight = distribution(request.params, adjusted)
        token = pick(ids, weight, random_bits(request.seed, request.num_output + len(drafts)))
    if token == NO_TOKEN or request.params.logprobs is None:
        return token, None
    return token, token_logprobs(logits, token, request.params.logprobs)


def score(request: Request, logits: NDArray[np.float32], token: int) -> TokenLogprobs | None:
    """Return how likely a prompt's `token` was, as the request asked; None if nothing could be."""
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    num_top = request.params.prompt_logprobs
    if num_top is None or _likeliest(logits) == NO_TOKEN:
        return None
    return token_logprobs(logits, token, num_top)


@_overflow_is_infinite
def adjust(
    request: Request,
    logits: NDArray[np.float32],
    drafts: Sequence[int] = (),
    mask: NDArray[np.uint32] | None = None,
) -> NDArray[np.float32]:
    """Return a copy of `logits` with bias, penalties, barred end tokens and the mask applied.

    The `drafts` count as if they were the end of the request's output.

    End tokens are not barred where the mask leaves nothing else.

    Repetition looks at prompt and output: positive logits are divided by the penalty, others
    multiplied. Frequency and presence look at the output alone. Float32 after each step.
    """
    params, repetition = request.params, request.params.values.repetition_penalty
    logits = logits.copy()
    for token, bias in params.logit_bias.items():
        if token < logits.size:
            logits[token] += np.float32(bias)
    if repetition != 1.0:
        seen = np.unique(_known([*request.tokens, *drafts], logits.size))
        penalty = np.float32(max(repetition, LEAST_PENALTY))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = np.unique(
            _known([*request.output, *drafts], logits.size), return_counts=True
        )
        rest = logits[seen].astype(np.float64)
        rest -= float(np.float32(params.frequency_penalty)) * counts
        rest -= float(np.float32(params.presence_penalty))
        logits[seen] = rest.astype(np.float32)
    early = request.num_output + len(drafts) < params.min_tokens
    if early and (mask is None or not allows_only(mask, request.end_ids)):
        logits[_known(request.end_ids, logits.size)] = -np.inf
    if mask is not None:
        logits[~as_flags(mask, logits.size)] = -np.inf
    return logits


@_overflow_is_infinite
def weights(
    logits: NDArray[np.float32], top: np.float32, temperature: float
) -> NDArray[np.float32]:
    """Return `exp((logits - top) / temperature) * UNIT` as integers held in float32, exactly.

    Float32 operations in a fixed order, none fused; `top` is finite and no logit exceeds it.
    """
    scale = np.float32(min(math.log2(math.e) / temperature, 1e30))
    power = np.maximum((logits - top) * scale, np.float32(-64))
    whole = np.rint(power)
    fraction = power - whole
    p = np.full_like(fraction, _POWER_OF_TWO[0])
    for coefficient in _POWER_OF_TWO[1:]:
        p = p * fraction + coefficient
    p = p * fraction + np.float32(1)
    rounded: NDArray[np.float32] = np.rint(np.ldexp(p, whole.astype(np.int32) + 40))
    return rounded


def distribution(
    params: SamplingParams, logits: NDArray[np.float32]
) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
    """Return the ids that may be drawn, ascending, and their integer weights.

    `logits` are adjusted and free of NaN; the temperature is above 0. Top-k keeps the first k of
    the order, min-p the weights of at least `min_p` times the largest, top-p the shortest prefix
    of what is left that holds `top_p` of its weight. Both are empty if nothing may be drawn.
    """
    values, top = params.values, logits.max()
    if np.isposinf(top):
        logits = np.where(np.isposinf(logits), np.float32(0), np.float32(-np.inf))
        top = np.float32(0)
    order = _by_likelihood(logits)
    order = order[: values.top_k or None]
    order = order[logits[order] > -np.inf]
    share = weights(logits[order], top, values.temperature)
    share[share < values.min_p * UNIT] = 0
    weight = share.astype(np.uint64)
    if values.top_p < 1.0 and order.size:
        running = np.cumsum(weight)
        enough = max(1, math.ceil(values.top_p * float(running[-1])))
        last = int(np.searchsorted(running, np.uint64(min(enough, int(running[-1])))))
        order, weight = order[: last + 1], weight[: last + 1]
    order, weight = order[weight > 0], weight[weight > 0]
    by_id = np.argsort(order)
    return order[by_id], weight[by_id]


def pick(ids: NDArray[np.intp], weight: NDArray[np.uint64], bits: int) -> int:
    """Return the id at which the running sum of weights passes `bits` / 2^64 of the whole."""
    if not ids.size:
        return NO_TOKEN
    running = np.cumsum(weight)
    target = bits * int(running[-1]) >> 64
    return int(ids[np.searchsorted(running, np.uint64(target), side="right")])


def token_logprobs(logits: NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    """Return log-softmax of `logits` at `token` and at the `num_top` likeliest tokens.

    Tokens at minus infinity are not listed; nothing below `LEAST_LOGPROB` is reported.
    """
    top = logits.max()
    if np.isposinf(top):
        log_total = math.log(np.count_nonzero(logits == top))
    else:
        log_total = math.log(int(weights(logits, top, 1.0).astype(np.uint64).sum()) / UNIT)

    def logprob(index: int) -> float:
        gap = 0.0 if logits[index] == top else float(logits[index]) - float(top)
        return max(gap - log_total, LEAST_LOGPROB)

    order = [int(i) for i in _by_likelihood(logits)[:num_top] if logits[i] > -np.inf]
    return TokenLogprobs(logprob(token), tuple(order), tuple(logprob(i) for i in order))


def _likeliest(logits: NDArray[np.float32]) -> int:
    token = int(np.argmax(logits))
    return token if logits[token] > -np.inf else NO_TOKEN


def _by_likelihood(logits: NDArray[np.float32]) -> NDArray[np.intp]:
    return np.argsort(-logits, kind="stable")


def _known(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.fromiter(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the four 32-bit words that ten rounds make of four words under a key of two.

    Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def random_bits(seed: int, counter: int) -> int:
    """Return 64 random bits for output token `counter` of a request with this seed.

    The seed (taken modulo 2^64) is the key. The counter fills the low two words of Philox's own;
    the other two are 0 here and free for other uses of the same seed.
    """
    seed &= 2**64 - 1
    words = philox4x32((counter & _LOW, counter >> 32 & _LOW, 0, 0), (seed & _LOW, seed >> 32))
    return words[0] | words[1] << 32


def fill_masks(request: Request, part: Slice | None, out: NDArray[np.uint32]) -> None:
    """Write the masks of all tokens that are drawn for a request, whose slice may have drafts."""
    assert request.matcher is not None
    drafts, branches = (part.drafts, part.branches) if part is not None else ((), ())
    request.matcher.masks(request.output, drafts, parents_of(len(drafts), branches), out)


def allows_only(mask: NDArray[np.uint32], ids: Iterable[int]) -> bool:
    """Return whether a mask leaves no token but some of `ids`."""
    rest = mask.copy()
    for token in ids:
        if token // 32 < rest.size:
            rest[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return not rest.any()


def as_flags(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Return a flag for each token, (vocab_size,)."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)
