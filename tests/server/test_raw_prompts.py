"""Raw prompts may contain special tokens, unless the request or the server says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.servers import LiveServer, live_server
from support.tiny import BOS_ID, SPECIAL_TOKENS
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
# Each path, the fields of its shortest request, the prompt's field, and where it counts tokens.
PATHS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"max_tokens": 1}, "prompt", "usage.prompt_tokens"),
    ("/completion", {"n_predict": 1}, "prompt", "tokens_evaluated"),
    (
        "/api/generate",
        {"raw": True, "stream": False, "options": {"num_predict": 1}},
        "prompt",
        "prompt_eval_count",
    ),
    ("/tokenize", {}, "prompt", "count"),
    ("/tokenize", {}, "content", "count"),
    ("/v1/embeddings", {}, "input", "usage.prompt_tokens"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server that does not parse special tokens in raw prompts by default."""
    options = ServeOptions(drain_s=1, parses_special=False)
    with live_server(tmp_path_factory.mktemp("plain"), options) as server:
        yield server


def count(
    server: LiveServer, path: str, fields: dict[str, Any], name: str, count_path: str, text: str
) -> int:
    response = server.http.post(path, json={**fields, name: text})
    assert response.status_code == 200, response.text
    value = response.json()
    for key in count_path.split("."):
        value = value[key]
    assert isinstance(value, int)
    return value


@pytest.mark.parametrize(("path", "fields", "name", "count_path"), PATHS)
def test_special_tokens_are_read_unless_the_request_says_no(
    server: LiveServer,
    plain: LiveServer,
    path: str,
    fields: dict[str, Any],
    name: str,
    count_path: str,
) -> None:
    tokenizer = server.client.card.tokenizer
    num_special = len(tokenizer.encode(RENDERED, parse_special=True))
    num_plain = len(tokenizer.encode(RENDERED))
    assert num_special < num_plain
    count_arguments = (path, fields, name, count_path, RENDERED)
    assert count(server, *count_arguments) == num_special
    assert count(plain, *count_arguments) == num_plain
    for parses, expected in ((True, num_special), (False, num_plain)):
        count_arguments = (path, {**fields, "parse_special": parses}, name, count_path, RENDERED)
        assert count(server, *count_arguments) == count(plain, *count_arguments) == expected


def test_texts_of_all_paths_for_embeddings_are_read_alike(server: LiveServer) -> None:
    rendered = server.client.card.tokenizer.encode(RENDERED, parse_special=True)
    vector = server.http.post("/v1/embeddings", json={"input": rendered}).json()["data"][0]
    for path, fields in (
        ("/embeddings", {"content": RENDERED}),
        ("/api/embed", {"input": RENDERED}),
    ):
        body = server.http.post(path, json=fields).json()
        result = body[0]["embedding"][0] if isinstance(body, list) else body["embeddings"][0]
        assert result == pytest.approx(vector["embedding"])


def test_messages_are_never_read_so(server: LiveServer) -> None:
    tokenizer = server.client.card.tokenizer

    def prompt_tokens(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        answer = server.chat(messages=messages, max_tokens=1).json()
        return int(answer["usage"]["prompt_tokens"])

    around = prompt_tokens("hello") - len(tokenizer.encode("user\nhello"))
    for text in (RENDERED, *SPECIAL_TOKENS):
        assert prompt_tokens(text) == around + len(tokenizer.encode(f"user\n{text}"))


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/api/generate"])
def test_a_prompt_that_begins_with_the_begin_token_gets_no_second_one(
    tmp_path: Path, path: str
) -> None:
    fields = {"max_tokens": 1} if path == "/v1/completions" else {"raw": True, "stream": False}
    if path == "/completion":
        fields = {"n_predict": 1}
    count_path = next(count_path for path_name, _, _, count_path in PATHS if path_name == path)
    begin = SPECIAL_TOKENS[BOS_ID]
    metadata = {"tokenizer.ggml.add_bos_token": True}
    with live_server(tmp_path, metadata=metadata) as server:
        for text in ("hello", f"{begin}hello"):
            assert count(server, path, fields, "prompt", count_path, text) == 2


def test_the_begin_token_can_be_left_out(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": True}
    with live_server(tmp_path, metadata=metadata) as server:
        for path, fields, name, count_path in PATHS:
            if path.startswith("/v1/") or name == "prompt" == path:
                without = {**fields, "add_special_tokens": False}
                assert count(server, path, fields, name, count_path, "hello") == 2
                assert count(server, path, without, name, count_path, "hello") == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"suffix": "x", "parse_special": True}, "parse_special"),
        ("/v1/completions", {"suffix": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/api/generate", {"parse_special": True}, "parse_special"),
        ("/tokenize", {"content": "x", "add_special_tokens": True}, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "parse_special": True},
            "parse_special",
        ),
    ],
)
def test_a_field_that_would_have_no_effect_is_refused(
    server: LiveServer, path: str, body: dict[str, Any], field: str
) -> None:
    prompt = {} if path == "/tokenize" else {"prompt": "hello"}
    response = server.http.post(path, json={**prompt, **body})
    assert response.status_code == 400
    assert field in response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/embeddings", "/tokenize"])
def test_a_wrong_value_is_refused_by_name(server: LiveServer, path: str) -> None:
    name = "input" if path == "/v1/embeddings" else "prompt"
    body = {name: "hello", "parse_special": "no"}
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert "parse_special" in response.text
