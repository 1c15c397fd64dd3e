"""A small OpenAI-compatible server without a model, which can have faults that a bench must see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

TEMPLATE_TOKENS = 7  # of each prompt besides its words
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_START_LIMIT_S = 30


@dataclass
class EndpointBehavior:
    """What the server does; by default it has no fault.

    Attributes:
        models: names in the list of models.
        key: the key that it demands; None for no key.
        step_s: time of a token.
        slow_down_s: time by which each request's tokens are slower than the last one's.
        stall_s: pause in the middle of each fifth answer.
        drops: each third answer ends in the middle.
        refuses: each third request gets status 429.
        tokens_factor: the reported number of output tokens, to the real one.
        num_prompt: the reported number of prompt tokens; 0 for the real one.
        chunk_tokens: tokens of a chunk.
        cached: share of the prompt that is reported as cached.
        has_usage: whether usage is reported.
        counts_chunks: whether each chunk has the number of tokens so far, if asked for.
        strict: fields that are not OpenAI's are refused.
        reasoning: tokens of reasoning before the content.
        error_after: tokens after which an error comes in the stream; 0 for none.
        ends_early: answers have half of their tokens, and end with "stop".
        has_tools: whether a required tool call is made; if not, `tools` is refused.
        caches_history: whether all messages but the last are reported as cached.
        has_tokenizer: whether it has `/tokenize`, which counts words.
        bodies: the requests that were answered, without the questions before a run.
    """

    models: tuple[str, ...] = ("fake",)
    key: str | None = None
    step_s: float = 0.0
    slow_down_s: float = 0.0
    stall_s: float = 0.0
    drops: bool = False
    refuses: bool = False
    tokens_factor: float = 1.0
    num_prompt: int = 0
    chunk_tokens: int = 1
    cached: float = 0.0
    has_usage: bool = True
    counts_chunks: bool = False
    strict: bool = False
    reasoning: int = 0
    error_after: int = 0
    ends_early: bool = False
    has_tools: bool = True
    caches_history: bool = False
    has_tokenizer: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)


class FakeEndpoint:
    """The server on a free loopback port, with an event loop in its own thread."""

    def __init__(
        self, behavior: EndpointBehavior | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Start the server, with TLS if there is a context; return once it listens."""
        self._tls = tls
        self.behavior = behavior or EndpointBehavior()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._stop: asyncio.Event | None = None
        self.port = 0
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve()), daemon=True
        )
        self._thread.start()
        assert self._up.wait(_START_LIMIT_S)

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop the server."""
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_LIMIT_S)
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            with contextlib.suppress(
                asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError
            ):
                await self._answer_requests(reader, writer)
            connections.discard(task)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._stop.wait()
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _answer_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        is_open = True
        while is_open:
            head = await reader.readuntil(b"\r\n\r\n")
            match = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(match[1]) if match else 0)
            path = head.split()[1].decode()
            key = self.behavior.key
            if key is not None and f"authorization: Bearer {key}".encode() not in head:
                _reply(writer, 401, {"error": {"message": "no key"}})
            elif path == "/v1/models":
                _reply(writer, 200, {"data": [{"id": name} for name in self.behavior.models]})
            elif path == "/tokenize" and self.behavior.has_tokenizer:
                fields = json.loads(body)
                text = fields.get("prompt") or fields["content"]
                _reply(writer, 200, {"tokens": list(range(len(text.split())))})
            elif path in {"/v1/chat/completions", "/v1/completions"}:
                is_open = await self._stream(writer, json.loads(body))
            else:
                _reply(writer, 404, {"error": {"message": "no such path"}})
            await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        """Answer a request; return whether the connection stays open."""
        behavior = self.behavior
        refusal = self._refusal(body)
        if refusal is not None:
            _reply(writer, refusal[0], {"error": {"message": refusal[1]}})
            return True
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 8
        # The questions before a run have one token, or ask for a call about the weather.
        messages = body.get("messages") or [{}]
        is_measured = limit > 1 and "Look up" not in str(messages[0].get("content"))
        wants_call = body.get("tool_choice") == "required"
        if is_measured:
            behavior.bodies.append(body)
        number = len(behavior.bodies)
        if is_measured and behavior.refuses and number % 3 == 0:
            _reply(writer, 429, {"error": {"message": "Too many requests."}})
            return True
        ends_early = behavior.ends_early and is_measured
        num_tokens = 3 if wants_call else limit // 2 if ends_early else limit
        step_s = behavior.step_s + (number * behavior.slow_down_s if is_measured else 0.0)
        writer.write(_HEAD)
        num_sent = 0
        while num_sent < num_tokens:
            await asyncio.sleep(step_s)
            if writer.is_closing():  # the client gave the request up
                return False
            if is_measured and num_sent >= num_tokens // 2:
                if behavior.drops and number % 3 == 0:
                    return False
                if behavior.stall_s and number % 5 == 0 and num_sent == num_tokens // 2:
                    await asyncio.sleep(behavior.stall_s)
            count = min(behavior.chunk_tokens, num_tokens - num_sent)
            num_sent += count
            if wants_call:
                _write_event(writer, _call_chunk(num_sent))
            else:
                _write_event(writer, self._chunk(body, num_sent, count))
            if is_measured and 0 < behavior.error_after <= num_sent:
                _write_event(writer, {"error": {"message": "The engine died."}})
                break
        reason = "length" if num_tokens == limit else "stop"
        _write_event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if behavior.has_usage:
            _write_event(writer, {"choices": [], "usage": self._usage(body, num_sent)})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        """Return the status and the message of a refusal; None if the request is accepted."""
        behavior = self.behavior
        if behavior.strict and set(body) & {"ignore_eos", "top_k"}:
            return 400, "Unknown parameter."
        if body.get("model") not in {None, *behavior.models}:
            return 404, "The model does not exist."
        if not behavior.has_tools and "tools" in body:
            return 400, "tools are not supported"
        return None

    def _chunk(self, body: dict[str, Any], num_sent: int, count: int) -> dict[str, Any]:
        text = " word" * count
        is_reasoning = num_sent <= self.behavior.reasoning
        delta = {"reasoning_content" if is_reasoning else "content": text}
        choice = {"index": 0, "text": text} if "prompt" in body else {"index": 0, "delta": delta}
        chunk: dict[str, Any] = {"choices": [choice]}
        if self.behavior.counts_chunks and body["stream_options"].get("continuous_usage_stats"):
            chunk["usage"] = self._usage(body, num_sent)
        return chunk

    def _usage(self, body: dict[str, Any], num_output: int) -> dict[str, Any]:
        messages = body.get("messages") or [{"content": body.get("prompt")}]
        lengths = [len(str(message["content"]).split()) for message in messages]
        num_prompt = self.behavior.num_prompt or sum(lengths) + TEMPLATE_TOKENS
        cached = int(num_prompt * self.behavior.cached)
        if self.behavior.caches_history and len(messages) > 1:
            cached = num_prompt - lengths[-1]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": round(num_output * self.behavior.tokens_factor),
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _call_chunk(number: int) -> dict[str, Any]:
    """Return one of the three chunks of a tool call."""
    first: dict[str, Any] = {
        "id": "call_x",
        "type": "function",
        "function": {"name": "look_up", "arguments": ""},
    }
    parts = [
        first,
        {"function": {"arguments": '{"topic": '}},
        {"function": {"arguments": '"news"}'}},
    ]
    delta = {"tool_calls": [{"index": 0, **parts[number - 1]}]}
    return {"choices": [{"index": 0, "delta": delta}]}


def _reply(writer: asyncio.StreamWriter, status: int, fields: dict[str, Any]) -> None:
    output = json.dumps(fields).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (status, len(output))
        + output
    )


def _write_event(writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
    data = f"data: {json.dumps(fields)}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
