"""Requests that cannot be answered get one clear sentence each, and the engine stays alive."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from support.refusals import refused
from support.servers import chat_body

if TYPE_CHECKING:
    from support.servers import LiveServer

Fields = dict[str, Any]

HUGE = 2**63


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("n", value) for value in (0, -1, 129, HUGE, -HUGE, True, 1.5, "1", [])],
        *[("max_tokens", value) for value in (0, -2, True, 2.5, "9", {})],
        *[("min_tokens", value) for value in (-1, HUGE, True)],
        *[("temperature", value) for value in (-0.1, 101, 1e308, True, "hot", HUGE)],
        *[("top_p", value) for value in (-1, 1.01, True, "1")],
        *[("min_p", value) for value in (-0.1, 1.5, False)],
        *[("top_k", value) for value in (-2, HUGE, 1.5, True)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, True)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, "x")],
        *[("repetition_penalty", value) for value in (0, -1, 101, True)],
        *[("seed", value) for value in (-HUGE - 1, 2**64, 1.5, True, "s")],
        *[("stop", value) for value in (["a"] * 17, "x" * 1001, 5)],
        *[("stop_token_ids", value) for value in ([-1], [HUGE], [10**6], list(range(257)))],
        *[("logit_bias", value) for value in ({"5": 101}, {"5": -101}, [1])],
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        *[("priority", value) for value in (1001, -HUGE, True, "high")],
        ("stream", 1),
        ("stream", "true"),
        ("model", 5),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_wrong_value_is_a_400_that_names_the_field(
    server: LiveServer, path: str, param: str, value: object
) -> None:
    prompt = {"prompt": "hello"} if path == "/v1/completions" else chat_body()
    response = server.http.post(path, json={**prompt, param: value})
    message = refused(response, 400, param, "invalid_value")
    assert param in message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5000])
def test_a_value_that_is_not_a_number_is_a_400(server: LiveServer, number: str) -> None:
    body = json.dumps(chat_body())[:-1] + f', "temperature": {number}}}'
    response = server.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["code"] in {"invalid_json", "invalid_value"}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "0"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
        ({"logprobs": 5}, "logprobs", "boolean"),
        ({"messages": []}, "messages", "from 1 to 10000 items, got 0"),
        ({"messages": "hello"}, "messages", "a list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens"),
    ],
)
def test_wrong_chat_field_is_named(
    server: LiveServer, fields: Fields, param: str, word: str
) -> None:
    assert word in refused(server.chat(**fields), 400, param, "invalid_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"cache_salt": "s"}, "cache_salt"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"use_beam_search": 0}, "use_beam_search"),
    ],
)
def test_features_that_do_not_exist_yet_are_refused_not_ignored(
    server: LiveServer, fields: Fields, param: str
) -> None:
    message = refused(server.chat(**fields), 400, param, "unsupported_parameter")
    assert "not supported yet" in message


def test_image_part_is_refused(server: LiveServer) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}
    response = server.chat(messages=[{"role": "user", "content": [part]}])
    message = refused(response, 400, "messages[0].content[0].type", "invalid_value")
    assert "image_url" in message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [1, "x"]}, "prompt", "invalid_value"),
        ({"prompt": [1, True]}, "prompt[1]", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [HUGE]}, "prompt", "invalid_value"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 513, "n": 2}, "prompt", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
        ({"prompt_logprobs": 2, "echo": True}, "prompt_logprobs", "unsupported_parameter"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "invalid_value"),
        ({"logprobs": 21, "echo": True}, "logprobs", "invalid_value"),
        ({"suffix": "end"}, "suffix", "invalid_value"),
    ],
)
def test_wrong_completion_field_is_named(
    server: LiveServer, fields: Fields, param: str, code: str
) -> None:
    refused(server.complete(**fields), 400, param, code)


def test_missing_field_is_named_as_it_was_misspelt(server: LiveServer) -> None:
    response = server.chat(messages=[{"role": "user", "contents": "x"}])
    message = refused(response, 400, "messages[0].contents", "unknown_parameter")
    assert "'content'" in message

    response = server.chat(messages=[{"role": "user", "text": "x"}])
    refused(response, 400, "messages[0].content", "missing_required_parameter")


def test_missing_messages_are_named(server: LiveServer) -> None:
    response = server.http.post("/v1/chat/completions", json={"model": "tiny"})
    refused(response, 400, "messages", "missing_required_parameter")


def test_unknown_model_is_a_404_that_names_the_nearest(server: LiveServer) -> None:
    message = refused(server.chat(model="tinny"), 404, "model", "model_not_found")
    assert "Did you mean 'tiny'?" in message
    response = server.http.get("/v1/models/gpt-4")
    refused(response, 404, "model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context_says_so_as_clients_expect(
    server: LiveServer, stream: bool
) -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    response = server.chat(messages=messages, stream=stream)
    message = refused(response, 400, "messages", "context_length_exceeded")
    assert message.startswith(
        "This model's maximum context length is 512 tokens. "
        "However, your messages resulted in 617 tokens"
    )


LONG = "x " * 70_000
TURNS = [{"role": "user", "content": "a"}] * 10_001


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses", "input"),
        ("/tokenize", "messages"),
    ],
)
def test_a_conversation_of_too_many_messages_is_refused(
    server: LiveServer, path: str, field: str
) -> None:
    required_fields = {"max_tokens": 2} if path == "/v1/messages" else {}
    response = server.http.post(path, json={field: TURNS, **required_fields})
    assert response.status_code == 400
    body = response.json()["error"]["message"]
    assert body.startswith(field)
    assert body.endswith(", got 10001.")


def test_an_unknown_token_of_a_prompt_is_pointed_at(server: LiveServer) -> None:
    output = refused(server.complete(prompt=[5, 6, 99_999, -1]), 400, "prompt")
    assert output.endswith(": the first is 99999, at index 2.")
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        response = server.http.post(path, json={field: [[1, 2], [3, 99999]]})
        assert refused(response, 400, f"{field}[1]").startswith(f"{field}[1] has token ids")


def test_allowed_methods_are_sorted(server: LiveServer) -> None:
    for path, methods in (("/v1/models", "GET, HEAD"), ("/v1/responses/a", "DELETE, GET, HEAD")):
        response = server.http.put(path)
        assert response.headers["allow"] == methods
        assert response.json()["error"]["message"].endswith(f"only {methods}.")


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", "prompt", {"prompt": LONG}),
        ("/v1/embeddings", "input", {"input": ["hello", LONG]}),
        ("/v1/responses", "input", {"input": LONG}),
        ("/v1/responses", "input", {"input": LONG, "truncation": "auto"}),
    ],
)
def test_a_prompt_that_is_much_too_long_is_not_encoded_to_its_end(
    server: LiveServer, path: str, field: str, body: Fields
) -> None:
    message = refused(server.http.post(path, json=body), 400, field, "context_length_exceeded")
    start = "This model's maximum context length is 512 tokens. However, your"
    sentence = (
        rf"{start} {field} resulted in at least (\d+) tokens\. Please reduce .* the {field}\."
    )
    match = re.fullmatch(sentence, message)
    assert match is not None, message
    assert 512 < int(match[1]) < len(LONG)


def test_anthropic_clients_hear_of_such_a_prompt_in_their_words(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}
    response = server.http.post("/v1/messages", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    match = re.fullmatch(r"prompt is too long: at least (\d+) tokens > 511 maximum", message)
    assert match is not None, message
    assert 511 < int(match[1]) < len(LONG)


def test_tokens_of_a_long_text_are_counted_to_its_end_on_request(server: LiveServer) -> None:
    response = server.http.post("/tokenize", json={"prompt": LONG, "max_tokens": len(LONG)})
    assert response.json()["count"] == len(LONG)
    body = {"messages": [{"role": "user", "content": LONG}]}
    response = server.http.post("/v1/messages/count_tokens", json=body)
    assert response.status_code == 400  # bounded as prompts are
    assert "prompt is too long" in response.json()["error"]["message"]


def test_a_prediction_of_more_tokens_than_any_answer_has_is_refused(server: LiveServer) -> None:
    prediction = {"type": "content", "content": LONG}
    message = refused(server.chat(prediction=prediction), 400, "prediction")
    sentence = r"prediction has at least \d+ tokens, which exceeds the context length of 512\."
    assert re.fullmatch(sentence, message), message


def test_a_prompt_of_plain_text_is_called_a_prompt(server: LiveServer) -> None:
    response = server.complete(prompt="x" * 600)
    message = refused(response, 400, "prompt", "context_length_exceeded")
    assert "your prompt resulted in 600 tokens. Please reduce the length of the prompt." in message


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_limit_above_the_context_is_lowered_or_refused_at_once(
    server: LiveServer, strict: LiveServer, field: str
) -> None:
    limit = {field: 500, "ignore_eos": True}
    message = refused(strict.chat(**limit), 400, field, "context_length_exceeded")
    assert "you requested 518 tokens" in message
    answer = server.chat(**limit).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completion", 404, "unknown_url"),
        ("GET", "/v1/../../etc/passwd", 404, "unknown_url"),
        ("GET", "/v1/models/%00", 404, "model_not_found"),
        ("GET", "/v1/models/..%2f..%2fx%0d%0aset-cookie:a", 404, "unknown_url"),
        ("GET", "/%0d%0aSet-Cookie:%20a=b", 404, "unknown_url"),
    ],
)
def test_wrong_method_or_path_has_openais_form(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    response = server.http.request(method, path)
    param = "model" if code == "model_not_found" else None
    refused(response, status, param, code)
    assert "set-cookie" not in response.headers
    assert ("allow" in response.headers) == (status == 405)


def test_error_message_is_one_printable_line(strict: LiveServer) -> None:
    response = strict.chat(**{"a\nb\x00\u202e" + "c" * 5000: 1})
    message = refused_loosely(response)
    assert message.isprintable()
    assert len(message) <= 1000


@pytest.mark.parametrize("unit", ["x", "\n", " - at `$", "`", "'"])
def test_huge_words_are_neither_searched_nor_sent_back(strict: LiveServer, unit: str) -> None:
    huge = unit * (4_000_000 // len(unit))
    for fields in ({huge: 1}, {"model": huge}, {"messages": [{"role": huge, "content": "x"}]}):
        start_s = time.monotonic()
        response = strict.chat(**fields)
        assert time.monotonic() - start_s < 60  # quadratic work takes hours
        assert response.status_code in {400, 404}
        assert len(response.content) < 10_000


def test_null_leaves_a_field_out(server: LiveServer) -> None:
    nulls = ("temperature", "n", "stop", "seed", "logit_bias", "tools", "user", "stream")
    response = server.chat(max_tokens=1, **dict.fromkeys(nulls))
    assert response.status_code == 200


def refused_loosely(response: Any) -> str:
    assert response.status_code == 400
    message: str = response.json()["error"]["message"]
    return message
