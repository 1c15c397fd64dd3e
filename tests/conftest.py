"""What every room's tests share: where the real model is, and what to do without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import pytest

from twostroke.core.errors import ModelNotFoundError
from twostroke.weights import resolve

if TYPE_CHECKING:
    from pathlib import Path

# Two busy cores make any deadline a coin toss.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-model`: a missing model fails its tests instead of skipping them."""
    parser.addoption(
        "--require-model",
        action="store_true",
        help="fail, not skip, when the SmolLM2 file is not in the cache (`make test` sets this)",
    )


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """The real SmolLM2-135M-Instruct file in the cache; skips, or fails, where it is missing."""
    try:
        return resolve("smollm2")
    except ModelNotFoundError as error:
        reason = f"needs the real model: {error}"
        if request.config.getoption("--require-model"):
            pytest.fail(reason)
        pytest.skip(reason)
