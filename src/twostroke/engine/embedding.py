"""Embeddings: the hidden states of a text become a vector of length 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.embedding import AUTO, EmbeddingParams, Pooling
from twostroke.core.errors import EngineStoppedError, RequestError
from twostroke.core.frozen import Frozen
from twostroke.core.request import DEFAULT_SERVICE_TIER, FinishReason
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
    """One text's vector, of length 1, with its usage and its timings.

    With the pooling "none", `vector` (tokens, width) has a vector for each token.
    """

    index: int
    vector: Vector
    usage: Usage
    timings: Timings

    def __repr__(self) -> str:
        """Show the vector's size and its first values."""
        if self.vector.ndim > 1:
            return f"Embedding(index={self.index}, {len(self.vector)} vectors, one for each token)"
        first = ", ".join(f"{value:.3f}" for value in self.vector[:3])
        return f"Embedding(index={self.index}, {len(self.vector)} values: {first}, ...)"

    @classmethod
    def of(cls, output: Output) -> Embedding:
        """Return the embedding in the only output of a text.

        Raises:
            EngineStoppedError: the text was cancelled.
        """
        if output.finish_reason is FinishReason.CANCEL:
            raise EngineStoppedError("The engine was stopped before all embeddings were ready.")
        assert output.embedding is not None
        assert output.usage is not None
        assert output.timings is not None
        return cls(output.index, output.embedding, output.usage, output.timings)


def in_order(outputs: Iterable[Output]) -> Iterator[Embedding]:
    """Yield embeddings in the order of their texts, each as soon as possible."""
    ready: dict[int, Embedding] = {}
    index = 0
    for output in outputs:
        ready[output.index] = Embedding.of(output)
        while index in ready:
            yield ready.pop(index)
            index += 1


MAX_TOKEN_VALUES: Final = 1 << 24  # of the vectors of all tokens of a text


class Embedder(RequestListener):
    """Adds up the hidden states of a text, or keeps all of them if they are not pooled.

    They are added in float64, row by row in the order of the text, so the sum does not depend on
    how the text was divided into steps or on rows that were computed again.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        mailbox: Mailbox,
        dimensions: int | None = None,
        service: str = DEFAULT_SERVICE_TIER,
    ) -> None:
        """Keep `dimensions` of `EmbeddingParams`; the other arguments as in `RequestListener`."""
        super().__init__(request, index, mailbox, service)
        self._dimensions = dimensions
        self._num_added = 0  # of the text's rows
        self._sum: NDArray[np.float64] | None = None
        self._rows: list[Vector] = []  # of all tokens, without pooling

    def take(self, delta: RequestDelta, now_s: float) -> Output | None:
        """Return the vector once the whole text is computed."""
        if delta.states is not None:
            self._add(delta.states)
        reason = self.request.finish_reason
        if reason is None:
            return None
        self.last_token_s = now_s
        return self._ended(Output(self.index, "", (), embedding=self._vector()), reason)

    def _add(self, states: Vector) -> None:
        end = self.request.num_computed
        first = end - len(states)
        if self._sum is None:  # sums begin with the first row that is pooled
            self._sum, self._num_added = np.zeros(states.shape[1]), first
        assert first <= self._num_added, "a row was passed over"
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
        kept = self._sum[: self._dimensions]
        length = np.sqrt(np.sum(kept * kept))
        return np.asarray(kept / length if length else kept, np.float32)


def check_token_values(texts: Sequence[Sequence[int]], width: int) -> None:
    """Check that a vector for each token of a text is not too much.

    Raises:
        RequestError: a text has too many tokens.
    """
    limit = MAX_TOKEN_VALUES // width
    if (num_tokens := max(map(len, texts), default=0)) > limit:
        reason = (
            f"'none' takes texts of at most {limit:,} tokens with this model, got {num_tokens:,}."
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
    """Check that the vectors of all texts of a request have at most `limit` values together.

    `width` is the length of the model's vectors, `field` the request's field with the texts.

    Raises:
        RequestError: there are too many tokens, or with vectors of whole texts too many texts.
    """
    width = params.dimensions or width
    is_of_tokens = pooling is Pooling.NONE
    num_vectors = sum(map(len, texts)) if is_of_tokens else len(texts)
    if num_vectors * width <= limit:
        return
    unit = "tokens in all with the pooling 'none'" if is_of_tokens else "texts"
    reason = (
        "takes at most {most:,} {unit}, since each vector has {width:,} values and the vectors "
        "of a request at most {limit:,} together, got {count:,}."
    )
    facts = {"most": limit // width, "unit": unit, "width": width, "limit": limit}
    raise RequestError(reason.format(**facts, count=num_vectors), field=field)


def choose_pooling(
    params: EmbeddingParams, model: str, own_pooling: str | None, width: int
) -> Pooling:
    """Return the pooling that was asked for, else the model's own, else the mean.

    Raises:
        RequestError: the model's own pooling is not supported, or its embeddings have only `width`
            dimensions.
    """
    if params.dimensions is not None and params.dimensions > width:
        raise RequestError(
            "must be from 1 to {limit} for {name}, got {value}.",
            field="dimensions",
            limit=width,
            name=model,
            value=params.dimensions,
        )
    wanted = own_pooling if params.pooling == AUTO else params.pooling
    if wanted is None or (params.pooling == AUTO and wanted == Pooling.NONE.value):
        return Pooling.MEAN
    if wanted not in {pooling.value for pooling in Pooling}:
        raise RequestError(
            "must be 'mean', 'last' or 'none': {name} was made for {own!r}, which is not "
            "supported.",
            field="pooling",
            name=model,
            own=wanted,
        )
    return Pooling(wanted)
