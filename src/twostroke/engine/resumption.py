"""Answers that continue in another engine: the part that was delivered, limits, and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.engine.output import Output


DEFAULT_ATTEMPTS: Final = 3
DEFAULT_WAIT_S: Final = 300.0


class AnswerProgress(Frozen):
    """The part of an answer that was delivered before the engine that computed it died.

    Another engine continues the answer after this part. It computes the keys and values of the
    tokens again, and samples only the tokens that follow. Times are on the monotonic clock of the
    machine.

    Attributes:
        tokens: the delivered tokens.
        has_ended: whether the whole answer was delivered.
        num_scored: prompt tokens whose log-probabilities were delivered.
        num_read: the last delivered number of prefilled prompt tokens.
        cached_tokens: the cached prompt tokens that were reported with the first token.
        started_s: when the request left the queue; 0 if no token was delivered.
        first_token_s, last_token_s: when these tokens were delivered; 0 without tokens.
    """

    tokens: list[int]
    has_ended: bool = False
    num_scored: int = 0
    num_read: int = 0
    cached_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


NO_PROGRESS: Final = AnswerProgress([])


class DeliveredAnswer:
    """Follows the outputs of one answer that are delivered to its caller."""

    __slots__ = (
        *("_cached_tokens", "_first_token_s", "_has_ended", "_last_token_s", "_num_read"),
        *("_num_scored", "_tokens"),
    )

    def __init__(self, progress: AnswerProgress = NO_PROGRESS) -> None:
        """Begin with the part of the answer that was delivered before, if any."""
        self._tokens: list[int] = list(progress.tokens)
        self._has_ended = progress.has_ended
        self._num_scored = progress.num_scored
        self._num_read = progress.num_read
        self._cached_tokens = progress.cached_tokens
        self._first_token_s = progress.first_token_s
        self._last_token_s = progress.last_token_s

    def add(self, output: Output, now_s: float) -> None:
        """Add an output that is delivered at the time `now_s`."""
        if output.token_ids:
            self._tokens += output.token_ids
            self._last_token_s = now_s
            self._first_token_s = self._first_token_s or now_s
        if output.prompt_logprobs:
            self._num_scored += len(output.prompt_logprobs)
        if output.usage is not None:
            self._num_read = max(self._num_read, output.num_read)
            self._cached_tokens = output.usage.cached_tokens
        if output.finish_reason is not None:
            self._has_ended = True

    def progress(self, started_s: float) -> AnswerProgress:
        """Return the delivered part of the answer, whose request left the queue at `started_s`."""
        return AnswerProgress(
            tokens=list(self._tokens),
            has_ended=self._has_ended,
            num_scored=self._num_scored,
            num_read=self._num_read,
            cached_tokens=self._cached_tokens,
            started_s=started_s if self._tokens else 0.0,
            first_token_s=self._first_token_s,
            last_token_s=self._last_token_s,
        )


class ResumptionLimits(Frozen):
    """How long a call continues after the engine processes that computed it have died.

    Attributes:
        max_attempts: maximum number of times that a call continues in another process.
        max_wait_s: maximum number of seconds that a call waits for another process.
    """

    max_attempts: int = DEFAULT_ATTEMPTS
    max_wait_s: float = DEFAULT_WAIT_S


class ResumptionTotals:
    """Counts the calls that continued in another engine process.

    Attributes:
        num_resumed: how often calls continued in another process.
        pause_s: the sum of the pauses of these calls, from the death of the process to the next
            output.
        max_pause_s: the longest of these pauses.
    """

    def __init__(self) -> None:
        """Start with all counts at zero."""
        self.num_resumed = 0
        self.pause_s = 0.0
        self.max_pause_s = 0.0

    def add_pause(self, pause_s: float) -> None:
        """Count a call that has got its first output after the death of its engine process."""
        self.num_resumed += 1
        self.pause_s += pause_s
        self.max_pause_s = max(self.max_pause_s, pause_s)
