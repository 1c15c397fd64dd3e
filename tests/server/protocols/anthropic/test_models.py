"""The list of models in Anthropic's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from support.servers import live_server
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

HEADERS = {"anthropic-version": "2023-06-01"}


def test_models_come_in_pages_of_anthropics_form(tmp_path: Path) -> None:
    options = ServeOptions(drain_s=1, model_names=("a", "b", "c"))
    with live_server(tmp_path, options) as server:

        def listed(**query: Any) -> tuple[str, bool]:
            body = server.http.get("/v1/models", params=query, headers=HEADERS).json()
            ids = "".join(model["id"] for model in body["data"])
            assert (body["first_id"] or "") + (body["last_id"] or "") == ids[:1] + ids[-1:]
            return ids, body["has_more"]

        assert listed() == ("abc", False)
        assert listed(limit=2) == ("ab", True)
        assert listed(limit=2, after_id="b") == ("c", False)
        assert listed(limit=1, before_id="c") == ("b", True)
        assert listed(after_id="c") == ("", False)
        single_model = server.http.get("/v1/models/b", headers=HEADERS).json()
        assert single_model == {
            "type": "model",
            "id": "b",
            "display_name": "b",
            "created_at": "2023-11-14T22:13:20Z",
            "max_input_tokens": 512,
            "max_tokens": 512,
            "lifecycle": "active",
        }
        wrong = server.http.get("/v1/models?after_id=x", headers=HEADERS)
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
        assert "type" not in server.http.get("/v1/models/b").json()
        with_slash = httpx.get(f"{server.url}/v1/models/", trust_env=False)
        assert len(with_slash.json()["data"]) == 3
