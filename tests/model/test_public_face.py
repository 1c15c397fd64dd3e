"""The public names of `twostroke.model`."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import twostroke.model
from support.tiny import tiny_of, write_tiny_folder
from twostroke.model import LoadedModel, Program, build_program, load, loader

if TYPE_CHECKING:
    from pathlib import Path


def test_every_public_name_resolves() -> None:
    for name in twostroke.model.__all__:
        assert getattr(twostroke.model, name).__name__ == name
    assert dir(twostroke.model) == sorted(twostroke.model.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Loader'"):
        twostroke.model.Loader  # noqa: B018 - the access is tested


def test_no_public_name_is_also_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(twostroke.model.__path__)}
    assert modules.isdisjoint(twostroke.model.__all__)
    assert load is loader.load


def test_a_model_is_loaded_and_built_by_public_names(tmp_path: Path) -> None:
    model = load(str(write_tiny_folder(tmp_path / "model", tiny_of("llama"))))
    program = build_program(model.spec)
    assert isinstance(model, LoadedModel)
    assert isinstance(program, Program)
    assert program.weight_shapes.keys() == model.tensors.keys()


def test_importing_the_package_imports_none_of_its_modules() -> None:
    code = "import sys, twostroke.model; print([m for m in sys.modules if 'model.' in m])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "[]"
