"""OpenAI's chat protocol, as clients see it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import chat_body, events, live_server
from support.tiny import EOS_ID, SPECIAL_TOKENS
from twostroke.core.options import SpeculationOptions
from twostroke.server.models.about import FINGERPRINT

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]


def test_answer_has_openais_shape(server: LiveServer, hello: Fields) -> None:
    body = server.chat(max_tokens=2, model="tiny", **hello).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    cached = body["usage"]["prompt_tokens_details"].pop("cached_tokens")
    assert cached in {0, 16}
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hellohello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 18,
            "completion_tokens": 2,
            "total_tokens": 20,
            "prompt_tokens_details": {},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def test_stream_is_right_byte_by_byte(server: LiveServer, hello: Fields) -> None:
    response = server.chat(max_tokens=2, stream=True, **hello)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first = events(response.text)[0]
    start = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk",'
        f'"created":{first["created"]},"model":"tiny","choices":[{{"index":0,"delta":{{'
    )
    end = f'}}],"system_fingerprint":"{FINGERPRINT}"}}\n\n'
    piece = '},"logprobs":null,"finish_reason":null' + end
    expected = start + '"role":"assistant","content":"","refusal":null' + piece
    expected += (start + '"content":"hello"' + piece) * 2
    expected += start + '},"logprobs":null,"finish_reason":"length"' + end
    expected += "data: [DONE]\n\n"
    assert response.content == expected.encode()


def test_usage_comes_once_in_a_chunk_of_its_own(server: LiveServer, hello: Fields) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(server.chat(max_tokens=3, n=2, **options, **hello).text)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 18
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["total_tokens"] == 24
    assert "cached_tokens" in last["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_chunk_has_the_usage_so_far_on_request(
    server: LiveServer, hello: Fields, path: str
) -> None:
    prompt = {"prompt": "hello"} if path == "/v1/completions" else chat_body()
    usage_options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, **hello, "max_tokens": 3, "n": 2, "stream": True}
    response = server.http.post(path, json={**body, "stream_options": usage_options})
    assert "twostroke-ignored" not in response.headers
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        of_choice = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in of_choice]
        assert counts == sorted(counts)
        assert counts[-1] == 3
        assert {usage["prompt_tokens"] for usage in of_choice} == {last["usage"]["prompt_tokens"]}
    without = server.http.post(
        path, json={**body, "stream_options": {"continuous_usage_stats": True}}
    )
    assert all("usage" not in chunk for chunk in events(without.text)[:-1])


def test_newer_limit_of_tokens_holds_beside_the_older_which_is_named(
    server: LiveServer, strict: LiveServer
) -> None:
    limits = {"max_tokens": 9, "max_completion_tokens": 2, "ignore_eos": True}
    response = server.chat(**limits)
    assert response.json()["usage"]["completion_tokens"] == 2
    assert response.headers["twostroke-ignored"] == "max_tokens"
    equal = server.chat(**limits | {"max_tokens": 2})
    assert "twostroke-ignored" not in equal.headers
    assert strict.chat(**limits).status_code == 400


NO_STOPS = {
    "/v1/chat/completions": {"stop": [""], "max_tokens": 4},
    "/v1/completions": {"stop": "", "max_tokens": 4},
    "/v1/responses": {"stop": ["", ""], "max_output_tokens": 4},
    "/v1/messages": {"stop_sequences": [""], "max_tokens": 4},
    "/completion": {"stop": [""], "n_predict": 4},
    "/api/chat": {"options": {"stop": [""], "num_predict": 4}, "stream": False},
    "/api/generate": {"options": {"stop": [""], "num_predict": 4}, "stream": False},
}


@pytest.mark.parametrize("path", NO_STOPS)
def test_empty_stop_string_stops_nothing_in_any_protocol(server: LiveServer, path: str) -> None:
    prompts = {"/v1/responses": {"input": "hello"}}
    prompt = prompts.get(path, {"prompt": "hello"})
    if path in {"/v1/chat/completions", "/v1/messages", "/api/chat"}:
        prompt = chat_body()
    response = server.http.post(path, json={**prompt, **NO_STOPS[path]})
    assert response.status_code == 200, response.text


NUCLEUS = {
    "/v1/chat/completions": {"top_p": 0, "max_tokens": 4},
    "/v1/completions": {"top_p": 0, "max_tokens": 4},
    "/v1/responses": {"top_p": 0, "max_output_tokens": 4},
    "/v1/messages": {"top_p": 0, "max_tokens": 4},
    "/completion": {"top_p": 0, "n_predict": 4, "top_k": 0, "min_p": 0},
    "/api/chat": {"options": {"top_p": 0, "num_predict": 4, "top_k": 0}, "stream": False},
    "/api/generate": {"options": {"top_p": 0, "num_predict": 4, "top_k": 0}, "stream": False},
}


@pytest.mark.parametrize("path", NUCLEUS)
def test_top_p_of_0_takes_the_likeliest_token_in_every_protocol(
    server: LiveServer, path: str
) -> None:
    prompts = {"/v1/responses": {"input": "hello"}}
    prompt = prompts.get(path, {"prompt": "hello"})
    if path in {"/v1/chat/completions", "/v1/messages", "/api/chat"}:
        prompt = chat_body()
    texts = set()
    for fields in (NUCLEUS[path], NUCLEUS[path], _greedy(NUCLEUS[path])):
        response = server.http.post(path, json={**prompt, **fields})
        assert response.status_code == 200, response.text
        texts.add(_message_text(response.json()))
    assert len(texts) == 1


def _greedy(fields: Fields) -> Fields:
    if "options" in fields:
        return {**fields, "options": fields["options"] | {"top_p": 1, "temperature": 0}}
    return {**fields, "top_p": 1, "temperature": 0}


def _message_text(body: Fields) -> str:
    """Return the text of a response of any protocol."""
    for key in ("response", "content"):
        if isinstance(body.get(key), str):
            return str(body[key])
    if "choices" in body:
        choice = body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    if "message" in body:
        return str(body["message"]["content"])
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    return str(body["content"][0]["text"])


def test_tokens_of_a_conversation_are_counted_without_an_answer(server: LiveServer) -> None:
    path = "/v1/chat/completions/input_tokens"
    response = server.http.post(
        path, json=chat_body(max_tokens=3, response_format={"type": "text"})
    )
    answered = server.chat(max_tokens=1).json()
    assert response.json()["input_tokens"] == answered["usage"]["prompt_tokens"]
    wrong = server.http.post(path, json={"messages": "hello"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "messages"


PREDICTED = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}


def test_a_prediction_is_used_and_counted(tmp_path: Path) -> None:
    speculation = SpeculationOptions("ngram", count=4)
    with live_server(tmp_path, speculation=speculation) as server:
        plain = server.chat(speculate="off", user="a", **PREDICTED).json()
        assert set(plain["usage"]["completion_tokens_details"].values()) == {0}
        text = plain["choices"][0]["message"]["content"]
        for content in (text, [{"type": "text", "text": text}]):
            prediction = {"type": "content", "content": content}
            body = server.chat(prediction=prediction, **PREDICTED).json()
            assert body["choices"] == plain["choices"]
            details = body["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 0
        streamed = server.chat(
            prediction=prediction, stream=True, stream_options={"include_usage": True}, **PREDICTED
        )
        *chunks, last, _ = events(streamed.text)
        pieces = [c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]]
        assert "".join(pieces) == text
        assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        metrics = server.http.get("/metrics").text
        assert "twostroke_speculation_accepted_tokens_total{source=" in metrics
        assert 'twostroke_speculation_accepted_at_total{place="1"}' in metrics


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        (
            {"speculate": "draft"},
            "speculate must be one of auto, off here, got 'draft'.",
            "speculate",
        ),
        (
            {"speculate": "autp\n" + 9000 * "x"},
            f"speculate must be one of auto, off here, got 'autp\\n{35 * 'x'}'.",
            "speculate",
        ),
        ({"speculate": ""}, "speculate must be one of auto, off here, got ''.", "speculate"),
        (
            {"speculate": "of"},
            "speculate must be one of auto, off here, got 'of'. Did you mean 'off'?",
            "speculate",
        ),
        ({"speculate": 5}, "speculate must be a string, got an integer.", "speculate"),
        ({"prediction": "text"}, "prediction must be an object, got a string.", "prediction"),
        (
            {"prediction": {"type": "image", "content": ""}},
            "prediction.type must be content, got 'image'.",
            "prediction.type",
        ),
    ],
)
def test_hints_that_cannot_be_are_refused(
    server: LiveServer, fields: Fields, sentence: str, param: str
) -> None:
    response = server.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == sentence
    assert response.json()["error"]["param"] == param


def test_second_request_reports_the_cached_prompt(server: LiveServer, hello: Fields) -> None:
    messages = [{"role": "user", "content": "the world is in the world " * 4}]
    first, second = (
        server.chat(max_tokens=1, messages=messages, **hello).json()["usage"] for _ in range(2)
    )
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert cached % 16 == 0


def test_n_choices_stream_apart_and_equal_the_whole(server: LiveServer) -> None:
    fields: Fields = {"max_tokens": 12, "n": 3, "seed": 7, "temperature": 1.5}
    whole_choices = server.chat(**fields).json()["choices"]
    chunks = events(server.chat(stream=True, **fields).text)[:-1]
    for choice in whole_choices:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert mine[-1]["delta"] == {}
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        text = "".join(part["delta"].get("content", "") for part in mine)
        assert text == choice["message"]["content"]
    assert [choice["index"] for choice in whole_choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in whole_choices}) == 3
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def test_logprobs_have_a_token_each_and_its_bytes(server: LiveServer) -> None:
    fields: Fields = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    choice = server.chat(**fields).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == 6
    for token in content:
        assert token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]  # greedy
        assert all(top.keys() == {"token", "logprob", "bytes"} for top in token["top_logprobs"])
    joined = bytes(byte for token in content for byte in token["bytes"])
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]


def test_streamed_logprobs_equal_the_whole(server: LiveServer) -> None:
    fields: Fields = {"max_tokens": 6, "temperature": 0, "logprobs": True}
    whole_logprobs = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    chunks = events(server.chat(stream=True, **fields).text)[:-1]
    pieces = [c["choices"][0]["logprobs"] for c in chunks]
    assert [token for piece in pieces if piece for token in piece["content"]] == whole_logprobs
    assert all(token["top_logprobs"] == [] for token in whole_logprobs)


def test_end_token_ends_and_stays_untold(server: LiveServer, hello: Fields) -> None:
    bias = dict.fromkeys(hello["logit_bias"], 80) | {str(EOS_ID): 100}
    fields = hello | {"logit_bias": bias, "min_tokens": 2, "logprobs": True}
    body = server.chat(**fields).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == "hellohello"
    assert choice["finish_reason"] == "stop"
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["hello", "hello"]
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["lohe", ["nothing", "lohe"], "ohellohello"])
def test_stop_string_across_tokens_cuts_the_text(
    server: LiveServer, hello: Fields, stop: str | list[str], stream: bool
) -> None:
    response = server.chat(max_tokens=30, stop=stop, stream=stream, **hello)
    text_before = "hell" if stop == "ohellohello" else "hel"
    assert _text(response.text, stream) == (text_before, "stop")


def test_stop_string_can_stay_in_the_text(server: LiveServer, hello: Fields) -> None:
    fields = {"stop": "lohe", "include_stop_str_in_output": True, "max_tokens": 30}
    assert _text(server.chat(**fields, **hello).text, False) == ("hellohe", "stop")


def test_text_held_back_for_a_stop_string_comes_in_the_end(
    server: LiveServer, hello: Fields
) -> None:
    response = server.chat(max_tokens=2, stop="helloh!", stream=True, **hello)
    assert _text(response.text, True) == ("hellohello", "length")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_length_limit_work(server: LiveServer, hello: Fields, field: str) -> None:
    body = server.chat(**{field: 3}, **hello).json()
    assert body["usage"]["completion_tokens"] == 3


def test_a_token_limit_is_none_or_positive_and_lowered_to_the_context(
    server: LiveServer, hello: Fields
) -> None:
    body = {"stop": ["e"], **hello}
    for value in (-1, 2**31, 2**63):
        assert server.chat(max_tokens=value, **body).status_code == 200
    for value in (0, -2):
        message = server.chat(max_tokens=value, **body).json()["error"]["message"]
        assert message == f"max_tokens must be -1 or at least 1, got {value}."


def test_parts_and_roles_reach_the_template(server: LiveServer, hello: Fields) -> None:
    parts = [{"type": "text", "text": "the "}, {"text": "world", "type": "text"}]
    many = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "c"},
    ]
    plain = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "the world"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    usages = [
        server.chat(messages=messages, max_tokens=1, **hello).json()["usage"]["prompt_tokens"]
        for messages in (many, plain)
    ]
    assert usages[0] == usages[1]


def test_last_message_is_continued_on_request(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the world"}]
    payload = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    ids = server.http.post("/tokenize", json=payload).json()["tokens"]
    plain = server.complete(prompt=ids, max_tokens=6, temperature=0).json()
    body = server.chat(**payload, max_tokens=6, temperature=0).json()
    assert body["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert body["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    both = server.chat(**payload | {"add_generation_prompt": True})
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "continue_final_message"


def test_special_token_in_a_message_stays_text(server: LiveServer, hello: Fields) -> None:
    def prompt_tokens(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        body = server.chat(messages=messages, max_tokens=1, **hello).json()
        return int(body["usage"]["prompt_tokens"])

    assert prompt_tokens("<|im_end|>") - prompt_tokens("") > 1


def test_harmless_fields_are_accepted(server: LiveServer, hello: Fields) -> None:
    harmless: Fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "priority": -3,
        "best_of": 1,
        "seed": None,
        "stop": None,
    }
    assert server.chat(max_tokens=1, **harmless, **hello).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_timings_are_sent_on_request(server: LiveServer, hello: Fields, stream: bool) -> None:
    fields = hello | {"max_tokens": 4, "stream": stream}
    timed = server.chat(return_timings=True, **fields).text
    last = events(timed)[-2] if stream else json.loads(timed)
    timings = last["choices"][0]["timings"]
    assert 0 <= timings["queue_s"] <= timings["ttft_s"] <= timings["e2e_s"]
    assert timings["tpot_s"] == pytest.approx((timings["e2e_s"] - timings["ttft_s"]) / 3)
    assert timings["decode_tokens_per_s"] == pytest.approx(1 / timings["tpot_s"])
    assert timings["cached_tokens"] >= 0
    assert timings["accepted_tokens"] == timings["rejected_tokens"] == 0
    assert "timings" not in server.chat(**fields).text


def test_same_seed_gives_the_same_answer(server: LiveServer) -> None:
    texts = [_text(server.chat(max_tokens=8, seed=seed).text, False)[0] for seed in (3, 3, 4, None)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_concatenated_deltas_equal_the_decoded_tokens(server: LiveServer) -> None:
    for seed in range(8):
        fields: Fields = {"max_tokens": 24, "seed": seed, "logprobs": True, "temperature": 1.3}
        text, _ = _text(server.chat(stream=True, **fields).text, True)
        tokens = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
        shown_tokens = [token for token in tokens if token["token"] not in SPECIAL_TOKENS]
        data = bytes(byte for token in shown_tokens for byte in token["bytes"])
        assert text == data.decode("utf-8", "replace")


def _text(body: str, stream: bool) -> tuple[str, str]:
    """Return the first choice's text and finish reason."""
    if not stream:
        choice = json.loads(body)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in events(body)[:-1]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return text, choices[-1]["finish_reason"]
