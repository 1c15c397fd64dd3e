"""The events of an answer: blocks come in order, and each opens, grows and closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.constraint import ReasoningSection
from twostroke.core.request import FinishReason
from twostroke.core.step import TokenLogprobs
from twostroke.engine.chat.reader import PLAIN, AnswerFormat
from twostroke.engine.output import Output, Timings, Usage, join
from twostroke.server.generation.events import (
    AnswerFinished,
    BlockClosed,
    BlockKind,
    BlockOpened,
    ChoiceEnded,
    ChoiceStarted,
    ContentAdded,
    EventReader,
)

if TYPE_CHECKING:
    from support.servers import LiveServer
    from twostroke.server.generation.events import Event

ANSWER = (
    '<think>the world</think>hello<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
)
READING = AnswerFormat(functions=("f",), preface=ReasoningSection("<think>", "</think>"))
USAGE, TIMINGS = Usage(3, 0, 9), Timings(0.0, 0.0, 1.0, 2.0)


def outputs(server: LiveServer, text: str, reason: FinishReason) -> list[Output]:
    """Return an answer as engine outputs, one for each character, which counts as a token."""
    token = server.client.card.tokenizer.encode("a")[0]
    results = [Output(0, character, (token,), (TokenLogprobs(-1.0, (), ()),)) for character in text]
    return [*results, Output(0, "", (), finish_reason=reason, usage=USAGE, timings=TIMINGS)]


def read(server: LiveServer, reading: AnswerFormat, answer: list[Output]) -> list[Event]:
    reader = EventReader(reading, server.client.card.tokenizer, has_logprobs=True)
    return [*(event for output in answer for event in reader.read(output)), reader.finish(USAGE)]


def blocks(events: list[Event]) -> list[tuple[BlockKind, str, str, bool]]:
    """Return the content blocks that were closed."""
    closed = [event.block for event in events if isinstance(event, BlockClosed)]
    return [(block.kind, block.name, block.text, block.is_cut) for block in closed]


def test_blocks_open_grow_and_close_in_order(shared_server: LiveServer) -> None:
    events = read(shared_server, READING, outputs(shared_server, ANSWER, FinishReason.STOP))
    assert blocks(events) == [
        (BlockKind.REASONING, "", "the world", False),
        (BlockKind.TEXT, "", "hello", False),
        (BlockKind.CALL, "f", '{"a": 1}', False),
    ]
    assert isinstance(events[0], ChoiceStarted)
    open_ = None
    for event in events:
        match event:
            case BlockOpened():
                assert open_ is None
                open_ = event.block
            case ContentAdded():
                assert event.block is open_
            case BlockClosed():
                assert event.block is open_
                open_ = None
    *_, choice_end, finished = events
    assert isinstance(choice_end, ChoiceEnded)
    assert choice_end.has_calls
    assert isinstance(finished, AnswerFinished)


def test_a_whole_answer_has_the_blocks_of_its_stream(shared_server: LiveServer) -> None:
    for text in (ANSWER, "hello", "", ANSWER[:-20], "<think>the"):
        for reading in (PLAIN, READING):
            answer = outputs(shared_server, text, FinishReason.LENGTH)
            reader = EventReader(reading, shared_server.client.card.tokenizer, has_logprobs=True)
            all_blocks = blocks(list(reader.read_whole([join(answer)], USAGE)))
            assert all_blocks == blocks(read(shared_server, reading, answer))
            assert all_blocks[-1][-1]  # cut at the limit


def test_every_token_is_scored_once(shared_server: LiveServer) -> None:
    answer = outputs(shared_server, ANSWER, FinishReason.STOP)
    added = [e for e in read(shared_server, READING, answer) if isinstance(e, ContentAdded)]
    assert sum(len(event.scored) for event in added) == len(ANSWER)
    for event in added:
        if event.block.kind is BlockKind.REASONING:
            assert event.num_reasoning == len(event.scored)
