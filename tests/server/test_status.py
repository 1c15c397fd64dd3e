"""Endpoints that generate nothing: models, health, metrics and the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.servers import live_server
from twostroke.core.errors import UsageError
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer


def test_models_are_listed_in_openais_form(server: LiveServer) -> None:
    card = server.client.card
    model = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "twostroke",
        "max_model_len": 512,
        "capabilities": {"completion_chat": True, "completion_fim": False},
        "meta": {
            "n_vocab": card.tokenizer.vocab_size,
            "n_ctx_train": 512,
            "n_embd": card.embedding_width,
            "n_params": card.num_parameters,
            "size": card.file_bytes,
        },
        "status": {"value": "loaded"},
    }
    assert server.http.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert server.http.get("/v1/models/tiny").json() == model


def test_model_answers_to_each_of_its_names(tmp_path: Path) -> None:
    options = ServeOptions(model_names=("org/tiny", "default"), drain_s=1)
    with live_server(tmp_path, options) as server:
        listed = server.http.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["org/tiny", "default"]
        assert server.http.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
        for name in ("org/tiny", "default"):
            assert server.chat(model=name, max_tokens=1).json()["model"] == name
        assert server.chat(max_tokens=1).json()["model"] == "org/tiny"
        assert server.chat(model="tinier", max_tokens=1).status_code == 404


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31m"])
def test_unprintable_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        ServeOptions(model_names=("right", name))
    assert str(caught.value) == f"model_names must have printable characters, got {name!r}."


def test_root_points_to_the_api(server: LiveServer) -> None:
    body = server.http.get("/").json()
    assert body["model"] == "tiny"
    assert "/v1/chat/completions" in body["endpoints"]


def test_every_response_has_a_request_id(server: LiveServer) -> None:
    ids = {server.http.get(path).headers["x-request-id"] for path in ("/", "/health", "/nope")}
    assert len(ids) == 3
