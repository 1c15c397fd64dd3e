"""The paths of OpenAI's and Anthropic's APIs: text paths are served, others say why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.servers import chat_body

if TYPE_CHECKING:
    from support.servers import LiveServer

# Each path of chat, completions, responses, conversations, embeddings, files, uploads, batches and
# models in OpenAI's and Anthropic's SDKs, with its methods.
SERVED_PATHS = """
POST GET /v1/chat/completions
GET POST DELETE /v1/chat/completions/x
GET /v1/chat/completions/x/messages
POST /v1/completions
POST /v1/embeddings
POST /v1/responses
GET DELETE /v1/responses/x
POST /v1/responses/x/cancel
GET /v1/responses/x/input_items
POST /v1/responses/input_tokens
POST /v1/responses/compact
POST /v1/conversations
GET POST DELETE /v1/conversations/x
GET POST /v1/conversations/x/items
GET DELETE /v1/conversations/x/items/y
GET POST /v1/files
GET DELETE /v1/files/x
GET /v1/files/x/content
POST /v1/uploads
POST /v1/uploads/x/parts
POST /v1/uploads/x/complete
POST /v1/uploads/x/cancel
GET POST /v1/batches
GET /v1/batches/x
POST /v1/batches/x/cancel
GET /v1/models
GET /v1/models/x
POST /v1/messages
POST /v1/messages/count_tokens
GET POST /v1/messages/batches
GET DELETE /v1/messages/batches/x
POST /v1/messages/batches/x/cancel
GET /v1/messages/batches/x/results
"""


def test_every_path_of_the_protocols_is_served(server: LiveServer) -> None:
    for line in SERVED_PATHS.split("\n"):
        *methods, path = line.split() or [""]
        for method in methods:
            response = server.http.request(method, path)
            assert response.status_code != 405, (method, path)
            error = response.json().get("error", {})
            assert error.get("code") != "unknown_url" or "--records" in error["message"], path


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/moderations", "no model for moderation"),
        ("/v1/audio/speech", "text only"),
        ("/v1/images/generations", "text only"),
        ("/v1/assistants/x/y", "provider's own service"),
        ("/v1/vector_stores", "provider's own service"),
        ("/v1/complete", "/v1/messages"),
    ],
)
def test_other_paths_of_the_providers_say_why_they_are_not_served(
    server: LiveServer, path: str, reason: str
) -> None:
    response = server.http.post(path, json={})
    message = response.json()["error"]["message"]
    assert response.status_code == 404
    assert reason in message
    assert "Served are chat completions" in message


def test_models_are_not_deleted_over_http(server: LiveServer) -> None:
    response = server.http.delete("/v1/models/tiny")
    assert response.status_code == 405
    assert "twostroke rm" in response.json()["error"]["message"]


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    """Post to a path that the OpenAPI document need not describe."""
    return httpx.post(url, json=body, timeout=20, trust_env=False)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat/completions//",
        "/v1/v1/chat/completions",
        "//chat/completions",
        "/v1/v1/v1/chat/completions?api-version=1",
    ],
)
def test_paths_of_base_urls_with_a_slash_or_version_too_many_are_served(
    server: LiveServer, path: str
) -> None:
    response = post(server.url + path, chat_body())
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "chat.completion"


def test_a_doubled_version_is_anthropics_too(server: LiveServer) -> None:
    fields = {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    response = post(f"{server.url}/v1/v1/messages", fields)
    assert response.json()["type"] == "message"
    assert post(f"{server.url}/v1/v1/messages", {}).json()["type"] == "error"


def test_a_byte_order_mark_before_a_body_is_skipped(server: LiveServer) -> None:
    headers = {"content-type": "application/json"}
    body = json.dumps(chat_body()).encode("utf-8-sig")
    response = server.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 200, response.text
