"""Outputs of the engine: the tokens that a step adds to an answer, and their delivery."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.request import FinishReason
from twostroke.core.step import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    Addressed = list[tuple["Mailbox", "Output"]]


class Usage(Frozen):
    """Token counts of one choice (answer) of a request.

    `cached_tokens` are prompt tokens that the prefix cache had. `accepted_tokens` and
    `rejected_tokens` are draft tokens; the accepted tokens are also counted in `completion_tokens`.
    `reused_tokens` is the part of `completion_tokens` that was computed for an identical request.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    reused_tokens: int = 0


class Timings(Frozen):
    """Times of one choice (answer) of a request, in seconds on the engine's clock.

    `started_s` is when the request left the queue. An embedding is ready at `last_token_s`, and its
    `first_token_s` is 0.
    """

    arrival_s: float
    started_s: float
    first_token_s: float
    last_token_s: float

    @property
    def ttft_s(self) -> float:
        """The request's time to first token in seconds, queueing included."""
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """Seconds that the request waited in the queue."""
        return self.started_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """The request's end-to-end latency: seconds from its arrival to its last token."""
        return self.last_token_s - self.arrival_s

    def tpot_s(self, num_output: int) -> float | None:
        """Seconds per output token after the first; None with fewer than two output tokens."""
        if num_output < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (num_output - 1)


class Output(Struct, array_like=True, gc=False, repr_omit_defaults=True):
    """The tokens and text that one step adds to one choice (answer) of a request.

    Attributes:
        index: the number of the choice.
        text: new text. It has complete characters only; text that may begin a stop string is held
            back, so `token_ids` and `logprobs` can be ahead of the text.
        token_ids: new tokens.
        logprobs: one entry for each new token, if requested.
        prompt_logprobs: one entry for each prompt token but the first, if requested; sent with or
            before the first token.
        finish_reason: why the choice ended; only the last output has it.
        stop: the stop string or token id that ended the choice; only in the last output.
        num_read: number of prompt tokens computed so far, if requested; in outputs up to the first
            token.
        usage: token counts; only in outputs with `num_read`, with the first token, and in the last
            output.
        timings: only in the last output.
        error: the failure that ended the choice.
        embedding: the vector of a text to embed; each text has a single output.
        schema_miss: the rule of its JSON schema that the answer breaks, even after it was generated
            again; only in the last output.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    num_read: int = 0
    usage: Usage | None = None
    timings: Timings | None = None
    error: TwostrokeError | None = None
    embedding: NDArray[np.float32] | None = None
    schema_miss: str = ""


class AnswerCall(Frozen):
    """A function call in an answer: its id, the function's name, and the arguments."""

    id: str
    name: str
    arguments: dict[str, Any]

    def as_part(self) -> dict[str, Any]:
        """Return the tool call as an entry of `tool_calls` in an assistant message of OpenAI."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class AnswerChunk(Frozen, repr_omit_defaults=True):
    """A chunk of an answer to a conversation, while the answer is generated.

    A call is in `tool_calls` once it is complete. Token ids and log-probabilities can be ahead of
    the text. The last chunk has `finish_reason`, `usage` and `timings`. `schema_miss` in the last
    chunk is the rule of its JSON schema that the answer breaks, even after it was generated again.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[AnswerCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    schema_miss: str = ""


class Completion(Frozen):
    """One complete answer to a prompt or a conversation.

    `logprobs` has an entry for each token, and `prompt_logprobs` one for each prompt token but the
    first; both are empty if not requested. In the answer to a conversation, `reasoning` and
    `tool_calls` are separate from `text`. `schema_miss` is the rule of its JSON schema that the
    answer breaks, such as `uniqueItems (#)`, even after it was generated again.
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
    reasoning: str = ""
    tool_calls: tuple[AnswerCall, ...] = ()
    schema_miss: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant message, to continue the conversation with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_part() for call in self.tool_calls]
        return message

    def __repr__(self) -> str:
        """Show the answer, its finish reason, and its number of tokens."""
        fields = [f"text={self.text!r}"]
        if self.reasoning:
            fields.append(f"reasoning={self.reasoning!r}")
        if self.tool_calls:
            fields.append(f"tool_calls={list(self.tool_calls)!r}")
        fields.append(f"finish_reason={self.finish_reason.value!r}")
        if self.schema_miss:
            fields.append(f"schema_miss={self.schema_miss!r}")
        fields.append(f"prompt_tokens={self.usage.prompt_tokens}")
        fields.append(f"completion_tokens={self.usage.completion_tokens}")
        return f"Completion({', '.join(fields)})"


def join(outputs: list[Output]) -> Completion:
    """Join all outputs of one choice (answer) of a request into the complete answer."""
    last = outputs[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    assert last.timings is not None
    return Completion(
        index=last.index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(
            logprob for output in outputs for logprob in output.logprobs if logprob is not None
        ),
        finish_reason=last.finish_reason,
        stop=last.stop,
        usage=last.usage,
        timings=last.timings,
        prompt_logprobs=tuple(
            logprob
            for output in outputs
            for logprob in output.prompt_logprobs
            if logprob is not None
        ),
        schema_miss=last.schema_miss,
    )


class Mailbox(Frozen):
    """Delivers the outputs of a call's requests to their reader.

    Attributes:
        put: called with each output.
        schedule: `schedule(put_all, outputs)` arranges that `put_all(outputs)` is called in the
            reader's thread, as the `call_soon_threadsafe` of an event loop does. `schedule` is
            called once in a step for all mailboxes that share it. If it is None, `put` is called in
            the engine's thread.
    """

    put: Callable[[Output], None]
    schedule: Callable[[Callable[[Addressed], None], Addressed], Any] | None = None


def deliver(outputs: Addressed) -> None:
    """Put a step's outputs into their mailboxes, and wake each reader's event loop only once.

    Outputs come with their mailboxes. Mailboxes with the same `schedule` share one wake-up.
    """
    scheduled: defaultdict[Any, Addressed] = defaultdict(list)
    for addressed in outputs:
        mailbox, output = addressed
        if mailbox.schedule is None:
            mailbox.put(output)
        else:
            scheduled[mailbox.schedule].append(addressed)
    for schedule, outputs_of_loop in scheduled.items():
        with suppress(RuntimeError):  # the event loop was closed, and its readers with it
            schedule(_put_all, outputs_of_loop)


def _put_all(outputs: Addressed) -> None:
    for mailbox, output in outputs:
        mailbox.put(output)
