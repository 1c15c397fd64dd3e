"""The messages between a server and its engine process, which are sent by a `Connection`.

Only `LoadModel` holds a path. No message holds a file descriptor or a pointer, and nothing in a
message is executed as code.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np

from twostroke.core.constraint import Constraint
from twostroke.core.errors import Field, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import Hardware
from twostroke.core.options import EngineOptions
from twostroke.core.request import EmbeddingParams, Hints
from twostroke.core.sampling import SamplingParams
from twostroke.core.transport.frames import MessageFormat
from twostroke.engine.client import Caller
from twostroke.engine.output import Output
from twostroke.engine.process.served import EngineFacts, EngineStatus
from twostroke.engine.resumption import AnswerProgress
from twostroke.engine.status import StepProgress
from twostroke.model.program.kv_layout import CacheFormat

VERSION: Final = 8  # raise it when a message changes

_PLAIN_TYPES: Final = (str, int, float, bool, type(None))  # facts of errors are sent unchanged


class EngineCard(Frozen):
    """Facts about a loaded model that the engine process sends to the server.

    The server cannot read them from the model's files. `draft` is the name of the draft model, if
    any. `hardware` is None if the machine was not measured. `longest_step_s` is the predicted time
    of the largest step, 0.0 if unknown.
    """

    context_length: int
    identity: str
    cache: CacheFormat
    draft: str | None
    hardware: Hardware | None
    longest_step_s: float


# From the server. `id` is the number of a call; the engine's replies repeat it.


class LoadModel(Frozen, array_like=True, tag=1):
    """The server's first message: load this model with these options."""

    version: int
    model: str
    options: EngineOptions
    log_level: str


class Generate(Frozen, array_like=True, tag=2):
    """The server asks the engine to answer prompts.

    The requests of the call have waited `waited_s` seconds in the server. `progress` has the part
    of each answer that was delivered before the engine died; it is empty if no engine died.
    """

    id: int
    prompts: list[list[int]]
    params: SamplingParams
    caller: Caller
    hints: Hints
    waited_s: float = 0.0
    progress: tuple[AnswerProgress, ...] = ()


class EmbedTexts(Frozen, array_like=True, tag=3):
    """The server asks the engine to embed texts.

    `waited_s` and `progress` are as in `Generate`.
    """

    id: int
    texts: list[list[int]]
    params: EmbeddingParams
    caller: Caller
    waited_s: float = 0.0
    progress: tuple[AnswerProgress, ...] = ()


class Cancel(Frozen, array_like=True, tag=4):
    """The server cancels the requests of a call."""

    id: int


class Compile(Frozen, array_like=True, tag=5):
    """The server asks to compile a constraint within `limit_s` seconds.

    The compiled constraint is cached for later requests.
    """

    id: int
    constraint: Constraint
    limit_s: float = math.inf


class GetStatus(Frozen, array_like=True, tag=6):
    """The server asks for an `EngineStatus`.

    Each of `spans` is a time span for counts: its length in seconds, and how many seconds ago it
    ended.
    """

    id: int
    spans: list[tuple[int, int]]


class Flush(Frozen, array_like=True, tag=7):
    """The server asks the engine to start a batch that is not full, as no more requests come."""


class Close(Frozen, array_like=True, tag=8):
    """The server asks the engine process to end."""


class ChangeLimits(Frozen, array_like=True, tag=9):
    """The server changes the limits of later steps."""

    token_budget: int
    max_running: int


ServerMessage = (
    LoadModel | Generate | EmbedTexts | Cancel | Compile | GetStatus | Flush | Close | ChangeLimits
)

# From the engine.


class Loading(Frozen, array_like=True, tag=1):
    """The engine process reports that `done` of `total` bytes of weights are ready."""

    done: int
    total: int


class Log(Frozen, array_like=True, tag=2):
    """The engine process asks the server to write a line to the server's log."""

    logger: str
    level: int
    text: str


class EngineReady(Frozen, array_like=True, tag=3):
    """The engine process reports that it takes requests, with facts about the engine."""

    card: EngineCard
    facts: EngineFacts
    status: EngineStatus


class EngineFailed(Frozen, array_like=True, tag=4):
    """The engine process's last message: the engine could not start, or has stopped."""

    error: TwostrokeError


