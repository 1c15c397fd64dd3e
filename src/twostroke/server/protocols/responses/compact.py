"""POST /v1/responses/compact: replaces a conversation by one item with a summary of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from twostroke.server.body import field
from twostroke.server.http.answer_limits import MAX_SUMMARY_TOKENS
from twostroke.server.protocols.common.fields import (
    OPAQUE_SUMMARY,
    Retention,
    ServiceFields,
    encode_opaque_text,
)
from twostroke.server.protocols.responses import exchange
from twostroke.server.protocols.responses.body import OutputText, ResponseUsage
from twostroke.server.protocols.responses.exchange import Exchange
from twostroke.server.protocols.responses.items import new_id
from twostroke.server.protocols.responses.reply import ResponsesEncoder
from twostroke.server.protocols.responses.request import ITEMS_SCHEMA, ResponsesRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.server.generation.job import Job
    from twostroke.server.generation.response_store import Tenant

_TASK: Final = (
    "Summarize the conversation so far for somebody who will continue it and has not seen it. "
    "Keep the goals, the decisions, the facts, names, numbers and file paths that matter, what was "
    "done, and what is left to do. Write the summary only."
)


class CompactRequest(ServiceFields):
    """The body of a request to `/v1/responses/compact`: the conversation to summarize."""

    input: Annotated[
        str | list[dict[str, Any]] | None,
        field.doc("A text, or items; may be left out with `previous_response_id`.", **ITEMS_SCHEMA),
    ] = None
    instructions: Annotated[str | None, field.doc("Text before the conversation.")] = None
    previous_response_id: Annotated[
        str | None, field.doc("The stored answer whose conversation comes first.")
    ] = None

    image: field.Hint = None
    prompt_cache_key: field.Ignored = None
    prompt_cache_options: field.Ignored = None
    prompt_cache_retention: Retention = None


class CompactionOutput(msgspec.Struct, tag_field="type", tag="compaction"):
    """The item with a conversation's summary, for the `input` of later requests."""

    id: str
    encrypted_content: str


class CompactedResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The response of `/v1/responses/compact`: the conversation's summary as one item.

    Clients send `output` in place of the conversation in the `input` of later requests.
    """

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[CompactionOutput]
    usage: ResponseUsage


def read(request: CompactRequest, tenant: Tenant) -> Job:
    """Translate a request to `/v1/responses/compact` into a job that writes a summary.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    response_request = ResponsesRequest(
        model=request.model,
        input=request.input,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        priority=request.priority,
        service_tier=request.service_tier,
        prompt_cache_retention=request.prompt_cache_retention,
        max_output_tokens=MAX_SUMMARY_TOKENS,
        temperature=0.0,
        truncation="auto",
        store=False,
    )
    job = exchange.read(response_request, tenant)
    [conversation] = job.prompts
    assert isinstance(conversation, Exchange)
    messages = list(conversation.messages)
    if messages[-1]["role"] == "user":  # some templates require roles that alternate
        text = f"{messages[-1]['content']}\n\n{_TASK}"
        messages[-1] = {**messages[-1], "content": text}
    else:
        messages.append({"role": "user", "content": _TASK})
    return replace(
        job, prompts=(replace(conversation, messages=tuple(messages), reserved_tokens=None),)
    )


def field_names(_request: CompactRequest) -> Mapping[str, str]:
    """Map the engine's parameter names to this endpoint's field names, for error messages."""
    return {"messages": "input"}


class CompactEncoder(ResponsesEncoder):
    """Encodes the response of `/v1/responses/compact`, which is never streamed."""

    def _result(self) -> CompactedResponse:  # type: ignore[override]  # the caller only encodes it as JSON
        """Return the response, whose only item has the summary that the model wrote."""
        body = self.body
        assert body.usage is not None
        parts = [part for item in body.output for part in getattr(item, "content", ())]
        texts = [part.text for part in parts if isinstance(part, OutputText)]
        return CompactedResponse(
            id=body.id,
            created_at=body.created_at,
            output=[
                CompactionOutput(
                    new_id("cmp_"), encode_opaque_text("".join(texts).strip(), OPAQUE_SUMMARY)
                )
            ],
            usage=body.usage,
        )
