"""Helps Schemathesis to make useful requests and to judge the answers."""

from __future__ import annotations

import atexit
import json
import re
from collections import Counter
from typing import Any

import jsonschema
import schemathesis
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from schemathesis.specs.openapi.checks import negative_data_rejection

_ROOT = "urn:described"
_LOOSE = "urn:loosely-described"
_MOST_TOKENS = 8
_MOST_CHOICES = 3
_UNBOUNDED = {  # the limit of an answer that need not be there
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/completion": "n_predict",
    "/infill": "n_predict",
}
_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
_FORMS += ("guided_grammar", "output_config")

# Reasons that no schema can state: fields depend on each other, on the model, on the meaning of
# texts. A request made from the document may be refused for these reasons and for no others.
REASONS = {
    "texts that are to be a JSON schema, a regular expression or a grammar": (
        r"(JSON schema|regular expression|grammar|list of choices) cannot be used: ",
    ),
    "a strict function's schema": (r"(parameters|input_schema) cannot be followed: ",),
    "the length of a context": (
        r"maximum context length",
        r"prompt is too long",
        r"exceed context",
    ),
    "a machine that was not measured": (r"whose limits are not known",),
    "names of devices and formats": (r"^(device|weights|kv_format) must be one of ",),
    "empty prompts": (
        r"(prompt|input|content)\S* is empty",
        r"input (is missing|is an empty list|has no items that are known here)",
    ),
    "the size of a page in Anthropic's form": (r"limit must be from 1 to 1000",),
    "one of two fields": (
        r"Give one of prompt, messages and content",
        r" may only be set with (prompt|messages|content)",
        r" may only be set where raw is true",
        r"content is missing",
        r"response_format.json_schema is missing",
    ),
    "ids of no token": (r" is not a token of this model", r"has token ids outside"),
    "unknown tools": (r"must be (the name of )?one of the tools",),
    "answers that are not in the background": (r"is not in the background",),
    "conversations": (r"cannot be combined with previous_response_id", r"Conversation with id"),
    "answers in the background that are not stored": (r"background needs",),
    "unknown items": (r"Item with id", r"must be the id of an? (item|model|file|batch)"),
    "limits of thinking": (r"thinking.budget_tokens must be at least 1 and less than max_tokens",),
    "several forms of an answer": (r" cannot be combined with ", r" has no form"),
    "results of tools without their calls": (
        r"is not the id of an earlier (call|function_call)",
        r"must be the id of an earlier call",
    ),
    "roles of messages": (
        r"belongs to a message of the role",
        r"cannot be part of a message of the role",
    ),
    "messages to continue": (r"must (not )?end with a", r"continue_final_message"),
    "models that cannot fill in the middle": (r"suffix", r"Infill is not supported"),
    "prompts of several kinds": (r"mixes token ids",),
    "scores of prompts": (r"max_tokens may only be 0 where echo is true",),
    "options of a chat template": (r"chat template",),
    "prompts times n": (r"asks for too many answers",),
}

counts: Counter[str] = Counter()  # of right requests
atexit.register(
    lambda: print("right requests:", *(f"\n  {c:5} {w}" for w, c in counts.most_common()))
)
_registry: Any = None


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Let models have names that are served; the document leaves them open for other servers."""
    global _registry  # noqa: PLW0603 - hooks have nowhere else to keep it
    exact, loose = (json.loads(json.dumps(raw_schema)) for _ in range(2))
    for schema in loose["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if field.get("x-wrong-is-ignored"):
                schema["properties"][name] = {}
    documents = {_ROOT: exact, _LOOSE: loose}
    resources = {
        key: Resource.from_contents(document, DRAFT202012) for key, document in documents.items()
    }
    _registry = Registry().with_resources(resources.items())
    for schema in raw_schema["components"]["schemas"].values():
        model = schema.get("properties", {}).get("model", {})
        if "examples" in model:
            model["enum"] = [*model["examples"], None]


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Keep answers short, and let fields of right requests suit one another."""
    body = case.body
    if not isinstance(body, dict):
        return
    is_right = case.meta is not None and case.meta.generation.mode.is_positive
    _shorten(body, case.operation.path)
    if is_right:
        _reconcile(body)
        if case.operation.path == "/v1/responses":
            _reconcile_response(body)
        elif case.operation.path == "/tokenize":
            _reconcile_prompt(body)
        if {"max_tokens", "max_output_tokens"} & {*body} and "stream" not in body:
            body["stream"] = len(repr(body)) % 2 == 0  # which is rarely drawn


