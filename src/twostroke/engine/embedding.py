"""Embeddings: pools the hidden states of a text into a vector of length 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.errors import EngineStoppedError, RequestError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.request import (
    AUTO_POOLING,
    DEFAULT_SERVICE_TIER,
    EmbeddingParams,
    FinishReason,
    Pooling,
)
from twostroke.engine.output import Output
from twostroke.engine.request_listener import RequestListener

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import RequestDelta
    from twostroke.engine.output import Mailbox, Timings, Usage

    Vector = NDArray[np.float32]


class Embedding(Frozen, eq=False):
    """The embedding of one text.

    Attributes:
        index: the text's index in the request.
        vector: (width,), a vector of length 1; with the pooling "none" (tokens, width), a vector
            for each token.
    """

    index: int
    vector: Vector
    usage: Usage
    timings: Timings

    def __repr__(self) -> str:
        """Show the embedding's size and its first values."""
        if self.vector.ndim > 1:
            return (
                f"Embedding(index={self.index}, {counted_noun(len(self.vector), 'vector')}, one "
                "for each token)"
            )
        first = ", ".join(f"{value:.3f}" for value in self.vector[:3])
        return (
            f"Embedding(index={self.index}, {counted_noun(len(self.vector), 'value')}: {first}, "
            "...)"
        )

    @classmethod
    def of(cls, output: Output) -> Embedding:
        """Return the embedding that an engine output holds; each text has one such output.

        Raises:
            EngineStoppedError: the text was cancelled, because the engine was stopped.
        """
        if output.finish_reason is FinishReason.CANCEL:
            raise EngineStoppedError("The engine was stopped before all embeddings were ready.")
        assert output.embedding is not None
        assert output.usage is not None
        assert output.timings is not None
        return cls(output.index, output.embedding, output.usage, output.timings)


def embeddings_in_order(outputs: Iterable[Output]) -> Iterator[Embedding]:
    """Yield the embeddings of texts in the order of the texts, from outputs in any order.

    Each embedding is yielded once it and all earlier embeddings are ready.
    """
    ready: dict[int, Embedding] = {}
    index = 0
    for output in outputs:
        ready[output.index] = Embedding.of(output)
        while index in ready:
            yield ready.pop(index)
            index += 1


MAX_TOKEN_VALUES: Final = 1 << 24  # in the token vectors of a text, with the pooling "none"


class Embedder(RequestListener):
    """Pools the hidden states of a text, which the engine's steps compute, into its embedding.

    The states are summed, or all are returned with the pooling "none". The sum is in float64, in
    the order of the text. So it does not depend on the steps that computed the rows, or on rows
    that were computed twice.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        mailbox: Mailbox,
        dimensions: int | None = None,
        service_tier: str = DEFAULT_SERVICE_TIER,
    ) -> None:
        """Pool the hidden states of `request`, the text `index` of a call.

        `mailbox` delivers the output to the caller. `dimensions` truncates vectors to their first
        values; None keeps all. `service_tier` is the service tier under which the request is
        counted.
        """
        super().__init__(request, index, mailbox, service_tier)
        self._dimensions = dimensions
        self._num_added = 0  # rows of the text
        self._sum: NDArray[np.float64] | None = None
        self._rows: list[Vector] = []  # of all tokens, without pooling

    def take(self, delta: RequestDelta, now_s: float) -> Output | None:
        """Add the hidden states of a step; return the text's only output after its last token.

        Returns None before the last token. `now_s` is the time at which the step ended.
        """
        if delta.states is not None:
            self._add(delta.states)
        reason = self.request.finish_reason
        if reason is None:
            return None
        self.last_token_s = now_s
        return self._complete(Output(self.index, "", (), embedding=self._vector()), reason)

    def _add(self, states: Vector) -> None:
        end = self.request.num_computed
        first = end - len(states)
        if self._sum is None:  # sums begin with the first row that is pooled
            self._sum, self._num_added = np.zeros(states.shape[1]), first
        assert first <= self._num_added, "a row is missing"
        if self.request.pooling is Pooling.NONE:
            self._rows.append(np.array(states[self._num_added - first :, : self._dimensions]))
        else:
            for row in states[self._num_added - first :]:
                self._sum += row
        self._num_added = max(self._num_added, end)

    def _vector(self) -> Vector:
        if self.request.pooling is Pooling.NONE:
            return np.concatenate(self._rows).astype(np.float32)
        assert self._sum is not None
        vector = self._sum[: self._dimensions]
        length = np.sqrt(np.sum(vector * vector))
        return np.asarray(vector / length if length else vector, np.float32)


def check_token_values(texts: Sequence[Sequence[int]], width: int) -> None:
    """Refuse texts whose token vectors have more than `MAX_TOKEN_VALUES` values in one text.

    With the pooling "none", a text has a vector of `width` values for each token.

    Raises:
        RequestError: a text has too many tokens for the pooling "none".
    """
    limit = MAX_TOKEN_VALUES // width
    if (num_tokens := max(map(len, texts), default=0)) > limit:
        reason = (
            f"'none' takes texts of at most {counted_noun(limit, 'token', form=',')} with this "
            f"model, got {num_tokens:,}."
        )
        raise RequestError(reason, field="pooling")


def check_total_values(
    texts: Sequence[Sequence[int]],
    params: EmbeddingParams,
    pooling: Pooling,
    *,
    width: int,
    limit: int,
    field: str,
) -> None:
    """Refuse an embedding request whose vectors have more than `limit` values together.

    `width` is the number of values of the model's vectors, `field` the request's field of texts.

    Raises:
        RequestError: the request has too many texts, or too many tokens with the pooling
            "none".
    """
    width = params.dimensions or width
    is_of_tokens = pooling is Pooling.NONE
    num_vectors = sum(map(len, texts)) if is_of_tokens else len(texts)
    if num_vectors * width <= limit:
        return
    unit = "tokens in all with the pooling 'none'" if is_of_tokens else "texts"
    reason = (
        "takes at most {max_vectors:,} {unit}, since each vector has {width:,} values and the "
        "vectors of a request at most {limit:,} together, got {count:,}."
    )
    facts = {"max_vectors": limit // width, "unit": unit, "width": width, "limit": limit}
    raise RequestError(reason.format(**facts, count=num_vectors), field=field)


def choose_pooling(
    params: EmbeddingParams, model: str, own_pooling: str | None, width: int
) -> Pooling:
    """Return the requested pooling; for "auto" the pooling of the model's files, or the mean.

    `own_pooling` is the pooling that the model's files name, `width` the size of its vectors.

    Raises:
        RequestError: the pooling of the model's files is not supported, or the request wants more
            than `width` dimensions.
    """
    if params.dimensions is not None and params.dimensions > width:
        raise RequestError(
            "must be from 1 to {limit} for {name}, got {value}.",
            field="dimensions",
            limit=width,
            name=model,
            value=params.dimensions,
        )
    name = own_pooling if params.pooling == AUTO_POOLING else params.pooling
    if name is None or (params.pooling == AUTO_POOLING and name == Pooling.NONE.value):
        return Pooling.MEAN
    if name not in {pooling.value for pooling in Pooling}:
        raise RequestError(
            "must be 'mean', 'last' or 'none': {name} was made for {own!r}, which is not "
            "supported.",
            field="pooling",
            name=model,
            own=name,
        )
    return Pooling(name)
