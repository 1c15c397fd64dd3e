"""Requests of the Responses protocol: the job, with the conversation that it continues."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.engine.chat.reasoning import AS_IT_IS, Thinking
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
    to_limit,
    to_params,
    to_prediction,
)
from twostroke.server.protocols.common.listing import LOGPROBS, unknown_includes
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
    from twostroke.engine.chat.tools import Tools
    from twostroke.engine.model_card import ModelCard
    from twostroke.server.generation.response_store import Tenant
    from twostroke.server.protocols.responses.recall import RawItem
    from twostroke.server.protocols.responses.tools import ResponsesTool


class _StoredFlag(msgspec.Struct):
    """Whether a response is stored with its conversation."""

    store: bool = True


_stored_flags: Final = msgspec.json.Decoder(_StoredFlag)


class PreviousNotFoundError(RequestError):
    """The response to continue is not stored."""

    code = "previous_response_not_found"


class Exchange(Conversation, kw_only=True):
    """The conversation of one response, and the request to store with it.

    `draft` becomes the stored response. It is not stored by itself unless `is_stored`: not if the
    request says so, or if it is too large.
    """

    asked: ResponsesRequest
    tenant: Tenant
    draft: StoredResponse
    is_stored: bool

    def response(self, id_: str, answer: bytes, item_ids: Sequence[str]) -> StoredResponse:
        """Return the answer as it is stored; its output consists of items with `item_ids`."""
        ids = (*self.draft.item_ids, *item_ids)
        return StoredResponse(id_, self.draft.request_items, answer, ids, self.draft.previous)

    def hold(self, id_: str, answer: bytes) -> StoredResponse | None:
        """Store an answer that has not ended, which no request can continue."""
        response = self.response(id_, answer, ())
        response.is_open = True
        return response if self.is_stored and self.tenant.put(response) else None

    def keep(self, response: StoredResponse, queued: StoredResponse | None) -> bool:
        """Store the answer for later requests, if possible; return whether it is stored.

        It replaces what `hold` has stored, unless that was deleted.
        """
        if not self.is_stored:
            return False
        if queued is not None:
            return self.tenant.supersede(queued, response)
        return self.tenant.put(response)

    def keep_alone(self, queued: StoredResponse, answer: bytes, item_ids: Sequence[str]) -> None:
        """Store an answer in the background that is too large with its conversation, without it.

        Clients can read it, and no request can continue it.
        """
        ids = (*self.draft.item_ids, *item_ids)
        alone = StoredResponse(queued.id, self.draft.request_items, answer, ids)
        if not self.tenant.supersede(queued, alone):
            self.tenant.remove(queued.id)

    def join_conversation(self, response: StoredResponse) -> None:
        """Add the answer to the stored conversation that it continues, if there is one."""
        conversation = conversation_id(self.asked)
        if conversation is not None:
            append_turn(self.tenant, conversation, response)


def read(asked: ResponsesRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    check(asked)
    exchange, tools, ignored = _exchange(asked, tenant)
    if asked.background and not exchange.is_stored:
        reason = "needs a response that can be stored: this one is too large, or none is stored."
        raise RequestError(reason, field="background")
    included = [Ignored.of(error) for error in islice(unknown_includes(asked.include or ()), 1)]
    return Job(
        model=asked.model,
        prompts=(exchange,),
        params=_params(asked, tools),
        caller=to_caller(asked, "input", tenant),
        speculate="auto" if asked.speculate is None else asked.speculate,
        prediction=to_prediction(asked),
        stream=bool(asked.stream),
        in_background=bool(asked.background),
        timings=bool(asked.return_timings),
        tools=tools,
        ignored=(*ignored_fields(asked), *included, *ignored),
        keep_s=retention_s(asked.prompt_cache_retention),
    )


class InputTokens(msgspec.Struct, frozen=True):
    """The number of tokens in a prompt, cached ones included."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def count(asked: ResponsesRequest, card: ModelCard, tenant: Tenant) -> InputTokens:
    """Return how many tokens a request's prompt would have; raises as `read` does."""
    earlier = asked.previous_response_id or asked.conversation
    if not (asked.input or asked.instructions or earlier):
        return InputTokens(0)
    [prompt] = read(asked, tenant).prompts
    assert isinstance(prompt, Exchange)
    return InputTokens(len(prompt.encode(card)))


def names(asked: ResponsesRequest) -> Mapping[str, str]:
    """Return the protocol's names of the engine's fields, but not of those that were sent."""
    here = {"max_tokens": "max_output_tokens", "messages": "input"}
    return {name: own for name, own in here.items() if getattr(asked, name) is None}


