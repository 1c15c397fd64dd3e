"""Formats, tool calls and continued text on each kind of vocabulary, and prefix spaces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import LiveServer, chat_body, events, live_server
from support.vocabulary_kinds import (
    FOLDER_KINDS,
    GGUF_KINDS,
    kind_metadata,
    write_kind,
)
from twostroke.model.tokenizer import from_tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Iterator

Fields = dict[str, Any]

PROMPT = "The capital of France is"
WORDS = [" yes", "yes", " no", " Paris", " the"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["yes", "cafe\u0301"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "is", "parameters": SCHEMA}}
KINDS = ["gguf bytes", "gguf bytes_with_prefix", "gguf pieces_with_prefix", "gguf pieces_by_merges"]
KINDS += ["folder bytes_nfc", "folder prepend", "folder metaspace", "folder bytes_nfkc"]


@pytest.fixture(scope="module", params=KINDS)
def kind_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Start a server of a tiny model with one kind of vocabulary."""
    origin, name = request.param.split()
    folder, tokenizer = tmp_path_factory.mktemp(name), None
    if origin == "gguf":
        kind = GGUF_KINDS[name]
    else:
        tokenizer = from_tokenizer_json(write_kind(folder / "folder", FOLDER_KINDS[name]))
        is_byte_level = FOLDER_KINDS[name].is_byte_level
        kind = GGUF_KINDS["bytes" if is_byte_level else "pieces"]  # has as many tokens
    with live_server(folder, metadata=kind_metadata(kind), tokenizer=tokenizer) as server:
        yield server


def paris(server: LiveServer) -> Fields:
    """Return fields that force one token: a word with a space before it."""
    (token,) = server.client.card.tokenizer.encode_exact(" Paris")
    return {"logit_bias": {str(token): 100}, "temperature": 0, "max_tokens": 1}


def content(server: LiveServer, **fields: Any) -> str:
    response = server.http.post("/v1/chat/completions", json=chat_body(**fields))
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    assert isinstance(message["content"], str)
    return message["content"]


@pytest.mark.parametrize(
    "choices", [["yes", "no"], [" yes", " no"], ["cafe\u0301"], ["ﬁ", "\u212b"], ["<s>", "▁a"]]
)
def test_an_answer_is_exactly_one_of_the_choices(
    kind_server: LiveServer, choices: list[str]
) -> None:
    for seed in range(3):
        assert content(kind_server, guided_choice=choices, seed=seed) in choices
        body = kind_server.complete(guided_choice=choices, max_tokens=40, seed=seed).json()
        assert body["choices"][0]["text"] in choices


def test_schemas_expressions_and_grammars_are_followed(kind_server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert json.loads(content(kind_server, response_format=form))["name"] in {"yes", "cafe\u0301"}
    assert content(kind_server, guided_regex="yes( no){2}") == "yes no no"
    assert content(kind_server, guided_grammar='root ::= " yes" | "no"') in {" yes", "no"}
    assert content(kind_server, guided_grammar='start: "no" " yes"') == "no yes"
    assert content(kind_server, guided_json={"const": "a b"}) == '"a b"'
    some = content(kind_server, response_format={"type": "json_object"}, max_tokens=40)
    assert some.startswith("{")


def test_forced_calls_fit_their_tool(kind_server: LiveServer) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "is"}}):
        body = chat_body(tools=[TOOL], tool_choice=choice, max_tokens=200)
        response = kind_server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "is"
        assert json.loads(call["function"]["arguments"])["name"] in {"yes", "cafe\u0301"}


def test_continued_text_keeps_its_first_space(kind_server: LiveServer) -> None:
    fields = {**paris(kind_server), "prompt": PROMPT}
    body = kind_server.complete(**fields, logprobs=0).json()["choices"][0]
    assert body["text"] == " Paris" == body["logprobs"]["tokens"][0]
    assert kind_server.complete(**fields, echo=True).json()["choices"][0]["text"] == (
        f"{PROMPT} Paris"
    )
    two = kind_server.complete(**{**fields, "max_tokens": 2}, stop=["Paris Pa"], logprobs=0).json()
    assert two["choices"][0]["text"] == " "
    streamed = kind_server.complete(**{**fields, "max_tokens": 2}, stream=True)
    parts = [event["choices"][0]["text"] for event in events(streamed.text) if event != "[DONE]"]
    assert "".join(parts) == " Paris Paris"


