"""The question that a plan answers: a load, how it is run, and its latency objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen, check_choice, check_range
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions, ComputeOptions
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS

if TYPE_CHECKING:
    from twostroke.lab.planner.devices import Device

MEMORY_SHARE = 0.9  # of a device's memory; the rest is for activations and the runtime
MAX_DEVICES = 1024
MIN_EFFICIENCY = 0.001  # lowest accepted MFU and MBU: any engine reaches more
_DEFAULT_TOKEN_BUDGET = 2048  # tokens of a step on devices other than this machine
MAX_USERS = 100_000
DEFAULT_THINK_S = 20.0  # seconds between an answer and the user's next request
DEFAULT_MAX_STREAMS = 256  # without a TPOT objective: an engine's default limit of running requests


class Question(Frozen):
    """The question that a plan answers: a load, how it is run, and its latency objectives.

    Attributes:
        prompt: tokens of a request's prompt.
        output: tokens of its answer.
        cached: share of the prompt that is in the prefix cache, from 0 to below 1.
        count: devices that divide each layer.
        kv_format: number format of keys and values, a key of `FORMATS`.
        streams: requests that decode together. None: the most that fit and meet the objectives,
            at most `DEFAULT_MAX_STREAMS` without a TPOT objective.
        ttft_s, tpot_s: latency objectives in seconds; None for no objective.
        mfu, mbu: shares of the peak arithmetic and bandwidth that an engine reaches. 1 gives
            physical limits.
        usd_per_hour: price of one device; None for the price in the table.
        token_budget: most tokens that a step computes. Decoding streams take one token each,
            and the rest goes to chunks of prompts. None: each prompt is computed in one step.
        users: number of users who each send a request, wait for the answer, think, and send the
            next one; None for a plan without users.
        think_s: seconds between an answer and the user's next request.
    """

    prompt: int = 1024
    output: int = 256
    cached: float = 0.0
    count: int = 1
    kv_format: str = "f16"
    streams: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    mfu: float = 1.0
    mbu: float = 1.0
    usd_per_hour: float | None = None
    token_budget: int | None = None
    users: int | None = None
    think_s: float = DEFAULT_THINK_S

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a value has a wrong type or is out of range."""
        for field in ("prompt", "output", "token_budget", "count", "streams", "users"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UsageError(f"must be a whole number, got {value!r}.", field=field)
        check_range(self, "prompt", "output", "token_budget", low=1, high=1 << 27)
        check_range(self, "count", low=1, high=MAX_DEVICES)
        check_range(self, "streams", low=1, high=1 << 20)
        check_range(self, "users", low=1, high=MAX_USERS)
        check_range(self, "think_s", low=0, high=1e6)
        if not 0 <= self.cached < 1:
            raise UsageError(f"must be at least 0 and below 1, got {self.cached}.", field="cached")
        check_range(self, "mfu", "mbu", low=MIN_EFFICIENCY, high=1)
        check_range(self, "ttft_s", "tpot_s", "usd_per_hour", high=1e9)
        check_choice("kv_format", self.kv_format, FORMATS)

    @property
    def num_cached(self) -> int:
        """The number of prompt tokens that are read from the prefix cache.

        The last token of a prompt is always computed.
        """
        return min(int(self.prompt * self.cached), self.prompt - 1)

    @property
    def num_new(self) -> int:
        """The number of prompt tokens that are computed."""
        return self.prompt - self.num_cached

    @property
    def max_decoding_streams(self) -> int | None:
        """The number of streams at which prefill and decode fill every step's token budget.

        Each generated token comes with its share of the next request's prompt. None without a
        `token_budget`.
        """
        if self.token_budget is None:
            return None
        return max(1, self.token_budget * self.output // (self.num_new + self.output))

    def max_chunk(self, num_others: int) -> int | None:
        """Return the most prompt tokens of a step in which `num_others` streams decode.

        The result is None without a `token_budget`.
        """
        return None if self.token_budget is None else max(1, self.token_budget - num_others)

    def price_of(self, device: Device) -> float | None:
        """Return the price of a device in $ per hour: the question's, else the table's."""
        return device.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour

    @property
    def mean_context(self) -> int:
        """Mean number of tokens before a generated token: the prompt and half of the answer."""
        return self.prompt + self.output // 2


def context_shortfall(model_name: str, context_length: int, question: Question) -> str:
    """Explain that a model's context is too short for a question's requests; "" if it is not."""
    num_tokens = question.prompt + question.output
    if num_tokens <= context_length:
        return ""
    return (
        f"{model_name} cannot answer these requests: prompt and output have "
        f"{counted_noun(num_tokens, 'token', form=',')} together, and its context ends at "
        f"{context_length:,}. Shorten them by "
        f"{counted_noun(num_tokens - context_length, 'token', form=',')}, or choose a model with a "
        "longer context."
    )


def default_kv_format(*, is_here: bool) -> str:
    """Return the default KV format: the engine's on this machine, the usual one elsewhere."""
    if not is_here:
        return DEFAULT_FORMAT
    from twostroke.backends.create import auto_kv_format  # not needed for other devices

    return auto_kv_format(ComputeOptions())


def default_token_budget(*, is_here: bool) -> int:
    """Return the default token budget: the engine's on this machine, a common one elsewhere."""
    return BatchOptions().token_budget if is_here else _DEFAULT_TOKEN_BUDGET
