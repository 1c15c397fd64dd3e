"""Builds the OpenAPI document of a server."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec
from msgspec import inspect

from twostroke.core.errors import DeadlineError
from twostroke.core.frozen import Frozen
from twostroke.core.mismatch import union_members
from twostroke.server.auth.keys import KeyMissingError
from twostroke.server.auth.limits import RateLimitError
from twostroke.server.body.field import NEUTRAL, WRONG_IS_IGNORED, Fact, reference
from twostroke.server.generation.protocol import NDJSON
from twostroke.server.http.api_key import OPEN_PATHS
from twostroke.server.http.error_forms import ANTHROPIC_HEADER, FORMS, error_form
from twostroke.server.http.errors import OPENAI, RETRY_STATUSES
from twostroke.server.http.ignored import HEADER
from twostroke.server.http.retry_after import RETRY_AFTER_S, TIMEOUT_FORM, TIMEOUT_HEADER
from twostroke.server.openapi.operation import ANYWHERE, BODY, parameter
from twostroke.server.openapi.operations import OPERATIONS
from twostroke.server.protocols.responses.items import UNTYPED, Item

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from starlette.routing import Route

    from twostroke.server.http.request_context import ErrorForm
    from twostroke.server.openapi.operation import RouteDescription

    Bodies = Mapping[str, type[msgspec.Struct]]
    Operations = Mapping[tuple[str, str], RouteDescription]
    Parts = dict[str, Any]

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = NDJSON.content_type
_REFERENCE: Final = "#/components/schemas/{name}"

_ABOUT: Final = (
    "A large language model, in the protocols of OpenAI, Anthropic, Ollama and llama-server, with "
    "vLLM's further fields. {unknown} Null is the same as leaving a field out. Errors have the "
    "form of the path's protocol; requests with the header `anthropic-version` get Anthropic's "
    "form everywhere. Some paths also answer without `/v1`: `/chat/completions`, `/models`."
)
_UNKNOWN: Final = {
    False: "Unknown fields are ignored; the response's header `twostroke-ignored` names them.",
    True: "An unknown field is refused, with the nearest known name.",
}


def _header(description: str, **schema: object) -> Parts:
    return {"description": description, "required": True, "schema": schema}


_HEADERS: Final[Parts] = {
    "x-request-id": _header(
        "The request's own id if it had one of up to 128 plain characters, else a new one.",
        type="string",
    ),
    "request-id": _header("The same as `x-request-id`.", type="string"),
    HEADER: {
        "description": "The fields that were ignored, with commas between them; absent for none.",
        "schema": {"type": "string"},
    },
    "retry-after": _header(
        "Seconds to wait before the next try.", type="integer", minimum=RETRY_AFTER_S
    ),
}
_KEY_HEADERS: Final[Parts] = {
    "www-authenticate": _header("How to send a key.", type="string", const="Bearer")
}
_SCHEMES: Final[Parts] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "As OpenAI's clients send it."},
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "As Anthropic's clients send it.",
    },
}
_REQUEST_ID: Final = parameter(
    "header", "x-request-id", "An id for logs; the response repeats it.", type="string"
)
_TIMEOUT: Final = parameter(
    "header",
    TIMEOUT_HEADER,
    "Seconds within which to answer; then the request ends with an error.",
    type="string",
    pattern=TIMEOUT_FORM,
)


class ServerFacts(Frozen):
    """The facts of a running server that its OpenAPI document mentions.

    Attributes:
        version: the version of Twostroke.
        has_keys: whether requests need an API key.
        is_strict: whether the server refuses unknown fields (`--strict`).
        values: the values of the placeholders in schemas, by `Fact`.
    """

    version: str
    has_keys: bool
    is_strict: bool
    values: Mapping[str, Any]  # by `Fact`


def document(
    routes: Iterable[Route], bodies: Bodies, facts: ServerFacts, operations: Operations = OPERATIONS
) -> Parts:
    """Build the OpenAPI 3.1 document of a server.

    Args:
        routes: the routes. Routes whose `include_in_schema` is false, such as the files of the
            web UI, are left out.
        bodies: the structs of request bodies, by path.
        facts: the facts of the server.
        operations: the descriptions of the routes, by method and path.
    """
    paths: Parts = {}
    for method, path in described_routes(routes):
        operation = operations[method, path]
        described = _operation(method, path, operation, has_keys=facts.has_keys)
        if path in bodies and method == "POST":
            described["requestBody"] = _body(operation, bodies[path], facts)
        if operation.form:
            content = {"multipart/form-data": {"schema": dict(operation.form)}}
            described["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Twostroke",
            "version": facts.version,
            "description": _ABOUT.format(unknown=_UNKNOWN[facts.is_strict]),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{name: []} for name in _SCHEMES] if facts.has_keys else [],
        "paths": paths,
        "components": {
            "schemas": components(bodies, facts, operations),
            "headers": _HEADERS | (_KEY_HEADERS if facts.has_keys else {}),
            **({"securitySchemes": _SCHEMES} if facts.has_keys else {}),
        },
    }


def components(
    bodies: Bodies, facts: ServerFacts, operations: Operations = OPERATIONS
) -> dict[str, Parts]:
    """Return the JSON Schemas of all request and response structs, by name.

    They are the OpenAPI document's `components/schemas`.
    """
    received = [*bodies.values(), *get_args(Item)]
    sent: list[Any] = [form.struct for form in FORMS]
    for operation in operations.values():
        sent += [operation.answer] if operation.answer is not None else []
        sent += (*operation.events, *operation.lines)
    sent_schemas = _schemas(tuple(sent))
    schemas = _with_facts(_schemas((*received, *sent)), facts)
    # A received struct that is in no union may leave its tag out.
    for kind in _structs_without_tag(tuple(received)):
        if kind.__name__ not in sent_schemas and kind.__struct_config__.tag_field is not None:
            schemas[kind.__name__]["required"].remove(kind.__struct_config__.tag_field)
    for name, schema in schemas.items():
        schema["description"] = " ".join(schema.get("description", "").split())
        _finish_defaults(schema, is_sent=name in sent_schemas)
        _finish_hints(schema, is_strict=facts.is_strict)
    for kind in UNTYPED:
        schemas[kind.__name__]["required"].remove("type")
        schemas[kind.__name__]["properties"]["type"]["enum"].append(None)
    return dict(sorted(schemas.items()))


@cache
def _schemas(kinds: tuple[Any, ...]) -> Parts:
    """Return the JSON Schemas of structs by name. The result is cached: do not change it."""
    return msgspec.json.schema_components(kinds, ref_template=_REFERENCE)[1]


@cache
def _structs_without_tag(kinds: tuple[Any, ...]) -> set[type[msgspec.Struct]]:
    """Return the structs that never share a union with another struct.

    These structs need no tag in their schemas, since a tag such as `type` only tells the structs
    of a union apart.
    """
    all_structs: set[type[msgspec.Struct]] = set()
    in_unions = set(get_args(Item))
    types = [inspect.type_info(kind) for kind in kinds]
    while types:
        alternatives = list(union_members([types.pop()]))
        structs = [part for part in alternatives if isinstance(part, inspect.StructType)]
        if len(structs) > 1:
            in_unions.update(part.cls for part in structs)
        for part in structs:
            if part.cls not in all_structs:
                all_structs.add(part.cls)
                types += [field.type for field in part.fields]
        types += [part.item_type for part in alternatives if isinstance(part, inspect.ListType)]
    return all_structs - in_unions


def schema_of(kind: Any) -> Parts:
    """Return the JSON Schema of a type.

    Structs in it are references (`$ref`) to their schemas in the OpenAPI document.
    """
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return schema


def _with_facts(schema: Any, facts: ServerFacts) -> Any:
    """Return a copy of a JSON Schema with the running server's values in place of `Fact`s.

    If a field has `oneOf`, it replaces the `anyOf` that was derived from the field's type.
    """
    if isinstance(schema, str):
        return facts.values.get(schema, schema)
    if isinstance(schema, list):
        return [_with_facts(part, facts) for part in schema]
    if not isinstance(schema, dict):
        return schema
    replaced = ("anyOf",) if "oneOf" in schema else ()
    return {key: _with_facts(part, facts) for key, part in schema.items() if key not in replaced}


def _finish_defaults(schema: Parts, *, is_sent: bool) -> None:
    """Correct the defaults in a struct's JSON Schema, in place.

    Every field of a response (`is_sent`) becomes required and loses its default. Requests lose the
    default null, which only means that a field may be left out.
    """
    for name, field in schema["properties"].items():
        if is_sent and "default" in field and name not in schema["required"]:
            schema["required"].append(name)
        if is_sent or field.get("default", ...) is None:  # null leaves a field out
            field.pop("default", None)


def _finish_hints(schema: Parts, *, is_strict: bool) -> None:
    """Make a struct's JSON Schema as strict as the server is, in place.

    Only strict servers refuse unknown fields, and fields that have no effect.
    """
    if not is_strict:
        schema.pop("additionalProperties", None)
    for field in schema["properties"].values():
        neutral = field.pop(NEUTRAL, None)
        if is_strict and neutral is not None:
            field["enum"] = neutral
        if is_strict:
            field.pop(WRONG_IS_IGNORED, None)


def described_routes(routes: Iterable[Route]) -> Iterator[tuple[str, str]]:
    """Yield the method and the path of each route that the OpenAPI document describes.

    HEAD is left out, since each GET route has it.
    """
    for route in routes:
        if route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield method, route.path_format


def _operation(method: str, path: str, operation: RouteDescription, *, has_keys: bool) -> Parts:
    """Build the OpenAPI operation of a route, without the request body.

    `has_keys` tells whether the server needs API keys.
    """
    forms = _error_forms(path, operation)
    is_open = path in OPEN_PATHS
    described: Parts = {
        "operationId": _id(method, path),
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [
            _REQUEST_ID,
            *([_TIMEOUT] if DeadlineError in operation.errors else []),
            *operation.parameters,
        ],
        "responses": _responses(operation, forms, needs_key=has_keys and not is_open),
    }
    if has_keys and is_open:
        described["security"] = []
    if operation.description:
        described["description"] = operation.description
    return described


def _error_forms(path: str, operation: RouteDescription) -> list[ErrorForm]:
    """Return the forms in which a path may answer errors: OpenAI's, Anthropic's or another.

    If the path accepts the header `anthropic-version`, it selects Anthropic's form.
    """
    header = ANTHROPIC_HEADER.decode()
    has_header = any(described["name"] == header for described in operation.parameters)
    headers = [[], [(ANTHROPIC_HEADER, b"")]] if has_header else [[]]
    forms = [error_form({"path": path, "headers": sent}) for sent in headers]
    return [*dict.fromkeys(forms)]


def _id(method: str, path: str) -> str:
    """Return the OpenAPI operation id of a route: its method and the words of its path."""
    words = path.replace("{", "").replace("}", "").replace(".", "/").strip("/").split("/")
    return "_".join((method.lower(), *filter(None, words)))


def _body(operation: RouteDescription, kind: type[msgspec.Struct], facts: ServerFacts) -> Parts:
    """Build the OpenAPI description of a route's JSON request body, with examples."""
    model = facts.values[Fact.MODEL_NAMES][0]
    first = {"model": model} if "model" in kind.__struct_fields__ else {}
    examples = {name: {"value": {**first, **value}} for name, value in operation.examples.items()}
    return {"required": True, "content": {JSON: {"schema": reference(kind), "examples": examples}}}


