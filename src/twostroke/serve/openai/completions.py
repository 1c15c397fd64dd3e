"""POST /v1/completions: OpenAI's older protocol, which continues plain text or token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import RequestError
from twostroke.serve.http.errors import MissingFieldError, UnsupportedFieldError
from twostroke.serve.job import Job
from twostroke.serve.openai.fields import (
    CommonFields,
    check_neutral,
    to_caller,
    to_params,
    to_prediction,
    told_tier,
)

if TYPE_CHECKING:
    from twostroke.serve.store import Tenant

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_special_tokens": (True,),
}


class CompletionRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request; `prompt` is a text, token ids, or a list of either.

    With a `suffix` each answer stands between a prompt and that.
    """

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


def read(asked: CompletionRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    check_neutral(asked, NEUTRAL)
    if asked.suffix and asked.echo and (asked.logprobs is not None or asked.max_tokens == 0):
        reason = "cannot be combined with the prompt's logprobs: leave out echo or logprobs."
        raise UnsupportedFieldError(reason, field="suffix")
    prompt_logprobs = asked.logprobs if asked.echo else None
    if asked.echo and asked.max_tokens == 0:
        prompt_logprobs = prompt_logprobs or 0
    options = asked.stream_options
    max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    return Job(
        model=asked.model,
        prompts=_prompts(asked.prompt),
        params=to_params(
            asked,
            max_tokens=max_tokens,
            logprobs=asked.logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        caller=to_caller(asked, "prompt", tenant),
        speculate="auto" if asked.speculate is None else asked.speculate,
        prediction=to_prediction(asked),
        stream=bool(asked.stream),
        include_usage=options is not None and bool(options.include_usage),
        echo=bool(asked.echo),
        suffix=asked.suffix or "",
        timings=bool(asked.return_timings),
        tier=told_tier(asked),
    )


def _prompts(
    prompt: str | list[str | int | list[int]] | None,
) -> tuple[str | list[int], ...]:
    if prompt is None:
        raise MissingFieldError("is missing.", field="prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("is an empty list: give at least one prompt.", field="prompt")
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return (ids,)
    if ids:
        reason = "mixes token ids with texts or lists: give one prompt or a list of prompts."
        raise RequestError(reason, field="prompt")
    return tuple(part for part in prompt if not isinstance(part, int))
