"""The public names of `twostroke.backends`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from twostroke import backends


@pytest.mark.parametrize("name", backends.__all__)
def test_every_public_name_resolves(name):
    assert getattr(backends, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Backends'"):
        backends.Backends  # noqa: B018 - the access is what is tested


def test_importing_the_package_imports_no_backend():
    code = "import sys, twostroke.backends; print([m for m in sys.modules if 'backends.' in m])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "[]"
