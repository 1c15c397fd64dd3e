"""The choice of formats: no other mix within the limit is better."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from twostroke.compress.allocate import Goal, Menu, within_kl, within_size
from twostroke.core.errors import UsageError
from twostroke.quant import FORMATS

MENU = ("IQ4_NL", "Q4_1", "Q5_1", "Q8_0")
SIZES = {f"blk.{i}.w": 256 * (1 + i % 3) for i in range(6)}


def menu(other_bytes: int) -> Menu:
    sizes = {
        name: {fmt: float(FORMATS[fmt].num_bytes(count)) for fmt in MENU}
        for name, count in SIZES.items()
    }
    return Menu(sizes, sum(SIZES.values()), other_bytes)


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
        for goal, other in ((Goal(bits=5.3), 0), (Goal(num_bytes=int(limit) + 77), 77)):
            found = within_size(kl, menu(other), menu(other).limit(goal))
            assert num_bytes(found) <= limit
            best = min(total(kl, mix) for mix in mixes if num_bytes(mix) <= limit)
            assert total(kl, found) <= best * 1.01
        limit = total(kl, dict.fromkeys(SIZES, "Q4_1"))
        found = within_kl(kl, menu(0), limit)
        assert total(kl, found) <= limit
        assert num_bytes(found) <= 1.01 * min(
            num_bytes(mix) for mix in mixes if total(kl, mix) <= limit
        )


def test_a_goal_that_no_mix_reaches_names_what_mixes_reach() -> None:
    with pytest.raises(UsageError, match=r"must be at least 4\.5: .* from 4\.50 to 8\.50 bits"):
        menu(0).limit(Goal(bits=4.49))
    menu(0).limit(Goal(bits=4.5))
    with pytest.raises(UsageError, match=r"must be at least 3 MB: .* from 3 MB to 3 MB"):
        menu(2_000_000).limit(Goal(num_bytes=2_000_000))
    menu(2_000_000).limit(Goal(num_bytes=3_000_000))  # what was named is enough
    with pytest.raises(UsageError, match="the nearest mix of formats has a KL of some"):
        within_kl(measured(0), menu(0), 1e-9)
