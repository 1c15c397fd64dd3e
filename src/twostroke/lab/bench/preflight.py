"""Asks an endpoint before a run which model it has, which fields it takes, and how it counts."""

from __future__ import annotations

import random
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError, UsageError, first_names, nearest
from twostroke.core.frozen import Frozen
from twostroke.lab.bench.answers import EMPTY, ReceivedAnswer
from twostroke.lab.bench.endpoint import ExchangeError
from twostroke.lab.bench.prompts import WORDS, PromptSizes
from twostroke.lab.bench.request_form import FORMS
from twostroke.lab.bench.requests_to_send import PlannedRequest

if TYPE_CHECKING:
    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.endpoint import EndpointClient
    from twostroke.lab.bench.request_form import RequestForm

_SHORT_PROMPT: Final = 16  # words
_MIN_TOKENS_PER_WORD: Final = 0.5
_MAX_TOKENS_PER_WORD: Final = 8.0  # a token for each byte of a word and its space
_KEY_STATUSES: Final = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
# An endpoint refuses a field that it does not know with these.
_FIELD_STATUSES: Final = {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}


class EndpointRefusedError(TwostrokeError):
    """An endpoint cannot be measured: it is not there, or refuses the key, model or fields."""


class EndpointFacts(Frozen):
    """The facts about an endpoint that a run needs.

    Attributes:
        form: how requests are written.
        sizes: how the endpoint counts the tokens of prompts.
        has_usage: whether it reports counts of tokens.
        has_tokenizer: whether it has `/tokenize`.
    """

    form: RequestForm
    sizes: PromptSizes
    has_usage: bool
    has_tokenizer: bool


async def ask_endpoint(client: EndpointClient, template: RequestForm) -> EndpointFacts:
    """Return the facts about an endpoint that a run in the form of `template` needs.

    The API, the model and the further fields of `template` stay. If it has no model, the only
    model of the endpoint is taken. Two or more short prompts are sent.

    Raises:
        EndpointRefusedError: the endpoint is not there, or refuses the key, model or fields.
        UsageError: the endpoint has several models, and none was named.
    """
    model = template.model or await _only_model(client)
    form, answer = await _accepted_form(client, replace(template, model=model))
    rng = random.Random()
    sizes = PromptSizes()
    if answer.has_usage:
        texts = [
            " ".join(rng.sample(WORDS, _SHORT_PROMPT)),
            " ".join(rng.sample(WORDS, len(WORDS))),
        ]
        lengths = [text.count(" ") + 1 for text in texts]
        answers = [await _send(client, form, text) for text in texts]
        counts = [one_answer.log.num_prompt for one_answer in answers]
        if answers[0].has_usage and answers[1].has_usage:
            sizes = _prompt_sizes(lengths, counts)
    has_tokenizer = await count_tokens(client, model, "some words") is not None
    return EndpointFacts(
        form=form, sizes=sizes, has_usage=answer.has_usage, has_tokenizer=has_tokenizer
    )


def _prompt_sizes(lengths: list[int], counts: list[int]) -> PromptSizes:
    """Return the sizes that follow from the counts of two prompts, with lengths in words.

    Counts that no tokenizer has are ignored; the audit then names the lengths of the prompts.
    """
    per_word = (counts[1] - counts[0]) / (lengths[1] - lengths[0])
    if not _MIN_TOKENS_PER_WORD <= per_word <= _MAX_TOKENS_PER_WORD:
        return PromptSizes()
    overhead = max(round(counts[0] - per_word * lengths[0]), 0)
    return PromptSizes(tokens_per_word=per_word, overhead=overhead)


async def count_tokens(client: EndpointClient, model: str, text: str) -> int | None:
    """Return the number of tokens of a text by the endpoint's `/tokenize`; None if it has none.

    The fields are for vLLM and Twostroke (`prompt`), and for llama-server (`content`).
    """
    bodies: list[dict[str, Any]] = [
        {"model": model, "prompt": text, "add_special_tokens": False},
        {"content": text},
    ]
    from twostroke.lab.bench.endpoint import WholeBody

    for fields in bodies:
        receiver = WholeBody()
        try:
            await client.post("/tokenize", msgspec.json.encode(fields), receiver)
            reply = msgspec.json.decode(receiver.body)
        except (ExchangeError, msgspec.MsgspecError):
            continue
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if receiver.status == 200 and isinstance(tokens, list) and tokens:
            return len(tokens)
    return None


