"""Equal requests are computed once: in flight together, or one after the other with a cache."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.servers import LiveServer, live_server, post_bytes
from support.waiting import wait_for
from twostroke.core.errors import (
    DeadlineError,
    EngineDiedError,
    OverloadedError,
    TwostrokeError,
)
from twostroke.core.request import NO_HINTS, FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.output import Output, Timings, Usage
from twostroke.server.generation.answer_reuse import (
    AnswerReuse,
    AnswerSource,
    JoinedOutputs,
    ReuseRule,
    StoredAnswers,
    reuse_rule,
)
from twostroke.server.generation.job import EncodedJob, Job
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

HEADER = "twostroke-answer"
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
        },
    },
}
# A request of each protocol, and of each kind of answer.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12}),
    "choices": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9, "n": 3, "seed": 4}),
    "scores": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 2},
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200},
    ),
    "schema": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 20},
    ),
    "completions": ("/v1/completions", {"prompt": ["hello", "world"], "max_tokens": 9}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 9, "store": False}),
    "anthropic": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    "ollama": ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 9}}),
    "llama-server": ("/completion", {"prompt": "hello", "n_predict": 9}),
}
# Fields that tell one response from another, or the work of the server.
_OWN = {"id", "created", "created_at", "completed_at", "usage", "timings", "item_id", "call_id"}
_OWN |= {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
_OWN |= {"response_id", "prompt_eval_count", "tokens_cached", "tokens_evaluated", "obfuscation"}


def without_own(value: Any) -> Any:
    """Return a response without what each response has for itself."""
    if isinstance(value, dict):
        return {key: without_own(item) for key, item in value.items() if key not in _OWN}
    return [without_own(item) for item in value] if isinstance(value, list) else value


def greedy(name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request without randomness."""
    path, body = REQUESTS[name]
    body = {"model": "tiny", "stream": False, **body, **fields}
    if path.startswith("/api/"):
        return path, {**body, "options": {**body["options"], "temperature": 0}}
    return path, body if "seed" in body else {**body, "temperature": 0}


