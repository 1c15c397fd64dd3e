"""Refuses at once what could never fit, and what a full queue cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import ContextLengthError, OverloadedError, RequestError

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.schedule.config import SchedulerConfig


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
        raise RequestError(f"The {prompt} is empty; give at least one token.", param=prompt)
    sizes = (num_prompt, 1 if answer is None else answer, context_length)
    if num_prompt + (answer != 0) > context_length:
        raise too_long(prompt, sizes)
    total = num_prompt + (1 if answer is None else answer)
    if total > context_length:
        message = (
            f"{_start(context_length)}you requested {total} tokens ({num_prompt} in the {prompt}, "
            f"{answer} in the completion). Please reduce the length of the {prompt} or completion."
        )
        raise ContextLengthError(message, param="max_tokens", sizes=sizes)
    if total > num_slots:
        message = (
            f"The request needs key-value memory for {total} tokens ({num_prompt} of them "
            f"prompt), but there is memory for {num_slots}. "
            "Shorten the prompt, lower max_tokens, or give the cache more memory."
        )
        raise ContextLengthError(message, param="max_tokens" if answer else prompt)
    return total if answer is not None else min(context_length, num_slots)


def too_long(
    prompt: str, sizes: tuple[int, int, int], *, is_counted: bool = True
) -> ContextLengthError:
    """Return the error of a prompt that alone exceeds the context length.

    `prompt` is the field that it stands in; `sizes` and `is_counted` are the error's.
    """
    num_prompt, _, context_length = sizes
    count = num_prompt if is_counted else f"at least {num_prompt}"
    message = (
        f"{_start(context_length)}your {prompt} resulted in {count} tokens. "
        f"Please reduce the length of the {prompt}."
    )
    return ContextLengthError(message, param=prompt, sizes=sizes, is_counted=is_counted)


def _start(context_length: int) -> str:
    return f"This model's maximum context length is {context_length} tokens. However, "


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