async def _only_model(client: EndpointClient) -> str:
    try:
        reply = await client.get("/v1/models")
    except ExchangeError as error:
        raise _not_there(client, error) from None
    _check_key(client, reply.status)
    names: list[str] = []
    try:
        body = msgspec.json.decode(reply.body)
        names = [str(row["id"]) for row in body["data"]] if reply.status == 200 else []
    except (msgspec.MsgspecError, KeyError, TypeError):
        pass
    if len(names) > 1:
        reason = "is needed, because {url} has several models: {names}."
        facts = {"url": client.address.url, "names": first_names(names)}
        raise UsageError(reason, field="model", **facts)
    return names[0] if names else ""


async def _accepted_form(
    client: EndpointClient, template: RequestForm
) -> tuple[RequestForm, MeasuredAnswer]:
    """Return the first form that the endpoint accepts, and its first answer."""
    first_error = ""
    for tried in FORMS:
        if tried.ignores_end and not template.ignores_end:
            if not tried.counts_chunks:
                continue  # the same as the next form
            tried = replace(tried, ignores_end=False)  # noqa: PLW2901 - a variant of it
        form = replace(
            tried, api=template.api, model=template.model, extra_fields=template.extra_fields
        )
        answer = await _send(client, form, "Say hello.")
        if answer.is_completed or not answer.failure.startswith("HTTP "):
            break
        status = int(answer.failure.removeprefix("HTTP "))
        first_error = first_error or f"{answer.failure}: {answer.message}"
        if status not in _FIELD_STATUSES:
            break
    if answer.is_completed or answer.failure == EMPTY:
        return form, answer
    url = client.address.url
    if answer.failure in {"HTTP 404", "HTTP 405"}:
        raise EndpointRefusedError(await _missing(client, form, answer))
    reason = first_error or f"{answer.failure} {answer.message}".strip()
    raise EndpointRefusedError(f"{url} does not answer a short prompt: {reason.rstrip('.')}.")


async def _missing(client: EndpointClient, form: RequestForm, answer: MeasuredAnswer) -> str:
    """Return the sentence about an endpoint that has no such path, or no such model."""
    url = client.address.url
    try:
        reply = await client.get("/v1/models")
        names = [str(row["id"]) for row in msgspec.json.decode(reply.body)["data"]]
    except (ExchangeError, msgspec.MsgspecError, KeyError, TypeError):
        names = []
    if form.model and form.model not in names and names:
        hint = nearest(form.model, names)
        return f"{url} has no model '{form.model}', but {first_names(names)}.{hint}"
    message = answer.message if answer.message[-1:] in {*".?!"} else f"{answer.message}."
    if not form.model:
        return f"{url} has no {form.path}: give the URL of the server alone. It says: {message}"
    return f"{url} has no {form.path}, or not the model '{form.model}'. It says: {message}"


async def _send(client: EndpointClient, form: RequestForm, text: str) -> MeasuredAnswer:
    planned = PlannedRequest(0, form.body(text, 1), num_output=1)
    stream = ReceivedAnswer(keeps_text=False)
    now_s = client.now_s()
    try:
        await client.post(form.path, planned.body, stream)
    except ExchangeError as error:
        raise _not_there(client, error) from None
    _check_key(client, stream.status)
    return stream.measured(planned, scheduled_s=now_s, sent_s=now_s)


def _not_there(client: EndpointClient, error: ExchangeError) -> EndpointRefusedError:
    detail = error.detail.rstrip(".") or error.kind
    return EndpointRefusedError(f"{client.address.url} cannot be reached: {detail}.")


def _check_key(client: EndpointClient, status: int) -> None:
    if status in _KEY_STATUSES:
        raise EndpointRefusedError(
            f"{client.address.url} refuses the key (HTTP {status}): give one by --api-key-file, or "
            "set TWOSTROKE_API_KEY."
        )
