"""Choosing the formats of matrices: no other mix within the limit diverges less."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from twostroke.core.errors import UsageError
from twostroke.lab.compress.allocate import QuantizationGoal, formats_within_kl, formats_within_size
from twostroke.model.quant import FORMATS

MENU = ("IQ4_NL", "Q4_1", "Q5_1", "Q8_0")
SIZES = {f"blk.{i}.w": 256 * (1 + i % 3) for i in range(6)}


def measured(seed: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(seed)
    return {
        name: {fmt: float(rng.uniform(0.5, 20)) * 4 ** -FORMATS[fmt].bits_per_value for fmt in MENU}
        for name in SIZES
    }


def num_bytes(formats: dict[str, str]) -> float:
    return sum(FORMATS[fmt].num_bytes(SIZES[name]) for name, fmt in formats.items())


def total(kl: dict[str, dict[str, float]], formats: dict[str, str]) -> float:
    return sum(kl[name][fmt] for name, fmt in formats.items())


def test_no_other_mix_within_the_limit_is_better() -> None:
    for seed in range(3):
        kl = measured(seed)
        mixes = [dict(zip(SIZES, each, strict=True)) for each in product(MENU, repeat=len(SIZES))]
        limit = 5.3 * sum(SIZES.values()) / 8
        for goal, other in (
            (QuantizationGoal(bits=5.3), 0),
            (QuantizationGoal(num_bytes=int(limit) + 77), 77),
        ):
            best_mix = formats_within_size(kl, SIZES, goal, other)
            assert num_bytes(best_mix) <= limit
            best = min(total(kl, mix) for mix in mixes if num_bytes(mix) <= limit)
            assert total(kl, best_mix) <= best * 1.01
        limit = total(kl, dict.fromkeys(SIZES, "Q4_1"))
        best_mix = formats_within_kl(kl, SIZES, limit)
        assert total(kl, best_mix) <= limit
        assert num_bytes(best_mix) <= 1.01 * min(
            num_bytes(mix) for mix in mixes if total(kl, mix) <= limit
        )


def test_a_goal_that_no_mix_reaches_names_the_nearest() -> None:
    kl = measured(0)
    with pytest.raises(UsageError, match=r"is less .* the smallest has 4\.50"):
        formats_within_size(kl, SIZES, QuantizationGoal(bits=4), 0)
    with pytest.raises(UsageError, match="the smallest takes 2 MB"):
        formats_within_size(kl, SIZES, QuantizationGoal(num_bytes=1_000_000), 2_000_000)
    with pytest.raises(UsageError, match="the nearest has some"):
        formats_within_kl(kl, SIZES, 1e-9)
