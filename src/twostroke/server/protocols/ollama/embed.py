"""POST /api/embed and the older /api/embeddings: vectors of length 1 for texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from twostroke.core.request import EmbeddingParams
from twostroke.engine.client import Caller
from twostroke.server.body import field
from twostroke.server.generation.job import EmbeddingJob
from twostroke.server.protocols.common.embeddings import encode_vectors
from twostroke.server.protocols.ollama.reply import nanoseconds
from twostroke.server.protocols.ollama.request import KeepAlive

if TYPE_CHECKING:
    from twostroke.engine.embedding import Embedding
    from twostroke.server.generation.response_store import Tenant


class EmbedRequest(field.RequestObject):
    """The body of a request to `/api/embed`."""

    model: field.ModelName = None
    input: Annotated[str | list[str] | None, field.doc("A text, or a list of texts.")] = None
    truncate: Annotated[
        bool | None,
        field.doc("Cut texts that are longer than the context; true if left out."),
    ] = None
    dimensions: Annotated[
        int | None,
        field.doc(
            "Keep this many first values of each vector, scaled to length 1; 0: all.",
            minimum=0,
            maximum=field.Fact.EMBEDDING_WIDTH,
        ),
    ] = None
    keep_alive: KeepAlive = None
    options: field.Ignored = None


class OldEmbedRequest(field.RequestObject):
    """The body of a request to `/api/embeddings`."""

    model: field.ModelName = None
    prompt: Annotated[str | None, field.doc("A text.")] = None
    keep_alive: KeepAlive = None
    options: field.Ignored = None


class EmbedBody(msgspec.Struct, kw_only=True, frozen=True):
    """The response of `/api/embed`: a vector for each text, in order; durations are in ns."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OldEmbedBody(msgspec.Struct, frozen=True):
    """The response of `/api/embeddings`: the vector of a text."""

    embedding: list[float]


def read(request: EmbedRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate the body of an `/api/embed` request into an embedding job for the engine.

    Raises:
        RequestError: a value is out of bounds; the error's `field` names it.
    """
    texts = [request.input] if isinstance(request.input, str) else request.input or []
    params = EmbeddingParams(dimensions=request.dimensions or None)
    return _job(
        request.model,
        texts,
        params,
        prompt_field="input",
        tenant=tenant,
        truncates=request.truncate is not False,
    )


def read_old(request: OldEmbedRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate the body of an `/api/embeddings` request into an embedding job for the engine."""
    texts = [request.prompt or ""]
    return _job(request.model, texts, EmbeddingParams(), prompt_field="prompt", tenant=tenant)


def to_response(
    model: str, parts: list[msgspec.Raw], num_tokens: int, elapsed_s: float
) -> EmbedBody:
    """Build the response of `/api/embed` from the embeddings that the engine computed.

    Args:
        model: the model's name.
        parts: the JSON of each text's vector.
        num_tokens: the number of tokens in all texts.
        elapsed_s: the seconds since the request's arrival.
    """
    return EmbedBody(
        model=model,
        embeddings=cast("list[list[float]]", parts),  # each is JSON from `_encode`
        total_duration=nanoseconds(elapsed_s),
        prompt_eval_count=num_tokens,
    )


def to_old_response(
    _model: str, parts: list[msgspec.Raw], _num_tokens: int, _elapsed_s: float
) -> OldEmbedBody:
    """Build the response of `/api/embeddings`; `parts` has the JSON of its only vector."""
    return OldEmbedBody(cast("list[float]", parts[0]))


def empty_response(request: EmbedRequest, model: str) -> EmbedBody | None:
    """Return the response to an `/api/embed` request without texts; None if there are texts.

    Ollama's clients send such a request to load a model.
    """
    return None if request.input else EmbedBody(model=model, embeddings=[])


def empty_old_response(request: OldEmbedRequest, _model: str) -> OldEmbedBody | None:
    """Return the response to an `/api/embeddings` request without a text; None if there is a text.

    Ollama's clients send such a request to load a model.
    """
    return None if request.prompt else OldEmbedBody([])


def _job(
    model: str | None,
    texts: list[str],
    params: EmbeddingParams,
    prompt_field: str,
    tenant: Tenant,
    **other_fields: Any,
) -> EmbeddingJob:
    """Build the embedding job of an `/api/embed` or `/api/embeddings` request.

    `prompt_field` is the name of the field with the texts, for errors; `other_fields` are further
    fields of `EmbeddingJob`.
    """
    return EmbeddingJob(
        model=model,
        texts=tuple(texts),
        params=params,
        caller=Caller(tenant=tenant.name, prompt_field=prompt_field),
        write=_encode,
        **other_fields,
    )


def _encode(embedding: Embedding) -> msgspec.Raw:
    return encode_vectors(embedding.vector)
