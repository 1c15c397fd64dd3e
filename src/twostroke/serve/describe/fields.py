"""What fields mean and which values they take, as far as their types do not say it.

Bounds are those that the requests are checked with; numbers of `core.sampling.BOUNDS` and fields
that are refused unless neutral need no entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.chat.messages import ROLES
from twostroke.chat.reasoning import EFFORTS, MAX_VARIABLES
from twostroke.core.constraint import MAX_CONSTRAINT
from twostroke.core.embedding import POOLINGS
from twostroke.core.sampling import (
    BOUNDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)
from twostroke.engine.loop import Health
from twostroke.sample.grammar import MAX_CHOICES
from twostroke.serve.anthropic import errors as anthropic_errors
from twostroke.serve.anthropic import messages
from twostroke.serve.anthropic import tools as anthropic_tools
from twostroke.serve.job import MAX_MESSAGES
from twostroke.serve.openai import chat, completions, embeddings, fields, tokens
from twostroke.serve.openai.responses import items, request
from twostroke.serve.openai.responses import tools as response_tools
from twostroke.serve.tools import MAX_TOOLS, NAME_PATTERN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.serve.describe.facts import Facts

    Schema = dict[str, Any]
    Neutral = Mapping[str, tuple[object, ...]]

NEUTRAL: Final[dict[type[msgspec.Struct], Neutral]] = {
    fields.CommonFields: fields.NEUTRAL,
    chat.ChatRequest: chat.NEUTRAL,
    completions.CompletionRequest: completions.NEUTRAL,
    embeddings.EmbeddingRequest: embeddings.NEUTRAL,
    tokens.TokenizeRequest: tokens.NEUTRAL,
    request.ResponsesRequest: request.NEUTRAL,
    request.ReasoningConfig: request.NEUTRAL_OF_REASONING,
    request.TextConfig: request.NEUTRAL_OF_TEXT,
    request.ResponseStreamOptions: request.NEUTRAL_OF_STREAMS,
    response_tools.FunctionTool: response_tools.NEUTRAL,
    items.FunctionCall: items.NEUTRAL_OF_CALLS,
    items.FunctionCallOutput: items.NEUTRAL_OF_CALLS,
    items.OutputText: items.NEUTRAL_OF_TEXT,
    messages.CountRequest: messages.NEUTRAL,
    messages.OutputConfig: messages.NEUTRAL_OF_OUTPUT,
    anthropic_tools.Tool: anthropic_tools.NEUTRAL,
    anthropic_tools.TextBlock: anthropic_tools.NEUTRAL_OF_TEXT,
}

# What the objects in a field are, where its own type leaves that open.
PARTS: Final[dict[tuple[type[msgspec.Struct], str], tuple[type[msgspec.Struct], ...]]] = {
    (request.ResponsesRequest, "input"): tuple(items.KINDS.values()),
}

_TEXT_SIZE: Final = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TEXTS: Final = {"maxItems": MAX_STOPS, "items": {"type": "string", **_TEXT_SIZE}}
_HARMLESS: Final = {"description": "Accepted; changes nothing about the answer."}
_HARMLESS_FIELDS: Final = (
    *("user", "metadata", "store", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "request_id", "spaces_between_special_tokens", "cache_control"),
)
_SENT_BACK: Final = {"description": "Comes back with the answer."}
_PAIRS: Final = {
    "maxProperties": fields.MAX_PAIRS,
    "propertyNames": {"maxLength": fields.MAX_KEY},
    "additionalProperties": {"type": "string", "maxLength": fields.MAX_VALUE},
}
_GRAMMAR: Final = {"maxLength": MAX_CONSTRAINT}
_CHOICE: Final = {
    "minItems": 1,
    "maxItems": MAX_CHOICES,
    "items": {"type": "string", "minLength": 1},
}
_VARIABLES: Final = {"maxProperties": MAX_VARIABLES}
_PARALLEL: Final = {"description": "Whether at most one call is wanted."}


_CHOICES: Final = ("AutoChoice", "AnyChoice", "OneChoice", "NoChoice")


def neutral_fields(kind: type[msgspec.Struct]) -> Neutral:
    """Return the fields of a struct that are refused unless they have one of these values."""
    found: dict[str, tuple[object, ...]] = {}
    for parent in reversed(kind.__mro__):
        found |= NEUTRAL.get(parent, {})
    return found


def in_bodies(facts: Facts) -> dict[str, Schema]:
    """Return what is true of a field of that name in every request body that has one."""
    ids, num_digits = (
        {"minimum": 0, "maximum": facts.vocab_size - 1},
        len(str(facts.vocab_size - 1)),
    )
    return {
        **{
            name: _text(bounds.description) for name, bounds in BOUNDS.items() if bounds.description
        },
        "model": _text("A name of the model, as `/v1/models` lists them; left out: the first.")
        | {"examples": [facts.names[0]]},
        "messages": _text("The conversation, oldest first.")
        | {"minItems": 1, "maxItems": MAX_MESSAGES},
        "stream": _text("Whether the answer comes in pieces, as server-sent events."),
        "stop": _text("Texts before which the answer ends.") | {**_TEXT_SIZE, **_TEXTS},
        "stop_sequences": _text("Texts before which the answer ends.") | _TEXTS,
        "stop_token_ids": _text("Tokens that end the answer.")
        | {"maxItems": MAX_STOP_IDS, "items": {"type": "integer", **ids}},
        "include_stop_str_in_output": _text("Whether the stop text is part of the answer."),
        "ignore_eos": _text("Whether to go on behind the model's end token."),
        "logit_bias": _text("What is added to the logits of tokens, by id.")
        | {
            "propertyNames": {"pattern": f"^(0|[1-9][0-9]{{0,{num_digits - 1}}})$"},
            "maxProperties": MAX_LOGIT_BIAS,
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        },
        "stream_options": _text("Goes with `stream`."),
        "priority": _text("Lower ones are served first.")
        | {"minimum": -fields.MAX_PRIORITY, "maximum": fields.MAX_PRIORITY},
        "return_timings": _text("Whether each answer says how long it took."),
        "service_tier": _text("The class of service: `priority` goes first, `flex` last.")
        | {"enum": [*fields.TIERS, None]},
        "prediction": _text("What the answer will be like: it comes the faster, never otherwise."),
        "speculate": _text("Who may guess tokens ahead; it never changes the answer.")
        | {"enum": [*facts.guessers, None]},
        "best_of": _text("Accepted where it equals `n`."),
        **_forms_and_tools(),
        **dict.fromkeys(_HARMLESS_FIELDS, _HARMLESS),
    }


def _forms_and_tools() -> dict[str, Schema]:
    return {
        "response_format": _text("What the answer has to look like."),
        "structured_outputs": _text("What the answer has to look like, in one of these ways."),
        "guided_json": _text("A JSON schema, or its text, that the answer keeps to.") | _GRAMMAR,
        "guided_regex": _text("A regular expression for the whole answer.") | _GRAMMAR,
        "guided_choice": _text("Texts, one of which is the answer.") | _CHOICE,
        "guided_grammar": _text("A grammar in Lark's notation or in GBNF.") | _GRAMMAR,
        "output_config": _text("What the answer has to look like."),
        "tools": _text("What the model may call.") | {"maxItems": MAX_TOOLS},
        "tool_choice": _text("Whether it may call, must, or must call one of them by name."),
        "parallel_tool_calls": _text("Whether there may be several calls; true if left out."),
        "add_generation_prompt": _text("Whether the assistant's turn begins behind the messages."),
        "continue_final_message": _text("Whether the answer goes on from the last message."),
        "chat_template_kwargs": _text("Variables that the chat template reads.") | _VARIABLES,
        "reasoning_effort": _text("Whether to reason, and how much where the template knows that.")
        | {"enum": [*EFFORTS, None]},
        "thinking": _text("Whether to reason before the answer."),
    }


def in_structs(facts: Facts) -> dict[str, dict[str, Schema]]:
    """Return what is true of fields, by component and field; "" is the component itself."""
    return _bodies(facts) | _inner() | _answered()


def _bodies(facts: Facts) -> dict[str, dict[str, Schema]]:
    id_ = {"type": "integer", "minimum": 0, "maximum": facts.vocab_size - 1}
    system = _text("What stands before the conversation.")
    return {
        "ChatRequest": {
            "max_completion_tokens": _text("The newer name of `max_tokens`.")
            | {"minimum": 1, "maximum": BOUNDS["max_tokens"].high},
            "metadata": _PAIRS,
            "logprobs": _text("Whether to tell how likely each token was."),
            "top_logprobs": _text("How many other tokens to tell of; goes with `logprobs`.")
            | {"minimum": 0, "maximum": MAX_LOGPROBS},
        },
        "CompletionRequest": {
            "": {"required": ["prompt"]},
            "prompt": _texts_or_ids(facts, facts.limits.max_choices),
            "max_tokens": _text("The most tokens to generate; 0 goes with `echo`.")
            | {"minimum": 0, "default": completions.DEFAULT_MAX_TOKENS},
            "metadata": _PAIRS,
            "suffix": _text("What stands behind the answer, for models that know how."),
            "echo": _text("Whether the answer begins with its prompt."),
            "logprobs": _text("How many likely tokens to tell of, besides each that is there."),
        },
        "ResponsesRequest": _responses(),
        "EmbeddingRequest": {
            "": {"required": ["input"]},
            "input": _texts_or_ids(facts, facts.limits.max_inputs, minLength=1),
            "encoding_format": _text("Numbers, or their float32 bytes (lowest first) in base64."),
            "dimensions": _text("Only so many values of each vector, made length 1 again.")
            | {"minimum": 1, "maximum": facts.embedding_width},
            "pooling": _text("Of which tokens' last hidden states a vector is made.")
            | {"enum": [*POOLINGS, None]},
        },
        "MessagesRequest": {
            "temperature": {"maximum": 1.0},
            "system": system,
            "service_tier": _text("There is one tier here: changes nothing about the answer.")
            | {"enum": ["auto", "standard_only", None]},
        },
        "CountRequest": {"system": system},
        "TokenizeRequest": {
            "": {"description": "One of `prompt`, a text, and `messages`, a conversation."},
            "prompt": _text("A text."),
            "add_special_tokens": _text("Whether a prompt gets what begins every text."),
            "return_token_strs": _text("Whether to spell the tokens, too."),
        },
        "DetokenizeRequest": {"tokens": _text("Token ids.") | {"items": id_}},
    }


def _responses() -> dict[str, Schema]:
    return {
        "input": _text(
            f"A text, or items, whose types are {', '.join(items.KINDS)}; left out only where "
            "an earlier answer goes on."
        ),
        "instructions": _text("What stands before the conversation; not kept for later ones."),
        "previous_response_id": _text("The answer, kept here, that this one goes on from."),
        "max_output_tokens": _text("The most tokens to generate, reasoning included.")
        | {"minimum": 1, "maximum": BOUNDS["max_tokens"].high},
        "min_tokens": _text("No end before that many tokens; at most `max_output_tokens`."),
        "text": _text("What the text of the answer has to look like."),
        "reasoning": _text("Whether to reason, and how much where the template knows that."),
        "include": _text("What else the answer has: log-probabilities; others never come.")
        | {"items": {"enum": list(request.INCLUDABLE)}},
        "top_logprobs": _text("How many other tokens to tell of, where `include` asks for it.")
        | {"minimum": 0, "maximum": MAX_LOGPROBS},
        "truncation": _text("`auto`: the oldest exchanges leave where not all fit."),
        "store": _text("Whether the answer is kept for later requests; true if left out."),
        "metadata": _SENT_BACK | _PAIRS,
        **dict.fromkeys(request.LABELS, _SENT_BACK | {"maxLength": request.MAX_LABEL}),
        "max_tool_calls": _text("Comes back; there are no tools of the server's to count.")
        | {"minimum": 1, "maximum": request.MAX_TOOL_CALLS},
        "prompt_cache_options": _HARMLESS,
    }


def _items() -> dict[str, dict[str, Schema]]:
    """Return what is true of the items of a request for a response, each of a type of its own."""
    optional = {"message": "ResponsesMessage", "item_reference": "ItemReference"}
    found: dict[str, dict[str, Schema]] = {
        kind.__name__: {
            "": {"required": ["type", *_required(kind)]},
            "type": {"type": "string", "const": word},
        }
        for word, kind in items.KINDS.items()
        if word not in optional
    }
    for word, name in optional.items():
        found[name] = {"type": {"enum": [word, None]}}
    found["ResponsesMessage"]["role"] = {"enum": list(items.ROLES)}
    return found


def _required(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind) if field.required]


def _inner() -> dict[str, dict[str, Schema]]:
    return {
        **_items(),
        "StreamOptions": {
            "include_usage": _text("Whether the last event has the usage."),
            "continuous_usage_stats": {"enum": [None, False]},
            "include_obfuscation": _text("Accepted, and never done."),
        },
        "OpenaiMessage": {
            "role": {"enum": list(ROLES)},
            "content": _text("Missing only beside `tool_calls` or reasoning."),
            "reasoning_content": _text("What an assistant's message reasoned before it answered."),
            "reasoning": _text("The same."),
            "tool_calls": _text("The calls of an assistant's message."),
            "tool_call_id": _text("In a tool's message, the call that it answers."),
            "refusal": _HARMLESS,
            "annotations": _HARMLESS,
            "audio": _nothing(),
            "function_call": _nothing(),
        },
        "Metadata": {"user_id": _HARMLESS},
        "AnthropicMessage": {"role": {"enum": list(messages.ROLES)}},
        "FunctionBody": {
            "name": {"pattern": NAME_PATTERN},
            "parameters": _text("A JSON schema that the arguments keep to."),
            "strict": _text("Refuse a schema that cannot be kept to, instead of freeing it."),
        },
        "FunctionTool": {
            "name": {"pattern": NAME_PATTERN},
            "parameters": _text("A JSON schema that the arguments keep to."),
            "strict": _text("Refuse a schema that cannot be kept to, instead of freeing it."),
            "async": {"enum": [None, False]},
        },
        "ResponseStreamOptions": {
            "include_usage": _text("Leave it out: the last event always has the usage.")
            | {"enum": [None, False]},
            "continuous_usage_stats": {"enum": [None, False]},
        },
        "AllowedChoice": {"tools": {"minItems": 1}},
        "ReasoningConfig": {"effort": {"enum": [*EFFORTS, None]}},
        "Tool": {
            "name": {"pattern": NAME_PATTERN},
            "input_schema": _text("A JSON schema that the input keeps to."),
            "eager_input_streaming": _HARMLESS,
        },
        "StructuredOutputs": {
            "json": _GRAMMAR,
            "regex": _GRAMMAR,
            "choice": _CHOICE,
            "grammar": _GRAMMAR,
        },
        **{name: {"disable_parallel_tool_use": _PARALLEL} for name in _CHOICES},
        "ToolUseBlock": {"caller": _HARMLESS},
        "ThinkingOn": {
            "budget_tokens": _text("A wish; the model knows nothing of it.") | {"minimum": 1},
            "display": {"enum": ["summarized", None]},
        },
        "ThinkingBlock": {"signature": _text("Taken as it is.")},
    }


def _answered() -> dict[str, dict[str, Schema]]:
    unwell = [health.value for health in Health if health is not Health.READY]
    ends = ["stop", "length"]
    stops = ["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    kinds = {"invalid_request_error", "api_error", *anthropic_errors.KINDS.values()}
    return {
        "AboutBody": {"description": _text("Where the description of the API is.")},
        "HealthBody": {"status": {"enum": ["ok", "draining", *unwell]}},
        "EmbeddingBody": {"object": {"const": "embedding"}},
        "EmbeddingList": {"object": {"const": "list"}},
        "ModelBody": {"object": {"const": "model"}},
        "ModelList": {"object": {"const": "list"}},
        "ChatCompletion": {"object": {"const": "chat.completion"}},
        "Chunk": {"object": {"const": "chat.completion.chunk"}},
        "CompletionBody": {"object": {"const": "text_completion"}},
        "ChatChoice": {"finish_reason": {"enum": [*ends, "tool_calls"]}},
        "ChunkChoice": {"finish_reason": {"enum": [*ends, "tool_calls", None]}},
        "CompletionChoice": {"finish_reason": {"enum": [*ends, None]}},
        "AnswerMessage": {"role": {"const": "assistant"}},
        "Delta": {"role": {"const": "assistant"}},
        "CallBody": {"type": {"const": "function"}},
        "MessageBody": {"role": {"const": "assistant"}, "stop_reason": {"enum": [*stops, None]}},
        "ResponseBody": {
            "object": {"const": "response"},
            "incomplete_details": _text("Why the answer is not whole."),
        },
        "OutputMessage": {"role": {"const": "assistant"}},
        "IncompleteDetails": {"reason": {"const": "max_output_tokens"}},
        "ResponseError": {"code": {"enum": ["server_error", "invalid_prompt"]}},
        "ItemList": {"object": {"const": "list"}},
        "Deleted": {"object": {"const": "response"}, "deleted": {"const": True}},
        "StopBody": {"stop_reason": {"enum": stops}},
        "OpenaiErrorDetail": {
            "type": {
                "enum": [
                    *("invalid_request_error", "authentication_error"),
                    *("rate_limit_error", "server_error"),
                ]
            },
            "message": _text("One sentence: what was wrong, and the limit."),
            "param": _text("The field at fault."),
            "code": _text("A word for programs."),
        },
        "AnthropicErrorDetail": {"type": {"enum": sorted(kinds)}},
    }


def _texts_or_ids(facts: Facts, most: int, **of_texts: int) -> Schema:
    id_ = {"type": "integer", "minimum": 0, "maximum": facts.vocab_size - 1}
    text, ids = {"type": "string", **of_texts}, {"type": "array", "items": id_, "minItems": 1}
    several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1, "maxItems": most}
    return {"description": "A text, token ids, or a list of either.", "anyOf": [text, ids, several]}


def _text(description: str) -> Schema:
    return {"description": description}


def _nothing() -> Schema:
    return {"enum": [None, False, 0, "", [], {}], "description": "Not supported: leave it out."}
