"""The public names of `twostroke.engine`."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import twostroke.engine


def test_every_public_name_resolves() -> None:
    for name in twostroke.engine.__all__:
        assert getattr(twostroke.engine, name).__name__ == name
    assert dir(twostroke.engine) == sorted(twostroke.engine.__all__)


def test_no_public_name_is_also_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(twostroke.engine.__path__)}
    assert modules.isdisjoint(twostroke.engine.__all__)


def test_build_stays_a_function_after_its_module_is_imported() -> None:
    module = importlib.import_module("twostroke.engine.engine")
    assert twostroke.engine.build is module.build


def test_the_entry_of_the_engine_process_imports_no_server() -> None:
    check = (
        "import sys, twostroke.engine.process.main;"
        "print([name for name in sys.modules if name.split('.')[0] == 'starlette'"
        " or name.startswith('twostroke.server')])"
    )
    command = [sys.executable, "-c", check]
    assert subprocess.check_output(command, text=True).strip() == "[]"
