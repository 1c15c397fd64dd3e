"""Output files appear complete or not at all; devices, pipes and links are never replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from twostroke.core.errors import TwostrokeError
from twostroke.core.files import atomic_output


def write(out: Path, text: str) -> None:
    with atomic_output(out) as part:
        part.write_text(text)


def test_a_pipe_gets_the_bytes_and_stays_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()))
    reader.start()
    write(pipe, "abc")
    reader.join(10)
    assert texts == ["abc"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_descriptor_of_the_shell_gets_the_bytes_after_earlier_output(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb", buffering=0) as file:
        file.write(b"report\n")
        write(Path(f"/dev/fd/{file.fileno()}"), "a,b\n")
    assert (tmp_path / "out").read_text() == "report\na,b\n"


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_full_device_is_an_error_and_stays_a_device(tmp_path: Path) -> None:
    (link := tmp_path / "full.json").symlink_to("/dev/full")  # a fault replaces the link, not more
    with pytest.raises(TwostrokeError, match=r"cannot be written: No space left on device\.$"):
        write(link, "abc")
    assert link.is_char_device()


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (target := tmp_path / "folder" / "target").write_text("old")
    (link := tmp_path / "link").symlink_to("folder/target")
    write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_link_to_a_missing_file_creates_the_file(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to("target")
    write(link, "new")
    assert (tmp_path / "target").read_text() == "new"
    assert link.is_symlink()
