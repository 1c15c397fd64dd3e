"""POST /v1/embeddings: OpenAI's protocol for embeddings."""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

import msgspec

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.core.request import AUTO_POOLING, POOLINGS, EmbeddingParams, Pooling
from twostroke.server.body import field
from twostroke.server.generation.job import EmbeddingJob
from twostroke.server.protocols.common.embeddings import encode_vectors, split_inputs
from twostroke.server.protocols.common.fields import ServiceFields, to_caller

if TYPE_CHECKING:
    from twostroke.engine.embedding import Embedding
    from twostroke.server.generation.response_store import Tenant

_POOLINGS: Final = tuple(name for name in POOLINGS if name != Pooling.NONE.value)


class EmbeddingRequest(ServiceFields, kw_only=True):
    """The body of an embedding request."""

    input: Annotated[str | list[str | int | list[int | str]], field.inputs(field.Fact.MAX_INPUTS)]
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        field.doc("Numbers, or their little-endian float32 bytes in base64."),
    ] = None
    dimensions: Annotated[
        int | None,
        field.doc(
            "Keep this many first values of each vector, scaled to length 1.",
            minimum=1,
            maximum=field.Fact.EMBEDDING_WIDTH,
        ),
    ] = None
    pooling: Annotated[
        str | None,
        field.doc("The tokens whose hidden states make a vector.", enum=[*_POOLINGS, None]),
    ] = None

    add_special_tokens: field.AddSpecial = None
    parse_special: field.ParseSpecial = None
    normalize: field.AlwaysOn = None
    truncate_prompt_tokens: field.Unsupported = None


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """The `usage` of an embedding response: the number of tokens in all inputs.

    OpenAI has two names for this number.
    """

    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(msgspec.Struct, frozen=True):
    """An entry of `data` in an embedding response: the vector of one input.

    The vector is a list of numbers, or the base64 of its little-endian float32 bytes.
    """

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """The response to an embedding request: a vector for each input, in order."""

    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


def read(request: EmbeddingRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate the body of an embedding request into an embedding job for the engine.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    pooling = AUTO_POOLING if request.pooling is None else request.pooling
    if pooling == Pooling.NONE.value:
        reason = "cannot be 'none' here, since each input has one vector: use /embeddings."
        raise RequestError(reason, field="pooling")
    return EmbeddingJob(
        model=request.model,
        texts=split_inputs(request.input, "input"),
        params=EmbeddingParams(pooling, request.dimensions),
        caller=to_caller(request, "input", tenant),
        write=partial(_encode, in_base64=request.encoding_format == "base64"),
        add_special=request.add_special_tokens is not False,
        parse_special=request.parse_special,
    )


def to_response(
    model: str, parts: list[msgspec.Raw], num_tokens: int, _elapsed_s: float
) -> EmbeddingList:
    """Build the response to an embedding request from the embeddings that the engine computed.

    `parts` has the JSON of each entry of `data`; `num_tokens` counts the tokens of all inputs.
    """
    data = cast("list[EmbeddingBody]", parts)  # each is JSON from `_encode`
    return EmbeddingList(data, model, EmbeddingUsage(num_tokens, num_tokens))


def _encode(embedding: Embedding, *, in_base64: bool) -> msgspec.Raw:
    """Encode one input's embedding as an entry of `data` in the response."""
    vector = embedding.vector
    encoded_vector: msgspec.Raw | str
    if in_base64:
        encoded_vector = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    else:
        encoded_vector = encode_vectors(vector)
    body = EmbeddingBody(embedding.index, cast("list[float] | str", encoded_vector))
    return msgspec.Raw(encode_json(body))
