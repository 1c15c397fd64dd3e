"""What a caller receives: pieces of text as they come, and figures at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from twostroke.core.errors import TwostrokeError
    from twostroke.core.request import FinishReason
    from twostroke.core.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a choice took; `cached_tokens` are prompt tokens found in the prefix cache.

    Tokens that were guessed before they were known are accepted, and then part of the completion,
    or rejected, and then of nothing.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """When things happened to a choice, in seconds on the engine's clock.

    `started_s` is when its first row was computed (the end of queueing). An embedding has no first
    token, which stays 0, and was ready at `last_token_s`.
    """

    arrival_s: float
    started_s: float
    first_token_s: float
    last_token_s: float

    @property
    def ttft_s(self) -> float:
        """Time to first token, queueing included."""
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """From arrival to the first computed row."""
        return self.started_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.last_token_s - self.arrival_s

    def tpot_s(self, num_output: int) -> float | None:
        """Time per output token behind the first one; None where there is but one."""
        if num_output < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (num_output - 1)


@dataclass(slots=True)  # not frozen, which would triple its cost: a step makes hundreds
class Output:
    """One step's news of one choice.

    `text` is safe to show: whole characters, and no beginning of a stop string. Token ids and
    log-probabilities may run ahead of it. `prompt_logprobs` come before the first token, or with
    it, where the request asked for them: one for each prompt token but the first. The output with a
    choice's first token has its `usage` so far. The last has `finish_reason`, `usage` and
    `timings`; `stop` is then the stop string or token id that was met, if any, and `error` what
    ended it where that was no good end. `embedding` is the vector of a text that was read for it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: TwostrokeError | None = None
    embedding: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole answer.

    `logprobs` has one entry a token where the request asked for them, else it is empty.
    `prompt_logprobs`, likewise, has one for each prompt token but the first, which follows nothing.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop: str | int | None
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def join(outputs: list[Output]) -> Completion:
    """Put the outputs of one choice, in order and up to its last, together."""
    last = outputs[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    assert last.timings is not None
    return Completion(
        index=last.index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(p for output in outputs for p in output.logprobs if p is not None),
        finish_reason=last.finish_reason,
        stop=last.stop,
        usage=last.usage,
        timings=last.timings,
        prompt_logprobs=tuple(p for o in outputs for p in o.prompt_logprobs if p is not None),
    )
