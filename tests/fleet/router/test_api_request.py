"""Bodies for APIs: every field of our protocols is passed on, removed, or keeps a request here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twostroke.fleet.router import api_request
from twostroke.fleet.router.api_request import LOCAL_FIELDS, REMOVED_FIELDS, api_body, fields_of
from twostroke.fleet.router.overflow_file import BoughtModel, UpstreamSpec
from twostroke.server.protocols.anthropic.messages import MessagesRequest
from twostroke.server.protocols.common.fields import OPAQUE_REASONING
from twostroke.server.protocols.openai.chat import ChatRequest

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
# Fields that OpenAI's and Anthropic's own documentation has, as of November 2026.
PASSED = {
    CHAT: {
        *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "seed"),
        *("logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "functions"),
        *("function_call", "parallel_tool_calls", "reasoning_effort", "prediction", "verbosity"),
        *("modalities", "audio", "web_search_options"),
    },
    MESSAGES: {
        *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature"),
        *("top_k", "top_p", "tools", "tool_choice", "thinking", "cache_control", "speed"),
        *("context_management", "mcp_servers", "output_config", "output_format"),
    },
}
BOUGHT = BoughtModel(model="big-1", input=1, output=1)


def spec(**fields: Any) -> UpstreamSpec:
    facts: dict[str, Any] = {
        "name": "vendor",
        "url": "https://vendor.example",
        "protocol": "openai",
        "key_file": "key",
        "models": {"tiny": BOUGHT},
        "when": ("no_replica",),
        "max_cost_per_day": 1.0,
    }
    return UpstreamSpec(**(facts | fields))


def sent(path: str = CHAT, upstream: UpstreamSpec | None = None, **fields: Any) -> Any:
    """Return the fields that an upstream gets, without model and messages; None if none."""
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": "tiny", "messages": messages, **fields}).encode()
    read = fields_of(body, path)
    if read is None:
        return None
    result = json.loads(api_body(read, path, upstream or spec(), BOUGHT))
    assert result.pop("model") == "big-1"
    if "messages" not in fields:
        assert result.pop("messages") == messages
    return result


@pytest.mark.parametrize(("path", "kind"), [(CHAT, ChatRequest), (MESSAGES, MessagesRequest)])
def test_every_field_of_ours_is_passed_removed_or_keeps_the_request_here(
    path: str, kind: Any
) -> None:
    on_by_default = set(api_request._ON_BY_DEFAULT) if path == CHAT else set()
    groups = [PASSED[path], REMOVED_FIELDS[path] - on_by_default, LOCAL_FIELDS[path], on_by_default]
    names = set(kind.__struct_encode_fields__)
    assert names <= set().union(*groups)
    assert sum(map(len, groups)) == len(set().union(*groups))


@pytest.mark.parametrize("name", sorted(REMOVED_FIELDS[CHAT] - {"n_predict", "store"}))
def test_fields_of_ours_are_removed(name: str) -> None:
    assert sent(**{name: True, "temperature": 0.5}) == {"temperature": 0.5}


@pytest.mark.parametrize("name", sorted(LOCAL_FIELDS[CHAT]))
def test_a_field_that_changes_the_answer_keeps_a_request_here(name: str) -> None:
    assert sent(**{name: ["x"]}) is None
    for neutral in (None, False, 0, [], {}, ""):
        assert sent(**{name: neutral}) == {}


def test_switches_that_are_on_by_default_may_be_on() -> None:
    for name in ("add_generation_prompt", "skip_special_tokens"):
        assert sent(**{name: True}) == {}
        assert sent(**{name: False}) is None


def test_fields_of_vendors_are_passed_as_they_are() -> None:
    fields = {"seed": 12345678901234567890, "reasoning_effort": "low", "new_field": {"a": [1.50]}}
    assert sent(**fields) == fields


def test_limits_get_the_names_that_an_api_knows() -> None:
    assert sent(n_predict=5) == {"max_tokens": 5}
    assert sent(n_predict=5, max_tokens=7) == {"max_tokens": 7}
    assert sent(max_tokens=-1, n_predict=-1) == {}
    newer = spec(rename={"max_tokens": "max_completion_tokens"}, drop=("temperature",))
    assert sent(upstream=newer, max_tokens=7, temperature=1) == {"max_completion_tokens": 7}
    assert sent(upstream=newer, n_predict=5) == {"max_completion_tokens": 5}


def test_options_of_a_stream_are_those_that_apis_know() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert sent(stream_options=options) == {}
    expected = {"stream": True, "stream_options": {"include_usage": True}}
    assert sent(stream=True, stream_options=options) == expected
    assert sent(stream=True, stream_options={"continuous_usage_stats": True}) == {"stream": True}


def test_reasoning_of_our_models_is_not_passed_on() -> None:
    answered = {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": []}
    messages = [{"role": "user", "content": "reasoning"}, answered]
    result = sent(messages=messages)["messages"]
    assert result == [messages[0], {"role": "assistant", "content": "a", "tool_calls": []}]
    signed = {"type": "thinking", "thinking": "", "signature": f"{OPAQUE_REASONING}abc"}
    assert sent(MESSAGES, messages=[{"role": "assistant", "content": [signed]}]) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b"\xff"])
def test_bodies_that_are_no_objects_stay_here(body: bytes) -> None:
    assert fields_of(body, CHAT) is None
