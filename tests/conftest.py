"""Fixtures that every room's tests share: where the real model is, and what to do without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from pathlib import Path

# Two busy cores make any deadline a coin toss; the database of failures stays per machine.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-model`: a missing model fails its tests instead of skipping them."""
    parser.addoption(
        "--require-model",
        action="store_true",
        help="fail, not skip, when the SmolLM2 file is not in the cache (`make test` sets this)",
    )
