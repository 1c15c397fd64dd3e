"""Turns requests to the Responses API into jobs, with the conversations that they continue."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.generation.job import Conversation, Job, check_messages
from twostroke.server.generation.response_store import StoredResponse
from twostroke.server.http.answer_limits import RESPONSES
from twostroke.server.http.errors import MissingFieldError
from twostroke.server.http.ignored import Ignored
from twostroke.server.protocols.common.fields import (
    ignored_fields,
    retention_s,
    to_caller,
    to_max_tokens,
    to_params,
    to_prediction,
)
from twostroke.server.protocols.common.listing import LOGPROBS, unknown_includes
from twostroke.server.protocols.common.prompts import to_thinking
from twostroke.server.protocols.common.structured_output import JsonObject, to_constraint, to_schema
from twostroke.server.protocols.responses.conversations import (
    append_turn,
    check_room,
    find_conversation,
)
from twostroke.server.protocols.responses.items import read_input, to_messages, tools_in
from twostroke.server.protocols.responses.recall import items_of
from twostroke.server.protocols.responses.request import (
    ResponsesRequest,
    TextSchema,
    check,
    conversation_id,
)
from twostroke.server.protocols.responses.tools import read_tools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.reasoning import Thinking
    from twostroke.engine.chat.tools import Tools
    from twostroke.engine.model_card import ModelCard
    from twostroke.server.generation.response_store import Tenant
    from twostroke.server.protocols.responses.recall import RawItem
    from twostroke.server.protocols.responses.tools import ResponsesTool


class _StoredFlag(msgspec.Struct):
    """The field `store` of a stored response: whether its conversation was stored with it.

    Requests can continue a response only if its conversation was stored.
    """

    store: bool = True


_stored_flags: Final = msgspec.json.Decoder(_StoredFlag)


class PreviousNotFoundError(RequestError):
    """The response that a request continues is not stored."""

    code = "previous_response_not_found"


class Exchange(Conversation, kw_only=True):
    """The conversation that a response answers, with the data to store for later requests.

    Attributes:
        request: the request, whose options the response repeats.
        tenant: the sender, who owns the stored response.
        draft: the record to store, without the answer, which is not generated yet.
        is_stored: whether the response is stored with its conversation: false if the request
            does not want that, or if the conversation is too large.
    """

    request: ResponsesRequest
    tenant: Tenant
    draft: StoredResponse
    is_stored: bool

    def to_record(self, id_: str, answer: bytes, item_ids: Sequence[str]) -> StoredResponse:
        """Build the record under which the response is stored.

        `id_` is the response's id, `answer` its JSON; `item_ids` are the ids of its output items.
        """
        ids = (*self.draft.item_ids, *item_ids)
        return StoredResponse(
            id=id_,
            request_items=self.draft.request_items,
            answer=answer,
            item_ids=ids,
            previous=self.draft.previous,
        )

    def store_open(self, id_: str, answer: bytes) -> StoredResponse | None:
        """Store a response that is still being computed, so that clients can read its state.

        Requests cannot continue it yet. Returns the stored record; None if nothing is stored.
        """
        response = self.to_record(id_, answer, ())
        response.is_open = True
        return response if self.is_stored and self.tenant.put(response) else None

    def store_complete(self, response: StoredResponse, queued: StoredResponse | None) -> bool:
        """Store a complete response, which later requests can continue.

        `queued` is the record from `store_open`, which the response replaces. If a client has
        deleted that record meanwhile, nothing is stored. Returns whether the response is stored.
        """
        if not self.is_stored:
            return False
        if queued is not None:
            return self.tenant.supersede(queued, response)
        return self.tenant.put(response)

    def store_alone(self, queued: StoredResponse, answer: bytes, item_ids: Sequence[str]) -> None:
        """Store a background response without its conversation, which is too large.

        Clients can read the response, but requests cannot continue it. It replaces the record
        `queued` from `store_open`, which is removed if the response alone is too large, too.
        """
        ids = (*self.draft.item_ids, *item_ids)
        response = StoredResponse(
            id=queued.id, request_items=self.draft.request_items, answer=answer, item_ids=ids
        )
        if not self.tenant.supersede(queued, response):
            self.tenant.remove(queued.id)

    def join_conversation(self, response: StoredResponse) -> None:
        """Add the complete response to the stored conversation that its request names, if any."""
        id_ = conversation_id(self.request)
        if id_ is not None:
            append_turn(self.tenant, id_, response)


def read(request: ResponsesRequest, tenant: Tenant) -> Job:
    """Translate the body of a `/v1/responses` request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    check(request)
    exchange, tools, ignored = _exchange(request, tenant)
    if request.background and not exchange.is_stored:
        reason = "needs a stored response, but the conversation is too large to store, or the "
        reason += "server stores no responses."
        raise RequestError(reason, field="background")
    first_unknown = islice(unknown_includes(request.include or ()), 1)
    ignored_includes = [Ignored.of(error) for error in first_unknown]
    return Job(
        model=request.model,
        prompts=(exchange,),
        params=_params(request, tools),
        caller=to_caller(request, "input", tenant),
        speculate="auto" if request.speculate is None else request.speculate,
        prediction=to_prediction(request),
        stream=bool(request.stream),
        in_background=bool(request.background),
        timings=bool(request.return_timings),
        tools=tools,
        ignored=(*ignored_fields(request), *ignored_includes, *ignored),
        keep_s=retention_s(request.prompt_cache_retention),
    )


