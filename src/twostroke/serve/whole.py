"""Answers that are not streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.http.disconnect import while_connected
from twostroke.serve.dialect import to_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.output import Completion
    from twostroke.serve.dialect import Encoder
    from twostroke.serve.events import EventReader
    from twostroke.serve.running import Answers
    from twostroke.serve.turns import Readers

# More log-probabilities are written in a thread: each takes microseconds, while streams would wait.
_MANY_SCORES: Final = 4096


async def respond_whole(
    request: Request, answers: Answers, reader: EventReader, encoder: Encoder, readers: Readers
) -> Response:
    """Return the response to a job, once all its answers have ended; errors as `Answers.whole`.

    Raises:
        ClientGoneError: the client left before that.
    """

    def written(whole: list[Completion]) -> Response:
        return to_json(encoder.whole(reader.read_whole(whole, answers.usage)))

    try:
        whole = await while_connected(request.receive, answers.whole())
        params = answers.params
        num_likely = 1 + max(params.logprobs or 0, params.prompt_logprobs or 0)
        num_scored = sum(len(one.logprobs) + len(one.prompt_logprobs) for one in whole)
        if num_likely * num_scored <= _MANY_SCORES:
            return written(whole)
        return await readers.run_for(request, written, whole)
    finally:
        answers.cancel()
