"""Workloads of a simulation: arrival times and lengths of requests, and shared prefixes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen, check_choice, check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.recorded_trace import ServerSettings

ARRIVALS: Final = ("poisson", "constant", "gamma")
MAX_REQUESTS: Final = 1_000_000
MAX_TOKENS: Final = 1 << 24  # of a prompt or an answer
_GOLDEN_RATIO: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio


class RequestArrival(Frozen):
    """A request of a simulated workload, which arrives `at_s` seconds after the start.

    Prompts that begin with equal `blocks` (ids of pieces of text, such as `hash_ids` in published
    traces) begin with equal tokens: each block stands for `block_size` tokens. Two prompts also
    share their first tokens, up to the smaller of their `num_shared`. `recorded_e2e_s` are the
    seconds until the last token, as a server with the workload's settings recorded them.
    """

    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    num_shared: int = 0
    recorded_e2e_s: float | None = None

    def tokens(self, number: int, vocab_size: int) -> array[int]:
        """Return the tokens of the request's prompt as an array of type "I".

        Tokens that are not shared with other prompts depend on `number`, the request's number in
        the workload. An array of 12,000 tokens takes a tenth of the time of a list.
        """
        size = self.block_size
        if len(self.blocks) * size >= self.num_prompt:
            ids = np.empty(self.num_prompt, np.uint64)
        else:
            ids = _unique_numbers(number + 1, self.num_prompt)
        if self.num_shared:
            ids[: self.num_shared] = _unique_numbers(0, self.num_shared)
        if self.blocks:
            starts = np.array(self.blocks, np.uint64)[:, None] * np.uint64(size)
            starts += np.uint64(1 << 62)
            shared = (starts + np.arange(size, dtype=np.uint64)).ravel()[: self.num_prompt]
            ids[: len(shared)] = shared
        ids *= _GOLDEN_RATIO
        ids ^= ids >> np.uint64(32)
        return array("I", (ids % np.uint64(vocab_size)).astype(np.uint32).tobytes())


class Workload(Frozen):
    """The requests of a simulation in the order of arrival.

    Attributes:
        name: where the requests come from.
        arrivals: the requests.
        notes: sentences about requests that are missing or were changed.
        settings: the settings of the server that recorded the requests; None if unknown.
    """

    name: str
    arrivals: tuple[RequestArrival, ...]
    notes: tuple[str, ...] = ()
    settings: ServerSettings | None = None

    @property
    def rate(self) -> float:
        """The mean number of requests of the workload that arrive per second."""
        seconds = self.arrivals[-1].at_s - self.arrivals[0].at_s
        return (len(self.arrivals) - 1) / seconds if seconds else 0.0

    def changed(self, *, speed: float = 1.0, scale: float = 1.0) -> Workload:
        """Return a workload with another rate of requests, and other lengths.

        Requests arrive `speed` times as fast, and all lengths in tokens are multiplied by `scale`.
        Blocks are scaled too, so that prompts still share the same prefixes. Recorded times are
        left out.
        """
        for field, value in (("speed", speed), ("scale", scale)):
            if not 1e-9 <= value <= 1e9:
                raise UsageError(f"must be from 1e-9 to 1e9, got {value}.", field=field)
        if (speed, scale) == (1.0, 1.0):
            return self
        longest = max(max(a.num_prompt, a.num_output) for a in self.arrivals) * scale
        if longest > MAX_TOKENS:
            reason = f"makes a text of {longest:,.0f} tokens: the limit is {MAX_TOKENS:,}."
            raise UsageError(reason, field="scale")
        arrivals = tuple(_scaled(arrival, speed, scale) for arrival in self.arrivals)
        return replace(self, arrivals=arrivals)

    def named(self, name: str) -> Workload:
        """Return the same workload with another name."""
        return replace(self, name=name)

    def first(self, count: int | None) -> Workload:
        """Return a workload of the first `count` requests; of all requests if `count` is None."""
        return self if count is None else replace(self, arrivals=self.arrivals[:count])

    def last(self, count: int) -> Workload:
        """Return a workload of the last `count` requests."""
        return replace(self, arrivals=sorted_workload(self.name, self.arrivals[-count:]).arrivals)


class SyntheticWorkload(Frozen):
    """The description of a random workload: its rate, arrivals and lengths.

    Attributes:
        rate: requests per second.
        arrivals: "poisson", "constant", or "gamma" with the coefficient of variation
            `burstiness` of the times between requests.
        count: number of requests.
        prompt, output: mean tokens of prompts and answers.
        spread: coefficient of variation of these lengths (log-normal); 0 for equal lengths.
        shared: number of tokens at the beginning that all prompts share.
    """

    rate: float
    arrivals: str = "poisson"
    burstiness: float = 3.0
    count: int = 1000
    prompt: int = 1024
    output: int = 256
    spread: float = 0.0
    shared: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a number of the workload is out of range."""
        check_range(self, "rate", "burstiness", high=1e6)
        check_choice("arrivals", self.arrivals, ARRIVALS)
        check_range(self, "count", low=1, high=MAX_REQUESTS)
        check_range(self, "prompt", low=1, high=MAX_TOKENS)
        check_range(self, "output", low=1, high=1 << 20)
        check_range(self, "spread", low=0, high=10)
        if not 0 <= self.shared < self.prompt:
            reason = f"must be at least 0 and below the prompt's {self.prompt}, got {self.shared}."
            raise UsageError(reason, field="shared")

    def load(self, seed: int) -> Workload:
        """Return a random workload of this description; equal seeds give equal workloads."""
        rng = np.random.default_rng(seed)
        at_s = np.cumsum(self._gaps(rng)) / self.rate
        lengths = zip(
            at_s.tolist(),
            self._lengths(rng, self.prompt),
            self._lengths(rng, self.output),
            strict=True,
        )
        name = f"{self.arrivals} arrivals"
        return Workload(
            name,
            tuple(
                RequestArrival(at, prompt, output, num_shared=min(self.shared, prompt - 1))
                for at, prompt, output in lengths
            ),
        )

    def _gaps(self, rng: np.random.Generator) -> np.ndarray:
        """Return the times between requests, as multiples of their mean: (count,)."""
        if self.arrivals == "constant":
            return np.ones(self.count)
        if self.arrivals == "poisson":
            return rng.exponential(size=self.count)
        shape = self.burstiness**-2
        return rng.gamma(shape, 1 / shape, self.count)

    def _lengths(self, rng: np.random.Generator, mean: int) -> list[int]:
        if not self.spread:
            return [mean] * self.count
        variance = np.log1p(self.spread**2)
        values = rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), self.count)
        lengths: list[int] = np.clip(np.rint(values), 1, MAX_TOKENS).astype(int).tolist()
        return lengths


def sorted_workload(
    name: str, arrivals: Sequence[RequestArrival], notes: tuple[str, ...] = ()
) -> Workload:
    """Return a workload of these requests in the order of arrival.

    The first request arrives at time 0.
    """
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_s)
    first_s = ordered[0].at_s
    shifted = tuple(replace(arrival, at_s=arrival.at_s - first_s) for arrival in ordered)
    return Workload(name, shifted, notes)


def _scaled(arrival: RequestArrival, speed: float, scale: float) -> RequestArrival:
    return RequestArrival(
        at_s=arrival.at_s / speed,
        num_prompt=max(1, round(arrival.num_prompt * scale)),
        num_output=max(1, round(arrival.num_output * scale)),
        blocks=arrival.blocks,
        block_size=max(1, round(arrival.block_size * scale)),
        num_shared=round(arrival.num_shared * scale),
    )


def _unique_numbers(owner: int, count: int) -> np.ndarray:
    """Return `count` numbers that belong to `owner` alone, to make tokens of one prompt."""
    return np.arange(count, dtype=np.uint64) + np.uint64(owner << 24)