@pytest.fixture(scope="module")
def coalescing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server that computes equal requests in flight once, and keeps no answers."""
    with live_server(tmp_path_factory.mktemp("coalescing"), coalesces=True) as server:
        yield server


@pytest.fixture
def server(coalescing: LiveServer) -> Iterator[LiveServer]:
    """Yield this server, and wait after the test until it is idle again."""
    yield coalescing
    coalescing.wait_idle()


@pytest.fixture
def caching(tmp_path: Path) -> Iterator[LiveServer]:
    """Start a server that keeps answers."""
    options = ServeOptions(drain_s=1, answer_cache_bytes=10_000_000)
    with live_server(tmp_path, options, coalesces=True) as server:
        yield server
        server.wait_idle()


def post_together(server: LiveServer, requests: list[tuple[str, Any]]) -> list[httpx.Response]:
    """Send requests at the same time; no step begins before all have arrived."""
    with ThreadPoolExecutor(len(requests)) as threads:
        server.backend.gate.clear()
        try:
            calls = [threads.submit(server.http.post, path, json=body) for path, body in requests]
            wait_for(lambda: server.api.num_running == len(requests))
        finally:
            server.backend.gate.set()
        return [call.result() for call in calls]


@pytest.mark.parametrize("name", REQUESTS)
def test_equal_requests_in_flight_are_computed_once(server: LiveServer, name: str) -> None:
    path, body = greedy(name)
    alone = server.http.post(path, json=body, headers={"cache-control": "no-store"})
    assert HEADER not in alone.headers
    num_asked = server.client.loop.snapshot().scheduler.num_prompt_tokens
    responses = post_together(server, [(path, body)] * 5)
    sources = sorted(response.headers.get(HEADER, "computed") for response in responses)
    assert sources == ["computed"] + ["shared"] * 4
    for response in responses:
        assert without_own(response.json()) == without_own(alone.json())
    server.wait_idle()
    num_once = server.client.loop.snapshot().scheduler.num_prompt_tokens - num_asked
    server.http.post(path, json=body, headers={"cache-control": "no-store"})
    num_both = server.client.loop.snapshot().scheduler.num_prompt_tokens - num_asked
    assert num_both == 2 * num_once


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stored_answer_is_the_computed_one(caching: LiveServer, name: str) -> None:
    path, body = greedy(name)
    first = caching.http.post(path, json=body)
    second = caching.http.post(path, json=body)
    assert HEADER not in first.headers
    assert second.headers[HEADER] == "stored"
    assert without_own(second.json()) == without_own(first.json())
    assert caching.http.post(path, json=body, headers={"cache-control": "no-cache"}).is_success
    assert (
        HEADER
        not in caching.http.post(
            path, json=body, headers={"cache-control": "max-age=0, No-Store"}
        ).headers
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stored_answer_can_be_streamed(caching: LiveServer, name: str) -> None:
    path, body = greedy(name)
    whole = caching.http.post(path, json=body)
    streamed = caching.http.post(path, json={**body, "stream": True})
    again = caching.http.post(path, json={**body, "stream": True})
    assert streamed.headers[HEADER] == again.headers[HEADER] == "stored"
    alone = caching.http.post(
        path, json={**body, "stream": True}, headers={"cache-control": "no-store"}
    )
    assert HEADER not in alone.headers
    assert _text_of(streamed.text) == _text_of(alone.text)
    assert whole.is_success


def _text_of(stream: str) -> dict[Any, str]:
    """Return the joined strings of a stream's events, by where they stand."""
    texts: dict[Any, str] = {}

    def add(value: Any, place: str, choice: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in _OWN | {"logprobs", "sequence_number", "response", "probs", "type"}:
                    add(item, f"{place}.{key}", value.get("index", choice))
        elif isinstance(value, list):
            for item in value:
                add(item, place, choice)
        elif isinstance(value, str):
            is_text = place.endswith(("content", "text", "delta", "arguments", "partial_json"))
            key = (place, choice)
            texts[key] = texts.get(key, "") + value if is_text else value

    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            add(json.loads(data), "", None)
    return {key: text for key, text in texts.items() if text}


def test_usage_tells_what_was_not_computed(caching: LiveServer) -> None:
    path, body = greedy("chat")
    first, second = (caching.http.post(path, json=body).json()["usage"] for _ in range(2))
    assert "cached_tokens" not in first["completion_tokens_details"]
    assert second["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"]
    details = second["completion_tokens_details"]
    assert details["cached_tokens"] == first["completion_tokens"] == second["completion_tokens"]
    text = caching.http.get("/metrics").text
    assert 'twostroke_repeatable_requests_total{source="stored"} 1.0' in text
    assert 'twostroke_repeatable_requests_total{source="computed"} 1.0' in text
    assert "twostroke_answer_cache_answers 1.0" in text


def test_different_requests_do_not_share(server: LiveServer) -> None:
    path, body = greedy("chat")
    bodies = [
        body,
        {**body, "max_tokens": 11},
        {**body, "temperature": 1, "seed": 1},
        {**body, "temperature": 1, "seed": 2},
        {**body, "temperature": 1},
        {**body, "temperature": 1},
        {**body, "logit_bias": {"5": 1}},
        {**body, "messages": [{"role": "user", "content": "world"}]},
    ]
    responses = post_together(server, [(path, body) for body in bodies])
    assert not any(HEADER in response.headers for response in responses)


def test_an_answer_goes_on_for_others_when_its_first_client_leaves(server: LiveServer) -> None:
    path, body = greedy("chat", max_tokens=40, ignore_eos=True)
    alone = server.http.post(path, json=body, headers={"cache-control": "no-store"}).json()
    server.backend.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        try:
            first = server.connect()
            first.sendall(post_bytes(path, body))
            wait_for(lambda: server.api.num_running == 1)
            second = threads.submit(server.http.post, path, json=body)
            wait_for(lambda: server.api.num_running == 2)
            first.close()
            wait_for(lambda: server.api.num_running == 1)
        finally:
            server.backend.gate.set()
        response = second.result()
    assert response.headers[HEADER] == "shared"
    assert without_own(response.json()) == without_own(alone)


def test_no_coalescing_if_it_is_off(tmp_path: Path) -> None:
    with live_server(tmp_path, coalesces=False) as server:
        responses = post_together(server, [greedy("chat")] * 3)
        assert not any(HEADER in response.headers for response in responses)


def test_cache_control_is_read() -> None:
    def rule(*values: bytes) -> ReuseRule:
        return reuse_rule([(b"accept", b"no-store"), *((b"cache-control", v) for v in values)])

    assert rule() == rule(b"max-age=5, private") == ReuseRule()
    assert rule(b"no-cache") == rule(b"private", b"No-Cache") == ReuseRule(may_read=False)
    assert rule(b"no-cache, no-store") == rule(b" no-store ")
    assert rule(b"no-store") == ReuseRule(may_read=False, may_store=False)


class FakeOutputs:
    """Outputs that a test delivers."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.num_unread = 0
        self._deliver: Callable[[Output], None] | None = None

    def redirect(self, deliver: Callable[[Output], None]) -> None:
        self._deliver = deliver

    def cancel(self) -> None:
        self.is_cancelled = True

    def put(self, output: Output) -> None:
        assert self._deliver is not None
        self._deliver(output)


class FakeEngine:
    """An engine whose calls a test answers; it refuses while it is full."""

    def __init__(self, card: Any) -> None:
        self.card = card
        self.facts = card
        self.calls: list[FakeOutputs] = []
        self.is_full = False
        self.accepts = asyncio.Event()
        self.accepts.set()

    async def generate(self, *_: object) -> FakeOutputs:
        await self.accepts.wait()
        if self.is_full:
            raise OverloadedError("The queue is full.")
        self.calls.append(FakeOutputs())
        return self.calls[-1]


class _Card:
    name, identity = "tiny", "abc"

    class backend:  # noqa: N801 - stands for an attribute
        name, level, precision, num_threads = "cpu", "avx2", "", 2


GREEDY = SamplingParams(temperature=0)


def job_of(tenant: str = "", **caller: Any) -> tuple[Job, EncodedJob]:
    job = Job(None, ([1, 2],), GREEDY, caller=Caller(tenant=tenant, **caller))
    return job, EncodedJob([[1, 2]], GREEDY, NO_HINTS)


def token(number: int, *, is_last: bool = False) -> Output:
    usage = Usage(2, 0, number + 1) if is_last or number == 0 else None
    timings = Timings(0.0, 0.0, 1.0, 2.0) if is_last else None
    reason = FinishReason.STOP if is_last else None
    output = Output(0, f"{number} ", (number,), usage=usage, timings=timings)
    output.finish_reason = reason
    return output


async def text_of(outputs: Any) -> str:
    return "".join([output.text async for output in outputs])


@pytest.mark.parametrize("seed", range(20))
def test_readers_that_come_and_go_all_read_the_whole_answer(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(1, 12)
    whole = "".join(f"{number} " for number in range(length))

    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=rng.choice((0, 10**6)), ttl_s=60)
        readers: list[Any] = []
        tasks: dict[Any, asyncio.Task[str]] = {}

        async def add() -> None:
            outputs, source = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
            assert (source is AnswerSource.COMPUTED) == (not readers)
            readers.append(outputs)
            tasks[outputs] = asyncio.create_task(text_of(outputs))

        await add()
        for number in range(length):
            for _ in range(rng.choice((0, 0, 1, 3))):
                await add()
            engine.calls[0].put(token(number, is_last=number == length - 1))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
            if len(tasks) > 1 and rng.random() < 0.3:
                leaving = rng.choice(list(tasks))
                leaving.cancel()
                assert whole.startswith(await tasks.pop(leaving))
        assert [await task for task in tasks.values()] == [whole] * len(tasks)
        assert len(engine.calls) == 1
        assert not engine.calls[0].is_cancelled

    asyncio.run(run())


def test_a_run_that_nobody_reads_is_cancelled() -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=0, ttl_s=60)
        readers = [
            (await reuse.generate(engine, *job_of(), ReuseRule()))[0]  # type: ignore[arg-type]
            for _ in range(3)
        ]
        for reader in readers:
            assert not engine.calls[0].is_cancelled
            reader.cancel()
            reader.cancel()
        assert engine.calls[0].is_cancelled
        _, source = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
        assert source is AnswerSource.COMPUTED

    asyncio.run(run())


def test_another_requests_refusal_and_deadline_are_not_shared() -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=0, ttl_s=60)

        async def read() -> str:
            outputs, _ = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
            return await text_of(outputs)

        engine.accepts.clear()
        engine.is_full = True
        refused = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        engine.accepts.set()
        for task in refused:
            with pytest.raises(OverloadedError):
                await task
        engine.is_full = False
        first, second = asyncio.create_task(read()), asyncio.create_task(read())
        await asyncio.sleep(0.01)
        late = Output(0, "", (), error=DeadlineError("Too late."))
        late.finish_reason, late.usage = FinishReason.ERROR, Usage(0, 0, 0)
        engine.calls[-1].put(late)
        with pytest.raises(DeadlineError):
            await first
        await asyncio.sleep(0.01)
        assert len(engine.calls) == 2
        engine.calls[-1].put(token(0, is_last=True))
        assert await second == "0 "

    asyncio.run(run())


def failure(error: TwostrokeError) -> Output:
    output = Output(0, "", (), error=error, usage=Usage(0, 0, 0))
    output.finish_reason = FinishReason.ERROR
    return output


def test_a_request_is_submitted_again_only_once_and_within_its_own_deadline() -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=0, ttl_s=60)

        async def read(**caller: Any) -> str:
            outputs, _ = await reuse.generate(engine, *job_of(**caller), ReuseRule())  # type: ignore[arg-type]
            return await text_of(outputs)

        tasks = [asyncio.create_task(read(start_within_s=30.0)) for _ in range(2)]
        for number in range(2):
            await asyncio.sleep(0.01)
            assert len(engine.calls) == number + 1
            engine.calls[number].put(failure(DeadlineError("Too late.")))
            with pytest.raises(DeadlineError):
                await tasks[number]
        tasks = [asyncio.create_task(read(start_within_s=0.02)) for _ in range(2)]
        await asyncio.sleep(0.03)
        engine.calls[2].put(failure(DeadlineError("Too late.")))
        for task in tasks:
            with pytest.raises(DeadlineError):
                await task
        tasks = [asyncio.create_task(read(continues_elsewhere=True)) for _ in range(2)]
        await asyncio.sleep(0.01)
        engine.calls[3].put(failure(EngineDiedError("The engine died.")))
        for task in tasks:
            with pytest.raises(EngineDiedError):
                await task
        assert len(engine.calls) == 4

    asyncio.run(run())


def test_a_request_that_is_submitted_again_counts_as_computed() -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=0, ttl_s=60)
        first, source = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
        assert source is AnswerSource.COMPUTED
        readers = []
        for _ in range(2):
            outputs, source = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
            assert isinstance(outputs, JoinedOutputs)
            assert source is outputs.source is AnswerSource.SHARED
            readers.append(outputs)
        tasks = [asyncio.create_task(text_of(outputs)) for outputs in (first, *readers)]
        await asyncio.sleep(0.01)
        engine.calls[0].put(failure(DeadlineError("Too late.")))
        await asyncio.sleep(0.01)
        engine.calls[1].put(token(0, is_last=True))
        with pytest.raises(DeadlineError):
            await tasks[0]
        assert [await task for task in tasks[1:]] == ["0 ", "0 "]
        sources = [outputs.source for outputs in readers]
        assert sorted(sources) == [AnswerSource.COMPUTED, AnswerSource.SHARED]
        assert len(engine.calls) == 2

    asyncio.run(run())


def test_a_request_that_is_cancelled_while_it_is_submitted_again_is_not_computed() -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=0, ttl_s=60)
        first, second = [
            (await reuse.generate(engine, *job_of(), ReuseRule()))[0]  # type: ignore[arg-type]
            for _ in range(2)
        ]
        reading = asyncio.create_task(text_of(second))
        engine.accepts.clear()
        engine.calls[0].put(failure(DeadlineError("Too late.")))
        await asyncio.sleep(0.01)
        second.cancel()
        engine.accepts.set()
        await asyncio.sleep(0.01)
        assert engine.calls[1].is_cancelled
        reading.cancel()
        del first

    asyncio.run(run())


@pytest.mark.parametrize("has_error", [True, False])
def test_a_run_that_fails_as_it_is_accepted_is_not_joined(*, has_error: bool) -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=0, ttl_s=60)
        engine.accepts.clear()

        async def begin() -> None:
            outputs, _ = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
            if has_error:
                engine.calls[0].put(failure(DeadlineError("Too late.")))
            else:
                outputs.cancel()

        async def read() -> str:
            outputs, _ = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
            return await text_of(outputs)

        first, second = asyncio.create_task(begin()), asyncio.create_task(read())
        await asyncio.sleep(0.01)
        engine.accepts.set()
        await first
        await asyncio.sleep(0.01)
        assert len(engine.calls) == 2
        engine.calls[1].put(token(0, is_last=True))
        async with asyncio.timeout(5):
            assert await second == "0 "

    asyncio.run(run())


@pytest.mark.parametrize("first_output", [token(0), Output(0, "", (), prompt_logprobs=(None,))])
def test_an_error_in_the_middle_ends_all_readers(first_output: Output) -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=10**6, ttl_s=60)
        readers = [
            (await reuse.generate(engine, *job_of(), ReuseRule()))[0]  # type: ignore[arg-type]
            for _ in range(3)
        ]
        tasks = [asyncio.create_task(text_of(reader)) for reader in readers]
        engine.calls[0].put(first_output)
        engine.calls[0].put(failure(TwostrokeError("Failed.")))
        for task in tasks:
            with pytest.raises(TwostrokeError, match="Failed"):
                await task
        assert reuse.num_stored == 0

    asyncio.run(run())


def test_tenants_do_not_share() -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=10**6, ttl_s=60)
        for number, tenant in enumerate(("a", "b", "")):
            _, source = await reuse.generate(engine, *job_of(tenant), ReuseRule())  # type: ignore[arg-type]
            assert source is AnswerSource.COMPUTED
            engine.calls[number].put(token(0, is_last=True))
        _, source = await reuse.generate(engine, *job_of("a"), ReuseRule())  # type: ignore[arg-type]
        assert source is AnswerSource.STORED

    asyncio.run(run())


def test_another_model_under_the_same_name_computes_again() -> None:
    class Changed(_Card):
        identity = "def"

    async def run() -> None:
        reuse = AnswerReuse(coalesces=True, store_bytes=10**6, ttl_s=60)
        for card in (_Card, Changed):
            engine = FakeEngine(card)
            _, source = await reuse.generate(engine, *job_of(), ReuseRule())  # type: ignore[arg-type]
            assert source is AnswerSource.COMPUTED
            engine.calls[0].put(token(0, is_last=True))

    asyncio.run(run())


def test_requests_with_deadlines_do_not_wait_for_others() -> None:
    async def run() -> None:
        engine = FakeEngine(_Card)
        reuse = AnswerReuse(coalesces=True, store_bytes=0, ttl_s=60)
        for _ in range(2):
            await reuse.generate(engine, *job_of(timeout_s=5.0), ReuseRule())  # type: ignore[arg-type]
        assert len(engine.calls) == 2

    asyncio.run(run())


def test_the_store_keeps_its_size_and_its_time() -> None:
    now_s = 0.0
    answer = token(0, is_last=True)
    store = StoredAnswers(1400, 10, clock=lambda: now_s)  # two answers
    for key in (b"a", b"b"):
        store.put(key, [answer])
    assert store.get(b"a") == [answer]
    store.put(b"c", [answer])
    assert store.get(b"b") is None  # its last use was the oldest
    assert store.get(b"a") == store.get(b"c") == [answer]
    store.put(b"d", [replace(answer, text="x" * 2000)])
    assert store.get(b"d") is None
    now_s = 10.0
    assert store.get(b"a") is store.get(b"c") is None
    assert store.num_bytes == len(store) == 0
