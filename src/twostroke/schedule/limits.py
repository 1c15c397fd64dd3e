"""Refuses at once what could never fit, and what a full queue cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ContextLengthError, Field, OverloadedError, RequestError

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.schedule.config import SchedulerConfig

_START: Final = "This model's maximum context length is {context_length} tokens. However, "


def max_len(request: Request, context_length: int, num_slots: int) -> int:
    """Return how many tokens end the request, prompt included.

    `num_slots` is how many tokens the whole page pool holds.

    Raises:
        RequestError: there is no prompt.
        ContextLengthError: the prompt, or prompt and `max_tokens`, exceed either. The wording for
            the context length is OpenAI's, which clients search for.
    """
    answer, num_prompt = request.max_output, len(request.tokens)
    prompt = request.prompt_field
    if not num_prompt:
        raise RequestError("is empty: give at least one token.", field=prompt)
    total = num_prompt + (1 if answer is None else answer)
    if num_prompt + (answer != 0) > context_length:
        raise too_long(prompt, num_prompt, context_length)
    if total > context_length:
        raise ContextLengthError(
            f"{_START}you requested {total} tokens ({num_prompt} in the {prompt}, {answer} in the "
            f"completion). Please reduce the length of the {prompt} or completion.",
            field="max_tokens",
            num_prompt=num_prompt,
            num_answer=answer,
            context_length=context_length,
        )
    if total > num_slots:
        raise ContextLengthError(
            f"The request needs key-value memory for {total} tokens ({num_prompt} of them "
            f"prompt), but there is memory for {num_slots}. "
            "Shorten the prompt, lower {limit}, or give the cache more memory.",
            field="max_tokens" if answer else prompt,
            limit=Field("max_tokens"),
        )
    return total if answer is not None else min(context_length, num_slots)


def too_long(
    prompt: str, num_prompt: int, context_length: int, *, is_counted: bool = True
) -> ContextLengthError:
    """Return the error of a prompt, in the field `prompt`, that alone exceeds the context length.

    With `is_counted` false it has at least `num_prompt` tokens.
    """
    return ContextLengthError(
        _START + "your {field} resulted in {least}{num_prompt} tokens. "
        "Please reduce the length of the {field}.",
        field=prompt,
        least="" if is_counted else "at least ",
        num_prompt=num_prompt,
        context_length=context_length,
    )


def check_queue(
    config: SchedulerConfig, num_waiting: int, num_waiting_tokens: int, request: Request
) -> None:
    """Refuse a request for which the queue has no place.

    Raises:
        OverloadedError: too many requests wait, or too many tokens.
    """
    if num_waiting >= config.max_waiting_requests:
        message = (
            f"The queue is full: {num_waiting} requests wait, and at most "
            f"{config.max_waiting_requests} may. Try again later."
        )
        raise OverloadedError(message)
    num_tokens = num_waiting_tokens + len(request.tokens)
    if num_waiting and num_tokens > config.max_waiting_tokens:
        message = (
            f"The queue is full: {num_tokens} tokens would wait, and at most "
            f"{config.max_waiting_tokens} may. Try again later."
        )
        raise OverloadedError(message)
