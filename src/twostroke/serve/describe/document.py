"""Builds the OpenAPI document of a server."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from twostroke.serve.anthropic.errors import ANTHROPIC, error_form
from twostroke.serve.describe.operations import ANYWHERE, OPERATIONS
from twostroke.serve.describe.schemas import Schemas
from twostroke.serve.http.errors import OPENAI, RETRY_AFTER_S, RETRY_STATUSES
from twostroke.serve.http.keys import OPEN_PATH, KeyMissingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import msgspec
    from starlette.routing import Route

    from twostroke.serve.describe.facts import Facts
    from twostroke.serve.describe.operations import Operation
    from twostroke.serve.http.errors import ErrorForm

    Bodies = Mapping[str, type[msgspec.Struct]]
    Parts = dict[str, Any]

VERSION: Final = "3.1.0"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"

_ABOUT: Final = (
    "A large language model, in the protocols of OpenAI and Anthropic and with vLLM's further "
    "fields. A field that is not known is refused with the name of the "
    "nearest one; null is the same as leaving a field out. Errors have the form of the path's "
    "protocol; requests with the header `anthropic-version` get Anthropic's everywhere."
)
_HEADERS: Final[Parts] = {
    "x-request-id": {
        "description": "The request's own id if it had one of up to 128 plain characters, "
        "else a fresh one.",
        "required": True,
        "schema": {"type": "string"},
    },
    "request-id": {"description": "The same.", "required": True, "schema": {"type": "string"}},
    "retry-after": {
        "description": "Seconds to wait before the next try.",
        "required": True,
        "schema": {"type": "integer", "const": RETRY_AFTER_S},
    },
}
_WANTED: Final[Parts] = {
    "www-authenticate": {
        "description": "What is wanted.",
        "required": True,
        "schema": {"type": "string", "const": "Bearer"},
    },
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
_REQUEST_ID: Final[Parts] = {
    "name": "x-request-id",
    "in": "header",
    "description": "An id for logs; it comes back.",
    "schema": {"type": "string"},
}


def undescribed(routes: Iterable[Route]) -> list[str]:
    """Return the methods and paths that `operations.py` says nothing about, and the reverse."""
    there = set(_operations(routes))
    return [" ".join(one) for one in sorted(there ^ set(OPERATIONS))]


def document(routes: Iterable[Route], bodies: Bodies, facts: Facts) -> Parts:
    """Return the description of a server with these routes.

    `bodies` are the structs of request bodies by path. A route that nothing is said about is left
    out; those that are to be (`include_in_schema`) are files for browsers.
    """
    found = {key: OPERATIONS[key] for key in _operations(routes) if key in OPERATIONS}
    answers = [struct for one in found.values() for struct in _answers(one)]
    forms = [OPENAI.struct, ANTHROPIC.struct]
    schemas = Schemas(bodies.values(), dict.fromkeys([*answers, *forms]), facts)
    paths: Parts = {}
    for (method, path), operation in found.items():
        described = _operation(method, path, operation, schemas, has_keys=facts.has_keys)
        if path in bodies and method == "POST":
            described["requestBody"] = _body(operation, schemas.ref(bodies[path]), facts)
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": VERSION,
        "info": {
            "title": "Twostroke",
            "version": facts.version,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{name: []} for name in _SCHEMES] if facts.has_keys else [],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "headers": _HEADERS | (_WANTED if facts.has_keys else {}),
            **({"securitySchemes": _SCHEMES} if facts.has_keys else {}),
        },
    }


def _operations(routes: Iterable[Route]) -> Iterator[tuple[str, str]]:
    """Yield methods and paths; HEAD goes without saying where there is GET."""
    for route in routes:
        if route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield method, route.path_format


def _answers(operation: Operation) -> Iterator[type[msgspec.Struct]]:
    if operation.answer is not None:
        yield operation.answer
    yield from operation.events


def _operation(
    method: str, path: str, operation: Operation, schemas: Schemas, *, has_keys: bool
) -> Parts:
    form = error_form({"path": path, "headers": []})
    is_open = path == OPEN_PATH
    described: Parts = {
        "operationId": _id(method, path),
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [_REQUEST_ID, *operation.parameters],
        "responses": _responses(operation, form, schemas, asks=has_keys and not is_open),
    }
    if has_keys and is_open:
        described["security"] = []
    if operation.description:
        described["description"] = operation.description
    return described


def _id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(".", "/").strip("/").split("/")
    return "_".join((method.lower(), *filter(None, words)))


def _body(operation: Operation, schema: Parts, facts: Facts) -> Parts:
    examples = {
        name: {"value": {"model": facts.names[0], **value}}
        for name, value in operation.examples.items()
    }
    return {"required": True, "content": {JSON: {"schema": schema, "examples": examples}}}


def _responses(operation: Operation, form: ErrorForm, schemas: Schemas, *, asks: bool) -> Parts:
    ids = ["x-request-id", *([form.id_header.decode()] if form.id_header else [])]
    content: Parts = {kind: {"schema": schema} for kind, schema in operation.media.items()}
    if operation.answer is not None:
        content[JSON] = {"schema": schemas.ref(operation.answer)}
    if operation.events:
        content[EVENTS] = {"schema": _stream(operation, form, schemas)}
    responses: Parts = {"200": _response("The answer.", content, ids)}
    if operation.leads_to:
        responses["200"]["links"] = {_id(*one): _link(*one) for one in operation.leads_to}
    if operation.unwell:
        responses["503"] = _response("Not now.", content, [*ids, "retry-after"])
    failure = {JSON: {"schema": schemas.ref(form.struct)}}
    said: dict[int, str] = {}
    for kind in (*operation.errors, *ANYWHERE, *([KeyMissingError] if asks else [])):
        said.setdefault(
            form.status(kind("")), " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        )
    said[HTTPStatus.INTERNAL_SERVER_ERROR] = "The server failed on this request."
    for status in sorted(said):
        headers = [*ids, "retry-after"] if status in RETRY_STATUSES else ids
        headers = [*ids, "www-authenticate"] if status == HTTPStatus.UNAUTHORIZED else headers
        responses.setdefault(str(status), _response(said[status], failure, headers))
    return responses


def _link(method: str, path: str) -> Parts:
    name = path.partition("{")[2].partition("}")[0]
    return {"operationId": _id(method, path), "parameters": {name: "$response.body#/id"}}


def _response(description: str, content: Parts, headers: Iterable[str]) -> Parts:
    refs = {name: {"$ref": f"#/components/headers/{name}"} for name in headers}
    return {"description": description, "headers": refs, "content": content}


def _stream(operation: Operation, form: ErrorForm, schemas: Schemas) -> Parts:
    """Return the schema of a stream's events: each is an object of its fields, data among them.

    OpenAPI 3.1 has no word for streams; this is what 3.2 calls an item.
    """
    kinds = [schemas.ref(struct) for struct in dict.fromkeys(operation.events)]
    data: Parts = {"contentMediaType": JSON, "contentSchema": {"anyOf": kinds}}
    if form is OPENAI:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "type": "object",
        "description": "One server-sent event.",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"} | data},
        "required": ["data"],
    }
