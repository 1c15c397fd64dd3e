"""Turns the tokens of one answer into text, and ends the answer at a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.request import DEFAULT_SERVICE_TIER, FinishReason
from twostroke.engine.output import Output
from twostroke.engine.request_listener import RequestListener
from twostroke.model.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.core.step import RequestDelta
    from twostroke.engine.output import Mailbox
    from twostroke.engine.resumption import AnswerProgress
    from twostroke.model.tokenizer import Tokenizer


class OutputProcessor(RequestListener):
    """Turns the tokens of one request into outputs with text, up to a stop string."""

    def __init__(
        self,
        request: Request,
        index: int,
        mailbox: Mailbox,
        tokenizer: Tokenizer,
        service_tier: str = DEFAULT_SERVICE_TIER,
    ) -> None:
        """Turn the tokens of `request`, choice `index` of a call, into outputs for `mailbox`.

        `tokenizer` decodes the tokens. `mailbox` delivers outputs to the caller. The request is
        counted under `service_tier` in the metrics.
        """
        super().__init__(request, index, mailbox, service_tier)
        params = request.params
        self._decoder = StreamDecoder(
            tokenizer,
            params.stop,
            include_stop=params.include_stop,
            shown_ids=params.shown_ids,
            min_tokens=params.min_tokens,
            preface=params.preface,
            drops_space=params.drops_space,
        )

    def resume(self, delivered: AnswerProgress) -> None:
        """Continue the answer after the part that another engine has delivered.

        Call this before the request is submitted. Its outputs begin after the delivered part.
        """
        request = self.request
        request.tokens += delivered.tokens
        request.num_scored = delivered.num_scored
        self._read(tuple(delivered.tokens))
        self.num_output = len(delivered.tokens)
        self.first_token_s = delivered.first_token_s
        self.last_token_s = delivered.last_token_s
        self.delivered = delivered

    def take(self, delta: RequestDelta, now_s: float) -> Output:
        """Return an output with the tokens that a step sampled for the request, and their text.

        An output with a stop string is the request's last, although the scheduler has not ended the
        request yet: the loop does so when it sees the finish reason.
        """
        tokens = delta.tokens
        reason = self.request.finish_reason
        counter = self.counter
        if not tokens and reason is None:
            return self._with_progress(Output(self.index, "", (), prompt_logprobs=delta.scores))
        is_first = not self.first_token_s
        if is_first:
            self.first_token_s = now_s
            counter.begin(self.request, now_s)
        else:
            counter.gaps.append(self.last_token_s)
        self.last_token_s = now_s
        if reason is None and len(tokens) == 1 and not is_first:
            text = self._decoder.cached_texts.get(tokens[0])
            if text is not None:  # fast path of the most frequent case
                self.num_output += 1
                counter.num_tokens += 1
                return Output(self.index, text, tokens, delta.logprobs, delta.scores)

        stop: str | int | None = None
        text, num_read = self._read(tokens[:-1] if reason is FinishReason.STOP else tokens)
        if self._decoder.stop is not None:
            self.num_unused = max(0, len(tokens) - 1 - num_read)  # the last token is no draft
            tokens = tokens[:num_read]
            reason, stop = FinishReason.STOP, self._decoder.stop
        elif reason is not None:
            text += self._rest()
            stop = tokens[-1] if reason is FinishReason.STOP else self._decoder.stop
        self.num_output += len(tokens)
        counter.num_tokens += len(tokens)
        output = Output(self.index, text, tokens, delta.logprobs[: len(tokens)], delta.scores)
        if is_first and self.request.hints.shows_progress:
            output.num_read = self.request.num_prompt
        if reason is not None:
            return self._complete(output, reason, stop)
        if is_first:
            output.usage = self._usage()
        return output

    def _with_progress(self, output: Output) -> Output:
        """Add the number of prefilled tokens to an output before the first token, if requested."""
        request = self.request
        num_read = min(request.num_computed, request.num_prompt)
        is_new = self.delivered is None or num_read > self.delivered.num_read
        if request.hints.shows_progress and not self.first_token_s and is_new:
            output.usage = self._usage()
            output.num_read = num_read
        return output

    def _read(self, tokens: tuple[int, ...]) -> tuple[str, int]:
        """Decode new tokens up to a stop string; return their text and how many were decoded."""
        text = ""
        for count, token in enumerate(tokens, 1):
            text += self._decoder.feed(token)
            if self._decoder.stop is not None:
                return text, count
        return text, len(tokens)

    def _rest(self) -> str:
        return self._decoder.finish()
