"""How a request wants its tokens chosen, checked once when it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.constraint import Constraint

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128
MAX_SEED = 2**64 - 1
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that decides which token comes next and when to end.

    The order of application is: logit bias, repetition, frequency and presence penalties,
    minimum tokens (end tokens barred), the constraint's mask, temperature, top-k, min-p, top-p,
    draw.
    `temperature` 0 is greedy: the largest logit, the lowest id among equals.
    `max_tokens` None means as many as the context holds. `seed` None draws a fresh one per
    request. `logprobs` None reports none, 0 the chosen token's alone, k the k likeliest beside it;
    they are taken from the model's own distribution, before any of the above. `prompt_logprobs`
    wants the same of each prompt token but the first, and then `max_tokens` may be 0. `stop` and
    `stop_token_ids` are kept as tuples; a list, or a single stop string, may be given. With a
    `constraint` the answer is one that it allows, or the beginning of one if it was cut; where
    nothing can be added any more it ends, whatever `min_tokens` says.

    Raises:
        RequestError: a value is outside its bounds; `param` names the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Refuse values that no request may carry."""
        if self.max_tokens is not None:
            fewest = 1 if self.prompt_logprobs is None else 0
            _check_int("max_tokens", self.max_tokens, fewest, _MAX_TOKENS)
        _check_int("min_tokens", self.min_tokens, 0, _MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})."
            raise RequestError(message, param="min_tokens")
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, _MAX_TOKENS)
        _check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), MAX_SEED)
        _check_int("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.constraint is not None and self.ignore_eos:
            message = "ignore_eos cannot be combined with a constraint, whose answers end."
            raise RequestError(message, param="ignore_eos")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        stops, ids = (_as_tuple(name, getattr(self, name)) for name in ("stop", "stop_token_ids"))
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)
        if not all(isinstance(stop, str) for stop in stops):
            raise RequestError("stop must be a string or a list of strings.", param="stop")
        is_wrong = any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in self.stop)
        if is_wrong or len(self.stop) > MAX_STOPS:
            bounds = f"{MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
            message = f"stop takes at most {bounds}."
            raise RequestError(message, param="stop")
        if len(self.stop_token_ids) > 256:
            raise RequestError("stop_token_ids takes at most 256 ids.", param="stop_token_ids")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, _MAX_TOKENS)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            message = "logit_bias must map token ids to numbers."
            raise RequestError(message, param="logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            message = f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens."
            raise RequestError(message, param="logit_bias")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, _MAX_TOKENS)
            _check_float("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _as_tuple(param: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str) and param == "stop":
        return (value,)
    if not isinstance(value, list | tuple):
        raise RequestError(f"{param} must be a list, not {value!r}.", param=param)
    return tuple(value)


def _check_int(param: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{param} must be an integer, not {value!r}.", param=param)
    if not low <= value <= high:
        message = f"{param} must be from {low} to {high}, not {value}."
        raise RequestError(message, param=param)


def _check_float(
    param: str, value: object, low: float, high: float, *, above: bool = False
) -> None:
    number = _to_float(value)
    if not math.isfinite(number):
        raise RequestError(f"{param} must be a finite number, not {value!r}.", param=param)
    if not low <= number <= high or (above and number == low):
        bound = "above" if above else "from"
        message = f"{param} must be {bound} {low:g} to {high:g}, not {number:g}."
        raise RequestError(message, param=param)


def _to_float(value: object) -> float:
    """Return a number as a float; NaN for anything else, too large an integer included."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
