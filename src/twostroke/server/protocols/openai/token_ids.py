"""Token ids of answers, and log-probabilities of prompts, in vLLM's form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.step import TokenLogprobs
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.server.generation.events import ChoiceStarted
    from twostroke.server.generation.job import Job


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at a position of the prompt, with its log-probability.

    `rank` is null if the token is not among the likeliest tokens.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of a prompt, the likely tokens by id; null for the first token, which has no score.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TokenIds:
    """Reports the token ids of each answer, if the request sets vLLM's `return_token_ids`."""

    def __init__(self, job: Job) -> None:
        """Prepare for the answers of one job, before any answer has begun."""
        self.is_reported = job.token_ids
        self._tokens: dict[int, list[int]] = {}  # by choice; they grow with the answers
        self._num_sent: dict[int, int] = {}

    def begin(self, event: ChoiceStarted) -> None:
        """Note that an answer begins; its list `event.tokens` grows until the answer ends."""
        self._tokens[event.choice] = event.tokens

    def take(self, choice: int) -> list[int] | UnsetType:
        """Return an answer's token ids since the last call, for the next chunk or the response.

        Returns UNSET, which leaves the field out, if the request does not set `return_token_ids`.
        """
        if not self.is_reported:
            return UNSET
        start = self._num_sent.get(choice, 0)
        tokens = self._tokens.get(choice, [])
        self._num_sent[choice] = len(tokens)
        return tokens[start:]


def to_prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None]
) -> PromptLogprobs:
    """Return a prompt's log-probabilities in the form of vLLM's field `prompt_logprobs`.

    `tokens` are the prompt's token ids. `scores` begin with the second token, since the first token
    has none.
    """
    reported: PromptLogprobs = [None]
    for token, score in zip(tokens[1:], scores, strict=False):
        if score is None:
            reported.append(None)
            continue
        likely = {
            id_: (logprob, index + 1)
            for index, (id_, logprob) in enumerate(
                zip(score.top_ids, score.top_logprobs, strict=True)
            )
        }
        ranked = {token: likely.pop(token, (score.logprob, None)), **likely}
        reported.append(
            {
                str(id_): PromptLogprob(
                    logprob=logprob,
                    rank=rank,
                    decoded_token=tokenizer.token_bytes(id_).decode(errors="replace"),
                )
                for id_, (logprob, rank) in ranked.items()
            }
        )
    return reported
