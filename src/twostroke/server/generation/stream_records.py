"""Records of a stream, from which another server continues the stream.

A record has the engine's outputs since the last record, and the number of events made from all
outputs so far. Another server reads these outputs as if its own engine had sent them, skips the
events that the client already has, and lets its engine continue the answers
(`engine/resumption.py`). In this way its event readers, protocol encoders and schema guards get the
state that they had at the first server.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.request import FinishReason
from twostroke.engine.output import Output, Timings  # noqa: TC001 - read by msgspec
from twostroke.engine.process.messages import encode
from twostroke.engine.resumption import DeliveredAnswer
from twostroke.server.http.router_messages import LOST_MARK, RECORD_MARK
from twostroke.server.models.about import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.errors import EngineStoppedError
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.resumption import AnswerProgress
    from twostroke.server.generation.events import Event
    from twostroke.server.generation.job import EncodedJob
    from twostroke.server.generation.protocol import ResponseInfo


_RESPONSE_ID: Final = re.compile(r"[a-z]*[-_]?[0-9a-f]{32}")
_logger = logging.getLogger("twostroke.serve")


class StreamOrigin(Frozen, array_like=True):
    """The facts on which all tokens and events of a stream depend.

    Attributes:
        answer_key: a digest of the prompts, the parameters and the engine's numerics.
        response_id: the id of the response.
        created_s: when the response was created, in Unix time.
        seed: the seed of the answers.
    """

    answer_key: bytes
    response_id: str
    created_s: int
    seed: int


class StreamRecord(Frozen, array_like=True):
    """The line that a server adds to a stream after each write, for a router.

    Attributes:
        outputs: the engine's outputs since the last record.
        num_events: the number of the stream's events so far.
        origin: facts about the stream; only in the first record.
    """

    outputs: list[Output]
    num_events: int
    origin: StreamOrigin | None = None


class ReplayError(TwostrokeError):
    """This server cannot continue the stream of another server."""

    http_status = 409
    code = "cannot_continue"


class StreamReplay(Frozen):
    """The part of a stream that a client already got from other servers.

    Attributes:
        origin: facts about the stream.
        outputs: the outputs of the other servers' engines so far.
        num_events: the number of events that the client has.
    """

    origin: StreamOrigin
    outputs: list[Output]
    num_events: int

    @classmethod
    def of(cls, lines: Sequence[bytes]) -> StreamReplay | None:
        """Read the records that a router has added to a request; None if there are none.

        Raises:
            RequestError: the records are damaged.
        """
        if not lines:
            return None
        try:
            records = [_decoder.decode(b64decode(line, validate=True)) for line in lines]
        except (ValueError, msgspec.MsgspecError):
            raise RequestError("The records of the stream are damaged.") from None
        origin = records[0].origin
        if origin is None:
            raise RequestError("The records of the stream have no beginning.")
        if _RESPONSE_ID.fullmatch(origin.response_id) is None:
            raise RequestError("The records of the stream have an impossible id.")
        outputs = [output for record in records for output in record.outputs]
        return cls(origin, outputs, records[-1].num_events)

    def check(self, answer_key: bytes, num_prompts: Sequence[int]) -> None:
        """Check that this server gives the same answers, and that the outputs are consistent.

        `num_prompts` has the length of each answer's prompt in tokens.

        Raises:
            ReplayError: the other server had another prompt, other parameters or other numerics.
            RequestError: the outputs contradict each other.
        """
        if answer_key != self.origin.answer_key:
            raise ReplayError("The stream began with other tokens or other arithmetic.")
        num_output = [0] * len(num_prompts)
        ended_answers: set[int] = set()
        for output in self.outputs:
            index, usage = output.index, output.usage
            if not 0 <= index < len(num_prompts) or index in ended_answers:
                raise RequestError("The records of the stream have an answer too many.")
            num_output[index] += len(output.token_ids)
            if output.finish_reason is not None:
                ended_answers.add(index)
                _check_end(output)
            if usage is not None and (
                usage.prompt_tokens != num_prompts[index]
                or not 0 <= usage.completion_tokens <= num_output[index]
                or not 0 <= usage.cached_tokens <= usage.prompt_tokens
            ):
                raise RequestError("The records of the stream have an impossible usage.")

    def progress(self, num_answers: int) -> tuple[AnswerProgress, ...]:
        """Return the part of each of `num_answers` answers that the client already has."""
        now_s = time.monotonic()
        delivered = [DeliveredAnswer() for _ in range(num_answers)]
        for output in self.outputs:
            delivered[output.index].add(output, now_s)
        return tuple(answer.progress(now_s) for answer in delivered)


class StreamRecorder:
    """Adds records to a stream for a router, and skips the events that the client already has.

    Attributes:
        replay: the part of the stream that the client got from other servers, if any.
    """

    def __init__(self, line_end: bytes, replay: StreamReplay | None) -> None:
        """Record a stream whose lines end with `line_end`, and which continues after `replay`."""
        self.replay = replay
        self._line_end = line_end
        self._num_sent = 0 if replay is None else replay.num_events
        self._num_replayed = 0 if replay is None else len(replay.outputs)
        self._num_events = 0
        self._outputs: list[Output] = []
        self._origin: StreamOrigin | None = None
        self._has_own_output = False

    def begin(self, info: ResponseInfo, encoded: EncodedJob, numerics: str) -> None:
        """Choose the seed of the answers; check that this server can continue the replay, if any.

        `numerics` is the engine's text from `numerics_of`; empty if its model is not loaded.

        Raises:
            ReplayError: this server would give other answers.
            RequestError: the records contradict each other.
        """
        replay = self.replay
        if replay is None:
            encoded.fix_seed()
        else:
            encoded.params = replace(encoded.params, seed=replay.origin.seed)
        if replay is not None and not numerics:
            raise ReplayError("The model is not loaded here, so its arithmetic is not known.")
        key = answer_key(numerics, encoded)
        if replay is None:
            assert encoded.params.seed is not None
            self._origin = StreamOrigin(key, info.id, info.created_s, encoded.params.seed)
        else:
            lengths = [len(prompt) for prompt in encoded.prompts for _ in range(encoded.params.n)]
            replay.check(key, lengths)

    def progress(self, num_answers: int) -> tuple[AnswerProgress, ...]:
        """Return the part of each answer that other servers have sent; () if there is none."""
        return () if self.replay is None else self.replay.progress(num_answers)

    def replayed_outputs(self) -> Iterator[Output]:
        """Yield the outputs of other servers, with their times moved to this machine's clock.

        An answer that ended at another server ends at the current time.
        """
        now_s = time.monotonic()
        for output in self.replay.outputs if self.replay is not None else ():
            if output.timings is not None:
                output.timings = _moved(output.timings, now_s - output.timings.last_token_s)
            yield output

    def add(self, output: Output) -> None:
        """Add an output of the engine, or a replayed output, before its events are written."""
        if self._num_replayed:
            self._num_replayed -= 1
        else:
            self._has_own_output = True
            self._outputs.append(output)

    def explain(self, error: Exception) -> Exception:
        """Return the error to report for an `error` of the stream.

        An unexpected error while replayed outputs are read is reported as damaged records: outputs
        that the other server could read raise no such error.
        """
        is_expected = self.replay is None or self._has_own_output
        if is_expected or isinstance(error, TwostrokeError):
            return error
        _logger.warning("The records of a stream cannot be read.", exc_info=error)
        return RequestError("The records of the stream are damaged.")

    def write(self, events: Sequence[Event], write: Callable[[Event], bytes]) -> bytes:
        """Return the bytes of events that the client does not have, and a record of them.

        `write` encodes an event in the protocol's form. The result is empty if there is neither a
        new event nor a new output.
        """
        parts: list[bytes] = []
        for event in events:
            data = write(event)
            self._num_events += 1
            if self._num_events > self._num_sent:
                parts.append(data)
        if not parts and not self._outputs:
            return b""
        record = StreamRecord(self._outputs, max(self._num_events, self._num_sent), self._origin)
        self._outputs, self._origin = [], None
        return b"".join([*parts, RECORD_MARK, b64encode(encode(record)), self._line_end])

    def loss(self, error: EngineStoppedError) -> bytes:
        """Return the last line of a stream that this server cannot finish because of `error`.

        The line tells the router that another server can continue the stream. Errors of other types
        concern the request itself, and end the stream for the client.
        """
        return LOST_MARK + error.code.encode() + self._line_end


def _check_end(output: Output) -> None:
    """Check that the last output of an answer has all fields that its events need.

    Raises:
        RequestError: a field is missing.
    """
    usage, timings = output.usage, output.timings
    is_whole = output.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
    if usage is None or timings is None or not is_whole or output.error is not None:
        raise RequestError("The records of the stream have an answer without its usage.")
    times_s = (timings.arrival_s, timings.started_s, timings.first_token_s, timings.last_token_s)
    if not all(map(math.isfinite, times_s)):
        raise RequestError("The records of the stream have impossible times.")


def answer_key(numerics: str, encoded: EncodedJob) -> bytes:
    """Return a digest of a job that is equal on all servers that give the same answers to it."""
    content: tuple[str, str, list[list[int]], SamplingParams] = (
        VERSION,
        numerics,
        encoded.prompts,
        encoded.params,
    )
    return hashlib.sha256(encode(content)).digest()


def _moved(timings: Timings, seconds: float) -> Timings:
    return replace(
        timings,
        arrival_s=timings.arrival_s + seconds,
        started_s=timings.started_s + seconds,
        first_token_s=timings.first_token_s + seconds,
        last_token_s=timings.last_token_s + seconds,
    )


def _refuse(type_: type, _value: Any) -> NoReturn:
    raise ValueError(f"a record has no {type_}")


_decoder: Final = msgspec.msgpack.Decoder(StreamRecord, dec_hook=_refuse)
