"""Reasoning in the Responses API, for answers that the tests assemble."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.core.constraint import ReasoningSection
from twostroke.core.json_io import encode_json
from twostroke.core.request import FinishReason
from twostroke.core.step import TokenLogprobs
from twostroke.engine.chat.reader import AnswerFormat
from twostroke.engine.output import Output, Timings, Usage, join
from twostroke.server.generation.protocol import ResponseInfo
from twostroke.server.generation.response_store import ResponseStore, Tenant
from twostroke.server.protocols.common.listing import ENCRYPTED_REASONING, LOGPROBS
from twostroke.server.protocols.responses.exchange import read
from twostroke.server.protocols.responses.reply import ResponsesEncoder
from twostroke.server.protocols.responses.request import ResponsesRequest

if TYPE_CHECKING:
    from support.servers import LiveServer

Fields = dict[str, Any]

THOUGHT, TEXT = "the world is in", "hello world"
READING = AnswerFormat(preface=ReasoningSection("<think>", "</think>"))


def reply_to(server: LiveServer, **fields: Any) -> ResponseInfo:
    tokenizer = server.client.card.tokenizer
    tenant = Tenant("", ResponseStore(10, 10**6))
    job = read(ResponsesRequest(input="hello", **fields), tenant)
    return ResponseInfo("resp_1", 0, "tiny", job, [[1]], tokenizer, READING)


def outputs(server: LiveServer, text: str, reason: FinishReason) -> list[Output]:
    """Return an answer as engine outputs, one for each token."""
    tokenizer = server.client.card.tokenizer
    ids = tokenizer.encode(text)
    usage, timings = Usage(3, 0, len(ids)), Timings(0.0, 0.0, 1.0, 2.0)
    results = [
        Output(0, tokenizer.decode([id_]), (id_,), (TokenLogprobs(-1.0, (), ()),)) for id_ in ids
    ]
    results[0].usage = usage
    last = Output(0, "", (), (), finish_reason=reason, usage=usage, timings=timings)
    assert "".join(result.text for result in results) == text
    return [*results, last]


def streamed(reply: ResponseInfo, answer: list[Output]) -> list[Fields]:
    reader, encoder = reply.reader(), ResponsesEncoder(reply)
    usage = answer[-1].usage
    assert usage is not None
    events = [*(event for piece in answer for event in reader.read(piece)), reader.finish(usage)]
    text = b"".join(encoder.write(event) for event in events)
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: ")]


def whole_body(reply: ResponseInfo, answer: list[Output]) -> Fields:
    usage = answer[-1].usage
    assert usage is not None
    events = reply.reader().read_whole([join(answer)], usage)
    body: Fields = json.loads(encode_json(ResponsesEncoder(reply).whole_response(events)))
    return body


def test_reasoning_is_an_item_before_the_message(shared_server: LiveServer) -> None:
    text = f"<think>{THOUGHT}</think>{TEXT}"
    answer = outputs(shared_server, text, FinishReason.STOP)
    body = whole_body(reply_to(shared_server), answer)
    thought, message = body["output"]
    assert thought.pop("id").startswith("rs_")
    assert thought == {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }
    assert message["content"][0]["text"] == TEXT
    details = body["usage"]["output_tokens_details"]
    tokenizer = shared_server.client.card.tokenizer
    assert details["reasoning_tokens"] == len(tokenizer.encode(text)) - len(tokenizer.encode(TEXT))

    events = streamed(reply_to(shared_server), answer)
    kinds = [event["type"].removeprefix("response.") for event in events]
    first = kinds.index("reasoning_text.done")
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:first]) == {"reasoning_text.delta"}
    next_kinds = [
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
    ]
    assert kinds[first + 1 : first + 5] == next_kinds
    for kind, output_index, expected_text in (
        ("reasoning_text", 0, THOUGHT),
        ("output_text", 1, TEXT),
    ):
        mine = [event for event in events if event["type"].startswith(f"response.{kind}.")]
        assert (
            "".join(event.get("delta", "") for event in mine) == mine[-1]["text"] == expected_text
        )
        assert {event["output_index"] for event in mine} == {output_index}
        assert len({event["item_id"] for event in mine}) == 1
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
    assert last["usage"] == body["usage"]


def test_reasoning_that_is_cut_is_all_there_is(shared_server: LiveServer) -> None:
    answer = outputs(shared_server, f"<think>{THOUGHT}", FinishReason.LENGTH)
    body = whole_body(reply_to(shared_server), answer)
    (thought,) = body["output"]
    assert (body["status"], thought["status"]) == ("incomplete", "incomplete")
    assert thought["content"][0]["text"] == THOUGHT
    (streamed_thought,) = streamed(reply_to(shared_server), answer)[-1]["response"]["output"]
    assert streamed_thought["content"] == thought["content"]


@pytest.mark.parametrize("thought", ["", f"<think>{THOUGHT}</think>"])
def test_log_probabilities_belong_to_the_text(shared_server: LiveServer, thought: str) -> None:
    answer = outputs(shared_server, thought + TEXT, FinishReason.STOP)
    fields: Fields = {"include": [LOGPROBS]}
    expected = ["hello", " world"]
    body = whole_body(reply_to(shared_server, **fields), answer)
    tokens = body["output"][-1]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in tokens) == "".join(expected)
    events = streamed(reply_to(shared_server, **fields), answer)
    streamed_tokens = [
        token for event in events if "delta" in event for token in event.get("logprobs", ())
    ]
    assert streamed_tokens == tokens


def test_reasoning_goes_back_to_the_template(shared_server: LiveServer) -> None:
    reply = reply_to(shared_server)
    text = f"<think>{THOUGHT}</think>{TEXT}"
    first = whole_body(reply, outputs(shared_server, text, FinishReason.STOP))
    tenant = reply.job.prompts[0].tenant  # type: ignore[union-attr]
    for fields in (
        {"input": "and?", "previous_response_id": first["id"]},
        {"input": [{"role": "user", "content": "hello"}, *first["output"], _user("and?")]},
    ):
        (exchange,) = read(ResponsesRequest(**fields), tenant).prompts
        assert exchange.messages == (  # type: ignore[union-attr]
            _user("hello"),
            {"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT},
            _user("and?"),
        )


def test_clients_may_send_back_only_encrypted_reasoning(shared_server: LiveServer) -> None:
    """Codex leaves the content out, and keeps what `include` asks for."""
    text = f"<think>{THOUGHT}</think>{TEXT}"
    answer = outputs(shared_server, text, FinishReason.STOP)
    for fields, has_content in (({}, False), ({"include": [ENCRYPTED_REASONING]}, True)):
        reply = reply_to(shared_server, **fields)
        thought, message = whole_body(reply, answer)["output"]
        [*_, last] = streamed(reply_to(shared_server, **fields), answer)
        encrypted = last["response"]["output"][0].get("encrypted_content")
        assert thought.get("encrypted_content") == encrypted
        assert (encrypted is not None) == has_content
        thought |= {"content": None, "summary": []}
        items = [_user("hello"), thought, message, _user("and?")]
        tenant = reply.job.prompts[0].tenant  # type: ignore[union-attr]
        (exchange,) = read(ResponsesRequest(input=items), tenant).prompts
        sent_back = exchange.messages[1].get("reasoning_content")  # type: ignore[union-attr]
        assert sent_back == (THOUGHT if has_content else None)
    for other in ("gAAAA", encrypted[:-3] + "!", 5):
        items[1] = thought | {"encrypted_content": other}
        (exchange,) = read(ResponsesRequest(input=items), tenant).prompts
        assert "reasoning_content" not in exchange.messages[1]  # type: ignore[union-attr]


def _user(text: str) -> Fields:
    return {"role": "user", "content": text}
