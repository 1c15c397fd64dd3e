"""`twostroke train-heads`, to the point where PyTorch is needed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from support.tiny import write_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from support.commands import Cli


def test_without_pytorch_it_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("twostroke.train.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    ran = cli("train-heads", str(path), "-o", str(tmp_path / "heads"))
    assert ran.code == 8
    assert re.search(r"train-heads needs PyTorch: pip install '.+\[train\]'\.", ran.err)
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kind", "hydra"), "hydra"),
        (("--depth", "99"), "--depth must be from 1 to 16, got 99"),
        (("--tokens", "0"), "--tokens must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(
    cli: Cli, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    ran = cli("train-heads", "tiny", "-o", str(tmp_path / "heads"), *options)
    assert ran.code == 2
    assert message in ran.err
