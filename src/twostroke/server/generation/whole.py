"""Answers that are not streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.server.http.disconnect import while_connected
from twostroke.server.http.json_responses import to_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.output import Completion
    from twostroke.server.generation.encoder import Encoder
    from twostroke.server.generation.stream import Started
    from twostroke.server.http.fair_queue import Readers

# More log-probabilities are written in a thread: each takes microseconds, while streams would wait.
_MANY_SCORES: Final = 4096


async def respond_whole(
    request: Request,
    started: Started,
    encoder: Encoder,
    readers: Readers,
) -> Response:
    """Return the response to a job, once all its answers have ended; errors as `Answers.whole`.

    Answers with a guard are settled by it first.

    Raises:
        SchemaMissError: an answer breaks its strict schema.
        ClientGoneError: the client left before that.
    """
    answers, reader, guard = started

    def written(completions: list[Completion]) -> Response:
        events = reader.read_whole(completions, answers.usage)
        if guard is None:
            return to_json(encoder.whole(events))
        return to_json(encoder.whole(guard.marked(events)), headers=guard.headers)

    try:
        work = answers.whole() if guard is None else guard.settled(answers)
        completions = await while_connected(request.receive, work)
        params = answers.params
        num_likely = 1 + max(params.logprobs or 0, params.prompt_logprobs or 0)
        num_scored = sum(
            len(answer.logprobs) + len(answer.prompt_logprobs) for answer in completions
        )
        if num_likely * num_scored <= _MANY_SCORES:
            return written(completions)
        return await readers.run_for(request, written, completions)
    finally:
        answers.cancel()