def _responses(operation: RouteDescription, forms: list[ErrorForm], *, needs_key: bool) -> Parts:
    """Build the OpenAPI descriptions of a route's responses, by HTTP status.

    `forms` are the forms of the route's errors; `needs_key` tells whether the route needs an API
    key.
    """
    form = forms[0]
    ids = ["x-request-id", *([form.id_header.decode()] if form.id_header else [])]
    content: Parts = {kind: {"schema": schema} for kind, schema in operation.media.items()}
    if operation.answer is not None:
        schema = schema_of(operation.answer)
        other = operation.media.get(JSON)
        content[JSON] = {"schema": {"anyOf": [schema, other]} if other else schema}
    if operation.events:
        content[EVENTS] = {"schema": _stream(operation, form)}
    if operation.lines:
        content[LINES] = {"schema": _lines(operation, form)}
    ignored_header = [HEADER] if operation.examples else []  # only requests with a body
    responses: Parts = {"200": _response("The answer.", content, [*ids, *ignored_header])}
    if operation.leads_to:
        responses["200"]["links"] = {
            _id(method, path): _link(method, path) for method, path in operation.leads_to
        }
    if operation.may_be_unready:
        responses["503"] = _response("Not ready.", content, [*ids, "retry-after"])
    failures = [reference(form.struct) for form in forms]
    failure = {JSON: {"schema": {"anyOf": failures} if len(failures) > 1 else failures[0]}}
    reasons: dict[int, str] = {}
    is_limited = needs_key and set(BODY) <= set(operation.errors)
    key_errors = [KeyMissingError] * needs_key + [RateLimitError] * is_limited
    for kind in (*operation.errors, *ANYWHERE, *key_errors):
        text = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        for form in forms:
            reasons.setdefault(form.status(kind("")), text)
    reasons[HTTPStatus.INTERNAL_SERVER_ERROR] = "The server failed on this request."
    for status in sorted(reasons):
        headers = [*ids, "retry-after"] if status in RETRY_STATUSES else ids
        headers = [*ids, "www-authenticate"] if status == HTTPStatus.UNAUTHORIZED else headers
        responses.setdefault(str(status), _response(reasons[status], failure, headers))
    return responses


