"""OpenAI's Responses API, as clients see it: the response object, and the stream's events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.response_events import events_of, kinds_of, plain
from support.servers import live_server
from support.tiny import EOS_ID
from twostroke.core.options import SpeculationOptions

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}


def send_request(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"input": "hello", "max_output_tokens": 8, "temperature": 0, **fields}
    return server.http.post(PATH, json=body)


def answer(server: LiveServer, **fields: Any) -> Fields:
    response = send_request(server, **fields)
    assert response.status_code == 200, response.text
    body: Fields = response.json()
    return body


def stream(server: LiveServer, **fields: Any) -> list[Fields]:
    """Return a stream's events, after checking their names and numbers."""
    response = send_request(server, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.text)


def text_of(body: Fields) -> str:
    parts = [part for item in body["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts)


def test_answer_has_openais_shape_and_chats_text(server: LiveServer) -> None:
    chat = server.chat(max_tokens=8, temperature=0).json()
    body = answer(server, model="tiny")
    assert body["id"].startswith("resp_")
    assert body["created_at"] > 1_700_000_000
    (item,) = body["output"]
    assert item["id"].startswith("msg_")
    text = chat["choices"][0]["message"]["content"]
    assert plain(body) == {
        "object": "response",
        "status": "incomplete",
        "background": False,
        "conversation": None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": None,
        "max_output_tokens": 8,
        "max_tool_calls": None,
        "model": "tiny",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [
                    {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
                ],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 0.95,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 18,
            "input_tokens_details": {"cache_write_tokens": 0},
            "output_tokens": 8,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
            "total_tokens": 26,
        },
        "user": None,
        "metadata": {},
    }


def test_an_answer_that_ends_by_itself_is_completed(server: LiveServer, hello: Fields) -> None:
    bias = dict.fromkeys(hello["logit_bias"], 80) | {str(EOS_ID): 100}
    fields = {"logit_bias": bias, "min_tokens": 2}
    body = answer(server, **fields)
    assert (body["status"], body["incomplete_details"]) == ("completed", None)
    assert body["completed_at"] >= body["created_at"]
    assert body["output"][0]["status"] == "completed"
    assert text_of(body) == "hellohello"
    last = stream(server, **fields)[-1]
    assert last["type"] == "response.completed"
    assert plain(last["response"]) == plain(body)


def test_events_come_in_their_order_and_make_up_the_whole(server: LiveServer) -> None:
    body = answer(server)
    events = stream(server)
    kinds = kinds_of(events)
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == end
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert len(kinds) > 9

    created, in_progress, added, part = events[:4]
    for event in (created, in_progress):
        first = event["response"]
        assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    done, part_done, item_done, last = events[-4:]
    joined = "".join(event["delta"] for event in events[4:-4])
    assert joined == done["text"] == part_done["part"]["text"] == text_of(body)
    assert item_done["item"] == last["response"]["output"][0]
    assert plain(last["response"]) == plain(body)

    assert len({event["response"]["id"] for event in (created, in_progress, last)}) == 1
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {added["item"]["id"], item_done["item"]["id"]}
    assert {event["output_index"] for event in events if "output_index" in event} == {0}
    assert {event["content_index"] for event in events if "content_index" in event} == {0}


def test_an_answer_of_nothing_is_an_empty_message(server: LiveServer) -> None:
    fields = {"logit_bias": {str(EOS_ID): 100}}
    body = answer(server, **fields)
    assert body["output"][0]["content"][0]["text"] == ""
    events = stream(server, **fields)
    assert "output_text.delta" not in kinds_of(events)
    assert plain(events[-1]["response"]) == plain(body)


def test_concatenated_deltas_equal_the_whole(server: LiveServer) -> None:
    for seed in range(8):
        fields: Fields = {"max_output_tokens": 24, "seed": seed, "temperature": 1.3}
        events = stream(server, **fields)
        deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
        assert "".join(deltas) == text_of(answer(server, **fields))


def test_logprobs_come_where_they_are_included(server: LiveServer) -> None:
    fields: Fields = {"include": [LOGPROBS], "top_logprobs": 2}
    body = answer(server, **fields)
    assert body["top_logprobs"] == 2
    tokens = body["output"][0]["content"][0]["logprobs"]
    assert len(tokens) == 8
    for token in tokens:
        assert token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(token["top_logprobs"]) == 2
    events = stream(server, **fields)
    deltas = [event["logprobs"] for event in events if event["type"].endswith("delta")]
    assert [token for delta in deltas for token in delta] == tokens
    done = next(event for event in events if event["type"].endswith("text.done"))
    assert done["logprobs"] == tokens
    bare = answer(server, include=[LOGPROBS])["output"][0]["content"][0]["logprobs"]
    assert [token["top_logprobs"] for token in bare] == [[]] * 8


@pytest.mark.parametrize("form", [FORM, {"format": {"type": "json_object"}}])
def test_answers_keep_to_a_form(server: LiveServer, form: Fields) -> None:
    body = answer(server, text=form, max_output_tokens=200, temperature=1.0, seed=1)
    assert body["text"]["format"]["type"] == form["format"]["type"]
    if body["status"] == "completed":
        assert isinstance(json.loads(text_of(body)), dict)
    if form is FORM:
        assert json.loads(text_of(body)).keys() == {"ok"}
        assert body["text"]["format"] == FORM["format"] | {"description": None}


def test_responses_repeat_the_request_options(server: LiveServer) -> None:
    fields: Fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "top_p": 0.5,
        "temperature": 0.25,
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
        "truncation": "auto",
        "reasoning": {"effort": "none", "summary": None},
        "store": False,
    }
    body = answer(server, **fields)
    assert {key: body[key] for key in fields} == fields


def test_fields_that_change_nothing_are_accepted(server: LiveServer) -> None:
    neutral: Fields = {
        "background": False,
        "conversation": None,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"ttl": "30m"},
        "reasoning": {"effort": None, "summary": "auto"},
        "service_tier": "auto",
        "text": {"verbosity": "medium"},
        "tools": [],
        "tool_choice": "auto",
        "n": 1,
        "stream_options": {"include_obfuscation": False},
    }
    assert plain(stream(server, **neutral)[-1]["response"]) == plain(answer(server))


