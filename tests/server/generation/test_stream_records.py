"""A stream that another server continues is the stream of one server."""

from __future__ import annotations

import asyncio
import math
import random
import re
from base64 import b64decode, b64encode
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from support.remote import options
from support.server_thread import ServerThread
from support.servers import chat_body, live_server
from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.errors import BackendError, EngineDiedError
from twostroke.core.request import NO_HINTS, FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.engine import build
from twostroke.engine.output import Output, Timings, Usage
from twostroke.engine.process.messages import encode
from twostroke.engine.process.served import LocalEngine
from twostroke.server.app import Api
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.generation.answer_reuse import AnswerSource
from twostroke.server.generation.job import EncodedJob, Job
from twostroke.server.generation.responses import EventStream
from twostroke.server.generation.running import RunningAnswers
from twostroke.server.generation.stream_records import (
    ReplayError,
    StreamOrigin,
    StreamRecord,
    StreamRecorder,
    StreamReplay,
    answer_key,
)
from twostroke.server.http.request_context import STATE_KEY
from twostroke.server.http.router_messages import RECORD_MARK, split_body
from twostroke.server.middleware import build_app
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
_LINE = re.compile(rb": twostroke-record (\S*)\n\n?")
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat_body(max_tokens=30, temperature=1.5, ignore_eos=True)),
    "chat with choices, log-probabilities and usage": (
        "/v1/chat/completions",
        chat_body(
            max_tokens=25,
            n=3,
            seed=5,
            logprobs=True,
            top_logprobs=2,
            stream_options={"include_usage": True},
        ),
    ),
    "chat with a tool": (
        "/v1/chat/completions",
        chat_body(max_tokens=60, tools=[TOOL], tool_choice="required", seed=3),
    ),
    "chat with a schema": (
        "/v1/chat/completions",
        chat_body(
            max_tokens=60,
            seed=1,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        ),
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["one", "two"], "max_tokens": 20, "echo": True, "logprobs": 1, "seed": 2},
    ),
    "responses": (
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 30, "temperature": 1.2, "store": False},
    ),
    "responses with a tool": (
        "/v1/responses",
        {
            "input": "hello",
            "max_output_tokens": 60,
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "tool_choice": "required",
        },
    ),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30},
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 30}},
    ),
    "llama-server": ("/completion", {"prompt": "hello", "n_predict": 30, "n_probs": 1}),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server whose arithmetic does not depend on what runs together."""
    tiny = Tiny(context_length=4096)
    model = write_tiny_gguf(tmp_path_factory.mktemp("records") / "tiny.gguf", tiny)
    with (
        build(str(model), options()) as engine,
        closing(LocalEngine(engine.client)) as local_engine,
        closing(Api(local_engine, ServeOptions(drain_s=1), None, None)) as api,
        closing(ServerThread(build_app(api), api)) as thread,
    ):
        yield f"http://127.0.0.1:{thread.port}"


def stream(url: str, content: bytes, header: str) -> bytes:
    headers = {"content-type": "application/json", "x-twostroke-resume": header}
    answer = httpx.post(url, content=content, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-twostroke-resume"] == "1"
    return answer.content


def normalized(data: bytes) -> list[bytes]:
    """Return the events of a stream, without the numbers that depend on time, in a fixed order.

    The order of several answers' events depends on time, too.
    """
    names = rb"created_at|completed_at|[a-z_]*duration|[a-z_]*_ms|[a-z_]*per_second"
    data = re.sub(rb'"(' + names + rb')":("[^"]*"|[0-9.]+)', b"", data)
    data = re.sub(rb"(call|toolu)_[0-9a-f]+", b"", data)
    return sorted(data.splitlines())


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_continues_after_any_record(url: str, name: str) -> None:
    path, fields = REQUESTS[name]
    body = msgspec.json.encode({"model": "tiny", "stream": True} | fields)
    whole = stream(url + path, body, "new")
    units = list(_LINE.finditer(whole))
    assert len(units) > 1  # a busy machine sends several tokens in one
    expected = normalized(_LINE.sub(b"", whole))
    for cut in random.Random(name).sample(units, min(4, len(units))) + units[-1:]:
        index = units.index(cut)
        records = b"".join(b"\n" + unit[1] for unit in units[: index + 1])
        begin = _LINE.sub(b"", whole[: cut.end()])
        rest = stream(url + path, body + records, str(len(body)))
        joined = normalized(begin + _LINE.sub(b"", rest))
        assert joined == expected, (index, len(units))


def refusal(url: str, content: bytes, header: str) -> tuple[int, str]:
    headers = {"content-type": "application/json", "x-twostroke-resume": header}
    answer = httpx.post(url, content=content, headers=headers, timeout=60, trust_env=False)
    return answer.status_code, answer.json()["error"]["message"]


def test_records_that_do_not_belong_to_the_request_are_refused(url: str) -> None:
    path, fields = REQUESTS["chat"]
    body = msgspec.json.encode({"model": "tiny", "stream": True} | fields)
    [first, second, *_] = [unit[1] for unit in _LINE.finditer(stream(url + path, body, "new"))]
    other = body.replace(b"hello", b"hullo")
    length = str(len(body))
    assert refusal(url + path, other + b"\n" + first, length)[0] == 409
    assert refusal(url + path, body + b"\n" + second, length)[0] == 400
    assert refusal(url + path, body + b"\n" + first[:-9], length)[0] == 400
    assert refusal(url + path, body + b"\nkA==", length)[0] == 400


@pytest.mark.parametrize(
    "make_output",
    [
        lambda _: Output(1, "", (5,)),
        lambda _: Output(0, "", (10**6,)),
        lambda num_prompt: Output(0, "", (5,), usage=Usage(num_prompt - 1, 0, 1)),
        lambda num_prompt: Output(0, "", (5,), usage=Usage(num_prompt, 0, -1)),
        lambda num_prompt: Output(0, "", (5,), usage=Usage(num_prompt, num_prompt + 1, 1)),
    ],
)
def test_impossible_records_are_refused(url: str, make_output: Callable[[int], Output]) -> None:
    """A client that sends records of its own gains nothing."""
    path, fields = REQUESTS["chat"]
    body = msgspec.json.encode({"model": "tiny", "stream": True} | fields)
    first = _LINE.search(stream(url + path, body, "new"))
    assert first is not None
    record = msgspec.msgpack.decode(b64decode(first[1]), type=StreamRecord, dec_hook=_no_type)
    assert record.outputs[0].usage is not None
    output = make_output(record.outputs[0].usage.prompt_tokens)
    forged = b64encode(encode(replace(record, outputs=[output])))
    assert refusal(url + path, body + b"\n" + forged, str(len(body)))[0] == 400


_ENDED = {"finish_reason": FinishReason.STOP, "timings": Timings(1.0, 1.0, 1.0, 1.0)}
# Last outputs that no server writes, from the length of the prompt.
FORGED: dict[str, Callable[[int], Output]] = {
    "no usage": lambda _: Output(0, "x", (5,), **_ENDED),
    "no times": lambda n: Output(
        0, "x", (5,), finish_reason=FinishReason.STOP, usage=Usage(n, 0, 1)
    ),
    "cancelled": lambda n: Output(
        0, "x", (5,), usage=Usage(n, 0, 1), **_ENDED | {"finish_reason": FinishReason.CANCEL}
    ),
    "no time": lambda n: Output(
        0,
        "x",
        (5,),
        usage=Usage(n, 0, 1),
        **_ENDED | {"timings": Timings(math.nan, math.inf, -math.inf, 1e300)},
    ),
}
# Outputs that an encoder of one of the protocols cannot read.
STRANGE: dict[str, Callable[[int], Output]] = {
    "no usage at the first token": lambda _: Output(0, "x", (5, 6, 7)),
    "too many scores": lambda _: Output(0, "x", (5,), logprobs=(None,) * 9),
    "too many scores of the prompt": lambda _: Output(0, "x", (5,), prompt_logprobs=(None,) * 9),
    "an end that breaks the schema": lambda n: Output(0, "x", (5,), usage=Usage(n, 0, 1), **_ENDED),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_forged_last_outputs_are_errors_of_the_request(url: str, name: str) -> None:
    path, fields = REQUESTS[name]
    body = msgspec.json.encode({"model": "tiny", "stream": True} | fields)
    lines = [unit[1] for unit in _LINE.finditer(stream(url + path, body, "new"))]
    records = [
        msgspec.msgpack.decode(b64decode(line), type=StreamRecord, dec_hook=_no_type)
        for line in lines
    ]
    outputs = [output for record in records for output in record.outputs]
    usage = next(output.usage for output in outputs if output.usage is not None)

    def answer(make_output: Callable[[int], Output]) -> httpx.Response:
        forged = replace(records[0], outputs=[make_output(usage.prompt_tokens)])
        headers = {"content-type": "application/json", "x-twostroke-resume": str(len(body))}
        content = body + b"\n" + b64encode(encode(forged))
        return httpx.post(url + path, content=content, headers=headers, timeout=60, trust_env=False)

    for label, make_output in FORGED.items():
        refused = answer(make_output)
        assert (refused.status_code, "records of the stream" in refused.text) == (400, True), label
    for label, make_output in STRANGE.items():
        assert answer(make_output).status_code in {200, 400}, label


@pytest.mark.parametrize("id_", ["", "chatcmpl-1", "x" * 10_000, "resp_" + "é" * 32, 'a"\n\nb'])
def test_records_with_an_id_that_no_server_makes_are_refused(url: str, id_: str) -> None:
    path, fields = REQUESTS["responses"]
    body = msgspec.json.encode({"model": "tiny", "stream": True} | fields)
    first = _LINE.search(stream(url + path, body, "new"))
    assert first is not None
    record = msgspec.msgpack.decode(b64decode(first[1]), type=StreamRecord, dec_hook=_no_type)
    forged = replace(record, origin=replace(record.origin, response_id=id_))
    content = body + b"\n" + b64encode(encode(forged))
    assert refusal(url + path, content, str(len(body)))[0] == 400


def _no_type(_type: type, _value: Any) -> Any:
    raise ValueError


def test_a_body_without_records_stays_whole() -> None:
    assert split_body(b"{}", "") == (b"{}", [])
    assert split_body(b"{}", "new") == (b"{}", [])
    assert split_body(b"{}\nYQ==\nYg==", "2") == (b"{}", [b"YQ==", b"Yg=="])
    assert split_body(b"{}", "99999999999999999999") == (b"{}", [])
    assert RECORD_MARK.startswith(b":")


def test_a_stream_is_not_continued_by_a_model_that_was_never_loaded() -> None:
    """Its arithmetic is not known yet, and need not be that of the first server."""
    params = SamplingParams(temperature=0, seed=1)
    encoded = EncodedJob([[1, 2]], params, NO_HINTS)
    origin = StreamOrigin(answer_key("", encoded), "chatcmpl-1", 0, 1)
    recorder = StreamRecorder(b"\n", StreamReplay(origin, [], 0))
    with pytest.raises(ReplayError, match="not loaded"):
        recorder.begin(Mock(), encoded, numerics="")


def test_other_work_goes_on_while_outputs_are_replayed() -> None:
    async def no_outputs() -> AsyncIterator[Output]:
        return
        yield

    async def run() -> int:
        replay = StreamReplay(StreamOrigin(b"", "", 0, 1), [Output(0, "", ())] * 1000, 0)
        job = Job(None, ([1, 2],), SamplingParams())
        submit = AsyncMock(return_value=(no_outputs(), AnswerSource.COMPUTED))
        answers = await RunningAnswers.start(
            Mock(),
            job,
            encoded=EncodedJob([[1, 2]], job.params, NO_HINTS),
            metrics=Mock(),
            running=set(),
            submit=submit,
            recorder=StreamRecorder(b"\n", replay),
        )
        num_rounds = 0

        async def count_rounds() -> None:
            nonlocal num_rounds
            while True:
                await asyncio.sleep(0)
                num_rounds += 1

        other_work = asyncio.create_task(count_rounds())
        assert len([output async for output in answers]) == 1000
        other_work.cancel()
        return num_rounds

    assert asyncio.run(run()) >= 20


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (EngineDiedError("The engine died."), b": twostroke-lost engine_died\n\n"),
        (BackendError("The device failed."), b"failed: The device failed."),
    ],
)
def test_only_errors_of_the_request_end_a_recorded_stream(error: Exception, end: bytes) -> None:
    """Another server continues the stream after the others, so it is not stored as failed."""

    async def run() -> bytes:
        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def fail() -> Any:
            await stream_._begin(send)
            raise error

        sent: list[bytes] = []
        encoder = Mock()
        encoder.write = lambda event: b"failed: " + str(event.error).encode()
        recorder = StreamRecorder(b"\n\n", None)
        stream_ = EventStream(fail, encoder, ServeOptions(), recorder=recorder)
        scope = {"type": "http", "state": {STATE_KEY: Mock(request_id="r", error=None)}}
        async with aclosing(stream_._events(scope)) as parts:
            return b"".join([part async for part in parts])

    assert asyncio.run(run()) == end


def test_a_server_with_keys_records_only_for_its_router(tmp_path: Path) -> None:
    keys = ApiKeys({"k": "anna"})
    keys.set_router_key("r" * 32)
    with live_server(tmp_path, ServeOptions(drain_s=1, api_keys=keys)) as server:
        for key, is_router in (("k", False), ("r" * 32, True)):
            headers = {"authorization": f"Bearer {key}", "x-twostroke-resume": "new"}
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "hello", "max_tokens": 3, "stream": True},
                headers=headers | ({"x-twostroke-tenant": "anna 1"} if is_router else {}),
                trust_env=False,
            )
            assert answer.status_code == 200, answer.text
            assert ("x-twostroke-resume" in answer.headers) is is_router
            assert (b": twostroke-record " in answer.content) is is_router
