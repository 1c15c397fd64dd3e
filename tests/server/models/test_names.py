"""The names by which clients may request a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.refusals import refused
from support.servers import live_server
from twostroke.core.errors import ModelNotFoundError
from twostroke.server.http.model_names import ModelNames
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

NAMES = ModelNames(("Tiny-1", "org/other"))


@pytest.mark.parametrize(
    "model_name",
    ["Tiny-1", "tiny-1", "TINY-1:latest", "openai/tiny-1", "hf.co/me/Tiny-1:latest", "other"],
)
def test_name_matches_without_case_owner_and_latest(model_name: str) -> None:
    assert NAMES.find(model_name) == model_name


@pytest.mark.parametrize("model_name", ["tiny", "tiny-1:q4", "tiny-1/x", "gpt-4o", "latest"])
def test_other_names_are_refused(model_name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"does not exist.* Served: Tiny-1, org/other\."):
        NAMES.find(model_name)


def test_no_name_is_the_default() -> None:
    assert NAMES.find(None) == NAMES.find("") == "Tiny-1"


def test_any_name_is_answered_and_repeated_if_it_is_harmless(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(any_model=True, drain_s=1)) as server:
        for name in ("gpt-4o", "claude-sonnet-4-5", "x" * 1000, "a\nb"):
            shown_name = name if len(name) < 200 and name.isprintable() else "tiny"
            assert server.chat(model=name, max_tokens=1).json()["model"] == shown_name
        body = server.http.get("/v1/models/gpt-4o").json()
        assert (body["id"], body["max_model_len"]) == ("gpt-4o", 512)
        response = server.http.post("/v1/embeddings", json={"model": "e", "input": "hello"})
        assert response.json()["model"] == "e"


def test_responses_repeat_the_requested_model_name(server: LiveServer) -> None:
    assert server.chat(model="openai/TINY", max_tokens=1).json()["model"] == "openai/TINY"
    assert server.http.get("/v1/models/Tiny:latest").json()["id"] == "Tiny:latest"
    refused(server.chat(model="tiny:q4"), 404, "model", "model_not_found")
