"""Live comparisons with PyTorch and transformers: marked, and collected only where both are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as `oracle`, so that none can be forgotten."""
    oracle_folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(oracle_folder):
            item.add_marker(pytest.mark.oracle)
