"""What travels between a server and its engine arrives as it was, and nothing else is taken."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from twostroke.core.constraint import Constraint, ReasoningSection
from twostroke.core.errors import ContextLengthError, Field, OverloadedError, TwostrokeError
from twostroke.core.options import EngineOptions
from twostroke.core.request import FinishReason, Hints
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import TokenLogprobs
from twostroke.core.transport.frames import MAX_FRAME, Frames, WireError
from twostroke.engine.client import Caller
from twostroke.engine.output import Output, Timings, Usage
from twostroke.engine.process import messages as wire
from twostroke.server.http.errors import ServerStoppingError

PARAMS = SamplingParams(
    max_tokens=5,
    logit_bias={3: 1.5},
    stop=["a", "b"],
    stop_token_ids=[1],
    constraint=Constraint("regex", "a+", "guided_regex", ReasoningSection("<think>", "</think>")),
    shown_ids=frozenset((7,)),
    seed=2**64 - 1,
)
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


def test_requests_arrive_as_they_were_however_they_are_cut() -> None:
    data = b"".join(map(wire.pack, REQUESTS))
    rng = random.Random(1)
    for _ in range(20):
        frames, found, start = Frames(wire.server_messages), [], 0
        while start < len(data):
            end = start + rng.randrange(1, 200)
            found += frames.feed(data[start:end])
            start = end
        assert found == REQUESTS


def test_messages_are_taken_even_if_the_reader_stops_at_one() -> None:
    frames = Frames(wire.server_messages)
    for message in frames.feed(b"".join(map(wire.pack, REQUESTS))):
        assert message == REQUESTS[0]
        break
    assert list(frames.feed(b"")) == REQUESTS[1:]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4)])
def test_outputs_arrive_as_they_were(shape: tuple[int, ...]) -> None:
    vector = np.arange(4, dtype=np.float32).reshape(shape)
    said = wire.OutputBatch([(1, Output(0, "hello", (5,))), (2, LAST), (3, Output(0, "", ()))])
    said.outputs[2][1].embedding = vector
    (found,) = Frames(wire.engine_messages).feed(wire.pack(said))
    assert found.outputs[:2] == said.outputs[:2]
    assert np.array_equal(found.outputs[2][1].embedding, vector)


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full"),
        ContextLengthError("{other} is {n}", field="prompt", n=3, other=Field("max_tokens")),
        TwostrokeError("of {thing}", thing=object),
    ],
)
def test_errors_arrive_with_their_class_and_their_sentence(error: TwostrokeError) -> None:
    (found,) = Frames(wire.engine_messages).feed(wire.pack(wire.Accepted(1, error)))
    assert type(found.error) is type(error)
    assert found.error.sentence(str.upper) == error.sentence(str.upper)
    assert found.error.field == error.field


def test_an_error_of_the_server_arrives_as_what_both_ends_know() -> None:
    (found,) = Frames(wire.engine_messages).feed(
        wire.pack(wire.Accepted(1, ServerStoppingError("over")))
    )
    assert found.error.code == "engine_stopped"


def test_a_frame_that_is_too_large_is_refused_by_its_head() -> None:
    with pytest.raises(WireError, match="bytes"):
        list(Frames(wire.server_messages).feed((MAX_FRAME + 1).to_bytes(4, "little")))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_frames_are_refused_or_are_messages(seed: int) -> None:
    rng = random.Random(seed)
    bodies = [wire.pack(message)[4:] for message in REQUESTS]
    for _ in range(2000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            del body[rng.randrange(len(body)) :]
        frame = len(body).to_bytes(4, "little") + body
        try:
            (found,) = Frames(wire.server_messages).feed(frame)
        except WireError:
            continue
        assert isinstance(found, (*map(type, REQUESTS), wire.EmbedTexts))


def test_a_message_of_the_other_side_is_refused() -> None:
    with pytest.raises(WireError):
        list(Frames(wire.server_messages).feed(wire.pack(wire.RequestsStarted([1]))[:-1] + b"\xff"))
    unknown = msgspec.msgpack.encode([99, 1])
    with pytest.raises(WireError):
        list(Frames(wire.engine_messages).feed(len(unknown).to_bytes(4, "little") + unknown))


def test_an_error_of_an_unknown_kind_is_refused() -> None:
    frame = wire.pack(wire.Accepted(1, OverloadedError("full")))
    unknown = frame.replace(b"OverloadedError", b"OverheatedError")
    assert len(unknown) == len(frame)
    assert unknown != frame
    with pytest.raises(WireError, match="cannot be read"):
        list(Frames(wire.engine_messages).feed(unknown))
