"""What a protocol brings: how to read its requests, and how to write its responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from twostroke.chat.reader import PLAIN, Reading
from twostroke.serve.events import EventReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twostroke.engine.client import ModelCard
    from twostroke.serve.events import Event
    from twostroke.serve.job import EmbeddingJob, Job
    from twostroke.serve.store import Tenant
    from twostroke.tokenize import Tokenizer

T = TypeVar("T", bound=msgspec.Struct)

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Reply:
    """The facts of one response that do not change while it is written.

    `prompts` are the job's token ids, in order, and `reading` says how the answers are to be read.
    `created_s` is Unix time.
    """

    id: str
    created_s: int
    model: str
    job: Job
    prompts: Sequence[Sequence[int]]
    tokenizer: Tokenizer
    reading: Reading = PLAIN

    def reader(self) -> EventReader:
        """Return a reader of the job's outputs."""
        return EventReader(self.reading, self.tokenizer, has_logprobs=self.has_logprobs)

    @property
    def has_logprobs(self) -> bool:
        """Whether the response reports log-probabilities."""
        return self.job.params.logprobs is not None


class Encoder(Protocol):
    """Writes one response in a protocol's form, either as a stream or whole."""

    def write(self, event: Event) -> bytes:
        """Return the server-sent events for an event; empty where the protocol has none."""

    def whole(self, stream: Iterable[Event]) -> msgspec.Struct:
        """Return the response that is not streamed, from all events of the job."""


def _same_names(_asked: object) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Dialect(Generic[T]):
    """One protocol.

    Attributes:
        name: its name in metrics.
        prefix: the beginning of its response ids.
        request: the struct of its request bodies.
        read: translates a checked request of a tenant to a job; raises RequestError.
        encoder: makes the encoder of one response.
        names: what errors call the engine's fields in a request (see `http.errors.note_names`).
        recalls: whether a prompt may be longer than its body, because it continues a stored one.
    """

    name: str
    prefix: str
    request: type[T]
    read: Callable[[T, Tenant], Job]
    encoder: Callable[[Reply], Encoder]
    names: Callable[[T], Mapping[str, str]] = _same_names
    recalls: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingDialect(Generic[T]):
    """One protocol for embeddings.

    Attributes:
        request: the struct of its bodies; it has a field `model`.
        read: translates a checked request of a tenant to a job; raises RequestError.
        whole: makes the response, from the model's name, a part for each text, and the number of
            tokens in all texts.
    """

    request: type[T]
    read: Callable[[T, Tenant], EmbeddingJob]
    whole: Callable[[str, list[msgspec.Raw], int], Any]


@dataclass(frozen=True, slots=True)
class Inquiry(Generic[T]):
    """A request that the model's files answer, without the engine.

    Attributes:
        request: the struct of its bodies; it has a field `model`.
        answer: turns a checked request into the response; raises RequestError.
        names: as in `Dialect`.
    """

    request: type[T]
    answer: Callable[[T, ModelCard], msgspec.Struct]
    names: Callable[[T], Mapping[str, str]] = _same_names


def sse(data: bytes) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: %b\n\n" % data


def named_sse(data: msgspec.Struct) -> bytes:
    """Return one server-sent event; its name is the struct's tag."""
    name = data.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))