class InputTokens(msgspec.Struct, frozen=True):
    """The response of `/v1/responses/input_tokens`: all tokens of the prompt, cached or not."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def count_tokens(request: ResponsesRequest, card: ModelCard, tenant: Tenant) -> InputTokens:
    """Answer POST /v1/responses/input_tokens with the number of tokens in the prompt.

    Raises:
        RequestError: a value is out of bounds or not supported, as in a `/v1/responses`
            request.
    """
    previous = request.previous_response_id or request.conversation
    if not (request.input or request.instructions or previous):
        return InputTokens(0)
    [prompt] = read(request, tenant).prompts
    assert isinstance(prompt, Exchange)
    return InputTokens(len(prompt.encode(card)))


def field_names(request: ResponsesRequest) -> Mapping[str, str]:
    """Map the engine's parameter names to the Responses API's, so that errors name the sent field.

    A field that the request sends by the engine's own name is left out.
    """
    protocol_names = {"max_tokens": "max_output_tokens", "messages": "input"}
    return {
        name: protocol_name
        for name, protocol_name in protocol_names.items()
        if getattr(request, name) is None
    }


def _exchange(
    request: ResponsesRequest, tenant: Tenant
) -> tuple[Exchange, Tools | None, list[Ignored]]:
    """Assemble the conversation of a request, with the stored turns that the request continues.

    Returns the conversation, the tools that the answer may call, and the ignored fields of the
    request's items.

    Raises:
        RequestError: an item is not valid, or the conversation is too large or empty.
    """
    previous = _previous(request, tenant)
    turns = list(previous.conversation()) if previous else []
    if isinstance(request.input, list):
        check_messages(len(request.input), "input")
    item_ids = {id_ for turn in turns for id_ in turn.item_ids}
    new_items, ignored = read_input(request.input, tenant, item_ids)
    if not new_items and previous is None:
        if request.input is not None:
            reason = "has no items that are known here" if request.input else "is an empty list"
            raise RequestError(f"{reason}: give at least one item.", field="input")
        raise MissingFieldError("is missing.", field="input")
    earlier_items: list[RawItem] = []
    if request.instructions:
        earlier_items.append({"role": "developer", "content": request.instructions})
    for turn in turns:
        earlier_items += items_of(turn)
    check_messages(len(earlier_items) + len(new_items), "input")
    all_tools = _merge_tools(request.tools, tools_in([*earlier_items, *new_items]))
    request = replace(request, tools=all_tools)
    tools = read_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    messages = to_messages([*earlier_items, *new_items], num_earlier=len(earlier_items))
    if not messages:
        raise RequestError("must have at least one message.", field="input")
    draft = StoredResponse(
        id="",
        request_items=encode_json(new_items),
        answer=b"",
        item_ids=tuple(item["id"] for item in new_items),
        previous=previous,
    )
    if request.conversation is not None:
        check_room(tenant, draft)
    exchange = Exchange(
        tuple(messages),
        () if tools is None else tools.prompt_tools,
        thinking=_thinking(request),
        drops_oldest=request.truncation == "auto",
        reserved_tokens=to_max_tokens(request.max_output_tokens),
        request=request,
        tenant=tenant,
        draft=draft,
        is_stored=request.store is not False and tenant.fits(draft),
    )
    return exchange, tools, ignored


def _merge_tools(
    tools: Sequence[ResponsesTool] | None, additional: Sequence[ResponsesTool]
) -> list[ResponsesTool]:
    """Join the tools of a request's field `tools` and of the items in its conversation.

    Of tools with equal names, the first is used.
    """
    merged = list(tools or ())
    names = {tool.name for tool in merged}
    for tool in additional:
        if tool.name not in names:
            names.add(tool.name)
            merged.append(tool)
    return merged


def _thinking(request: ResponsesRequest) -> Thinking:
    """Return a request's options for the model's reasoning."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    return to_thinking(request.chat_template_kwargs, effort, param="reasoning.effort")


