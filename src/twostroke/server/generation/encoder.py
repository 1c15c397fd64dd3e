"""The facts and the encoder with which a protocol writes one response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from twostroke.core.frozen import Frozen
from twostroke.engine.chat.reader import PLAIN, AnswerFormat
from twostroke.server.generation.events import EventReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.model.tokenizer import Tokenizer
    from twostroke.server.generation.events import Event
    from twostroke.server.generation.job import Job


class ResponseInfo(Frozen):
    """The facts of one response that do not change while it is written.

    `prompts` are the job's token ids, `reading` says how to read the answers, and `created_s` is
    Unix time. `as_llama_server` says that the client asked by one of llama-server's paths, which
    have no /v1.
    """

    id: str
    created_s: int
    model: str
    job: Job
    prompts: Sequence[Sequence[int]]
    tokenizer: Tokenizer
    reading: AnswerFormat = PLAIN
    as_llama_server: bool = False

    def reader(self) -> EventReader:
        """Return a reader of the job's outputs."""
        scores = self.has_logprobs or self.job.prompt_scores
        return EventReader(self.reading, self.tokenizer, has_logprobs=scores)

    @property
    def has_logprobs(self) -> bool:
        """Whether the response reports log-probabilities."""
        return self.job.params.logprobs is not None


class Encoder(Protocol):
    """Writes one response in a protocol's form, either as a stream or whole."""

    def write(self, event: Event) -> bytes:
        """Return the bytes of an event in the stream; empty where the protocol has none."""

    def whole(self, stream: Iterable[Event]) -> Any:
        """Return the response that is not streamed, from all events of the job, for JSON."""
