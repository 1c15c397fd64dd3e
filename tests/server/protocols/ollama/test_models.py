"""Ollama's lists of models, its embeddings, and the requests that are refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.servers import LiveServer


def test_listed_models_can_be_shown_and_pulled(server: LiveServer) -> None:
    [tagged] = server.http.get("/api/tags").json()["models"]
    [loaded] = server.http.get("/api/ps").json()["models"]
    assert tagged["name"] == tagged["model"] == loaded["name"] == "tiny:latest"
    assert tagged["size"] == server.client.card.file_bytes
    assert len(tagged["digest"]) == 64
    assert tagged["capabilities"] == ["completion", "tools"]
    assert tagged["details"]["format"] == "gguf"
    assert loaded["context_length"] == 512
    body = server.http.post("/api/show", json={"name": tagged["name"]}).json()
    assert body["details"] == tagged["details"]
    assert body["model_info"]["llama.context_length"] == 512
    assert "<|im_start|>" in body["template"]
    assert server.http.post("/api/pull", json={"model": "tiny"}).json() == {"status": "success"}
    assert server.http.get("/api/version").json()["version"] >= "0.14.0"
    assert server.http.head("/").status_code == 200


def test_other_models_are_not_found(server: LiveServer) -> None:
    for path in ("show", "pull", "embed"):
        response = server.http.post(f"/api/{path}", json={"model": "llama3"})
        assert response.status_code == 404
        assert response.json()["error"].startswith("model 'llama3' not found")


def test_the_collection_of_models_is_not_changed(server: LiveServer) -> None:
    for method, path in (
        ("POST", "create"),
        ("POST", "copy"),
        ("POST", "push"),
        ("DELETE", "delete"),
        ("POST", "blobs/sha256:00"),
    ):
        response = server.http.request(method, f"/api/{path}", json={"model": "tiny"})
        assert response.status_code == 404
        assert "twostroke pull" in response.json()["error"]


def embed(server: LiveServer, **fields: Any) -> Any:
    return server.http.post("/api/embed", json=fields).json()


def test_vectors_have_length_1_and_come_in_order(server: LiveServer) -> None:
    several = embed(server, input=["hello", "the world"])
    assert several["prompt_eval_count"] > 2
    assert several["total_duration"] > 0
    single_vectors = embed(server, input="the world")["embeddings"]
    assert several["embeddings"][1:] == single_vectors
    assert math.isclose(math.hypot(*single_vectors[0]), 1, abs_tol=1e-5)
    assert len(embed(server, input="hello", dimensions=4)["embeddings"][0]) == 4
    old = server.http.post("/api/embeddings", json={"prompt": "the world"}).json()
    assert [old["embedding"]] == single_vectors


def test_without_texts_there_are_no_vectors(server: LiveServer) -> None:
    assert embed(server, input=[])["embeddings"] == embed(server)["embeddings"] == []
    assert server.http.post("/api/embeddings", json={}).json() == {"embedding": []}


def test_long_texts_are_cut_unless_that_is_refused(server: LiveServer) -> None:
    long = 600 * "hello "
    cut = embed(server, input=long)
    assert cut["prompt_eval_count"] == 512
    assert "maximum context length" in embed(server, input=long, truncate=False)["error"]
