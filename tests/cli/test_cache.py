"""`twostroke cache`: lists, fills, verifies and cleans a folder of KV pages."""

from __future__ import annotations

import errno
import json
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from support.tiny import write_tiny_gguf
from twostroke.backends.create import auto_kv_format
from twostroke.core.options import ComputeOptions
from twostroke.engine.kv_offload.disk import stored_pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    """A folder with the pages of two prompts."""
    folder_path = tmp_path
    model = write_tiny_gguf(folder_path / "tiny.gguf")
    (folder_path / "system.txt").write_text("You answer in rhymes. " * 12)
    (folder_path / "prompt.txt").write_text("Once upon a time there was a world. " * 6)
    pages = folder_path / "pages"
    files = [
        "--system",
        str(folder_path / "system.txt"),
        "--prompt",
        str(folder_path / "prompt.txt"),
    ]
    done = cli("cache", "warm", str(model), str(pages), *files, "--backend", "cpu")
    assert done.code == 0, done.err
    assert "their pages are in" in done.out
    return pages


def test_ls_shows_what_warm_has_stored(cli: Cli, folder: Path) -> None:
    (kind,) = json.loads(cli("cache", "ls", str(folder), "--json").out)
    assert kind["num_pages"] == kind["kept"] > 5
    assert kind["model"] == "tiny"
    assert kind["kv_format"] == auto_kv_format(ComputeOptions())
    assert kind["used_s"] <= time.time() < kind["until_s"]
    text = cli("cache", "ls", str(folder)).out
    used, until = (
        datetime.fromtimestamp(kind[end], UTC).strftime("%Y-%m-%d %H:%M").split()
        for end in ("used_s", "until_s")
    )
    kept_pages = f"{kind['kept']} of {kind['num_pages']}"
    assert text.split()[-7:] == [*used, *kept_pages.split(), *until]
    assert "LAST USED (UTC)" in text
    assert text.splitlines()[0].split()[:3] == ["MODEL", "KV", "ARITHMETIC"]
    assert f"{kind['num_pages']}" in text


def test_verify_removes_what_is_damaged(cli: Cli, folder: Path) -> None:
    count = len(list(stored_pages(folder)))
    sound_result = cli("cache", "verify", str(folder))
    assert (sound_result.code, sound_result.out) == (0, f"Read {count} pages; 0 were damaged.\n")
    path = next(stored_pages(folder))
    path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    done = cli("cache", "verify", str(folder))
    assert done.code == 1
    assert f"Removed {path}: has a wrong checksum." in done.out
    assert not path.exists()


def test_verify_removes_a_pipe_and_a_link_without_opening_them(cli: Cli, folder: Path) -> None:
    pipe, link, *_ = stored_pages(folder)
    pipe.unlink()
    os.mkfifo(pipe)
    link.unlink()
    link.symlink_to("/dev/zero")
    done = cli("cache", "verify", str(folder))
    assert done.code == 1
    assert f"Removed {pipe}: cannot be read: it is a pipe, not a file." in done.out
    assert f"Removed {link}: cannot be read: it is a symbolic link, not a file." in done.out
    assert not os.path.lexists(pipe)
    assert not os.path.lexists(link)
    assert cli("cache", "ls", str(folder)).code == 0


def test_clean_removes_what_was_not_used(cli: Cli, folder: Path) -> None:
    paths = list(stored_pages(folder))
    os.utime(paths[0], (0, time.time() - 10 * 86_400))
    assert cli("cache", "clean", str(folder)).code == 2
    missing = cli("cache", "clean", str(folder), "--model", "other")
    assert "has no pages of 'other'; it has: tiny." in missing.err
    assert cli("cache", "clean", str(folder), "--days", "5").out.startswith("Removed 1 page,")
    assert len(list(stored_pages(folder))) == len(paths) - 1
    assert cli("cache", "clean", str(folder), "--all").out.startswith(f"Removed {len(paths) - 1}")
    assert not list(stored_pages(folder))


def test_folders_of_other_things_are_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("")
    for words in (("ls",), ("verify",), ("clean", "--all")):
        done = cli("cache", words[0], str(tmp_path), *words[1:])
        assert done.code == 2
        assert "is not the folder of a page cache." in done.err
    assert "There is no folder" in cli("cache", "ls", str(tmp_path / "none")).err
    assert (tmp_path / "photo.jpg").exists()


def test_what_cannot_be_removed_or_stored_is_said(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(type(folder), "unlink", refuse)
    done = cli("cache", "clean", str(folder), "--all")
    assert done.out.startswith("Removed 0 pages, 0 MB. Others cannot be removed: Read-only")
    assert done.code == 1
    (tmp_path / "new.txt").write_text("Another prompt that nobody has stored. " * 6)
    monkeypatch.setattr(os, "writev", refuse)
    names = str(tmp_path / "tiny.gguf"), str(folder), "--prompt", str(tmp_path / "new.txt")
    done = cli("cache", "warm", *names, "--backend", "cpu")
    assert done.out.endswith("tokens; their pages could not be written.\n")
    assert done.code == 1
