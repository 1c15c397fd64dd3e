"""Texts that are read for their embeddings: from hidden states to vectors of length 1."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.embedding import AUTO, EmbeddingParams, Pooling
from twostroke.core.errors import EngineStoppedError, OverloadedError, RequestError
from twostroke.core.request import FinishReason
from twostroke.core.service import DEFAULT_SERVICE
from twostroke.engine.client import AsyncGeneration, Caller, Generation
from twostroke.engine.counters import COMPLETED
from twostroke.engine.output import Output, Timings, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from numpy.typing import NDArray

    from twostroke.core.errors import TwostrokeError
    from twostroke.core.request import Request
    from twostroke.core.step import Delta
    from twostroke.engine.client import Client, ModelCard
    from twostroke.engine.counters import ServiceCounter
    from twostroke.engine.mail import Mailbox

    Vector = NDArray[np.float32]

# How many texts of one caller the engine has at a time: enough to fill its steps, and few enough to
# leave others a place in the queue.
_MOST_OPEN: Final = 256
# How long a caller whose texts the full queue does not take waits before it tries again.
_RETRY_S: Final = 0.02
_STOPPED: Final = "The engine was stopped before all embeddings were ready."


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """One text's vector, of length 1, and what it took."""

    index: int
    vector: Vector
    usage: Usage
    timings: Timings


class Embedder:
    """Adds up the hidden states of one request; lives from submission to its last output.

    They are added in float64, row by row in the order of the text: however the text was cut and
    computed again, the sum is the same.
    """

    counter: ServiceCounter  # the loop's, from submission on

    def __init__(
        self,
        request: Request,
        index: int,
        mailbox: Mailbox,
        dimensions: int | None = None,
        service: str = DEFAULT_SERVICE,
    ) -> None:
        """Read for the vector number `index` of its caller's, with so many `dimensions`."""
        self.num_output = 0
        self.first_token_s = self.last_token_s = 0.0
        self.service = service
        self.request = request
        self.index = index
        self.mailbox = mailbox
        self._dimensions = dimensions
        self._num_added = 0  # of the text's rows
        self._sum: NDArray[np.float64] | None = None

    def take(self, delta: Delta, now_s: float) -> Output:
        """Return what a step's states mean to the caller: nothing, or the vector."""
        if delta.states is not None:
            self._add(delta.states)
        if self.request.finish_reason is None:
            return Output(self.index, "", ())
        return self._last(self.request.finish_reason, now_s, vector=self._vector())

    def cut(self, reason: FinishReason, error: TwostrokeError | None = None) -> Output:
        """Return the last output of a text that has no vector."""
        return self._last(reason, 0.0, error=error)

    def count_end(self, reason: FinishReason, _timings: Timings | None = None) -> None:
        """Count a text that has its vector; it is no answer."""
        if reason in COMPLETED:
            self.counter.count_embedded(self.request)

    def _add(self, states: Vector) -> None:
        end = self.request.num_computed
        first = end - len(states)
        if self._sum is None:  # the first row that is wanted, wherever it is
            self._sum, self._num_added = np.zeros(states.shape[1]), first
        assert first <= self._num_added, "a row was passed over"
        for row in states[self._num_added - first :]:
            self._sum += row
        self._num_added = max(self._num_added, end)

    def _vector(self) -> Vector:
        assert self._sum is not None
        cut = self._sum[: self._dimensions]
        length = np.sqrt(np.sum(cut * cut))
        return np.asarray(cut / length if length else cut, np.float32)

    def _last(
        self,
        reason: FinishReason,
        now_s: float,
        vector: Vector | None = None,
        error: TwostrokeError | None = None,
    ) -> Output:
        request = self.request
        return Output(
            self.index,
            "",
            (),
            finish_reason=reason,
            usage=Usage(request.num_prompt, request.num_cached, 0),
            timings=Timings(request.arrival_s, request.started_s, 0.0, now_s),
            error=error,
            embedding=vector,
        )


