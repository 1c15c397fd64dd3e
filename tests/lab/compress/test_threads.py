"""OpenBLAS uses one thread while the threads of `own_threads` compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.lab.compress import threads

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_libraries_are_found_in_folders_with_spaces_and_left_out_when_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "with a space").mkdir()
    (library := folder / "libscipy_openblas64_.so").touch()
    deleted = tmp_path / "libopenblas.so (deleted)"
    maps = tmp_path / "maps"
    mapped = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42                 "
    maps.write_text(f"{mapped}{library}\n{mapped}{library}\n{mapped}{deleted}\n{mapped}[heap]\n")
    monkeypatch.setattr(threads, "_MEMORY_MAPS", maps)
    assert threads._library_paths() == [str(library)]
