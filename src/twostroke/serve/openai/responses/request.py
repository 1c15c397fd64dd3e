"""What a request of the Responses protocol may say."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.core.sampling import MAX_LOGPROBS
from twostroke.serve.http.decode import MAX_NAME_LENGTH
from twostroke.serve.http.errors import UnknownFieldError, UnsupportedFieldError
from twostroke.serve.openai.fields import CommonFields, StreamOptions, check_neutral, refuse_all_but
from twostroke.serve.openai.responses.tools import Choice, FunctionTool
from twostroke.serve.openai.structure import JsonObject, NamedSchema, Text

LOGPROBS: Final = "message.output_text.logprobs"

# What asks for more of items that never come here asks for nothing.
INCLUDABLE: Final = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

_HERE: Final = {  # what the chat protocol names otherwise
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "access_programs": (),
    "add_special_tokens": (False,),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    **dict.fromkeys(_HERE, ()),
}
NEUTRAL_OF_REASONING: Final[dict[str, tuple[object, ...]]] = {
    "context": ("auto",),
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "summary": ("auto",),
}
NEUTRAL_OF_TEXT: Final[dict[str, tuple[object, ...]]] = {"verbosity": ("medium",)}
NEUTRAL_OF_STREAMS: Final[dict[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}
MAX_LABEL: Final = 512
MAX_TOOL_CALLS: Final = 2**31 - 1
LABELS: Final = ("prompt_cache_key", "safety_identifier", "user")


class TextSchema(NamedSchema, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text of an answer has to look like."""

    format: Text | JsonObject | TextSchema | None = None
    verbosity: Any = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much is to be thought; the thoughts themselves are sent, not a summary."""

    effort: str | None = None

    # Refused unless neutral.
    context: Any = None
    generate_summary: Any = None
    mode: Any = None
    summary: Any = None


class ResponseStreamOptions(StreamOptions, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries besides the answer; usage always."""


class ResponsesRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. Items are read one by one, as each may say what it is."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None

    tools: list[FunctionTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # of hosted tools, which are not there

    # Harmless, as others of the common fields, which here are sent back; `store` is heeded.
    prompt_cache_options: dict[str, Any] | None = None

    # Refused unless neutral.
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None

    # Of the chat protocol, to say what it is called here.
    max_completion_tokens: Any = None
    messages: Any = None
    reasoning_effort: Any = None


def check(asked: ResponsesRequest) -> None:
    """Refuse what is not there and what is out of bounds.

    Raises:
        RequestError: naming the field.
    """
    for name, here in _HERE.items():
        if getattr(asked, name) is not None:
            raise UnknownFieldError(f"is not a known field. Did you mean '{here}'?", field=name)
    check_neutral(asked, NEUTRAL)
    if asked.reasoning is not None:
        refuse_all_but(asked.reasoning, NEUTRAL_OF_REASONING, "reasoning.")
    if asked.text is not None:
        refuse_all_but(asked.text, NEUTRAL_OF_TEXT, "text.")
    if asked.stream_options is not None:
        _check_stream_options(asked.stream_options)
    check_include(asked.include or ())
    _check_top_logprobs(asked)
    _check_sent_back(asked)


def check_include(include: list[str] | tuple[str, ...]) -> None:
    """Refuse what is not known to be there for inclusion.

    Raises:
        UnsupportedFieldError: naming it.
    """
    for place, name in enumerate(include):
        if name not in INCLUDABLE:
            word = name[:MAX_NAME_LENGTH]
            reason = f"does not support '{{value}}'.{nearest(word, INCLUDABLE)}"
            raise UnsupportedFieldError(reason, field=f"include[{place}]", value=word)


def _check_stream_options(options: ResponseStreamOptions) -> None:
    refuse_all_but(options, NEUTRAL_OF_STREAMS, "stream_options.")
    if options.include_usage:
        reason = "is not supported: the last event always has the usage. Leave it out."
        raise UnsupportedFieldError(reason, field="stream_options.include_usage")


def _check_top_logprobs(asked: ResponsesRequest) -> None:
    top = asked.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"must be from 0 to {MAX_LOGPROBS}, got {top}.", field="top_logprobs")
    if top and LOGPROBS not in (asked.include or ()):
        reason = f"may only be set when include has '{LOGPROBS}'."
        raise RequestError(reason, field="top_logprobs")


def _check_sent_back(asked: ResponsesRequest) -> None:
    for name in LABELS:
        if len(getattr(asked, name) or "") > MAX_LABEL:
            raise RequestError(f"takes at most {MAX_LABEL} characters.", field=name)
    calls = asked.max_tool_calls
    if calls is not None and not 1 <= calls <= MAX_TOOL_CALLS:
        raise RequestError(f"must be from 1 to {MAX_TOOL_CALLS}.", field="max_tool_calls")
