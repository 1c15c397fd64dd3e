"""Costs of drafts that tests choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from twostroke.engine.speculation import DraftCost


def cheap_up_to(count: int, price: DraftCost) -> DraftCost:
    """Return a cost with which `count` drafts of a step cost nothing, and one more too much.

    Steps are so long that no probability is too small for the first `count` drafts.
    """
    seconds = 1e9, 1e14
    return replace(
        price,
        row_chance=0.0,
        tokens_per_s=1e-12,
        max_drafts=8,
        seconds=lambda num: seconds[num > count],
    )
