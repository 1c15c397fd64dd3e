"""POST /v1/completions: OpenAI's older protocol, which continues plain text or token ids."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.core.errors import RequestError
from twostroke.serve.dialect import DONE, Dialect, Reply, event
from twostroke.serve.http.errors import MissingFieldError, UnsupportedFieldError
from twostroke.serve.job import Conversation, Job
from twostroke.serve.openai.fields import (
    CommonFields,
    check_neutral,
    to_caller,
    to_params,
    to_prediction,
    told_tier,
)
from twostroke.serve.openai.logprobs import CompletionLogprobs, Echo, Offsets, completion_logprobs
from twostroke.serve.openai.usage import (
    TimingsBody,
    UsageBody,
    finish_reason,
    tier_of,
    timings_body,
    usage_body,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.engine.output import Completion, Output, Usage
    from twostroke.serve.store import Tenant

    WriteLogprobs = Callable[[Output | Completion], CompletionLogprobs]

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


class Choice(msgspec.Struct):
    """One answer, or one piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    timings: TimingsBody | UnsetType = UNSET


class CompletionBody(msgspec.Struct):
    """A whole response, or one event of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET


class CompletionWriter:
    """Writes pieces of text, and each answer's finish reason in an event of its own."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`; one struct is filled again and again."""
        self._reply = reply
        self._choice = Choice(0, "")
        usage = None if reply.job.include_usage else UNSET
        self._body = _body(reply, [self._choice], usage)
        self._has_logprobs = reply.job.params.logprobs is not None
        self._logprobs: dict[int, WriteLogprobs] = {}  # by index
        self._begun: set[int] = set()

    def feed(self, output: Output) -> bytes:
        """Return the events of an output."""
        choice, index = self._choice, output.index
        choice.index, choice.text = index, output.text
        if self._reply.job.echo and index not in self._begun:
            self._begun.add(index)
            choice.text = _prompt_text(self._reply, index) + output.text
        if self._has_logprobs:
            if index not in self._logprobs:
                self._logprobs[index] = _logprobs_of(self._reply, index)
            choice.logprobs = self._logprobs[index](output)
        has_news = choice.text or (choice.logprobs is not None and choice.logprobs.tokens)
        events = event(self._body) if has_news else b""
        choice.logprobs = None
        return events + self._last(output) if output.finish_reason is not None else events

    def finish(self, usage: Usage) -> bytes:
        """Return the usage, where asked for, and the end."""
        if not self._reply.job.include_usage:
            return DONE
        return event(_body(self._reply, [], usage_body(usage))) + DONE

    def _last(self, output: Output) -> bytes:
        assert output.finish_reason is not None
        choice = self._choice
        choice.text = ""
        choice.finish_reason = finish_reason(output.finish_reason)
        if self._reply.job.timings:
            assert output.usage is not None
            assert output.timings is not None
            choice.timings = timings_body(output.usage, output.timings)
        last = event(self._body)
        choice.finish_reason, choice.timings = None, UNSET
        return last


def read(asked: CompletionRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `param` names the field.
    """
    check_neutral(asked, NEUTRAL)
    if asked.suffix and asked.echo and (asked.logprobs is not None or asked.max_tokens == 0):
        message = "The prompt cannot be scored with a suffix: leave out echo, or logprobs."
        raise UnsupportedFieldError(message, param="suffix")
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


def whole(reply: Reply, answers: list[Completion], usage: Usage) -> CompletionBody:
    """Return the response that is not streamed."""
    return _body(reply, [_choice(reply, answer) for answer in answers], usage_body(usage))


def _choice(reply: Reply, answer: Completion) -> Choice:
    logprobs = None
    if reply.job.params.logprobs is not None:
        logprobs = _logprobs_of(reply, answer.index)(answer)
    return Choice(
        answer.index,
        (_prompt_text(reply, answer.index) if reply.job.echo else "") + answer.text,
        logprobs,
        finish_reason(answer.finish_reason),
        timings_body(answer.usage, answer.timings) if reply.job.timings else UNSET,
    )


def _logprobs_of(reply: Reply, index: int) -> WriteLogprobs:
    """Return what writes the log-probabilities of an answer, piece by piece."""
    if reply.job.echo:
        tokens = reply.prompts[index // reply.job.params.n]
        return Echo(reply.tokenizer, tokens, _prompt_text(reply, index)).write
    return partial(completion_logprobs, reply.tokenizer, offsets=Offsets(reply.tokenizer))


def _body(
    reply: Reply, choices: list[Choice], usage: UsageBody | UnsetType | None
) -> CompletionBody:
    tier = tier_of(reply.job)
    return CompletionBody(
        reply.id, "text_completion", reply.created_s, reply.model, choices, usage, tier
    )


def _prompt_text(reply: Reply, index: int) -> str:
    prompt = reply.job.prompts[index // reply.job.params.n]
    assert not isinstance(prompt, Conversation)
    return prompt if isinstance(prompt, str) else reply.tokenizer.decode(prompt)


def _prompts(
    prompt: str | list[str | int | list[int]] | None,
) -> tuple[str | list[int], ...]:
    if prompt is None:
        raise MissingFieldError("The field 'prompt' is missing.", param="prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("prompt is an empty list: give at least one prompt.", param="prompt")
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return (ids,)
    if ids:
        message = "prompt mixes token ids with texts or lists: give one prompt or a list of them."
        raise RequestError(message, param="prompt")
    return tuple(part for part in prompt if not isinstance(part, int))


DIALECT: Final = Dialect("completions", "cmpl-", CompletionRequest, read, CompletionWriter, whole)