def test_sampling_fields_of_other_engines_work(server: LiveServer) -> None:
    fields: Fields = {"temperature": 1.5, "max_output_tokens": 12}
    first_text, other = (text_of(answer(server, seed=seed, **fields)) for seed in (1, 2))
    assert first_text != other
    assert first_text == text_of(answer(server, seed=1, **fields))
    greedy = text_of(answer(server, max_output_tokens=12))
    assert text_of(answer(server, top_k=1, seed=3, **fields)) == greedy
    assert text_of(answer(server, guided_choice=["yes"], max_output_tokens=12)) == "yes"
    timed = answer(server, return_timings=True)
    assert 0 <= timed["timings"]["queue_s"] <= timed["timings"]["e2e_s"]
    assert "timings" in stream(server, return_timings=True)[-1]["response"]


def test_a_prediction_is_used_and_counted(tmp_path: Path) -> None:
    with live_server(tmp_path, speculation=SpeculationOptions("ngram", count=4)) as server:
        fields: Fields = {"max_output_tokens": 30, "ignore_eos": True}
        body = answer(server, speculate="off", **fields)
        text = text_of(body)
        predicted = answer(server, prediction={"type": "content", "content": text}, **fields)
        assert text_of(predicted) == text
        assert predicted["usage"]["output_tokens_details"]["accepted_prediction_tokens"] > 0


def test_cached_tokens_are_reported(server: LiveServer) -> None:
    details = [
        answer(server, input="world of responses " * 4)["usage"]["input_tokens_details"]
        for _ in range(2)
    ]
    assert details[0]["cached_tokens"] == 0
    assert details[1]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        ({"input": None}, "input is missing.", "input"),
        ({"input": []}, "input is an empty list: give at least one item.", "input"),
        ({"conversation": 1}, "conversation must be", "conversation"),
        ({"prompt": {"id": "p"}}, "prompt is not supported yet: leave it out.", "prompt"),
        ({"n": 2}, "n is not supported yet: leave it out.", "n"),
        ({"text": {"format": {"type": "x"}}}, "got 'x'", "text.format.type"),
        ({"max_tokens": 5}, "Did you mean 'max_output_tokens'?", "max_tokens"),
        ({"messages": []}, "Did you mean 'input'?", "messages"),
        ({"response_format": {"type": "text"}}, "mean 'text.format'?", "response_format"),
        ({"max_output_tokens": 0}, "must be -1 or at least 1, got 0", "max_output_tokens"),
        ({"min_tokens": 9}, "at most max_output_tokens (8), got 9.", "min_tokens"),
        ({"temperature": -1}, "temperature must be from 0", "temperature"),
        ({"top_logprobs": 2}, f"when include has '{LOGPROBS}'.", "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "from 0 to 20, got 21", "top_logprobs"),
        ({"truncation": "some"}, "truncation", "truncation"),
        ({"text": FORM, "guided_regex": "a"}, "cannot be combined", "guided_regex"),
    ],
)
def test_invalid_and_unknown_ids_are_refused(
    server: LiveServer, fields: Fields, sentence: str, param: str
) -> None:
    response = send_request(server, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert sentence in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_too_much_input_is_refused_in_openais_words(server: LiveServer) -> None:
    response = send_request(server, input="the world " * 300)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 512 tokens.")
    assert error["param"] == "input"


def test_another_model_is_not_found(server: LiveServer) -> None:
    response = send_request(server, model="tini")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_failure_in_mid_stream_is_a_failed_response(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        token = server.client.card.tokenizer.find("hello")
        body = {"input": "a", "stream": True, "temperature": 0, "logit_bias": {str(token): 100}}
        with server.http.stream("POST", PATH, json=body) as response:
            chunks = response.iter_text()
            text = next(chunks)
            while "hello" not in text:
                text += next(chunks)
            server.backend.poison = token
            text += "".join(chunks)
        events = events_of(text)
        assert kinds_of(events)[-1] == "failed"
        failed = events[-1]["response"]
        assert failed["status"] == "failed"
        assert failed["error"] == {
            "code": "server_error",
            "message": "The engine failed on this request.",
        }
        deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
        assert text_of(failed) == "".join(deltas)
        assert failed["output"][0]["status"] == "incomplete"
        assert "secret" not in text
        assert server.http.get(f"{PATH}/{failed['id']}").json() == failed
        server.wait_idle()
