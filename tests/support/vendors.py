"""A stand-in for a vendor's API, and overflow files that name it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from support.replicas import Exchange, FakeReplica, Loop

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable
    from pathlib import Path

KEY = "sk-vendor-secret-0123456789"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT_USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 100,
    "prompt_tokens_details": {"cached_tokens": 400},
}
MESSAGE_USAGE = {
    "input_tokens": 300,
    "cache_read_input_tokens": 400,
    "cache_creation_input_tokens": 300,
}
# 600 of 1,000 prompt tokens at 2, 400 cached at 0.5, 100 tokens of the answer at 8, per million.
CHAT_COST = (600 * 2 + 400 * 0.5 + 100 * 8) / 1e6
# As before, but 300 of the prompt's tokens are written to the cache at 2.5.
MESSAGE_COST = (300 * 2 + 400 * 0.5 + 300 * 2.5 + 100 * 8) / 1e6
PRICES = {"input": 2, "cached": 0.5, "cache_write": 2.5, "output": 8}


class FakeVendor(FakeReplica):
    """A server with the protocols of OpenAI and Anthropic, whose faults a test sets."""

    def __init__(self) -> None:
        """Answer every request that shows the key."""
        super().__init__()
        self.behaviour = self.answer
        self.key = KEY

    @property
    def bodies(self) -> list[Any]:
        """The bodies of the requests so far."""
        return [json.loads(exchange.body) for exchange in self.seen]

    async def answer(self, exchange: Exchange) -> None:
        """Answer in the protocol of the path, streamed or not; refuse other keys."""
        bearer = exchange.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key not in {bearer, exchange.headers.get("x-api-key")}:
            message = f"Incorrect API key provided: {bearer}."
            await exchange.answer({"error": {"message": message}}, 401)
        elif exchange.path.endswith("/messages"):
            await self._answer_message(exchange)
        else:
            await self._answer_chat(exchange)

    async def _answer_chat(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        facts = {"id": "chatcmpl-v", "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"content": "bought"}, "finish_reason": "stop"}
            await exchange.answer({**facts, "choices": [choice], "usage": CHAT_USAGE})
            return
        events = [
            {**facts, "choices": [{"index": 0, "delta": {"content": "bou"}}], "usage": None},
            {**facts, "choices": [{"index": 0, "delta": {"content": "ght"}}], "usage": None},
            {**facts, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        ]
        if body.get("stream_options", {}).get("include_usage"):
            events.append({**facts, "choices": [], "usage": CHAT_USAGE})
        await send_events(exchange, *chat_events(*events), b"data: [DONE]\n\n")

    async def _answer_message(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        facts = {"id": "msg_v", "type": "message", "model": body["model"]}
        if not body.get("stream"):
            content = [{"type": "text", "text": "bought"}]
            usage = {**MESSAGE_USAGE, "output_tokens": 100}
            await exchange.answer({**facts, "content": content, "usage": usage})
            return
        await send_events(exchange, *message_events())


def chat_events(*events: object) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


def message_events() -> list[bytes]:
    """The events of a streamed message."""
    usage = {**MESSAGE_USAGE, "output_tokens": 1}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg_v", "content": [], "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"text": "bought"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 100}},
        {"type": "message_stop"},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


async def send_events(exchange: Exchange, *events: bytes) -> None:
    """Send a whole stream."""
    await exchange.begin_events()
    for event in events:
        await exchange.chunk(event)
    await exchange.say(b"0\r\n\r\n")


def start_vendor(fakes: Loop, tls: ssl.SSLContext | None = None) -> FakeVendor:
    """Return a vendor that listens."""
    vendor = FakeVendor()
    fakes.start(vendor, tls=tls)
    return vendor


def with_status(
    status: int, body: object = b"", headers: str = ""
) -> Callable[[Exchange], Awaitable[None]]:
    """Return a behaviour that answers with a status."""

    async def behave(exchange: Exchange) -> None:
        await exchange.answer(body or {"error": {"message": f"about {KEY}"}}, status, headers)

    return behave


def overflow_file(
    folder: Path, *vendors: FakeVendor, when: tuple[str, ...] = ("no_replica",), **changes: Any
) -> Path:
    """Write an overflow file, and the key beside it; JSON is YAML, too.

    `changes` are fields of the file; the fields in `upstream` are set for every upstream.
    """
    key_file = folder / "vendor.key"
    key_file.write_text(f"{KEY}\n")
    key_file.chmod(0o600)
    fields = changes.pop("upstream", {})
    upstreams = [
        {
            "name": f"vendor{number}",
            "url": vendor.url,
            "protocol": "openai",
            "key_file": "vendor.key",
            "models": {"tiny": {"model": "big-1", **PRICES}},
            "when": list(when),
            "max_cost_per_day": 10,
            **fields,
        }
        for number, vendor in enumerate(vendors, 1)
    ]
    path = folder / "overflow.yaml"
    path.write_text(json.dumps({"upstreams": upstreams, **changes}))
    return path
