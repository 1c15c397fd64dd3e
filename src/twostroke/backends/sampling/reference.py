"""The definition of sampling: one row of logits to one token, in plain NumPy.

The native sampler (native/sample) draws the same token on every instruction set. Three rules make
that possible:

- Probabilities are compared and summed as integers. A token's weight is `exp((logit - top) /
  temperature) * 2^40`, rounded, from a fixed sequence of float32 operations (`weights`). Integer
  sums do not depend on their order. A token that is less likely than the likeliest token by a
  factor of 2^41 or more has weight 0 and is never drawn. Weights are right to a few parts in a
  million, far closer than a model's logits.
- Tokens have one order: the larger logit first; of equal logits, the lower id. Every truncation
  keeps the first tokens of this order.
- The token is drawn at random by its weight: it is the first token, by ascending id, at which the
  cumulative weight exceeds `floor(bits * total / 2^64)`. `bits` are Philox4x32-10 keyed by the
  request's seed at the index of the output token. Nothing else is random, so the batch, preemption
  and the order of work do not matter.

A logit that is NaN counts as minus infinity, so a damaged value is never drawn. A row without a
logit above minus infinity (all NaN, or all masked) gives `NO_TOKEN`, and only its request fails. If
logits are plus infinity, their tokens share the whole probability evenly.
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
MIN_LOGPROB = -9999.0  # JSON has no infinity
MIN_PENALTY = float(np.finfo(np.float32).tiny)

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


_overflow_is_infinite = np.errstate(over="ignore")  # as in IEEE arithmetic and C++


def draw_all(
    plan: StepPlan, logits: NDArray[np.float32]
) -> tuple[list[tuple[int, TokenLogprobs | None]], list[TokenLogprobs | None]]:
    """Draw all tokens of a step from logits; also score prompt tokens if requests ask for it.

    `logits` (rows, vocab_size): the rows with logits, in the plan's order. Returns ([(token,
    log-probabilities) for each drawn token], [log-probabilities of each scored prompt token]).
    """
    draws: list[tuple[int, TokenLogprobs | None]] = []
    scores: list[TokenLogprobs | None] = []
    rows = iter(logits)
    for slice_ in plan.slices:
        scores += [score(slice_.request, next(rows), token) for token in slice_.scored_tokens]
        drafts_and_masks = zip(_drafts_before(slice_), _masks(slice_), strict=True)
        draws += [
            draw(slice_.request, next(rows), drafts, mask) for drafts, mask in drafts_and_masks
        ]
    assert next(rows, None) is None, "more rows of logits than tokens"
    return draws, scores


def _masks(slice_: Slice) -> Sequence[NDArray[np.uint32] | None]:
    """Return the mask of allowed tokens for each token that a slice draws.

    All are None if the request has no constraint, such as a JSON schema.
    """
    matcher = slice_.request.matcher
    if matcher is None or not slice_.samples:
        return [None] * slice_.num_drawn
    masks = np.zeros((slice_.num_drawn, matcher.num_words), np.uint32)
    fill_masks(slice_.request, slice_, masks)
    return list(masks)


def _drafts_before(slice_: Slice) -> list[list[int]]:
    """Return, for each token that a slice draws, the draft tokens that precede it.

    These drafts follow the request's own tokens. No draft precedes the first drawn token.
    """
    parents = parents_of(len(slice_.drafts), slice_.branches)
    indices = range(ROOT, slice_.num_drawn + ROOT)  # of the draft before each drawn token
    return [[slice_.drafts[i] for i in path_to(draft, parents)] for draft in indices]


def draw(
    request: Request,
    logits: NDArray[np.float32],
    drafts: Sequence[int] = (),
    mask: NDArray[np.uint32] | None = None,
) -> tuple[int, TokenLogprobs | None]:
    """Draw the token that follows a request's tokens and these draft tokens, from its logits.

    `logits` (vocab_size,) are not changed. `mask`: the tokens that a constraint allows
    (`core.constraint.Matcher`). Returns the token and, if the request asks for them, its log-
    probabilities; (`NO_TOKEN`, None) if no token may be drawn.
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
    """Return the log-probabilities of a prompt token, if the request asks for them.

    None if the request does not ask, or if no logit is above minus infinity.
    """
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
    """Return a request's logits with bias, penalties, `min_tokens` and constraint mask applied.

    The `drafts` count as the end of the request's output. Before `min_tokens`, end tokens are
    excluded, unless the mask allows nothing else.

    The repetition penalty counts tokens of prompt and output: positive logits are divided by it,
    others multiplied. Frequency and presence penalties count tokens of the output only. Results are
    rounded to float32 after each step.
    """
    params, repetition = request.params, request.params.values.repetition_penalty
    logits = logits.copy()
    for token, bias in params.logit_bias.items():
        if token < logits.size:
            logits[token] += np.float32(bias)
    if repetition != 1.0:
        seen = np.unique(_ids_in_vocabulary([*request.tokens, *drafts], logits.size))
        penalty = np.float32(max(repetition, MIN_PENALTY))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = np.unique(
            _ids_in_vocabulary([*request.output, *drafts], logits.size), return_counts=True
        )
        rest = logits[seen].astype(np.float64)
        rest -= float(np.float32(params.frequency_penalty)) * counts
        rest -= float(np.float32(params.presence_penalty))
        logits[seen] = rest.astype(np.float32)
    early = request.num_output + len(drafts) < params.min_tokens
    if early and (mask is None or not allows_only(mask, request.end_ids)):
        logits[_ids_in_vocabulary(request.end_ids, logits.size)] = -np.inf
    if mask is not None:
        logits[~as_flags(mask, logits.size)] = -np.inf
    return logits


