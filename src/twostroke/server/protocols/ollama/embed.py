"""POST /api/embed and the older /api/embeddings: texts as vectors of length 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from twostroke.core.embedding import EmbeddingParams
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
    """Texts to embed."""

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
    """A text to embed."""

    model: field.ModelName = None
    prompt: Annotated[str | None, field.doc("A text.")] = None
    keep_alive: KeepAlive = None
    options: field.Ignored = None


class EmbedBody(msgspec.Struct, kw_only=True, frozen=True):
    """A vector for each text, in order; the durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OldEmbedBody(msgspec.Struct, frozen=True):
    """The vector of a text."""

    embedding: list[float]


def read(asked: EmbedRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds; `field` names it.
    """
    texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
    params = EmbeddingParams(dimensions=asked.dimensions or None)
    return _job(asked.model, texts, params, "input", tenant, truncates=asked.truncate is not False)


def read_old(asked: OldEmbedRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate a request."""
    return _job(asked.model, [asked.prompt or ""], EmbeddingParams(), "prompt", tenant)


def to_response(
    model: str, parts: list[msgspec.Raw], num_tokens: int, elapsed_s: float
) -> EmbedBody:
    """Return the response."""
    return EmbedBody(
        model=model,
        embeddings=cast("list[list[float]]", parts),  # each is written already
        total_duration=nanoseconds(elapsed_s),
        prompt_eval_count=num_tokens,
    )


def to_old_response(
    _model: str, parts: list[msgspec.Raw], _num_tokens: int, _elapsed_s: float
) -> OldEmbedBody:
    """Return the response."""
    return OldEmbedBody(cast("list[float]", parts[0]))


def empty(asked: EmbedRequest, model: str) -> EmbedBody | None:
    """Return the response to a request without texts."""
    return None if asked.input else EmbedBody(model=model, embeddings=[])


def empty_old(asked: OldEmbedRequest, _model: str) -> OldEmbedBody | None:
    """Return the response to a request without a text."""
    return None if asked.prompt else OldEmbedBody([])


def _job(
    model: str | None,
    texts: list[str],
    params: EmbeddingParams,
    prompt_field: str,
    tenant: Tenant,
    **own: Any,
) -> EmbeddingJob:
    return EmbeddingJob(
        model=model,
        texts=tuple(texts),
        params=params,
        caller=Caller(tenant=tenant.name, prompt_field=prompt_field),
        write=_write,
        **own,
    )


def _write(embedding: Embedding) -> msgspec.Raw:
    return encode_vectors(embedding.vector)
