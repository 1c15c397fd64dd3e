"""What a protocol is to the server: one translation in, two out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from twostroke.chat.reader import PLAIN, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.chat.reader import AnswerReader
    from twostroke.core.errors import TwostrokeError
    from twostroke.engine.client import ModelCard
    from twostroke.engine.output import Completion, Output, Usage
    from twostroke.serve.job import Job
    from twostroke.serve.store import Tenant
    from twostroke.tokenize import Tokenizer

T = TypeVar("T", bound=msgspec.Struct)

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Reply:
    """What is the same in every piece of one response.

    `prompts` are the jobs' token ids, in order, and `reading` says how the answers are to be read.
    `created_s` is Unix time.
    """

    id: str
    created_s: int
    model: str
    job: Job
    prompts: Sequence[Sequence[int]]
    tokenizer: Tokenizer
    reading: Reading = PLAIN

    def reader(self) -> AnswerReader:
        """Return a reader for one of its answers."""
        return self.reading.reader(self.tokenizer)


class Writer(Protocol):
    """Writes one streamed response as server-sent events."""

    def feed(self, output: Output) -> bytes:
        """Return the events that an output is worth; empty if none."""

    def finish(self, usage: Usage) -> bytes:
        """Return the events after the last output."""


@runtime_checkable
class FailureWriter(Writer, Protocol):
    """A writer whose protocol has an end of its own for streams that fail."""

    def fail(self, error: TwostrokeError) -> bytes:
        """Return the events after the last output, where an error is why it was the last."""


@dataclass(frozen=True, slots=True)
class Dialect(Generic[T]):
    """One protocol: its request, and how to read and answer it.

    Attributes:
        name: the metrics' word for it.
        prefix: what response ids begin with.
        request: the struct that its bodies are.
        read: a checked request, and who sends it, to a job; raises RequestError.
        write: a writer for a streamed response.
        whole: the response that is not streamed.
        recalls: whether a prompt may be longer than its body, by what was said before.
    """

    name: str
    prefix: str
    request: type[T]
    read: Callable[[T, Tenant], Job]
    write: Callable[[Reply], Writer]
    whole: Callable[[Reply, list[Completion], Usage], Any]
    recalls: bool = False


@dataclass(frozen=True, slots=True)
class Inquiry(Generic[T]):
    """A request that is answered from what the model's files say, without the engine.

    Attributes:
        request: the struct that its bodies are; it has a field `model`.
        answer: a checked request to a response; raises RequestError.
    """

    request: type[T]
    answer: Callable[[T, ModelCard], msgspec.Struct]


def event(data: msgspec.Struct) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % encode_json(data)