class Accepted(Frozen, array_like=True, tag=5):
    """The engine process reports that a call's requests were queued, or refused with `error`."""

    id: int
    error: TwostrokeError | None = None


class RequestsStarted(Frozen, array_like=True, tag=6):
    """The engine process reports calls just before it computes or compiles them for the first time.

    If the process dies next, these calls may be the cause. Their requests are in the next step, or
    their constraints are compiled next. The message has the ids of the calls.
    """

    ids: list[int]


class OutputBatch(Frozen, array_like=True, tag=7):
    """The outputs of a step of the engine, each with the id of its call."""

    outputs: list[tuple[int, Output]]


class Compiled(Frozen, array_like=True, tag=8):
    """The engine process reports that a constraint was compiled, or refused with `error`.

    `unenforced_keywords` are as in `GrammarMatcher`.
    """

    id: int
    unenforced_keywords: tuple[str, ...] = ()
    error: TwostrokeError | None = None


class StatusReply(Frozen, array_like=True, tag=9):
    """The engine process's answer to `GetStatus`."""

    id: int
    status: EngineStatus


class Heartbeat(Frozen, array_like=True, tag=10):
    """The engine process reports that it is alive.

    `num_pages_leased` pages were leased to decode engines so far.
    """

    progress: StepProgress
    num_pages_leased: int = 0


EngineMessage = (
    Loading
    | Log
    | EngineReady
    | EngineFailed
    | Accepted
    | RequestsStarted
    | OutputBatch
    | Compiled
    | StatusReply
    | Heartbeat
)


class _EncodedError(Frozen, array_like=True):
    """An error in a message between server and engine: the name of its class, and arguments.

    `fields` are the keys of `facts` whose values are names of request fields (of the type `Field`).
    """

    class_name: str
    reason: str
    field: str | None
    facts: dict[str, str | int | float | bool | None]
    fields: tuple[str, ...]


def _encode_other(value: object) -> object:
    if isinstance(value, TwostrokeError):
        facts: dict[str, Any] = {
            name: fact if type(fact) in _PLAIN_TYPES else str(fact)
            for name, fact in value.facts.items()
        }
        fields = tuple(name for name, fact in value.facts.items() if isinstance(fact, Field))
        return _EncodedError(
            class_name=_shared_class_name(type(value)),
            reason=value.reason,
            field=value.field,
            facts=facts,
            fields=fields,
        )
    if isinstance(value, np.ndarray):
        return [*value.shape, value.astype("<f4").tobytes()]
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


def _decode_other(type_: type, value: Any) -> object:
    if type_ is TwostrokeError:
        encoded = msgspec.convert(value, _EncodedError)
        facts: dict[str, Any] = dict(encoded.facts)
        facts.update({name: Field(facts[name]) for name in encoded.fields if name in facts})
        error_class = _error_classes()[encoded.class_name]
        return error_class(encoded.reason, field=encoded.field, **facts)
    *shape, data = value
    return np.frombuffer(data, "<f4").reshape(shape)


@cache
def _error_classes() -> dict[str, type[TwostrokeError]]:
    """Return the error classes of `core.errors`, which both processes know, by name."""
    classes: dict[str, type[TwostrokeError]] = {}
    pending = [TwostrokeError]
    while pending:
        class_ = pending.pop()
        if class_.__module__ == TwostrokeError.__module__:
            classes[class_.__name__] = class_
            pending += class_.__subclasses__()
    return classes


def _shared_class_name(class_: type[TwostrokeError]) -> str:
    """Return the name of the nearest base class in `core.errors`, which both processes know."""
    return next(
        base.__name__ for base in class_.__mro__ if base.__module__ == TwostrokeError.__module__
    )


# Encodes a message, or a part of a message, as MessagePack.
encode: Final = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode

RECEIVED_BY_ENGINE: Final[MessageFormat[ServerMessage]] = MessageFormat(
    ServerMessage, encode=encode, decode_other=_decode_other
)
RECEIVED_BY_SERVER: Final[MessageFormat[EngineMessage]] = MessageFormat(
    EngineMessage, encode=encode, decode_other=_decode_other
)
