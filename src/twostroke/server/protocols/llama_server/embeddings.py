"""POST /embeddings: llama-server's own form of embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import numpy as np

from twostroke.core.json_io import encode_json
from twostroke.core.request import AUTO_POOLING, POOLINGS, EmbeddingParams
from twostroke.engine.client import Caller
from twostroke.server.body import field
from twostroke.server.generation.job import EmbeddingJob
from twostroke.server.http.errors import MissingFieldError
from twostroke.server.protocols.common.embeddings import encode_vectors, split_inputs

if TYPE_CHECKING:
    from twostroke.engine.embedding import Embedding
    from twostroke.server.generation.response_store import Tenant

Texts = str | list[str | int | list[int | str]]


class LlamaEmbeddingRequest(field.RequestObject):
    """The body of a request to `/embeddings`, with one of `content` and `input`."""

    content: Annotated[
        Texts | None,
        field.inputs(field.Fact.MAX_INPUTS, may_be_null=True),
    ] = None
    input: Annotated[Texts | None, field.doc("The same as `content`.")] = None
    model: field.ModelName = None
    pooling: Annotated[
        str | None,
        field.doc(
            "The tokens whose hidden states make a vector; `none` returns a vector of each token.",
            enum=[*POOLINGS, None],
        ),
    ] = None
    parse_special: field.ParseSpecial = None
    encoding_format: Annotated[Any, field.unsupported("float")] = None
    embd_normalize: Annotated[Any, field.unsupported(2)] = None


class LlamaEmbedding(msgspec.Struct, frozen=True):
    """The embedding of one input in the response of `/embeddings`.

    The list has one vector of length 1. With the pooling `none`, it has the vector of each token,
    which is not normalized.
    """

    index: int
    embedding: list[list[float]]


def read(request: LlamaEmbeddingRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate the body of an `/embeddings` request into an embedding job for the engine.

    Raises:
        RequestError: there is no input, or an input is empty; the error's `field` names it.
    """
    name = "content" if request.input is None else "input"
    value = getattr(request, name)
    if value is None:
        raise MissingFieldError("is missing.", field="content")
    texts = split_inputs(value, name)
    caller = Caller(tenant=tenant.name, prompt_field=name)
    return EmbeddingJob(
        model=request.model,
        texts=texts,
        params=EmbeddingParams(AUTO_POOLING if request.pooling is None else request.pooling),
        caller=caller,
        write=_encode,
        parse_special=request.parse_special,
    )


def to_response(
    _model: str, parts: list[msgspec.Raw], _num_tokens: int, _elapsed_s: float
) -> list[msgspec.Raw]:
    """Return the response of `/embeddings`: a list of embeddings, which `parts` has as JSON."""
    return parts


def _encode(embedding: Embedding) -> msgspec.Raw:
    """Encode one input's embedding as an entry of the response's list."""
    vectors = cast("list[list[float]]", encode_vectors(np.atleast_2d(embedding.vector)))
    return msgspec.Raw(encode_json(LlamaEmbedding(embedding.index, vectors)))
