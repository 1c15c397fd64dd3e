"""`/api/prompts`: a tenant sees where its own prompts part, and nobody else's text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.servers import live_server
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

_RULES = [*range(100, 180)]


def _send(server: LiveServer, number: int, key: str = "") -> None:
    prompt = [*range(5, 25), 30 + number, *_RULES]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": prompt, "max_tokens": 1}
    assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_a_point_where_prompts_part_is_counted(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(drain_s=1, prompt_doctor=True)) as server:
        for number in range(4):
            _send(server, number)
        wait_for(lambda: server.http.get("/api/prompts").json()["num_prompts"] == 4)
        body = server.http.get("/api/prompts").json()
        metrics = server.http.get("/metrics").text
        assert server.http.get("/api/state").json()["prompt_doctor"] is True
    assert 0 < body["s_per_token"] < 1
    (row,) = body["partings"]
    assert (row["position"], row["num_prompts"], row["num_after"]) == (20, 3, 3 * 81)
    assert 150 <= row["num_repeated"] <= 3 * 81
    assert row["before"] is row["after"] is None
    assert "twostroke_prompt_partings_total 3.0" in metrics
    assert f"twostroke_prompt_repeated_tokens_total {row['num_repeated']:.1f}" in metrics


def test_text_is_only_that_of_the_own_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one key-of-one-tenant\ntwo key-of-two-tenant\n")
    options = ServeOptions(
        drain_s=1, prompt_doctor=True, api_keys=ApiKeys.read(keys, None), dashboard=True
    )
    with live_server(tmp_path, options) as server:
        for number in range(2):
            _send(server, number, "key-of-one-tenant")

        def rows(key: str) -> list[dict[str, object]]:
            headers = {"authorization": f"Bearer {key}"}
            answer = server.http.get("/api/prompts?show_text", headers=headers).json()
            partings: list[dict[str, object]] = answer["partings"]
            return partings

        wait_for(lambda: len(rows("key-of-one-tenant")) == 1)
        assert rows("key-of-one-tenant")[0]["after"]
        assert rows("key-of-two-tenant") == []
        assert server.http.get("/api/prompts").status_code == 401


def test_without_the_option_there_are_no_prompts(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(drain_s=1)) as server:
        response = server.http.get("/api/prompts")
        assert server.http.get("/api/state").json()["prompt_doctor"] is False
    assert response.status_code == 404
    assert "--prompt-doctor" in response.json()["error"]["message"]
