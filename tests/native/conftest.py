"""What the tests of the kernels share: each level's library, and chance that repeats itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.native import NEEDS, load_level

if TYPE_CHECKING:
    import ctypes


@pytest.fixture(params=list(NEEDS))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """One level's library; the test runs once on each that can run here."""
    library = load_level(request.param)
    if request.param == "amx":
        assert library.ts_linear_request_tiles() == 1
    return library


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(7)
