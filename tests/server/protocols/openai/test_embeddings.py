"""POST /v1/embeddings, as clients see it."""

from __future__ import annotations

import base64
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.servers import live_server, post_bytes
from support.waiting import wait_for
from twostroke.core.errors import OverloadedError
from twostroke.server import app
from twostroke.server.generation import running
from twostroke.server.http import responses
from twostroke.server.http.limits import RequestLimits
from twostroke.server.http.responses import JsonInChunks, to_json
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.common.embeddings import encode_vectors
from twostroke.server.protocols.llama_server import embeddings as llama_embeddings

if TYPE_CHECKING:
    from pathlib import Path

    import httpx
    import msgspec
    from numpy.typing import NDArray

    from support.servers import LiveServer

PATH = "/v1/embeddings"


def embed(server: LiveServer, **fields: Any) -> httpx.Response:
    return server.http.post(PATH, json={"input": "hello world", **fields})


def vectors(response: httpx.Response) -> NDArray[np.float32]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == [*range(len(data))]
    return np.array([item["embedding"] for item in data], np.float32)


def test_answer_has_openais_shape(server: LiveServer) -> None:
    body = embed(server).json()
    num_tokens = len(server.client.card.tokenizer.encode("hello world"))
    vector = body["data"][0].pop("embedding")
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}],
        "model": "tiny",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    assert len(vector) == 64
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


def test_every_form_of_input_is_read(server: LiveServer) -> None:
    encode = server.client.card.tokenizer.encode
    first_ids, two = encode("hello world"), encode("the")
    right = vectors(embed(server, input=["hello world", "the"]))
    for input_value, rows in (
        ("hello world", [0]),
        (["hello world"], [0]),
        (first_ids, [0]),
        ([first_ids], [0]),
        ([first_ids, two], [0, 1]),
        (["the", first_ids], [1, 0]),
    ):
        np.testing.assert_allclose(
            vectors(embed(server, input=input_value)), right[rows], atol=1e-5
        )


