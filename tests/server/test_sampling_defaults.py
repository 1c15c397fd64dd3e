"""The values of sampling fields that a request leaves out, by protocol and model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import asdict, force_setattr

from support.gguf_writer import Typed
from support.servers import live_server
from twostroke.core.options import GenerationOptions
from twostroke.core.sampling import LOCAL_DEFAULTS, MODEL_DEFAULT_FIELDS, OPENAI_DEFAULTS
from twostroke.server.protocols.ollama.request import DEFAULTS as OLLAMA

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer
    from twostroke.core.sampling import SamplingParams

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
# The path of each protocol, a body, the fields that shorten its answer, and the usual values.
PROTOCOLS: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "/v1/chat/completions": ({**HELLO, "max_tokens": 1}, LOCAL_DEFAULTS),
    "/v1/completions": ({"prompt": "hello", "max_tokens": 1}, LOCAL_DEFAULTS),
    "/v1/responses": ({"input": "hello", "max_output_tokens": 1}, LOCAL_DEFAULTS),
    "/v1/messages": ({**HELLO, "max_tokens": 1}, LOCAL_DEFAULTS),
    "/completion": ({"prompt": "hello", "n_predict": 1}, LOCAL_DEFAULTS),
    "/api/chat": ({**HELLO, "stream": False, "options": {"num_predict": 1}}, OLLAMA),
    "/api/generate": ({"prompt": "hello", "stream": False, "options": {"num_predict": 1}}, OLLAMA),
}
RECOMMENDED = {"general.sampling.temp": Typed(6, 0.25), "general.sampling.top_k": Typed(5, 3)}


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server of a model whose file recommends a temperature and a top_k."""
    with live_server(tmp_path_factory.mktemp("said"), metadata=RECOMMENDED) as server:
        yield server


def values_of(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling values with which the engine generated the answer to a request."""
    all_params: list[SamplingParams] = []
    submit = server.client.loop.submit

    def watch(listeners: Any) -> None:
        all_params.extend(listener.request.params for listener in listeners)
        submit(listeners)

    server.client.loop.submit = watch  # type: ignore[method-assign]
    try:
        response = server.http.post(path, json=body)
    finally:
        server.client.loop.submit = submit  # type: ignore[method-assign]
    assert response.status_code == 200, response.text
    result = asdict(all_params[0])
    return {name: result[name] for name in MODEL_DEFAULT_FIELDS}


def usual(params: SamplingParams) -> dict[str, Any]:
    return {name: asdict(params)[name] for name in MODEL_DEFAULT_FIELDS}


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_model_that_recommends_nothing_has_the_protocol_s_defaults(
    path: str, server: LiveServer
) -> None:
    body, defaults = PROTOCOLS[path]
    assert values_of(server, path, body) == usual(defaults)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_model_s_own_values_come_first(path: str, recommending: LiveServer) -> None:
    body, rest = PROTOCOLS[path]
    recommended = {"temperature": 0.25, "top_k": 3}
    assert values_of(recommending, path, body) == {**usual(rest), **recommended}


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_request_s_values_precede_all_defaults(path: str, recommending: LiveServer) -> None:
    body, rest = PROTOCOLS[path]
    request_values = {"temperature": 0.75, "top_p": 0.5}
    if "options" in body:
        body = {**body, "options": {**body["options"], **request_values}}
    else:
        body = {**body, **request_values}
    expected_values = {"top_k": 3, **request_values}
    assert values_of(recommending, path, body) == {**usual(rest), **expected_values}


def test_a_server_uses_the_defaults_that_it_reports(recommending: LiveServer) -> None:
    payload = recommending.http.get("/props").json()["default_generation_settings"]["params"]
    assert (payload["temperature"], payload["top_k"], payload["top_p"]) == (0.25, 3, 0.95)
    body, _ = PROTOCOLS["/v1/responses"]
    answer = recommending.http.post("/v1/responses", json=body).json()
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.95)


def test_samplers_that_a_request_turns_off_stay_off(recommending: LiveServer) -> None:
    body = {**PROTOCOLS["/completion"][0], "samplers": ["temperature"]}
    result = values_of(recommending, "/completion", body)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert result == {"temperature": 0.25, **off}


def test_an_operator_chooses_openai_s_defaults(tmp_path: Path) -> None:
    with live_server(tmp_path, metadata=RECOMMENDED) as server:
        card = server.client.card
        sampling = GenerationOptions("openai", {"min_p": 0.1}).defaults(card.sampling.recommended)
        force_setattr(card, "sampling", sampling)
        body, _ = PROTOCOLS["/v1/chat/completions"]
        expected_values = {**usual(OPENAI_DEFAULTS), "min_p": 0.1}
        assert values_of(server, "/v1/chat/completions", body) == expected_values
        body, ollama = PROTOCOLS["/api/chat"]
        assert values_of(server, "/api/chat", body) == {**usual(ollama), "min_p": 0.1}
