"""Responses checked against the server's own OpenAPI document."""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
from jsonschema_rs import Draft202012Validator, Registry

from twostroke.server.http.boundary import ALIASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    Parts = dict[str, Any]

_SENT_TO_ANYONE = {403, 404, 405}  # of strangers, and of paths and methods that are not there
_ROOT = "urn:described"


class Description:
    """An OpenAPI document, against which responses are checked.

    Structs of answers are closed first: a field that is not described is a fault, too.
    """

    def __init__(self, document: Parts) -> None:
        self.document = copy.deepcopy(document)
        schemas = self.document["components"]["schemas"]
        body_schemas = _reachable(_bodies(self.document), schemas)
        for name, schema in schemas.items():
            if name not in body_schemas:
                schema["additionalProperties"] = False
        self._registry = Registry([(_ROOT, self.document)])
        self._validators: dict[str, Draft202012Validator] = {}
        self._patterns = {
            path: re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(path)))
            for path in self.document["paths"]
        }

    def check(self, method: str, path: str, response: httpx.Response) -> None:
        """Assert that the document describes a response, which was read completely."""
        result = self._operation(method, path)
        status = response.status_code
        assert response.headers["x-request-id"]
        if result is None:
            assert status in _SENT_TO_ANYONE, f"{method} {path} is not described"
            return
        parameters = {parameter["name"] for parameter in result["parameters"]}
        header = "anthropic-version"
        if header in response.request.headers and header not in parameters and status >= 400:
            return  # the form is in the words of the document, not in the schemas of this path
        responses = result["responses"]
        assert str(status) in responses, f"{method} {path} has a status {status}"
        described = responses[str(status)]
        for header in described["headers"]:
            component = self.document["components"]["headers"].get(header, {"required": True})
            is_there = header in response.headers or not component.get("required")
            assert is_there, f"{method} {path} {status} lacks {header}"
        media = response.headers["content-type"].partition(";")[0]
        assert media in described["content"], f"{method} {path} {status} is {media}"
        schema = described["content"][media]["schema"]
        if media == "text/event-stream":
            self._check_events(schema, response.text)
        elif media == "application/x-ndjson":
            for line in response.text.splitlines():
                self.validate(schema["contentSchema"], json.loads(line))
        elif media == "application/json":
            self.validate(schema, response.json())

    def validate(self, schema: Parts, value: object) -> None:
        """Assert that a value is valid under a schema of the document."""
        errors = [
            f"{error.instance_path}: {error.message}"
            for error in self._validator(schema).iter_errors(value)
        ]
        assert not errors, f"{errors}\n{value}"

    def is_valid(self, schema: Parts, value: object) -> bool:
        """Whether a schema of the document allows a value."""
        return self._validator(schema).is_valid(value)

    def _validator(self, schema: Parts) -> Draft202012Validator:
        """Return a validator for a schema, with references into the document."""
        text = json.dumps(schema).replace('"#/components', f'"{_ROOT}#/components')
        if text not in self._validators:
            self._validators[text] = Draft202012Validator(text, registry=self._registry)
        return self._validators[text]

    def _operation(self, method: str, path: str) -> Parts | None:
        paths = self.document["paths"]
        exact = paths.get(path, {}).get(method.lower())
        if exact is not None:
            return dict(exact)
        # The longer path is the more exact one.
        for name, pattern in sorted(
            self._patterns.items(), key=lambda name_and_pattern: -len(name_and_pattern[0])
        ):
            if "{" in name and pattern.fullmatch(path) and method.lower() in paths[name]:
                return dict(paths[name][method.lower()])
        return None

    def _check_events(self, schema: Parts, text: str) -> None:
        for part in text.split("\n\n"):
            lines = [line for line in part.splitlines() if not line.startswith(":")]
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            if data and data != ["[DONE]"]:
                inner = schema["properties"]["data"]
                inner = inner.get("anyOf", [inner])[-1]
                self.validate(inner["contentSchema"], json.loads(data[0]))


class CheckedClient(httpx.Client):
    """An HTTP client that checks each response that is not streamed against the document."""

    def __init__(self, description: Description, **options: Any) -> None:
        super().__init__(**options)
        self._description = description

    def send(
        self, request: httpx.Request, *, stream: bool = False, **options: Any
    ) -> httpx.Response:
        response = super().send(request, stream=stream, **options)
        if not stream and request.method not in {"HEAD", "OPTIONS"}:
            path = ALIASES.get(request.url.path, request.url.path)
            if response.status_code >= 400 and request.url.path == "/chat/completions":
                path = "/completion"  # without /v1, errors have llama-server's form
            self._description.check(request.method, path, response)
        return response


def _bodies(document: Parts) -> Iterator[Parts]:
    for path in document["paths"].values():
        for operation in path.values():
            yield operation.get("requestBody", {})


def _reachable(parts: Any, schemas: Parts) -> set[str]:
    """Return the names of the schemas that parts of a document refer to."""
    reached_names, waiting = set[str](), [*parts]
    while waiting:
        for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(waiting.pop())):
            if name not in reached_names:
                reached_names.add(name)
                waiting.append(schemas[name])
    return reached_names
