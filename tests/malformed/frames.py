"""Malformed frames for both ends of `engine/process/messages.py`: the engine's, and the server's.

Neither a frame nor a message with odd values may do more than end the connection: no other
exception, no task that waits for ever, no page that is held.
"""

from __future__ import annotations

import asyncio
import socket
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from malformed.odd_values import damaged, paths_within
from support.remote import ANYONE, FakeProcess, options
from twostroke.core.constraint import Constraint
from twostroke.core.errors import OverloadedError, TwostrokeError
from twostroke.core.request import NO_HINTS, EmbeddingParams, FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.core.transport.frames import ConnectionLostError, InvalidMessageError, MessageReader
from twostroke.engine.output import Output, Usage
from twostroke.engine.process import messages as wire
from twostroke.engine.process.main import RequestHandler, ServerConnection
from twostroke.engine.process.remote import RemoteEngine
from twostroke.engine.status import StepProgress

if TYPE_CHECKING:
    import random

    from twostroke.engine.engine import Engine

_MOST_S = 5.0  # that one frame may take
_MOST_BYTES = 60_000  # of a frame, which a socket takes before anybody reads
_INTEGERS: tuple[int, ...] = (
    0,
    1,
    2,
    3,
    7,
    -1,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_INTEGERS += (-(2**31), -(2**63))
PARAMS = SamplingParams(max_tokens=3, temperature=0, logit_bias={3: 1.0}, stop=["a"], seed=1)
REQUESTS: list[wire.ServerMessage] = [
    wire.Generate(1, [[1, 2], [3]], PARAMS, ANYONE, NO_HINTS),
    wire.EmbedTexts(2, [[1, 2]], EmbeddingParams(), ANYONE),
    wire.Cancel(1),
    wire.Compile(3, Constraint("regex", "a+", "guided_regex")),
    wire.GetStatus(4, [(10, 0), (60, 5)]),
    wire.Flush(),
]
END = Output(0, "x", (4,), finish_reason=FinishReason.STOP, usage=Usage(1, 0, 1))


def damaged_frame(message: wire.ServerMessage | wire.EngineMessage, rng: random.Random) -> bytes:
    """Return a message's frame after a change: of its bytes, of its values, or of its length."""
    body = bytearray(wire.encode(message))
    pick = rng.random()
    if pick < 0.6:
        values = msgspec.msgpack.decode(body, strict=False)
        values = damaged(values, rng) if pick < 0.2 else _exchanged(values, rng)
        with suppress(OverflowError, msgspec.MsgspecError, UnicodeError, ValueError):
            body = bytearray(msgspec.msgpack.encode(values))
    elif pick < 0.85:
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            del body[rng.randrange(len(body)) :]
    elif pick < 0.92:
        body = bytearray(rng.randbytes(rng.randrange(60)))
    else:  # a list that says it is long
        body = bytearray(b"\xdd\xff\xff\xff\xff" + body)
    del body[_MOST_BYTES:]
    size = len(body) if rng.random() < 0.9 else rng.choice((0, 1, len(body) + 9, 2**31, 2**32 - 1))
    return size.to_bytes(4, "little") + bytes(body)


def _exchanged(values: Any, rng: random.Random) -> Any:
    """Replace some values inside a message by odd ones of the same type."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        path = rng.choice(paths_within(values)[1:] or [(0,)])
        outer = values
        for key in path[:-1]:
            outer = outer[key]
        old = outer[path[-1]]
        if isinstance(old, bool):
            outer[path[-1]] = not old
        elif isinstance(old, int):
            outer[path[-1]] = rng.choice(_INTEGERS)
        elif isinstance(old, float):
            outer[path[-1]] = rng.choice((float("nan"), float("inf"), -1.0, 1e308, 0.0))
        elif isinstance(old, str):
            outer[path[-1]] = rng.choice(("", "\0", "x" * 10_000, "\U0010ffff", "a{9}{9}"))
        elif isinstance(old, list):
            outer[path[-1]] = old * rng.choice((0, 2, 100))
    return values


class _Link(ServerConnection):
    """A connection whose process does not end with it."""

    def send(self, message: wire.EngineMessage) -> None:
        with suppress(ConnectionLostError):
            self._connection.try_send(message)


class EngineEnd:
    """The engine's end: a `RequestHandler` for each frame, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def take(self, frame: bytes) -> str:
        """Send a frame, then `Close`; return how the desk ended: "closed" or "refused".

        Raises:
            Exception: anything else has come of the frame.
        """
        ours, theirs = socket.socketpair()
        link = _Link(theirs)
        handler = RequestHandler(self._engine, link)
        began_s = time.monotonic()
        try:
            close = wire.RECEIVED_BY_ENGINE.frame(wire.Close())
            ours.sendall(frame + close)
            if len(frame) != 4 + int.from_bytes(frame[:4], "little"):  # it waits for the rest
                reader = MessageReader(wire.RECEIVED_BY_ENGINE)
                reader.received += frame + close
                return f"{len(list(iter(reader.next, None)))} messages"
            handler.run()
            return "closed"
        except InvalidMessageError:
            return "refused"
        finally:
            for open_request in list(handler._open.values()):
                open_request.cancel()
            handler._compiler.shutdown()
            self._engine.client.loop.flush()
            ours.close()
            theirs.close()
            assert time.monotonic() - began_s < _MOST_S, f"took long: {frame[:80]!r}"


def answers(ready: wire.EngineReady, ids: tuple[int, int, int]) -> list[wire.EngineMessage]:
    """Return what an engine may say to what was asked for with these ids."""
    generated, compiled, read = ids
    error = OverloadedError("full")
    return [
        wire.Loading(1, 2),
        wire.Log("twostroke.serve", 10, "text"),
        ready,
        wire.EngineFailed(error),
        wire.Accepted(generated),
        wire.Accepted(generated, error),
        wire.RequestsStarted([generated, compiled]),
        wire.OutputBatch([(generated, Output(0, "h", (5,))), (generated, END)]),
        wire.Compiled(compiled, ("a",)),
        wire.Compiled(compiled, (), error),
        wire.StatusReply(read, ready.status),
        wire.Heartbeat(StepProgress(3, 0.0)),
    ]


class ServerEnd:
    """The server's end: a `RemoteEngine` for each frame, with a request of each kind open."""

    def __init__(self, model: str, card: Any, ready: wire.EngineReady) -> None:
        self._load = wire.LoadModel(wire.VERSION, model, options(), "critical")
        self._card, self._ready = card, ready
        self.errors: list[str] = []

    async def take(self, message: int, rng: random.Random) -> str:
        """Send a damaged message; return "taken", or "refused" if the process was ended for it."""
        process = FakeProcess()
        engine = RemoteEngine(self._load, self._card, process, self._ready)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.errors.append(_described(context)))
        engine.attach(lambda: None)
        tasks: list[asyncio.Task[Any]] = [
            loop.create_task(self._generate(engine)),
            loop.create_task(engine.compile(Constraint("regex", "a+"))),
            loop.create_task(engine.read()),
        ]
        await asyncio.sleep(0)
        sent = answers(self._ready, (1, 2, 3))[message]
        damaged = damaged_frame(sent, rng)
        process.theirs.sendall(damaged)
        for _ in range(4):
            await asyncio.sleep(0)
        is_refused = process.is_killed
        engine._supervisor._has_ended = True
        for task in list(engine._supervisor._tasks):
            task.cancel()  # no other process is started
        engine.on_give_up("over")
        _, waiting = await asyncio.wait(tasks, timeout=_MOST_S)
        frame = damaged[:300]
        for task in waiting:
            task.cancel()
            self.errors.append(f"{task.get_coro()} waits for ever after {sent} as {frame!r}")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, TwostrokeError):
                self.errors.append(f"{result!r} after {frame!r}")
        if not is_refused:
            process.connection.detach()
        process.close()
        return "refused" if is_refused else "taken"

    @staticmethod
    async def _generate(engine: RemoteEngine) -> int:
        outputs = await engine.generate([[1, 2]], PARAMS, ANYONE, NO_HINTS)
        count = 0
        async for _ in outputs:
            count += 1
        return count


def _described(context: dict[str, Any]) -> str:
    """Return an error that nobody caught, with where it came from."""
    if (error := context.get("exception")) is None:
        return str(context)
    return "".join(traceback.format_exception(error)[-6:])
