"""Messages between server and engine arrive unchanged; other bytes are refused."""

from __future__ import annotations

import random
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from twostroke.core.constraint import Constraint, ReasoningSection
from twostroke.core.errors import ContextLengthError, Field, OverloadedError, TwostrokeError
from twostroke.core.options import EngineOptions
from twostroke.core.request import FinishReason, Hints
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import TokenLogprobs
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import MAX_BODY_BYTES, InvalidMessageError, MessageReader
from twostroke.engine.client import Caller
from twostroke.engine.output import Output, Timings, Usage
from twostroke.engine.process import messages as wire
from twostroke.server.http.errors import ServerStoppingError

if TYPE_CHECKING:
    from twostroke.core.transport.frames import MessageFormat

PARAMS = SamplingParams(
    max_tokens=5,
    logit_bias={3: 1.5},
    stop=["a", "b"],
    stop_token_ids=[1],
    constraint=Constraint("regex", "a+", "guided_regex", ReasoningSection("<think>", "</think>")),
    shown_ids=frozenset((7,)),
    seed=2**64 - 1,
)
from_server = wire.RECEIVED_BY_ENGINE.frame
from_engine = wire.RECEIVED_BY_SERVER.frame
REQUESTS = [
    wire.LoadModel(wire.VERSION, "smollm2", EngineOptions(), "info"),
    wire.Generate(1, [[1, 2], [3]], PARAMS, Caller(1, "t"), Hints("off", (4, 5)), 1.5),
    wire.Compile(3, Constraint("json_schema", "{}", alternative=Constraint("choice", '["a"]'))),
    wire.GetStatus(4, [(10, 0), (60, 5)]),
    wire.Cancel(1),
    wire.Flush(),
    wire.Close(),
]
LAST = Output(
    2,
    "x\u00e9",
    (4,),
    (TokenLogprobs(-0.5, (4,), (-0.5,)), None),
    finish_reason=FinishReason.STOP,
    stop="b",
    usage=Usage(3, 1, 4),
    timings=Timings(1.0, 2.0, 3.0, 4.0),
)


def received(message_format: MessageFormat[Any], data: bytes) -> list[Any]:
    """Return the messages that a connection reads from these bytes."""
    reader = MessageReader(message_format)
    reader.received += data
    return list(iter(reader.next, None))


def test_requests_arrive_as_they_were_however_they_are_cut() -> None:
    data = b"".join(map(from_server, REQUESTS))
    rng = random.Random(1)
    for _ in range(20):
        reader, messages, start = MessageReader(wire.RECEIVED_BY_ENGINE), list[Any](), 0
        while start < len(data):
            end = start + rng.randrange(1, 200)
            reader.received += data[start:end]
            messages += iter(reader.next, None)
            start = end
        assert messages == REQUESTS


def test_messages_are_taken_even_if_the_reader_stops_at_one() -> None:
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, wire.RECEIVED_BY_ENGINE)) as connection, theirs:
        theirs.sendall(b"".join(map(from_server, REQUESTS)))
        for message in connection.receive_arrived(10):
            assert message == REQUESTS[0]
            break
        assert [connection.receive(10) for _ in REQUESTS[1:]] == REQUESTS[1:]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4)])
def test_outputs_arrive_as_they_were(shape: tuple[int, ...]) -> None:
    vector = np.arange(4, dtype=np.float32).reshape(shape)
    output = wire.OutputBatch([(1, Output(0, "hello", (5,))), (2, LAST), (3, Output(0, "", ()))])
    output.outputs[2][1].embedding = vector
    (message,) = received(wire.RECEIVED_BY_SERVER, from_engine(output))
    assert message.outputs[:2] == output.outputs[:2]
    assert np.array_equal(message.outputs[2][1].embedding, vector)


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full"),
        ContextLengthError("{other} is {n}", field="prompt", n=3, other=Field("max_tokens")),
        TwostrokeError("of {thing}", thing=object),
    ],
)
def test_errors_arrive_with_their_class_and_their_sentence(error: TwostrokeError) -> None:
    (message,) = received(wire.RECEIVED_BY_SERVER, from_engine(wire.Accepted(1, error)))
    assert type(message.error) is type(error)
    assert message.error.sentence(str.upper) == error.sentence(str.upper)
    assert message.error.field == error.field


def test_an_error_of_the_server_arrives_as_what_both_ends_know() -> None:
    (message,) = received(
        wire.RECEIVED_BY_SERVER, from_engine(wire.Accepted(1, ServerStoppingError("over")))
    )
    assert message.error.code == "engine_stopped"


def test_a_frame_that_is_too_large_is_refused_by_its_head() -> None:
    with pytest.raises(InvalidMessageError, match="bytes"):
        received(wire.RECEIVED_BY_ENGINE, (MAX_BODY_BYTES + 1).to_bytes(4, "little"))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_frames_are_refused_or_are_messages(seed: int) -> None:
    rng = random.Random(seed)
    bodies = [from_server(message)[4:] for message in REQUESTS]
    for _ in range(2000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            del body[rng.randrange(len(body)) :]
        frame = len(body).to_bytes(4, "little") + body
        try:
            (decoded,) = received(wire.RECEIVED_BY_ENGINE, frame)
        except InvalidMessageError:
            continue
        assert isinstance(decoded, (*map(type, REQUESTS), wire.EmbedTexts))


def test_a_message_of_the_other_side_is_refused() -> None:
    with pytest.raises(InvalidMessageError):
        received(wire.RECEIVED_BY_ENGINE, from_engine(wire.RequestsStarted([1]))[:-1] + b"\xff")
    unknown = msgspec.msgpack.encode([99, 1])
    with pytest.raises(InvalidMessageError):
        received(wire.RECEIVED_BY_SERVER, len(unknown).to_bytes(4, "little") + unknown)


def test_an_error_of_an_unknown_kind_is_refused() -> None:
    frame = from_engine(wire.Accepted(1, OverloadedError("full")))
    unknown = frame.replace(b"OverloadedError", b"OverheatedError")
    assert len(unknown) == len(frame)
    assert unknown != frame
    with pytest.raises(InvalidMessageError, match="cannot be read"):
        received(wire.RECEIVED_BY_SERVER, unknown)
