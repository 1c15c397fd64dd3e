"""The messages between a server and an engine in another process; they travel in frames.

No message holds a path but `LoadModel`, nor a descriptor or a pointer; nothing is executed that
came in one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from twostroke.core.constraint import Constraint
from twostroke.core.embedding import EmbeddingParams
from twostroke.core.errors import Field, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import Hardware
from twostroke.core.options import EngineOptions
from twostroke.core.request import Hints
from twostroke.core.sampling import SamplingParams
from twostroke.core.transport.frames import frame
from twostroke.engine.client import Caller
from twostroke.engine.output import Output
from twostroke.engine.process.served import EngineFacts, EngineStatus
from twostroke.engine.status import StepProgress
from twostroke.model.program.kv_layout import CacheFormat

VERSION: Final = 3  # raise it when a message changes

_PLAIN: Final = (str, int, float, bool, type(None))  # facts of errors that stay what they are


class EngineCard(Frozen):
    """What a server cannot read from the model's files, or should not measure again.

    `draft` is the name of the model that guesses. `hardware` is None if the machine was not
    measured. `longest_step_s` is what the cost model says of the largest step, 0.0 if it cannot.
    """

    context_length: int
    identity: str
    cache: CacheFormat
    draft: str | None
    hardware: Hardware | None
    longest_step_s: float


# To the engine. `id` numbers what a server asks for.


class LoadModel(Frozen, array_like=True, tag=1):
    """The first message: what to load."""

    version: int
    model: str
    options: EngineOptions
    log_level: str


class Generate(Frozen, array_like=True, tag=2):
    """Prompts to answer; their requests have waited for `waited_s` already."""

    id: int
    prompts: list[list[int]]
    params: SamplingParams
    caller: Caller
    hints: Hints
    waited_s: float = 0.0


class EmbedTexts(Frozen, array_like=True, tag=3):
    """Texts to embed."""

    id: int
    texts: list[list[int]]
    params: EmbeddingParams
    caller: Caller
    waited_s: float = 0.0


class Cancel(Frozen, array_like=True, tag=4):
    """End what was asked for."""

    id: int


class Compile(Frozen, array_like=True, tag=5):
    """A constraint to compile within a time, and to keep for requests that have it."""

    id: int
    constraint: Constraint
    limit_s: float = math.inf


class GetStatus(Frozen, array_like=True, tag=6):
    """Ask for a `EngineStatus` with these spans: their seconds, and how long ago they ended."""

    id: int
    spans: list[tuple[int, int]]


class Flush(Frozen, array_like=True, tag=7):
    """No more requests come now."""


class Close(Frozen, array_like=True, tag=8):
    """Stop."""


Request = LoadModel | Generate | EmbedTexts | Cancel | Compile | GetStatus | Flush | Close

# From the engine.


class Loading(Frozen, array_like=True, tag=1):
    """Bytes of weights that are ready, of how many."""

    done: int
    total: int


class Log(Frozen, array_like=True, tag=2):
    """A line for the server's log."""

    logger: str
    level: int
    text: str


class EngineReady(Frozen, array_like=True, tag=3):
    """The engine takes requests."""

    card: EngineCard
    facts: EngineFacts
    reading: EngineStatus


class EngineFailed(Frozen, array_like=True, tag=4):
    """The last message: the engine could not start, or has stopped."""

    error: TwostrokeError


class Accepted(Frozen, array_like=True, tag=5):
    """Requests were queued; or not, with the error."""

    id: int
    error: TwostrokeError | None = None


class RequestsStarted(Frozen, array_like=True, tag=6):
    """These hold pages, or are compiled, from now on: they are to blame for a death."""

    ids: list[int]


class OutputBatch(Frozen, array_like=True, tag=7):
    """The outputs of a step, each with the id of what was asked for."""

    outputs: list[tuple[int, Output]]


class Compiled(Frozen, array_like=True, tag=8):
    """A constraint is known; `gaps` are as a matcher's."""

    id: int
    gaps: tuple[str, ...] = ()
    error: TwostrokeError | None = None


class StatusReply(Frozen, array_like=True, tag=9):
    """The answer to `GetStatus`."""

    id: int
    reading: EngineStatus


class Heartbeat(Frozen, array_like=True, tag=10):
    """The process lives, whatever its engine does; it has lent so many pages to decode engines."""

    progress: StepProgress
    num_lent: int = 0


Answer = (
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

T = TypeVar("T")


class _ErrorForm(Frozen, array_like=True):
    """An error: the name of its class, and its arguments. `fields` are the facts that are one."""

    kind: str
    reason: str
    field: str | None
    facts: dict[str, str | int | float | bool | None]
    fields: tuple[str, ...]


def _to_form(value: object) -> object:
    if isinstance(value, TwostrokeError):
        facts: dict[str, Any] = {
            name: fact if type(fact) in _PLAIN else str(fact) for name, fact in value.facts.items()
        }
        fields = tuple(name for name, fact in value.facts.items() if isinstance(fact, Field))
        return _ErrorForm(_name(type(value)), value.reason, value.field, facts, fields)
    if isinstance(value, np.ndarray):
        return [*value.shape, value.astype("<f4").tobytes()]
    raise TypeError(f"{type(value).__name__} does not travel")


def _from_form(kind: type, value: Any) -> object:
    if kind is TwostrokeError:
        form = msgspec.convert(value, _ErrorForm)
        facts: dict[str, Any] = dict(form.facts)
        facts.update({name: Field(facts[name]) for name in form.fields if name in facts})
        return _kinds()[form.kind](form.reason, field=form.field, **facts)
    *shape, data = value
    return np.frombuffer(data, "<f4").reshape(shape)


@cache
def _kinds() -> dict[str, type[TwostrokeError]]:
    """Return the errors that both ends know, by name."""
    found: dict[str, type[TwostrokeError]] = {}
    waiting = [TwostrokeError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__ == TwostrokeError.__module__:
            found[kind.__name__] = kind
            waiting += kind.__subclasses__()
    return found


def _name(kind: type[TwostrokeError]) -> str:
    """Return the name of the nearest class that both ends know."""
    return next(one.__name__ for one in kind.__mro__ if one.__module__ == TwostrokeError.__module__)


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_to_form)
requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(
    Request, dec_hook=_from_form
)
answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(
    Answer, dec_hook=_from_form
)


def encode(value: object) -> bytes:
    """Return a message, or a part of one, in MessagePack."""
    return _encoder.encode(value)


def pack(message: Request | Answer) -> bytes:
    """Return a message's frame."""
    return frame(encode(message))
