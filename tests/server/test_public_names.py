"""The public names of `twostroke.server`."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import twostroke.server


def test_every_public_name_resolves() -> None:
    for name in twostroke.server.__all__:
        assert getattr(twostroke.server, name).__name__ == name
    assert dir(twostroke.server) == sorted(twostroke.server.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"twostroke\.server.*'listen'"):
        getattr(twostroke.server, "listen")  # noqa: B009 - mypy knows that there is none


def test_no_public_name_is_also_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(twostroke.server.__path__)}
    assert modules.isdisjoint(twostroke.server.__all__)


def test_importing_the_package_imports_no_http_framework() -> None:
    check = "import sys, twostroke.server; print('starlette' in sys.modules)"
    command = [sys.executable, "-c", check]
    assert subprocess.check_output(command, text=True).strip() == "False"
