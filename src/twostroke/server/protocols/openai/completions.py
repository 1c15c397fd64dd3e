"""POST /v1/completions: OpenAI's older protocol, which continues plain text or token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from twostroke.core.errors import RequestError
from twostroke.server.body import field
from twostroke.server.http.answer_limits import COMPLETIONS, DEFAULT_COMPLETION_TOKENS
from twostroke.server.http.errors import UnsupportedFieldError
from twostroke.server.protocols.common.fields import (
    CommonFields,
    check_combinations,
    to_caller,
    to_job,
    to_params,
)
from twostroke.server.protocols.common.prompts import split_prompts

if TYPE_CHECKING:
    from twostroke.server.generation.job import Job
    from twostroke.server.generation.response_store import Tenant


class CompletionRequest(CommonFields, kw_only=True):
    """The body of a completion request. With a `suffix`, the answer joins prompt and suffix."""

    prompt: Annotated[str | list[str | int | list[int]], field.texts_or_ids(field.Fact.MAX_CHOICES)]
    max_tokens: Annotated[
        int | None,
        field.doc(
            "At most this many tokens are generated; 0 needs `echo`, -1: all that fit.", minimum=-1
        ),
    ] = DEFAULT_COMPLETION_TOKENS
    echo: Annotated[bool | None, field.doc("Begin the answer with its prompt.")] = None
    logprobs: Annotated[
        int | None,
        field.sampling("logprobs", "How many of the likeliest tokens to report."),
    ] = None
    suffix: Annotated[
        str | None,
        field.doc("Text after the answer, for models that can fill in the middle."),
    ] = None

    add_special_tokens: field.AddSpecial = None
    parse_special: field.ParseSpecial = None


def read(request: CompletionRequest, tenant: Tenant) -> Job:
    """Translate the body of a completion request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    check_combinations(request)
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        reason = "may only be 0 where echo is true or prompt_logprobs is given."
        raise RequestError(reason, field="max_tokens")
    if (
        request.suffix
        and request.echo
        and (request.logprobs is not None or request.max_tokens == 0)
    ):
        reason = "cannot be combined with the prompt's logprobs: leave out echo or logprobs."
        raise UnsupportedFieldError(reason, field="suffix")
    for name in ("add_special_tokens", "parse_special"):
        if request.suffix and getattr(request, name) is not None:
            reason = "cannot be combined with suffix: leave one of them out."
            raise UnsupportedFieldError(reason, field=name)
    if request.echo and request.prompt_logprobs is not None:
        reason = "cannot be combined with echo: leave one of them out."
        raise UnsupportedFieldError(reason, field="prompt_logprobs")
    prompt_logprobs = request.logprobs if request.echo else request.prompt_logprobs
    if request.echo and request.max_tokens == 0:
        prompt_logprobs = prompt_logprobs or 0
    return to_job(
        request,
        split_prompts(request.prompt, "prompt"),
        params=to_params(
            request,
            max_tokens=COMPLETIONS.first_limit(request),
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        caller=to_caller(request, "prompt", tenant),
        echo=bool(request.echo),
        suffix=request.suffix or "",
        add_special=request.add_special_tokens is not False,
        parse_special=request.parse_special,
    )