def test_base64_has_the_same_numbers_lowest_byte_first(server: LiveServer) -> None:
    plain = vectors(embed(server, encoding_format="float"))[0]
    for _ in range(2):
        text = embed(server, encoding_format="base64").json()["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == plain.tolist()


def test_fewer_dimensions_have_length_one_again(server: LiveServer) -> None:
    whole_vector = vectors(embed(server))[0].astype(np.float64)
    result = vectors(embed(server, dimensions=10, user="me", model="tiny"))[0]
    np.testing.assert_allclose(
        result, whole_vector[:10] / np.linalg.norm(whole_vector[:10]), atol=1e-5
    )


def test_the_client_may_choose_the_pooling(server: LiveServer) -> None:
    words = (None, "auto", "mean", "last")
    auto, named, mean, last = (vectors(embed(server, pooling=word)) for word in words)
    np.testing.assert_array_equal(auto, named)
    np.testing.assert_array_equal(auto, mean)
    assert np.abs(mean - last).max() > 1e-3


def test_large_requests_are_answered_in_order(server: LiveServer) -> None:
    texts = ["the " * (1 + index % 5) for index in range(400)]
    body = embed(server, input=texts, dimensions=4)
    result = vectors(body)
    assert len(result) == 400
    np.testing.assert_allclose(result[:5], result[-5:], atol=1e-4)
    assert len({tuple(row.round(2).tolist()) for row in result[:5]}) == 5
    encode = server.client.card.tokenizer.encode
    assert body.json()["usage"]["prompt_tokens"] == sum(len(encode(text)) for text in texts)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/embedding"])
def test_ids_and_texts_may_follow_each_other(server: LiveServer, path: str) -> None:
    encode = server.client.card.tokenizer.encode
    mixed = [5, "hello", 6, " world"]
    ids = [5, *encode("hello"), 6, *encode(" world")]
    inputs: list[Any] = [mixed, [[5, "hello"], "a", ids, mixed]]
    answers = [server.http.post(path, json={"input": input_}).json() for input_ in inputs]
    if path == "/v1/embeddings":
        assert answers[0]["usage"]["prompt_tokens"] == len(ids)
        answers = [body["data"] for body in answers]
    assert [len(answer) for answer in answers] == [1, 4]
    results = [row["embedding"] for row in answers[1][2:]]
    assert np.allclose(results[0], results[1], atol=1e-4)
    assert np.allclose(answers[0][0]["embedding"], results[0], atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "param", "code", "sentence"),
    [
        ({"input": None}, "input", "missing_required_parameter", "missing"),
        ({"input": []}, "input", "invalid_value", "at least one input"),
        ({"input": ""}, "input", "invalid_value", "empty"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value", "empty"),
        ({"input": [[5], []]}, "input[1]", "invalid_value", "empty"),
        ({"input": [5, [5]]}, "input", "invalid_value", "mixes"),
        ({"input": [5, "a", True]}, "input[2]", "invalid_value", ""),
        ({"input": [-1]}, "input", "invalid_value", "outside 0 to"),
        ({"input": [[5], [10**6]]}, "input[1]", "invalid_value", "outside 0 to"),
        ({"input": [2**63]}, "input", "invalid_value", "outside 0 to"),
        ({"input": [True]}, "input[0]", "invalid_value", ""),
        ({"input": 5}, "input", "invalid_value", ""),
        ({"input": ["a"] * 2049}, "input", "invalid_value", "takes at most 2,048 texts, got 2,049"),
        ({"dimensions": 0}, "dimensions", "invalid_value", "at least 1"),
        ({"dimensions": 65}, "dimensions", "invalid_value", "from 1 to 64"),
        ({"dimensions": 2**63}, "dimensions", "invalid_value", "from 1 to 64"),
        ({"dimensions": 1.5}, "dimensions", "invalid_value", ""),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value", ""),
        ({"pooling": "cls"}, "pooling", "invalid_value", "auto, mean, last"),
        ({"pooling": "none"}, "pooling", "invalid_value", "use /embeddings"),
        ({"priority": 1001}, "priority", "invalid_value", "1000"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter", ""),
        ({"model": "nobody"}, "model", "model_not_found", "does not exist"),
    ],
)
def test_an_invalid_request_gets_one_clear_error(
    server: LiveServer, fields: dict[str, Any], param: str, code: str, sentence: str
) -> None:
    response = embed(server, **fields)
    error = response.json()["error"]
    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert sentence in error["message"]


def test_a_text_that_is_too_long_is_refused_as_chats_are(server: LiveServer) -> None:
    error = embed(server, input=["hello", "x" * 600]).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert error["message"].startswith(
        "This model's maximum context length is 512 tokens. "
        "However, your input resulted in 600 tokens. Please reduce the length of the input"
    )
    assert len(vectors(embed(server, input="x" * 512))) == 1


def test_a_client_that_leaves_stops_its_texts(tmp_path: Path) -> None:
    with live_server(tmp_path, token_budget=8, max_running=8) as server:
        server.backend.gate.clear()
        with server.connect() as client:
            client.sendall(post_bytes(PATH, {"input": ["x" * 400] * 500}))
            wait_for(lambda: server.api.num_running == 1)
            wait_for(lambda: server.num_busy > 100)
            assert server.num_busy <= 256
        server.backend.gate.set()
        server.wait_idle()
        assert server.backend.num_steps < 100
        assert len(vectors(embed(server))) == 1


def test_a_full_queue_is_a_429(tmp_path: Path) -> None:
    with live_server(tmp_path, max_waiting_requests=1, max_running=1) as server:
        server.backend.gate.clear()
        threads = [threading.Thread(target=server.complete) for _ in range(2)]
        threads[0].start()
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
        threads[1].start()
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_waiting == 1)
        response = embed(server)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert response.headers["retry-after"]
        assert "twostroke_failed_requests_total 0.0" in server.http.get("/metrics").text
        server.backend.gate.set()
        for thread in threads:
            thread.join()
        assert len(vectors(embed(server, input=["a"] * 20))) == 20


def test_a_queue_that_is_full_half_way_throws_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_server(tmp_path) as server:
        submit, count = server.client.loop.submit, 0

        def submit_or_not(choices: Any) -> None:
            nonlocal count
            count += 1
            if 3 < count < 12:
                raise OverloadedError("The queue is full.")
            submit(choices)

        monkeypatch.setattr(server.client.loop, "submit", submit_or_not)
        assert len(vectors(embed(server, input=["the"] * 20))) == 20
        assert count == 20 + 8
        assert "twostroke_failed_requests_total 0.0" in server.http.get("/metrics").text


def test_a_stopping_server_says_so(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        server.backend.gate.clear()
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(embed(server)))
        thread.start()
        wait_for(lambda: server.api.num_running == 1)
        server.abort()
        thread.join()
        assert answers[0].status_code == 503
        server.backend.gate.set()
        server.wait_idle()


def test_a_text_that_poisons_its_step_fails_alone(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        server.backend.poison = 99
        assert embed(server, input=[[5, 99], [6]]).status_code == 500
        server.backend.poison = None
        assert len(vectors(embed(server))) == 1
        assert "twostroke_failed_requests_total 1.0" in server.http.get("/metrics").text


# Texts of ids, the fields besides them, and why the vectors are too large; None if they are not.
TOO_LARGE: list[tuple[str, str, list[Any], dict[str, Any], str | None]] = [
    ("/v1/embeddings", "input", [[5]] * 4, {"dimensions": 10}, None),
    ("/v1/embeddings", "input", [[5]] * 5, {"dimensions": 10}, "takes at most 4 texts"),
    ("/embeddings", "content", [[5] * 9] * 5, {}, "content takes at most"),
    ("/embeddings", "content", [[5] * 9], {"pooling": "none"}, "tokens in all"),
    ("/embeddings", "input", [[5], [5], [5]], {"pooling": "none"}, "input takes at most"),
    ("/api/embed", "input", ["a"] * 4, {"dimensions": 10}, None),
    ("/api/embed", "input", ["a"] * 5, {"dimensions": 10}, "input takes at most 4 texts"),
]


def test_the_values_of_all_vectors_of_a_request_are_limited(tmp_path: Path) -> None:
    options = ServeOptions(limits=RequestLimits(max_vector_values=40), drain_s=1)
    with live_server(tmp_path, options) as server:
        for path, name, texts, fields, reason in TOO_LARGE:
            response = server.http.post(path, json={name: texts, **fields})
            assert response.status_code == (400 if reason else 200), response.text
            assert reason is None or reason in response.text
            assert reason is None or "at most 40 together" in response.text


@pytest.mark.parametrize("width", [1, 4096, 4097, 10_000])
def test_vectors_that_are_encoded_in_parts_are_the_same_json(width: int) -> None:
    values = np.random.default_rng(width).standard_normal((2, width)).astype(np.float32)
    assert json.loads(bytes(encode_vectors(values))) == values.tolist()
    assert json.loads(bytes(encode_vectors(values[0]))) == values[0].tolist()


def test_large_vectors_are_encoded_outside_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def encode(vectors: NDArray[np.float32]) -> msgspec.Raw:
        threads.add(threading.current_thread().name)
        return encode_vectors(vectors)

    monkeypatch.setattr(running, "_MAX_INLINE_VALUES", 40)
    monkeypatch.setattr(llama_embeddings, "encode_vectors", encode)
    with live_server(tmp_path) as server:
        body = {"content": [[5] * 60, [6]], "pooling": "none"}
        payload = server.http.post("/embeddings", json=body).json()
    assert [len(item["embedding"]) for item in payload] == [60, 1]
    assert threads
    assert all("readers" in name for name in threads)


BODIES = [
    ("/v1/embeddings", {"input": [[5], [6, 7]]}),
    ("/v1/embeddings", {"input": [[5], [6, 7]], "encoding_format": "base64"}),
    ("/embeddings", {"content": [[5], [6, 7]], "pooling": "none"}),
    ("/api/embed", {"input": ["a", "b c"]}),
    ("/api/embeddings", {"prompt": "b c"}),
]


def test_large_responses_are_sent_in_chunks(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_bodies = []

    def in_chunks(body: Any, parts: list[msgspec.Raw]) -> JsonInChunks:
        whole_bodies.append(json.loads(to_json(body(parts)).body))
        return JsonInChunks(body, parts)

    monkeypatch.setattr(app, "_LARGE_RESPONSE_BYTES", 0)
    monkeypatch.setattr(responses, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(app, "JsonInChunks", in_chunks)
    for index, (path, request) in enumerate(BODIES):
        response = server.http.post(path, json=request)
        assert len(response.content) > 200
        assert response.json() == whole_bodies[index]
    assert len(whole_bodies) == len(BODIES)


def test_the_number_of_inputs_is_a_limit_of_the_server(tmp_path: Path) -> None:
    options = ServeOptions(limits=RequestLimits(max_inputs=3), drain_s=1)
    with live_server(tmp_path, options) as server:
        assert len(vectors(embed(server, input=["a"] * 3))) == 3
        assert "takes at most 3 texts" in embed(server, input=["a"] * 4).json()["error"]["message"]
        error = server.http.post("/embeddings", json={"content": ["a"] * 4}).json()["error"]
        assert error["message"] == "content takes at most 3 texts, got 4."
        text = json.dumps(server.http.get("/openapi.json").json()["components"]["schemas"])
        assert '"maxItems": 3' in text
