"""Asks an endpoint before a run which model it has, which fields it accepts, and how it counts."""

from __future__ import annotations

import contextlib
import random
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError, UsageError, first_names, nearest
from twostroke.core.frozen import Frozen
from twostroke.lab.bench.answers import EMPTY, ReceivedAnswer
from twostroke.lab.bench.conversations import TOOLS
from twostroke.lab.bench.endpoint import ExchangeError, WholeBody
from twostroke.lab.bench.prompts import WORDS, PromptSizes
from twostroke.lab.bench.request_form import FORMS, PlannedRequest

if TYPE_CHECKING:
    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.endpoint import EndpointClient
    from twostroke.lab.bench.request_form import RequestForm

_CALL_TOKENS: Final = 128
_SHORT_PROMPT: Final = 16  # words
_MIN_TOKENS_PER_WORD: Final = 0.5
_MAX_TOKENS_PER_WORD: Final = 8.0  # a token for each byte of a word and its space
_KEY_STATUSES: Final = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
# An endpoint refuses a field that it does not know with these.
_FIELD_STATUSES: Final = {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}


class EndpointRefusedError(TwostrokeError):
    """An endpoint cannot be measured: it is unreachable, or refuses the key, model or fields."""


class EndpointFacts(Frozen):
    """The facts about an endpoint that a run needs.

    Attributes:
        form: how requests are written.
        sizes: how the endpoint counts the tokens of prompts.
        has_usage: whether it reports counts of tokens.
        has_tokenizer: whether it has `/tokenize`.
        has_tools: whether it makes a tool call if the request requires one; False if this was not
            tested.
        context_length: most tokens of a prompt and its answer; 0 if the endpoint does not say.
    """

    form: RequestForm
    sizes: PromptSizes
    has_usage: bool
    has_tokenizer: bool
    has_tools: bool = False
    context_length: int = 0


async def ask_endpoint(
    client: EndpointClient, template: RequestForm, *, asks_tools: bool = False
) -> EndpointFacts:
    """Return the facts about an endpoint that a run in the form of `template` needs.

    The API, the model and the extra fields of `template` are used unchanged. If it names no model,
    the endpoint's only model is used. Two or more short prompts are sent.

    Raises:
        EndpointRefusedError: the endpoint is unreachable, or refuses the key, model or fields.
        UsageError: the endpoint has several models, and `template` names none.
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
    tokenized = await _tokenize(client, model, "some words")
    return EndpointFacts(
        form=form,
        sizes=sizes,
        has_usage=answer.has_usage,
        has_tokenizer=tokenized is not None,
        has_tools=asks_tools and await _has_tools(client, form),
        context_length=await _context_length(client, tokenized),
    )


async def _has_tools(client: EndpointClient, form: RequestForm) -> bool:
    """Whether the endpoint makes a tool call if the request requires one."""
    if form.api != "chat":
        return False
    fields = {
        **form.extra_fields,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    form = replace(form, extra_fields=fields, ignores_end=False)
    answer = await _send(client, form, "Look up the weather.", max_output=_CALL_TOKENS)
    return answer.is_completed and answer.num_calls > 0


def _prompt_sizes(lengths: list[int], counts: list[int]) -> PromptSizes:
    """Return the tokens per word and per prompt.

    They are computed from prompts of `lengths` words, for which the endpoint reports `counts`
    tokens. Impossible counts are ignored; the audit then reports prompts of other lengths than
    wanted.
    """
    per_word = (counts[1] - counts[0]) / (lengths[1] - lengths[0])
    if not _MIN_TOKENS_PER_WORD <= per_word <= _MAX_TOKENS_PER_WORD:
        return PromptSizes()
    overhead = max(round(counts[0] - per_word * lengths[0]), 0)
    return PromptSizes(tokens_per_word=per_word, overhead=overhead)


async def count_tokens(client: EndpointClient, model: str, text: str) -> int | None:
    """Return the number of tokens of a text by the endpoint's `/tokenize`; None if it has none."""
    reply = await _tokenize(client, model, text)
    return None if reply is None else len(reply["tokens"])


async def send_short_prompt(client: EndpointClient, form: RequestForm) -> None:
    """Send a short prompt, and return when its answer has come; a failure is ignored."""
    with contextlib.suppress(EndpointRefusedError):
        await _send(client, form, "Say hello.")


async def _tokenize(client: EndpointClient, model: str, text: str) -> dict[str, Any] | None:
    """Return the reply of the endpoint's `/tokenize`, which has `tokens`; None if it has none.

    The fields are for vLLM and Twostroke (`prompt`), and for llama-server (`content`).
    """
    bodies: list[dict[str, Any]] = [
        {"model": model, "prompt": text, "add_special_tokens": False},
        {"content": text},
    ]
    for fields in bodies:
        receiver = WholeBody()
        try:
            await client.post("/tokenize", msgspec.json.encode(fields), receiver)
            reply = msgspec.json.decode(receiver.body)
        except (ExchangeError, msgspec.MsgspecError):
            continue
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if receiver.status == 200 and isinstance(tokens, list) and tokens:
            return dict(reply)
    return None


async def _context_length(client: EndpointClient, tokenized: dict[str, Any] | None) -> int:
    """Return the most tokens of a prompt and its answer; 0 if the endpoint does not say.

    vLLM and Twostroke say it in the reply of `/tokenize`, and llama-server in `/props`.
    """
    length = (tokenized or {}).get("max_model_len")
    if length is None:
        try:
            reply = await client.get("/props")
            body = msgspec.json.decode(reply.body)
            length = body["default_generation_settings"]["n_ctx"]
        except (ExchangeError, msgspec.MsgspecError, KeyError, TypeError):
            return 0
    return length if isinstance(length, int) else 0


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
    """Return a sentence if the endpoint has no such path or no such model; empty otherwise."""
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


async def _send(
    client: EndpointClient, form: RequestForm, text: str, *, max_output: int = 1
) -> MeasuredAnswer:
    planned = PlannedRequest(0, form.body(text, max_output), num_output=max_output)
    stream = ReceivedAnswer(keeps_text=False, keeps_reply=True)
    now_s = client.now_s()
    try:
        await client.post(form.path, planned.body, stream)
    except ExchangeError as error:
        raise _not_there(client, error) from None
    _check_key(client, stream.status)
    return stream.measured(planned, scheduled_s=now_s, sent_s=now_s)


def _not_there(client: EndpointClient, error: ExchangeError) -> EndpointRefusedError:
    detail = error.detail.rstrip(".") or error.kind
    if error.kind == "TLS error":
        detail += ": give its authority by --ca-file, or accept any certificate by --insecure"
    return EndpointRefusedError(f"{client.address.url} cannot be reached: {detail}.")


def _check_key(client: EndpointClient, status: int) -> None:
    if status in _KEY_STATUSES:
        raise EndpointRefusedError(
            f"{client.address.url} refuses the key (HTTP {status}): give one by --api-key-file, or "
            "set TWOSTROKE_API_KEY."
        )
