"""`twostroke.fleet` resolves its public names at their first use."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import twostroke.fleet


def test_every_public_name_is_resolved() -> None:
    for name in twostroke.fleet.__all__:
        assert getattr(twostroke.fleet, name).__name__ == name
    assert dir(twostroke.fleet) == sorted(twostroke.fleet.__all__)


def test_no_public_name_is_a_modules_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(twostroke.fleet.__path__)}
    assert modules.isdisjoint(twostroke.fleet.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = twostroke.fleet.nothing


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, twostroke.fleet; print(any('fleet.' in name for name in sys.modules))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "False"