def test_offsets_of_an_echoed_prompt_meet_its_answer(kind_server: LiveServer) -> None:
    fields = {**paris(kind_server), "prompt": PROMPT, "echo": True, "logprobs": 0}
    body = kind_server.complete(**fields).json()["choices"][0]
    assert body["text"] == f"{PROMPT} Paris"
    assert body["logprobs"]["text_offset"][-1] == len(PROMPT)


@pytest.mark.parametrize("begin", ["", " ", "  ", "\n", "e\u0301 ", "yes<tool>", "yes</s>"])
def test_words_of_an_echoed_prompt_have_their_offsets(kind_server: LiveServer, begin: str) -> None:
    prompt = f"{begin}yes no Paris the no"
    fields = {**paris(kind_server), "prompt": prompt, "echo": True, "logprobs": 0}
    logprobs = kind_server.complete(**fields).json()["choices"][0]["logprobs"]
    pairs = [*zip(logprobs["tokens"], logprobs["text_offset"], strict=True)][:-1]
    offsets = [offset for _, offset in pairs]
    assert offsets == sorted(offsets)
    words = [(token, prompt[offset:]) for token, offset in pairs if token in WORDS]
    assert len(words) >= 4
    for token, rest in words:  # the tokenizer may have added the first space
        assert rest.startswith((token, token.removeprefix(" "))), (token, rest)


def test_other_protocols_continue_text_with_its_space(kind_server: LiveServer) -> None:
    (token,) = kind_server.client.card.tokenizer.encode_exact(" Paris")
    fields: Fields = {"prompt": PROMPT, "n_predict": 1, "logit_bias": [[token, 100]]}
    body = kind_server.http.post("/completion", json={**fields, "temperature": 0}).json()
    assert body["content"] == " Paris"
    schema = {"type": "string", "const": " a"}
    raw = {"prompt": PROMPT, "raw": True, "stream": False, "format": schema}
    assert kind_server.http.post("/api/generate", json=raw).json()["response"] == '" a"'


def test_only_a_chat_drops_the_space_that_the_tokenizer_adds(kind_server: LiveServer) -> None:
    drops = kind_server.client.card.tokenizer.strip_space
    word = "Paris" if drops else " Paris"
    fields = paris(kind_server)
    assert content(kind_server, **fields) == word
    streamed = kind_server.chat(**fields, stream=True)
    deltas = [event["choices"][0]["delta"] for event in events(streamed.text) if event != "[DONE]"]
    assert "".join(delta.get("content") or "" for delta in deltas) == word
    assert content(kind_server, **{**fields, "max_tokens": 2}) == f"{word} Paris"
    begun = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": PROMPT},
    ]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert content(kind_server, **{**fields, **options, "messages": begun}) == " Paris"


def test_a_rendered_chat_has_the_tokens_of_the_chat(kind_server: LiveServer) -> None:
    def post(path: str, **fields: Any) -> Any:
        return kind_server.http.post(path, json=fields).json()

    messages = [
        {"role": "system", "content": "yes"},
        {"role": "user", "content": " is the  caf\u00e9 no"},
        {"role": "assistant", "content": " Paris"},
        {"role": "user", "content": "yes\n\n"},
    ]
    text = post("/apply-template", messages=messages)["prompt"]
    ids = post("/tokenize", messages=messages)["tokens"]
    assert post("/tokenize", prompt=text, add_special_tokens=False)["tokens"] == ids
    assert post("/tokenize", content=text)["tokens"] == ids
    begin = kind_server.client.card.tokenizer.bos_id
    assert post("/tokenize", prompt=text)["tokens"] == [begin, *ids]
    assert post("/tokenize", prompt=f"<s>{text}")["tokens"] == [begin, *ids]