@schemathesis.check
def refusals_have_a_reason(ctx: Any, response: Any, case: Any) -> None:
    """In place of positive_data_acceptance, which knows statuses alone."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if response.status_code != 400:
        counts["answered"] += response.status_code == 200
        return
    error = json.loads(response.text)["error"]
    message = error if isinstance(error, str) else error["message"]
    results = [why for why, forms in REASONS.items() if any(re.search(f, message) for f in forms)]
    assert results, f"A right request was refused: {message}"
    counts[f"refused for {results[0]}"] += 1


@schemathesis.check
def wrong_requests_are_refused(ctx: Any, response: Any, case: Any) -> bool | None:
    """negative_data_rejection, but for what is more than the document promises."""
    if response.status_code == 200 and _is_right_but_for_ignored_values(case):
        return None
    return negative_data_rejection(ctx, response, case)


@schemathesis.check
def events_are_as_described(ctx: Any, response: Any, case: Any) -> None:
    """The data of each event is JSON that its `contentSchema` allows, up to the last."""
    if "text/event-stream" not in response.headers.get("content-type", [""])[0]:
        return
    counts["streamed"] += 1
    described = case.operation.definition.raw["responses"]["200"]["content"]["text/event-stream"]
    data_schema = described["schema"]["properties"]["data"]
    schema = data_schema.get("anyOf", [data_schema])[-1]["contentSchema"]
    schema = json.loads(json.dumps(schema).replace('"#/components', f'"{_ROOT}#/components'))
    validator = jsonschema.Draft202012Validator(schema, registry=_registry)
    data = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
    if data[-1] == "[DONE]":
        data.pop()
    for event in data:
        validator.validate(json.loads(event))


def _shorten(body: dict[str, Any], path: str) -> None:
    """Bound what an answer costs; wrong values stay as they are."""
    if _is_int(body.get("n")):
        body["n"] = min(body["n"], _MOST_CHOICES)
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n_predict")
    for name in limits:
        if _is_int(body.get(name)):
            body[name] = min(body[name], _MOST_TOKENS)
    name = _UNBOUNDED.get(path)
    if name is not None and body.get(name) is None:
        body[name] = _MOST_TOKENS


def _is_right_but_for_ignored_values(case: Any) -> bool:
    """Whether a request is wrong only where the server ignores wrong values."""
    body = case.operation.definition.raw.get("requestBody")
    if body is None:
        return False
    schema = {"$ref": _LOOSE + body["content"]["application/json"]["schema"]["$ref"]}
    return jsonschema.Draft202012Validator(schema, registry=_registry).is_valid(case.body)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reconcile(body: dict[str, Any]) -> None:
    forms = [name for name in _FORMS if body.get(name) is not None]
    for name in forms[1:] if not body.get("tools") else forms:
        del body[name]
    if forms:
        body.pop("ignore_eos", None)
    if body.get("max_completion_tokens") is not None:
        body.pop("max_tokens", None)
    if body.get("stream_options") is not None:
        body["stream"] = True
    if body.get("top_logprobs"):
        body["logprobs"] = True
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if _is_int(body.get("min_tokens")):
        body["min_tokens"] = min(body["min_tokens"], _limit(body))
    _reconcile_tools(body)
    for message in body.get("messages") or ():
        _reconcile_message(message)


def _reconcile_response(body: dict[str, Any]) -> None:
    body["store"] = True  # links lead to it
    body.pop("previous_response_id", None)
    items = body.get("input")
    if isinstance(items, list):
        items = [item for item in items if item.get("type") not in ("item_reference", None)]
    body["input"] = items or "hello"


def _limit(body: dict[str, Any]) -> int:
    result = (
        body.get("max_output_tokens") or body.get("max_completion_tokens") or body.get("max_tokens")
    )
    return int(result) if _is_int(result) else _MOST_TOKENS


def _reconcile_prompt(body: dict[str, Any]) -> None:
    if body.get("messages"):
        dropped_fields: tuple[str, ...] = ("prompt", "add_special_tokens", "parse_special")
    else:
        body["prompt"] = body.get("prompt") or "hello"
        dropped_fields = ("messages", "tools", "add_generation_prompt", "continue_final_message")
    for name in (*dropped_fields, "content", "add_special", "with_pieces"):
        body.pop(name, None)


def _reconcile_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools") or []
    names = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        function["name"] = f"f{index}"
        names.append(function["name"])
    choice = body.get("tool_choice")
    if choice is not None and not tools:
        del body["tool_choice"]
    elif isinstance(choice, dict) and "function" in choice:
        choice["function"]["name"] = names[0]
    elif isinstance(choice, dict) and "name" in choice:
        choice["name"] = names[0]
    elif isinstance(choice, dict) and choice.get("tools"):  # those that are allowed
        choice["tools"] = [{"type": "function", "name": names[0]}]


def _reconcile_message(message: dict[str, Any]) -> None:
    if message.get("content") is None:
        message["content"] = "hello"
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if message.get(name) and message["role"] != role:
            del message[name]
    wrong = {"user": "tool_use", "assistant": "tool_result"}.get(message.get("role", ""))
    if wrong is not None and isinstance(message.get("content"), list):
        message["content"] = [part for part in message["content"] if part.get("type") != wrong]
