"""Random sampling cases: requests with all parameters, and rows of logits, also extreme ones."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.sampling.rows import RESULT, RowTable, read_results
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends.sampling.rows import Rows
    from twostroke.core.step import TokenLogprobs

KINDS = ("normal", "peaked", "flat", "ties", "equal", "holes", "nan", "infinite", "huge", "nothing")


class OneMask:
    """A grammar matcher that allows the same tokens at every position."""

    def __init__(self, flags: NDArray[np.bool_]) -> None:
        """Allow the tokens whose flags, of shape (vocab_size,), are set."""
        self.num_words = -(-flags.size // 32)
        padded = np.zeros(32 * self.num_words, bool)
        padded[: flags.size] = flags
        self.mask = np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)

    def masks(
        self,
        output: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        out: NDArray[np.uint32],
    ) -> None:
        del output, parents
        assert len(out) == 1 + len(drafts)
        out[:] = self.mask

    def count_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        del output
        return len(tokens)

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        del output
        return ()


def make_request(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    seed: int = 0,
    end_ids: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> Request:
    """Return a request that has generated `output`, and may continue with `allowed` tokens."""
    tokens, ends = [*prompt, *output], frozenset(end_ids)
    matcher = None if allowed is None else OneMask(allowed)
    return Request("r", tokens, len(prompt), params, seed, end_ids=ends, matcher=matcher)


def random_logits(
    rng: np.random.Generator, vocab_size: int, kind: str | None = None
) -> NDArray[np.float32]:
    """Return a row of logits (vocab_size,) of one of `KINDS`, mostly normal ones."""
    kind = kind or (str(rng.choice(KINDS)) if rng.random() < 0.6 else "normal")
    normal = rng.normal(size=vocab_size) * 3
    rows = {
        "normal": normal,
        "peaked": normal * 10,
        "flat": normal / 100,
        "ties": np.round(normal),
        "equal": np.full(vocab_size, normal[0]),
        "holes": np.where(rng.random(vocab_size) < 0.3, -np.inf, normal),
        "nan": np.where(rng.random(vocab_size) < 0.3, np.nan, normal),
        "infinite": np.where(rng.random(vocab_size) < 0.1, np.inf, normal),
        "huge": normal * 1e38,
        "nothing": np.where(rng.random(vocab_size) < 0.5, np.nan, -np.inf),
    }
    with np.errstate(over="ignore"):
        logits = rows[kind].astype(np.float32)
    if rng.random() < 0.2:
        logits[rng.integers(vocab_size)] = -0.0
    return logits


def random_request(rng: np.random.Generator, vocab_size: int) -> Request:
    """Return a request whose parameters have default, ordinary or extreme values."""

    def one_of(default: float, *others: float) -> float:
        return float(rng.choice(others)) if rng.random() < 0.4 else default

    def some_ids(max_ids: int) -> list[int]:
        ids = rng.integers(0, vocab_size + 2, size=rng.integers(0, max_ids + 1))  # some are unknown
        return [int(i) for i in ids]

    params = SamplingParams(
        temperature=one_of(1.0, 0.0, 0.0, 1e-40, 1e-3, 0.5, 2.0, 100.0),
        top_k=int(one_of(0, 1, 2, 5, 40, 64, 65, 1000, vocab_size, 2**31 - 1)),
        top_p=one_of(1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12),
        min_p=one_of(0.0, 1e-12, 0.01, 0.05, 0.5, 1.0),
        repetition_penalty=one_of(1.0, 0.5, 1.1, 100.0, 1e-300),
        presence_penalty=one_of(0.0, -2.0, 0.1, 2.0),
        frequency_penalty=one_of(0.0, -2.0, 0.3, 2.0),
        logit_bias={i: float(rng.choice([-100, -1.1, 0, 3.3, 100])) for i in some_ids(8)},
        min_tokens=int(one_of(0, 3, 1000)),
        logprobs=None if rng.random() < 0.5 else int(rng.integers(0, 21)),
    )
    seed = int(rng.integers(2**64, dtype=np.uint64)) - int(rng.integers(2)) * 2**63
    ends = some_ids(3)
    return make_request(
        params, some_ids(20), some_ids(20), seed, ends, random_mask(rng, vocab_size, ends)
    )


def random_mask(
    rng: np.random.Generator, vocab_size: int, ends: Sequence[int]
) -> NDArray[np.bool_] | None:
    """Return flags of allowed tokens, (vocab_size,), or None.

    Many, few, only an end token, or no token is allowed; often there is no mask.
    """
    kind = rng.choice(["no mask", "no mask", "many", "few", "an end", "none"])
    flags = np.zeros(vocab_size, bool)
    if kind == "no mask":
        return None
    if kind == "many":
        flags[:] = rng.random(vocab_size) < 0.9
        flags[: vocab_size // 2] |= rng.random() < 0.5  # whole words of a mask
    elif kind == "few":
        flags[rng.integers(0, vocab_size, size=5)] = True
    elif kind == "an end":
        flags[[token for token in ends if token < vocab_size][:1]] = True
    return flags


def sample_native(
    library: ctypes.CDLL, requests: Sequence[Request], logits: NDArray[np.float32]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Sample one token for each row of `logits` (rows, vocab_size), which must not change."""
    table = RowTable()
    rows = table.rows(requests)
    results = np.zeros(len(requests), RESULT)
    before = logits.copy()
    run_rows(library, rows, logits, results)
    np.testing.assert_array_equal(before.view(np.uint32), logits.view(np.uint32))
    return read_results(results, rows)


def run_rows(library: ctypes.CDLL, rows: Rows, logits: NDArray[np.float32], results: Rows) -> None:
    """Call the native sampler on arrays of `ROW`, of logits (rows, vocab_size) and of `RESULT`."""
    library.ts_sample_test(
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_void_p(logits.ctypes.data),
        ctypes.c_int64(logits.shape[0]),
        ctypes.c_int64(logits.shape[1]),
        ctypes.c_void_p(results.ctypes.data),
    )
