"""POST /v1/embeddings: OpenAI's protocol for texts that become vectors."""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from twostroke.core.embedding import AUTO, EmbeddingParams
from twostroke.core.errors import RequestError
from twostroke.serve.dialect import encode_json
from twostroke.serve.http.errors import MissingFieldError
from twostroke.serve.job import EmbeddingJob
from twostroke.serve.openai.fields import refuse_all_but, to_caller

if TYPE_CHECKING:
    from twostroke.engine.embedding import Embedding
    from twostroke.serve.store import Tenant

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_special_tokens": (True,),
    "normalize": (True,),
    "truncate_prompt_tokens": (),
}


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request; `input` is a text, token ids, or a list of either."""

    input: str | list[str | int | list[int]] | None = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: str | None = None
    priority: int | None = None
    service_tier: str | None = None

    # Harmless: they change nothing about the answer.
    user: str | None = None
    request_id: str | None = None

    # Refused unless neutral.
    add_special_tokens: Any = None
    normalize: Any = None
    truncate_prompt_tokens: Any = None


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """How many tokens the inputs have."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(msgspec.Struct, frozen=True):
    """One input's vector: numbers, or their float32 bytes, the lowest first, in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """The response: a vector for each input, in order."""

    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


def read(asked: EmbeddingRequest, tenant: Tenant) -> EmbeddingJob:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    refuse_all_but(asked, NEUTRAL)
    pooling = AUTO if asked.pooling is None else asked.pooling
    return EmbeddingJob(
        model=asked.model,
        texts=_texts(asked.input),
        params=EmbeddingParams(pooling, asked.dimensions),
        caller=to_caller(asked, "input", tenant),
        write=partial(_write, in_base64=asked.encoding_format == "base64"),
    )


def whole(model: str, parts: list[msgspec.Raw], num_tokens: int) -> EmbeddingList:
    """Return the response."""
    data = cast("list[EmbeddingBody]", parts)  # each is written already
    return EmbeddingList(data, model, EmbeddingUsage(num_tokens, num_tokens))


def _write(embedding: Embedding, *, in_base64: bool) -> msgspec.Raw:
    vector = embedding.vector
    shown: list[float] | str = vector.tolist()
    if in_base64:
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return msgspec.Raw(encode_json(EmbeddingBody(embedding.index, shown)))


def _texts(given: str | list[str | int | list[int]] | None) -> tuple[str | list[int], ...]:
    if given is None:
        raise MissingFieldError("is missing.", field="input")
    if isinstance(given, str):
        given = [given]
    if not given:
        raise RequestError("is an empty list: give at least one text.", field="input")
    ids = [part for part in given if isinstance(part, int)]
    if ids and len(ids) < len(given):
        reason = "mixes token ids with texts or lists: give one input or a list of inputs."
        raise RequestError(reason, field="input")
    texts = tuple(part for part in given if not isinstance(part, int))
    for place, text in enumerate(texts):
        if not text:
            where = f"input[{place}]" if len(texts) > 1 else "input"
            raise RequestError("is empty: give at least one token.", field=where)
    return texts or (ids,)
