"""vLLM's reports of tokens: their ids, and the log-probabilities of a prompt."""

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
    """One token at a place of a prompt; its rank is null where it is not among the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of a prompt the tokens by id; null for the first token, which nothing precedes.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TokenIds:
    """The ids of each answer's tokens, for requests with `return_token_ids`."""

    def __init__(self, job: Job) -> None:
        """Report ids if the request of `job` asks for them."""
        self.is_reported = job.token_ids
        self._tokens: dict[int, list[int]] = {}  # by choice; they grow with the answers
        self._num_sent: dict[int, int] = {}

    def begin(self, event: ChoiceStarted) -> None:
        """Follow the tokens of a choice from now on."""
        self._tokens[event.choice] = event.tokens

    def take(self, choice: int) -> list[int] | UnsetType:
        """Return the ids of a choice since the last call; UNSET where they are not reported."""
        if not self.is_reported:
            return UNSET
        start = self._num_sent.get(choice, 0)
        tokens = self._tokens.get(choice, [])
        self._num_sent[choice] = len(tokens)
        return tokens[start:]


def to_prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None]
) -> PromptLogprobs:
    """Return vLLM's form of the scores of a prompt's tokens from the second one on."""
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