class Line:
    """The texts of one caller, which come to the engine as it has places for them.

    A full queue refuses a caller as long as it has taken none of its texts; afterwards these wait,
    so that nothing that has been computed is thrown away.
    """

    def __init__(
        self,
        client: Client,
        texts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        caller: Caller,
        generation: Generation | AsyncGeneration,
    ) -> None:
        """Hand over as many as may be open; their outputs come to `generation`.

        Raises:
            RequestError: a text is empty, has an unknown token, or can never fit, or the model
                does not embed in this way.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        self._client = client
        self._generation = generation
        pooling, dimensions = choose_pooling(client.card, params), _dimensions(client.card, params)
        requests = client.to_embed(texts, pooling, caller)
        self._waiting = deque(
            Embedder(request, index, generation.mailbox, dimensions, caller.service)
            for index, request in enumerate(requests)
        )
        self.feed()

    @property
    def is_done(self) -> bool:
        """Whether all outputs have come."""
        return not self._waiting and not self._generation.num_open

    @property
    def is_shut_out(self) -> bool:
        """Whether no output can come before `feed` has handed over another text."""
        return bool(self._waiting) and not self._generation.num_open

    def feed(self) -> None:
        """Hand over as many texts as may be open and as the queue takes.

        No policy may wait for more of them then: it is told that none come for now.

        Raises:
            OverloadedError: it has not taken a single one yet.
            EngineStoppedError: the engine no longer runs.
        """
        generation = self._generation
        if not self._waiting or generation.num_open >= _MOST_OPEN:
            return
        try:
            while self._waiting and generation.num_open < _MOST_OPEN:
                self._client.loop.submit([self._waiting[0]])
                generation.request_ids.append(self._waiting.popleft().request.id)
        except OverloadedError:
            if not generation.request_ids:
                raise
        self._client.loop.flush()


def embed(
    client: Client, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
) -> Iterator[Embedding]:
    """Yield the embeddings of texts (token ids) in their order; leaving early cancels the rest.

    Raises:
        TwostrokeError: as `Line`, or the engine failed under a text.
    """
    generation = Generation(client.loop)
    known: dict[int, Embedding] = {}
    try:
        line = Line(client, texts, params, caller, generation)
        for index in range(len(texts)):
            while index not in known:
                if line.is_shut_out:
                    time.sleep(_RETRY_S)
                elif (found := _read(generation.next())) is not None:
                    known[found.index] = found
                line.feed()
            yield known.pop(index)
    finally:
        generation.cancel()


class Embeddings:
    """The embeddings of an asynchronous caller's texts, in the order in which they are ready."""

    def __init__(
        self,
        client: Client,
        texts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        caller: Caller,
    ) -> None:
        """Begin in the running event loop; raises as `Line`."""
        self._generation = AsyncGeneration(client.loop)
        self._line = Line(client, texts, params, caller, self._generation)
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Embedding]:
        """Yield embeddings; a caller that leaves early calls `cancel`.

        Raises:
            EngineStoppedError: it was stopped, or this was cancelled.
            TwostrokeError: the engine failed under a text.
        """
        while not self._line.is_done:
            found = await self._next()
            if self._is_cancelled:
                raise EngineStoppedError(_STOPPED)
            self._line.feed()
            if found is not None:
                yield found

    def cancel(self) -> None:
        """Stop whatever still runs."""
        self._is_cancelled = True
        self._generation.cancel()

    async def _next(self) -> Embedding | None:
        from asyncio import sleep  # blocking callers do without it

        if self._line.is_shut_out:
            await sleep(_RETRY_S)
            return None
        return _read(await self._generation.next())


def choose_pooling(card: ModelCard, params: EmbeddingParams) -> Pooling:
    """Return what is pooled: what was asked for, else what the model's files say, else the mean.

    Raises:
        RequestError: they say what is not known here.
    """
    named = card.pooling if params.pooling == AUTO else params.pooling
    if named is None:
        return Pooling.MEAN
    if named not in {pooling.value for pooling in Pooling}:
        raise RequestError(
            "must be 'mean' or 'last': the one that {name} was made for, {named!r}, is not "
            "supported.",
            field="pooling",
            name=card.name,
            named=named,
        )
    return Pooling(named)


def _dimensions(card: ModelCard, params: EmbeddingParams) -> int | None:
    width = card.embedding_width
    if params.dimensions is not None and params.dimensions > width:
        raise RequestError(
            "must be from 1 to {limit} for {name}, got {value}.",
            field="dimensions",
            limit=width,
            name=card.name,
            value=params.dimensions,
        )
    return params.dimensions


def _read(output: Output) -> Embedding | None:
    """Return the embedding that an output brings, if it does."""
    if output.finish_reason is FinishReason.CANCEL:  # by nobody who still reads
        raise EngineStoppedError(_STOPPED)
    if output.embedding is None:
        return None
    assert output.usage is not None
    assert output.timings is not None
    return Embedding(output.index, output.embedding, output.usage, output.timings)
