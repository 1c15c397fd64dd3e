"""What a caller receives: pieces of text, and usage and timings at the end."""

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
    """Tokens of a choice; `cached_tokens` are prompt tokens found in the prefix cache.

    Guessed tokens are accepted, and then part of the completion, or rejected.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_tokens: int = 0
    rejected_tokens: int = 0


class Timings(Frozen):
    """Times of a choice, in seconds on the engine's clock.

    `started_s` is when it left the queue. Of an embedding, `first_token_s` is 0, and it was ready
    at `last_token_s`.
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
        """Time in the queue."""
        return self.started_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.last_token_s - self.arrival_s

    def tpot_s(self, num_output: int) -> float | None:
        """Time per output token after the first one; None if there is only one."""
        if num_output < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (num_output - 1)


class Output(Struct, array_like=True, gc=False, repr_omit_defaults=True):
    """What one step adds to one choice.

    `text` has whole characters only, and no beginning of a stop string; token ids and
    log-probabilities may be ahead of it. `prompt_logprobs` come before the first token, or with it,
    if the request asked for them: one for each prompt token except the first. If it asked to see
    progress, outputs up to the first token have `num_read`, the prompt tokens read so far. These,
    and the output with a choice's first token, have its `usage` so far. The last output has
    `finish_reason`, `usage` and `timings`; `stop` is the stop string or token id that ended the
    choice, `error` the failure that did. `embedding` is the vector of a text to embed, which has
    only this output. `schema_miss`, also of the last output, is the rule of its schema that a
    choice breaks, although it was drawn again.
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
    """A call of a function that an answer makes."""

    id: str
    name: str
    arguments: dict[str, Any]

    def as_part(self) -> dict[str, Any]:
        """Return the call as a message of the assistant has it."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class AnswerChunk(Frozen, repr_omit_defaults=True):
    """A piece of an answer to a conversation, as it is written.

    Each of `tool_calls` is whole. Token ids and log-probabilities may be ahead of the text. The
    last chunk of an answer has `finish_reason`, `usage`, `timings` and, if the answer breaks its
    schema although it was drawn again, the rule in `schema_miss`.
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
    """One whole answer.

    If the request asked for them, `logprobs` has an entry for each token and `prompt_logprobs` one
    for each prompt token except the first; else they are empty. The answer to a conversation has
    its `reasoning` and its `tool_calls` apart from its `text`. `schema_miss` is the rule of its
    schema that it breaks, such as `uniqueItems (#)`, although it was drawn again.
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
        """The answer as a message of the assistant, to continue the conversation with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_part() for call in self.tool_calls]
        return message

    def __repr__(self) -> str:
        """Show the answer, why it ended, and its number of tokens."""
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
    """Return the whole answer from all outputs of one choice."""
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
        schema_miss=last.schema_miss,
    )


class Mailbox(Frozen):
    """Where the outputs of a generation go.

    `put` takes an output. `carry(put_all, outputs)` has `put_all(outputs)` called, once for all of
    a step's outputs with equal `carry`: an event loop's `call_soon_threadsafe` does so in its
    thread. Without it, `put` is called in any thread.
    """

    put: Callable[[Output], None]
    carry: Callable[[Callable[[Addressed], None], Addressed], Any] | None = None


def deliver(outputs: Addressed) -> None:
    """Put outputs into mailboxes; each event loop is woken once, not once for each output."""
    carried: defaultdict[Any, Addressed] = defaultdict(list)
    for addressed in outputs:
        mailbox, output = addressed
        if mailbox.carry is None:
            mailbox.put(output)
        else:
            carried[mailbox.carry].append(addressed)
    for carry, together in carried.items():
        with suppress(RuntimeError):  # the event loop was closed, and its readers with it
            carry(_put_all, together)


def _put_all(outputs: Addressed) -> None:
    for mailbox, output in outputs:
        mailbox.put(output)