def _previous(request: ResponsesRequest, tenant: Tenant) -> StoredResponse | None:
    """Return the stored response that a request continues; None for a new conversation.

    For a request that names a stored conversation, this is the conversation's newest turn.

    Raises:
        RequestError: the response or the conversation is not stored, or cannot be continued.
    """
    if (id_of_conversation := conversation_id(request)) is not None:
        return find_conversation(tenant, id_of_conversation).previous
    id_ = request.previous_response_id
    response = None if id_ is None else tenant.find(id_)
    if id_ is not None and response is None:
        raise PreviousNotFoundError(
            "Previous response with id '{id}' not found.",
            field="previous_response_id",
            id=id_[:MAX_NAME_LENGTH],
        )
    if response is not None and response.is_open:
        reason = "has not ended: wait until its status is completed."
        raise RequestError(reason, field="previous_response_id")
    if response is not None and not _stored_flags.decode(response.answer).store:
        reason = (
            "is stored without its conversation, which is too large: begin another conversation."
        )
        raise RequestError(reason, field="previous_response_id")
    return response


def _params(request: ResponsesRequest, tools: Tools | None) -> SamplingParams:
    """Translate a request's fields into the engine's sampling parameters.

    Raises:
        RequestError: a value is out of bounds, or log-probabilities are requested with tools.
    """
    values: dict[str, Any] = {"max_tokens": RESPONSES.first_limit(request)}
    if LOGPROBS in (request.include or ()):
        values["logprobs"] = request.top_logprobs or 0
    if constraint := _constraint(request):
        values["constraint"] = constraint
    if tools is not None and "logprobs" in values:
        reason = f"cannot have '{LOGPROBS}' in a request with tools: leave one of them out."
        raise RequestError(reason, field="include")
    return to_params(request, **values)


def _constraint(request: ResponsesRequest) -> Constraint | None:
    """Return the constraint that a request sets on the answer's format; None for free text.

    The format may be in `text.format`, or in the fields that vLLM has.

    Raises:
        RequestError: both `text.format` and a field of vLLM's set a format.
    """
    vllm_constraint = to_constraint(request)
    format_ = request.text.format if request.text is not None else None
    if isinstance(format_, JsonObject):
        constraint = to_schema(format_.schema or {"type": "object"}, "text.format")
    elif isinstance(format_, TextSchema):
        constraint = to_schema(format_.schema, "text.format.schema", is_strict=bool(format_.strict))
    else:
        return vllm_constraint
    if vllm_constraint is not None:
        reason = "cannot be combined with text.format: leave one of them out."
        raise RequestError(reason, field=vllm_constraint.param)
    return constraint
