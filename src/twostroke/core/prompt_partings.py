"""Finds where a prompt parts from similar prompts, and which of the later tokens still repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.core.recorded_trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

_RUN_TOKENS: Final = 8  # compared runs of tokens, wherever they stand in a prompt
_SAMPLED_SHARE: Final = 8  # every eighth run is compared, chosen by its content
_MAX_RECENT: Final = 1 << 17  # remembered blocks and runs; twice as many at most
_MAX_TOKENS: Final = 1 << 16  # of a prompt; later tokens are not compared
_FACTOR: Final = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio


class Parting(Frozen):
    """The point at which a prompt parts from the earlier prompt that begins most like it.

    Attributes:
        position: number of tokens that both prompts share, which is also the index of the first
            different token.
        num_after: number of the prompt's tokens from `position` on, which the prefix cache cannot
            have.
        num_repeated: an estimate, from samples, of how many of these tokens also occur in earlier
            prompts of the tenant. The prefix cache could share them if the different tokens came
            after them.
        key: identifies the point: equal for all prompts of a tenant that part at the same point.
    """

    position: int
    num_after: int
    num_repeated: int
    key: int


class PartingFinder:
    """Compares each prompt with the earlier prompts of its tenant.

    The finder stores hashes and some tokens of recent prompts. Prompts of different tenants are not
    compared.

    Used to report to operators where the prefix cache misses.
    """

    def __init__(
        self,
        block_length: int = BLOCK_TOKENS,
        run_length: int = _RUN_TOKENS,
        max_length: int = _MAX_TOKENS,
    ) -> None:
        """Begin without prompts.

        Prompts are compared in blocks of `block_length`, and repeated text is found in samples of
        `run_length`. Only the first `max_length` of a prompt are compared. Lengths are in tokens,
        or in bytes of text.
        """
        self._block_length = block_length
        self._run_length = run_length
        self._max_length = max_length
        self._blocks: RecentValues[Sequence[int]] = RecentValues()  # the block after each beginning
        self._runs: RecentValues[bool] = RecentValues()

    def add(self, tenant: str, prompt: Sequence[int]) -> Parting | None:
        """Add a tenant's prompt, and return the point where it parts from earlier prompts.

        The prompt is a list of tokens, or bytes. Returns None if the tenant has no similar earlier
        prompt, or if fewer tokens than a block follow the point.
        """
        prompt = prompt[: self._max_length]
        length = self._block_length
        chain = hash((tenant,))  # not 0, which hash("") is
        position, key, is_shared = 0, 0, True
        for start in range(0, max(1, len(prompt) - length + 1), length):
            block = prompt[start : start + length]
            block = block if isinstance(block, bytes) else tuple(block)
            if is_shared:
                earlier_block = self._blocks.get(chain)
                is_shared = earlier_block == block
                if not is_shared:
                    key = chain if earlier_block is not None else 0
                    position = start + _num_equal(earlier_block or (), block)
            self._blocks.add(chain, block)
            chain = hash((chain, block))
        runs, starts = _sampled_runs(prompt, self._run_length, hash(tenant))
        parting = None
        num_after = len(prompt) - position
        if key and not is_shared and num_after >= length:
            runs_after = [run for run, start in zip(runs, starts, strict=True) if start >= position]
            num_known = sum(self._runs.get(run) is not None for run in runs_after)
            num_repeated = num_after * num_known // len(runs_after) if runs_after else 0
            parting = Parting(position, num_after, num_repeated, hash((key, position)))
        for run in runs:
            self._runs.add(run, True)  # noqa: FBT003 - a value, not a switch
        return parting


class PartingStatistics:
    """The prompts of one tenant that parted at one point.

    Attributes:
        position: the number of shared tokens.
        num_prompts: how many prompts parted here.
        num_after, num_repeated: sums of these fields of the prompts' `Parting`.
    """

    def __init__(self, position: int) -> None:
        """Begin without prompts."""
        self.position = position
        self.num_prompts = self.num_after = self.num_repeated = 0

    def add(self, parting: Parting) -> None:
        """Add a prompt that parted here."""
        self.num_prompts += 1
        self.num_after += parting.num_after
        self.num_repeated += parting.num_repeated


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two sequences."""
    for index, (token, other_token) in enumerate(zip(first, second, strict=False)):
        if token != other_token:
            return index
    return min(len(first), len(second))


def _sampled_runs(prompt: Sequence[int], length: int, salt: int) -> tuple[list[int], list[int]]:
    """Sample runs of `length` tokens from a prompt; return their hashes and their start indices.

    The hash of a run, made with `salt`, decides whether it is sampled, so equal runs are sampled in
    all prompts with the same salt.
    """
    if len(prompt) < length:
        return [], []
    # NumPy would take bytes for one value.
    values = np.frombuffer(prompt, np.uint8) if isinstance(prompt, bytes) else prompt
    tokens = np.array(values, dtype=np.uint64)
    factor = np.uint64(_FACTOR)
    hashes = np.full(len(tokens) - length + 1, np.uint64(salt & (1 << 64) - 1))
    for offset in range(length):
        hashes = hashes * factor + tokens[offset : offset + len(hashes)] + np.uint64(1)
        hashes ^= hashes >> np.uint64(29)
    starts = np.flatnonzero((hashes >> np.uint64(32)) % np.uint64(_SAMPLED_SHARE) == 0)
    return hashes[starts].tolist(), starts.tolist()


class RecentValues(Generic[T]):
    """A dictionary that forgets old keys, but remembers at least the newest `_MAX_RECENT` keys."""

    def __init__(self) -> None:
        """Begin without keys."""
        self._newest: dict[int, T] = {}
        self._older: dict[int, T] = {}

    def get(self, key: int) -> T | None:
        """Return the value of a key; None if it was never added, or is forgotten."""
        value = self._newest.get(key)
        return self._older.get(key) if value is None else value

    def add(self, key: int, value: T) -> None:
        """Add a key, or replace its value."""
        self._newest[key] = value
        if len(self._newest) > _MAX_RECENT:
            self._older, self._newest = self._newest, {}
