"""One choice of a generation: the request, its text so far, and whom to tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from twostroke.core.request import FinishReason
from twostroke.core.service import DEFAULT_SERVICE
from twostroke.core.step import Delta
from twostroke.engine.output import Output, Timings, Usage
from twostroke.tokenize import StreamDecoder

if TYPE_CHECKING:
    from twostroke.core.errors import TwostrokeError
    from twostroke.core.request import Request
    from twostroke.engine.counters import ServiceCounter
    from twostroke.engine.mail import Mailbox
    from twostroke.tokenize import Tokenizer


class Listener(Protocol):
    """Who is told what steps bring a request, until its last output."""

    request: Request
    mailbox: Mailbox
    service: str
    counter: ServiceCounter
    num_output: int
    first_token_s: float
    last_token_s: float

    def take(self, delta: Delta, now_s: float) -> Output:
        """Return what a step means to the caller."""

    def cut(self, reason: FinishReason, error: TwostrokeError | None = None) -> Output:
        """Return the last output of a request that ends by itself no more."""

    def count_end(self, reason: FinishReason, timings: Timings | None = None) -> None:
        """Count the end; one that ended well has `timings`."""


@dataclass(slots=True, eq=False)
class Choice:
    """Turns a request's tokens into text; lives from submission to its last output."""

    request: Request
    index: int
    decoder: StreamDecoder
    mailbox: Mailbox
    service: str = DEFAULT_SERVICE
    counter: ServiceCounter = field(init=False)  # the loop's, from submission on
    num_output: int = 0
    num_unwanted: int = 0  # guesses that were right, behind a stop string
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @classmethod
    def of(
        cls,
        request: Request,
        index: int,
        tokenizer: Tokenizer,
        mailbox: Mailbox,
        service: str = DEFAULT_SERVICE,
    ) -> Choice:
        """Make the choice of a new request."""
        params = request.params
        decoder = StreamDecoder(
            tokenizer,
            params.stop,
            include_stop=params.include_stop,
            shown_ids=params.shown_ids,
            min_tokens=params.min_tokens,
            preface=params.preface,
        )
        return cls(request, index, decoder, mailbox, service)

    def take(self, delta: Delta, now_s: float) -> Output:
        """Return what a step's tokens mean to the caller.

        When a stop string is met, the output is the choice's last although the request itself
        goes on: the engine then ends it.
        """
        decoder, reason, shown = self.decoder, self.request.finish_reason, delta.tokens
        if not shown and reason is None:
            return Output(self.index, "", (), prompt_logprobs=delta.scores)
        counter = self.counter
        is_first = not self.first_token_s
        if is_first:
            self.first_token_s = now_s
            counter.begin(self.request, now_s)
        else:
            counter.gaps.append(self.last_token_s)
        self.last_token_s = now_s
        if reason is None and len(shown) == 1 and not is_first:
            text = decoder.known.get(shown[0])
            if text is not None:  # as mostly, and it is to be quick
                self.num_output += 1
                counter.num_tokens += 1
                return Output(self.index, text, shown, delta.logprobs, delta.scores)
        if reason is FinishReason.STOP:  # the last token says so, and is no text
            shown = shown[:-1]
        text = decoder.feed(shown[0]) if shown else ""
        count = 1
        while count < len(shown) and decoder.stop is None:
            text += decoder.feed(shown[count])
            count += 1
        if decoder.stop is not None:  # what was drawn behind it is nobody's
            tokens, logprobs = delta.tokens[:count], delta.logprobs[:count]
            self.num_unwanted = max(0, len(delta.tokens) - 1 - count)  # the last was no guess
            delta = Delta(delta.request, tokens, logprobs, delta.scores)
            self.num_output += count
            counter.num_tokens += count
            return self._last(text, delta, FinishReason.STOP, decoder.stop)
        count = len(delta.tokens)
        self.num_output += count
        counter.num_tokens += count
        if reason is None:
            output = Output(self.index, text, delta.tokens, delta.logprobs, delta.scores)
            if is_first:
                output.usage = self._usage()
            return output
        text += decoder.finish()
        stop = delta.tokens[-1] if reason is FinishReason.STOP else decoder.stop
        return self._last(text, delta, reason, stop)

    def cut(self, reason: FinishReason, error: TwostrokeError | None = None) -> Output:
        """Return the last output of a choice that ends without another token."""
        return self._last(self.decoder.finish(), None, reason, None, error)

    def count_end(self, reason: FinishReason, timings: Timings | None = None) -> None:
        """Count the end of the answer."""
        self.counter.end(reason, timings, self.num_output)

    def _last(
        self,
        text: str,
        delta: Delta | None,
        reason: FinishReason,
        stop: str | int | None,
        error: TwostrokeError | None = None,
    ) -> Output:
        request = self.request
        return Output(
            self.index,
            text,
            delta.tokens if delta else (),
            delta.logprobs if delta else (),
            delta.scores if delta else (),
            finish_reason=reason,
            stop=stop,
            usage=self._usage(),
            timings=Timings(
                request.arrival_s, request.started_s, self.first_token_s, self.last_token_s
            ),
            error=error,
        )

    def _usage(self) -> Usage:
        request = self.request
        num_accepted = request.num_accepted - self.num_unwanted
        return Usage(
            request.num_prompt,
            request.num_cached,
            self.num_output,
            num_accepted,
            request.num_drafted - num_accepted,
        )
