"""vLLM's fields about tokens: ids, prompt log-probabilities, allowed tokens; the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.servers import chat_body, events

if TYPE_CHECKING:
    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

PATHS = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"prompt": "hello of the world"},
}


def send_request(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    return server.http.post(path, json=PATHS[path] | {"max_tokens": 8, "temperature": 0} | fields)


def answer(server: LiveServer, path: str, **fields: Any) -> Fields:
    response = send_request(server, path, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def prompt_ids(server: LiveServer, path: str) -> list[int]:
    fields = {name: PATHS[path][name] for name in ("messages", "prompt") if name in PATHS[path]}
    return list(server.http.post("/tokenize", json=fields).json()["tokens"])


@pytest.mark.parametrize("path", PATHS)
def test_ids_are_reported_whole_and_in_pieces(server: LiveServer, path: str) -> None:
    plain = answer(server, path, n=2, temperature=1, seed=3)
    body = answer(server, path, n=2, temperature=1, seed=3, return_token_ids=True)
    chunks = [
        chunk
        for chunk in events(
            send_request(
                server, path, n=2, temperature=1, seed=3, return_token_ids=True, stream=True
            ).text
        )
        if chunk != "[DONE]"
    ]
    for choice, other in zip(body["choices"], plain["choices"], strict=True):
        assert "token_ids" not in other
        mine = [chunk["choices"][0] for chunk in chunks]
        mine = [choice_part for choice_part in mine if choice_part["index"] == choice["index"]]
        assert [id_ for choice_part in mine for id_ in choice_part["token_ids"]] == choice[
            "token_ids"
        ]
        text = server.http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()
        prompt_text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text["prompt"].startswith(prompt_text)
        assert prompt_text == (other["text"] if "text" in other else other["message"]["content"])
    is_chat = path == "/v1/chat/completions"
    ids = prompt_ids(server, path)
    bodies = [body] if is_chat else body["choices"]
    first = chunks if is_chat else [chunk["choices"][0] for chunk in chunks]
    assert [choice["prompt_token_ids"] for choice in bodies] == [ids] * len(bodies)
    assert [choice["prompt_token_ids"] for choice in first if "prompt_token_ids" in choice] == [
        ids
    ] * 2


@pytest.mark.parametrize("path", PATHS)
def test_prompts_are_scored_in_vllms_form(server: LiveServer, path: str) -> None:
    body = answer(server, path, prompt_logprobs=2)
    scored = body if path == "/v1/chat/completions" else body["choices"][0]
    ids, scores = prompt_ids(server, path), scored["prompt_logprobs"]
    assert len(scores) == len(ids)
    assert scores[0] is None
    for id_, score in zip(ids[1:], scores[1:], strict=True):
        assert str(id_) in score
        assert len(score) in {2, 3}
        ranks = sorted(token["rank"] for token in score.values() if token["rank"] is not None)
        assert ranks == [1, 2]
        best = max(score.values(), key=lambda candidate: candidate["logprob"])
        assert best["rank"] == 1
        assert set(best) == {"logprob", "rank", "decoded_token"}
    few = answer(server, path, prompt_logprobs=0)
    scored = few if path == "/v1/chat/completions" else few["choices"][0]
    assert [list(prompt_logprob or {}) for prompt_logprob in scored["prompt_logprobs"]] == [
        [],
        *([str(i)] for i in ids[1:]),
    ]


def test_prompt_scores_equal_the_scores_of_an_echo(server: LiveServer) -> None:
    path = "/v1/completions"
    [choice] = answer(server, path, prompt_logprobs=0)["choices"]
    [echo] = answer(server, path, echo=True, logprobs=0)["choices"]
    scores = [
        next(iter(prompt_logprob.values()))["logprob"]
        for prompt_logprob in choice["prompt_logprobs"][1:]
    ]
    assert scores == echo["logprobs"]["token_logprobs"][1 : 1 + len(scores)]
    [only] = answer(server, path, prompt_logprobs=0, max_tokens=0)["choices"]
    assert only["prompt_logprobs"] == choice["prompt_logprobs"]


@pytest.mark.parametrize("path", PATHS)
def test_scored_tokens_may_be_named_by_their_ids(server: LiveServer, path: str) -> None:
    scored: Fields = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True}
    fields = scored | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = answer(server, path, **fields)["choices"]
    logprobs = choice["logprobs"]
    names = [token["token"] for token in logprobs["content"]] if "content" in logprobs else []
    names = names or logprobs["tokens"]
    assert names == [f"token_id:{id_}" for id_ in choice["token_ids"]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_only_allowed_tokens_are_drawn(server: LiveServer, path: str, temperature: float) -> None:
    allowed = [5, 70, 71, 200]
    fields = {"allowed_token_ids": allowed, "temperature": temperature, "seed": 1}
    [choice] = answer(server, path, **fields, return_token_ids=True)["choices"]
    assert len(choice["token_ids"]) == 8
    assert set(choice["token_ids"]) <= set(allowed)
    assert choice["finish_reason"] == "length"
    end = min(server.client.card.tokenizer.eos_ids)
    fields["allowed_token_ids"] = [end]
    [choice] = answer(server, path, **fields, return_token_ids=True)["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([end], "stop")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_wrong_values_are_named(server: LiveServer, path: str, fields: Fields, param: str) -> None:
    response = send_request(server, path, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_tokenizer_describes_itself(server: LiveServer) -> None:
    info = server.http.get("/tokenizer_info").json()
    tokenizer = server.client.card.tokenizer
    assert info["chat_template"] == tokenizer.chat_templates["default"]
    assert info["model_max_length"] == server.client.card.context_length
    fields = {"prompt": info["eos_token"], "add_special_tokens": False}
    [id_] = server.http.post("/tokenize", json=fields).json()["tokens"]
    assert id_ in tokenizer.eos_ids
    assert server.http.get("/tokenizer_info", params={"model": "nobody"}).status_code == 404


def test_conversations_may_be_sent_as_prompts_to_be_tokenized(server: LiveServer) -> None:
    """lm-evaluation-harness does so, with its remote tokenizer and a chat template."""
    messages = PATHS["/v1/chat/completions"]["messages"]
    fields = {"prompt": messages, "add_special_tokens": False}
    tokens = server.http.post("/tokenize", json=fields).json()["tokens"]
    assert tokens == prompt_ids(server, "/v1/chat/completions")
