"""POST /v1/embeddings: OpenAI's protocol for embeddings."""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

import msgspec

from twostroke.core.embedding import AUTO, POOLINGS, EmbeddingParams, Pooling
from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.server.body import field
from twostroke.server.generation.job import EmbeddingJob
from twostroke.server.protocols.common.embeddings import encode_vectors, split_inputs
from twostroke.server.protocols.common.fields import ServiceFields, to_caller

if TYPE_CHECKING:
    from twostroke.engine.embedding import Embedding
    from twostroke.server.generation.response_store import Tenant

_POOLINGS: Final = tuple(name for name in POOLINGS if name != Pooling.NONE.value)


class EmbeddingRequest(ServiceFields, kw_only=True):
    """The body of a request."""

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
    """How many tokens the inputs have."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(msgspec.Struct, frozen=True):
    """One input's vector: numbers, or their little-endian float32 bytes in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """The response: a vector for each input, in order."""

    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


def read(asked: EmbeddingRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    pooling = AUTO if asked.pooling is None else asked.pooling
    if pooling == Pooling.NONE.value:
        reason = "cannot be 'none' here, since each input has one vector: use /embeddings."
        raise RequestError(reason, field="pooling")
    return EmbeddingJob(
        model=asked.model,
        texts=split_inputs(asked.input, "input"),
        params=EmbeddingParams(pooling, asked.dimensions),
        caller=to_caller(asked, "input", tenant),
        write=partial(_write, in_base64=asked.encoding_format == "base64"),
        add_special=asked.add_special_tokens is not False,
        parse_special=asked.parse_special,
    )


def whole_response(
    model: str, parts: list[msgspec.Raw], num_tokens: int, _elapsed_s: float
) -> EmbeddingList:
    """Return the response."""
    data = cast("list[EmbeddingBody]", parts)  # each is written already
    return EmbeddingList(data, model, EmbeddingUsage(num_tokens, num_tokens))


def _write(embedding: Embedding, *, in_base64: bool) -> msgspec.Raw:
    vector = embedding.vector
    encoded: msgspec.Raw | str
    if in_base64:
        encoded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    else:
        encoded = encode_vectors(vector)
    body = EmbeddingBody(embedding.index, cast("list[float] | str", encoded))
    return msgspec.Raw(encode_json(body))
