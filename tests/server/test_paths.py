"""The paths of OpenAI's and Anthropic's APIs: text paths are served, others say why not."""

from __future__ import annotations

import json
import socket
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


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1/v1/chat/completions"])
def test_repeated_parts_of_a_path_do_not_change_the_protocol(server: LiveServer, path: str) -> None:
    """llama-server's own paths continue the last message of an assistant; OpenAI's do not."""
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "of the"}]
    body = {"messages": messages, "max_tokens": 1, "stream": True}
    expected = post(server.url + "/v1/chat/completions", body).text
    assert '"content":""' in expected
    assert post(server.url + path, body).text.count('"content":""') == expected.count(
        '"content":""'
    )
    usage = [
        post(server.url + each, body | {"stream": False}).json()["usage"]["prompt_tokens"]
        for each in ("/v1/chat/completions", path, "/chat/completions")
    ]
    assert usage[0] == usage[1] != usage[2]


def test_the_limit_of_headers_counts_the_path_that_was_sent(server: LiveServer) -> None:
    long_path = "/" * 50_000 + "v1/models"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"GET {long_path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")


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