def _link(method: str, path: str) -> Parts:
    name = path.partition("{")[2].partition("}")[0]
    return {"operationId": _id(method, path), "parameters": {name: "$response.body#/id"}}


def _response(description: str, content: Parts, headers: Iterable[str]) -> Parts:
    refs = {name: {"$ref": f"#/components/headers/{name}"} for name in headers}
    return {"description": description, "headers": refs, "content": content}


def _lines(operation: RouteDescription, form: ErrorForm) -> Parts:
    """Return the JSON Schema of a line in a stream of JSON lines, which may end with an error."""
    kinds = [reference(struct) for struct in (*operation.lines, form.struct)]
    return {
        "type": "string",
        "description": "Lines, each of which is a JSON object.",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": kinds},
    }


def _stream(operation: RouteDescription, form: ErrorForm) -> Parts:
    """Return the JSON Schema of one server-sent event of a route's stream.

    OpenAPI 3.1 has no notation for streams; in OpenAPI 3.2 this is an `itemSchema`.
    """
    kinds = [reference(struct) for struct in dict.fromkeys(operation.events)]
    kinds += [operation.media[JSON]] if JSON in operation.media else []
    data: Parts = {"contentMediaType": JSON, "contentSchema": {"anyOf": kinds}}
    if form is OPENAI:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "type": "object",
        "description": "One server-sent event.",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"} | data},
        "required": ["data"],
    }
