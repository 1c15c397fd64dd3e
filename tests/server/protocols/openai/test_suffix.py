"""Completions of the text between a prompt and a suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.servers import events, live_server
from support.tiny import infill_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer
    from twostroke.model.tokenizer import InfillTokens

Fields = dict[str, Any]
GAP: Fields = {"prompt": "hello", "suffix": " world", "max_tokens": 6, "seed": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("infill")
    with live_server(folder, metadata=infill_metadata()) as server:
        yield server


def _marks(server: LiveServer) -> InfillTokens:
    marks = server.client.card.tokenizer.infill
    assert marks is not None
    return marks


def _ids(server: LiveServer, prefix: str, suffix: str) -> list[int]:
    marks, encode = _marks(server), server.client.card.tokenizer.encode
    return [marks.prefix, *encode(prefix), marks.suffix, *encode(suffix), marks.middle]


@pytest.mark.parametrize("prompt", ["hello", ["hello", "the"], [7, 8], ""])
def test_an_answer_is_that_to_prefix_suffix_middle(server: LiveServer, prompt: Any) -> None:
    body = server.complete(**GAP | {"prompt": prompt, "ignore_eos": True}).json()
    several = prompt if prompt and isinstance(prompt, list) and prompt != [7, 8] else [prompt]
    for choice, prompt_input in zip(body["choices"], several, strict=True):
        text = (
            prompt_input
            if isinstance(prompt_input, str)
            else server.client.card.tokenizer.decode(prompt_input)
        )
        plain = {"prompt": _ids(server, text, " world"), "max_tokens": 6, "seed": 4}
        expected = server.complete(**plain, ignore_eos=True).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected["text"], "length")


def test_an_empty_suffix_asks_for_nothing(server: LiveServer) -> None:
    fields = {"prompt": "hello", "max_tokens": 6, "seed": 4}
    texts = [
        server.complete(**fields, **changes).json()["choices"][0]["text"]
        for changes in ({}, {"suffix": ""}, {"suffix": None})
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_head_of_another_file_ends_an_answer(server: LiveServer, stream: bool) -> None:
    [end] = _marks(server).end_ids - {*_ids(server, "", "")}
    fields = {**GAP, "logit_bias": {str(end): 100}, "stream": stream}
    response = server.complete(**fields)
    choices = [
        chunk["choices"][0]
        for chunk in (events(response.text)[:-1] if stream else [response.json()])
    ]
    assert "".join(choice["text"] for choice in choices) == ""
    assert choices[-1]["finish_reason"] == "stop"
    for changes in ({"ignore_eos": True}, {"suffix": None}):
        went_on = server.complete(**fields | {"stream": False} | changes).json()["choices"][0]
        assert went_on["finish_reason"] == "length"


def test_the_marks_of_the_model_take_no_place_among_the_clients_stop_ids(
    server: LiveServer,
) -> None:
    fields = {**GAP, "logit_bias": {"7": 100}, "stop_token_ids": [7, *range(20, 275)]}
    response = server.complete(**fields)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    error = server.complete(**fields | {"stop_token_ids": [*range(257)]}).json()["error"]
    assert error["param"] == "stop_token_ids"


def test_log_probabilities_belong_to_the_answer(server: LiveServer) -> None:
    fields = {**GAP, "logprobs": 1, "temperature": 0, "ignore_eos": True}
    body = server.complete(**fields).json()["choices"][0]["logprobs"]
    prompt = {"prompt": _ids(server, "hello", " world"), "suffix": None}
    assert body == server.complete(**fields | prompt).json()["choices"][0]["logprobs"]


def test_echo_repeats_the_prompt_alone_and_scores_nothing(server: LiveServer) -> None:
    plain = server.complete(**GAP).json()["choices"][0]["text"]
    for prompt in ("hello", server.client.card.tokenizer.encode("hello")):
        body = server.complete(**GAP | {"prompt": prompt, "echo": True}).json()["choices"][0]
        assert body["text"] == f"hello{plain}"
    for changes in ({"logprobs": 1}, {"max_tokens": 0}):
        error = server.complete(**GAP | {"echo": True} | changes).json()["error"]
        assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")


def test_a_gap_that_is_too_long_is_refused_as_prompts_are(server: LiveServer) -> None:
    error = server.complete(**GAP | {"suffix": "x" * 600}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "your prompt resulted in 604 tokens" in error["message"]


def test_model_says_that_it_fills_gaps(server: LiveServer) -> None:
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["capabilities"]["completion_fim"] is True