def _exchange(
    request: ResponsesRequest, tenant: Tenant
) -> tuple[Exchange, Tools | None, list[Ignored]]:
    """Return the conversation, its tools, and the fields of its items that have no effect."""
    previous = _previous(request, tenant)
    steps = list(previous.conversation()) if previous else []
    if isinstance(request.input, list):
        check_messages(len(request.input), "input")
    taken = {id_ for step in steps for id_ in step.item_ids}
    own_items, ignored = read_input(request.input, tenant, taken)
    if not own_items and previous is None:
        if request.input is not None:
            reason = "has no items that are known here" if request.input else "is an empty list"
            raise RequestError(f"{reason}: give at least one item.", field="input")
        raise MissingFieldError("is missing.", field="input")
    earlier: list[RawItem] = []
    if request.instructions:
        earlier.append({"role": "developer", "content": request.instructions})
    for step in steps:
        earlier += items_of(step)
    check_messages(len(earlier) + len(own_items), "input")
    request = replace(request, tools=_joined_tools(request.tools, tools_in([*earlier, *own_items])))
    tools = read_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    messages = to_messages([*earlier, *own_items], len(earlier))
    if not messages:
        raise RequestError("must have at least one message.", field="input")
    draft = StoredResponse(
        "", encode_json(own_items), b"", tuple(item["id"] for item in own_items), previous
    )
    if request.conversation is not None:
        check_room(tenant, draft)
    exchange = Exchange(
        tuple(messages),
        () if tools is None else tools.shown,
        thinking=_thinking(request),
        drops_oldest=request.truncation == "auto",
        reserved_tokens=to_limit(request.max_output_tokens),
        asked=request,
        tenant=tenant,
        draft=draft,
        is_stored=request.store is not False and tenant.fits(draft),
    )
    return exchange, tools, ignored


def _joined_tools(
    tools: Sequence[ResponsesTool] | None, additional: Sequence[ResponsesTool]
) -> list[ResponsesTool]:
    """Return the tools of a request and of its items; the first of two with one name stays."""
    joined = list(tools or ())
    names = {tool.name for tool in joined}
    for tool in additional:
        if tool.name not in names:
            names.add(tool.name)
            joined.append(tool)
    return joined


def _thinking(asked: ResponsesRequest) -> Thinking:
    effort = asked.reasoning.effort if asked.reasoning is not None else None
    if effort is None and not asked.chat_template_kwargs:
        return AS_IT_IS
    variables = asked.chat_template_kwargs or {}
    return Thinking(effort=effort, param="reasoning.effort", variables=variables)


def _previous(request: ResponsesRequest, tenant: Tenant) -> StoredResponse | None:
    """Return the response that a request continues, or the newest turn of its conversation."""
    if (conversation := conversation_id(request)) is not None:
        return find_conversation(tenant, conversation).previous
    id_ = request.previous_response_id
    found = None if id_ is None else tenant.find(id_)
    if id_ is not None and found is None:
        reason, field = "Previous response with id '{id}' not found.", "previous_response_id"
        raise PreviousNotFoundError(reason, field=field, id=id_[:MAX_NAME_LENGTH])
    if found is not None and found.is_open:
        reason = "has not ended: wait until its status is completed."
        raise RequestError(reason, field="previous_response_id")
    if found is not None and not _stored_flags.decode(found.answer).store:
        reason = "is stored without its conversation, which is too large: begin another one."
        raise RequestError(reason, field="previous_response_id")
    return found


def _params(asked: ResponsesRequest, tools: Tools | None) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": RESPONSES.first_limit(asked)}
    if LOGPROBS in (asked.include or ()):
        values["logprobs"] = asked.top_logprobs or 0
    if form := _form(asked):
        values["constraint"] = form
    if tools is not None and "logprobs" in values:
        reason = f"cannot be combined with tools where it has '{LOGPROBS}'."
        raise RequestError(reason, field="include")
    return to_params(asked, **values)


def _form(asked: ResponsesRequest) -> Constraint | None:
    other = to_constraint(asked)
    form = asked.text.format if asked.text is not None else None
    if isinstance(form, JsonObject):
        constraint = to_schema(form.schema or {"type": "object"}, "text.format")
    elif isinstance(form, TextSchema):
        constraint = to_schema(form.schema, "text.format.schema", is_strict=bool(form.strict))
    else:
        return other
    if other is not None:
        reason = "cannot be combined with text.format: leave one of them out."
        raise RequestError(reason, field=other.param)
    return constraint
