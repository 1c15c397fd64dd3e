"""Text between a prefix and a suffix, as llama.cpp's editor plugins request it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.tiny import infill_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

GAP = {"input_prefix": "hello", "input_suffix": " world"}
# The fields that llama.vim and llama.vscode send with each gap.
PLUGIN = {
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1500,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("infill"), metadata=infill_metadata()) as server:
        yield server


def fill(server: LiveServer, **fields: Any) -> Any:
    body = {**GAP, "n_predict": 2, "temperature": 0, **fields}
    response = server.http.post("/infill", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def ids(server: LiveServer, prefix: str, suffix: str) -> list[int]:
    tokenizer = server.client.card.tokenizer
    marks = tokenizer.infill
    assert marks is not None
    before, after = tokenizer.encode(prefix), tokenizer.encode(suffix)
    return [marks.prefix, *before, marks.suffix, *after, marks.middle]


def text_of_tokens(server: LiveServer, tokens: list[int]) -> str:
    return server.client.card.tokenizer.decode(tokens, skip_special=False)


def test_prompt_is_prefix_line_and_suffix(server: LiveServer) -> None:
    assert fill(server)["prompt"] == text_of_tokens(server, ids(server, "hello", " world"))
    body = fill(server, prompt=" the", **PLUGIN)
    assert body["prompt"] == text_of_tokens(server, ids(server, "hello the", " world"))
    assert body["generation_settings"]["samplers"] == ["top_k", "top_p"]


def test_answer_is_that_of_completions_with_a_suffix(server: LiveServer) -> None:
    fields = {"temperature": 0, "max_tokens": 4, "suffix": " world"}
    other = server.complete(**fields).json()["choices"][0]["text"]
    assert fill(server, n_predict=4)["content"] == other


def test_other_files_come_first_each_after_its_name(server: LiveServer) -> None:
    marks = server.client.card.tokenizer.infill
    assert marks is not None
    assert marks.file is not None
    files = [
        {"filename": "a.h", "text": "to be", "time": [1, 2]},
        {"text": "of the", "time": 3.5},
    ]
    result = fill(server, input_extra=files)["prompt"]
    mark = text_of_tokens(server, [marks.file])
    before = f"{mark}a.h\nto be{mark}tmp\nof the{mark}filename\n"
    assert result == before + text_of_tokens(server, ids(server, "hello", " world"))


def test_the_file_mark_in_a_text_stays_text(server: LiveServer) -> None:
    marks = server.client.card.tokenizer.infill
    assert marks is not None
    assert marks.file is not None
    text = text_of_tokens(server, [marks.file])
    result = fill(server, input_extra=[{"text": text}], return_tokens=True)
    count = len(server.client.card.tokenizer.encode(text))
    assert result["tokens_evaluated"] > count


def test_text_beyond_the_context_is_cut(server: LiveServer) -> None:
    size = server.client.card.context_length
    long = "a b " * 2000
    file = {"filename": "old", "text": "x " * 50}
    cut = fill(server, input_prefix=f"{long}end", input_suffix=f" start{long}", input_extra=[file])
    assert size - 20 < cut["tokens_evaluated"] < size
    prefix, _, suffix = cut["prompt"].partition(" start")
    assert "end" in prefix
    assert len(prefix) > 2 * len(suffix)
    assert "old" not in cut["prompt"]
    files = [{"filename": f"f{n}", "text": "x " * 60} for n in range(20)]
    prompt = fill(server, input_extra=files)["prompt"]
    assert "f19\n" in prompt
    assert "f0\n" not in prompt
    assert fill(server, input_prefix=long, n_predict=-1)["tokens_evaluated"] <= size * 3 // 4


def test_files_can_be_read_ahead(server: LiveServer) -> None:
    files = [{"filename": "a", "text": "to be of the " * 10, "time": 1}]
    read_ahead = {
        "input_prefix": "",
        "input_suffix": "",
        "prompt": "",
        "n_predict": 0,
        "samplers": [],
    }
    assert fill(server, input_extra=files, **read_ahead, response_fields=[""]) == {}
    assert fill(server, input_extra=files)["timings"]["cache_n"] > 0


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "x"}])
def test_files_need_a_text(server: LiveServer, extra: dict[str, Any]) -> None:
    response = server.http.post("/infill", json={**GAP, "input_extra": [extra]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("input_extra[0].")


def test_a_model_without_the_tokens_refuses(shared_server: LiveServer) -> None:
    response = shared_server.http.post("/infill", json=GAP)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("Infill is not supported by tiny")
