"""llama-server's own completions, as its clients see them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import chat_body, events, live_server
from support.tiny import EOS_ID

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

GREEDY: Fields = {"prompt": "hello", "n_predict": 6, "temperature": 0, "ignore_eos": True}


def post(server: LiveServer, path: str = "/completion", **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: LiveServer, **fields: Any) -> Any:
    response = server.http.post("/completion", json={"prompt": "hello", **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def chunks(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, which ends without `[DONE]`."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts if not part.startswith(":")]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_answer_has_the_facts_of_llama_servers(server: LiveServer, path: str) -> None:
    body = post(server, path, **GREEDY, return_tokens=True, id_slot=3, stop=["no such text"])
    timings, settings = body.pop("timings"), body.pop("generation_settings")
    content, tokens = body.pop("content"), body.pop("tokens")
    assert body == {
        "index": 0,
        "id_slot": 3,
        "stop": True,
        "model": "tiny",
        "tokens_predicted": 6,
        "tokens_evaluated": 1,
        "tokens_cached": 7,
        "prompt": "hello",
        "has_new_line": "\n" in content,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
    }
    tokenizer = server.client.card.tokenizer
    assert len(tokens) == 6
    assert tokenizer.decode(tokens) == content
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, 1, 6)
    assert timings["prompt_per_token_ms"] == timings["prompt_ms"]
    assert settings["n_predict"] == settings["max_tokens"] == 6
    assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (40, 0.95, 0.05)
    assert settings["stop"] == ["no such text"]


def test_stream_says_the_same_in_pieces(server: LiveServer) -> None:
    whole_answer = post(server, **GREEDY, return_tokens=True, n_probs=2)
    fields = {**GREEDY, "stream": True, "return_tokens": True, "n_probs": 2}
    progress_fields = {"timings_per_token": True, "return_progress": True}
    first, second, *middle, last = chunks(
        server.http.post("/completion", json=fields | progress_fields)
    )
    for chunk, num_read in ((first, 0), (second, 1)):
        assert chunk["content"] == ""
        expected_progress = {"total": 1, "cache": 0, "processed": num_read}
        assert chunk["prompt_progress"].items() >= expected_progress.items()
    assert "".join(chunk["content"] for chunk in middle) == whole_answer["content"]
    assert [token for chunk in middle for token in chunk["tokens"]] == whole_answer["tokens"]
    scored = [token for chunk in middle for token in chunk.get("completion_probabilities", [])]
    assert scored == whole_answer["completion_probabilities"]
    assert middle[-1]["tokens_predicted"] == 6
    assert not any(chunk["stop"] for chunk in middle)
    assert all(chunk["timings"]["prompt_n"] == 1 for chunk in middle)
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    changing = {"content", "tokens", "timings", "generation_settings", "completion_probabilities"}
    assert {k: v for k, v in last.items() if k not in changing} == {
        k: v for k, v in whole_answer.items() if k not in changing
    }


def test_tokens_of_a_stream_reach_the_client_even_without_text(server: LiveServer) -> None:
    fields = {**GREEDY, "ignore_eos": False, "logit_bias": [[EOS_ID, 100]], "stream": True}
    chunk, last = chunks(server.http.post("/completion", json=fields))
    assert (chunk["content"], chunk["tokens"]) == ("", [EOS_ID])
    assert (last["stop_type"], last["tokens_predicted"]) == ("eos", 1)


def test_scored_tokens_have_ids_texts_and_bytes(server: LiveServer) -> None:
    [first, *_] = post(server, **GREEDY, n_probs=2)["completion_probabilities"]
    tokenizer = server.client.card.tokenizer
    assert first["id"] == first["top_logprobs"][0]["id"]
    assert first["logprob"] == first["top_logprobs"][0]["logprob"] <= 0
    assert len(first["top_logprobs"]) == 2
    assert bytes(first["bytes"]) == tokenizer.token_bytes(first["id"])
    assert "completion_probabilities" not in post(server, **GREEDY)


def test_prompts_may_be_texts_ids_both_and_several(server: LiveServer) -> None:
    ids = server.client.card.tokenizer.encode("hello of the")
    plain = post(server, **GREEDY | {"prompt": "hello of the"})
    assert plain["tokens_evaluated"] == len(ids)
    for prompt in (ids, [*ids[:1], " of the"], ["hello of the"], {"prompt_string": "hello of the"}):
        result = post(server, **GREEDY | {"prompt": prompt})
        result = result[0] if isinstance(result, list) else result
        assert result["content"] == plain["content"]
    prompts = ["hello of the", ids, [*ids[:1], " of the"]]
    several = post(server, **GREEDY | {"prompt": prompts})
    assert [completion["index"] for completion in several] == [0, 1, 2]
    assert {completion["content"] for completion in several} == {plain["content"]}
    twice = post(server, **GREEDY, n_cmpl=2)
    assert [completion["content"] for completion in twice] == [
        post(server, **GREEDY)["content"]
    ] * 2
    for wrong in ([], [1, ["hello"]], [1, {"prompt_string": "x"}], {"text": "x"}, [1.5]):
        assert refused(server, prompt=wrong)["type"] == "invalid_request_error"


def test_special_tokens_may_be_written(server: LiveServer) -> None:
    templated = post(server, "/apply-template", **chat_body())["prompt"]
    chat = server.chat(max_tokens=1).json()
    assert (
        post(server, prompt=templated, n_predict=1)["tokens_evaluated"]
        == (chat["usage"]["prompt_tokens"])
    )


def test_samplers_that_are_not_listed_are_off(server: LiveServer) -> None:
    fields = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.3, "repeat_penalty": 1.3}
    off = {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1, "repeat_penalty": 1}
    for samplers, active_samplers in (
        (["top_k", "infill", "temperature"], {"top_k", "temperature"}),
        ("kt", {"top_k", "temperature"}),
        ("edkypmxt", fields.keys()),
        ([], set[str]()),
    ):
        body = post(server, prompt="hello", n_predict=1, samplers=samplers, **fields)
        expected = off | {name: fields[name] for name in active_samplers}
        assert body["generation_settings"].items() >= expected.items()


def test_values_out_of_a_samplers_range_become_the_nearest(server: LiveServer) -> None:
    fields = {"temperature": -1, "top_k": -1, "top_p": 2, "min_p": -0.5, "seed": -1}
    settings = post(server, prompt="hello", n_predict=1, **fields)["generation_settings"]
    nearest = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 2**32 - 1}
    assert settings.items() >= nearest.items()
    assert post(server, prompt="hello", n_predict=1, top_p=0)["tokens_predicted"] == 1


def test_bias_takes_ids_texts_and_bans(server: LiveServer) -> None:
    tokenizer = server.client.card.tokenizer
    token = tokenizer.find("hello")
    for bias in ([[token, 100]], [["hello", 1e9]], {str(token): 100}, {"hello": 100}):
        assert post(server, **GREEDY, logit_bias=bias)["content"] == "hello" * 6
    plain = post(server, **GREEDY, return_tokens=True)["tokens"]
    banned = post(server, **GREEDY, return_tokens=True, logit_bias=[[plain[0], False]])["tokens"]
    assert plain[0] not in banned
    for absent in ([[10**6, 1]], [[2**70, 1]], {"9" * 9: 1}):
        assert post(server, **GREEDY, logit_bias=absent)["tokens_predicted"] == 6
    assert "logit_bias" in refused(server, logit_bias={"9" * 5000: 1})["message"]
    for wrong in ([1], [[1]], [[1, True]], [[True, 1]], [[1, "x"]], [[1, 2, 3]], [[1, 1]] * 1025):
        assert "logit_bias" in refused(server, logit_bias=wrong)["message"]


def test_seeds_repeat_answers_and_minus_one_does_not(server: LiveServer) -> None:
    fields = {"prompt": "hello", "n_predict": 16, "temperature": 5, "top_k": 0, "top_p": 1}
    fields |= {"min_p": 0, "ignore_eos": True}
    same = {post(server, **fields, seed=7)["content"] for _ in range(2)}
    assert len(same) == 1
    assert len({post(server, **fields, seed=-1)["content"] for _ in range(3)}) == 3


def test_answers_end_at_words_tokens_and_the_context(server: LiveServer) -> None:
    token = server.client.card.tokenizer.find("hello")
    ending: Fields = {"prompt": "x", "temperature": 0}
    always = {**ending, "logit_bias": [[token, 100]]}
    word = post(server, **always, stop=["lohe", ""])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("hel", "word", "lohe")
    end = post(server, **ending, logit_bias=[[EOS_ID, 100]])
    assert (end["content"], end["stop_type"], end["truncated"]) == ("", "eos", False)
    full = post(server, **always, n_predict=-1)
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    assert full["tokens_cached"] == server.client.card.context_length


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_to_predict_only_reads_the_prompt(server: LiveServer, stream: bool) -> None:
    fields = {**GREEDY, "prompt": "hello " * 40, "n_predict": 0, "stream": stream, "n_probs": 1}
    response = server.http.post("/completion", json=fields)
    [body] = chunks(response) if stream else [response.json()]
    assert (body["content"], body["tokens"], body["tokens_predicted"]) == ("", [], 0)
    assert (body["stop_type"], body["truncated"]) == ("limit", False)
    repeated = post(server, **fields | {"n_predict": 1, "stream": False})
    assert repeated["timings"]["cache_n"] > 0


def test_ids_that_are_none_are_refused(server: LiveServer) -> None:
    for wrong in (10**6, -1, 2**70):
        assert refused(server, prompt=[wrong])["message"].startswith("prompt has token ids outside")
    assert refused(server, n_probs=21)["message"].startswith("n_probs must be from 0 to 20")
    for name in ("n_cmpl", "n"):
        assert refused(server, **{name: 0})["message"].startswith(f"{name} must be")
    assert refused(server, max_tokens=-2)["message"] == "max_tokens must be at least -1, got -2."
    cut = post(
        server, prompt="hello", n_predict=10**6, ignore_eos=True, response_fields=["truncated"]
    )
    assert cut == {"truncated": True}


def test_limits_have_three_names(server: LiveServer) -> None:
    for name in ("n_predict", "max_tokens", "max_completion_tokens"):
        result = post(server, prompt="hello", ignore_eos=True, **{name: 2})
        assert result["tokens_predicted"] == 2
    assert refused(server, n_predict=-2)["message"] == "n_predict must be at least -1, got -2."


def test_only_the_requested_fields_are_returned(server: LiveServer) -> None:
    names = [
        "content",
        "timings/predicted_n",
        "generation_settings/n_predict",
        "none",
        "stop/x",
        "__class__",
        "",
    ]
    for stream in (False, True):
        fields = {**GREEDY, "response_fields": names, "stream": stream}
        response = server.http.post("/completion", json=fields)
        body = chunks(response)[-1] if stream else response.json()
        content = body.pop("content")
        assert body == {"timings/predicted_n": 6, "generation_settings/n_predict": 6}
        assert (content == "") == stream
    assert "response_fields" in refused(server, response_fields=["content"] * 257)["message"]


def test_grammars_and_schemas_hold(server: LiveServer) -> None:
    fields = {"prompt": "x", "n_predict": 40, "temperature": 0}
    assert post(server, **fields, grammar='root ::= "yes" | "no"')["content"] in {"yes", "no"}
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    result = post(server, **fields, json_schema={**schema, "additionalProperties": False})
    assert json.loads(result["content"]) == {"a": 1}
    assert post(server, **fields, grammar="", n=1)["tokens_predicted"] > 0
    error = refused(server, grammar='root ::= "a"', json_schema={})
    assert "json_schema cannot be combined with grammar" in error["message"]


SAMPLERS: Fields = {  # those that are not there: a value that turns each on, and one for off
    "mirostat": (2, 0),
    "dry_multiplier": (0.8, 0.0),
    "xtc_probability": (0.5, 0),
    "typical_p": (0.5, 1.0),
    "dynatemp_range": (0.5, 0),
    "top_n_sigma": (1, -1),
    "adaptive_target": (0.5, -1.0),
}


def test_other_samplers_are_off_and_named(server: LiveServer, strict: LiveServer) -> None:
    fields = {"prompt": "hello", "n_predict": 1}
    on, off = ({name: values[index] for name, values in SAMPLERS.items()} for index in (0, 1))
    answer = server.http.post("/completion", json=fields | on)
    named = answer.headers["twostroke-ignored"]
    assert all(name in named for name in SAMPLERS)
    settings = answer.json()["generation_settings"]
    assert all(settings.get(name, value) == value for name, value in off.items())
    assert "twostroke-ignored" not in server.http.post("/completion", json=fields | off).headers
    for name, value in on.items():
        assert name in refused(strict, **{name: value})["message"]
    assert "lora" in refused(server, lora=[{"id": 0, "scale": 1}])["message"]


def test_streams_with_probabilities_have_one_token_each(server: LiveServer) -> None:
    fields = {**GREEDY, "n_predict": 24, "n_probs": 2}
    whole_answer = post(server, **fields, return_tokens=True)
    *parts, last = chunks(server.http.post("/completion", json=fields | {"stream": True}))
    assert last["stop"]
    assert [len(part["completion_probabilities"]) for part in parts] == [1] * 24
    assert [part["tokens"] for part in parts] == [[token] for token in whole_answer["tokens"]]
    scored = [part["completion_probabilities"][0] for part in parts]
    assert scored == whole_answer["completion_probabilities"]
    assert "".join(part["content"] for part in parts) == whole_answer["content"]


def test_probabilities_after_sampling_match_the_sampler(server: LiveServer) -> None:
    fields = {"prompt": "hello", "n_predict": 4, "post_sampling_probs": True}
    greedy = post(server, **fields, n_probs=3, temperature=0, repeat_penalty=1.5)
    assert greedy["generation_settings"]["post_sampling_probs"]
    for completion_probability in greedy["completion_probabilities"]:
        assert (completion_probability["prob"], completion_probability["top_probs"][0]["id"]) == (
            1.0,
            completion_probability["id"],
        )
        assert [other["prob"] for other in completion_probability["top_probs"]] == [1.0, 0.0, 0.0]
        assert not {"logprob", "top_logprobs"} & completion_probability.keys()
    drawing = {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    sampled = post(server, **fields, **drawing, n_probs=8)
    raw = post(server, **(fields | {"post_sampling_probs": False}), **drawing, n_probs=8)
    for completion_probability, before in zip(
        sampled["completion_probabilities"], raw["completion_probabilities"], strict=True
    ):
        probabilities = [other["prob"] for other in completion_probability["top_probs"]]
        assert sum(probabilities) == pytest.approx(1)
        assert completion_probability["prob"] in [other for other in probabilities if other > 0]
        shares = [math.exp(other["logprob"] / 1.5) for other in before["top_logprobs"]]
        for index in range(1, 8):
            if probabilities[index]:
                ratio = shares[index] / shares[0]
                assert probabilities[index] / probabilities[0] == pytest.approx(ratio)
            else:
                assert sum(shares[:index]) >= 0.9 * sum(shares) or shares[index] < shares[0] / 100


@pytest.mark.parametrize(
    "fields", [{"top_k": 40}, {"top_k": 0}, {"repeat_penalty": 1.1}, {"grammar": 'root ::= "a"'}]
)
def test_probabilities_that_need_more_tokens_are_refused(
    server: LiveServer, fields: Fields
) -> None:
    sampled_fields = {"temperature": 1, "top_k": 4, "n_probs": 2, "post_sampling_probs": True}
    assert (
        "needs temperature 0, or top_k" in refused(server, **(sampled_fields | fields))["message"]
    )


def test_errors_have_llama_servers_form(server: LiveServer) -> None:
    error = server.http.post("/completion", json={"prompt": "hello " * 600}).json()["error"]
    assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
    assert error["n_ctx"] == 512
    assert error["n_prompt_tokens"] > 512
    assert "at least 600" in refused(server, prompt=[5] * 600 + ["hello"])["message"]
    for path, status, kind in (
        ("/rerank", 404, "not_found_error"),
        ("/props", 405, "not_supported_error"),
    ):
        error = server.http.post(path, json={}).json()["error"]
        assert (error["code"], error["type"]) == (status, kind)


def test_openais_paths_take_llama_servers_fields(server: LiveServer) -> None:
    fields: Fields = {"n_predict": 2, "ignore_eos": True, "cache_prompt": True, "id_slot": 0}
    for path, text in (("/v1/chat/completions", chat_body()), ("/v1/completions", {"prompt": "x"})):
        body = {**text, **fields, "timings_per_token": True, "repeat_penalty": 1.2}
        answer = server.http.post(path, json=body).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["timings"]["predicted_n"] == 2
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, finish, usage, _ = events(server.http.post(path, json=body | options).text)
        assert finish["timings"]["predicted_n"] == usage["timings"]["predicted_n"] == 2
        assert usage["choices"] == []
    full = server.chat(n_predict=-1, ignore_eos=True).json()["usage"]
    assert full["total_tokens"] == 512
    error = server.chat(repeat_penalty=-1).json()["error"]
    assert error["message"].startswith("repeat_penalty must be")


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": 'root ::= "[1]"'},
        {"json_schema": {"const": [1]}},
        {"response_format": {"type": "json_schema", "schema": {"const": [1]}}},
    ],
)
def test_openais_paths_keep_to_llama_servers_forms(server: LiveServer, form: Fields) -> None:
    answer = server.chat(max_tokens=40, temperature=0, **form).json()["choices"][0]
    assert json.loads(answer["message"]["content"]) == [1]


def test_a_json_object_may_have_a_schema(server: LiveServer) -> None:
    schema = {"const": {"a": 1}}
    form = {"response_format": {"type": "json_object", "schema": schema}}
    answer = server.chat(max_tokens=40, temperature=0, **form).json()["choices"][0]
    assert json.loads(answer["message"]["content"]) == {"a": 1}
    error = server.chat(response_format={"type": "json_schema"}).json()["error"]
    assert error["message"] == "response_format.json_schema is missing."


def test_progress_of_a_long_prompt_is_shown_step_by_step(tmp_path: Path) -> None:
    with live_server(tmp_path, token_budget=16, max_running=4) as server:
        text, other = "hello of the " * 30, "to be " * 60  # each is cached after its first use
        fields: Fields = {"stream": True, "return_progress": True, "max_tokens": 1}
        bodies = {"/completion": {"prompt": text}, "/v1/completions": {"prompt": other}}
        bodies["/v1/chat/completions"] = {"messages": [{"role": "user", "content": text}]}
        for path, body in bodies.items():
            response = server.http.post(path, json=body | fields)
            lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
            results = [json.loads(line.removeprefix("data: ")) for line in lines]
            progress_parts = [
                result["prompt_progress"] for result in results if "prompt_progress" in result
            ]
            counts = [progress["processed"] for progress in progress_parts]
            assert len(counts) > 2, path
            assert counts == sorted(set(counts))
            assert counts[0] == progress_parts[0]["cache"]
            assert counts[-1] == progress_parts[-1]["total"]
        repeated = server.http.post("/completion", json=bodies["/completion"] | fields)
        first, *_ = chunks(repeated)
        assert first["prompt_progress"]["cache"] > 0
        plain = post(server, prompt=text, n_predict=2, temperature=0, return_progress=True)
        assert plain["tokens_predicted"] == 2


def test_paths_may_lack_the_version(server: LiveServer) -> None:
    assert server.http.post("/chat/completions", json=chat_body(max_tokens=1)).json()["choices"]
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()
    assert server.http.get("/v1/health").json() == server.http.get("/health").json()
    error = server.http.post("/chat/completions", json={}).json()["error"]
    assert (error["code"], error["message"]) == (400, "messages is missing.")


def test_chat_without_the_version_has_llama_servers_form(server: LiveServer) -> None:
    """llama-server's clients expect that the first event has null content."""
    fields = chat_body(max_tokens=2, stream=True)
    firsts = [
        events(server.http.post(path, json=fields).text)[0]["choices"][0]["delta"]
        for path in ("/chat/completions", "/v1/chat/completions")
    ]
    assert firsts == [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "refusal": None},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_conversations_tell_their_tokens(server: LiveServer, stream: bool) -> None:
    fields = {"messages": [{"role": "user", "content": "hello " * 600}], "stream": stream}
    error = server.http.post("/chat/completions", json=fields).json()["error"]
    assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
    assert error["n_prompt_tokens"] > error["n_ctx"] == server.client.card.context_length
    other = server.http.post("/v1/chat/completions", json=fields).json()["error"]
    assert other["code"] == "context_length_exceeded"
    assert (other["n_prompt_tokens"], other["n_ctx"]) == (error["n_prompt_tokens"], error["n_ctx"])
