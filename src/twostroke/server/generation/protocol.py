"""The parts of an API protocol: reading its requests, and encoding its responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec

from twostroke.core.frozen import Frozen
from twostroke.engine.chat.reader import PLAIN, AnswerFormat
from twostroke.server.generation.events import EventReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twostroke.model.tokenizer import Tokenizer
    from twostroke.server.generation.events import Event
    from twostroke.server.generation.job import EmbeddingJob, Job
    from twostroke.server.generation.response_store import Tenant

T = TypeVar("T", bound=msgspec.Struct)


class Framing(Frozen):
    """How a protocol frames its streams; a silent stream sends the bytes of `keep_alive`."""

    content_type: str
    keep_alive: bytes


SSE: Final = Framing("text/event-stream; charset=utf-8", b": keep-alive\n\n")
# A space may stand before the JSON of the next line; an empty line is an error to most clients.
NDJSON: Final = Framing("application/x-ndjson", b" ")


class ApiProtocol(Frozen, Generic[T]):
    """A protocol for answers.

    Attributes:
        prefix: the beginning of its response ids.
        request: the struct of its request bodies.
        read: translates a checked request of a tenant to a job; raises RequestError.
        encoder: makes the encoder of one response.
        names: the protocol's names of the engine's fields, for errors (see `ServedRequest`).
        recalls: whether a prompt may be longer than its body, because it continues a stored one.
        framing: how its streams are framed.
        empty: returns the response to a request that asks for no answer, from the request and the
            model's name; None for other requests.
        keep_s: returns how long the model shall stay loaded after the request; None if it does not
            say; raises RequestError.
        read_as_llama_server: takes the place of `read` where the client asks by one of
            llama-server's paths, which have no /v1; None for `read`.
    """

    prefix: str
    request: type[T]
    read: Callable[[T, Tenant], Job]
    encoder: Callable[[ResponseInfo], Encoder]
    names: Callable[[T], Mapping[str, str]] = lambda _asked: {}
    recalls: bool = False
    framing: Framing = SSE
    empty: Callable[[T, str], msgspec.Struct | None] = lambda _asked, _name: None
    keep_s: Callable[[T], float | None] = lambda _asked: None
    read_as_llama_server: Callable[[T, Tenant], Job] | None = None

    def reader_of(self, path: str) -> Callable[[T, Tenant], Job]:
        """Return the function that translates requests of a path."""
        is_llama_path = not path.startswith("/v1/")
        return (self.read_as_llama_server if is_llama_path else None) or self.read


class EmbeddingProtocol(Frozen, Generic[T]):
    """A protocol for embeddings; `request`, `read`, `empty` and `keep_s` as in `ApiProtocol`.

    `whole` makes the response, from the model's name, a part for each text, the number of tokens
    in all texts, and the seconds since the request came.
    """

    request: type[T]
    read: Callable[[T, Tenant], EmbeddingJob]
    whole: Callable[[str, list[msgspec.Raw], int, float], Any]
    empty: Callable[[T, str], msgspec.Struct | None] = lambda _asked, _name: None
    keep_s: Callable[[T], float | None] = lambda _asked: None


class UtilityEndpoint(Frozen, Generic[T]):
    """A request that needs no engine.

    `request`, with a field `model`, and `names` are as in `ApiProtocol`.
    `answer` turns a checked request into the response; raises RequestError. If it `recalls` stored
    answers, its last argument is the sender.
    """

    request: type[T]
    answer: Callable[..., msgspec.Struct]
    names: Callable[[T], Mapping[str, str]] = lambda _asked: {}
    recalls: bool = False


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
