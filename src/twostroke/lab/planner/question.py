"""What a plan is asked: the load of a request, the way to run it, and what it must reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError, nearest
from twostroke.core.frozen import Frozen, check_range
from twostroke.core.options import BatchOptions, ComputeOptions
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS

if TYPE_CHECKING:
    from twostroke.lab.planner.devices import Device

MEMORY_SHARE = 0.9  # of a device's memory; the rest is for values of a step and the runtime
MAX_DEVICES = 1024
LEAST_SHARE = 0.001  # of arithmetic and bandwidth: any engine reaches more
_BUDGET_ELSEWHERE = 2048  # tokens of a step on devices other than this machine
MAX_USERS = 100_000
DEFAULT_THINK_S = 20.0  # between an answer and the user's next request
MOST_UNASKED = 256  # streams without an objective of TPOT: as many as an engine runs by default


class Question(Frozen):
    """A load and how it is run.

    Attributes:
        prompt: tokens of a request's prompt.
        output: tokens of its answer.
        cached: the share of the prompt that the prefix cache has, from 0 to 1.
        count: devices that divide each layer.
        kv_format: of keys and values, a key of `cache.FORMATS`.
        streams: requests that decode together; None for as many as fit and meet the objectives,
            and without one of TPOT at most `MOST_UNASKED`.
        ttft_s, tpot_s: objectives in seconds, None for none.
        mfu, mbu: the shares of arithmetic and bandwidth that an engine reaches; 1 gives limits that
            no engine passes.
        usd_per_hour: the price of a device, None for that of the table.
        token_budget: the most tokens that a step computes. What the streams leave of it goes to
            prompts, which are read in chunks; None reads each prompt in one step.
        users: people or programs who each ask, wait for the answer, think, and ask again; None for
            a plan without them.
        think_s: seconds between a user's answer and their next request.
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
        """Refuse what is out of range."""
        for field in ("prompt", "output", "token_budget", "count", "streams", "users"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise UsageError(f"must be a whole number, got {value!r}.", field=field)
        check_range(self, "prompt", "output", "token_budget", least=1, most=1 << 27)
        check_range(self, "count", least=1, most=MAX_DEVICES)
        check_range(self, "streams", least=1, most=1 << 20)
        check_range(self, "users", least=1, most=MAX_USERS)
        check_range(self, "think_s", least=0, most=1e6)
        if not 0 <= self.cached < 1:
            raise UsageError(f"must be at least 0 and below 1, got {self.cached}.", field="cached")
        check_range(self, "mfu", "mbu", least=LEAST_SHARE, most=1)
        check_range(self, "ttft_s", "tpot_s", "usd_per_hour", most=1e9)
        if self.kv_format not in FORMATS:
            reason = f"must be one of {', '.join(FORMATS)}, got '{{value}}'."
            hint = nearest(self.kv_format, FORMATS)
            raise UsageError(f"{reason}{hint}", field="kv_format", value=self.kv_format)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that need no computing; the last one always does."""
        return min(int(self.prompt * self.cached), self.prompt - 1)

    @property
    def num_new(self) -> int:
        """Tokens of the prompt that are computed."""
        return self.prompt - self.num_cached

    @property
    def most_decoding(self) -> int | None:
        """Streams with which steps are full: each of its tokens calls for tokens of a prompt.

        None without a `token_budget`.
        """
        if self.token_budget is None:
            return None
        return max(1, self.token_budget * self.output // (self.num_new + self.output))

    def chunk(self, others: int) -> int | None:
        """Return the most tokens of a prompt in a step that gives `others` a token each."""
        return None if self.token_budget is None else max(1, self.token_budget - others)

    def price_of(self, device: Device) -> float | None:
        """Return $ an hour of a device: as asked, or that of the table."""
        return device.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour

    @property
    def mean_context(self) -> int:
        """Tokens before a generated one, half of the answer included."""
        return self.prompt + self.output // 2


def context_shortfall(model_name: str, context_length: int, question: Question) -> str:
    """Explain that a model's context cannot hold the requests; empty if it can."""
    num_tokens = question.prompt + question.output
    if num_tokens <= context_length:
        return ""
    return (
        f"{model_name} cannot answer these requests: prompt and output have {num_tokens:,} tokens "
        f"together, and its context ends at {context_length:,}. Shorten them by "
        f"{num_tokens - context_length:,} tokens, or choose a model with a longer context."
    )


def usual_kv_format(*, is_here: bool) -> str:
    """Return how keys and values are stored: as engines do by default here, or as is usual."""
    if not is_here:
        return DEFAULT_FORMAT
    from twostroke.backends.create import auto_kv_format  # other devices need no kernels

    return auto_kv_format(ComputeOptions())


def usual_budget(*, is_here: bool) -> int:
    """Return the tokens of a step: as engines have by default here, and as is usual elsewhere."""
    return BatchOptions().token_budget if is_here else _BUDGET_ELSEWHERE
