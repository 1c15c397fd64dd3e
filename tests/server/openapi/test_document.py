"""The OpenAPI document is complete and valid, and agrees with what the server accepts and sends."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from support.openapi_checks import Description
from support.servers import chat_body, description_of, live_server
from support.tiny import Tiny, infill_metadata
from twostroke.core.errors import RequestError
from twostroke.lab.planner.endpoint import Plans
from twostroke.server.http.retry_after import timeout_of
from twostroke.server.openapi.document import components, described_routes
from twostroke.server.openapi.operations import OPERATIONS as SERVER_OPERATIONS
from twostroke.server.routes import EMBEDDING_PROTOCOLS, GENERATION_PROTOCOLS, UTILITY_ENDPOINTS
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

BODIES = {
    path: protocol.request
    for table in (GENERATION_PROTOCOLS, EMBEDDING_PROTOCOLS, UTILITY_ENDPOINTS)
    for path, protocol in table.items()  # type: ignore[attr-defined]
}
OPERATIONS = SERVER_OPERATIONS | Plans.operations
EXAMPLES = [
    (method, path, name)
    for (method, path), operation in OPERATIONS.items()
    for name in operation.examples
    if "{" not in path and path != "/v1/batches"  # which need an id
]
ROOT = Path(__file__).parents[3]
OPERATIONS_FILE = "src/twostroke/server/openapi/operations.py"


@pytest.fixture(scope="module")
def described(shared_server: LiveServer) -> dict[str, Any]:
    return shared_server.http.get("/openapi.json").json()


@pytest.fixture(scope="module")
def description(described: dict[str, Any]) -> Description:
    return Description(described)


@pytest.fixture
def schemas(server: LiveServer) -> dict[str, Any]:
    return components(BODIES, server.api.facts())


def test_document_is_valid_openapi(described: dict[str, Any]) -> None:
    assert described["openapi"].startswith("3.1")
    OpenAPIV31SpecValidator(described).validate()
    ids = [
        operation["operationId"]
        for path in described["paths"].values()
        for operation in path.values()
    ]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


def test_every_route_is_described_and_nothing_else(server: LiveServer) -> None:
    wrong = set(described_routes(server.api.routes())) ^ set(OPERATIONS)
    assert not wrong, f"{wrong}: say in {OPERATIONS_FILE} what these routes are for"


def test_every_route_that_takes_a_body_says_which(
    server: LiveServer, described: dict[str, Any]
) -> None:
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            has_body = method in {"post", "put", "patch"} and not path.endswith("/cancel")
            assert ("requestBody" in operation) == has_body, f"{method} {path}: see Api.description"
            if has_body:
                [(media, content)] = operation["requestBody"]["content"].items()
                assert media == "multipart/form-data" or content["examples"], (
                    f"{path} has no examples: {OPERATIONS_FILE}"
                )


def test_files_for_browsers_are_not_described(server: LiveServer) -> None:
    async def nothing(_request: Any) -> None: ...

    hidden = Route("/page.css", nothing, include_in_schema=False)
    assert not list(described_routes([hidden]))


def test_every_field_of_a_body_says_what_it_is_for(schemas: dict[str, Any]) -> None:
    silent = [
        f"{kind.__name__}.{name}"
        for kind in BODIES.values()
        for name, field in schemas[kind.__name__]["properties"].items()
        if not field.get("description")
    ]
    assert not silent, f"{silent}: annotate these with field.doc(...)"


def test_tables_of_fields_are_current() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "field_tables.py", "--check"], check=False
    )
    assert run.returncode == 0, "run `make tables` to write docs/reference/api.md"


def test_every_struct_is_described_and_has_a_name_of_its_own(schemas: dict[str, Any]) -> None:
    for name, schema in schemas.items():
        assert name.isalnum(), f"{name}: two structs have one name"
        assert schema["description"], f"{name} has no docstring"


def test_unsupported_fields_list_their_neutral_values(schemas: dict[str, Any]) -> None:
    fields = schemas["ChatRequest"]["properties"]
    assert fields["cache_salt"]["enum"] == [None]
    assert str(fields["use_beam_search"]["enum"]) == "[None, False]"  # 0 and False are equal
    assert "enum" not in fields["length_penalty"]


def test_document_of_a_strict_server_forbids_refused_fields(strict: LiveServer) -> None:
    schemas = components(BODIES, strict.api.facts())
    chat_request = schemas["ChatRequest"]
    assert chat_request["additionalProperties"] is False
    assert str(chat_request["properties"]["length_penalty"]["enum"]) == "[None, 1.0]"


def test_items_of_a_response_request_are_described(description: Description) -> None:
    schema = {"$ref": "#/components/schemas/ResponsesRequest"}
    message = {"role": "user", "content": "hello"}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    assert description.is_valid(schema, {"input": [message, call]})
    for wrong in ({"role": "wizard", "content": "x"}, {**call, "type": "call"}, {"name": "f"}):
        assert not description.is_valid(schema, {"input": [message, wrong]})


@pytest.mark.parametrize("name", ["ConversationRequest", "ItemsRequest"])
def test_items_of_a_conversation_are_described(description: Description, name: str) -> None:
    schema = {"$ref": f"#/components/schemas/{name}"}
    message = {"role": "user", "content": "hello"}
    assert description.is_valid(schema, {"items": [message]})
    for wrong in ({}, {"role": "user"}, {"type": "custom_tool_call"}):
        assert not description.is_valid(schema, {"items": [message, wrong]})
    assert description.is_valid(schema, {"items": []}) == (name == "ConversationRequest")


def test_header_for_anthropics_form_is_described_with_its_errors(described: dict[str, Any]) -> None:
    operations = {
        f"{method} {path}": operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }
    with_header = {
        name: operation
        for name, operation in operations.items()
        if any(parameter["name"] == "anthropic-version" for parameter in operation["parameters"])
    }
    assert {"get /v1/models", "post /v1/files", "delete /v1/files/{file_id}"} <= set(with_header)
    for name, operation in with_header.items():
        failures = [
            response["content"]["application/json"]["schema"]
            for status, response in operation["responses"].items()
            if status >= "400"
        ]
        assert failures, name
        for schema in failures:
            kinds = {
                alternative["$ref"].rpartition("/")[2]
                for alternative in schema.get("anyOf", [schema])
            }
            is_shared = not name.startswith("post /v1/messages")
            assert kinds == {"AnthropicErrorBody"} | ({"ErrorBody"} if is_shared else set()), name


def test_pattern_of_timeouts_allows_what_the_server_accepts(described: dict[str, Any]) -> None:
    parameters = described["paths"]["/v1/completions"]["post"]["parameters"]
    [header] = [parameter for parameter in parameters if parameter["name"] == "x-request-timeout"]
    seconds = ("0.5", "0.000000001", "1", "9999.25", "79999", "85999.9", "86399.9", "86400.0")
    wrong = ("0", "0.0", "-1", "86400.1", "86401", "90000", "100000", "1e3", "", "1.", ".5")
    for value in (*seconds, *wrong):
        assert bool(re.search(header["schema"]["pattern"], value)) == (value in seconds), value
        scope = {"headers": [(b"x-request-timeout", value.encode())]}
        if value in seconds:
            assert timeout_of(scope) == float(value)
        else:
            with pytest.raises(RequestError):
                timeout_of(scope)


def test_links_lead_to_operations(described: dict[str, Any]) -> None:
    operations = {
        operation["operationId"]: operation
        for path in described["paths"].values()
        for operation in path.values()
    }
    links = operations["post_v1_responses"]["responses"]["200"]["links"]
    assert links
    for link in links.values():
        parameters = operations[link["operationId"]]["parameters"]
        assert set(link["parameters"]) <= {
            parameter["name"] for parameter in parameters if parameter["in"] == "path"
        }


def test_every_component_is_used(described: dict[str, Any]) -> None:
    text = json.dumps(described)
    for kind in ("schemas", "headers"):
        for name in described["components"][kind]:
            assert f'"#/components/{kind}/{name}"' in text, name


@pytest.fixture(scope="module")
def roomy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose context is long enough for tools.

    Tools take many words for a model without its own form of tool calls. The model can fill in the
    middle.
    """
    tiny = Tiny(context_length=2048)
    folder = tmp_path_factory.mktemp("roomy")
    with (
        closing(Records(folder / "records")) as records,
        live_server(folder, records=records, tiny=tiny, metadata=infill_metadata()) as server,
    ):
        yield server


