"""/tokenize and /detokenize, as vLLM's clients see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.tiny import SPECIAL_TOKENS

if TYPE_CHECKING:
    from support.servers import LiveServer

Fields = dict[str, Any]

HUGE = 2**63
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


def post(server: LiveServer, path: str, **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def both(text: str) -> dict[str, str]:
    """Return the response that has a text under vLLM's and under llama-server's name."""
    return {"prompt": text, "content": text}


def test_answer_has_vllms_shape(server: LiveServer) -> None:
    tokenizer = server.client.card.tokenizer
    ids = tokenizer.encode("hello of the")
    body = post(server, "/tokenize", prompt="hello of the", model="tiny")
    assert body == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    body = post(server, "/tokenize", prompt="hello of the", return_token_strs=True)
    assert body["token_strs"][0] == "hello"
    assert "".join(body["token_strs"]) == "helloĠofĠthe"
    assert post(server, "/detokenize", tokens=ids) == both("hello of the")
    assert post(server, "/tokenize", prompt="")["count"] == 0
    assert post(server, "/detokenize", tokens=[]) == both("")


def test_begin_of_text_can_be_left_out(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.client.card.tokenizer
    monkeypatch.setattr(tokenizer, "_parts", replace(tokenizer._parts, prefix_ids=(1,)))
    with_it = post(server, "/tokenize", prompt="hello")["tokens"]
    without = post(server, "/tokenize", prompt="hello", add_special_tokens=False)["tokens"]
    assert with_it == [1, *without]


def test_text_of_a_special_token_becomes_it_unless_the_request_says_no(server: LiveServer) -> None:
    for index, text in enumerate(SPECIAL_TOKENS):
        assert post(server, "/tokenize", prompt=text)["tokens"] == [index]
        ids = post(server, "/tokenize", prompt=text, parse_special=False)["tokens"]
        assert len(ids) > 1
        assert post(server, "/detokenize", tokens=ids) == both(text)
    assert post(server, "/detokenize", tokens=[1, 2]) == both("".join(SPECIAL_TOKENS[1:]))


def test_messages_become_the_prompt_of_a_chat(server: LiveServer) -> None:
    body = post(server, "/tokenize", messages=HELLO)
    assert body["count"] == server.chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    text = post(server, "/detokenize", tokens=body["tokens"])["prompt"]
    turn = "<|im_start|>user\nhello<|im_end|>\n"
    assert text == f"{turn}<|im_start|>assistant\n"
    for fields, expected in (
        ({"add_generation_prompt": False}, turn),
        ({"continue_final_message": True}, turn.removesuffix("<|im_end|>\n")),
        ({"add_special_tokens": False, "tools": []}, text),
    ):
        ids = post(server, "/tokenize", messages=HELLO, **fields)["tokens"]
        assert post(server, "/detokenize", tokens=ids)["prompt"] == expected


def test_tools_are_shown_as_in_a_chat(server: LiveServer) -> None:
    body = post(server, "/tokenize", messages=HELLO, tools=[TOOL])
    chat = server.chat(tools=[TOOL], max_tokens=1).json()
    assert body["count"] == chat["usage"]["prompt_tokens"]
    assert '"name": "f"' in post(server, "/detokenize", tokens=body["tokens"])["prompt"]


def test_halves_of_characters_come_back_joined(server: LiveServer) -> None:
    ids = post(server, "/tokenize", prompt="é€")["tokens"]
    assert len(ids) == 5
    assert post(server, "/detokenize", tokens=ids) == both("é€")
    assert post(server, "/detokenize", tokens=ids[:1]) == both("\ufffd")


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        ([-1], "tokens[0]"),
        ([5, HUGE], "tokens[1]"),
        ([2**70], "tokens[0]"),
        ([10**6], "tokens[0]"),
        ([True], "tokens[0]"),
        ([1.5], "tokens[0]"),
        (["1"], "tokens[0]"),
        ([[1]], "tokens[0]"),
        (5, "tokens"),
        ("1", "tokens"),
        (None, "tokens"),
    ],
)
def test_ids_that_are_none_are_refused(server: LiveServer, tokens: object, param: str) -> None:
    response = server.http.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_ids_at_the_vocabularys_end(server: LiveServer) -> None:
    last = server.client.card.tokenizer.vocab_size - 1
    post(server, "/detokenize", tokens=[last])
    error = server.http.post("/detokenize", json={"tokens": [last + 1]}).json()["error"]
    assert error["message"] == (
        f"tokens[0] is not a token of this model, whose ids go from 0 to {last}."
    )


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt[0]"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        (
            "/tokenize",
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools[0].function"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"content": ["x", -1]}, "content[1]"),
        ("/tokenize", {"content": [2**70]}, "content[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_wrong_fields_are_named(server: LiveServer, path: str, fields: Fields, param: str) -> None:
    response = server.http.post(path, json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_other_models_and_methods_are_refused(server: LiveServer, path: str) -> None:
    fields: Fields = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]}
    assert server.http.post(path, json={**fields, "model": "x"}).status_code == 404
    assert server.http.get(path).status_code == 405
    assert path in server.http.get("/").json()["endpoints"]


def test_long_texts_are_tokenized_beside_the_event_loop(server: LiveServer) -> None:
    text = "hello the world " * 4000
    body = post(server, "/tokenize", prompt=text)
    assert body["count"] > body["max_model_len"]
    assert post(server, "/detokenize", tokens=body["tokens"]) == both(text)
