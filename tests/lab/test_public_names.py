"""The public names of `twostroke.lab`."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from twostroke import lab

NAMES = ("compare", "distill", "plan", "profile", "quantize", "simulate", "train_heads")
NEED_PYTORCH = {"distill", "train_heads"}


def test_the_public_names_are_listed() -> None:
    assert dir(lab) == sorted(NAMES) == sorted(lab.__all__)
    assert not {module.name for module in pkgutil.iter_modules(lab.__path__)} & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_is_a_function(name: str) -> None:
    if name in NEED_PYTORCH:
        pytest.importorskip("torch", reason="the extra [train] is not installed")
    assert callable(getattr(lab, name))


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        lab.plans  # noqa: B018


def test_importing_the_package_imports_none_of_its_parts() -> None:
    code = "import sys, twostroke.lab; print([m for m in sys.modules if 'twostroke.lab.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_names_can_be_imported_from_the_package() -> None:
    from twostroke.lab import compare, plan, profile, quantize, simulate

    assert plan.__name__ == "make_plan"
    assert compare.__name__ == "compare_models"
    assert (profile.__name__, simulate.__name__) == ("profile", "simulate")
    assert quantize.__name__ == "quantize"
