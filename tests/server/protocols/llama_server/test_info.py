"""llama-server's endpoints about the server itself, and its forms of tokens and embeddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from support.servers import live_server, num_unfinished, post_bytes, read_all
from support.waiting import wait_for
from twostroke.engine.process.served import LocalEngine
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.models.about import FINGERPRINT
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.llama_server.info import _SlotAssignment

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer


def post(server: LiveServer, path: str, **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_props_describe_the_server(server: LiveServer) -> None:
    props = server.http.get("/props").json()
    card = server.client.card
    assert props["total_slots"] == server.client.loop.config.max_running
    assert props["default_generation_settings"]["n_ctx"] == card.context_length
    assert props["model_alias"] == props["model_path"] == "tiny"
    assert props["chat_template"] == card.tokenizer.chat_templates["default"]
    assert (props["build_info"], props["endpoint_slots"]) == (FINGERPRINT, True)
    assert props["modalities"] == {"vision": False, "audio": False}
    used = post(server, "/completion", prompt="x", n_predict=1)["generation_settings"]
    defaults = props["default_generation_settings"]["params"]
    assert {k for k in used if used[k] != defaults[k]} == {"n_predict", "max_tokens"}


def test_slots_show_running_requests_without_their_text(server: LiveServer) -> None:
    body = {"prompt": "hello of the", "n_predict": 4}
    server.backend.gate.clear()
    try:
        connection = server.connect()
        connection.sendall(post_bytes("/completion", body, headers="Connection: close\r\n"))
        wait_for(lambda: server.client.loop.view().running != ())
        busy, *idle = server.http.get("/slots").json()
    finally:
        server.backend.gate.set()
    assert b"200 OK" in read_all(connection)
    num_prompt = len(server.client.card.tokenizer.encode("hello of the"))
    assert (busy["is_processing"], busy["n_prompt_tokens"]) == (True, num_prompt)
    assert "hello" not in str(busy)
    assert idle[0] == {"id": 1, "n_ctx": 512, "speculative": False, "is_processing": False}
    assert len(idle) + 1 == server.client.loop.config.max_running


def test_slots_show_all_requests_that_run_after_a_lower_limit(server: LiveServer) -> None:
    body = {"prompt": "hello of the", "n_predict": 40, "ignore_eos": True}
    loop = server.client.loop
    engine, first = server.api.engine, loop.config
    assert isinstance(engine, LocalEngine)
    connections = []
    try:
        server.backend.gate.clear()
        connections = [server.connect() for _ in range(3)]
        for connection in connections:
            connection.sendall(post_bytes("/completion", body, headers="Connection: close\r\n"))
        # How many of them the first step takes depends on when they arrive.
        wait_for(lambda: num_unfinished(loop) == 3)
        loop.on_step = lambda plan: server.backend.gate.clear() if len(plan.slices) == 3 else None
        server.backend.gate.set()
        wait_for(lambda: len(loop.view().running) == 3)
        engine.change_limits(1, 1)
        slots = server.http.get("/slots").json()
    finally:
        loop.on_step = None
        server.backend.gate.set()
        responses = [read_all(connection) for connection in connections]
        engine.change_limits(first.token_budget, first.max_running)
    assert [slot["is_processing"] for slot in slots] == [True] * 3
    assert all(b"200 OK" in response for response in responses)
    assert len(server.http.get("/slots").json()) == first.max_running


def test_a_running_request_keeps_its_slot() -> None:
    slots = _SlotAssignment()
    a, b, c = (SimpleNamespace(id=id_) for id_ in "abc")
    assert slots.of([a, b]) == [(0, 0), (1, 1)]  # type: ignore[list-item]
    assert slots.of([c, b]) == [(0, 2), (1, 1)]  # type: ignore[list-item]


def test_slots_are_shown_where_the_dashboard_is(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(dashboard=False)) as server:
        error = server.http.get("/slots").json()["error"]
        assert (error["code"], error["type"]) == (501, "not_supported_error")
        assert server.http.get("/props").json()["endpoint_slots"] is False


def test_every_path_except_health_needs_a_key(tmp_path: Path) -> None:
    options = ServeOptions(api_keys=ApiKeys({"sk": ""}))
    with live_server(tmp_path, options) as server:
        for path in ("/props", "/slots", "/lora-adapters"):
            error = server.http.get(path).json()["error"]
            assert (error["code"], error["type"]) == (401, "authentication_error")
            assert server.http.get(path, headers={"x-api-key": "sk"}).status_code == 200
        assert server.http.get("/models").status_code == 401
        assert server.http.get("/v1/health").status_code == 200


def test_no_adapters_are_listed(server: LiveServer) -> None:
    assert server.http.get("/lora-adapters").json() == []


def test_tokens_come_with_their_pieces(server: LiveServer) -> None:
    tokenizer = server.client.card.tokenizer
    ids = tokenizer.encode("hello é")
    assert post(server, "/tokenize", content="hello é")["tokens"] == ids
    result = post(server, "/tokenize", content="hello é", with_pieces=True)["tokens"]
    assert [token["id"] for token in result] == ids
    assert result[0]["piece"] == "hello"
    assert [token["piece"] for token in result][-2:] == [[0xC3], [0xA9]]
    mixed = post(server, "/tokenize", content=[7, "hello"])["tokens"]
    assert mixed == [7, *tokenizer.encode("hello")]
    assert post(server, "/tokenize", content="<|im_end|>")["count"] == 1
    assert post(server, "/tokenize", content="<|im_end|>", parse_special=False)["count"] > 1


def test_templates_are_applied(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    turn = "<|im_start|>user\nhello<|im_end|>\n"
    body = post(server, "/apply-template", messages=messages)
    assert body == {"prompt": f"{turn}<|im_start|>assistant\n"}
    body = post(server, "/apply-template", messages=messages, add_generation_prompt=False)
    assert body == {"prompt": turn}
    begun = [*messages, {"role": "assistant", "content": "I am"}]
    body = post(server, "/apply-template", messages=begun)
    assert body == {"prompt": f"{turn}<|im_start|>assistant\nI am"}
    body = post(server, "/apply-template", messages=begun, add_generation_prompt=True)
    assert body["prompt"].endswith("I am<|im_end|>\n<|im_start|>assistant\n")


def test_embeddings_without_pooling_have_a_vector_for_each_token(server: LiveServer) -> None:
    ids = server.http.post("/tokenize", json={"content": "hello world"}).json()["tokens"]
    texts = [[*ids], [*ids, *ids]]
    for path in ("/embedding", "/embeddings"):
        body = {"content": texts, "pooling": "none"}
        payload = server.http.post(path, json=body).json()
        assert [len(item["embedding"]) for item in payload] == [len(ids), 2 * len(ids)]
        pooled = server.http.post(path, json={"content": texts, "pooling": "last"}).json()
        last, unit = payload[0]["embedding"][-1], pooled[0]["embedding"][0]
        assert np.allclose(last / np.linalg.norm(last), unit, atol=1e-4)
    error = server.http.post("/embeddings", json={"content": "a", "pooling": "nome"}).json()
    assert "Did you mean 'none'?" in error["error"]["message"]


def test_embeddings_are_lists_of_vectors(server: LiveServer) -> None:
    texts = ["hello", "of the"]
    expected = [item["embedding"] for item in post(server, "/v1/embeddings", input=texts)["data"]]
    for path, name in (("/embedding", "content"), ("/embeddings", "input")):
        result = post(server, path, **{name: texts})
        assert [item["index"] for item in result] == [0, 1]
        assert np.array_equal([item["embedding"][0] for item in result], expected)
    for wrong in ({}, {"content": ""}, {"content": "x", "embd_normalize": -1}):
        error = server.http.post("/embedding", json=wrong).json()["error"]
        assert error["code"] == 400
