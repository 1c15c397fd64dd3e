"""The field `post_sampling_probs`: the probability of each token after all samplers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.sampling import MAX_LOGPROBS
from twostroke.server.http.errors import UnsupportedFieldError

if TYPE_CHECKING:
    from twostroke.core.sampling import SamplingParams
    from twostroke.core.step import TokenLogprobs


def scored_for_sampling(params: SamplingParams, num_reported: int) -> SamplingParams:
    """Return sampling parameters that report enough log-probabilities for `post_sampling_probs`.

    The engine reports log-probabilities before its samplers. `sampled_probabilities` computes the
    probabilities after the samplers from them, so it needs all tokens that could be drawn.
    `num_reported` is how many likely tokens the response reports for each token.

    Raises:
        UnsupportedFieldError: sampling may choose among more tokens than the engine can report
            probabilities for.
    """
    if params.is_greedy:
        return replace(params, logprobs=num_reported)
    num_candidates = params.values.top_k
    changes_logits = (
        params.logit_bias or params.has_penalties or params.constraint or params.preface
    )
    if changes_logits or not 1 <= num_candidates <= MAX_LOGPROBS:
        reason = (
            f"needs temperature 0, or top_k from 1 to {MAX_LOGPROBS} without penalties, logit_bias "
            "and an answer format: leave it out for probabilities before sampling."
        )
        raise UnsupportedFieldError(reason, field="post_sampling_probs")
    return replace(params, logprobs=max(num_reported, num_candidates))


def sampled_probabilities(
    params: SamplingParams, token: int, scores: TokenLogprobs
) -> list[tuple[int, float]]:
    """Return the likeliest tokens and their probabilities after all samplers, likeliest first.

    Args:
        params: the sampling parameters of the answer.
        token: the id of the token that was drawn.
        scores: the log-probabilities before the samplers.
    """
    ids = list(scores.top_ids)
    if params.is_greedy:
        others = [id_ for id_ in ids if id_ != token]
        return [(token, 1.0), *((id_, 0.0) for id_ in others)]
    values = params.values
    best = scores.top_logprobs[0]
    weights = [
        math.exp((logprob - best) / values.temperature) if rank < values.top_k else 0.0
        for rank, logprob in enumerate(scores.top_logprobs)
    ]
    weights = [weight if weight >= values.min_p else 0.0 for weight in weights]
    # top_p: keep the likeliest tokens until their weights reach this share of all weights.
    enough = values.top_p * sum(weights)
    total = 0.0
    for rank, weight in enumerate(weights):
        if total >= enough and rank:
            weights[rank] = 0.0
        total += weight
    weight_sum = sum(weights)
    return [(id_, weight / weight_sum) for id_, weight in zip(ids, weights, strict=True)]