@pytest.mark.parametrize(("method", "path", "name"), EXAMPLES)
def test_examples_are_accepted(roomy_server: LiveServer, method: str, path: str, name: str) -> None:
    description = description_of(roomy_server.api)
    content = description.document["paths"][path][method.lower()]["requestBody"]["content"][
        "application/json"
    ]
    example = content["examples"][name]["value"]
    description.validate(content["schema"], example)
    response = roomy_server.http.request(method, path, json=example)
    assert response.status_code == 200, response.text
    kind = response.headers["content-type"].partition(";")[0]
    is_ollamas = path in {"/api/chat", "/api/generate"}  # which streams unless told otherwise
    stream = "application/x-ndjson" if is_ollamas else "text/event-stream"
    assert kind == (stream if example.get("stream", is_ollamas) else "application/json")


@pytest.mark.parametrize("path", BODIES)
def test_errors_are_as_described(server: LiveServer, path: str) -> None:
    """`CheckedClient` compares errors with the document; see `test_faults` for engine failures."""
    json_ = {"content-type": "application/json"}
    for status, request in {
        400: {"content": b"{", "headers": json_},
        404: {"json": {"model": "nope", **_required_fields(path)}},
        413: {"content": b" " * (8 * 1024 * 1024 + 1), "headers": json_},
        415: {"content": b"{}", "headers": {"content-type": "text/plain"}},
        431: {"json": {}, "headers": {"x-long": "x" * 33_000}},
    }.items():
        assert server.http.post(path, **request).status_code == status


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, 100.5, "1")],
        *[("top_p", value) for value in (-0.1, 1.5)],
        *[("max_tokens", value) for value in (0, -2, 1.5)],
        *[("n", value) for value in (0, 129)],
        *[("seed", value) for value in (2**64, -(2**63) - 1)],
        *[("stop", value) for value in (["a"] * 17, "x" * 1001)],
        *[("stop_token_ids", value) for value in ([-1], [10**6], [0] * 257)],
        *[("logit_bias", value) for value in ({"1": 101}, {str(i): 1 for i in range(1025)})],
        *[("priority", value) for value in (1001, -1001)],
        *[("speculate", value) for value in ("magic", 5)],
        *[("bad_words", value) for value in (["x"], 1)],
        *[("use_beam_search", value) for value in (True, 0)],
        *[("top_logprobs", value) for value in (-1, 21)],
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]),
        ("guided_choice", []),
        ("guided_choice", [""]),
    ],
)
def test_server_refuses_bodies_that_the_schema_refuses(
    server: LiveServer, description: Description, name: str, value: object
) -> None:
    schema = {"$ref": "#/components/schemas/ChatRequest"}
    body = chat_body(logprobs=True, max_tokens=1) | {name: value}
    assert not description.is_valid(schema, body)
    assert server.http.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (0, 100, 0.5, None)],
        *[("top_p", value) for value in (0, 1e-6, 1)],
        *[("seed", value) for value in (2**64 - 1, -(2**63))],
        *[("stop", value) for value in ("x" * 1000, ["a"] * 16, "", [""])],
        *[("stop_token_ids", value) for value in ([0], list(range(256)))],
        *[("logit_bias", value) for value in ({"0": -100}, {str(i): 100 for i in range(285)})],
        *[("length_penalty", value) for value in (1, 1.0, None)],
        *[("top_logprobs", value) for value in (0, 20)],
        ("tools", [{"type": "function", "function": {"name": "_"}}]),
        ("tools", [{"type": "function", "function": {"name": "mcp:files/read"}}]),
        ("bad_words", []),
        ("priority", -1000),
    ],
)
def test_server_accepts_bodies_that_the_schema_allows(
    server: LiveServer, description: Description, name: str, value: object
) -> None:
    schema = {"$ref": "#/components/schemas/ChatRequest"}
    body = chat_body(logprobs=True, max_tokens=1) | {name: value}
    assert description.is_valid(schema, body)
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("fault", ["field", "type", "status", "header", "media"])
def test_a_response_that_is_not_as_described_is_noticed(
    server: LiveServer, description: Description, described: dict[str, Any], fault: str
) -> None:
    wrong = copy.deepcopy(described)
    responses = wrong["paths"]["/v1/models"]["get"]["responses"]
    model = wrong["components"]["schemas"]["ModelBody"]
    if fault == "field":
        del model["properties"]["max_model_len"]
    elif fault == "type":
        model["properties"]["created"]["type"] = "string"
    elif fault == "status":
        del responses["200"]
    elif fault == "header":
        responses["200"]["headers"]["x-more"] = {"schema": {}}
    else:
        responses["200"]["content"] = {"text/plain": {"schema": {}}}
    response = server.http.get("/v1/models")
    description.check("GET", "/v1/models", response)
    with pytest.raises(AssertionError):
        Description(wrong).check("GET", "/v1/models", response)


def _required_fields(path: str) -> dict[str, Any]:
    """Return the fields that the body of a request to a route must have."""
    (example, *_) = OPERATIONS["POST", path].examples.values()
    return dict(example)
