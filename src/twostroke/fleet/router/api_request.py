"""Translates a client's request into a request to an API: its fields, its model and its headers.

The protocol stays the same. APIs would refuse fields that only inference servers such as Twostroke
know. Such a field is removed if the answer means the same without it; otherwise the request is
never sent to an API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from twostroke.core.json_io import encode_json
from twostroke.fleet.routing.prompt import FALSE_VALUES, JSON_ERRORS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from twostroke.fleet.router.overflow_file import BoughtModel, UpstreamSpec

    Headers = list[tuple[bytes, bytes]]

# The protocol of an upstream that answers requests on a path.
PROTOCOLS: Final = {"/v1/chat/completions": "openai", "/v1/messages": "anthropic"}
# Fields that are not sent. Without them the answer is as valid: they concern speed, order and
# reports, tune the sampling of one of our models, or name a person.
REMOVED_FIELDS: Final[dict[str, frozenset[str]]] = {
    "/v1/chat/completions": frozenset(
        (
            *("priority", "service_tier", "request_id", "user", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "cache_prompt"),
            *("return_timings", "timings_per_token", "return_progress", "verbose", "id_slot"),
            *("speculate", "best_of", "n_predict", "store", "metadata"),
            *("top_k", "min_p", "repetition_penalty", "repeat_penalty", "length_penalty"),
            *("chat_template_kwargs", "enable_thinking", "thinking", "reasoning_budget"),
            *("thinking_budget_tokens", "thinking_token_budget", "thinking_budget"),
            *("reasoning_format", "skip_special_tokens", "spaces_between_special_tokens"),
        )
    ),
    "/v1/messages": frozenset(
        ("return_timings", "service_tier", "metadata", "diagnostics", "thread", "inference_geo")
    ),
}
# Fields that change the meaning of the answer, and that APIs do not have: a request that has one
# is answered here. A value that is false, empty or null does not count.
LOCAL_FIELDS: Final[dict[str, frozenset[str]]] = {
    "/v1/chat/completions": frozenset(
        (
            *("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
            *("allowed_token_ids", "logit_bias", "bad_words", "use_beam_search"),
            *("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "grammar", "json_schema", "truncate_prompt_tokens"),
            *("continue_final_message", "chat_template", "documents", "echo"),
            "add_special_tokens",
        )
    ),
    "/v1/messages": frozenset(("container",)),
}
# Local fields whose usual value is true.
_ON_BY_DEFAULT: Final = ("add_generation_prompt", "skip_special_tokens")
_NEUTRAL_VALUES: Final = frozenset((b"", b"null", b"false", b"0", b"0.0", b"[]", b"{}", b'""'))
_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation")  # that APIs know
_OUR_REASONING: Final = ("reasoning_content", "reasoning")  # of messages that we have answered
# Begins the signature of reasoning of our servers; Anthropic's API checks signatures.
_OUR_SIGNATURE: Final = b"twostroke-reasoning:"
_ANTHROPIC_VERSION: Final = b"2023-06-01"
_VERSION_HEADERS: Final = (b"anthropic-version", b"anthropic-beta")
_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])


def fields_of(body: bytes, path: str) -> dict[str, Raw] | None:
    """Return a request's fields as raw JSON, by name; None if only replicas may answer it.

    Only replicas may answer a request whose body is not a JSON object, has one of `LOCAL_FIELDS`,
    asks to store the answer, or has reasoning that only Twostroke's servers can read.
    """
    try:
        fields = _fields_decoder.decode(body)
    except JSON_ERRORS:
        return None
    return None if local_field(fields, path) else fields


def local_field(fields: Mapping[str, Raw], path: str) -> str:
    """Return the name of the first field that APIs do not support; empty if there is none.

    `fields` are the request's fields as raw JSON, and `path` is its API path, since the protocols
    differ in their fields.
    """
    return next((name for name, value in fields.items() if _is_local(name, value, path)), "")


def local_field_of(body: bytes, path: str) -> str:
    """Return the result of `local_field` for a body; empty if the body is not a JSON object."""
    try:
        return local_field(_fields_decoder.decode(body), path)
    except JSON_ERRORS:
        return ""


def api_body(fields: dict[str, Raw], path: str, spec: UpstreamSpec, bought: BoughtModel) -> bytes:
    """Return the body for an upstream, with its own model name and only fields that it knows."""
    unknown_names = REMOVED_FIELDS[path] | LOCAL_FIELDS[path] | {*spec.drop, *_ON_BY_DEFAULT}
    changed: dict[str, Any] = {
        spec.rename.get(name, name): value
        for name, value in fields.items()
        if name not in unknown_names and bytes(value) != b"null"
    }
    changed["model"] = bought.model
    if path == "/v1/chat/completions":
        _set_limit(changed, fields, spec)
        _set_stream_options(changed)
        if any(name.encode() in bytes(fields.get("messages", b"")) for name in _OUR_REASONING):
            changed["messages"] = _without_reasoning(fields["messages"])
    return encode_json(changed)


def api_headers(scope: Scope, spec: UpstreamSpec, key: str, via: bytes) -> Headers:
    """Return the headers of a request to an upstream.

    Of the client's headers, only the headers with versions of Anthropic's API are kept. `via` names
    the routers that the request has passed, so that a router recognizes its own requests.
    """
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"accept", b"application/json, text/event-stream"),
        (b"accept-encoding", b"identity"),  # the router reads events and usage
        (b"user-agent", b"twostroke"),
        (b"via", via),
    ]
    if spec.protocol == "openai":
        return [*headers, (b"authorization", b"Bearer " + key.encode())]
    versions = [pair for pair in scope["headers"] if pair[0] in _VERSION_HEADERS]
    if not any(name == b"anthropic-version" for name, _ in versions):
        versions.append((b"anthropic-version", _ANTHROPIC_VERSION))
    return [*headers, (b"x-api-key", key.encode()), *versions]


def is_stream(fields: Mapping[str, Raw]) -> bool:
    """Return whether a request asks for a stream of events."""
    return bytes(fields.get("stream", b"")) not in FALSE_VALUES


def _is_local(name: str, value: Raw, path: str) -> bool:
    """Return whether APIs do not support a field with this value in a request to `path`."""
    data = bytes(value)
    if name in LOCAL_FIELDS[path]:
        return data.replace(b" ", b"") not in _NEUTRAL_VALUES
    if name in _ON_BY_DEFAULT:
        return data == b"false"
    if name == "store":
        return data == b"true"
    return name == "messages" and path == "/v1/messages" and _OUR_SIGNATURE in data


def _set_limit(changed: dict[str, Any], fields: dict[str, Raw], spec: UpstreamSpec) -> None:
    """Rename the field with the answer's token limit as the API expects, in place.

    `changed` are the fields for the API, `fields` the client's. A limit of -1 is removed.
    """
    limit_name = spec.rename.get("max_tokens", "max_tokens")
    if "n_predict" in fields and not {"max_completion_tokens", limit_name} & changed.keys():
        changed[limit_name] = fields["n_predict"]
    for name in (limit_name, "max_completion_tokens"):
        if bytes(changed.get(name, b"")).startswith(b"-"):
            del changed[name]


def _set_stream_options(changed: dict[str, Any]) -> None:
    """Keep only stream options that APIs know, and none if the answer is not streamed."""
    options = changed.pop("stream_options", None)
    if options is None or not is_stream(changed):
        return
    try:
        values = _fields_decoder.decode(options)
    except JSON_ERRORS:
        return
    if allowed := {name: values[name] for name in _STREAM_OPTIONS if name in values}:
        changed["stream_options"] = allowed


def _without_reasoning(messages: Raw) -> Any:
    """Return messages without the reasoning of earlier answers, which APIs refuse."""
    try:
        values = msgspec.json.decode(messages)
    except JSON_ERRORS:  # the API will say so
        return messages
    if not isinstance(values, list):
        return messages
    return [
        {name: part for name, part in message.items() if name not in _OUR_REASONING}
        if isinstance(message, dict)
        else message
        for message in values
    ]
