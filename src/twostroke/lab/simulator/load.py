"""The load of a simulation: when requests arrive, how long they are, and what they share."""

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
MOST_REQUESTS: Final = 1_000_000
_MOST_TOKENS: Final = 1 << 24  # of a prompt or an answer
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


class RequestArrival(Frozen):
    """A request that arrives `at_s` seconds after the start.

    Prompts with equal `blocks` at their beginning have equal tokens there, `block_size` for each.
    Prompts share their first `num_shared` tokens with all others that have some.
    """

    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    num_shared: int = 0

    def tokens(self, number: int, vocab_size: int) -> array[int]:
        """Return the prompt's tokens (type "I"); those that it does not share follow from `number`.

        An array of 12,000 tokens is made in a tenth of the time of a list.
        """
        size = self.block_size
        if len(self.blocks) * size >= self.num_prompt:
            ids = np.empty(self.num_prompt, np.uint64)
        else:
            ids = _numbers(number + 1, self.num_prompt)
        if self.num_shared:
            ids[: self.num_shared] = _numbers(0, self.num_shared)
        if self.blocks:
            starts = np.array(self.blocks, np.uint64)[:, None] * np.uint64(size)
            starts += np.uint64(1 << 62)
            shared = (starts + np.arange(size, dtype=np.uint64)).ravel()[: self.num_prompt]
            ids[: len(shared)] = shared
        ids *= _GOLDEN
        ids ^= ids >> np.uint64(32)
        return array("I", (ids % np.uint64(vocab_size)).astype(np.uint32).tobytes())


class Workload(Frozen):
    """Requests in the order of their arrival; `name` says where they come from."""

    name: str
    arrivals: tuple[RequestArrival, ...]

    @property
    def rate(self) -> float:
        """Requests a second."""
        seconds = self.arrivals[-1].at_s - self.arrivals[0].at_s
        return (len(self.arrivals) - 1) / seconds if seconds else 0.0

    def changed(self, *, speed: float = 1.0, scale: float = 1.0) -> Workload:
        """Return the load `speed` times as fast, all lengths multiplied by `scale`.

        Blocks are scaled too, so that prompts share what they shared.
        """
        for field, value in (("speed", speed), ("scale", scale)):
            if not 1e-9 <= value <= 1e9:
                raise UsageError(f"must be from 1e-9 to 1e9, got {value}.", field=field)
        if (speed, scale) == (1.0, 1.0):
            return self
        longest = max(max(one.num_prompt, one.num_output) for one in self.arrivals) * scale
        if longest > _MOST_TOKENS:
            reason = f"makes a text of {longest:,.0f} tokens: at most {_MOST_TOKENS:,} can be."
            raise UsageError(reason, field="scale")
        return Workload(self.name, tuple(_changed(one, speed, scale) for one in self.arrivals))

    def first(self, count: int | None) -> Workload:
        """Return the first `count` requests."""
        return self if count is None else Workload(self.name, self.arrivals[:count])


class Synthetic(Frozen):
    """A load made by chance.

    Attributes:
        rate: requests a second.
        arrivals: "poisson", "constant", or "gamma", whose times between requests have the
            coefficient of variation `burstiness`.
        count: how many requests.
        prompt, output: mean tokens of prompts and answers.
        spread: the coefficient of variation of these lengths (log-normal); 0 for equal lengths.
        shared: tokens at the beginning of all prompts that are the same.
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
        """Refuse what is out of range."""
        check_range(self, "rate", "burstiness", high=1e6)
        if self.arrivals not in ARRIVALS:
            reason = f"must be one of {', '.join(ARRIVALS)}, got '{{value}}'."
            hint = nearest(self.arrivals, ARRIVALS)
            raise UsageError(f"{reason}{hint}", field="arrivals", value=self.arrivals)
        check_range(self, "count", low=1, high=MOST_REQUESTS)
        check_range(self, "prompt", low=1, high=_MOST_TOKENS)
        check_range(self, "output", low=1, high=1 << 20)
        check_range(self, "spread", low=0, high=10)
        if not 0 <= self.shared < self.prompt:
            reason = f"must be at least 0 and below the prompt's {self.prompt}, got {self.shared}."
            raise UsageError(reason, field="shared")

    def load(self, seed: int) -> Workload:
        """Return the requests; the same seed gives the same ones."""
        chance = np.random.default_rng(seed)
        at_s = np.cumsum(self._gaps(chance)) / self.rate
        lengths = zip(
            at_s.tolist(),
            self._lengths(chance, self.prompt),
            self._lengths(chance, self.output),
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

    def _gaps(self, chance: np.random.Generator) -> np.ndarray:
        if self.arrivals == "constant":
            return np.ones(self.count)
        if self.arrivals == "poisson":
            return chance.exponential(size=self.count)
        shape = self.burstiness**-2
        return chance.gamma(shape, 1 / shape, self.count)

    def _lengths(self, chance: np.random.Generator, mean: int) -> list[int]:
        if not self.spread:
            return [mean] * self.count
        variance = np.log1p(self.spread**2)
        found = chance.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), self.count)
        lengths: list[int] = np.clip(np.rint(found), 1, _MOST_TOKENS).astype(int).tolist()
        return lengths


def in_order(name: str, arrivals: Sequence[RequestArrival]) -> Workload:
    """Return a load of these requests, whose first arrives at 0."""
    ordered = sorted(arrivals, key=lambda one: one.at_s)
    first_s = ordered[0].at_s
    return Workload(name, tuple(replace(one, at_s=one.at_s - first_s) for one in ordered))


def _changed(one: RequestArrival, speed: float, scale: float) -> RequestArrival:
    return RequestArrival(
        one.at_s / speed,
        max(1, round(one.num_prompt * scale)),
        max(1, round(one.num_output * scale)),
        one.blocks,
        max(1, round(one.block_size * scale)),
        round(one.num_shared * scale),
    )


def _numbers(owner: int, count: int) -> np.ndarray:
    """Return numbers that no other owner has."""
    return np.arange(count, dtype=np.uint64) + np.uint64(owner << 24)
