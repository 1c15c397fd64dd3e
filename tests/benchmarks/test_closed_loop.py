"""The closed loop of clients: what it counts, and the client that speaks HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.common import closed_loop
from benchmarks.serving import load_clients as load


def test_each_client_asks_for_its_share_of_the_prompts_one_after_the_other():
    running, most_running, prompt_numbers = 0, 0, []

    async def send_request(prompt):
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        prompt_numbers.append(prompt[0])
        for _ in range(4):
            await asyncio.sleep(0.001)
            yield 1
        running -= 1

    load_result = asyncio.run(
        closed_loop.run(
            send_request, [[n] for n in range(9)], closed_loop.Loop(num_clients=3, num_tokens=4)
        )
    )
    assert sorted(prompt_numbers) == list(range(9))
    assert most_running == 3
    assert load_result.num_requests == 6
    assert len(load_result.gaps_s) == 6 * 3
    assert load_result.tokens_per_s > 0


def test_tokens_are_counted_between_the_last_first_answer_and_the_first_last_one(monkeypatch):
    clock = [0.0]
    ours = SimpleNamespace(monotonic=lambda: clock[0], process_time=time.process_time)
    monkeypatch.setattr(closed_loop, "time", ours)

    async def send_request(_prompt):
        for _ in range(2):  # a piece of text every second, of two tokens each
            clock[0] += 1
            yield 1

    load_result = asyncio.run(
        closed_loop.run(
            send_request, [[1], [2], [3]], closed_loop.Loop(num_clients=1, num_tokens=4)
        )
    )
    assert load_result.tokens_per_s == pytest.approx(2)
    assert load_result.ttfts_s == pytest.approx([1, 1])
    assert load_result.gaps_s == pytest.approx([1, 1])


def test_a_loop_without_a_second_prompt_for_each_client_is_refused():
    with pytest.raises(ValueError, match="3 clients need two prompts each or more, not 5"):
        asyncio.run(closed_loop.run(None, [[1]] * 5, closed_loop.Loop(3, 8)))


def _answer(head: bytes, *chunks: bytes) -> tuple[list[int], bytes]:
    """Return what the client made of a server's answer, and what it sent."""
    sent = b""

    async def server(reader, writer):
        nonlocal sent
        sent = await reader.readuntil(b"\r\n\r\n")
        length = int(sent.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        sent += await reader.readexactly(length)
        writer.write(head)
        for chunk in chunks:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        writer.close()

    async def both():
        listener = await asyncio.start_server(server, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with listener:
            return [count async for count in load.send_request(port, "bench", 3, [5, 6])]

    return asyncio.run(both()), sent


_OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(text: str | None, tokens: int | None = None) -> bytes:
    body = {"choices": [] if text is None else [{"text": text}]}
    body["usage"] = None if tokens is None else {"completion_tokens": tokens}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def test_the_client_counts_pieces_of_text_wherever_chunks_are_cut():
    stream = _event("a") + _event("") + _event("bc") + _event(None, 3) + b"data: [DONE]\n\n"
    for cut in (1, 7, 30, len(stream)):
        chunks = [stream[i : i + cut] for i in range(0, len(stream), cut)]
        counts, sent = _answer(_OK, *chunks, b"")
        assert counts == [1, 1]
    request_body = json.loads(sent.partition(b"\r\n\r\n")[2])
    assert request_body["prompt"] == [5, 6]
    assert request_body["max_tokens"] == 3


def test_an_answer_of_another_length_is_an_error():
    with pytest.raises(RuntimeError, match="the server wrote 2 tokens, not 3"):
        _answer(_OK, _event("a"), _event(None, 2), b"")


def test_a_refusal_is_shown():
    with pytest.raises(RuntimeError, match="the server refused: too many"):
        _answer(b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n\r\ntoo many")


def test_a_replay_sends_requests_when_they_are_due():
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"

    async def server(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(_OK)
        for text in (_event("a"), _event("bc"), last, b""):
            writer.write(b"%x\r\n%b\r\n" % (len(text), text))
            await asyncio.sleep(0.03 if text else 0.0)
        writer.close()

    async def both():
        listener = await asyncio.start_server(server, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with listener:
            return await load._replay(port, "bench", [0.0, 0.0, 0.2], [[5, 6]] * 3, [3] * 3)

    logs = asyncio.run(both())
    for log, due_s in zip(logs, (0.0, 0.0, 0.2), strict=True):
        assert 0 <= log["sent_s"] - due_s < 0.1
        assert log["sent_s"] < log["first_s"] < log["last_s"]
        assert log["last_s"] - log["first_s"] > 0.02
        assert log["num_cached"] == 2
