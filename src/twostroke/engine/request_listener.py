"""Turns the results of steps for one request into the outputs that its caller reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from twostroke.core.request import DEFAULT_SERVICE_TIER
from twostroke.engine.output import Output, Timings, Usage

if TYPE_CHECKING:
    from twostroke.core.errors import TwostrokeError
    from twostroke.core.request import FinishReason, Request
    from twostroke.core.step import RequestDelta
    from twostroke.engine.counters import ServiceCounter
    from twostroke.engine.output import Mailbox
    from twostroke.engine.resumption import AnswerProgress


class RequestListener(ABC):
    """Turns the results of steps for one request into outputs for its caller.

    The engine loop keeps a listener from a request's submission to its last output.

    Attributes:
        counter: counts the requests of the service tier; the loop sets it at submission.
        num_output: tokens in the outputs so far.
        num_unused: correct draft tokens that were discarded because they follow a stop string.
        first_token_s: time of the first token on the engine's clock; 0 before it.
        last_token_s: time of the newest token on the engine's clock; 0 before the first.
        delivered: the part of the answer that another engine has delivered; None if there is none.
    """

    counter: ServiceCounter

    def __init__(
        self,
        request: Request,
        index: int,
        mailbox: Mailbox,
        service_tier: str = DEFAULT_SERVICE_TIER,
    ) -> None:
        """Turn the results for `request`, choice `index` of a call, into outputs for `mailbox`.

        The request is counted under `service_tier`.
        """
        self.request = request
        self.index = index
        self.mailbox = mailbox
        self.service_tier = service_tier
        self.num_output = 0
        self.num_unused = 0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.delivered: AnswerProgress | None = None

    @abstractmethod
    def take(self, delta: RequestDelta, now_s: float) -> Output | None:
        """Return the output for the caller after a step that computed `delta`; None for no output.

        `now_s` is the time at which the step ended.
        """

    def cut(self, reason: FinishReason, error: TwostrokeError | None = None) -> Output:
        """End a cancelled or failed request without another step; return its last output."""
        return self._complete(Output(self.index, self._rest(), (), error=error), reason)

    def _rest(self) -> str:
        """Return text that was held back because it may begin a stop string; empty by default."""
        return ""

    def _complete(
        self, output: Output, reason: FinishReason, stop: str | int | None = None
    ) -> Output:
        """Add the finish reason, token counts and timings to the request's last output."""
        request = self.request
        output.finish_reason = reason
        output.stop = stop
        output.usage = self._usage()
        arrival_s, started_s = request.arrival_s, request.started_s
        if self.delivered is not None and self.delivered.started_s:
            started_s = self.delivered.started_s
            arrival_s = min(arrival_s, started_s)  # another server has its own clock
        output.timings = Timings(arrival_s, started_s, self.first_token_s, self.last_token_s)
        return output

    def _usage(self) -> Usage:
        request = self.request
        num_accepted = request.num_accepted - self.num_unused
        cached_tokens = request.num_cached
        if self.delivered is not None and self.delivered.first_token_s:
            cached_tokens = self.delivered.cached_tokens
        return Usage(
            prompt_tokens=request.num_prompt,
            cached_tokens=cached_tokens,
            completion_tokens=self.num_output,
            accepted_tokens=num_accepted,
            rejected_tokens=request.num_drafted - num_accepted,
        )
