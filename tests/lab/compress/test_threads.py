"""The libraries whose own threads rest while ours work."""

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
    (there := folder / "libscipy_openblas64_.so").touch()
    gone = tmp_path / "libopenblas.so (deleted)"
    maps = tmp_path / "maps"
    mapped = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42                 "
    maps.write_text(f"{mapped}{there}\n{mapped}{there}\n{mapped}{gone}\n{mapped}[heap]\n")
    monkeypatch.setattr(threads, "_MEMORY_MAPS", maps)
    assert threads._library_paths() == [str(there)]
