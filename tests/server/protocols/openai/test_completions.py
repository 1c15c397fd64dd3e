"""OpenAI's older completions protocol, as clients see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from support.servers import events
from support.tiny import SPECIAL_TOKENS
from twostroke.server.models.about import FINGERPRINT
from twostroke.server.protocols.common.logprobs import TextOffsets

if TYPE_CHECKING:
    from support.servers import LiveServer

Fields = dict[str, Any]


def test_answer_has_openais_shape(server: LiveServer, hello: Fields) -> None:
    body = server.complete(max_tokens=2, **hello).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    choice = {"index": 0, "text": "hellohello", "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": FINGERPRINT,
        "choices": [choice],
        "usage": {
            **usage,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def test_stream_is_right_byte_by_byte(server: LiveServer, hello: Fields) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = server.complete(max_tokens=1, **options, **hello)
    first = events(response.text)[0]
    start = (
        f'data: {{"id":"{first["id"]}","object":"text_completion",'
        f'"created":{first["created"]},"model":"tiny","choices":['
    )
    usage = (
        '{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":'
        '{"reasoning_tokens":0,"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}'
    )
    end = f'"system_fingerprint":"{FINGERPRINT}"}}\n\n'
    expected = (
        f'{start}{{"index":0,"text":"hello","logprobs":null,"finish_reason":null}}],'
        f'"usage":null,{end}'
        f'{start}{{"index":0,"text":"","logprobs":null,"finish_reason":"length"}}],'
        f'"usage":null,{end}'
        f'{start}],"usage":{usage},{end}'
        "data: [DONE]\n\n"
    )
    assert response.content == expected.encode()


def test_default_length_is_openais_sixteen(server: LiveServer, hello: Fields) -> None:
    assert server.complete(**hello).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("hello", 1), (["hello"], 1), (["hello", "world"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)],
)
def test_every_form_of_prompt_is_read(
    server: LiveServer, hello: Fields, prompt: object, num_prompts: int
) -> None:
    body = server.complete(prompt=prompt, max_tokens=2, n=2, **hello).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_prompts))
    assert body["usage"]["completion_tokens"] == 4 * num_prompts


def test_prompts_of_one_request_answer_as_they_do_alone(server: LiveServer) -> None:
    fields: Fields = {"max_tokens": 8, "seed": 5, "n": 2}
    prompts = ["hello", "the world", "a"]
    together = server.complete(prompt=prompts, **fields).json()["choices"]
    alone = [server.complete(prompt=prompt, **fields).json()["choices"] for prompt in prompts]
    assert [choice["text"] for choice in together] == [
        c["text"] for choices in alone for c in choices
    ]


def test_several_prompts_stream_under_their_index(server: LiveServer) -> None:
    fields: Fields = {"prompt": ["hello", "world"], "max_tokens": 8, "seed": 5}
    whole_choices = server.complete(**fields).json()["choices"]
    chunks = events(server.complete(stream=True, **fields).text)[:-1]
    for choice in whole_choices:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the world", [[7, 8], [9]]])
def test_echo_puts_the_prompt_first(
    server: LiveServer, hello: Fields, prompt: Any, stream: bool
) -> None:
    response = server.complete(prompt=prompt, echo=True, max_tokens=1, stream=stream, **hello)
    decode = server.client.card.tokenizer.decode
    texts = [prompt] if isinstance(prompt, str) else [decode(ids) for ids in prompt]
    bodies = events(response.text)[:-1] if stream else [response.json()]
    result = dict.fromkeys(range(len(texts)), "")
    for body in bodies:
        for choice in body["choices"]:
            result[choice["index"]] += choice["text"]
    assert list(result.values()) == [f"{text}hello" for text in texts]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_openais_four_lists(server: LiveServer, stream: bool) -> None:
    for seed in range(6):
        fields: Fields = {"max_tokens": 10, "seed": seed, "logprobs": 2}
        response = server.complete(stream=stream, **fields)
        text, logprobs = _logprobs(response, stream)
        assert len(logprobs["tokens"]) <= 10
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[token] == logprob
            assert 2 <= len(top) <= 3
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:") and token not in SPECIAL_TOKENS:
                assert text[offset:].lstrip("\ufffd").startswith(token)


def test_logprobs_zero_reports_the_chosen_token_alone(server: LiveServer) -> None:
    body = server.complete(max_tokens=3, logprobs=0, temperature=0).json()
    logprobs = body["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["the world", "the <|im_start|> w\u00f6rld", [7, 8, 2, 9], [7]])
def test_echo_reports_on_the_prompt_before_the_answer(
    server: LiveServer, prompt: Any, max_tokens: int, stream: bool
) -> None:
    fields: Fields = {"prompt": prompt, "max_tokens": max_tokens, "seed": 3, "logprobs": 2}
    response = server.complete(echo=True, stream=stream, **fields)
    text, echoed = _logprobs(response, stream)
    tokenizer = server.client.card.tokenizer
    ids = prompt
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
    num_tokens = len(echoed["tokens"])
    assert len(ids) <= num_tokens <= len(ids) + max_tokens
    assert all(len(values) == num_tokens for values in echoed.values())
    assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
    for token, logprob, top in list(
        zip(echoed["tokens"], echoed["token_logprobs"], echoed["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == logprob <= max(top.values()) <= 0
        assert 2 <= len(top) <= 3
    for token, offset in zip(echoed["tokens"], echoed["text_offset"], strict=True):
        is_shown = token not in SPECIAL_TOKENS or (isinstance(prompt, str) and token in prompt)
        if not token.startswith("bytes:") and is_shown:
            assert text[offset:].lstrip("\ufffd").startswith(token)
    if max_tokens:
        alone = server.complete(**fields).json()["choices"][0]
        prompt_text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        assert text == prompt_text + alone["text"]
        assert echoed["tokens"][len(ids) :] == alone["logprobs"]["tokens"]
        expected_logprobs = alone["logprobs"]["token_logprobs"]
        assert echoed["token_logprobs"][len(ids) :] == pytest.approx(expected_logprobs, abs=1e-4)
        offsets = [len(prompt_text) + offset for offset in alone["logprobs"]["text_offset"]]
        assert echoed["text_offset"][len(ids) :] == offsets


def test_every_choice_of_every_prompt_repeats_its_own(server: LiveServer) -> None:
    prompts = [[7, 8, 9], [20, 21], [30]]
    fields: Fields = {"echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    together = server.complete(prompt=prompts, **fields).json()
    alone = [server.complete(prompt=prompt, **fields).json()["choices"] for prompt in prompts]
    for choice, other in zip(
        together["choices"], [c for choices in alone for c in choices], strict=True
    ):
        echoed, expected = choice["logprobs"], other["logprobs"]
        assert echoed["tokens"] == expected["tokens"]
        assert echoed["text_offset"] == expected["text_offset"]
        assert echoed["token_logprobs"][1:] == pytest.approx(
            expected["token_logprobs"][1:], abs=1e-4
        )
    assert {c["finish_reason"] for c in together["choices"]} == {"length"}
    assert together["usage"]["completion_tokens"] == 0


def test_echo_of_nothing_but_the_prompt_needs_no_logprobs(server: LiveServer) -> None:
    choice = server.complete(prompt="the world", echo=True, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("the world", None)


def _logprobs(response: Any, stream: bool) -> tuple[str, Fields]:
    if not stream:
        choice = response.json()["choices"][0]
        return choice["text"], choice["logprobs"]
    joined: Fields = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in events(response.text)[:-1]:
        choice = chunk["choices"][0]
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            joined[name] += values
    return text, joined


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("e\u0301e", ["é", "e"], [0, 2]),
        ("aa\u0301aaa", ["a", "á", "a", "a", "a"], [0, 1, 3, 4, 5]),
        ("abc", ["a", "b", "c"], [0, 1, 2]),
    ],
)
def test_repeated_letters_of_a_prompt_in_another_normal_form_have_offsets_that_rise(
    prompt: str, tokens: list[str], offsets: list[int]
) -> None:
    text_offsets = TextOffsets(Mock(special_ids=frozenset(), adds_space=False), prompt=prompt)
    found = [text_offsets.advance(token, text.encode()) for token, text in enumerate(tokens)]
    assert found == offsets
