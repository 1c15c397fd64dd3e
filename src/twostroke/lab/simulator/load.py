"""Workloads of a simulation: arrival times and lengths of requests, and shared prefixes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import UsageError, nearest
from twostroke.core.frozen import Frozen, check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

ARRIVALS: Final = ("poisson", "constant", "gamma")
MAX_REQUESTS: Final = 1_000_000
_MAX_TOKENS: Final = 1 << 24  # of a prompt or an answer
_GOLDEN_RATIO: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio


class RequestArrival(Frozen):
    """A request of a simulated workload, which arrives `at_s` seconds after the start.

    Prompts that begin with equal `blocks` begin with equal tokens, `block_size` for each block. All
    prompts with a `num_shared` share their first tokens, up to the smaller `num_shared`.
    """

    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    num_shared: int = 0

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
    """The requests of a simulation in the order of arrival; `name` says where they come from."""

    name: str
    arrivals: tuple[RequestArrival, ...]

    @property
    def rate(self) -> float:
        """The mean number of requests of the workload that arrive per second."""
        seconds = self.arrivals[-1].at_s - self.arrivals[0].at_s
        return (len(self.arrivals) - 1) / seconds if seconds else 0.0

    def changed(self, *, speed: float = 1.0, scale: float = 1.0) -> Workload:
        """Return a workload with more or fewer requests per second, and longer or shorter ones.

        It is `speed` times as fast, and all lengths in tokens are multiplied by `scale`. Blocks are
        scaled too, so that prompts still share the same prefixes.
        """
        for field, value in (("speed", speed), ("scale", scale)):
            if not 1e-9 <= value <= 1e9:
                raise UsageError(f"must be from 1e-9 to 1e9, got {value}.", field=field)
        if (speed, scale) == (1.0, 1.0):
            return self
        longest = max(max(a.num_prompt, a.num_output) for a in self.arrivals) * scale
        if longest > _MAX_TOKENS:
            reason = f"makes a text of {longest:,.0f} tokens: the limit is {_MAX_TOKENS:,}."
            raise UsageError(reason, field="scale")
        arrivals = tuple(_scaled(arrival, speed, scale) for arrival in self.arrivals)
        return Workload(self.name, arrivals)

    def named(self, name: str) -> Workload:
        """Return the same workload with another name."""
        return Workload(name, self.arrivals)

    def first(self, count: int | None) -> Workload:
        """Return a workload of the first `count` requests; of all requests if `count` is None."""
        return self if count is None else Workload(self.name, self.arrivals[:count])


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
        if self.arrivals not in ARRIVALS:
            reason = f"must be one of {', '.join(ARRIVALS)}, got '{{value}}'."
            hint = nearest(self.arrivals, ARRIVALS)
            raise UsageError(f"{reason}{hint}", field="arrivals", value=self.arrivals)
        check_range(self, "count", low=1, high=MAX_REQUESTS)
        check_range(self, "prompt", low=1, high=_MAX_TOKENS)
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
        lengths: list[int] = np.clip(np.rint(values), 1, _MAX_TOKENS).astype(int).tolist()
        return lengths


def sorted_workload(name: str, arrivals: Sequence[RequestArrival]) -> Workload:
    """Return a workload of these requests in the order of arrival.

    The first request arrives at time 0.
    """
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_s)
    first_s = ordered[0].at_s
    shifted = tuple(replace(arrival, at_s=arrival.at_s - first_s) for arrival in ordered)
    return Workload(name, shifted)


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