@_overflow_is_infinite
def weights(
    logits: NDArray[np.float32], top: np.float32, temperature: float
) -> NDArray[np.float32]:
    """Return each token's sampling weight: `exp((logits - top) / temperature) * UNIT`, rounded.

    The weights are integers in float32.

    Uses float32 operations in a fixed order, without fused multiply-add, so that every machine gets
    the same bits. `top` is the largest logit and finite.
    """
    scale = np.float32(min(math.log2(math.e) / temperature, 1e30))
    power = np.maximum((logits - top) * scale, np.float32(-64))
    exponent = np.rint(power)
    fraction = power - exponent
    p = np.full_like(fraction, _POWER_OF_TWO[0])
    for coefficient in _POWER_OF_TWO[1:]:
        p = p * fraction + coefficient
    p = p * fraction + np.float32(1)
    rounded: NDArray[np.float32] = np.rint(np.ldexp(p, exponent.astype(np.int32) + 40))
    return rounded


def distribution(
    params: SamplingParams, logits: NDArray[np.float32]
) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
    """Return the ids of tokens that may be drawn, ascending, and their integer weights.

    `logits` are adjusted and free of NaN; the temperature is above 0. Top-k keeps the k likeliest
    tokens; then min-p keeps weights of at least `min_p` times the largest; then top-p keeps the
    shortest prefix with at least `top_p` of the remaining weight. Both arrays are empty if no token
    may be drawn.
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
    """Draw a token: return the first id whose cumulative weight exceeds a random share.

    The share is `bits` / 2^64 of the sum of weights.
    """
    if not ids.size:
        return NO_TOKEN
    running = np.cumsum(weight)
    target = bits * int(running[-1]) >> 64
    return int(ids[np.searchsorted(running, np.uint64(target), side="right")])


def token_logprobs(logits: NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    """Return log-probabilities of `token` and of the `num_top` likeliest tokens.

    They are the log-softmax of `logits`. Tokens with logits of minus infinity are not listed.
    Values are at least `MIN_LOGPROB`.
    """
    top = logits.max()
    if np.isposinf(top):
        log_total = math.log(np.count_nonzero(logits == top))
    else:
        log_total = math.log(int(weights(logits, top, 1.0).astype(np.uint64).sum()) / UNIT)

    def logprob(index: int) -> float:
        gap = 0.0 if logits[index] == top else float(logits[index]) - float(top)
        return max(gap - log_total, MIN_LOGPROB)

    order = [int(i) for i in _by_likelihood(logits)[:num_top] if logits[i] > -np.inf]
    return TokenLogprobs(logprob(token), tuple(order), tuple(logprob(i) for i in order))


def _likeliest(logits: NDArray[np.float32]) -> int:
    token = int(np.argmax(logits))
    return token if logits[token] > -np.inf else NO_TOKEN


def _by_likelihood(logits: NDArray[np.float32]) -> NDArray[np.intp]:
    return np.argsort(-logits, kind="stable")


def _ids_in_vocabulary(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.fromiter(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


_LOW_32_BITS = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return four random 32-bit words by Philox4x32-10, from a counter and a key.

    Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & _LOW_32_BITS,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & _LOW_32_BITS,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32_BITS, (k1 + _KEY_STEPS[1]) & _LOW_32_BITS
    return c0, c1, c2, c3


def random_bits(seed: int, counter: int) -> int:
    """Return 64 random bits for output token number `counter` of a request with this seed.

    The key is the seed modulo 2^64. `counter` fills the low two words of Philox's counter; the
    other two words are 0, and free for other uses of the same seed.
    """
    seed &= 2**64 - 1
    words = philox4x32(
        (counter & _LOW_32_BITS, counter >> 32 & _LOW_32_BITS, 0, 0),
        (seed & _LOW_32_BITS, seed >> 32),
    )
    return words[0] | words[1] << 32


def fill_masks(request: Request, slice_: Slice | None, out: NDArray[np.uint32]) -> None:
    """Write the constraint's mask for each token that a request draws in a step to `out`.

    `slice_`: the request's slice, which may have draft tokens; None: one token without drafts.
    """
    assert request.matcher is not None
    drafts, branches = (slice_.drafts, slice_.branches) if slice_ is not None else ((), ())
    request.matcher.masks(request.output, drafts, parents_of(len(drafts), branches), out)


def allows_only(mask: NDArray[np.uint32], ids: Iterable[int]) -> bool:
    """Return whether all tokens that a constraint's mask allows are in `ids`."""
    rest = mask.copy()
    for token in ids:
        if token // 32 < rest.size:
            rest[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return not rest.any()


def as_flags(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Return a constraint's bit mask as one boolean for each token, (vocab_size,)."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)
