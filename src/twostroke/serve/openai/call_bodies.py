"""OpenAI's message of an answer, with its reasoning and the calls of tools that it makes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.chat.call_reader import ArgumentsPiece, CallBegin, ReasoningPiece, TextPiece

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.chat.call_reader import Piece


class FunctionCallBody(msgspec.Struct):
    """A call's function, or a piece of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class CallBody(msgspec.Struct):
    """A call, or a piece of one: only the first piece has id, type and name."""

    function: FunctionCallBody
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class AnswerMessage(msgspec.Struct):
    """The message of an answer."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same: clients look for either name
    tool_calls: list[CallBody] | UnsetType = UNSET


def answer_message(pieces: Iterable[Piece], *, has_text: bool = True) -> AnswerMessage:
    """Return the message of a whole answer, from its pieces.

    Its content is null beside calls, and without `has_text`, where it has none.
    """
    calls, said, thought = list[CallBody](), "", ""
    for piece in pieces:
        if isinstance(piece, TextPiece):
            said += piece.text
        elif isinstance(piece, ReasoningPiece):
            thought += piece.text
        elif isinstance(piece, CallBegin):
            calls.append(call_body(piece))
            calls[-1].index = UNSET
        else:
            calls[-1].function.arguments += piece.text
    message = AnswerMessage("assistant", said if has_text and not calls else said or None)
    if thought:
        message.reasoning_content = message.reasoning = thought
    if calls:
        message.tool_calls = calls
    return message


def call_body(piece: CallBegin | ArgumentsPiece) -> CallBody:
    """Return what a stream says of a piece of a call."""
    if isinstance(piece, ArgumentsPiece):
        return CallBody(FunctionCallBody(piece.text), index=piece.index)
    call_id = f"call_{secrets.token_hex(12)}"
    return CallBody(FunctionCallBody("", piece.name), call_id, "function", piece.index)
