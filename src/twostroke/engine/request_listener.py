"""What the loop tells about one request, and the outputs that follow from it."""

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


class RequestListener(ABC):
    """Turns the outcome of steps for one request into outputs for its caller.

    It lives from submission to its last output. Times are on the engine's clock, 0 for what has
    not happened yet.

    Attributes:
        counter: where the request is counted; the loop sets it at submission.
        num_output: tokens in the outputs so far.
        num_unused: right guesses that were discarded because they follow a stop string.
    """

    counter: ServiceCounter

    def __init__(
        self, request: Request, index: int, mailbox: Mailbox, service: str = DEFAULT_SERVICE_TIER
    ) -> None:
        """Make outputs with `index` for `mailbox`; `service` as in `Caller`."""
        self.request = request
        self.index = index
        self.mailbox = mailbox
        self.service = service
        self.num_output = 0
        self.num_unused = 0
        self.first_token_s = self.last_token_s = 0.0

    @abstractmethod
    def take(self, delta: RequestDelta, now_s: float) -> Output | None:
        """Return the output of a step, if it has one."""

    def cut(self, reason: FinishReason, error: TwostrokeError | None = None) -> Output:
        """Return the last output of a request that ends without another step."""
        return self._ended(Output(self.index, self._rest(), (), error=error), reason)

    def _rest(self) -> str:
        """Return text that was held back."""
        return ""

    def _ended(self, output: Output, reason: FinishReason, stop: str | int | None = None) -> Output:
        """Complete the last output."""
        request = self.request
        output.finish_reason, output.stop, output.usage = reason, stop, self._usage()
        output.timings = Timings(
            request.arrival_s, request.started_s, self.first_token_s, self.last_token_s
        )
        return output

    def _usage(self) -> Usage:
        request = self.request
        num_accepted = request.num_accepted - self.num_unused
        return Usage(
            request.num_prompt,
            request.num_cached,
            self.num_output,
            num_accepted,
            request.num_drafted - num_accepted,
        )
