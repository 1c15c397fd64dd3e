"""The parts of an API protocol: how to read its requests, and how to encode its responses."""

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
    """How a protocol frames streams: content type, and bytes that keep a silent stream alive."""

    content_type: str
    keep_alive: bytes


SSE: Final = Framing("text/event-stream; charset=utf-8", b": keep-alive\n\n")
# A space before the JSON of the next line is harmless; most clients reject an empty line.
NDJSON: Final = Framing("application/x-ndjson", b" ")


class ApiProtocol(Frozen, Generic[T]):
    """One generation API: how its requests become jobs, and how its responses are encoded.

    `server/routes.py` has an instance for each path, such as `/v1/chat/completions`.

    Attributes:
        prefix: the prefix of response ids.
        request: the struct of request bodies.
        read: translates a valid request of a tenant to a job; raises RequestError.
        encoder: creates the encoder of one response.
        field_names: maps the engine's parameter names to the protocol's field names, for
            errors.
        recalls: whether a prompt may be longer than the request's body, because it continues a
            stored conversation.
        framing: the framing of streams.
        empty_response: returns the response to a request that needs no generated answer, from
            the request and the model's name; None for other requests.
        keep_s: returns how many seconds the model stays loaded after the request; None if the
            request does not say; raises RequestError.
        read_as_llama_server: replaces `read` for llama-server's paths, which have no /v1; None
            for `read`.
    """

    prefix: str
    request: type[T]
    read: Callable[[T, Tenant], Job]
    encoder: Callable[[ResponseInfo], Encoder]
    field_names: Callable[[T], Mapping[str, str]] = lambda _request: {}
    recalls: bool = False
    framing: Framing = SSE
    empty_response: Callable[[T, str], msgspec.Struct | None] = lambda _request, _name: None
    keep_s: Callable[[T], float | None] = lambda _request: None
    read_as_llama_server: Callable[[T, Tenant], Job] | None = None

    def reader_of(self, path: str) -> Callable[[T, Tenant], Job]:
        """Return the function that translates request bodies of a URL path to jobs.

        Paths without /v1 are llama-server's, and may have a function of their own.
        """
        is_llama_path = not path.startswith("/v1/")
        if is_llama_path and self.read_as_llama_server is not None:
            return self.read_as_llama_server
        return self.read


class EmbeddingProtocol(Frozen, Generic[T]):
    """One embedding API: how its requests become jobs, and how its responses are built.

    `server/routes.py` has an instance for each path, such as `/v1/embeddings`.

    Attributes:
        request: the struct of request bodies.
        read: translates a valid request of a tenant to a job; raises RequestError.
        whole_response: returns the response from the model's name, the encoded embedding of
            each text, the number of tokens in all texts, and the seconds since the request's
            arrival.
        empty_response: returns the response to a request without texts, from the request and
            the model's name; None for other requests.
        keep_s: returns how many seconds the model stays loaded after the request; None if the
            request does not say.
    """

    request: type[T]
    read: Callable[[T, Tenant], EmbeddingJob]
    whole_response: Callable[[str, list[msgspec.Raw], int, float], Any]
    empty_response: Callable[[T, str], msgspec.Struct | None] = lambda _request, _name: None
    keep_s: Callable[[T], float | None] = lambda _request: None


class UtilityEndpoint(Frozen, Generic[T]):
    """An endpoint that needs a model's tokenizer or chat template, but not its engine.

    `/tokenize` is an example.

    Attributes:
        request: the struct of request bodies, with a field `model`.
        answer: returns the response to a valid request; raises RequestError.
        field_names: maps the engine's parameter names to the protocol's field names, for
            errors.
        recalls: whether `answer` reads stored responses; its last argument is then the tenant.
    """

    request: type[T]
    answer: Callable[..., msgspec.Struct]
    field_names: Callable[[T], Mapping[str, str]] = lambda _request: {}
    recalls: bool = False


class ResponseInfo(Frozen):
    """The facts about one response that an encoder needs: its id, model, job and prompts.

    These facts do not change while the answers are generated.

    Attributes:
        id: the response id.
        created_s: the Unix time in seconds.
        model: the model name for the response.
        job: the job that the response answers.
        prompts: the token ids of the job's prompts.
        tokenizer: the model's tokenizer.
        reading: how to find reasoning and tool calls in the answers.
        as_llama_server: whether the request came to a path of llama-server's, without /v1.
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
        """Create the reader that turns the engine's outputs for the job into events."""
        has_logprobs = self.has_logprobs or self.job.prompt_scores
        return EventReader(self.reading, self.tokenizer, has_logprobs=has_logprobs)

    @property
    def has_logprobs(self) -> bool:
        """Whether the response reports log-probabilities of the answers' tokens."""
        return self.job.params.logprobs is not None


class Encoder(Protocol):
    """Encodes the response to one job in an API protocol's form, as a stream or as a whole.

    Each protocol has its own class, and each response its own instance.
    """

    def write(self, event: Event) -> bytes:
        """Return an event's bytes for the stream; empty if the protocol sends nothing for it."""

    def whole_response(self, stream: Iterable[Event]) -> Any:
        """Return the body of a response without a stream, which the caller encodes as JSON.

        `stream` has all events of the job.
        """
