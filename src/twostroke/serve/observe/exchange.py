"""One request and its response, as logs and traces tell of it: figures, and nothing of its text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from twostroke.engine.output import Timings

if TYPE_CHECKING:
    from starlette.types import Scope

    from twostroke.core.request import FinishReason
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.output import Usage
    from twostroke.serve.job import Job
    from twostroke.serve.running import Answers, Vectors

_KEY: Final = "exchange"
CLIENT_GONE: Final = 499  # as nginx has it: nobody was left to be answered


@dataclass(frozen=True, slots=True)
class Generated:
    """The part of an exchange that the engine was asked for.

    `response_id` is the protocol's, `operation` its route. `answers` go on while this is read.
    """

    response_id: str
    model: str
    service: str
    is_stream: bool
    params: SamplingParams
    num_choices: int
    answers: Answers

    @property
    def usage(self) -> Usage:
        """What the ended answers took."""
        return self.answers.usage

    @property
    def num_prompt(self) -> int:
        """How many tokens the prompts have."""
        return self.answers.num_prompt

    @property
    def num_cached(self) -> int:
        """How many of them the prefix cache had, as far as that is known."""
        return sum(self.answers.cached_tokens.values())

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token, also of answers that were cut off."""
        timings = self.timings
        return self.answers.ttft_s if timings is None else timings.ttft_s

    @property
    def num_tokens(self) -> int:
        """How many tokens have come, those of an answer that was cut off included."""
        return self.answers.num_tokens

    @property
    def ends(self) -> list[FinishReason]:
        """Why the answers that have ended did."""
        return [reason for reason, _, _ in self.answers.ended.values()]

    @property
    def timings(self) -> Timings | None:
        """From the first answer's beginning to the last one's end; None before any has ended."""
        all_ = [timings for _, _, timings in self.answers.ended.values()]
        if not all_:
            return None
        return Timings(
            arrival_s=min(timings.arrival_s for timings in all_),
            started_s=min(timings.started_s for timings in all_),
            first_token_s=min(timings.first_token_s for timings in all_),
            last_token_s=max(timings.last_token_s for timings in all_),
        )

    @property
    def tpot_s(self) -> float | None:
        """The mean of the answers' times per output token; None where none has two tokens."""
        ended = self.answers.ended.values()
        each = [timings.tpot_s(usage.completion_tokens) for _, usage, timings in ended]
        known = [tpot_s for tpot_s in each if tpot_s is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The part of an exchange whose texts become `vectors`, which come while this is read."""

    model: str
    service: str
    vectors: Vectors


@dataclass(slots=True)
class Exchange:
    """What is known of a request; layers that know more add it.

    Times are those of the monotonic clock. `endpoint` is the route that answered. `status` is 0
    until a response begins. `error` is the code of what went wrong, `generated` None where no
    answer was asked for, `embedded` where no embedding was.
    """

    request_id: str
    method: str
    path: str
    traceparent: str = ""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    endpoint: str = "unknown"
    status: int = 0
    error: str | None = None
    generated: Generated | None = None
    embedded: Embedded | None = None
    is_client_gone: bool = False
    trace_id: str = ""

    def generate(self, response_id: str, model: str, job: Job, answers: Answers) -> None:
        """Note what the engine was asked for."""
        self.generated = Generated(
            response_id,
            model,
            job.caller.service,
            job.stream,
            job.params,
            job.num_choices,
            answers,
        )

    def end(self) -> None:
        """Note that nothing more comes."""
        self.ended_s = time.monotonic()
        generated = self.generated
        if generated is not None:
            self.error = self.error or generated.answers.error
            is_cut = len(generated.answers.ended) < generated.num_choices
            self.is_client_gone = is_cut and self.error is None
        if not self.status or self.status == CLIENT_GONE:
            self.is_client_gone, self.status = True, CLIENT_GONE


def attach(exchange: Exchange, scope: Scope) -> None:
    """Let inner layers find an exchange."""
    scope.setdefault("state", {})[_KEY] = exchange


def exchange_of(scope: Scope) -> Exchange | None:
    """Return the exchange that the outermost layer began; None without it."""
    found: Exchange | None = scope.get("state", {}).get(_KEY)
    return found
